"""Files that become much more than they are: refused as hostile by what they would become, before it is in memory.

The generators are those of `infra/attack`; here the limits are lowered, so that the files are small. The slow test runs
the files of the attack themselves.
"""

import subprocess

import pytest

import wherry
from infra.attacks import bombs
from infra.attacks.case import Case
from infra.attacks.server import Server
from infra.attacks.verbs import LOOKING
from wherry.core import json_document, limits
from wherry.errors import HostileError
from wherry.formats.discover import DEEPEST
from wherry.integrations.containers.msgpack import index as msgpack_index
from wherry.integrations.containers.orbax import tree
from wherry.store.local_store import locate

LOWERED = {
    "wherry.integrations.containers.pickle.machine:_MOST_BYTES": 1 << 20,
    "wherry.integrations.containers.pickle.machine:_CHECKED": 1 << 10,
    "wherry.integrations.containers.msgpack.index:_MOST_NODES": 1000,
    "wherry.integrations.formats.gguf.header:_MOST_PAIRS": 1000,
    "wherry.integrations.formats.gguf.header:MOST_TENSORS": 1000,
    "wherry.integrations.formats.gguf.header:_MOST_TEXTS": 1000,
    "wherry.integrations.containers.ocdbt.read:_MOST_BYTES": 10_000,
    "wherry.integrations.containers.ocdbt.read:_MOST_ENTRIES": 1000,
    "wherry.core.json_document:_MOST_WHOLE": 100,
    "wherry.core.json_document:PIECE": 1 << 12,
}
BOMBS = {
    "orbax_metadata": 30_000,
    "orbax_rows": 3000,
    "index": 3000,
    "safetensors_header": 3000,
    "safetensors_lists": 30_000,
    "pickle_dicts": 50_000,
    "pickle_sets": 50_000,
    "torch_zip": 50_000,
    "dcp_metadata": 50_000,
    "gguf_keys": 3000,
    "gguf_tensors": 3000,
    "gguf_strings": 3000,
    "msgpack_maps": 3000,
    "msgpack_keys": 3000,
    "zarr_metadata": 150_000,
    "ocdbt_keys": 3000,
    "ocdbt_zeros": 3000,
    "config": 300_000,
    "deep_json": 5000,
}


@pytest.fixture
def lowered(monkeypatch):
    few = limits.JsonLimits(nbytes=64 << 20, nodes=5000, rows=1000)
    containers, formats = "wherry.integrations.containers", "wherry.integrations.formats"
    monkeypatch.setattr(f"{containers}.orbax.layout.LARGE", few)
    monkeypatch.setattr(f"{containers}.safetensors.header._LIMITS", few)
    monkeypatch.setattr(f"{formats}.huggingface.shards.LARGE", few)
    for name, value in LOWERED.items():
        monkeypatch.setattr(name.replace(":", "."), value)
    monkeypatch.setattr(json_document, "_MOST_WHOLE_BYTES", 1 << 12)


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused_by_what_it_becomes(name, lowered, tmp_path):
    bomb = bombs.make(name, tmp_path / "bomb", BOMBS[name])
    found = wherry.detect(bomb)
    assert found.verdict == "malicious", found.reason
    assert "exceeds the limit of" in found.reason
    with pytest.raises(HostileError, match="exceeds the limit of"):
        wherry.inspect(bomb)


def test_a_tree_that_was_refused_is_not_parsed_again(lowered, tmp_path, monkeypatch):
    read, calls = tree.read_tree, []
    monkeypatch.setattr(tree, "read_tree", lambda place: calls.append(place) or read(place))
    with pytest.raises(HostileError, match="exceeds the limit of 1,000 entries") as caught:
        wherry.inspect(bombs.make("orbax_rows", tmp_path / "bomb", 3000))
    assert "WHERRY_LIMITS" in caught.value.cure
    assert len(calls) == 1


def test_a_msgpack_map_is_refused_before_its_first_key(lowered, tmp_path, monkeypatch):
    key, read = msgpack_index.Walk._key, []
    monkeypatch.setattr(msgpack_index.Walk, "_key", lambda walk, path: read.append(1) or key(walk, path))
    file = next(bombs.make("msgpack_keys", tmp_path / "bomb", 3000).parent.rglob("checkpoint_1"))
    with pytest.raises(HostileError, match="exceeds the limit of"):
        msgpack_index.index_file(locate(str(file)))
    assert read == [1]  # that of the map around it


@pytest.mark.parametrize(
    "name", ["x.pkl", "model.pt", "model.npz", "model.npy", "model.gguf", "model.safetensors"]
)
def test_a_sparse_file_of_terabytes_is_refused(name, tmp_path):
    heads = {"x.pkl": b"\x80\x04(", "model.gguf": b"GGUF", "model.npy": b"\x93NUMPY\x02\x00\xff\xff\xff\x7f"}
    path = bombs.sparse(name, heads.get(name, b""), 1 << 40, tmp_path / "bomb")
    assert path.stat().st_size == 1 << 40
    assert wherry.detect(path).verdict != "ok"


@pytest.fixture
def deep(tmp_path):
    """A tree that Python cannot remove, since `rmtree` calls itself for each level."""
    yield bombs.deep_folders(tmp_path / "deep", 3000)
    subprocess.run(["rm", "-rf", tmp_path / "deep"], check=True)


def test_a_deep_tree_ends_neither_discover_nor_audit(tmp_path, deep):
    skipped = []
    found = list(wherry.discover(tmp_path / "deep", on_skip=skipped.append))
    assert [one.uri for one in found] == [str(tmp_path / "deep" / "model")]
    assert [row.reason for row in skipped] == [f"folders are nested more than {DEEPEST} levels deep"]
    from wherry.prove.audit import audit

    assert audit([str(tmp_path / "deep")]).ok


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "count"),
    [("orbax_metadata", 80_000_000), ("orbax_rows", 1_500_000), ("sidecar", 60_000_000),
     ("safetensors_header", 1_600_000), ("pickle_dicts", 19_000_000), ("gguf_keys", 4_000_000),
     ("msgpack_keys", 3_900_000), ("ocdbt_keys", 20_000_000)],
)  # fmt: skip
def test_no_verb_takes_more_than_the_promised_memory_and_time(name, count, tmp_path):
    (tmp_path / "home").mkdir()
    server = Server(tmp_path, tmp_path, tmp_path / "home", tmp_path)
    case = Case(f"bomb/{name}", lambda folder: bombs.make(name, folder / "bomb", count))
    for run in server.examine(case, list(LOOKING)):
        assert run.megabytes <= 300, run
        assert run.seconds <= 5, run
        assert not run.faults, run
