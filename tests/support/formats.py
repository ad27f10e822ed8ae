"""Helpers of the format tests: the corpus, and the formats driven directly."""

from __future__ import annotations

import hashlib
from pathlib import Path

from hypothesis import strategies as st

from tests.support.corpus import CORPUS, cases, either, expected, home, place  # noqa: F401  tests take them from here
from wherry.core import dtypes
from wherry.core.tensorspec import Span
from wherry.errors import WherryError
from wherry.formats.format import Glimpse, Opened
from wherry.formats.registry import checked_options, find_format
from wherry.mover.map_writer import writer_of
from wherry.mover.read import read_array, read_bytes
from wherry.store.local_store import locate


def opened(path, format_name: str) -> Opened:
    row, location = find_format(format_name), locate(path)
    detection = row.detect(Glimpse(location))
    assert detection is not None, f"{path} is not detected as {format_name}"
    return row.open(location, detection)


def canonical(found: Opened, path) -> bytes:
    spec = found.manifest.tensors[path]
    if dtypes.opaque(spec.dtype):
        return read_bytes(found.reader, spec)
    return read_array(found.reader, spec, spec.whole).tobytes()


def assert_as_expected(found: Opened, row: dict) -> None:
    """Key paths, shapes, dtypes and the SHA-256 of the canonical bytes, read both ways."""
    wanted = {tuple(tensor["path"]): tensor for tensor in row["tensors"]}
    assert set(found.manifest.tensors) == set(wanted)
    for path, tensor in wanted.items():
        spec = found.manifest.tensors[path]
        assert (spec.shape, spec.dtype) == (tuple(tensor["shape"]), tensor["dtype"]), path
        data = canonical(found, path)
        if tensor["sha256"] is not None:
            assert hashlib.sha256(data).hexdigest() == tensor["sha256"], path
        extents = found.reader.access(spec).extents
        if extents is not None:
            raw = b"".join(Path(e.file).read_bytes()[e.offset : e.offset + e.length] for e in extents)
            assert raw == data, path


def create(path, format_name: str, manifest, options=None):
    row = find_format(format_name)
    return writer_of(row, locate(path), manifest, checked_options(row, options or {}))


def write_all(writer, contents: dict) -> None:
    """Write each tensor whole as one span, and finish."""
    for path, data in contents.items():
        writer.write(path, Span(0, len(data)), memoryview(data))
    writer.finish()
    writer.close()


def copy(found: Opened, path, format_name: str, options=None) -> None:
    """Write every tensor of an opened checkpoint into another format."""
    contents = {key: canonical(found, key) for key in found.manifest.tensors}
    write_all(create(path, format_name, found.manifest, options), contents)


_BYTES = st.integers(0, 255)


def mutated(data: st.DataObject, raw: bytes, byte: st.SearchStrategy[int] = _BYTES) -> bytes:
    """The bytes with a few of them changed, and cut perhaps.

    Args:
        data: hypothesis draws from it.
        raw: what to change.
        byte: what a changed byte may become.
    """
    changed = bytearray(raw)
    for _ in range(data.draw(st.integers(1, 4))):
        changed[data.draw(st.integers(0, len(raw) - 1))] = data.draw(byte)
    stop = data.draw(st.integers(0, len(raw))) if data.draw(st.booleans()) else len(raw)
    return bytes(changed[:stop])


def assert_ends_well(path: Path, format_name: str) -> None:
    """Whatever lies there is not of this format, is refused by one of our errors, or is read in full."""
    outcome = _read_all(path, format_name)
    if isinstance(outcome, WherryError):
        assert outcome.exit_code in (4, 5, 6), f"{type(outcome).__name__}: {outcome}"
        assert str(outcome).encode()
    elif outcome is not None:
        assert not list(outcome[0].reader.absent()), "chunks that are not there were read"
        for key, contents in outcome[1].items():
            assert len(contents) == outcome[0].manifest.tensors[key].nbytes, key


def _read_all(path: Path, format_name: str) -> tuple[Opened, dict] | WherryError | None:
    row, location = find_format(format_name), locate(path)
    try:
        detection = row.detect(Glimpse(location))
        if detection is None:
            return None
        found = row.open(location, detection)
        return found, {key: canonical(found, key) for key in found.manifest.tensors}
    except WherryError as error:
        return error
