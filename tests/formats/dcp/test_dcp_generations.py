"""PyTorch DCP of every generation that can be imitated here, its checksums, and how large it may be."""

from __future__ import annotations

import pathlib
import pickle
import pickletools
import subprocess
import sys
import textwrap

import numpy as np
import pytest

import wherry
from tests.support.formats import canonical, opened, place
from tests.support.ranks import two_ranks
from tests.support.torch import as_bytes, meta, save, torch
from wherry.errors import CorruptError

metadata = pytest.importorskip("torch.distributed.checkpoint.metadata")
filesystem = pytest.importorskip("torch.distributed.checkpoint.filesystem")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
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
