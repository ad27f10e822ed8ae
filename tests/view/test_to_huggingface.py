"""Hugging Face is a system: what becomes a folder of it has the names of the model that its config names, and that
config; everything else is refused, or written with `--family none`."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest

import wherry
from tests.support import wrapped
from tests.support.model_systems import LLAMA_CONFIG, META_PARAMS, llama_huggingface, llama_meta
from wherry.errors import WherryError

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def flat():
    return {path[0]: array for path, array in llama_huggingface().items()}


def nested():
    found = {}
    for name, array in flat().items():
        node, parts = found, name.split(".")
        for part in parts[:-1]:
            node = node.setdefault(part, {})
        node[parts[-1]] = array
    return found


def of_torch(container):
    def save(folder):
        state = {name: torch.from_numpy(array.copy()) for name, array in flat().items()}
        return wrapped.CONTAINERS[container][0](folder, state)

    return save


def of_npz(folder):
    np.savez(folder / "x.npz", **flat())
    return folder / "x.npz"


def of_msgpack(folder):
    flax = pytest.importorskip("flax.serialization")
    (folder / "x.msgpack").write_bytes(flax.msgpack_serialize(nested()))
    return folder / "x.msgpack"


def of_orbax(made):
    def save(folder):
        ocp = pytest.importorskip("orbax.checkpoint")
        ocp.PyTreeCheckpointer().save(folder / "tree", made())
        return folder / "tree"

    return save


def of_meta(folder):
    (folder / "params.json").write_text(json.dumps(META_PARAMS))
    state = {path[-1]: torch.from_numpy(np.ascontiguousarray(one)) for path, one in llama_meta().items()}
    torch.save(state, folder / "consolidated.pth")
    return folder / "consolidated.pth"


def of_gguf(folder):
    """One matrix under the name of llama.cpp; the layout of a file is its specification's."""
    name, data = b"blk.0.attn_q.weight", np.zeros((4, 4), np.float32).tobytes()
    head = b"GGUF" + struct.pack("<IQQ", 3, 1, 0)
    head += struct.pack("<Q", len(name)) + name + struct.pack("<IQQIQ", 2, 4, 4, 0, 0)
    (folder / "x.gguf").write_bytes(head.ljust(-len(head) % 32 + len(head), b"\0") + data)
    return folder / "x.gguf"


def of_other(folder):
    np.savez(folder / "x.npz", **{"encoder.w": np.ones((3, 2), np.float32)})
    return folder / "x.npz"


# Kind of source → what saves it, and the exit code without and with the model's config.
SOURCES = {
    **{container: (of_torch(container), 4, 0) for container in ("pt", "legacy", "dcp", "ranks", "safetensors")},
    "npz": (of_npz, 4, 0),
    "msgpack, nested": (of_msgpack, 4, 0),
    "orbax": (of_orbax(flat), 4, 0),
    "orbax, nested": (of_orbax(nested), 4, 0),
    "meta": (of_meta, 4, 0),
    "gguf": (of_gguf, 7, 5),  # one tensor of the model
    "another tree": (of_other, 7, 7),
}  # fmt: skip


@pytest.fixture
def config(tmp_path):
    (folder := tmp_path / "model").mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA_CONFIG))
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "generation_config.json").write_text('{"do_sample": true}')
    return folder


def exit_code(source, target, **stated):
    try:
        wherry.convert(source, target, to="huggingface", lineage=False, **stated)
    except WherryError as error:
        assert not target.exists()
        return error.exit_code
    return 0


@pytest.mark.parametrize("kind", SOURCES)
def test_a_source_becomes_what_transformers_loads_or_nothing(kind, config, tmp_path):
    save, without, named = SOURCES[kind]
    (folder := tmp_path / "in").mkdir()
    source = save(folder)
    assert exit_code(source, tmp_path / "without") == without
    stated = {"config": str(config / "config.json"), "assets": str(config)}
    assert exit_code(source, tmp_path / "out", **stated) == named
    if named:
        return
    loaded, found = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not found["missing_keys"]
    assert not found["unexpected_keys"]
    state = loaded.state_dict()
    assert [name for name, array in flat().items() if not np.array_equal(state[name].numpy(), array)] == []
    assert (tmp_path / "out" / "tokenizer_config.json").exists()
    assert (tmp_path / "out" / "generation_config.json").read_text() == '{"do_sample": true}'


@pytest.mark.parametrize("kind", ["pt", "dcp", "npz", "another tree"])
def test_a_bare_tree_is_written_if_no_family_is_stated_with_what_is_stated(kind, config, tmp_path):
    (folder := tmp_path / "in").mkdir()
    source = SOURCES[kind][0](folder)
    with wherry.open(source) as opened:
        names = set(opened.manifest.tensors)
    receipt = wherry.convert(source, tmp_path / "bare", to="huggingface", family="none", lineage=False)
    assert any("no config.json" in line for line in receipt.warnings)
    stated = {"config": str(config / "config.json"), "assets": str(config)}
    receipt = wherry.convert(
        source, tmp_path / "out", to="huggingface", family="none", lineage=False, **stated
    )
    assert not any("no config.json" in line for line in receipt.warnings)
    assert any("were not compared" in line for line in receipt.warnings)
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == LLAMA_CONFIG
    assert (tmp_path / "out" / "tokenizer_config.json").exists()
    with wherry.open(tmp_path / "out") as opened:
        assert set(opened.manifest.tensors) == names
    assert wherry.verify(tmp_path / "bare", level="roundtrip", against=source).ok
    found = wherry.verify(tmp_path / "out", level="roundtrip", against=source)
    assert found.verdict == (
        "incomplete" if kind == "another tree" else "ok"
    )  # of the model that the config states
