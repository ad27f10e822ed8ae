"""Reading PyTorch DCP of every generation: what torch writes, how chunks make up a tensor, checksums."""

from __future__ import annotations

import enum
import pathlib
import pickle
import pickletools
import subprocess
import sys
import textwrap

import numpy as np
import pytest
from safetensors.numpy import save_file

import wherry
from tests.support.formats import canonical, opened, place
from tests.support.ranks import two_ranks
from tests.support.torch import as_bytes, every_dtype, meta, save, torch
from wherry.core.request import TargetRequest, convert_request
from wherry.errors import CorruptError, HostileError
from wherry.integrations.formats.dcp.metadata import Chunk, in_order, uncovered_regions, with_elements
from wherry.mover.read import read_array, read_bytes
from wherry.workers.commit import commit
from wherry.workers.job import split
from wherry.workers.work import work

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

dcp = pytest.importorskip("torch.distributed.checkpoint")
metadata = pytest.importorskip("torch.distributed.checkpoint.metadata")
filesystem = pytest.importorskip("torch.distributed.checkpoint.filesystem")
format_utils = pytest.importorskip("torch.distributed.checkpoint.format_utils")


@pytest.mark.parametrize(
    ("case", "writer"),
    [
        ("dcp-torch-2-0-1", "torch 2.0 to 2.2"),
        ("dcp-torch-2-3-1", "torch >= 2.3"),
        ("dcp-torch-2-6-0", "torch >= 2.4"),
        ("dcp-torch-2-8-0", "torch >= 2.7"),
        ("dcp-torch-2-13-0", "torch >= 2.9"),
    ],
)
def test_the_writer_by_evidence(corpus, case, writer):
    assert opened(place(case), "dcp").detection.writer == writer


def test_what_torch_writes(tmp_path):
    base = torch.randn(6, 8)
    tensors = every_dtype() | {
        "transposed": base.T,
        "slice": base[1:4, 2:6],
        "expanded": base[:, :1].expand(6, 5),
        "channels": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    }
    state = {"model": tensors, "many": [torch.ones(2), {"x": torch.zeros(1)}], "pair": (torch.ones(3), 4)}
    state |= {"step": 12, "groups": [{"lr": 0.5, "betas": (0.9, 0.99), "params": ["a", "b"]}], "no": None}
    found = opened(save(state, tmp_path / "a"), "dcp")
    for name, tensor in tensors.items():
        spec = found.manifest.tensors[f"model.{name}",]
        assert (spec.shape, canonical(found, spec.path)) == (tuple(tensor.shape), as_bytes(tensor)), name
        assert read_bytes(found.reader, spec) == as_bytes(tensor)
    assert found.reader.access(found.manifest.tensors["model.transposed",]).extents is None
    assert canonical(found, ("many.1.x",)) == as_bytes(torch.zeros(1))
    assert canonical(found, ("pair", "0")) == as_bytes(torch.ones(3))  # a tuple is one object to torch
    values = found.manifest.values
    assert (values["step",], values["pair", "1"], values["groups.0.lr",]) == (12, 4, 0.5)
    assert (values["groups.0.betas", "1"], values["groups.0.params", "0"]) == (0.99, "a")
    assert found.manifest.empties["no",] == "none"
    assert found.manifest.custom["planner_data"]["groups.0.lr"] == ["groups", 0, "lr"]
    assert found.manifest.step == 12
    assert np.array_equal(
        read_array(found.reader, found.manifest.tensors["model.transposed",], (slice(2, 5), slice(1, 6))),
        base.T[2:5, 1:6].numpy(),
    )


def test_two_ranks(tmp_path):
    """Row, column and uneven sharding by DTensor, written by two processes."""
    script = """
        whole = torch.arange(7 * 6, dtype=torch.float32).reshape(7, 6)
        place = {"rows": Shard(0), "columns": Shard(1), "same": Replicate()}
        state = {name: distribute_tensor(whole, mesh, [one]) for name, one in place.items()}
        state["one"] = distribute_tensor(torch.ones(1, 3), mesh, [Shard(0)])
        dcp.save(state, checkpoint_id=f"{folder}/a")
    """
    two_ranks(script, tmp_path)
    found = opened(tmp_path / "a", "dcp")
    whole = np.arange(42, dtype="f4").reshape(7, 6)
    for name in ("rows", "columns", "same"):
        assert canonical(found, (name,)) == whole.tobytes(), name
        spec = found.manifest.tensors[name,]
        raw = found.reader.access(spec).extents
        assert len(raw or ()) == {"rows": 2, "columns": 0, "same": 1}[name]
        assert np.array_equal(read_array(found.reader, spec, (slice(3, 5), slice(1, 5))), whole[3:5, 1:5])
    assert canonical(found, ("one",)) == as_bytes(torch.ones(1, 3))
    receipt = wherry.convert(tmp_path / "a", tmp_path / "b", to="dcp", lineage=False)
    assert receipt.source.weights_digest == receipt.target.weights_digest


def test_metadata_of_single_ranks(tmp_path):
    save({"a": torch.ones(3), "b": torch.zeros(2)}, tmp_path / "a")
    whole = meta(tmp_path / "a")
    for rank, name in enumerate(("a", "b")):
        part = metadata.Metadata({name: whole.state_dict_metadata[name]}, None, {})
        part.storage_data = {key: info for key, info in whole.storage_data.items() if key.fqn == name}
        (tmp_path / "a" / f"__{rank}.metadata").write_bytes(pickle.dumps(part))
    (tmp_path / "a" / ".metadata").unlink()
    found = opened(tmp_path / "a", "dcp")
    assert canonical(found, ("a",)) + canonical(found, ("b",)) == as_bytes(torch.ones(3)) + bytes(8)


def test_a_stale_file_of_a_wider_save_is_not_ours(tmp_path):
    save({"a": torch.ones(3)}, tmp_path / "a")
    (tmp_path / "a" / "__7_0.distcp").write_bytes(b"old")
    found = opened(tmp_path / "a", "dcp")
    assert {entry.name for entry in found.reader.members()} == {".metadata", "__0_0.distcp"}


@pytest.mark.parametrize(
    ("chunks", "ordered", "holes"),
    [
        ([((0, 0), (2, 4)), ((2, 0), (2, 4))], True, 0),
        ([((0, 0), (4, 2)), ((0, 2), (4, 2))], False, 0),
        ([((0, 0), (1, 2)), ((0, 2), (1, 2)), ((1, 0), (3, 4))], True, 0),
        ([((0, 0), (2, 4)), ((3, 0), (1, 4)), ((2, 0), (0, 4))], False, 1),
        ([], False, 1),
    ],
)
def test_how_chunks_make_up_a_tensor(chunks, ordered, holes):
    found = with_elements([Chunk(*chunk) for chunk in chunks])
    assert in_order((4, 4), found) == ordered
    assert len(list(uncovered_regions((4, 4), found))) == holes


def test_objects_keep_their_classes_and_keys(tmp_path):
    """Dicts become items; inside a tuple, which is one object to torch, keys may be numbers."""
    state = {"a": torch.ones(2), "pair": ("x", {1: 2.5, None: (3, 4)}), "lists": [1, [2, (3,)]]}
    wherry.convert(save(state, tmp_path / "a"), tmp_path / "b", to="dcp", lineage=False)
    found = {"a": torch.zeros(2), "pair": None, "lists": None}
    dcp.load(found, checkpoint_id=str(tmp_path / "b"), no_dist=True)
    assert (found["pair"], found["lists"]) == (state["pair"], state["lists"])


def test_the_class_of_olmo_core_is_data(tmp_path):
    """Its writer has a class of its own for a path, an offset and a length; it is known by its exact name alone."""
    import dataclasses
    import pickle
    import sys
    import types

    import torch
    import torch.distributed.checkpoint as dcp

    state = {"model": {"w": torch.arange(12.0).reshape(3, 4)}, "optim": {"w": torch.ones(3)}}
    dcp.save(state, checkpoint_id=tmp_path / "step")
    name = "olmo_core.distributed.checkpoint.filesystem"
    modules = {".".join(name.split(".")[:depth]): types.ModuleType("m") for depth in range(1, 5)}
    kind = dataclasses.make_dataclass(
        "_StorageInfo", [("relative_path", str), ("offset", int), ("length", int)]
    )
    kind.__module__, modules[name]._StorageInfo = name, kind
    file = tmp_path / "step" / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    stored = {
        key: kind(one.relative_path, one.offset, one.length) for key, one in metadata.storage_data.items()
    }
    metadata.storage_data = stored
    with pytest.MonkeyPatch.context() as patch:
        for module, found in modules.items():
            patch.setitem(sys.modules, module, found)
        data = pickle.dumps(metadata)
    file.write_bytes(data)
    assert wherry.detect(tmp_path / "step").verdict == "ok"
    with wherry.open(tmp_path / "step") as checkpoint:
        assert checkpoint.read(("model.w",)).tolist() == state["model"]["w"].tolist()
    file.write_bytes(data.replace(b"checkpoint.filesystem", b"checkpoint.otherwhere"))
    assert wherry.detect(tmp_path / "step").verdict == "malicious"


# PyTorch DCP of every generation that can be imitated here, its checksums, and how large it may be.


TENSORS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(3, dtype=torch.bfloat16)}


def rewritten(path, change, protocol=4, replace=()):
    """The same checkpoint with metadata as another Python or torch would have pickled it."""
    root = meta(path)
    change(root)
    data = pickle.dumps(root, protocol=protocol)
    for old, new in replace:
        assert old in data
        data = data.replace(old, new)
    (path / ".metadata").write_bytes(data)
    return path


def named(path_class):
    return lambda root: setattr(root.storage_meta, "checkpoint_id", path_class("/data", "run 1", "step"))


def without(*names):
    def change(root):
        for name in names:
            delattr(root, name) if name in vars(root) else None
        assert not set(names) & set(vars(root))

    return change


def _bare(root):
    root.storage_meta, root.planner_data, root.version = None, None, None


PURE = b"cpathlib\nPurePosixPath\n"


@pytest.mark.parametrize(
    ("change", "protocol", "replace"),
    [
        (named(pathlib.PosixPath), 4, ()),
        (named(pathlib.PurePosixPath), 5, ()),
        (named(pathlib.PureWindowsPath), 4, ()),
        (named(pathlib.PurePosixPath), 2, [(PURE, b"cpathlib\nWindowsPath\n")]),
        (named(pathlib.PurePosixPath), 2, [(PURE, b"cpathlib._local\nPosixPath\n")]),
        (named(pathlib.PurePosixPath), 2, [(PURE, b"cpathlib._local\nPureWindowsPath\n")]),
        (without("version"), 4, ()),
        (without("version", "storage_meta"), 4, ()),
        (_bare, 4, ()),
        (lambda _root: None, 5, ()),
    ],
)
def test_metadata_of_other_generations(tmp_path, change, protocol, replace):
    path = rewritten(save(TENSORS, tmp_path / "a"), change, protocol, replace)
    found = opened(path, "dcp")
    assert {name: canonical(found, (name,)) for name in TENSORS} == {
        n: as_bytes(t) for n, t in TENSORS.items()
    }
    assert wherry.detect(path).verdict == "ok"


def test_ranks_that_saved_without_collectives(tmp_path):
    """torch 2.9 and later: one metadata file for each rank, written by torch itself."""
    script = """
        whole = torch.arange(42, dtype=torch.float32).reshape(7, 6)
        state = {"w": distribute_tensor(whole, mesh, [Shard(0)]), f"of.{rank}": torch.full((2,), float(rank))}
        dcp.save(state, checkpoint_id=f"{folder}/a", use_collectives=False)
    """
    two_ranks(script, tmp_path)
    assert not (tmp_path / "a" / ".metadata").exists()
    found = opened(tmp_path / "a", "dcp")
    assert canonical(found, ("w",)) == np.arange(42, dtype="f4").tobytes()
    assert canonical(found, ("of.1",)) == np.ones(2, "f4").tobytes()
    assert wherry.detect(tmp_path / "a").verdict == "ok"
    (tmp_path / "a" / "__1.metadata").unlink()
    assert wherry.detect(tmp_path / "a").verdict == "incomplete"


def test_the_widest_profile_names_only_what_every_release_has(tmp_path):
    options = {"for_torch": "2.3"}
    wherry.convert(save(TENSORS, tmp_path / "a"), tmp_path / "b", to="dcp", options=options, lineage=False)
    words: list[str] = []
    named_globals = set()
    for opcode, value, _ in pickletools.genops((tmp_path / "b" / ".metadata").read_bytes()):
        if "UNICODE" in opcode.name:
            words.append(value)
        if opcode.name == "GLOBAL":
            named_globals.add(value.replace(" ", "."))
        elif opcode.name == "STACK_GLOBAL":
            named_globals.add(".".join(words[-2:]))
    checkpoint, old = "torch.distributed.checkpoint", "torch.distributed._shard.sharded_tensor.metadata"
    assert named_globals == {
        *(f"{checkpoint}.metadata.{name}" for name in ("Metadata", "TensorStorageMetadata")),
        *(f"{checkpoint}.metadata.{name}" for name in ("ChunkStorageMetadata", "MetadataIndex")),
        f"{checkpoint}.filesystem._StorageInfo",
        f"{old}.TensorProperties",
        f"{old}.MEM_FORMAT_ENCODING",
        "torch.Size",
        "torch.float32",
        "torch.bfloat16",
        "torch.serialization._get_layout",
    }


@pytest.mark.parametrize("to", ["dcp", "safetensors"])
def test_a_flipped_bit_stops_a_conversion(tmp_path, to):
    """The mover reads spans past the archives; the CRC of each record travels with its extent."""
    path = save({"a": torch.randn(500, 3), "b": torch.ones(2)}, tmp_path / "a")
    found = opened(path, "dcp")
    (extent,) = found.reader.access(found.manifest.tensors["a",]).extents or ()
    assert extent.crc32
    data = bytearray((path / "__0_0.distcp").read_bytes())
    data[extent.offset + 777] ^= 4
    (path / "__0_0.distcp").write_bytes(data)
    with pytest.raises(CorruptError):
        wherry.convert(path, tmp_path / "b", to=to, lineage=False)
    assert not (tmp_path / "b").exists()


def test_the_corpus_bitflip_stops_a_conversion(corpus, tmp_path):
    with pytest.raises(CorruptError):
        wherry.convert(place("defect-dcp-bitflip"), tmp_path / "b", to="dcp", lineage=False)


def test_archives_that_are_alike_keep_their_own_checksums(tmp_path):
    """Equal shapes are recognised without being read anew; a changed archive among them is not like the others."""
    state = {f"w{number:02d}": torch.full((4, 5), float(number)) for number in range(20)}
    path = save(state, tmp_path / "a")
    found = opened(path, "dcp")
    extents = {name: found.reader.access(found.manifest.tensors[name,]).extents for name in state}
    raw = (path / "__0_0.distcp").read_bytes()
    assert len({one[0].crc32 for one in extents.values() if one}) == 20
    for name, (extent,) in extents.items():
        assert raw[extent.offset : extent.offset + extent.length] == as_bytes(state[name])
    stored = {key.fqn: info for key, info in meta(path).storage_data.items()}
    where = stored["w11"].offset
    at = raw.index(b"little", where)  # its byte order: an archive of its own kind
    (path / "__0_0.distcp").write_bytes(raw[:at] + b"litzle" + raw[at + 6 :])
    found = opened(path, "dcp")
    assert found.reader.access(found.manifest.tensors["w10",]).extents
    with pytest.raises(CorruptError, match="byte order"):
        found.reader.access(found.manifest.tensors["w11",])


def generate(folder, parameters, ranks, archive):
    """Metadata of so many row-sharded parameters over so many ranks; equal items in one file."""
    folder.mkdir()
    root = metadata.Metadata({}, {}, {})
    root.storage_meta = metadata.StorageMeta("/data/run/step")
    rows, columns = archive[1]
    with (folder / "__0_0.distcp").open("wb") as file:
        for number in range(parameters):
            name = f"model.layers.{number // 9}.block.{number % 9}.weight"
            root.planner_data[name] = ("model", name.removeprefix("model."))
            chunks = []
            for rank in range(ranks):
                offset = torch.Size([rank * rows, 0])
                chunks.append(metadata.ChunkStorageMetadata(offset, torch.Size([rows, columns])))
                key = metadata.MetadataIndex(name, offset, rank)
                root.storage_data[key] = filesystem._StorageInfo("__0_0.distcp", file.tell(), len(archive[0]))
                file.write(archive[0])
            properties = metadata.TensorProperties(torch.float32)
            size = torch.Size([rows * ranks, columns])
            root.state_dict_metadata[name] = metadata.TensorStorageMetadata(properties, size, chunks)
    (folder / ".metadata").write_bytes(pickle.dumps(root))
    return folder


def small_archive(path):
    torch.save(torch.ones(2, 4), path)
    return path.read_bytes(), (2, 4)


@pytest.mark.slow
def test_a_hundred_and_fifteen_thousand_chunks(tmp_path):
    """900 parameters over 128 ranks: parsed in less than 20 s of processor time and 1 GB."""
    path = generate(tmp_path / "a", 900, 128, small_archive(tmp_path / "one"))
    assert (path / ".metadata").stat().st_size > 10 << 20
    used, peak = measured(
        f"""
        found = wherry.detect({str(path)!r})
        assert (found.verdict, found.format) == ("ok", "dcp"), found.reason
        """
    )
    assert used < 20
    assert peak < 1 << 20


@pytest.mark.slow
def test_a_hundred_thousand_tensors_are_opened_and_placed(tmp_path):
    """Five times the tensors take about five times the processor time, in bounded memory."""
    archive = small_archive(tmp_path / "one")

    def opened_and_placed(tensors):
        path = generate(tmp_path / str(tensors), tensors, 1, archive)
        return measured(
            f"""
            with wherry.open({str(path)!r}) as found:
                assert all(found.reader.access(spec).extents for spec in found.manifest.tensors.values())
            """
        )

    few, _ = opened_and_placed(20_000)
    many, peak = opened_and_placed(100_000)
    assert many < 8 * few
    assert peak < 3 << 20


def measured(script):
    """Seconds of processor time and most kilobytes of a process of its own, whatever this one has held before."""
    whole = (
        "import re, time, wherry\nfrom pathlib import Path\nbegan = time.process_time()\n"
        + textwrap.dedent(script)
        + "peak = re.search(r'VmHWM:\\s+(\\d+)', Path('/proc/self/status').read_text())[1]\n"
        + "print(time.process_time() - began, peak)\n"
    )
    command = [sys.executable, "-c", whole]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    return tuple(map(float, done.stdout.split()))


# A checkpoint without tensors as DCP: one file that holds no archive.


@pytest.fixture
def empty(tmp_path):
    save_file({}, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def test_it_is_streamed_to_a_bucket(empty, tmp_path):
    target = f"memory://bucket{tmp_path}/out"
    wherry.convert(empty, target, to="dcp", lineage=False)
    assert wherry.verify(target, level="digest").ok


def test_it_can_be_split(empty, tmp_path):
    request = convert_request(str(empty), [TargetRequest(str(tmp_path / "out"), "dcp")], lineage=False)
    assert len(split(request, 1 << 20).units) == 1
    work(str(tmp_path / "out"))
    commit(str(tmp_path / "out"))
    assert wherry.verify(tmp_path / "out", level="digest").ok


# Members of enumerations as CPython 3.11.0 to 3.11.3 pickles them (Debian 12 has 3.11.2): `getattr(class,
# name)`.


@pytest.fixture
def by_name(monkeypatch):
    """This Python pickles members as those versions do."""
    monkeypatch.setattr(
        enum.Enum, "__reduce_ex__", lambda self, _protocol: (getattr, (type(self), self.name))
    )


def test_a_save_of_python_3_11_2_is_read_and_converted(by_name, tmp_path):
    state = {"w": torch.arange(12.0).reshape(3, 4), "step": 3}
    dcp.save(state, checkpoint_id=tmp_path / "a")
    assert b"getattr" in (tmp_path / "a" / ".metadata").read_bytes()
    with wherry.open(tmp_path / "a") as checkpoint:
        assert (checkpoint.read(("w",)) == state["w"].numpy()).all()
    wherry.convert(tmp_path / "a", tmp_path / "b", to="dcp", lineage=False)
    loaded = {"w": torch.zeros(3, 4)}
    dcp.load(loaded, checkpoint_id=tmp_path / "b")
    assert torch.equal(loaded["w"], state["w"])


class Call:
    """Pickled as a call of `getattr`."""

    def __init__(self, *args):
        self.args = args

    def __reduce__(self):
        return getattr, self.args


@pytest.mark.parametrize("args", [
    (metadata.Metadata, "__init__"), (metadata._MEM_FORMAT_ENCODING, "__class__"),
    (metadata._MEM_FORMAT_ENCODING, "TORCH_CONTIGUOUS_FORMAT", None), ("text", "join"),
    (metadata._MEM_FORMAT_ENCODING,),
])  # fmt: skip
def test_nothing_else_is_named(args, tmp_path):
    dcp.save({"w": torch.zeros(3)}, checkpoint_id=tmp_path / "a")
    file = tmp_path / "a" / ".metadata"
    root = pickle.loads(file.read_bytes())
    root.planner_data = Call(*args)
    file.write_bytes(pickle.dumps(root))
    with pytest.raises(HostileError, match=r"builtins\.getattr"):
        wherry.convert(tmp_path / "a", tmp_path / "b", to="dcp", lineage=False)
    assert not (tmp_path / "b").exists()
