"""The sidecar: the record that wherry writes next to a checkpoint.

`wherry.json` in a folder, `<file>.wherry.json` next to a file: the manifest with a digest per tensor, the leaf
digests (so that a mismatch can name the damaged 4 MiB), its node of the lineage, and the receipt of the conversion
that made it. Sidecars alone are enough to rebuild conversions and edges when every database is lost. A sidecar whose
checkpoint file no longer exists has no meaning. A file name of more than 207 bytes is cut in the sidecar's name, which
ends with digits of its hash then.

Next to a file with a step's name it is `.<file>.wherry.json`: flax treats every file whose name begins like a
step's as a step, so it would restore from the sidecar, or delete it as the oldest step.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, field
from itertools import islice
from typing import TYPE_CHECKING, Any

from wherry.core import receipt as receipts
from wherry.core.digest import HASH_BYTES
from wherry.core.json_document import Rows, scan_json
from wherry.core.keypath import KeyPath, parse, render
from wherry.core.lazy_dataclass import dataclass
from wherry.core.limits import JsonLimits, beyond, exceeds, scale_limit
from wherry.core.manifest import Manifest, from_json, tensor_row
from wherry.core.receipt import CheckpointRef, Receipt
from wherry.core.steps import step_number
from wherry.core.threads import without_collection
from wherry.errors import CorruptError, NotFoundError, describe_exception, schema_error, storage_errors
from wherry.store.folders import short_name
from wherry.store.open_file import write_regular

if TYPE_CHECKING:
    from wherry.store.location import Location

FOLDER_NAME = "wherry.json"
SIGNATURE_NAME = "wherry.sig"
OWN_NAMES = frozenset(
    {FOLDER_NAME, SIGNATURE_NAME}
)  # files of wherry in a folder do not belong to the checkpoint
SCHEMA = 2
MOST_SIDECAR = 192 << 20  # bytes; a sidecar for 100,000 tensors has 60 MB
_MOST_LEAVES = 2_500_000  # of 4 MiB: a checkpoint of 10 TB
_LIMITS = JsonLimits(nbytes=MOST_SIDECAR)
_CURE = "restore the sidecar from a backup, or delete it"
_MOST_INDENTED = 2000  # tensors; nobody reads a longer sidecar by eye
_AT_ONCE = 1000  # rows that are encoded in one call


@dataclass(frozen=True, slots=True)
class Sidecar:
    """Contents of a sidecar.

    Attributes:
        manifest: what the checkpoint held when it was committed, digests included.
        checkpoint: the node of the lineage.
        receipt: the conversion that made it; None if only its digests were recorded.
        leaves: key path → raw hash of each leaf, by the algorithm of the digests.
        files: name → size of each file of the checkpoint, None for other files in its folder; None if there are too
            many. See `wherry.formats.recorded_files`.
    """

    manifest: Manifest
    checkpoint: CheckpointRef
    receipt: Receipt | None = None
    leaves: Mapping[KeyPath, tuple[bytes, ...]] = field(default_factory=dict[KeyPath, tuple[bytes, ...]])
    files: Mapping[str, int | None] | None = None

    @property
    def algorithm(self) -> str:
        """The algorithm of its digests and leaves."""
        return self.checkpoint.algorithm


def sidecar_location(location: Location) -> Location:
    """The location of the sidecar of a checkpoint: in its folder, or next to its file."""
    return _location_of(location, FOLDER_NAME)


def is_marked(location: Location, members: tuple[str, ...]) -> bool:
    """Whether what is at a location can be committed: in a store, a sidecar appears shortly before the commit member.

    Args:
        location: what is committed in one step: a file, a folder, or the folder of a step.
        members: names of commit members of its format.

    Raises:
        StorageError: the storage failed.
    """
    if location.store.capabilities.local:
        return True  # a rename makes everything appear at once
    return any(place.exists() for place in map(location.join, members)) if members else location.exists()


def sidecar_name(file: str) -> str:
    """The name of the sidecar next to a file."""
    return _name_next_to(file, FOLDER_NAME)


def signature_location(location: Location) -> Location:
    """The location of the signature of a checkpoint: next to its sidecar."""
    return _location_of(location, SIGNATURE_NAME)


def signature_name(file: str) -> str:
    """The name of the signature next to a file."""
    return _name_next_to(file, SIGNATURE_NAME)


def _location_of(checkpoint: Location, name: str) -> Location:
    in_folder = checkpoint.entry is not None and checkpoint.entry.is_dir
    if in_folder:
        return checkpoint.join(name)
    return checkpoint.parent.join(_name_next_to(checkpoint.name, name))


def _name_next_to(file: str, name: str) -> str:
    return f"{'.' if step_number(file) is not None else ''}{short_name(file)}.{name}"


def read_sidecar(location: Location) -> Sidecar | None:
    """The sidecar of a checkpoint, or None if it has none.

    Raises:
        CorruptError: the sidecar is invalid.
    """
    place = sidecar_location(location)
    try:
        with without_collection():
            data = _scan(place)
    except NotFoundError:
        return None
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        if isinstance(error, CorruptError):
            raise
        raise CorruptError(
            f"invalid sidecar: {describe_exception(error)}", uri=place.uri, cure=_CURE
        ) from error
    return _decode(data, place.uri)


def _scan(place: Location) -> Any:
    """The JSON of a sidecar, with tensors and leaves already decoded."""
    counted = 0

    def leaves(_path: str, text: str) -> tuple[bytes, ...]:
        nonlocal counted
        raw = base64.b64decode(text, validate=True)
        found = tuple(raw[start : start + HASH_BYTES] for start in range(0, len(raw), HASH_BYTES))
        counted += len(found)
        if exceeds(counted, _MOST_LEAVES):
            raise beyond("the sidecar", scale_limit(_MOST_LEAVES), "leaves", uri=place.uri)
        return found

    rows: Rows = {
        "manifest": {"tensors": lambda _number, row: tensor_row(row)},
        "leaves": {"*": leaves},
        "files": lambda _name, size: size,
    }
    pieces = place.metadata(scale_limit(MOST_SIDECAR))
    return scan_json(pieces, "the sidecar", rows, uri=place.uri, limits=_LIMITS, cure=_CURE)


def readable_sidecar(location: Location) -> Sidecar | None:
    """The sidecar of a checkpoint, or None if it has none, or an invalid one."""
    try:
        return read_sidecar(location)
    except CorruptError:
        return None


def put_sidecar(place: Location, sidecar: Sidecar) -> None:
    """Write a sidecar; in a local folder of very many tensors without holding all of it.

    Raises:
        StorageError: the storage failed.
    """
    if not place.store.capabilities.local:
        place.put(encode(sidecar))
        return
    with storage_errors(place.uri):
        write_regular(place.path, _pieces(sidecar))


def encode(sidecar: Sidecar) -> bytes:
    """The contents of the sidecar's file; the inverse of `read_sidecar`."""
    return b"".join(_pieces(sidecar))


def _pieces(sidecar: Sidecar) -> Iterator[bytes]:
    """The contents of the sidecar's file."""
    # Indented by json's encoder in Python, which takes ten times as long as the one in C.
    if len(sidecar.manifest.tensors) <= _MOST_INDENTED:
        data = {**_json_form(sidecar), "manifest": sidecar.manifest.to_json()}
        data["leaves"] = {sidecar.algorithm: dict(_leaf_rows(sidecar))}
        yield json.dumps(data, indent=1).encode()
    else:
        yield from _long(sidecar)
    yield b"\n"


def _json_form(sidecar: Sidecar) -> dict[str, Any]:
    """The JSON form of a sidecar without tensors and leaves."""
    return {
        "schema": SCHEMA,
        "checkpoint": asdict(sidecar.checkpoint),
        "receipt": sidecar.receipt.to_json() if sidecar.receipt else None,
        "manifest": sidecar.manifest.json_form(),
        "leaves": {sidecar.algorithm: {}},
        "files": None if sidecar.files is None else dict(sidecar.files),
    }


def _leaf_rows(sidecar: Sidecar) -> Iterator[tuple[str, str]]:
    """Each printed key path with the hashes of its leaves."""
    for path, raw in sidecar.leaves.items():
        yield render(path), base64.b64encode(b"".join(raw)).decode()


def _long(sidecar: Sidecar) -> Iterator[bytes]:
    """The JSON text of a sidecar without indents; rows of tensors are made a thousand at a time."""
    mark = "{"
    for name, value in _json_form(sidecar).items():
        yield f'{mark}"{name}": '.encode()
        if name == "manifest":
            inner = "{"
            for key, part in value.items():
                yield f'{inner}"{key}": '.encode()
                if key == "tensors":
                    yield from _rows(sidecar.manifest.tensor_rows(), list)
                else:
                    yield json.dumps(part).encode()
                inner = ", "
            yield b"}"
        elif name == "leaves":
            yield f'{{"{sidecar.algorithm}": '.encode()
            yield from _rows(_leaf_rows(sidecar), dict)
            yield b"}"
        else:
            yield json.dumps(value).encode()
        mark = ", "
    yield b"}"


def _rows(rows: Iterator[Any], kind: type[list[Any] | dict[str, Any]]) -> Iterator[bytes]:
    """An array of values, or an object of pairs, from an iterator."""
    begin, end = json.dumps(kind())
    mark = begin
    while some := kind(islice(rows, _AT_ONCE)):
        yield f"{mark}{json.dumps(some)[1:-1]}".encode()
        mark = ", "
    yield (end if mark != begin else begin + end).encode()


def _decode(data: dict[str, Any], uri: str) -> Sidecar:
    try:
        if data["schema"] != SCHEMA:
            raise schema_error("sidecar", data["schema"], SCHEMA, uri, cure="delete it")
        checkpoint = receipts.reference_from_json(data["checkpoint"])
        leaves = _leaves_by(checkpoint.algorithm, data)
        return Sidecar(
            manifest=from_json(data["manifest"], uri),
            checkpoint=checkpoint,
            receipt=receipts.from_json(data["receipt"], uri) if data["receipt"] else None,
            leaves={parse(path): found for path, found in leaves.items()},
            files=_files(data),
        )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        if isinstance(error, CorruptError):
            raise
        raise CorruptError(f"invalid sidecar: {describe_exception(error)}", uri=uri, cure=_CURE) from error


def _leaves_by(algorithm: str, data: dict[str, Any]) -> dict[str, Any]:
    """The hashes of leaves by the algorithm of the digests; no others are stored."""
    found = data["leaves"]
    if found.keys() - {algorithm}:
        raise ValueError(f"its digests are by {algorithm}, its hashes of leaves are not")
    return found.get(algorithm, {})


def _files(data: dict[str, Any]) -> dict[str, int | None] | None:
    """The files and their sizes; None if there were too many."""
    found = data["files"]
    if found is None:
        return None
    if not isinstance(found, dict) or {*map(type, found.values())} - {int, type(None)}:
        raise TypeError("expected sizes of files")
    return found
