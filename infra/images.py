"""Digests of container images in the manifests: what docker says that the registry has; a digest is never made up."""

from __future__ import annotations

import gzip
import io
import re
import subprocess
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

# What a release has of infra: the files that start something, and what they refer to.
RELEASED = ("docker/compose.yaml", "kubernetes/*.yaml", "kubernetes/*/*.yaml", "units/kubernetes.yaml", "pools/*.json",
            "postgres/roles.sql", "prefect.yaml", "automations.yaml")  # fmt: skip
# Its images, for accelerators, are built apart: a release has it only where one of them is named.
WITH_OWN_IMAGES = "prefect.devices.yaml"
_PINNED = (*RELEASED, WITH_OWN_IMAGES, "docker/Dockerfile")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_IMAGE = re.compile(r'\bimage"?:\s*(?:\{\s*"default":\s*)?"?([^\s",{}]+)')
_BASE = re.compile(r"^(?:ARG \w+=|FROM )([\w./-]+:[\w.-]+)", re.MULTILINE)  # of a Dockerfile


def digests_of(words: Iterable[str]) -> dict[str, str]:
    """Reference in the manifests → the image with its digest, for words such as `postgres:16=postgres:16`.

    Raises:
        SystemExit: a word is not of this form, or docker names no digest.
    """
    pins: dict[str, str] = {}
    for word in words:
        reference, separator, image = word.partition("=")
        if not (reference and separator and image):
            raise SystemExit(
                f"invalid image {word!r}: expected REFERENCE=IMAGE, for example postgres:16=postgres:16"
            )
        pins[reference] = f"{image.partition('@')[0]}@{_digest_of(image)}"
    return pins


def _digest_of(image: str) -> str:
    command = ["docker", "buildx", "imagetools", "inspect", "--format", "{{.Manifest.Digest}}", image]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise SystemExit("docker not found: it names the digests of images; install it with buildx") from None
    digest = done.stdout.strip()
    if done.returncode or not _DIGEST.fullmatch(digest):
        raise SystemExit(f"docker names no digest of {image}: {done.stderr.strip() or digest!r}")
    return digest


def pin(text: str, pins: Mapping[str, str]) -> str:
    """The text of a manifest, a pool or a Dockerfile with the digests of its images."""
    for reference, pinned in pins.items():
        pattern = rf'(image"?: *|"default": "|^FROM |^ARG \w+=){re.escape(reference)}(?![\w.@-])'
        text = re.sub(pattern, rf"\g<1>{pinned}", text, flags=re.MULTILINE)
    return text


def unpinned(text: str) -> set[str]:
    """The images of a manifest or a pool that have no digest."""
    return {image for image in _IMAGE.findall(text) if "@sha256:" not in image}


def pinned_files(infra: Path, pins: Mapping[str, str]) -> Iterator[tuple[Path, str]]:
    """Each file of a checkout that the pins change, with its new text.

    Raises:
        SystemExit: no file refers to one of the images; the images that files refer to are named.
    """
    texts = {path: path.read_text("utf-8") for pattern in _PINNED for path in sorted(infra.glob(pattern))}
    _require_known(pins, texts)
    yield from ((path, pin(text, pins)) for path, text in texts.items() if pin(text, pins) != text)


def _require_known(pins: Mapping[str, str], texts: Mapping[Path, str]) -> None:
    for reference in pins:
        if all(pin(text, {reference: "x"}) == text for text in texts.values()):
            known = {image for text in texts.values() for image in (*unpinned(text), *_BASE.findall(text))}
            raise SystemExit(
                f"no file refers to the image {reference}; they refer to {', '.join(sorted(known))}"
            )


def released(infra: Path, pins: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Name and pinned text of each file of a release.

    Raises:
        SystemExit: an image would have no digest, with its file; or no file of the release refers to an image.
    """
    own = infra / WITH_OWN_IMAGES
    files = [path for pattern in RELEASED for path in infra.glob(pattern)]
    if unpinned(own.read_text("utf-8")) & set(pins):
        files.append(own)
    _require_known(pins, {file: file.read_text("utf-8") for file in files})
    for file in sorted(files):
        name, text = str(file.relative_to(infra)), pin(file.read_text("utf-8"), pins)
        left = sorted(unpinned(text))
        if left:
            raise SystemExit(
                f"infra/{name}: no digest for {', '.join(left)}; name it with --images {left[0]}=IMAGE"
            )
        yield name, text


def archive(files: Iterable[tuple[str, str]], folder: str, time: int) -> bytes:
    """A .tar.gz of files below a folder, with the same bytes for the same files and time."""
    buffer = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=buffer, mode="wb", mtime=time) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as target,
    ):
        for name, text in files:
            info, data = tarfile.TarInfo(f"{folder}/{name}"), text.encode()
            info.size, info.mtime, info.mode = len(data), time, 0o644
            target.addfile(info, io.BytesIO(data))
    return buffer.getvalue()
