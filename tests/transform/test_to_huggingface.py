"""Folders of Hugging Face: names of the model, towers, and the folders of Meta."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
import yaml

import wherry
from tests.support import wrapped
from tests.support.families import PLAIN_LLAMA, SIZES, made
from tests.support.model_systems import LLAMA_CONFIG, META_PARAMS, llama_huggingface, llama_meta
from tests.support.oracles import files, judge, maxtext
from tests.support.oracles.cases import MODEL_NAMES, leaves_of
from tests.support.oracles.huggingface import MODELS, TOKENS, logits
from tests.support.torch import torch as torch_of_folders
from wherry.core.request import LayoutRequest
from wherry.errors import AmbiguousError, UnrepresentableError, WherryError
from wherry.families import load_family

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


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


# Models with images: tensors outside the text model keep their names, and are left out only on request.


_EYE = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
        "patch_size": 14}  # fmt: skip
_TEXT = {"vocab_size": 160, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
         "intermediate_size": 48, "num_hidden_layers": 2, "max_position_embeddings": 64, "bos_token_id": 1,
         "eos_token_id": 2}  # fmt: skip
_GEMMA4_EYE = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
               "num_key_value_heads": 2, "head_dim": 8, "patch_size": 4, "position_embedding_size": 16}  # fmt: skip
# The tower of Llama 4 folds four patches into one, and gives its projector what it has.
_LLAMA4_EYE = {**_EYE, "intermediate_size": 64, "vision_output_dim": 8, "projector_input_dim": 8, "image_size": 8,
               "patch_size": 4, "projector_output_dim": 8, "pixel_shuffle_ratio": 0.5}  # fmt: skip
# Class → the arguments of its config, and how the names of the tensors outside the text model begin.
CLASSES = {
    "Gemma3": ({"text_config": MODELS["gemma3"].settings, "vision_config": _EYE, "mm_tokens_per_image": 4},
               ("vision_tower.", "multi_modal_projector.")),
    "Gemma4": ({"text_config": MODELS["gemma4"].settings, "vision_config": _GEMMA4_EYE, "audio_config": None},
               ("model.vision_tower.", "model.embed_vision.")),
    "Llama4": ({"text_config": MODELS["llama4-scout"].settings, "vision_config": _LLAMA4_EYE},
               ("vision_model.", "multi_modal_projector.")),
    "Qwen2VL": (
        {"text_config": _TEXT,
         "vision_config": {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2}},
        ("visual.",),
    ),
}  # fmt: skip

# Classes of which MaxText has the text model.
TEXTS = {"Gemma3": "gemma3", "Gemma4": "gemma4", "Llama4": "llama4-scout"}


@pytest.fixture(scope="module", params=list(CLASSES))
def saved(request, tmp_path_factory):
    """A tiny random model of a class with images, as it saves itself."""
    return save(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module", params=list(TEXTS))
def text(request, tmp_path_factory):
    """The same of those of which MaxText has the text model, and the class."""
    return save(request.param, tmp_path_factory.mktemp(request.param)), request.param


def save(name: str, folder: Path) -> Path:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**CLASSES[name][0])
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
    model.save_pretrained(folder)
    return folder


def tensors(folder: Path) -> dict[str, np.ndarray]:
    with wherry.open(folder) as checkpoint:
        return {"/".join(path): checkpoint.read(path) for path in checkpoint.manifest.tensors}


def outside_text(found: dict[str, np.ndarray], name: str) -> dict[str, np.ndarray]:
    return {key: one for key, one in found.items() if key.startswith(CLASSES[name][1])}


def require_same(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    assert found.keys() == wanted.keys()
    assert all(
        np.array_equal(found[key], wanted[key]) and found[key].dtype == wanted[key].dtype for key in wanted
    )


@pytest.mark.parametrize("to", ["huggingface", "dcp", "torch-zip", "safetensors", "orbax"])
def test_every_tensor_arrives_under_its_name(saved, to, tmp_path):
    wherry.convert(saved, tmp_path / "out", to=to, lineage=False)
    require_same(tensors(tmp_path / "out"), tensors(saved))


def test_a_layout_within_the_system_carries_the_towers(text, tmp_path):
    """With a data type the text model is laid out, the towers stay; transformers finds every weight."""
    source, name = text
    layout = LayoutRequest(dtype="bfloat16")
    wherry.convert(source, tmp_path / "out", to="huggingface", layout=layout, lineage=False)
    wanted, found = tensors(source), tensors(tmp_path / "out")
    assert found.keys() == wanted.keys()
    assert len(outside_text(wanted, name)) > 15
    require_same(outside_text(found, name), outside_text(wanted, name))
    assert {found[key].dtype.name for key in found.keys() - outside_text(found, name).keys()} == {"bfloat16"}
    logits(tmp_path / "out")


def test_a_system_without_towers_gets_the_text_model_only_on_request(text, tmp_path):
    with pytest.raises(UnrepresentableError, match=r"left out: .*\d+ vision tower weights") as caught:
        wherry.convert(text[0], tmp_path / "out", to="maxtext", lineage=False)
    assert "--ignore others" in caught.value.cure
    assert "projector weight" in caught.value.what
    assert not (tmp_path / "out").exists()


def test_maxtext_computes_from_the_text_model_what_transformers_computed(text, tmp_path):
    (source, name), target = text, tmp_path / "out"
    plan = wherry.plan(source, target, to="maxtext", ignore=["others"])
    left = {one.name for one in plan.ignored if one.weights}
    assert left == outside_text(tensors(source), name).keys()
    wherry.convert(source, target, to="maxtext", ignore=["others"], lineage=False)
    config = yaml.safe_load((target / "items" / "assets" / "maxtext_config.yml").read_text())
    leaves = leaves_of(files.arrays("maxtext", target), config)
    found = maxtext.logits(leaves, {**MODEL_NAMES.get(TEXTS[name], {}), **config}, TOKENS)
    judge.require_equal(found, logits(source))


# A folder of Meta's `consolidated.NN.pth` without `params.json`: the cure of the refusal leads to a whole
# model.


SIZED = {**SIZES, "embed": 32, "ffn": 24}
PARAMS = {"dim": 32, "n_layers": 3, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 20, "multiple_of": 24,
          "ffn_dim_multiplier": 0.2, "norm_eps": 1e-5, "rope_theta": 10000.0}  # fmt: skip
CONFIG = {**PLAIN_LLAMA, "hidden_size": 32, "intermediate_size": 24, "head_dim": 8}


@pytest.fixture
def folder(tmp_path):
    tensors = made(load_family("llama"), "meta", {}, sizes=SIZED).tensors
    (tmp_path / "meta").mkdir()
    flat = {path[0]: torch_of_folders.from_numpy(array) for path, array in tensors.items()}
    torch_of_folders.save(flat, tmp_path / "meta/consolidated.00.pth")
    return tmp_path / "meta"


def test_without_sizes_the_cure_names_the_files_that_state_them(folder, tmp_path):
    with pytest.raises(AmbiguousError, match="cannot determine the size of axis group") as caught:
        wherry.plan(folder, tmp_path / "out", to="huggingface")
    assert caught.value.cure == "pass the model's config with --config FILE (its params.json or config.json)"


@pytest.mark.parametrize("source", ["meta", "meta/consolidated.00.pth"])
@pytest.mark.parametrize(("name", "config"), [("params.json", PARAMS), ("config.json", CONFIG)])
def test_the_cure_leads_to_the_model(source, name, config, folder, tmp_path):
    (tmp_path / name).write_text(json.dumps(config))
    layout = LayoutRequest(config=str(tmp_path / name))
    wherry.convert(tmp_path / source, tmp_path / "out", to="huggingface", layout=layout, lineage=False)
    found = json.loads((tmp_path / "out/config.json").read_text())
    assert (found["num_key_value_heads"], found["num_attention_heads"], found["intermediate_size"]) == (
        2,
        4,
        24,
    )
    (folder / "params.json").write_text(json.dumps(PARAMS))
    wherry.convert(folder, tmp_path / "with-params", to="huggingface", lineage=False)
    for path in ("model.layers.2.self_attn.q_proj.weight", "lm_head.weight"):
        with wherry.open(tmp_path / "out") as one, wherry.open(tmp_path / "with-params") as other:
            np.testing.assert_array_equal(one.read(path), other.read(path))
