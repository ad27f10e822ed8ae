"""outcomes: tell the ledger what is committed, and say so where that fails.

Work that is not recorded is not done: the target stays, and the call ends with a `NotRecordedError` that carries what
it would have returned and names the command that records it later. `record_sidecar` is that command: it reads the
sidecar of what was committed, so nothing but the checkpoint itself is needed.
"""

from __future__ import annotations

import shlex
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from wherry.errors import (
    MissingExtraError,
    NotFoundError,
    NotRecordedError,
    StorageError,
    TargetInUseError,
    UnsupportedError,
    UsageError,
    WherryError,
    wherry_error,
)
from wherry.ledger.deliver import after_record

if TYPE_CHECKING:
    import os
    from collections.abc import Generator, Mapping, Sequence

    from wherry.core.receipt import CheckpointRef, Receipt
    from wherry.ledger.record import Ledger
    from wherry.storage.location import Location

# Errors of the ledger and the registry themselves; others are about the checkpoint.
_REFUSALS = (StorageError, MissingExtraError, UnsupportedError, UsageError)
# What would count as "gone" or "in use" before the commit is work left to do after it.
_GONE = (NotFoundError, TargetInUseError)
RECORDED = "recorded"
REFUSED = "not recorded: "  # with the reason
LEFT_OUT = "left out by request"
_LATE = "recorded now; the ledger did not have it"
_HAD = "the ledger had it already"


def record(receipt: Receipt) -> Receipt:
    """Record a conversion; see `record_all`.

    Raises:
        NotRecordedError: the ledger cannot be used; `result` is the receipt.
    """
    try:
        return record_all([receipt])[0]
    except NotRecordedError as error:
        error.result = error.result[0]
        raise


def record_all(receipts: Sequence[Receipt]) -> tuple[Receipt, ...]:
    """Record what is committed: conversions that were made now, and those that were found to be made.

    Returns:
        The receipts, each with what the ledger holds of it as `lineage`.

    Raises:
        NotRecordedError: the ledger cannot be used. The targets stay; `result` is what would have been returned, with
            the reason as `lineage` of each that was not recorded.
    """
    from wherry.ledger.record import open_ledger

    done: list[Receipt] = []
    try:
        with open_ledger() as ledger:
            done.extend(replace(one, lineage=_recorded(ledger, one)) for one in receipts)
    except Exception as caught:  # noqa: BLE001  whatever it is, the targets are committed
        cause, rest = wherry_error(caught), receipts[len(done) :]
        error = not_recorded(cause, [one.target.uri for one in rest])
        error.result = (*done, *(replace(one, lineage=REFUSED + cause.what) for one in rest))
        raise error from cause
    after_record()
    return tuple(done)


def require_recorded(receipt: Receipt) -> Receipt:
    """The receipt that another process made, unless that process could not record the conversion.

    Raises:
        NotRecordedError: it could not; `result` is the receipt.
    """
    if receipt.lineage.startswith(REFUSED):
        error = not_recorded(StorageError(receipt.lineage.removeprefix(REFUSED)), [receipt.target.uri])
        error.result = receipt
        raise error
    return receipt


def _recorded(ledger: Ledger, receipt: Receipt) -> str:
    from wherry.ledger.record import has_conversion, record_conversion

    late = receipt.already and not has_conversion(ledger, receipt)
    record_conversion(ledger, receipt)
    return _LATE if late else RECORDED


def record_outcome(subject: CheckpointRef, verification: Mapping[str, Any]) -> None:
    """Record the outcome of a verification (its JSON form).

    Raises:
        NotRecordedError: the ledger cannot be used.
    """
    from wherry.ledger.record import open_ledger, record_verification

    try:
        with open_ledger() as ledger:
            record_verification(ledger, subject, verification)
    except Exception as caught:
        raise not_recorded(wherry_error(caught), [subject.uri], cure="verify it again") from caught
    after_record()


def record_sidecar(uri: str | os.PathLike[str], *, ledger: str | None = None) -> tuple[str, str]:
    """Record a committed checkpoint from its sidecar: its place, and the conversion that made it.

    It makes up for what a conversion, a rewrite, an export or a fetch could not record. No tensor byte is read.

    Args:
        uri: the checkpoint.
        ledger: SQLAlchemy URL; `WHERRY_LEDGER` or the file in the home by default.

    Returns:
        Where the checkpoint lies, and what was done, in words.

    Raises:
        NotFoundError: nothing is there, or it has no sidecar.
        MismatchError: the sidecar was altered.
        StorageError: the ledger cannot be used.
    """
    from wherry.formats.detect import resolve
    from wherry.ledger.record import has_conversion, open_ledger, record_conversion, record_sighting
    from wherry.ledger.resolve import checkpoint_uri, proved_sidecar

    location, _found = resolve(checkpoint_uri(uri))
    sidecar = proved_sidecar(location, "ledger record")
    receipt, subject = sidecar.receipt, _as_it_lies(sidecar.checkpoint, location)
    with open_ledger(ledger) as opened:
        missing = receipt is not None and not has_conversion(opened, receipt)
        if receipt is not None and missing:
            record_conversion(opened, receipt)
        seen = record_sighting(opened, subject)
    after_record()
    return location.uri, RECORDED if missing or seen is not None else _HAD


def _as_it_lies(checkpoint: CheckpointRef, location: Location) -> CheckpointRef:
    """A checkpoint at its present place; a copy has a fingerprint of its own."""
    from wherry.formats.checkpoint import open_checkpoint, present_fingerprint

    if checkpoint.uri == location.uri:
        return checkpoint
    with open_checkpoint(location.uri, format=checkpoint.format) as copy:
        return replace(checkpoint, uri=location.uri, fingerprint=present_fingerprint(copy))


def not_recorded(error: WherryError, uris: Sequence[str], *, cure: str | None = None) -> NotRecordedError:
    """The error for work that is done while the ledger or the registry refused.

    Args:
        error: why it refused.
        uris: what is committed.
        cure: what makes up for it once the reason is gone; the command that records the sidecars by default.
    """
    again = cure or f"run: {shlex.join(['wherry', 'ledger', 'record', *uris])}"
    return NotRecordedError(
        f"done, but not recorded: {error.what}",
        uri=", ".join(uris),
        cure=f"{error.cure}; then {again}" if error.cure else again,
        retryable=error.retryable,
    )


@contextmanager
def verification_of(uri: str) -> Generator[None]:
    """Around the verification of what is committed: a source that is gone meanwhile does not undo the commit.

    Raises:
        NotRecordedError: it is not verified; `result` is None.
    """
    try:
        yield
    except _GONE as error:
        refused = not_recorded(
            error, [uri], cure=f"run: {shlex.join(['wherry', 'verify', uri, '--level', 'digest'])}"
        )
        refused.what = f"done, but not verified: {error.what}"
        raise refused from error


@contextmanager
def registration_of(
    uri: str, name: str, *, alias: str | None = None, tags: Mapping[str, str] | None = None
) -> Generator[None]:
    """Around the registration of what is committed: a registry or ledger that refuses does not undo that.

    Args:
        uri: the checkpoint.
        name: the registered model.
        alias, tags: as for `register`.

    Raises:
        NotRecordedError: it is not registered.
    """
    try:
        yield
    except (*_REFUSALS, *_GONE) as error:
        words = ["wherry", "register", uri, "--name", name, *(["--alias", alias] if alias else [])]
        words += [word for key, value in (tags or {}).items() for word in ("--tag", f"{key}={value}")]
        refused = not_recorded(error, [uri], cure=f"run: {shlex.join(words)}")
        refused.what = f"done, but not registered: {error.what}"
        raise refused from error
