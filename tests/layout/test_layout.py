"""Layouts as text, and the moves that follow from two of them, against a reference of reshapes and transposes."""

from __future__ import annotations

import itertools
import math
import tempfile
from dataclasses import replace
from itertools import product

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.families import SIZES, made
from wherry.core.tensorspec import TensorSpec, region_shape
from wherry.errors import CorruptError, HostileError, UsageError
from wherry.families import convert_layout, load_family
from wherry.formats.format import Extent
from wherry.layout.copies import Pieces, StoredTensor, TensorPiece, copies, gather, part_bytes, permute
from wherry.layout.cuts import bands, cut_copy, stacked_grid
from wherry.layout.expr import evaluate
from wherry.layout.layout import parse_layout, skeleton, skeletons
from wherry.layout.runs import runs
from wherry.layout.words import Scale
from wherry.mover.read import RawBytes, fill_region
from wherry.store.local_store import locate

AXES = ("layer", "head", "half", "pair", "embed")
LLAMA = {
    "huggingface": ("model.layers.{layer}.q_proj.weight", "(head half pair) embed"),
    "lingua": ("layers.{layer}.attention.wq.weight", "(head pair half) embed"),
    "maxtext": ("params/decoder/layers/query/kernel", "embed layer head (half pair)"),
    "maxtext-unscanned": ("params/decoder/layers_{layer}/query/kernel", "embed head (half pair)"),
    "penzai": ("transformer~1blocks~1attention~1query.weights", "layer head half pair embed"),
}


def stored(layout, sizes, dtype="float32"):
    """All tensors of one parameter in one system."""
    for at in layout.places(sizes):
        spec = TensorSpec(layout.path(at, sizes), layout.shape(sizes), dtype)
        groups = tuple(one.names for one in layout.present(sizes))
        hidden = {
            name: 0 for one in layout.dimensions if one not in layout.present(sizes) for name in one.names
        }
        yield StoredTensor(
            spec, (TensorPiece(("params", "p"), tuple({**at, **hidden}.items()), groups, (0,) * len(groups)),)
        )


def reference(layout, sizes, canonical, order):
    """The tensors of a layout by index, transpose and reshape of the whole canonical array."""
    tensors = {}
    for at in layout.places(sizes):
        part = canonical[tuple(at.get(name, slice(None)) for name in order)]
        left = [name for name in order if name not in at]
        part = part.transpose([left.index(name) for name in layout.held])
        tensors[layout.path(at, sizes)] = np.ascontiguousarray(part).reshape(layout.shape(sizes))
    return tensors


def moved(tensors, source, target, sizes, limit=1 << 20, dtype="float32", cut=None):
    """What the moves make of a system's tensors, band by band."""
    pieces = Pieces(sizes)
    for one in stored(source, sizes, dtype):
        pieces.add(one)

    def read(path, part):
        return np.ascontiguousarray(tensors[path][part])

    def compute(path, part, into):
        into[...] = tensors[path][part]
        return True

    made = {}
    for one in stored(target, sizes, dtype):
        out = np.zeros(one.spec.shape, tensors[next(iter(tensors))].dtype)
        seen = np.zeros(one.spec.shape, int)
        for region, _span in bands(one, limit, pieces):
            out[region] = gather(one, region, pieces, read, cut=cut)
            computed = gather(one, region, pieces, read, cut=cut, compute=compute)
            np.testing.assert_array_equal(computed, out[region], "the places of what is computed")
            seen[region] += 1
        assert (seen == 1).all()
        made[one.spec.path] = out
    return made


def same(first, second):
    return first.keys() == second.keys() and all(
        np.array_equal(
            first[path].view("u1") if first[path].ndim else first[path],
            second[path].view("u1") if second[path].ndim else second[path],
        )
        for path in first
    )


@pytest.mark.parametrize(("source", "target"), list(product(LLAMA, LLAMA)))
def test_query_between_all_systems(source, target):
    sizes = {"layer": 3, "head": 2, "half": 2, "pair": 4, "embed": 6}
    one, other = parse_layout(*LLAMA[source]), parse_layout(*LLAMA[target])
    canonical = np.arange(288, dtype="float32").reshape([sizes[name] for name in AXES])
    tensors = reference(one, sizes, canonical, AXES)
    wanted = reference(other, sizes, canonical, AXES)
    for limit in (1, 40, 200, 1 << 20):
        assert same(moved(tensors, one, other, sizes, limit), wanted)


def test_what_is_computed_goes_straight_to_its_transposed_place():
    sizes = {"layer": 2, "embed": 6, "head": 4, "dim": 5}
    pieces, computed = Pieces(sizes), []
    for one in stored(parse_layout("l.{layer}.w", "(head dim) embed"), sizes):
        pieces.add(one)
    (target,) = stored(parse_layout("w", "embed layer head dim"), sizes)

    def compute(_path, part, into):
        computed.append((into.shape, into.strides))
        return True

    gather(target, target.spec.whole, pieces, pytest.fail, compute=compute)
    assert computed == [((20, 6), (4, 160))] * 2


def test_lingua_permutation_is_the_one_of_converters():
    sizes = {"layer": 1, "head": 2, "half": 2, "pair": 3, "embed": 5}
    source = np.random.default_rng(0).random((12, 5), "float32")
    one, other = parse_layout(*LLAMA["lingua"]), parse_layout(*LLAMA["huggingface"])
    made = moved({("layers.0.attention.wq.weight",): source}, one, other, sizes)
    wanted = source.reshape(2, 3, 2, 5).transpose(0, 2, 1, 3).reshape(12, 5)
    np.testing.assert_array_equal(made[("model.layers.0.q_proj.weight",)], wanted)


@st.composite
def layout_pairs(draw):
    """Two layouts of one parameter with random axes, groups and unrolled indices."""
    names = [f"a{place}" for place in range(draw(st.integers(1, 5)))]
    sizes = {name: draw(st.integers(1, 4)) for name in names} | {"far": 5}
    return names, sizes, [_random_layout(draw, names, sizes, side) for side in "st"]


def _random_layout(draw, names, sizes, side):
    order = draw(st.permutations(names))
    unrolled = order[: draw(st.integers(0, min(2, len(order))))]
    held = order[len(unrolled) :]
    if len(unrolled) == 2 and draw(st.booleans()):
        step = draw(st.sampled_from(["", ":far"]))
        key = f"{side}.{{{unrolled[0]}{step} {unrolled[1]}}}.w"
    else:
        key = "/".join([side, *(f"x_{{{name}}}" for name in unrolled)])
    if unrolled and draw(st.booleans()):
        words = "|".join(f"w{index}" for index in range(sizes[unrolled[0]]))
        key = "/".join([side, f"{{{unrolled[0]}={words}}}", *(f"x{{{name}+a0*a0}}" for name in unrolled[1:])])
    dimensions, rest = [], list(held)
    while rest:
        size = draw(st.integers(1, len(rest)))
        dimensions.append(f"({' '.join(rest[:size])})" + draw(st.sampled_from(["", "?"])))
        rest = rest[size:]
    return parse_layout(key, " ".join(dimensions))


@settings(max_examples=300, deadline=None)
@given(layout_pairs(), st.integers(1, 400), st.sampled_from(["uint8", "bfloat16", "float32"]))
def test_random_layouts(drawn, limit, dtype):
    names, sizes, (one, other) = drawn
    shape = [sizes[name] for name in names]
    numbers = np.arange(math.prod(shape)).astype("uint16").reshape(shape)
    canonical = {
        "uint8": numbers.astype("uint8"),
        "bfloat16": numbers.view(ml_dtypes.bfloat16),
        "float32": numbers.astype("float32"),
    }[dtype]
    tensors, wanted = reference(one, sizes, canonical, names), reference(other, sizes, canonical, names)
    there = moved(tensors, one, other, sizes, limit, dtype)
    assert same(there, wanted)
    assert same(moved(there, other, one, sizes, limit, dtype), tensors)


@settings(max_examples=300, deadline=None)
@given(layout_pairs(), st.integers(1, 400), st.integers(1, 60), st.booleans())
def test_copies_in_parts_make_the_same_and_read_little(drawn, limit, most, whole):
    """A part reads at most `most` bytes or one row; together the parts read what the copy does."""
    names, sizes, (one, other) = drawn
    shape = [sizes[name] for name in names]
    canonical = np.arange(math.prod(shape)).astype("float32").reshape(shape)
    tensors, wanted = reference(one, sizes, canonical, names), reference(other, sizes, canonical, names)

    def cut(copy):
        parts = list(cut_copy(copy, most))
        inner = region_shape(copy.region)
        axis = next((axis for axis, extent in enumerate(inner) if extent > 1), len(inner))
        row = 4 * math.prod(inner[axis + 1 :])
        rows = max(copy.source_strides, default=1) * 4  # of one turn of the outermost loop
        assert sum(math.prod(part.extents) for part in parts) == math.prod(copy.extents)
        assert all(part.nbytes <= max(most, row, rows) for part in parts)
        return parts

    assert same(moved(tensors, one, other, sizes, 1 << 20 if whole else limit, cut=cut), wanted)


STEPS = {"block": 3, "local": 3, "cycle": 4, "embed": 2}


def test_indices_that_count_more_numbers_than_an_axis_has():
    """Three of four layers are of one kind, and the fourth of another: their numbers are disjoint, and all there."""
    three, last = (
        parse_layout(key, "embed") for key in ("l.{block:cycle local}.w", "l.{block:cycle+local}.w")
    )
    for layout, wanted in ((three, [0, 1, 2, 4, 5, 6, 8, 9, 10]), (last, [3, 7, 11])):
        (index,) = layout.indices
        assert list(index.numbers(STEPS)) == wanted
        assert [layout.path(at, STEPS)[0] for at in layout.places(STEPS)] == [f"l.{one}.w" for one in wanted]
        inside = [one for one in range(20) if layout.at((one,), STEPS) is not None]
        assert inside == wanted
        assert [index.number(layout.at((one,), STEPS), STEPS) for one in wanted] == wanted


@pytest.mark.parametrize("key", ["l.{a:}", "l.{:c a}", "l.{a:B}", "l.{a:c:d}"])
def test_an_invalid_step_is_an_error(key):
    with pytest.raises(UsageError, match="invalid index"):
        parse_layout(key, "b")


@settings(max_examples=200, deadline=None)
@given(layout_pairs(), st.data())
def test_any_region_is_covered_once_by_reads_within_bounds(drawn, data):
    _names, sizes, (one, other) = drawn
    pieces = Pieces(sizes)
    for each in stored(one, sizes):
        pieces.add(each)
    for each in stored(other, sizes):
        region = tuple(
            slice(*sorted((data.draw(st.integers(0, extent - 1)), data.draw(st.integers(1, extent)))))
            for extent in each.spec.shape
        )
        if any(part.start == part.stop for part in region):
            continue
        seen = np.zeros(math.prod(region_shape(region)), int)
        for copy in copies(each, region, pieces):
            assert all(
                0 <= part.start < part.stop <= extent
                for part, extent in zip(copy.region, copy.source.shape, strict=True)
            )
            places = copy.offset
            for extent, stride in zip(copy.extents, copy.target_strides, strict=True):
                places = np.add.outer(places, np.arange(extent) * stride)
            np.add.at(seen, np.asarray(places).reshape(-1), 1)
        assert (seen == 1).all()


@settings(max_examples=200, deadline=None)
@given(layout_pairs())
def test_paths_and_numbers(drawn):
    _names, sizes, layouts = drawn
    for layout in layouts:
        skeletons_of = set(skeletons(layout))
        for at in layout.places(sizes):
            path = layout.path(at, sizes)
            assert skeleton(path) in skeletons_of
            assert layout.at(layout.match(path), sizes) == at


def test_concatenated_and_padded_pieces():
    sizes = {"group": 2, "qhead": 2, "dim": 3, "embed": 5}
    rows = {"q": ("group", "qhead", "dim"), "k": ("group", "dim"), "v": ("group", "dim")}
    arrays, pieces, start = {}, Pieces(sizes), 0
    parts = []
    for name, axes in rows.items():
        extent = math.prod(sizes[axis] for axis in axes)
        arrays[(name,)] = np.random.default_rng(start).random((extent, 5), "float32")
        pieces.add(
            StoredTensor(
                TensorSpec((name,), (extent, 5), "float32"),
                (TensorPiece(("params", name), (), (axes, ("embed",)), (0, 0)),),
            )
        )
        parts.append(TensorPiece(("params", name), (), (axes, ("embed",)), (start, 0)))
        start += extent
    fused = StoredTensor(TensorSpec(("qkv",), (28, 5), "float32"), tuple(parts))
    wanted = np.concatenate([*arrays.values(), np.zeros((4, 5), "float32")])

    def read(path, region):
        return np.ascontiguousarray(arrays[path][region])

    for low, high in product(range(28), range(1, 29)):
        if low < high:
            region = (slice(low, high), slice(1, 4))
            np.testing.assert_array_equal(gather(fused, region, pieces, read), wanted[region])
    back = Pieces(sizes)
    back.add(fused)
    for name, array in arrays.items():
        spec, piece = pieces.held[("params", *name)][()]
        made = gather(
            StoredTensor(spec, (piece,)),
            spec.whole,
            back,
            lambda _path, region: np.ascontiguousarray(wanted[region]),
        )
        np.testing.assert_array_equal(made, array)


def test_chunk_grid_of_a_stack():
    sizes = {"layer": 3, "embed": 64, "ffn": 256}
    pieces = Pieces(sizes)
    for one in stored(parse_layout("l.{layer}.w", "ffn embed"), sizes):
        pieces.add(one)
    (target,) = stored(parse_layout("w", "embed layer ffn"), sizes)
    assert stacked_grid(target, pieces, 1 << 20) == (64, 1, 256)
    assert stacked_grid(target, pieces, 1 << 14) == (16, 1, 256), "runs of 1 KiB stay whole"


def test_chunks_of_a_stack_keep_runs_that_can_be_hashed():
    """The output of attention of a large model: 128 heads of 128; its runs were 448 bytes, and it was read again."""
    sizes = {"layer": 2, "embed": 7168, "head": 128, "dim": 128}
    pieces = Pieces(sizes)
    for one in stored(parse_layout("l.{layer}.w", "embed (head dim)"), sizes, "bfloat16"):
        pieces.add(one)
    (target,) = stored(parse_layout("w", "head layer dim embed"), sizes, "bfloat16")
    assert stacked_grid(target, pieces, 8 << 20) == (32, 1, 128, 896)


@pytest.mark.parametrize(
    ("key", "axes"),
    [
        ("a.{layer", "b"),
        ("a.{layer}", "layer"),
        ("a", "(b"),
        ("a", "B"),
        ("a.{}", "b"),
        ("a", "b $"),
        ("a}", "b"),
        ("a.{layer*}{b*2}", "c"),
    ],
)
def test_unreadable(key, axes):
    with pytest.raises(UsageError):
        parse_layout(key, axes)


def test_an_index_counts_in_steps():
    """Of the layers 0 to 7 the second and the fourth of each four, and all others."""
    sizes = {"block": 2, "turn": 2, "step": 2, "early": 1, "cycle": 4}
    second = parse_layout("l.{block:cycle turn:step+early}.w", "embed")
    assert [second.path(at, sizes)[0] for at in second.places(sizes)] == ["l.1.w", "l.3.w", "l.5.w", "l.7.w"]
    assert second.at(second.match(("l.5.w",)), sizes) == {"block": 1, "turn": 0}
    assert second.at((4,), sizes) is None
    first = parse_layout("l.{block:cycle turn:step}.w", "embed")
    assert [first.path(at, sizes)[0] for at in first.places(sizes)] == ["l.0.w", "l.2.w", "l.4.w", "l.6.w"]
    assert first.at((7,), sizes) is None
    assert first.at((8,), sizes) is None


def test_an_index_goes_on_from_each_step():
    """Of each six layers the first five."""
    sizes = {"block": 2, "local": 5, "cycle": 6, "even": 2, "rest": 1}
    local = parse_layout("l.{block:cycle local}.w", "embed")
    wanted = [*range(5), *range(6, 11)]
    assert [local.path(at, sizes)[0] for at in local.places(sizes)] == [f"l.{one}.w" for one in wanted]
    assert [one for one in range(20) if local.at((one,), sizes) is not None] == wanted
    assert local.at((8,), sizes) == {"block": 1, "local": 2}
    both = parse_layout("l.{block:cycle even rest+even}.w", "embed")
    for at in both.places(sizes):
        assert both.at(both.match(both.path(at, sizes)), sizes) == at
    assert list(both.indices[0].numbers(sizes)) == [2, 3, 8, 9]


def test_escaped_parts_stay_one_part():
    layout = parse_layout("transformer~1block_{layer}~1x.weights/data_array", "embed")
    assert layout.path({"layer": 7}, {"layer": 9}) == ("transformer/block_7/x.weights", "data_array")
    assert layout.match(("transformer/block_07/x.weights", "data_array")) is None


def test_bytes_are_carried_raw_only_where_they_stay_what_they_are():
    """A tensor that only changes its name is one run of bytes; one that is cast or scaled is none."""
    sizes = {"layer": 2, "head": 2, "half": 2, "pair": 2, "embed": 3}
    one, other = parse_layout(*LLAMA["huggingface"]), parse_layout("{layer}.q", "(head half pair) embed")
    pieces = Pieces(sizes)
    for held in stored(one, sizes):
        pieces.add(held)
    same_type, cast = next(stored(other, sizes)), next(stored(other, sizes, "bfloat16"))
    scaled = replace(same_type, pieces=(replace(same_type.pieces[0], words=(Scale(2.0),)),))
    assert [(spec.path, span) for spec, span in runs(same_type, pieces)] == [
        (("model.layers.0.q_proj.weight",), (0, same_type.spec.nbytes))
    ]
    assert runs(cast, pieces) is None
    assert runs(scaled, pieces) is None
    turned = next(stored(parse_layout(*LLAMA["lingua"]), sizes))
    assert runs(turned, pieces) is None


def test_parameters_follow_one_another_along_a_dimension_of_no_axis():
    sizes = {"head": 2, "embed": 3}
    layout = parse_layout("w", "1 embed head")
    assert layout.shape(sizes) == (1, 3, 2)
    assert layout.names == {"embed", "head"}
    groups = tuple(one.names for one in layout.dimensions)
    spec = TensorSpec(("w",), (2, 3, 2), "float32")
    source = StoredTensor(
        spec,
        tuple(TensorPiece(("params", name), (), groups, (place, 0, 0)) for place, name in enumerate("ab")),
    )
    values = np.arange(12, dtype=np.float32).reshape(2, 3, 2)
    pieces = Pieces(sizes)
    pieces.add(source)
    target = StoredTensor(
        TensorSpec(("b",), (2, 3), "float32"),
        (TensorPiece(("params", "b"), (), (("head",), ("embed",)), (0, 0)),),
    )
    found = gather(target, target.spec.whole, pieces, lambda _path, region: values[region])
    np.testing.assert_array_equal(found, values[1].T)
    with pytest.raises(UsageError, match="invalid axes"):
        parse_layout("w", "() embed")


# Regions read from raw bytes, and what gathering a band of a target holds.


@st.composite
def regions(draw):
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=0, max_size=4)))
    if shape and draw(st.booleans()):
        shape = (*shape[:-1], shape[-1] * draw(st.sampled_from([1, 100, 5000, 40000])))
    bounds = [sorted((draw(st.integers(0, extent)), draw(st.integers(0, extent)))) for extent in shape]
    return shape, tuple(slice(*pair) for pair in bounds)


@settings(max_examples=200, deadline=None)
@given(regions(), st.sampled_from(["uint8", "bfloat16", "float64"]))
def test_regions_of_raw_bytes(drawn, dtype):
    shape, region = drawn
    spec = TensorSpec(("t",), shape, dtype)
    size = spec.nbytes // max(spec.size, 1)
    whole = np.random.default_rng(0).integers(0, 256, spec.nbytes, "u1")
    calls = []

    def read(offset, buffer):
        assert 0 <= offset <= offset + len(buffer) <= len(whole)
        calls.append(len(buffer))
        buffer[:] = whole[offset : offset + len(buffer)].tobytes()

    wanted = np.ascontiguousarray(whole.reshape((*shape, size))[region]).tobytes()
    out = bytearray(len(wanted))
    fill_region(spec, region, read, memoryview(out))
    assert bytes(out) == wanted
    assert sum(calls) <= spec.nbytes, "no byte is read twice"


@settings(max_examples=300, deadline=None)
@given(regions(), st.sampled_from(["uint8", "bfloat16", "float64"]), st.integers(0, 5), st.booleans())
def test_regions_of_a_file_into_an_array_with_strides(drawn, dtype, before, wider):
    """By the kernel, or without: every byte of the region, and no other byte of the memory."""
    shape, region = drawn
    spec = TensorSpec(("t",), shape, dtype)
    size = spec.nbytes // max(spec.size, 1)
    whole = np.random.default_rng(0).integers(0, 256, spec.nbytes, "u1")
    extents = region_shape(region)
    room = tuple(extent + wider for extent in extents)
    out = np.full((*room, size), 7, "u1")
    wanted = out.copy()
    inside = tuple(slice(0, extent) for extent in extents)
    wanted[inside] = whole.reshape((*shape, size))[region]
    with tempfile.NamedTemporaryFile() as file:
        file.write(bytes(before) + whole.tobytes())
        file.flush()
        read = RawBytes((Extent(locate(file.name), before, spec.nbytes),), spec)
        fill_region(spec, region, read, out.reshape(-1).data, out.strides[:-1])
        assert (out == wanted).all()
        if not wider:
            plain = np.zeros_like(out)
            fill_region(spec, region, read, plain.reshape(-1).data)
            assert (plain == wanted).all()


def test_a_file_that_ends_inside_of_a_region_is_truncated(tmp_path):
    spec = TensorSpec(("t",), (64, 64), "uint8")
    file = tmp_path / "short"
    file.write_bytes(bytes(60 * 64))
    read = RawBytes((Extent(locate(str(file)), 0, spec.nbytes),), spec)
    region, out = (slice(0, 64), slice(8, 56)), memoryview(bytearray(64 * 48))
    with pytest.raises(CorruptError, match="expected 4088 bytes or more, got 3840"):
        fill_region(spec, region, read, out)
    file.write_bytes(bytes(64 * 64))
    beyond = RawBytes((Extent(locate(str(file)), 0, 60 * 64),), spec)
    with pytest.raises(CorruptError, match="the tensor is truncated"):
        fill_region(spec, region, beyond, out)


def test_short_runs_are_read_together():
    spec, calls = TensorSpec(("t",), (4096, 4096), "bfloat16"), []
    region = (slice(0, 4096), slice(64, 1024))
    out = memoryview(bytearray(math.prod(region_shape(region)) * 2))
    fill_region(spec, region, lambda _offset, buffer: calls.append(len(buffer)), out)
    assert len(calls) == 32  # 32 MiB at one go would be too much, 4096 calls too many
    calls.clear()
    fill_region(
        spec, (slice(0, 128), slice(64, 1024)), lambda _offset, buffer: calls.append(len(buffer)), out
    )
    assert len(calls) == 1


def test_bands_tile_their_target_and_stay_within_memory():
    family = load_family("llama")
    sizes = {**SIZES, "embed": 64, "ffn": 96}
    begun = made(family, "huggingface", {}, sizes=sizes)
    projected = convert_layout(
        begun.manifest, family, "huggingface", "maxtext", sizes=sizes, options={"rope": "interleaved"}
    )
    for stored in projected.targets.values():
        seen = np.zeros(stored.spec.shape, int)
        for region, span in bands(stored, 2048, projected.pieces):
            seen[region] += 1
            largest = []

            def read(path, part, largest=largest):
                largest.append(math.prod(region_shape(part)) * 4)
                return begun.read(path, part)

            out = gather(stored, region, projected.pieces, read)
            assert out.nbytes == span.nbytes
            planned = sum(copy.nbytes for copy in copies(stored, region, projected.pieces))
            assert sum(largest) == planned <= 4 * max(out.nbytes, 64)
            held = [part_bytes(copy, stored.spec.dtype) for copy in copies(stored, region, projected.pieces)]
            assert max(largest, default=0) <= max(held, default=0)
        assert (seen == 1).all()


# The transposition kernel agrees with numpy for every order, and never loses or changes a byte.


WORDS = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}


def check(shape, itemsize, order, seed=0):
    data = np.random.default_rng(seed).integers(0, 256, size=(*shape, itemsize), dtype=np.uint8)
    view = data.reshape(-1).view(WORDS[itemsize]).reshape(shape).transpose(order)
    out = np.zeros(view.shape, dtype=WORDS[itemsize])
    permute(view, out)
    assert out.tobytes() == np.ascontiguousarray(data.transpose(*order, len(shape))).tobytes()


@settings(deadline=None, max_examples=200)
@given(st.data(), st.lists(st.integers(1, 7), max_size=5), st.sampled_from([1, 2, 4, 8, 16]))
def test_small_arrays_of_any_rank(data, shape, itemsize):
    check(tuple(shape), itemsize, data.draw(st.permutations(range(len(shape)))))


@pytest.mark.parametrize(
    "shape", [(300, 257), (5, 200, 131), (129, 3, 140), (2, 130, 5, 64), (40, 40, 2, 33)]
)
@pytest.mark.parametrize("itemsize", [2, 8])
def test_arrays_larger_than_a_tile_in_every_order(shape, itemsize):
    for order in itertools.permutations(range(len(shape))):
        check(shape, itemsize, order)


# A number of a config must not become a list that fills the memory: a hostile config states one in ten
# digits.


MANY = 10**9


@pytest.mark.parametrize(
    "text",
    [
        "windowed(layers, 2)",
        "dense_first(layers, 3)",
        "windowed_from(layers, 3)",
        "rotated_layers(4, layers)",
        "freq_of_experts(layers, 1)",
        "freq_of_experts(1, layers)",
        "expert_step(first, layers)",
    ],
)
def test_a_list_with_a_value_of_each_layer_is_limited(text):
    with pytest.raises(HostileError, match="1,000,000,000 layers exceeds the limit of 250,000"):
        evaluate(text, {"layers": MANY, "first": [0]})


def test_ordinary_numbers_stay():
    assert evaluate("windowed(layers, 2)", {"layers": 3}) == [
        "sliding_attention", "full_attention", "sliding_attention"
    ]  # fmt: skip
    assert evaluate("freq_of_experts(1, layers)", {"layers": 2}) == [0, 1, 1]
    assert evaluate("dense_first(layers, 1)", {"layers": 2}) == ["dense", "sparse"]
    assert evaluate("rotated_layers(2, layers)", {"layers": 3}) == [1, 0, 1]
