"""Records committed work in the ledger, and reports work that could not be recorded.

Work counts as done only when it is recorded: if recording fails, the target stays, and the call raises a
`NotRecordedError` that carries the result of the call and names the command that records it later. That command runs
`record_sidecar`, which needs only the checkpoint with its sidecar.
"""

from __future__ import annotations

import os
import shlex
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from wherry.core import interrupts
from wherry.core.request import SourceRequest
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
    from collections.abc import Generator, Mapping, Sequence

    from wherry.core.receipt import CheckpointRef, Receipt

# Errors of the ledger and the registry themselves; other errors concern the checkpoint.
_REFUSALS = (StorageError, MissingExtraError, UnsupportedError, UsageError)
# Errors that after the commit mean only that work remains to be done.
_GONE = (NotFoundError, TargetInUseError)
RECORDED = "recorded"
REFUSED = "not recorded: "  # prefix of the reason
LEFT_OUT = "left out by request"
_LATE = "recorded now; the ledger did not have it"
_HAD = "already recorded"


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
    """Record committed conversions: new ones, and existing ones that were found.

    Returns:
        The receipts, each with the outcome of the recording as `lineage`.

    Raises:
        NotRecordedError: the ledger cannot be used. The targets stay; `result` is the result of the call, with the
            reason as `lineage` of each receipt that was not recorded.
    """
    from wherry.ledger.record import has_conversion, open_ledger, record_conversion

    done: list[Receipt] = []
    try:
        with open_ledger() as ledger:
            for one in receipts:
                late = one.already and not has_conversion(ledger, one)
                record_conversion(ledger, one)
                done.append(replace(one, lineage=_LATE if late else RECORDED))
    except Exception as caught:  # noqa: BLE001  whatever the error is, the targets are committed
        cause, rest = wherry_error(caught), receipts[len(done) :]
        error = not_recorded(cause, [one.target.uri for one in rest])
        error.result = (*done, *(replace(one, lineage=REFUSED + cause.what) for one in rest))
        raise error from cause
    interrupts.settle([one.target.uri for one in receipts])
    after_record()
    return tuple(done)


def require_recorded(receipt: Receipt) -> Receipt:
    """Return the receipt of another process, unless that process could not record the conversion.

    Raises:
        NotRecordedError: the conversion was not recorded; `result` is the receipt.
    """
    if receipt.lineage.startswith(REFUSED):
        error = not_recorded(StorageError(receipt.lineage.removeprefix(REFUSED)), [receipt.target.uri])
        error.result = receipt
        raise error
    return receipt


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

    Use it after a conversion, a rewrite, an export or a fetch that could not be recorded. No tensor byte is read.

    Args:
        uri: the checkpoint.
        ledger: its URL; `WHERRY_LEDGER` or the file in the home by default.

    Returns:
        The URI of the checkpoint, and what was recorded, as text.

    Raises:
        NotFoundError: the checkpoint does not exist, or has no sidecar.
        MismatchError: the sidecar was altered.
        StorageError: the ledger cannot be used.
    """
    from wherry.formats.checkpoint import open_source, present_fingerprint
    from wherry.formats.detect import resolve_source
    from wherry.ledger.open import resolve_named
    from wherry.ledger.record import has_conversion, open_ledger, record_conversion, record_sighting
    from wherry.ledger.resolve import proved_sidecar

    location, _found = resolve_source(resolve_named(SourceRequest(os.fspath(uri))))
    sidecar = proved_sidecar(location, "ledger record")
    receipt, subject = sidecar.receipt, sidecar.checkpoint
    if subject.uri != location.uri:  # a copy has its own fingerprint
        with open_source(SourceRequest(location.uri, subject.format)) as copy:
            subject = replace(subject, uri=location.uri, fingerprint=present_fingerprint(copy))
    with open_ledger(ledger) as opened:
        missing = receipt is not None and not has_conversion(opened, receipt)
        if receipt is not None and missing:
            record_conversion(opened, receipt)
        seen = record_sighting(opened, subject)
    after_record()
    return location.uri, RECORDED if missing or seen is not None else _HAD


def not_recorded(error: WherryError, uris: Sequence[str], *, cure: str | None = None) -> NotRecordedError:
    """The error for work that is done, but could not be recorded or registered.

    Args:
        error: the error of the ledger or the registry.
        uris: the committed checkpoints.
        cure: how to record the work once the error is fixed; by default the command that records the sidecars.
    """
    again = cure or f"run `{shlex.join(['wherry', 'ledger', 'record', *uris])}`"
    return NotRecordedError(
        f"done, but not recorded: {error.what}",
        uri=", ".join(uris),
        cure=f"{error.cure}; then {again}" if error.cure else again,
        retryable=error.retryable,
    )


@contextmanager
def verification_of(uri: str) -> Generator[None]:
    """Around the verification of a committed target: an error, such as a missing source, does not undo the commit.

    Raises:
        NotRecordedError: the target could not be verified; `result` is None.
    """
    try:
        yield
    except _GONE as error:
        refused = not_recorded(
            error, [uri], cure=f"run `{shlex.join(['wherry', 'verify', uri, '--level', 'digest'])}`"
        )
        refused.what = f"done, but not verified: {error.what}"
        raise refused from error


@contextmanager
def registration_of(
    uri: str, name: str, *, alias: str | None = None, tags: Mapping[str, str] | None = None
) -> Generator[None]:
    """Around the registration of a committed target: an error of the registry or ledger does not undo the commit.

    Args:
        uri: the checkpoint.
        name: the registered model.
        alias, tags: as for `register`.

    Raises:
        NotRecordedError: the target could not be registered.
    """
    try:
        yield
    except (*_REFUSALS, *_GONE) as error:
        words = ["wherry", "register", uri, "--model", name, *(["--alias", alias] if alias else [])]
        words += [word for key, value in (tags or {}).items() for word in ("--tag", f"{key}={value}")]
        refused = not_recorded(error, [uri], cure=f"run `{shlex.join(words)}`")
        refused.what = f"done, but not registered: {error.what}"
        raise refused from error
