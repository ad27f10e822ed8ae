"""Signing: an in-toto statement over every file of a checkpoint, as OpenSSF model signing writes and verifies it.

`model_signing verify key CHECKPOINT --signature FILE --public_key PEM` accepts what `sign` makes, and `verify`
accepts what `model_signing sign key` makes. The signature lies in the folder as `wherry.sig`, beside a file as
`<file>.wherry.sig`; it is no part of the checkpoint, so digests and fingerprints stay as they are. What is signed is
what lies there: one pass over the files, after a check that they are those that the sidecar was written for.

On-disk facts (model_signing 1.1.1, DSSE 1.0, in-toto Statement v1, Sigstore bundle 0.3):
- The file is a Sigstore bundle in JSON whose DSSE envelope holds the statement; `hint` is the SHA-256 of the public
  key's PEM text. There is no transparency log.
- The predicate `https://model_signing/signature/v1.0` lists each file with its SHA-256, in the order of names; a
  model that is one file is the resource `.`. The subject's digest is the SHA-256 over these digests in that order.
  Further members of the predicate are ignored by verifiers; ours, `wherry`, binds the checkpoint's digests.
- A verifier takes every file that `ignore_paths` does not name, so a file that was added is found too.
- Keys are P-256, P-384 or P-521, with SHA-256, SHA-384 or SHA-512.

A key that is encrypted needs `WHERRY_SIGNING_PASSWORD`.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wherry.core.progress import Meter
from wherry.core.units import short
from wherry.errors import MismatchError, NotFoundError, storage_error
from wherry.integrations.signing.bundle import IDENTITY, hint, load_key, load_public_key, opened, sealed
from wherry.runtime import threads
from wherry.storage.durable import put
from wherry.storage.sidecar import SIGNATURE_NAME, read_sidecar, signature_location
from wherry.storage.stores import locate

if TYPE_CHECKING:
    import os

    from wherry.core.progress import OnProgress
    from wherry.storage.location import Location

__all__ = ["SignatureCheck", "identity", "load_key", "load_public_key", "require", "sign", "verify"]

_IGNORED = (
    ".git",
    ".gitattributes",
    ".github",
    ".gitignore",
    SIGNATURE_NAME,
)  # model_signing leaves out the first four
_READ = 4 << 20
_THREADS = 4


@dataclass(frozen=True, slots=True)
class SignatureCheck:
    """What came of checking a signature whose mathematics are right.

    Attributes:
        uri: the checkpoint.
        signature: where its signature lies.
        signer: SHA-256 of the public key's PEM text.
        files: how many files the statement names.
        failed: what is not as it was signed: name and reason.
        identity: the checkpoint's digests as they were signed; empty in a signature of another tool.
    """

    uri: str
    signature: str
    signer: str
    files: int
    failed: tuple[tuple[str, str], ...] = ()
    identity: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def ok(self) -> bool:
        """Whether everything is as it was signed."""
        return not self.failed

    def to_json(self) -> dict[str, Any]:
        """As `verify-signature --json` prints it."""
        failed = [{"name": name, "reason": reason} for name, reason in self.failed]
        rest = {"signer": self.signer, "files": self.files, "failed": failed, "identity": self.identity}
        return {"uri": self.uri, "signature": self.signature, "ok": self.ok, **rest}


def sign(
    uri: str | os.PathLike[str],
    key: str | os.PathLike[str],
    *,
    out: str | os.PathLike[str] | None = None,
    progress: OnProgress | None = None,
) -> str:
    """Sign a checkpoint.

    Args:
        uri: the checkpoint.
        key: file with the private key, PEM.
        out: where the signature goes; in or beside the checkpoint by default.
        progress: called a few times a second.

    Returns:
        Where the signature lies.

    Raises:
        NotFoundError: nothing is there.
        UsageError: it is not a key, or not of a curve that model_signing takes.
        MismatchError: the files are not those that the sidecar was written for.
        MissingExtraError: the package cryptography is not installed.
    """
    private = load_key(key)
    location = _resolved(uri)
    identity = _identity(location)
    names = _names(location)
    digests = _digests(location, names, progress)
    if _identity(location) != identity:
        raise MismatchError("it changed while it was signed", uri=location.uri, cure="sign it again")
    how = {
        "method": "files",
        "hash_type": "sha256",
        "allow_symlinks": _has_links(location, names),
        "ignore_paths": [*_IGNORED],
    }
    place = signature_location(location) if out is None else locate(out)
    put(place, sealed(private, location.name, digests, how, identity))
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
        public_key: file with the public key, PEM.
        signature: where the signature lies; in or beside the checkpoint by default.
        progress: called a few times a second.

    Raises:
        NotFoundError: there is no checkpoint or no signature.
        CorruptError: the signature is not one.
        MismatchError: another key made it, or it was altered.
        UnsupportedError: it is a signature of another kind.
    """
    public = load_public_key(public_key)
    location = _resolved(uri)
    place = signature_location(location) if signature is None else locate(signature)
    predicate = opened(place, public)
    signed = {row["name"]: row["digest"] for row in predicate["resources"]}
    ignored = predicate["serialization"].get("ignore_paths", [])
    present = _names(location, (*_IGNORED, *ignored, *_inside(place, location)))
    failed = [(name, "was not there when it was signed") for name in present if name not in signed]
    failed += [(name, "is gone") for name in signed if name not in present]
    kept = [name for name in present if name in signed]
    failed += [(n, "was altered") for n, d in _digests(location, kept, progress).items() if d != signed[n]]
    identity = predicate.get(IDENTITY, {})
    sidecar = read_sidecar(location) if identity else None
    if sidecar and sidecar.checkpoint.checkpoint_digest != identity.get("checkpoint_digest"):
        failed.append(("the sidecar", "names another checkpoint digest than was signed"))
    return SignatureCheck(location.uri, place.uri, hint(public), len(signed), tuple(sorted(failed)), identity)


def identity(uri: str | os.PathLike[str], public_key: str | os.PathLike[str]) -> dict[str, Any]:
    """The checkpoint's digests as they were signed with a key; no file but the signature is read.

    Returns:
        Empty for a signature of another tool.

    Raises:
        NotFoundError, CorruptError, MismatchError, UnsupportedError: as `verify`.
    """
    place = signature_location(_resolved(uri))
    return opened(place, load_public_key(public_key)).get(IDENTITY, {})


def require(uri: str | os.PathLike[str], public_key: str | os.PathLike[str]) -> str:
    """Check a signature, and fail where anything is not as it was signed; for a policy.

    Returns:
        In words, what was found.

    Raises:
        MismatchError: see there.
        WherryError: as `verify`.
    """
    found = verify(uri, public_key)
    if not found.ok:
        name, reason = found.failed[0]
        more = f"; {len(found.failed) - 1} more" if len(found.failed) > 1 else ""
        raise MismatchError(f"not as it was signed: {name} {reason}{more}", uri=found.uri, cure="restore it")
    return f"{found.files} files as signed by key {short(found.signer)}"


def _resolved(uri: str | os.PathLike[str]) -> Location:
    from wherry.formats.detect import resolve
    from wherry.ledger.resolve import checkpoint_uri

    return resolve(checkpoint_uri(uri))[0]


def _identity(location: Location) -> dict[str, Any]:
    """What binds the signature to the checkpoint's digests; empty where it has no sidecar."""
    from wherry.formats.checkpoint import open_checkpoint, present_fingerprint

    sidecar = read_sidecar(location)
    if sidecar is None:
        return {}
    known = sidecar.checkpoint
    with open_checkpoint(location.uri, format=known.format) as present:
        mark = present_fingerprint(present, marks=location.store.capabilities.local)
    if mark != known.fingerprint:
        raise MismatchError(
            "its files are not those that its sidecar was written for",
            uri=location.uri,
            cure="`wherry verify --level digest` says whether the bytes are still the same",
        )
    names = ("checkpoint_digest", "weights_digest", "format", "format_version")
    return {"schema": 1, **{name: getattr(known, name) for name in names}}


def _names(location: Location, ignored: tuple[str, ...] = _IGNORED) -> list[str]:
    """The files that are signed, in the order of names; `.` for a checkpoint that is one file."""
    entry = location.entry
    if entry is None:
        raise NotFoundError("nothing is there", uri=location.uri)
    if not entry.is_dir:
        return ["."]
    prefixes = tuple(f"{name}/" for name in ignored)
    found = [
        one.name for one in location.walk() if one.name not in ignored and not one.name.startswith(prefixes)
    ]
    return sorted(found)


def _inside(place: Location, location: Location) -> tuple[str, ...]:
    """The signature's own name, where it lies in the folder."""
    return (place.path[len(location.path) + 1 :],) if place.path.startswith(f"{location.path}/") else ()


def _has_links(location: Location, names: list[str]) -> bool:
    """Whether files are links, as in a Hugging Face cache; model_signing then wants `--allow_symlinks`."""
    local = location.store.capabilities.local
    return local and any(Path(location.path, name).is_symlink() for name in names)


def _digests(location: Location, names: list[str], progress: OnProgress | None) -> dict[str, str]:
    """Name → SHA-256 of each file, read once, several files at a time."""
    places = {name: location if name == "." else location.join(name) for name in names}
    total = sum(place.entry.size for place in places.values() if place.entry)
    meter = Meter("sign", total, progress)
    with threads.executor(_THREADS, "wherry-sign", numbers=False) as pool:
        return dict(zip(names, pool.map(partial(_sha256, meter), places.values()), strict=True))


def _sha256(meter: Meter, place: Location) -> str:
    found, buffer, start = hashlib.sha256(), memoryview(bytearray(_READ)), 0
    size = place.entry.size if place.entry else 0
    try:
        while start < size:
            count = place.store.readinto(place.path, start, buffer)
            if count == 0:
                raise MismatchError("it became shorter while it was read", uri=place.uri, cure="try again")
            found.update(buffer[:count])
            meter.add(count, place.name)
            start += count
    except OSError as error:
        raise storage_error(error, place.uri) from error
    return found.hexdigest()
