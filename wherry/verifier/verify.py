"""verify: check that a checkpoint is complete and matches its recorded digests.

Levels, each including those before it:

- `structure`: it can be opened; keys, shapes and dtypes are consistent.
- `present`: every expected chunk exists, from metadata alone. A missing chunk is never read as zeros.
- `digest`: every byte is read again and matches the manifest beside it, including companion files. Without a manifest,
  only the checksums that the container itself records (torch archives have a CRC-32 per member) are compared.
- `roundtrip`: it holds the tensors of `against`; if that is of another system, through the inverse layout, so that
  equal digests prove that the conversion lost nothing. Where values may change, the error is measured against a bound.
- `native`, `logits`: it is present, and the system's own library loads it onto the available devices, bit by bit;
  a reference implementation computes the same from it as from the source.

With `against=SOURCE` both checkpoints are read and compared tensor by tensor, through the renaming that the
target's receipt records.

`verified` is the verification for workflows: its outcome is recorded in the ledger, and a failure raises an error whose
cure is the command that makes the checkpoint again, if its receipt contains it.
"""

from __future__ import annotations

import os
import shlex
import time
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from wherry.config.digests import digest_choice
from wherry.converter.command import command
from wherry.converter.plan import DEFAULT_MEMORY
from wherry.core.keypath import render
from wherry.core.request import SourceRequest
from wherry.core.units import parse_size
from wherry.errors import (
    DamagedError,
    HostileError,
    IncompleteError,
    MismatchError,
    NotFoundError,
    NotRecordedError,
    UsageError,
    WherryError,
)
from wherry.formats.checkpoint import open_source
from wherry.formats.companions import digested
from wherry.formats.detect import describe_absent, resolve_source
from wherry.ledger.open import named
from wherry.ledger.outcomes import RECORDED, record_outcome
from wherry.mover.checksums import without_checksum
from wherry.mover.hashing import Failure, MeasuredError, compare, hash_checkpoint
from wherry.storage.sidecar import Sidecar, read_sidecar
from wherry.storage.stores import locate
from wherry.tree.mapping import parameters_of
from wherry.tree.spelling import renaming_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from wherry.core.keypath import KeyPath
    from wherry.core.progress import OnProgress
    from wherry.formats.checkpoint import Checkpoint
    from wherry.mover.hashing import Hashes
    from wherry.verifier.native import NativeReport


LEVELS = ("structure", "present", "digest", "roundtrip", "native", "logits")
_OTHERS_SAY = ("native", "logits")
# verdict → exit code of the command line.
_EXIT_CODES = {"ok": 0, "incomplete": 5, "corrupt": 5, "malicious": 6, "altered": 9, "refused": 9}


@dataclass(frozen=True, slots=True)
class Verification:
    """The outcome of a verification.

    Attributes:
        uri: the verified checkpoint.
        level: the level of the verification.
        verdict: `ok`, `incomplete` (parts are missing), `corrupt` (it is inconsistent), `malicious`, `altered` (bytes
            differ from the recorded digests), or `refused` (its own library cannot load it).
        ok: whether the verdict is `ok`.
        checked: number of tensors.
        failed: tensors that failed, each with its reason and, if known, the damaged leaf.
        seconds: wall time.
        nbytes: bytes read.
        measured: the error after a round trip through another system's layout, within its bound.
        native: the result of the system's own software, at the levels `native` and `logits`.
        against: the checkpoint with which it was compared, if one was named and it passed.
    """

    uri: str
    level: str
    verdict: str
    ok: bool
    checked: int
    failed: tuple[Failure, ...]
    seconds: float = 0.0
    nbytes: int = 0
    measured: MeasuredError | None = None
    native: NativeReport | None = None
    against: str | None = None

    @property
    def exit_code(self) -> int:
        """The exit code of the command line; 0 if it passed."""
        return _EXIT_CODES[self.verdict]

    def to_json(self) -> dict[str, Any]:
        """The output of `verify --json`."""
        return {
            "uri": self.uri,
            "level": self.level,
            "verdict": self.verdict,
            "ok": self.ok,
            "tensors": {
                "checked": self.checked,
                "failed": [{"path": row.path, "reason": row.reason, "leaf": row.leaf} for row in self.failed],
            },
            "seconds": self.seconds,
            "bytes": self.nbytes,
            **({"lossy": asdict(self.measured)} if self.measured else {}),
            **({"native": self.native.to_json()} if self.native else {}),
            **({"against": self.against} if self.against else {}),
        }


def verify(
    uri: str | os.PathLike[str],
    *,
    level: str = "present",
    against: str | os.PathLike[str] | None = None,
    memory: str | int = DEFAULT_MEMORY,
    progress: OnProgress | None = None,
    format: str | None = None,
    step: int | None = None,
    item: str | None = None,
    family_file: str | None = None,
) -> Verification:
    """Verify a checkpoint.

    Args:
        uri: the checkpoint to verify.
        level: one of `LEVELS`.
        against: another checkpoint whose tensors it must equal; implies reading both.
        memory: budget for reading.
        progress: called a few times a second.
        format, step, item: which checkpoint of `uri`.
        family_file: the file that declared the family through whose layouts it was made of `against`.

    Raises:
        UsageError: the level is unknown, or it is `native` or `logits` and opaque classes are allowed.
        NotFoundError: level `digest` without a manifest beside the checkpoint and without `against`, and the container
            records no checksum for some tensor.
        NotACheckpointError, UnsupportedError, StorageError: it cannot be verified. Damage and hostile data are
            verdicts here, not errors.
    """
    source = SourceRequest(os.fspath(uri), format, step, item)
    return verify_source(
        source, level=level, against=against, memory=memory, progress=progress, family_file=family_file
    )


def verify_source(
    source: SourceRequest,
    *,
    level: str = "present",
    against: str | os.PathLike[str] | None = None,
    memory: str | int = DEFAULT_MEMORY,
    progress: OnProgress | None = None,
    family_file: str | None = None,
) -> Verification:
    """Verify the checkpoint of a request; see `verify`."""
    if level not in LEVELS:
        raise UsageError(f"unknown level {level!r}", cure=f"choose {', '.join(LEVELS)}")
    if level == "roundtrip" and against is None:
        raise UsageError("level roundtrip needs a source to compare with", cure="pass --against SOURCE")
    if level in _OTHERS_SAY and source.opaque:
        raise UsageError(
            f"level {level} cannot skip {', '.join(sorted(source.opaque))}: the system's own library would "
            "call what the pickle names",
            cure="leave out --allow-opaque, or pass --level digest",
        )
    clock = time.monotonic()
    other = None if against is None else _Other(source.beside(against), family_file)
    try:
        with open_source(named(source)) as checkpoint:
            found = _look(checkpoint, level, other, parse_size(memory), progress)
            if level in _OTHERS_SAY and found.ok:
                found = _told(found, checkpoint, other, parse_size(memory))
    except (DamagedError, HostileError) as error:
        failure = Failure(error.path or "", error.what)
        found = Verification(
            error.uri or source.uri, level, error.verdict, ok=False, checked=0, failed=(failure,)
        )
    compared = resolve_source(named(other.source))[1].uri if other is not None and found.ok else None
    return replace(found, seconds=round(time.monotonic() - clock, 3), against=compared)


@dataclass(frozen=True, slots=True)
class _Other:
    """The checkpoint to compare with, and the family file, if wherry itself does not declare the family."""

    source: SourceRequest
    family_file: str | None
    measured: MeasuredError = field(default_factory=MeasuredError)


def _look(
    checkpoint: Checkpoint,
    level: str,
    against: _Other | None,
    memory: int,
    progress: OnProgress | None,
) -> Verification:
    pieces = () if level == "structure" else checkpoint.reader.absent()
    missing = tuple(Failure(render(one.path), f"missing: {describe_absent(one)}") for one in pieces)
    compared = against is not None and level not in _OTHERS_SAY
    read = not missing and (level in ("digest", "roundtrip") or compared)
    altered = tuple(_altered(checkpoint, against, memory, progress)) if read else ()
    verdict = "incomplete" if missing else ("altered" if altered else "ok")
    return Verification(
        uri=checkpoint.uri,
        level=level,
        verdict=verdict,
        ok=verdict == "ok",
        checked=len(checkpoint.manifest.tensors),
        failed=missing + altered,
        nbytes=checkpoint.manifest.nbytes if read else 0,
        measured=against.measured if against and against.measured.tensors else None,
    )


def _told(found: Verification, checkpoint: Checkpoint, other: _Other | None, memory: int) -> Verification:
    """The result of the system's own software for a checkpoint without missing parts."""
    from wherry.verifier.native import said  # starts a child

    source, file = (other.source.uri, other.family_file) if other else (None, None)
    seen = said(found.level, checkpoint, source, family_file=file, memory=memory)
    return replace(found, verdict=seen.verdict, ok=not seen.failed, failed=seen.failed, native=seen)


def _altered(
    checkpoint: Checkpoint, against: _Other | None, memory: int, progress: OnProgress | None
) -> Iterator[Failure]:
    sidecar = read_sidecar(locate(checkpoint.uri))
    alone = against is None and sidecar is None
    unrecorded = without_checksum(checkpoint) if alone else 0
    if alone and unrecorded == len(checkpoint.manifest.tensors):
        raise _nothing_recorded(checkpoint, unrecorded)
    algorithm = digest_choice().algorithm if sidecar is None else sidecar.algorithm
    found = hash_checkpoint(checkpoint, algorithm, memory=memory, progress=progress)
    if unrecorded:
        raise _nothing_recorded(checkpoint, unrecorded)
    if sidecar is not None:
        yield from _differences(found, sidecar.manifest.digests, sidecar.leaves)
        yield from _altered_companions(checkpoint, sidecar)
    if against is not None and sidecar is not None and sidecar.manifest.origin.get("layout"):
        yield from _came_back(checkpoint, sidecar, against, memory, progress)
    elif against is not None:
        yield from _against(found, sidecar, against.source, memory, progress)


def _nothing_recorded(checkpoint: Checkpoint, unrecorded: int) -> NotFoundError:
    count = len(checkpoint.manifest.tensors)
    what = (
        "this checkpoint"
        if unrecorded == count
        else f"{unrecorded} of {count} tensors; the others are intact"
    )
    return NotFoundError(
        f"no digests are recorded for {what}",
        uri=checkpoint.uri,
        cure="pass --against URI to compare it with another checkpoint; wherry records digests of what it writes",
    )


def _against(
    found: Hashes,
    sidecar: Sidecar | None,
    against: SourceRequest,
    memory: int,
    progress: OnProgress | None,
) -> Iterator[Failure]:
    options = sidecar.receipt.options if sidecar and sidecar.receipt else {}
    rename = renaming_of(sidecar.manifest if sidecar else None, options)
    with open_source(named(against)) as other:
        seen = _as_scanned(other, sidecar)
        theirs = hash_checkpoint(
            seen, found.algorithm, memory=memory, progress=progress, paths=_meant(seen, sidecar)
        )
    renamed = {rename(path): path for path in theirs.digests}
    expected = {path: theirs.digests[origin] for path, origin in renamed.items()}
    leaves = {path: theirs.leaves[origin] for path, origin in renamed.items()}
    yield from _differences(found, expected, leaves)


def _meant(source: Checkpoint, sidecar: Sidecar | None) -> list[KeyPath]:
    """The source's tensors, or only its parameters if the target records that it holds only these of a train state."""
    held, kind = source.manifest, sidecar.manifest.kind if sidecar else None
    left_state = held.kind == "train-state" and kind == "params"
    return parameters_of(held, source.uri) if left_state else sorted(held.tensors)


def _as_scanned(source: Checkpoint, sidecar: Sidecar | None) -> Checkpoint:
    """The source with its layers stacked or unstacked, if the target records that and the source is not yet so."""
    record = sidecar.manifest.origin.get("scan") if sidecar else None
    if record is None:
        return source
    from wherry.view.scan import fits, parse_scan, scanned_view

    scan = parse_scan(record["asked"])
    return scanned_view(source, scan.text) if fits(source.manifest, scan) else source


def _came_back(
    checkpoint: Checkpoint,
    sidecar: Sidecar,
    against: _Other,
    memory: int,
    progress: OnProgress | None,
) -> Iterator[Failure]:
    """Compare with a source of another system, through the inverse layout."""
    from wherry.view.inverse import roundtrip

    with open_source(named(against.source)) as other:
        layout = {**sidecar.manifest.origin["layout"], "family_file": against.family_file}
        yield from roundtrip(
            checkpoint,
            other,
            layout,
            sidecar.algorithm,
            memory=memory,
            progress=progress,
            measured=against.measured,
        )


def _differences(
    found: Hashes, expected: Mapping[KeyPath, str], leaves: Mapping[KeyPath, tuple[bytes, ...]]
) -> Iterator[Failure]:
    yield from compare(found, expected, leaves)
    for path in sorted(set(found.digests) - set(expected)):
        yield Failure(render(path), "unexpected tensor")


def _altered_companions(checkpoint: Checkpoint, sidecar: Sidecar) -> Iterator[Failure]:
    for companion in sidecar.manifest.companions:
        try:
            found = digested(checkpoint, companion)
        except NotFoundError:
            yield Failure(companion.name, "companion file not found")
            continue
        if found.sha256 != companion.sha256:
            yield Failure(companion.name, "digest mismatch in the companion file")


_COMPARING = ("roundtrip", "logits")  # levels that need the source


def comparison(level: str, source: str, family_file: str | None) -> dict[str, Any]:
    """The arguments of `verified` after a conversion: the level, and its data about the source.

    Args:
        level: one of `wherry.verifier.verify.LEVELS`.
        source: URI of the source of the conversion.
        family_file: the file that declared the family, if one did.
    """
    return {"level": level} | ({"against": source, "family_file": family_file} if level in _COMPARING else {})


def verified(uri: str, **how: Any) -> tuple[Verification, str]:
    """Verify a checkpoint and record the outcome.

    Args:
        uri: the checkpoint.
        how: further arguments of `wherry.verify`.

    Returns:
        The outcome, and whether it was recorded, as text.

    Raises:
        NotRecordedError: it passed, but the ledger cannot be used; `result` is the outcome.
        IncompleteError: something is missing.
        MismatchError: something differs from the record, or from the source.
    """
    outcome = verify(uri, **how)
    sidecar = read_sidecar(locate(outcome.uri))
    try:
        if sidecar is not None:
            record_outcome(sidecar.checkpoint, outcome.to_json())
    except NotRecordedError as error:
        error.result = outcome
        raise
    finally:
        if not outcome.ok:
            raise _failure(outcome, sidecar)
    return outcome, "not recorded: it has no sidecar" if sidecar is None else RECORDED


def _failure(outcome: Verification, sidecar: Sidecar | None) -> WherryError:
    kind = IncompleteError if outcome.verdict == "incomplete" else MismatchError
    first = outcome.failed[0]
    more = f"; {len(outcome.failed) - 1} more" if len(outcome.failed) > 1 else ""
    return kind(
        f"verification failed: {first.reason}{more}",
        uri=outcome.uri,
        path=first.path,
        cure=_cure(outcome.uri, sidecar),
        stage="verify",
    )


def _cure(uri: str, sidecar: Sidecar | None) -> str:
    if sidecar is None or sidecar.receipt is None:
        return "restore the checkpoint"
    try:
        again = command(sidecar.receipt, target=uri)
    except WherryError as error:
        return f"restore the checkpoint, or {error.cure}"
    return f"move it away ({shlex.quote(uri)}) and convert again: {again}"
