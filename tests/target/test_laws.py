"""The laws of file maps, for every format that has a layout: what its map says is what its files are."""

from __future__ import annotations

import tracemalloc
import zipfile
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from zlib import crc32

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st

from wherry.core import dtypes
from wherry.core.manifest import Manifest
from wherry.core.tensorspec import Span, TensorSpec
from wherry.formats.registry import find_format, formats
from wherry.integrations.containers.zarr.listing import list_ocdbt
from wherry.mover.map_writer import MapWriter
from wherry.mover.move import cells
from wherry.store.local_store import locate
from wherry.target.file_map import Coded, Late, Literal, PlacedChunks, Raw, Scene, Segments, SeparateChunks
from wherry.target.file_ranges import file_of, file_sizes, lengths_of, ranges_of
from wherry.target.grids import ChunkPlace
from wherry.testing import samples, writers

OPTIONS = {"shard_size": "100KB", "max_shard_size": "1MB", "data_file_size": "8MB"}
FILES, ZSTD = {"ocdbt": False}, {"compression": "zstd"}
# How chunks are stored depends on options.
FURTHER = {
    "orbax-files": ("orbax", FILES),
    "orbax-packed": ("orbax", ZSTD),
    "orbax-compressed-files": ("orbax", {**FILES, **ZSTD, "zarr": "3"}),
    "paxml-1.2": ("paxml", {"version": "1.2"}),
    "t5x-without-inline": ("t5x-legacy", {"inline": "none", "compression": "gzip"}),
}
LAYOUTS = [name for name, row in formats().items() if row.layout is not None] + list(FURTHER)
CREATED = 1_700_000_000_000_000_000
MOST_BYTES = 200  # of a map, for each tensor


@cache
def sample_of(name):
    known, further = FURTHER.get(name, (name, {}))
    row = find_format(known)
    options = {key: value for key, value in OPTIONS.items() if key in row.options}
    return samples.sample(row, {**options, **further})


@pytest.fixture(autouse=True)
def _at_one_time(monkeypatch):
    monkeypatch.setattr("wherry.mover.map_writer.time.time_ns", lambda: CREATED)


def scene_of(sample, folder):
    names = {name: folder / name for name in sample.companions}
    for name, place in names.items():
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(sample.companions[name])
    return Scene(lambda name: locate(names[name]) if name in names else None, "out", CREATED)


def laid_out(sample, folder):
    return sample.row.layout(sample.manifest, sample.options, scene_of(sample, folder))


@cache
def map_of(name):
    with TemporaryDirectory() as folder:
        return laid_out(sample_of(name), Path(folder))


@pytest.mark.parametrize("name", LAYOUTS)
def test_segments_tile_each_file_and_hold_every_byte_of_each_tensor_once(name, tmp_path):
    sample = sample_of(name)
    held = dict.fromkeys(sample.manifest.tensors, 0)
    file_map = laid_out(sample, tmp_path)
    for file in file_map.files:
        if not isinstance(file.body, Segments):
            continue
        end = 0
        for number in range(len(file.body)):
            bounds = file.body.bounds(number)
            assert bounds.start == end
            end = bounds.stop
            if bounds.nbytes:
                assert file.body.at(bounds.start) == number == file.body.at(bounds.stop - 1)
            segment = file.body[number]
            assert bool(file.body.tensors[number]) == isinstance(segment, Raw | Coded)
            if isinstance(segment, Raw):
                assert segment.span.start == held[segment.tensor], "in the order of the tensor's bytes"
                held[segment.tensor] += bounds.nbytes
            elif isinstance(segment, Coded):
                held[segment.tensor] += bounds.nbytes // segment.codec.stored * segment.codec.block
            elif isinstance(segment, Literal | Late):
                assert len(segment.data) == bounds.nbytes
        assert end == file.body.nbytes
        frames = [number for frame in file.body.frames() for number in range(*frame)]
        assert frames == [number for number in range(len(file.body)) if not file.body.tensors[number]]
    flat = {path: spec for path, spec in sample.manifest.tensors.items() if spec.chunks is None}
    in_chunks = {spec.path for spec in file_map.chunks.grids.specs} if file_map.chunks else set()
    assert flat.keys() | in_chunks == sample.manifest.tensors.keys()
    assert held == {
        path: spec.nbytes if path in flat else 0 for path, spec in sample.manifest.tensors.items()
    }


@pytest.mark.parametrize("name", LAYOUTS)
def test_chunks_tile_their_tensors_and_files(name):
    """Each element of a tensor is in one chunk, and each byte of a file of chunks belongs to one."""
    chunks = map_of(name).chunks
    if chunks is None:
        return
    grids = chunks.grids
    held = {spec.path: np.zeros(spec.shape, "u1") for spec in grids.specs}
    for number in range(len(grids)):
        chunk = grids[number]
        assert grids.number(chunk.spec.path, chunk.region) == number
        held[chunk.spec.path][chunk.region] += 1
    assert all((array == 1).all() for array in held.values())
    assert len({chunks.name(number) for number in range(len(grids))}) == len(grids)
    if isinstance(chunks, PlacedChunks):
        ends = dict.fromkeys(chunks.sizes, 0)
        for number in range(len(grids)):
            file, offset, nbytes, stop = chunks.place(number)
            assert (offset, nbytes) == (ends[file], chunks.size(number))
            assert stop >= offset + nbytes
            ends[file] = stop
        assert ends == chunks.sizes


@pytest.mark.parametrize("name", LAYOUTS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_span_of_a_tensor_lies_where_its_segments_are(name, data):
    sample, file_map = sample_of(name), map_of(name)
    flat = sorted(path for path, spec in sample.manifest.tensors.items() if spec.chunks is None)
    if not flat:
        return
    spec = sample.manifest.tensors[data.draw(st.sampled_from(flat))]
    codec = file_map.codecs.get(spec.path)
    block = codec.block if codec else 1
    start, stop = sorted(data.draw(st.integers(0, spec.nbytes // block)) * block for _ in range(2))
    done = start
    for place in file_map.places(spec.path, Span(start, stop)):
        body = file_map.files[place.file].body
        assert place.segment == body.at(place.start)
        segment, bounds = body[place.segment], body.bounds(place.segment)
        assert segment.tensor == spec.path
        assert bounds.start <= place.start < place.stop <= bounds.stop
        if isinstance(segment, Raw):
            assert segment.span.start + place.start - bounds.start == done
            done += place.stop - place.start
        else:
            done += (place.stop - place.start) // codec.stored * codec.block
    assert done == stop


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_is_written_is_what_the_map_says_and_the_format_reads_it(name, tmp_path):
    """Every byte of every file is rendered from the map alone, and the format's own reader finds the sample."""
    sample = sample_of(name)
    place = writers.staging_place(tmp_path)
    writers.make(sample, place)
    root = Path(place.path)
    file_map = laid_out(sample, tmp_path / "scene")
    written = [(root if file.name == "." else root / file.name).read_bytes() for file in file_map.files]
    for file, found in zip(file_map.files, written, strict=True):
        if not isinstance(file.body, Segments):
            assert found == file.body(), file.name
            continue
        assert len(found) == file.body.nbytes
        for number in range(len(file.body)):
            bounds, segment = file.body.bounds(number), file.body[number]
            wanted = _bytes_of(sample, segment)
            for at, first, stop in segment.checksums if isinstance(segment, Late) else ():
                covered = found[body_at(file.body, number + first) : body_at(file.body, number + stop)]
                wanted = wanted[:at] + crc32(covered).to_bytes(4, "little") + wanted[at + 4 :]
            assert found[bounds.start : bounds.stop] == wanted, f"{file.name}, segment {number}"
    if file_map.chunks is not None:
        _compare_chunks(sample, file_map.chunks, root)
    _compare_ranges(sample, file_map, root)
    writers.check_written(sample, place)


def _compare_ranges(sample, file_map, root):
    """Compare the files that the map names, their sizes, and the byte ranges of each tensor in them."""
    sizes = file_sizes(file_map)
    if sizes is None:
        assert not file_map.chunks.codec.plain
        specs = file_map.chunks.grids.specs
        assert {file_of(file_map, spec.path, next(cells(spec.whole, spec.chunks))) for spec in specs} == {
            None
        }
        return
    for name, size in sizes.items():
        assert root.joinpath(name).stat().st_size == size
    for path, spec in sample.manifest.tensors.items():
        whole = Span(0, spec.nbytes)
        cells_of = [whole] if spec.chunks is None else list(cells(spec.whole, spec.chunks))
        found = [ranges_of(file_map, path, cell) for cell in cells_of]
        for cell, ranges in zip(cells_of, found, strict=True):
            if not spec.nbytes or (ranges is None and spec.chunks is None):
                continue
            assert file_of(file_map, path, cell) in {*sizes, None}
            if ranges is None:  # padding lies inside
                continue
            data = b"".join(root.joinpath(file).read_bytes()[start:stop] for file, start, stop in ranges)
            wanted = sample.contents[path] if cell is whole else array_of(sample, spec)[cell].tobytes()
            assert data == bytes(wanted)
        if spec.chunks is None:
            assert lengths_of(file_map, spec) == [stop - start for _file, start, stop in found[0] or ()]


def array_of(sample, spec):
    """The elements of a tensor."""
    return np.frombuffer(sample.contents[spec.path], dtypes.numpy_dtype(spec.dtype)).reshape(spec.shape)


def _compare_chunks(sample, chunks, root):
    """Compare each chunk, and the files that describe them, with what the map says."""
    folder = root / chunks.folder
    places = [_place_of(chunks, folder, number) for number in range(len(chunks.grids))]
    for number, (file, offset, nbytes, stop) in enumerate(places):
        spec, region = chunks.grids[number].spec, chunks.grids[number].region
        data = memoryview(np.ascontiguousarray(array_of(sample, spec)[region]).reshape(-1).view("u1"))
        wanted = bytes(chunks.codec.encode(data, region, spec)).ljust(chunks.size(number) or 0, b"\0")
        assert (folder / file).read_bytes()[offset:stop] == wanted.ljust(stop - offset, b"\0")
        assert len(wanted) == nbytes
        if chunks.codec.unchanged(region, spec):
            assert wanted[: len(data)] == bytes(data)
    described = list(chunks.index(places.__getitem__))
    assert [(folder / file.name).read_bytes() for file in described] == [file.body() for file in described]


def _place_of(chunks, folder, number):
    if isinstance(chunks, PlacedChunks):
        return chunks.place(number)
    if isinstance(chunks, SeparateChunks):
        size = (folder / chunks.name(number)).stat().st_size
        return ChunkPlace(chunks.name(number), 0, size, size)
    value = database_of(folder).values[chunks.name(number)]
    return ChunkPlace(value.file, value.offset, value.length, value.offset + value.length)


@cache
def database_of(folder):
    return list_ocdbt(locate(folder))


def body_at(body, number):
    """The offset of a segment, or the end."""
    return body.offsets[number]


def _bytes_of(sample, segment):
    if isinstance(segment, Literal | Late):
        return segment.data
    contents = sample.contents[segment.tensor]
    if isinstance(segment, Raw):
        return contents[segment.span.start : segment.span.stop]
    return bytes(segment.codec.encode(memoryview(contents)))


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_is_pure(name, tmp_path):
    """Two calls say the same, and neither changes what it is given."""
    sample = sample_of(name)
    before = sample.manifest.to_json()
    one, two = laid_out(sample, tmp_path), laid_out(sample, tmp_path)
    assert [file.name for file in one.files] == [file.name for file in two.files]
    for left, right in zip(one.files, two.files, strict=True):
        if not isinstance(left.body, Segments):
            assert left.body() == right.body()
            continue
        assert [left.body.bounds(n) for n in range(len(left.body))] == [
            right.body.bounds(n) for n in range(len(right.body))
        ]
    if one.chunks is not None:
        numbers = range(len(one.chunks.grids))
        assert [one.chunks.name(n) for n in numbers] == [two.chunks.name(n) for n in numbers]
        places = [ChunkPlace(f"file {n}", 0, 1, 1) for n in numbers]
        described = [
            [(file.name, file.body()) for file in chunks.index(places.__getitem__)]
            for chunks in (one.chunks, two.chunks)
        ]
        assert described[0] == described[1]
    assert sample.manifest.to_json() == before


# Without inline tensors T5X states each array in its msgpack file, in 180 bytes.
@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "t5x-without-inline"])
def test_a_map_takes_at_most_200_bytes_a_tensor(name, tmp_path):
    row, options = sample_of(name).row, sample_of(name).options
    specs = [TensorSpec((f"model.layers.{n}.weight",), (32, 16), "float32") for n in range(5_000)]
    manifest = Manifest(tensors={spec.path: spec for spec in specs}, kind="params")
    if map_of(name).chunks is not None:
        manifest = row.prepare(manifest, options)
    last, scene = manifest.tensors[specs[-1].path], scene_of(sample_of(name), tmp_path)
    row.layout(manifest, options, scene)  # what is imported for it is no part of the map
    tracemalloc.start()
    try:
        file_map = row.layout(manifest, options, scene)
        if last.chunks is None:
            assert file_map.places(last.path, Span(0, 4))
        else:
            assert file_map.chunks.grids.number(last.path, last.whole) == len(specs) - 1
        taken, _peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken / len(specs) <= MOST_BYTES


def test_a_frame_is_written_in_one_run_with_its_small_tensor(tmp_path, monkeypatch):
    """So a checkpoint of very many small tensors costs one write for each run of them."""
    specs = [TensorSpec((f"t{n:04d}",), (64,), "float32") for n in range(500)]
    manifest = Manifest(tensors={spec.path: spec for spec in specs}, kind="params")
    row = find_format("npz")
    writer = MapWriter(locate(tmp_path / "out.npz"), row.layout(manifest, {}, Scene()))
    calls = []
    real = type(writer._files).write
    monkeypatch.setattr(type(writer._files), "write", lambda *a: (calls.append(a[2]), real(*a)))
    data = memoryview(bytes(256))
    writer.write_all([(spec.path, Span(0, 256), data) for spec in specs])
    writer.finish()
    writer.close()
    assert len(calls) == 1
    assert all(not array.any() for array in np.load(tmp_path / "out.npz").values())


def test_a_small_tensor_that_an_earlier_run_has_stored_is_not_read_again(tmp_path, monkeypatch):
    """It was stored in one write with its frame; only the end of the file states its checksum anew."""
    specs = [TensorSpec((f"t{n:02d}",), (64,), "float32") for n in range(20)]
    manifest = Manifest(tensors={spec.path: spec for spec in specs}, kind="params")
    row = find_format("dcp")
    options = {key: option.default for key, option in row.options.items()}
    data = {spec.path: np.full(64, n, "<f4").tobytes() for n, spec in enumerate(specs)}

    def writer(name):
        return MapWriter(locate(tmp_path / name), row.layout(manifest, options, Scene()))

    def write(target, some):
        target.write_all([(spec.path, Span(0, 256), memoryview(data[spec.path])) for spec in some])

    whole, first = writer("whole"), writer("resumed")
    write(whole, specs)
    write(first, specs[:12])
    first.sync()
    first.close()
    second = writer("resumed")
    for spec in specs[:12]:
        second.restore(spec.path, Span(0, 256), ())
    write(second, specs[12:])
    reads = []
    real = type(second._files).read
    monkeypatch.setattr(type(second._files), "read", lambda *a: (reads.append(a[1:]), real(*a))[1])
    for target in (whole, second):
        target.finish()
        target.close()
    assert reads == []
    for path in (tmp_path / "whole").iterdir():
        assert path.read_bytes() == (tmp_path / "resumed" / path.name).read_bytes()
    state = {spec.path[0]: torch.zeros(64) for spec in specs}
    dcp.load(state, checkpoint_id=tmp_path / "resumed", no_dist=True)
    assert {name: found.numpy().tobytes() for name, found in state.items()} == {
        path[0]: raw for path, raw in data.items()
    }


def test_half_of_a_small_tensor_that_an_earlier_run_has_stored_has_no_frame_yet(tmp_path):
    specs = [TensorSpec((name,), (64,), "float32") for name in "xy"]
    manifest = Manifest(tensors={spec.path: spec for spec in specs}, kind="params")
    row, data = find_format("torch-zip"), memoryview(np.arange(64, dtype="<f4").tobytes())
    first, second = [
        MapWriter(locate(tmp_path / "x.pt"), row.layout(manifest, {}, Scene())) for _ in range(2)
    ]
    first.write(("x",), Span(0, 128), data[:128])
    first.sync()
    first.close()
    second.restore(("x",), Span(0, 128), ())
    second.write(("x",), Span(128, 256), data[128:])
    second.write(("y",), Span(0, 256), data)
    second.finish()
    second.close()
    assert zipfile.ZipFile(tmp_path / "x.pt").testzip() is None
    found = torch.load(tmp_path / "x.pt", weights_only=True)
    assert [found[name].tolist() for name in "xy"] == [list(range(64))] * 2
