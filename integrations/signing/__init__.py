"""Signing: an in-toto statement over every file of a checkpoint, compatible with OpenSSF model signing.

`model_signing verify key CHECKPOINT --signature FILE --public_key PEM` accepts the signatures of `sign`, and `verify`
accepts those of `model_signing sign key`. The signature of a folder is its file `wherry.sig`, that of a single file is
`<file>.wherry.sig` next to it; it is not part of the checkpoint, so digests and fingerprints do not change. `sign`
hashes the files as they are on disk, in one pass, after checking that they match the sidecar.

On-disk facts (model_signing 1.1.1, DSSE 1.0, in-toto Statement v1, Sigstore bundle 0.3):
- The file is a Sigstore bundle in JSON whose DSSE envelope holds the statement; `hint` is the SHA-256 of the public
  key's PEM text. There is no transparency log.
- The predicate `https://model_signing/signature/v1.0` lists each file with its hash, sorted by name; a model that is
  one file is the resource `.`. `hash_type` names the algorithm, `sha256` or `blake3` here. The subject's digest is the
  SHA-256 over these hashes in that order. Verifiers ignore further members of the predicate; wherry's own member,
  `wherry`, binds the checkpoint's digests.
- A verifier takes every file that `ignore_paths` does not name, so an added file is detected too.
- Keys are P-256, P-384 or P-521, with SHA-256, SHA-384 or SHA-512.

A key that is encrypted needs `WHERRY_SIGNING_PASSWORD`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import field
from functools import partial
from pathlib import Path
from typing import Any

from wherry.core import threads
from wherry.core.digest import SHA256, new_hash
from wherry.core.lazy_dataclass import dataclass
from wherry.core.progress import Meter, OnProgress
from wherry.core.request import SourceRequest
from wherry.core.units import short
from wherry.cures import Argument, Command, Cure
from wherry.errors import MismatchError, NotFoundError, schema_error, storage_error
from wherry.integrations.signing.bundle import (
    IDENTITY,
    hint,
    load_key,
    load_public_key,
    open_signature,
    seal_statement,
)
from wherry.store.folders import put_file
from wherry.store.local_store import locate
from wherry.store.location import Location
from wherry.store.sidecar import SIGNATURE_NAME, read_sidecar, signature_location

__all__ = ["SignatureCheck", "identity", "load_key", "load_public_key", "require", "sign", "verify"]

_IGNORED = (
    ".git",
    ".gitattributes",
    ".github",
    ".gitignore",
    SIGNATURE_NAME,
)  # model_signing ignores the first four too
_SCHEMA = 2  # of the member of the predicate that is wherry's
_READ = 4 << 20
_THREADS = 4


@dataclass(frozen=True, slots=True)
class SignatureCheck:
    """Result of checking the files against a cryptographically valid signature.

    Attributes:
        uri: the checkpoint.
        signature: URI of its signature.
        signer: SHA-256 of the public key's PEM text.
        files: number of files in the statement.
        failed: files that differ from the signed statement: name and reason.
        identity: the signed digests of the checkpoint; empty in a signature of another tool.
        unsigned: files that no signature covers, such as those in `.git/`; a loader that is given their names reads
            them.
    """

    uri: str
    signature: str
    signer: str
    files: int
    failed: tuple[tuple[str, str], ...] = ()
    identity: dict[str, Any] = field(default_factory=dict[str, Any])
    unsigned: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether all files match the signed statement."""
        return not self.failed

    def to_json(self) -> dict[str, Any]:
        """The JSON form that `verify-signature --json` prints."""
        failed = [{"name": name, "reason": reason} for name, reason in self.failed]
        rest: dict[str, Any] = {
            "signer": self.signer,
            "files": self.files,
            "failed": failed,
            "identity": self.identity,
        }
        rest["unsigned"] = [*self.unsigned]
        return {"uri": self.uri, "signature": self.signature, "ok": self.ok, **rest}


def sign(
    uri: str | os.PathLike[str],
    key: str | os.PathLike[str],
    *,
    out: str | os.PathLike[str] | None = None,
    algorithm: str = SHA256,
    progress: OnProgress | None = None,
) -> str:
    """Sign a checkpoint.

    Args:
        uri: the checkpoint.
        key: PEM file with the private key.
        out: path of the signature; in or next to the checkpoint by default.
        algorithm: of the files' hashes. The library of model_signing 1.1.1 verifies BLAKE3, which is faster, but its
            command line verifies only SHA-256.
        progress: called a few times a second.

    Returns:
        The URI of the signature.

    Raises:
        NotFoundError: the checkpoint does not exist.
        UsageError: the file is not a key, or the key has a curve that model_signing does not support.
        MismatchError: the files do not match the sidecar.
        MissingExtraError: the package cryptography is not installed.
    """
    private = load_key(key)
    location = _resolve(uri)
    identity = _identity(location)
    names = _names(location)
    digests = _digests(location, names, algorithm, progress)
    if _identity(location) != identity:
        raise MismatchError(
            "the checkpoint changed while it was being signed", uri=location.uri, cure="sign it again"
        )
    local = location.store.capabilities.local
    how = {
        "method": "files",
        "hash_type": algorithm,
        # In a Hugging Face cache files are symlinks; model_signing then requires `--allow_symlinks`.
        "allow_symlinks": local and any(Path(location.path, name).is_symlink() for name in names),
        "ignore_paths": [*_IGNORED],
    }
    place = signature_location(location) if out is None else locate(out)
    put_file(place, seal_statement(private, location.name, digests, how, identity))
    return place.uri


def verify(
    uri: str | os.PathLike[str],
    public_key: str | os.PathLike[str],
    *,
    signature: str | os.PathLike[str] | None = None,
    progress: OnProgress | None = None,
) -> SignatureCheck:
    """Check a signature and every file that it names.

    Args:
        uri: the checkpoint.
        public_key: PEM file with the public key.
        signature: path of the signature; in or next to the checkpoint by default.
        progress: called a few times a second.

    Raises:
        NotFoundError: the checkpoint or the signature does not exist.
        CorruptError: the signature file is invalid.
        MismatchError: another key made the signature, or it was altered.
        UnsupportedError: a signature of another kind.
    """
    public = load_public_key(public_key)
    location = _resolve(uri)
    place = signature_location(location) if signature is None else locate(signature)
    predicate = open_signature(place, public)
    signed = {row["name"]: row["digest"] for row in predicate["resources"]}
    ignored = [*_IGNORED, *predicate["serialization"].get("ignore_paths", [])]
    ignored = tuple(
        one for one in ignored if one != SIGNATURE_NAME
    )  # a folder of that name is nothing of ours
    # The signature itself is none of the files: by its usual name, if that is no folder, and by the name it was given.
    entry = location.join(SIGNATURE_NAME).entry
    own = [] if entry is not None and entry.is_dir else [SIGNATURE_NAME]
    if place.path.startswith(f"{location.path}/"):
        own.append(place.path[len(location.path) + 1 :])
    everything = _names(location, tuple(own))
    folders = tuple(f"{one}/" for one in ignored)
    present = [
        name for name in everything if name in signed or not (name in ignored or name.startswith(folders))
    ]
    failed = [(name, "was added after signing") for name in present if name not in signed]
    unsigned = tuple(name for name in everything if name not in present)
    failed += [(name, "is missing") for name in signed if name not in present]
    kept = [name for name in present if name in signed]
    found = _digests(location, kept, predicate["serialization"]["hash_type"], progress)
    failed += [(name, "was altered") for name, digest in found.items() if digest != signed[name]]
    identity = _signed_identity(predicate, place.uri)
    sidecar = read_sidecar(location) if identity else None
    if sidecar and sidecar.checkpoint.checkpoint_digest != identity.get("checkpoint_digest"):
        failed.append(("the sidecar", "has another checkpoint digest than the signed one"))
    return SignatureCheck(
        location.uri, place.uri, hint(public), len(signed), tuple(sorted(failed)), identity, unsigned
    )


def identity(uri: str | os.PathLike[str], public_key: str | os.PathLike[str]) -> dict[str, Any]:
    """The checkpoint's digests in a valid signature of a key; only the signature is read.

    Returns:
        The digests; empty for a signature of another tool.

    Raises:
        NotFoundError, CorruptError, MismatchError, UnsupportedError: as `verify`.
    """
    place = signature_location(_resolve(uri))
    return _signed_identity(open_signature(place, load_public_key(public_key)), place.uri)


def require(uri: str | os.PathLike[str], public_key: str | os.PathLike[str]) -> str:
    """Check a signature, and fail if anything differs from the signed statement; for a policy.

    Returns:
        A sentence with the result.

    Raises:
        MismatchError: a file differs from the signed statement.
        WherryError: as `verify`.
    """
    found = verify(uri, public_key)
    if not found.ok:
        name, reason = found.failed[0]
        more = f"; {len(found.failed) - 1} more" if len(found.failed) > 1 else ""
        raise MismatchError(
            f"signature does not match: {name} {reason}{more}",
            uri=found.uri,
            cure="restore the checkpoint from a backup, or sign it again",
        )
    return f"{found.files} files match the signature of key {short(found.signer)}"


def _resolve(uri: str | os.PathLike[str]) -> Location:
    from wherry.formats.detect import resolve_source
    from wherry.ledger.resolve import checkpoint_uri

    return resolve_source(SourceRequest(os.fspath(checkpoint_uri(uri))))[0]


def _identity(location: Location) -> dict[str, Any]:
    """The digests of the checkpoint, for the signature; empty without a sidecar."""
    from wherry.formats.checkpoint import open_source, present_fingerprint

    sidecar = read_sidecar(location)
    if sidecar is None:
        return {}
    known = sidecar.checkpoint
    with open_source(SourceRequest(location.uri, known.format)) as present:
        mark = present_fingerprint(present, marks=location.store.capabilities.local)
    if mark != known.fingerprint:
        raise MismatchError(
            "the files do not match the sidecar",
            uri=location.uri,
            cure=Cure(
                "run {} to compare the bytes with the recorded digests",
                Command("verify", Argument("level", "digest")),
            ),
        )
    names = ("checkpoint_digest", "weights_digest", "format", "format_version")
    return {"schema": _SCHEMA, **{name: getattr(known, name) for name in names}}


def _names(location: Location, ignored: tuple[str, ...] = _IGNORED) -> list[str]:
    """The files to sign, sorted by name; `.` for a checkpoint that is one file."""
    entry = location.entry
    if entry is None:
        raise NotFoundError("checkpoint not found", uri=location.uri, cure="check the path")
    if not entry.is_dir:
        return ["."]
    prefixes = tuple(f"{name}/" for name in ignored)
    found = [
        one.name for one in location.walk() if one.name not in ignored and not one.name.startswith(prefixes)
    ]
    return sorted(found)


def _signed_identity(predicate: Mapping[str, Any], uri: str) -> dict[str, Any]:
    """The checkpoint's digests; empty in a signature of another tool."""
    found: dict[str, Any] = predicate.get(IDENTITY, {})
    if found and found.get("schema") != _SCHEMA:
        raise schema_error("signature", found.get("schema"), _SCHEMA, uri, cure="sign the checkpoint again")
    return found


def _digests(
    location: Location, names: list[str], algorithm: str, progress: OnProgress | None
) -> dict[str, str]:
    """Name → hash of each file, read once, several files at a time."""
    places = {name: location if name == "." else location.join(name) for name in names}
    total = sum(place.entry.size for place in places.values() if place.entry)
    meter = Meter("sign", total, progress)
    with threads.executor(_THREADS, "wherry-sign", numbers=False) as pool:
        return dict(zip(names, pool.map(partial(_hash, meter, algorithm), places.values()), strict=True))


def _hash(meter: Meter, algorithm: str, place: Location) -> str:
    found, buffer, start = new_hash(algorithm), memoryview(bytearray(_READ)), 0
    size = place.entry.size if place.entry else 0
    try:
        while start < size:
            count = place.store.readinto(place.path, start, buffer)
            if count == 0:
                raise MismatchError(
                    "the file was truncated while it was read", uri=place.uri, cure="try again"
                )
            found.update(buffer[:count])
            meter.add(count, place.name)
            start += count
    except OSError as error:
        raise storage_error(error, place.uri) from error
    return found.digest().hex()
