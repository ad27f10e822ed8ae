"""shared_files: large files of a target that the units of a job share: each unit makes its own region of them.

On a file system they lie in one folder of the job, preallocated. In a store of objects each is one upload, of which a
unit sends the parts of its region. A record names the folder, or the upload: where it is lost, the next commit removes
the record, so that what receipts say of it is no longer believed.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from wherry.errors import StorageError, TargetExistsError
from wherry.objects.uploads import Part, Upload
from wherry.records.unit_receipt import receipts_by_unit

if TYPE_CHECKING:
    from collections.abc import Callable

    from wherry.records.claims import Claim
    from wherry.records.records import Records
    from wherry.records.unit import Unit
    from wherry.records.unit_receipt import UnitReceipt
    from wherry.units.split_job import SplitJob

_LOOK_SECONDS = 0.5  # between two looks whether somebody else has made the unit


def shared_record(name: str) -> str:
    """The record of a shared file.

    Args:
        name: of the file, relative to the target.
    """
    return f"shared-{sha256(name.encode()).hexdigest()[:16]}"


def shared_token(split: SplitJob, unit: Unit, claim: Claim | None = None) -> str:
    """The token of the folder of a shared file, on a file system; empty if there is none.

    Args:
        split: the job.
        unit: that makes a region of the file.
        claim: of an attempt that begins the file if there is none.

    Raises:
        StorageError: the storage failed.
    """
    name = shared_record(unit.files[0].name)
    row = split.records.read(name)
    if row is None and claim is not None:
        row = _record(split.records, name, {"token": claim.token}, claim)
    return "" if row is None else row["token"]


def shared_upload(split: SplitJob, unit: Unit, path: str, claim: Claim | None = None) -> Upload | None:
    """The upload of a shared file, in a store of objects; None if there is none.

    Args:
        split: the job.
        unit: that makes a region of the file.
        path: of the object until the commit.
        claim: of an attempt that begins the upload if there is none.

    Raises:
        StorageError: the storage failed.
    """
    store, name = split.records.store, shared_record(unit.files[0].name)
    assert store is not None, "the caller has asked"
    row = split.records.read(name)
    if row is None and claim is not None:
        own = store.begin(path, claim.token)
        row = _record(split.records, name, {"upload": asdict(own)}, claim)
        # Another worker was faster. On Azure, what has begun is left, and goes when the object is there: an abort
        # removes what all workers have sent.
        if row["upload"]["key"] != own.key and store.aborts_apart:
            store.abort(own)
    return None if row is None else Upload(**row["upload"])


def _record(records: Records, name: str, row: dict[str, Any], claim: Claim) -> dict[str, Any]:
    """The record of a shared file: this one, or that of a worker that was faster."""
    records.create(name, {**row, "run": claim.token}, claim.token)
    found = records.read(name)
    if found is None:
        raise StorageError("the job has ended", uri=records.folder.uri, cure="run the same command again")
    return found


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
        if unit.number in receipts_by_unit(split.records.names()):
            raise TargetExistsError(
                f"unit {unit.name} was made by another worker", uri=split.uri, cure="there is nothing to do"
            )

    return guard


@dataclass(slots=True)
class SharedUploads:
    """The uploads of a job, as one commit sees them; each is asked once for its parts.

    Attributes:
        split: the job.
        place: the path of an object of a unit until the commit.
        uploads: by their key.
    """

    split: SplitJob
    place: Callable[[str], str]
    uploads: dict[str, Upload] = field(default_factory=dict[str, Upload])
    _present: dict[str, dict[int, Part] | None] = field(default_factory=dict[str, "dict[int, Part] | None"])

    def has(self, receipt: UnitReceipt) -> bool:
        """Whether the store has the parts of a region as its worker has sent them, or the object that they became."""
        unit = self.split.units[receipt.unit]
        upload = shared_upload(self.split, unit, self.place(unit.files[0].name))
        if upload is None or upload.key != receipt.files[0].mark:
            return False
        self.uploads[upload.key] = upload
        present = self._parts(upload)
        return present is None or len(self.current(receipt)) == len(receipt.parts)

    def current(self, receipt: UnitReceipt) -> list[list[Any]]:
        """The parts of a receipt that the store has; one that a late worker has sent again has another mark."""
        upload = self.uploads.get(receipt.files[0].mark) if receipt.files else None
        present = self._parts(upload) if upload is not None else None
        if present is None:
            return list(receipt.parts)
        rows: list[list[Any]] = []
        for path, row in receipt.parts:
            noted, found = Part(**row), present.get(row["number"])
            if found is not None and _is_same(noted, found):
                rows.append([path, asdict(replace(noted, mark=found.mark))])
        return rows

    def _parts(self, upload: Upload) -> dict[int, Part] | None:
        """The parts of an upload; None if it has become its object, and no parts if it is gone."""
        if upload.key not in self._present:
            store = self.split.records.store
            assert store is not None, "the caller has asked"
            found = store.head(upload.path)
            try:
                known = {part.number: part for part in store.parts(upload)}
            except FileNotFoundError:
                known = dict[int, Part]()
            self._present[upload.key] = None if found is not None and found.run == upload.run else known
        return self._present[upload.key]


def _is_same(noted: Part, found: Part) -> bool:
    """Whether a part holds the bytes that were noted, by its mark or by the checksum that the store has computed."""
    same = noted.mark == found.mark or bool(noted.checksum and noted.checksum == found.checksum)
    return same and noted.nbytes == found.nbytes
