"""Writing PyTorch DCP, tensors that are cut too: what torch loads, there and back, resuming."""

from __future__ import annotations

import math
import os
import pickle
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import wherry
from tests.support.formats import canonical, copy, create, opened, place
from tests.support.tiny_models import save_tiny
from tests.support.torch import as_bytes, every_dtype, meta, same, save, torch
from wherry.core.manifest import Manifest
from wherry.core.tensorspec import Span, TensorSpec
from wherry.errors import CorruptError, UnrepresentableError, UsageError
from wherry.integrations.formats.dcp import layout
from wherry.integrations.formats.dcp.metadata import cut_rows, in_order

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

dcp = pytest.importorskip("torch.distributed.checkpoint")
metadata = pytest.importorskip("torch.distributed.checkpoint.metadata")
filesystem = pytest.importorskip("torch.distributed.checkpoint.filesystem")
format_utils = pytest.importorskip("torch.distributed.checkpoint.format_utils")


def load(path, like: dict) -> dict:
    state = {
        name: torch.full_like(one, 0) if isinstance(one, torch.Tensor) else None for name, one in like.items()
    }
    dcp.load(state, checkpoint_id=str(path), no_dist=True)
    return state


def test_torch_save_to_dcp_and_back(tmp_path):
    tensors = every_dtype()
    torch.save(tensors, tmp_path / "a.pt")
    format_utils.torch_save_to_dcp(tmp_path / "a.pt", tmp_path / "a")
    receipt = wherry.convert(tmp_path / "a", tmp_path / "b", to="dcp", lineage=False)
    assert receipt.source.weights_digest == receipt.target.weights_digest
    format_utils.dcp_to_torch_save(tmp_path / "b", tmp_path / "b.pt")
    assert same(torch.load(tmp_path / "b.pt", weights_only=True), tensors)


@pytest.mark.parametrize("profile", ["default", "2.3"])
def test_equal_tensors_share_what_describes_them_but_not_what_a_loader_may_change(tmp_path, profile):
    torch.save({name: torch.ones(2, 3) for name in "abc"}, tmp_path / "a.pt")
    wherry.convert(tmp_path / "a.pt", tmp_path / "a", to="dcp", options={"for_torch": profile}, lineage=False)
    found = pickle.loads((tmp_path / "a" / ".metadata").read_bytes())
    rows = list(found.state_dict_metadata.values())
    assert rows[0] == rows[1] == rows[2]
    assert len({id(row) for row in rows}) == len({id(row.chunks) for row in rows}) == 3
    assert len({id(row.properties) for row in rows}) == len({id(row.size) for row in rows}) == 1
    assert [key.fqn for key in found.storage_data] == [*found.state_dict_metadata] == [*"abc"]
    assert found.planner_data == {name: (name,) for name in "abc"}


@pytest.mark.parametrize("profile", ["default", "2.3"])
def test_torch_loads_what_we_wrote(tmp_path, profile):
    state = every_dtype() | {"lr": 0.5, "name": "ü", "list": [1, 2.5, None, "x"], "step": 3, "on": True}
    torch.save(state, tmp_path / "a.pt")
    options = {"for_torch": profile, "shard_size": "400B"}
    for name in ("one", "two"):
        wherry.convert(tmp_path / "a.pt", tmp_path / name, to="dcp", options=options, lineage=False)
    files = sorted(path.name for path in (tmp_path / "one").iterdir() if path.name != "wherry.json")
    assert len(files) > 3
    for file in files:
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()
    found = load(tmp_path / "one", state)
    plain = {name for name, one in state.items() if not isinstance(one, torch.Tensor)}
    assert all(found.pop(name) == state.pop(name) for name in plain)
    assert same(found, state)
    old = "torch.distributed._shard.sharded_tensor.metadata"
    assert (old.encode() in (tmp_path / "one" / ".metadata").read_bytes()) == (profile == "2.3")


def test_nested_paths_survive(tmp_path):
    state = {"model": {"layers.0.w": torch.ones(2)}, "opt": [{"m": torch.zeros(3)}], "step": 4}
    wherry.convert(save(state, tmp_path / "a"), tmp_path / "b", to="dcp", lineage=False)
    assert meta(tmp_path / "b").planner_data == meta(tmp_path / "a").planner_data
    format_utils.dcp_to_torch_save(tmp_path / "b", tmp_path / "b.pt")
    found = torch.load(tmp_path / "b.pt", weights_only=True)
    assert torch.equal(found["opt"][0]["m"], torch.zeros(3))
    assert (found["step"], list(found["model"])) == (4, ["layers.0.w"])


def test_companions_travel(tmp_path):
    save({"a.weight": torch.ones(3)}, tmp_path / "a")
    (tmp_path / "a" / "params.json").write_text("{}")
    wherry.convert(tmp_path / "a", tmp_path / "b", to="dcp", lineage=False)
    assert (tmp_path / "b" / "params.json").read_text() == "{}"
    assert [one.name for one in opened(tmp_path / "b", "dcp").manifest.companions] == ["params.json"]


def test_companions_in_folders_travel_and_states_of_others_do_not(tmp_path):
    source = tmp_path / "a"
    save({"w": torch.ones(4)}, source)
    (source / "1_Pooling").mkdir()
    (source / "1_Pooling" / "config.json").write_text("{}")
    save({"w": torch.ones(4)}, source / "pytorch_model_fsdp_0")
    (source / "consolidated").mkdir()
    (source / "consolidated" / "params.json").write_text("{}")
    torch.save({"w": torch.ones(4)}, source / "consolidated" / "consolidated.pth")
    with pytest.raises(
        UnrepresentableError, match=r"consolidated \(a folder .*\), pytorch_model_fsdp_0 \(a folder"
    ):
        wherry.convert(source, tmp_path / "b", to="dcp", lineage=False)
    wherry.convert(source, tmp_path / "b", to="dcp", ignore=("others",), lineage=False)
    for name in "ab":
        companions = opened(tmp_path / name, "dcp").manifest.companions
        assert [one.name for one in companions] == ["1_Pooling/config.json"]
    assert wherry.verify(tmp_path / "b", level="digest").ok


def test_a_name_that_is_tensor_and_object(tmp_path):
    spec = TensorSpec(("a",), (2,), "int8")
    with pytest.raises(UnrepresentableError, match="leaf and a node"):
        create(tmp_path / "x", "dcp", Manifest(tensors={spec.path: spec}, values={("a", "b"): 1}))


def test_copies_of_the_corpus_load_in_torch(corpus, tmp_path):
    """FSDP2 by tensor parallelism: written anew as one chunk per tensor."""
    found = opened(place("dcp-tp2-fsdp2-w4-fp32"), "dcp")
    copy(found, tmp_path / "b", "dcp")
    described = meta(tmp_path / "b").state_dict_metadata
    like = {
        name: torch.zeros(one.size, dtype=one.properties.dtype)
        for name, one in described.items()
        if isinstance(one, metadata.TensorStorageMetadata)
    }
    state = {name: tensor.clone() for name, tensor in like.items()}
    dcp.load(state, checkpoint_id=str(tmp_path / "b"), no_dist=True, planner=flat_planner())
    assert all(as_bytes(state[name]) == canonical(found, (name,)) for name in like)


def flat_planner():
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

    return DefaultLoadPlanner(flatten_state_dict=False)


def test_properties_of_torch_2_15(tmp_path, monkeypatch):
    """Six fields, as 2.15 writes them; torch 2.13 cannot read such a checkpoint, our rewrite of it can be."""
    path = save({"a": torch.ones(2)}, tmp_path / "a")
    kept = metadata.TensorProperties.__getstate__
    monkeypatch.setattr(metadata.TensorProperties, "__getstate__", lambda one: (*kept(one), (1,)))
    (path / ".metadata").write_bytes(pickle.dumps(meta(path)))
    monkeypatch.undo()
    assert opened(path, "dcp").detection.writer == "torch >= 2.15"
    wherry.convert(path, tmp_path / "b", to="dcp", lineage=False)
    assert same(load(tmp_path / "b", {"a": torch.ones(2)}), {"a": torch.ones(2)})


# Tensors that are larger than a file may be: chunks of rows in several `.distcp` files, which torch puts
# together.


SHARD = 100_000
OPTIONS = {"shard_size": "100KB"}


@pytest.fixture
def state():
    """A matrix of rows that are smaller than a file, one of a row that is larger, and what stays whole."""
    return {
        "a.small": torch.arange(7),
        "b.rows": torch.randn(70, 1000),
        "c.wide": torch.randn(2, 3, 40_000).bfloat16(),
        "d.wide": torch.randint(-99, 99, (1, 130_000), dtype=torch.int8),
        "e.empty": torch.zeros(0, 5),
        "f.scalar": torch.tensor(1.5),
        "g.whole": torch.randn(25_000),
        "lr": 0.5,
    }


@pytest.fixture
def written(state, tmp_path):
    """The state as a checkpoint of ours."""
    torch.save(state, tmp_path / "a.pt")
    wherry.convert(tmp_path / "a.pt", tmp_path / "out", to="dcp", options=OPTIONS, lineage=False)
    return tmp_path / "out"


def tensors_of(state):
    return {name: one for name, one in state.items() if isinstance(one, torch.Tensor)}


def test_a_tensor_larger_than_a_file_is_cut_into_chunks_in_several_files(written, state):
    found = meta(written)
    chunks = {name: len(found.state_dict_metadata[name].chunks) for name in tensors_of(state)}
    assert chunks == {
        "a.small": 1, "b.rows": 3, "c.wide": 6, "d.wide": 2, "e.empty": 1, "f.scalar": 1, "g.whole": 1,
    }  # fmt: skip
    rows = [tuple(one.sizes) for one in found.state_dict_metadata["b.rows"].chunks]
    assert rows == [(24, 1000), (24, 1000), (22, 1000)]
    files = [info.relative_path for key, info in found.storage_data.items() if key.fqn == "c.wide"]
    assert len(set(files)) == 6
    for file in written.glob("*.distcp"):
        assert file.stat().st_size < SHARD + 10_000  # of frames
    for key in found.storage_data:
        if key.index is not None:  # torch looks there first
            assert found.state_dict_metadata[key.fqn].chunks[key.index].offsets == key.offset


@pytest.mark.parametrize("profile", ["default", "2.3"])
def test_torch_puts_the_chunks_together(state, tmp_path, profile):
    torch.save(state, tmp_path / "a.pt")
    options = {**OPTIONS, "for_torch": profile}
    wherry.convert(tmp_path / "a.pt", tmp_path / "out", to="dcp", options=options, lineage=False)
    wanted = tensors_of(state)
    found = {name: torch.zeros_like(one) for name, one in wanted.items()}
    dcp.load(found, checkpoint_id=str(tmp_path / "out"), no_dist=True)
    assert same(found, wanted)
    format_utils.dcp_to_torch_save(tmp_path / "out", tmp_path / "b.pt")
    saved = torch.load(tmp_path / "b.pt", weights_only=True)
    assert saved.pop("lr") == 0.5
    assert same(saved, wanted)


def test_every_dtype_of_torch_can_be_cut(tmp_path):
    wide = {
        name: torch.cat([one.reshape(-1).view(torch.uint8)] * (-(-200_000 // max(one.nbytes, 1))))[:200_000]
        .view(one.dtype).reshape(10, -1)
        for name, one in every_dtype().items() if one.nbytes and one.dtype != torch.bool
    }  # fmt: skip
    torch.save(wide, tmp_path / "a.pt")
    wherry.convert(tmp_path / "a.pt", tmp_path / "out", to="dcp", options=OPTIONS, lineage=False)
    assert {len(row.chunks) for row in meta(tmp_path / "out").state_dict_metadata.values()} == {2}
    found = {name: torch.zeros(one.shape, dtype=one.dtype) for name, one in wide.items()}
    dcp.load(found, checkpoint_id=str(tmp_path / "out"), no_dist=True)
    assert {name: as_bytes(one) for name, one in found.items()} == {
        name: as_bytes(one) for name, one in wide.items()
    }


def test_a_rank_loads_its_shard_across_the_borders_of_chunks(written, state):
    """A mesh of one dimension whose placement is another division than that of the file."""
    distributed = pytest.importorskip("torch.distributed.tensor")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    torch.distributed.init_process_group("fake", rank=1, world_size=2, store=_fake_store())
    try:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
        for name, dim in {"b.rows": 0, "c.wide": 2, "d.wide": 1}.items():
            placed = [distributed.Shard(dim)]
            into = distributed.zeros(
                *state[name].shape, dtype=state[name].dtype, device_mesh=mesh, placements=placed
            )
            dcp.load({name: into}, checkpoint_id=str(written), no_dist=True)
            assert torch.equal(into.to_local(), state[name].chunk(2, dim)[1]), name
    finally:
        torch.distributed.destroy_process_group()


def _fake_store():
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def test_our_reader_reads_the_chunks_as_they_lie_and_keeps_the_digests(written, state, tmp_path):
    one = wherry.convert(tmp_path / "a.pt", tmp_path / "one", to="dcp", lineage=False).target
    two = wherry.convert(written, tmp_path / "two", to="dcp", lineage=False)
    assert two.source.checkpoint_digest == two.target.checkpoint_digest == one.checkpoint_digest
    assert (tmp_path / "one" / "__0_0.distcp").read_bytes() == (
        tmp_path / "two" / "__0_0.distcp"
    ).read_bytes()
    assert wherry.verify(written, level="digest").ok
    with wherry.open(written) as found:
        for name, tensor in tensors_of(state).items():
            spec = found.manifest.tensors[name,]
            assert found.reader.access(spec).extents is not None
            assert canonical(found, (name,)) == as_bytes(tensor)


def test_a_checkpoint_without_large_tensors_is_as_before(tmp_path):
    tensors = {name: torch.randn(10, 10) for name in "abc"}
    torch.save(tensors, tmp_path / "a.pt")
    for name, size in {"one": "100KB", "two": "2GB"}.items():
        wherry.convert(
            tmp_path / "a.pt", tmp_path / name, to="dcp", options={"shard_size": size}, lineage=False
        )
    for file in ("__0_0.distcp", ".metadata"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


def test_no_chunk_is_made_smaller_than_what_stands_around_it(tmp_path):
    torch.save({"w": torch.randn(100, 1000)}, tmp_path / "a.pt")
    wherry.convert(tmp_path / "a.pt", tmp_path / "out", to="dcp", options={"shard_size": "1B"}, lineage=False)
    chunks = meta(tmp_path / "out").state_dict_metadata["w"].chunks
    assert len(chunks) == len(list((tmp_path / "out").glob("*.distcp"))) == 7


def test_a_flipped_bit_in_one_chunk_is_found(written):
    file = sorted(written.glob("*.distcp"))[2]
    data = bytearray(file.read_bytes())
    data[50_000] ^= 1
    file.write_bytes(data)
    assert not wherry.verify(written, level="digest").ok
    (written / "wherry.json").unlink(missing_ok=True)
    with pytest.raises(CorruptError, match="checksum mismatch"):
        wherry.convert(written, written.parent / "again", to="dcp", lineage=False)


extents = st.lists(st.integers(0, 9), max_size=4).map(tuple)


@given(extents, st.sampled_from([1, 2, 4, 8]), st.integers(1, 600))
def test_chunks_are_a_tensor_s_bytes_in_order_and_none_is_larger(shape, width, most):
    chunks = list(cut_rows(shape, width, most))
    assert len({chunk.offsets for chunk in chunks}) == len(chunks)
    if 0 in shape:
        assert len(chunks) == 1
    else:
        assert in_order(shape, sorted(chunks))
        assert sorted(chunks) == chunks
    nbytes = math.prod(shape) * width
    assert all(math.prod(chunk.sizes) * width <= max(most, width) for chunk in chunks)
    assert (len(chunks) == 1) == (nbytes <= most or math.prod(shape) == 1)
    for chunk in chunks:  # no chunk could take its neighbour's rows too, along one axis
        assert math.prod(chunk.sizes) > 0 or 0 in shape


@settings(deadline=None, max_examples=30)
@given(st.data())
def test_spans_in_any_order_make_the_same_files(tmp_path_factory, data):
    """Spans that cross chunks, small chunks written in pieces, and bytes that are written twice."""
    folder = tmp_path_factory.mktemp("spans")
    shape = data.draw(st.sampled_from([(9, 101), (3, 2, 150), (1, 1000), (40,)]))
    specs = [TensorSpec((name,), shape, "uint8") for name in "ab"]
    values = {spec.path: np.random.default_rng(1).bytes(spec.nbytes) for spec in specs}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "LEAST_CHUNK", 1)
        files = []
        for name in ("one", "two"):
            cuts = data.draw(st.lists(st.integers(0, specs[0].nbytes), max_size=6)) if name == "one" else []
            marks = sorted({0, specs[0].nbytes, *cuts})
            spans = [(path, Span(*row)) for path in values for row in pairwise(marks)]
            writer = create(
                folder / name, "dcp", Manifest({spec.path: spec for spec in specs}), {"shard_size": "90B"}
            )
            for path, span in data.draw(st.permutations(spans)) + spans[:1]:
                writer.write(path, span, memoryview(values[path])[span.start : span.stop])
                ranges = writer.extents(path, span)
                assert sum(one.length for one in ranges) == span.nbytes
                assert writer.place(path, span) == ranges[0].offset
                assert writer.stored(path, span)
            writer.sync()
            writer.finish()
            assert (
                len(
                    [one for one in writer.extents(("a",), Span(0, specs[0].nbytes)) if one.crc32 is not None]
                )
                > 0
            )
            writer.close()
            files.append({path.name: path.read_bytes() for path in (folder / name).iterdir()})
        assert files[0] == files[1]
        found = opened(folder / "one", "dcp")
        assert all(canonical(found, path) == values[path] for path in values)


def test_what_is_no_span_of_a_tensor_that_is_cut_is_refused(tmp_path):
    manifest = Manifest({("w",): TensorSpec(("w",), (300_000,), "uint8")})
    writer = create(tmp_path / "out", "dcp", manifest, OPTIONS)
    with pytest.raises(UsageError, match="is not a span of 3 bytes"):
        writer.write(("w",), Span(0, 4), memoryview(b"abc"))
    with pytest.raises(UsageError, match="is not inside the tensor"):
        writer.write(("w",), Span(299_999, 300_002), memoryview(b"abc"))
    writer.close()


@pytest.mark.parametrize("to", ["lingua", "megatron", "torchtitan"])
def test_systems_that_store_dcp_have_their_tensors_cut_too(to, tmp_path, monkeypatch):
    monkeypatch.setattr(layout, "LEAST_CHUNK", 1 << 10)
    source, states = save_tiny(tmp_path / "hf", "llama"), []
    for name, size in {"whole": "2GB", "cut": "1KB"}.items():
        wherry.convert(source, tmp_path / name, to=to, options={"shard_size": size}, lineage=False)
        rows = {
            key: row
            for key, row in meta(tmp_path / name).state_dict_metadata.items()
            if hasattr(row, "chunks")
        }
        assert (max(len(row.chunks) for row in rows.values()) > 1) == (name == "cut")
        states.append({key: torch.zeros(row.size, dtype=row.properties.dtype) for key, row in rows.items()})
        dcp.load(states[-1], checkpoint_id=str(tmp_path / name), no_dist=True)
    assert same(*states)
    back = wherry.convert(
        tmp_path / "cut", tmp_path / "back", to="huggingface", family="llama", lineage=False
    )
    again = wherry.convert(source, tmp_path / "again", to="huggingface", lineage=False)
    assert back.target.weights_digest == again.target.weights_digest


def test_a_small_chunk_in_two_pieces_is_taken_up_with_its_checksums(tmp_path, monkeypatch):
    """A run that was killed before its end has written both pieces of the second chunk, and no frame."""
    monkeypatch.setattr(layout, "LEAST_CHUNK", 1)
    manifest = Manifest({("w",): TensorSpec(("w",), (300,), "uint8")})
    data, spans = np.random.default_rng(1).bytes(300), (Span(0, 150), Span(150, 300))
    first = create(tmp_path / "out", "dcp", manifest, {"shard_size": "100B"})
    for span in spans:
        first.write(("w",), span, memoryview(data)[span.start : span.stop])
    first.sync()
    first.close()
    second = create(tmp_path / "out", "dcp", manifest, {"shard_size": "100B"})
    for span in spans:
        second.restore(("w",), span, first.checks(("w",), span))
    second.finish()
    second.close()
    assert canonical(opened(tmp_path / "out", "dcp"), ("w",)) == data  # compares the CRC too
