"""shared_files: large files of a target that the units of a job share: each unit writes its own region of them.

On a file system they lie in one folder of the job, preallocated. A record names that folder: where the files are lost,
the next commit removes the record, so that what receipts say of them is no longer believed.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from wherry.errors import StorageError, TargetExistsError
from wherry.units.unit_receipt import done

if TYPE_CHECKING:
    from collections.abc import Callable

    from wherry.units.claims import Claim
    from wherry.units.split_job import SplitJob
    from wherry.units.unit import Unit

RECORD = "shared.json"  # names the folder of the files
_LOOK_SECONDS = 0.5  # between two looks whether somebody else has made the unit


def shared_token(split: SplitJob, claim: Claim | None = None) -> str:
    """The token of the folder of the shared files; empty if there is none.

    Args:
        split: the job.
        claim: of an attempt that begins the folder if there is none.

    Raises:
        StorageError: the storage failed.
    """
    row = split.records.read(RECORD)
    if row is None and claim is not None:
        split.records.create(RECORD, {"token": claim.token, "run": claim.token}, claim.token)
        row = split.records.read(RECORD)
        if row is None:
            raise StorageError("the job has ended", uri=split.uri, cure="run the same command again")
    return "" if row is None else row["token"]


def late_guard(split: SplitJob, unit: Unit) -> Callable[[], None]:
    """A function that ends an attempt when another one has made the unit.

    A commit needs a receipt of every unit, so after it has begun no worker goes on that comes back from the dead. What
    it may write before it looks are the bytes that are there.
    """
    last = -_LOOK_SECONDS

    def guard() -> None:
        nonlocal last
        now = time.monotonic()
        if now - last < _LOOK_SECONDS:
            return
        last = now
        if unit.number in done(split.records.names()):
            raise TargetExistsError(
                f"unit {unit.name} was made by another worker", uri=split.uri, cure="there is nothing to do"
            )

    return guard
