"""Equinox's `tree_serialise_leaves`: consecutive `.npy` records without names or a count; read, never written.

The order is that of the leaves of the tree, which only the program knows, so a tensor's key path is the number of its
record, and writing a file would need that program. Users often put a line of JSON with the model's hyperparameters
before the records (the pattern of Equinox's documentation): it becomes the manifest's `custom`. A single `.npy` file
looks like one record; it counts only if more records follow or the name ends in `.eqx`.
Source: equinox/_serialisation.py of 0.13.8; the records are described in `containers/npz/npy.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

from wherry.core.detection import Detection, Evidence
from wherry.core.json_document import parse_json
from wherry.core.keypath import KeyPath
from wherry.core.limits import SMALL, beyond, exceeds, scale_limit
from wherry.core.manifest import Manifest
from wherry.core.tensorspec import TensorSpec
from wherry.errors import CorruptError, UnsupportedError, WherryError
from wherry.formats.format import Format, Glimpse, Holds, Opened, Signs
from wherry.integrations.containers.flat.strides import PlacedTensor, StridedReader
from wherry.integrations.containers.npz.npy import MAGIC, NpyHeader, read_header
from wherry.store.location import Location

SUFFIX = ".eqx"
VERSION = ".npy records, no names"
_LONGEST_LINE = 1 << 20
_WINDOW = 1 << 16  # bytes
_MOST_RECORDS = 120_000
_MOST_ODD = 10_000  # records whose header is not written as numpy writes it


def _detect(glimpse: Glimpse) -> Detection | None:
    named = glimpse.location.name.endswith(SUFFIX)
    seen = None
    if glimpse.head.startswith(MAGIC) and named:
        seen = f"starts with a .npy record, and its name ends in {SUFFIX}"
    elif glimpse.head.startswith(MAGIC):
        try:
            first = _record(_RecordWindow(glimpse.location), 0, 0)
        except WherryError:
            return None  # a single unsupported array is not a checkpoint, whatever it holds
        if glimpse.size > first.length + first.nbytes:
            seen = "starts with a .npy record, and more follow"
    elif glimpse.head.startswith(b"{") and (named or b"\n" + MAGIC in glimpse.head):
        seen = "a line of JSON, then .npy records"
    return glimpse.detected("equinox", VERSION, "equinox", seen, kind="params") if seen else None


class _RecordWindow:
    """Reads of a file that serve short records from one larger read."""

    def __init__(self, location: Location) -> None:
        self.uri, self._location = location.uri, location
        self._start, self._held = 0, b""

    def read(self, start: int, stop: int) -> bytes:
        """Bytes [start, stop) of the file, fewer at its end."""
        if not self._start <= start <= stop <= self._start + len(self._held):
            self._start, self._held = start, self._location.read(start, max(stop, start + _WINDOW))
        return self._held[start - self._start : stop - self._start]


def _record(window: _RecordWindow, start: int, number: int) -> NpyHeader:
    return read_header(lambda a, b: window.read(start + a, start + b), window.uri, f"record {number}")


def _open(location: Location, detection: Detection) -> Opened:
    entry = location.present()
    custom, position = _hyperparameters(location)
    specs: dict[KeyPath, TensorSpec] = {}
    placed: dict[KeyPath, PlacedTensor] = {}
    for start, header in _records(location, position, entry.size):
        path = (str(len(specs)),)
        specs[path] = TensorSpec(path, header.shape, header.dtype)
        placed[path] = PlacedTensor(
            location, start, header.nbytes, 0, header.shape, header.strides, header.dtype, header.big_endian
        )
    kind = "params" if all("float" in spec.dtype for spec in specs.values()) else "other"
    manifest = Manifest(tensors=specs, step=detection.step, kind=kind, custom=custom)
    seen = Evidence(location.name, f"{len(specs)} records, identified only by their numbers")
    return Opened(
        replace(detection, kind=kind).seen(seen), manifest, StridedReader(location, placed, (entry,))
    )


def _records(location: Location, position: int, size: int) -> Iterator[tuple[int, NpyHeader]]:
    """Each record: where its elements begin, and its header."""
    window, number, odd = _RecordWindow(location), 0, 0
    while position < size:
        header = _record(window, position, number)
        odd += not header.plain
        for count, most, what in (
            (number + 1, _MOST_RECORDS, "records"),
            (odd, _MOST_ODD, "unusual headers"),
        ):
            if exceeds(count, most):
                raise beyond(location.name, scale_limit(most), what, uri=location.uri)
        if header.dtype in ("str", "bytes"):
            raise UnsupportedError(
                f"unsupported string in record {number}",
                uri=location.uri,
                cure="remove it from the saved tree",
            )
        start = position + header.length
        position = start + header.nbytes
        if position > size:
            raise CorruptError(
                f"record {number} is truncated: expected {position} bytes in the file, got {size}",
                uri=location.uri, cure="restore the file",
            )  # fmt: skip
        yield start, header
        number += 1


def _hyperparameters(location: Location) -> tuple[dict[str, Any], int]:
    """The line of JSON before the records, and the offset of the first record."""
    head = location.read(0, _LONGEST_LINE)
    if head.startswith(MAGIC):
        return {}, 0
    line, found, _ = head.partition(b"\n")
    try:
        said: Any = parse_json(line, "the first line", limits=SMALL) if found else None
    except CorruptError as error:
        raise CorruptError(
            "invalid JSON in the first line", uri=location.uri, cure="restore the file"
        ) from error
    if not isinstance(said, dict):
        raise CorruptError(
            "expected a JSON object in the first line", uri=location.uri, cure="restore the file"
        )
    return cast("dict[str, Any]", said), len(line) + 1


FORMATS = (
    Format(
        name="equinox",
        title="Equinox tree_serialise_leaves",
        detect=_detect,
        signs=Signs(head=rb"\x93NUMPY|\{"),
        open=_open,
        holds=Holds(dtypes=frozenset()),
        aliases=("eqx",),
        single_file=True,
    ),
)
