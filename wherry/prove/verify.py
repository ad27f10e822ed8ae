"""verify: check that a checkpoint is complete and matches what was recorded about it.

Levels; each of the first four includes those before it, and the last three include `present`:

- `structure`: it can be opened; keys, shapes and dtypes are consistent, and matrices are whole: see
  `wherry.formats.shortage`, which also says which parts of matrices it cannot tell from whole ones. Names, shapes and
  dtypes of tensors, files and their sizes are those of the sidecar. *Not proved*: any value, since none is read.
- `present`: every expected chunk exists, from metadata alone. A missing chunk is never read as zeros. *Not proved*: any
  value.
- `digest`: every byte of every tensor and companion file is read again, and matches the sidecar and what the ledger
  has at this place; the checksums that the container itself records are compared on the way. *Not proved*: bytes that
  belong to no tensor, such as padding and the directory of an archive; that the record is right where no ledger has it.
- `roundtrip`: it holds the tensors of `against`; if that is of another system, through the inverse layout, so that
  equal digests prove that the conversion lost nothing. Where values may change, the error is measured against a bound.
  *Not proved*: that the layout is right, since an error of both directions cancels out.
- `native`: the system's own library loads it onto the available devices with the recorded bits, and companion files
  are those of the sidecar; of a Hugging Face folder, transformers builds the model that the config names. *Not proved*:
  that the model computes the right function, or, for other systems, that their own code builds the model; the evidence
  names what ran. The ledger is not compared.
- `logits`: transformers computes the same from it as from the source, up to a relative bound. *Not proved*: single
  bits, and anything that the few tokens do not reach; for other systems than Hugging Face, that these compute the same.
- `serve`: transformers generates from a Hugging Face folder the greedy tokens that it generates from the source, and
  the end tokens of its files agree. Weights of another element type may turn near ties, which are warnings. *Not
  proved*: values that turn no token; other prompts; what another server does.

Every level names files that the sidecar does not list; see `wherry.formats.recorded_files`. Without a sidecar there is
nothing to compare names and files with, and `recorded` of the outcome is false.

What nobody recorded is read too, and its digests are computed, but nothing proves that these bytes are the right ones:
the verdict is `read`, which no policy, promotion or audit counts as proof. With `record` the ledger has the digests
from then on, so that the next verification proves something.

With `against=SOURCE` both checkpoints are read and compared tensor by tensor, through the renaming that the
target's receipt records.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from wherry.converter.command import command, in_place_of
from wherry.core.html import html_table
from wherry.core.keypath import render
from wherry.core.lazy_dataclass import dataclass
from wherry.core.progress import OnProgress
from wherry.core.receipt import CheckpointRef
from wherry.core.request import SourceRequest
from wherry.core.units import DEFAULT_MEMORY, DEFAULT_UNIT, parse_budget, parse_size, plural
from wherry.cures import Argument, Blank, Command, Cure
from wherry.errors import (
    DamagedError,
    HostileError,
    IncompleteError,
    MismatchError,
    NotFoundError,
    NotRecordedError,
    StorageError,
    UsageError,
    WherryError,
)
from wherry.formats.checkpoint import Checkpoint, settled_checkpoint, take_pin
from wherry.formats.detect import describe_absent, resolve_source
from wherry.formats.recorded_files import FileDifferences, file_differences
from wherry.formats.shortage import shortage
from wherry.ledger.record import RECORDED, REFUSED, record_outcome
from wherry.ledger.replay import ADDED, READ_ONLY
from wherry.ledger.resolve import open_checkpoint, resolve_named
from wherry.mover.hashing import Failure, MeasuredError
from wherry.prove.evidence import ReadOptions, altered_companions
from wherry.prove.full_read import NOT_COMPARED, FullRead, Other, read_all
from wherry.prove.records import (
    INCOMPLETE,
    RecordDifference,
    added_rows,
    file_rows,
    known_node,
    record_differences,
)
from wherry.store.local_store import locate
from wherry.store.sidecar import Sidecar, read_sidecar, readable_sidecar
from wherry.workers import THREADS

if TYPE_CHECKING:
    from wherry.prove.native import NativeReport


LEVELS = ("structure", "present", "digest", "roundtrip", "native", "logits", "serve")
_READING = ("digest", "roundtrip")
_COMPARING = ("roundtrip", "logits", "serve")  # levels that need the source
SERVED_TOKENS = 32  # that level serve generates after each prompt, by default
_OTHERS_SAY = ("native", "logits", "serve")
# verdict → exit code of the command line.
UNCOMPARED = (
    "uncompared"  # the verdict on sound bytes if the ledger, which may say otherwise, could not be queried
)
_EXIT_CODES = {
    "ok": 0, READ_ONLY: 0, "incomplete": 5, "corrupt": 5, "malicious": 6, "altered": 9, ADDED: 9, "refused": 9,
    UNCOMPARED: 10,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Verification:
    """The outcome of a verification.

    Attributes:
        uri: the verified checkpoint.
        level: the level of the verification.
        verdict: `ok`, `read` (every byte was read, but nothing is recorded that it could be compared with),
            `incomplete` (parts are missing), `corrupt` (it is inconsistent), `malicious`, `altered` (bytes differ from
            the recorded digests, or metadata from the record), `added` (nothing else is wrong, but files lie in its
            folder that its record does not have), `refused` (its own library cannot load it), or `uncompared` (its
            bytes are those of its sidecar, but the ledger could not be compared with them).
        checked: number of tensors.
        failed: tensors and files that failed, each with its reason and, if known, the damaged leaf.
        seconds: wall time.
        nbytes: bytes read.
        measured: the error after a round trip through another system's layout, within its bound.
        native: the result of the system's own software, at the levels `native`, `logits` and `serve`.
        against: the checkpoint with which it was compared, if one was named and it passed.
        full_read: the comparison with the records, and the digests, where every byte was read.
        lineage: whether the ledger recorded the outcome, if that was requested.
        warnings: tensors that hold only zeros, a single value, or NaN, where every byte was read; files that are not
            in the record and allowed; at level `serve` near ties, and what was not judged. They do not change the
            verdict.
        recorded: whether a sidecar is there, with which names, shapes and files were compared.
    """

    uri: str
    level: str
    verdict: str
    checked: int
    failed: tuple[Failure, ...]
    seconds: float = 0.0
    nbytes: int = 0
    measured: MeasuredError | None = None
    native: NativeReport | None = None
    against: str | None = None
    full_read: FullRead | None = None
    lineage: str = ""
    warnings: tuple[str, ...] = ()
    recorded: bool = False

    def __repr__(self) -> str:
        return f"<Verification: {self.verdict} at level {self.level}, {plural(self.checked, 'tensor')} of {self.uri}>"

    def _repr_html_(self) -> str:
        return html_table(repr(self), ("failed", "reason"), [(one.path, one.reason) for one in self.failed])

    @property
    def ok(self) -> bool:
        """Whether the verdict is `ok`; `read` proves nothing."""
        return self.verdict == "ok"

    @property
    def exit_code(self) -> int:
        """The exit code of the command line; 0 if nothing is wrong."""
        return _EXIT_CODES[self.verdict]

    @property
    def subject(self) -> CheckpointRef | None:
        """The node that the outcome is about; None if nothing is known about it and it was not read."""
        return self.full_read.subject if self.full_read else known_node(self.uri)

    def to_json(self) -> dict[str, Any]:
        """The output of `verify --json`."""
        return {
            "uri": self.uri,
            "level": self.level,
            "verdict": self.verdict,
            "ok": self.ok,
            "recorded": self.recorded,
            "tensors": {
                "checked": self.checked,
                "failed": [{"path": row.path, "reason": row.reason, "leaf": row.leaf} for row in self.failed],
            },
            "seconds": self.seconds,
            "bytes": self.nbytes,
            **({"warnings": list(self.warnings)} if self.warnings else {}),
            **({"lossy": asdict(self.measured)} if self.measured else {}),
            **({"native": self.native.to_json()} if self.native else {}),
            **({"against": self.against} if self.against else {}),
            **(_full_read_json(self.full_read, self.verdict) if self.full_read else {}),
            **({"lineage": self.lineage} if self.lineage else {}),
        }


def _full_read_json(read: FullRead, verdict: str) -> dict[str, Any]:
    """The comparison with the ledger, the identity unless it was altered, and all digests if they are not recorded."""
    data: dict[str, Any] = {"ledger": read.ledger}
    if not read.failed:
        node = read.subject
        data |= {"checkpoint_digest": node.checkpoint_digest, "weights_digest": node.weights_digest}
        data |= {"state": read.state} if read.state else {}
    if verdict == READ_ONLY:
        data["digests"] = {render(path): digest for path, digest in sorted(read.digests.items())}
    return data


def verify(
    uri: str | os.PathLike[str] | SourceRequest,
    *,
    level: str = "present",
    against: str | os.PathLike[str] | SourceRequest | None = None,
    memory: str | int = DEFAULT_MEMORY,
    progress: OnProgress | None = None,
    format: str | None = None,
    step: int | None = None,
    item: str | None = None,
    family_file: str | None = None,
    record: bool = False,
    on: str = THREADS,
    unit: str | int = DEFAULT_UNIT,
    tokens: int | None = None,
) -> Verification:
    """Verify a checkpoint.

    Args:
        uri: the checkpoint to verify, or a request for it.
        level: one of `LEVELS`.
        against: another checkpoint whose tensors it must equal, or a request for it; implies reading both.
        memory: budget for reading.
        progress: called a few times a second.
        format, step, item: which checkpoint of `uri`; a request states them itself.
        family_file: the file that declared the family through whose layouts it was made of `against`.
        record: whether the ledger records the outcome and, where it does not know the checkpoint yet, its digests.
        on: what reads the bytes at level `digest`; see `wherry.workers.engines`.
        unit: what one worker reads at a time, for example `1GiB`.
        tokens: number of tokens that level `serve` generates after each prompt; 32 by default.

    Raises:
        UsageError: the level is unknown, another level or `against` is combined with `on`, another level is combined
            with `tokens`, or it is `native`, `logits` or `serve` and opaque classes are allowed.
        NotACheckpointError, UnsupportedError, StorageError: it cannot be verified. Damage and hostile data are
            verdicts here, not errors.
        MismatchError: with `record`, if its files changed while they were read.
        NotRecordedError: nothing is wrong with it, but the ledger cannot be used; `result` is the outcome.
    """
    source = uri if isinstance(uri, SourceRequest) else SourceRequest(os.fspath(uri), format, step, item)
    if level not in LEVELS:
        raise UsageError(f"unknown level {level!r}", cure=f"choose {', '.join(LEVELS)}")
    if level == "roundtrip" and against is None:
        raise UsageError(
            "level roundtrip needs a source to compare with",
            cure=Cure("pass {}", Argument("against", Blank("SOURCE"))),
        )
    if level in _OTHERS_SAY and source.allow_opaque:
        raise UsageError(
            f"level {level} cannot skip {', '.join(sorted(source.allow_opaque))}: the system's own library would "
            "call what the pickle names",
            cure=Cure("leave out {}, or pass {}", Argument("allow-opaque"), Argument("level", "digest")),
        )
    if tokens is not None and level != "serve":
        raise UsageError(
            f"level {level} generates no tokens",
            cure=Cure("pass {}, or leave out {}", Argument("level", "serve"), Argument("tokens")),
        )
    if tokens is not None and tokens < 1:
        raise UsageError(
            f"invalid number of tokens: {tokens}",
            cure=Cure("write for example {}", Argument("tokens", "32")),
        )
    if on != THREADS:
        from wherry.workers.engines import engine_of

        engine_of(on)
        # It would have nothing to do at another level, and only half of the reading with another checkpoint.
        if level != "digest" or against is not None:
            raise UsageError(
                "an engine reads one checkpoint at level digest",
                cure=Cure(
                    "pass {} without {}, or leave out {}",
                    Argument("level", "digest"),
                    Argument("against"),
                    Argument("on"),
                ),
            )
    clock = time.monotonic()
    options = ReadOptions(parse_budget(memory), progress, on, parse_size(unit), source)
    other: Other | None = None
    if against is not None:
        named = against if isinstance(against, SourceRequest) else source.for_reference(against)
        other = Other(named, family_file)
    try:
        found = _verify(source, level, other, options, record=record, tokens=tokens or SERVED_TOKENS)
    except (DamagedError, HostileError) as error:
        failure = Failure(error.path or "", error.what)
        found = Verification(error.uri or source.uri, level, error.verdict, checked=0, failed=(failure,))
    compared = resolve_source(resolve_named(other.source))[1].uri if other is not None and found.ok else None
    found = replace(found, seconds=round(time.monotonic() - clock, 3), against=compared)
    return record_verification(found) if record else found


def _verify(
    source: SourceRequest,
    level: str,
    other: Other | None,
    options: ReadOptions,
    *,
    record: bool,
    tokens: int,
) -> Verification:
    """The outcome; if it is recorded, of files that must not change meanwhile, as the ledger has their digests."""
    opened = partial(open_checkpoint, source)
    with settled_checkpoint(opened) if record else opened() as checkpoint:
        pin = take_pin(checkpoint) if record else None
        found = _look(checkpoint, level, other, options)
        if level in _OTHERS_SAY and found.ok:
            from wherry.prove.native import logits, native, serve  # each starts a child

            named, file = (other.source, other.family_file) if other else (None, None)
            if level == "native":
                seen = native(checkpoint, memory=options.memory)
            elif level == "logits":
                seen = logits(checkpoint, named, family_file=file)
            else:
                seen = serve(checkpoint, named, family_file=file, tokens=tokens)
            found = replace(
                found,
                verdict=seen.verdict,
                failed=seen.failed,
                native=seen,
                warnings=(*found.warnings, *seen.warnings),
            )
        if pin is not None:
            pin.require_unchanged(checkpoint)
        return found


def record_verification(found: Verification) -> Verification:
    """Record an outcome in the ledger, about the checkpoint that is known at its place or that was read there.

    Returns:
        The outcome, with `lineage`.

    Raises:
        NotRecordedError: nothing is wrong with the checkpoint, but the ledger cannot be used, or could not be compared;
            `result` is the outcome.
    """
    if found.verdict == UNCOMPARED:
        cause = uncompared_error(found)
        refused = NotRecordedError(
            f"not recorded: {cause.what}",
            uri=cause.uri,
            cure=cause.cure,
            stage=cause.stage,
            retryable=cause.retryable,
        )
        refused.result = replace(found, lineage=REFUSED + cause.what)
        raise refused from cause
    subject = found.subject
    if subject is None:
        return replace(found, lineage=f"{REFUSED}no record names it; level digest computes its digests")
    body = {name: value for name, value in found.to_json().items() if name != "digests"}
    try:
        record_outcome(subject, body)
    except NotRecordedError as error:
        unrecorded = replace(found, lineage=REFUSED + error.what)
        if found.exit_code:
            return unrecorded
        error.result = unrecorded
        raise
    return replace(found, lineage=RECORDED)


def uncompared_error(found: Verification) -> StorageError:
    """The error for a checkpoint whose bytes are sound, but could not be compared with the ledger."""
    assert found.full_read is not None
    return StorageError(
        f"its bytes are those of its sidecar, but the ledger was {found.full_read.ledger}",
        uri=found.uri,
        cure=Cure(
            "make the ledger readable, then run {}", Command("verify", found.uri, Argument("level", "digest"))
        ),
        stage="verify",
        retryable=True,
    )


def _look(checkpoint: Checkpoint, level: str, against: Other | None, options: ReadOptions) -> Verification:
    place = checkpoint.location
    sidecar = read_sidecar(place)
    different = [] if sidecar is None else [*record_differences(checkpoint, sidecar)]
    files = FileDifferences() if sidecar is None else file_differences(checkpoint, place, sidecar)
    missing = _missing(checkpoint, level, different, files)
    compared = against is not None and level not in _OTHERS_SAY
    wanted = not missing and (level in _READING or compared)
    read = read_all(checkpoint, sidecar, against, options) if wanted else None
    failed = missing or _failures(different, files, read)
    if sidecar is not None and level in _OTHERS_SAY and not failed:
        failed = tuple(altered_companions(checkpoint, sidecar))  # the library reads them
    verdict = "incomplete" if missing else "altered" if failed else "ok" if read is None else _verdict(read)
    return Verification(
        uri=checkpoint.uri,
        level=level,
        verdict=ADDED if files.strange and verdict in ("ok", READ_ONLY, UNCOMPARED) else verdict,
        checked=len(checkpoint.manifest.tensors),
        failed=failed + _as_failures(added_rows(files)),
        nbytes=checkpoint.manifest.nbytes if read else 0,
        measured=against.measured if against and against.measured.tensors else None,
        full_read=read,
        warnings=(*(read.warnings if read else ()), *_notes(sidecar, files)),
        recorded=sidecar is not None,
    )


def _as_failures(rows: Iterable[RecordDifference]) -> tuple[Failure, ...]:
    return tuple(Failure(one.path, one.what) for one in rows)


def _missing(
    checkpoint: Checkpoint, level: str, different: Sequence[RecordDifference], files: FileDifferences
) -> tuple[Failure, ...]:
    """The missing parts: chunks, parts of matrices, companion files; other files if nothing else says which."""
    pieces = () if level == "structure" else checkpoint.reader.absent()
    missing = tuple(Failure(render(one.path), f"missing: {describe_absent(one)}") for one in pieces)
    if (short := shortage(checkpoint.manifest)) is not None:
        missing += (Failure("", f"{short.reason}; {short.cure}"),)
        missing += tuple(Failure(render(path), what) for path, what in short.parts.items())
    missing += _as_failures(one for one in different if one.kind == INCOMPLETE)
    return missing or _as_failures(one for one in file_rows(files) if one.kind == INCOMPLETE)


def _failures(
    different: Sequence[RecordDifference], files: FileDifferences, read: FullRead | None
) -> tuple[Failure, ...]:
    """The differences in bytes and in metadata; sizes of files if nothing else says which tensor differs."""
    failed = () if read is None else read.failed
    named = {one.path for one in failed}
    failed += _as_failures(one for one in different if one.path not in named)
    return failed or _as_failures(file_rows(files))


def _notes(sidecar: Sidecar | None, files: FileDifferences) -> Iterator[str]:
    """Files that are not in the record and allowed, and whether the record could name any."""
    if sidecar is not None and sidecar.files is None:
        yield "its record has no list of files: of files that were added, only companion files are found"
    for name, what in files.added.items():
        if what:
            yield f"{name}: not in the record, but allowed: {what}"


def _verdict(read: FullRead) -> str:
    """The verdict on bytes that do not differ from anything."""
    if not read.proved:
        return READ_ONLY
    return UNCOMPARED if read.ledger.startswith(NOT_COMPARED) else "ok"


# ---- as a step of a workflow ----------------------------------------------------------------------------------------


def comparison(level: str, source: str, below: str | None, family_file: str | None) -> dict[str, Any]:
    """The arguments of `verify_and_record` after a conversion: the level, and its data about the source.

    Args:
        level: one of `LEVELS`.
        source: URI of the source of the conversion.
        below: a folder that the source must not leave; see `SourceRequest`.
        family_file: the file that declared the family, if one did.
    """
    about = {"against": source, "against_below": below, "family_file": family_file}
    return {"level": level} | (about if level in _COMPARING else {})


def verify_and_record(
    uri: str,
    *,
    below: str | None = None,
    against: str | None = None,
    against_below: str | None = None,
    **how: Any,
) -> tuple[Verification, str]:
    """Verify a checkpoint as a step of a workflow, and record the outcome.

    A checkpoint about which nothing is recorded fails here too: a workflow goes on only with what was proved.

    Args:
        uri: the checkpoint.
        below: a folder that it must not leave; see `SourceRequest`.
        against: the checkpoint to compare with.
        against_below: a folder that this must not leave.
        how: further arguments of `verify`.

    Returns:
        The outcome, and whether it was recorded, as text.

    Raises:
        NotRecordedError: it passed, but the ledger cannot be used; `result` is the outcome.
        NotFoundError: nothing is recorded that it could be compared with.
        IncompleteError: something is missing.
        MismatchError: something differs from the record, or from the source.
    """
    other = None if against is None else SourceRequest(against, below=against_below)
    outcome = verify(SourceRequest(uri, below=below), against=other, **how)
    if outcome.verdict == READ_ONLY:
        raise unproved_error(outcome)
    done = record_verification(outcome)
    if not outcome.ok:
        raise failure_of(outcome, cure=_cure(outcome.uri))
    return outcome, done.lineage


def unproved_error(outcome: Verification) -> NotFoundError:
    """The error for a checkpoint that was read, but about which nothing is recorded."""
    return NotFoundError(
        "no digests are recorded for this checkpoint, so reading it proves nothing",
        uri=outcome.uri,
        cure=Cure(
            "record its digests first: {}",
            Command("inspect", Argument("digest"), Argument("write"), outcome.uri),
        ),
        stage="verify",
    )


def failure_of(
    outcome: Verification, *, cure: str, what: str = "verification failed", stage: str = "verify"
) -> WherryError:
    """The error for an outcome that did not pass.

    Args:
        outcome: the outcome, with at least one failure.
        cure: what to do.
        what: the beginning of the message.
        stage: the step of a workflow that failed.
    """
    kind = IncompleteError if outcome.verdict == "incomplete" else MismatchError
    first = outcome.failed[0]
    more = f"; {len(outcome.failed) - 1} more" if len(outcome.failed) > 1 else ""
    return kind(f"{what}: {first.reason}{more}", uri=outcome.uri, path=first.path, cure=cure, stage=stage)


def _cure(uri: str) -> str:
    """The command that makes the checkpoint again; none if it was changed in place."""
    try:
        sidecar = readable_sidecar(locate(uri))
        receipt = None if sidecar is None else sidecar.receipt
        if receipt is None or receipt.source.uri == uri:
            return "restore the checkpoint"
        return in_place_of(uri, command(receipt, target=uri))
    except WherryError as error:
        return Cure("restore the checkpoint, or {}", error.cure) if error.cure else "restore the checkpoint"
