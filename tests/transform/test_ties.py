"""A model whose config ties the output layer and whose files hold both: the bytes decide whether it is tied.

Equal copies stay tied in every system and back; of two different ones none is lost, and a warning names both.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import wherry
from tests.support.tiny_models import CLASSES, MODELS
from wherry.core.request import LayoutRequest
from wherry.errors import MismatchError, UnrepresentableError

transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")
WEIGHTS = "model.safetensors"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
SYSTEMS = ["lingua", "maxtext", "penzai", "torchtitan", "megatron", "huggingface-flax"]


@pytest.fixture
def made(tmp_path):
    """A tiny tied model of a label as transformers saves it, with changed or added tensors."""

    def save(label="llama", change=None, **more):
        name, settings = MODELS[label]
        config = getattr(transformers, f"{name}Config")(**{**settings, "tie_word_embeddings": True, **more})
        torch.manual_seed(0)
        model = getattr(transformers, CLASSES.get(name, f"{name}ForCausalLM"))(config)
        folder = tmp_path / "hf"
        model.save_pretrained(folder)
        tensors = load_file(folder / WEIGHTS)
        tensors |= change(tensors) if change else {}
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
        return folder, tensors

    return save


def equal(tensors):
    return {HEAD: tensors[EMBEDDING].copy()}


def different(tensors):
    changed = tensors[EMBEDDING].copy()
    changed[-1, -1] += 1
    return {HEAD: changed}


def convert(source, target, to, **options):
    return wherry.convert(source, target, to=to, lineage=False, **options)


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("to", SYSTEMS)
@pytest.mark.parametrize("copies", [equal, different])
def test_the_bytes_decide(copies, to, made, tmp_path):
    folder, tensors = made(change=copies)
    plan = wherry.plan(folder, tmp_path / "target", to=to)
    said = [note for note in plan.notes if EMBEDDING in note and HEAD in note]
    left = [row for row in plan.ignored if row.path == (HEAD,)]
    tied = copies is equal
    stays = (
        tied and to != "huggingface-flax"
    )  # whose classes of a Llama are never tied, as its config then says
    assert (len(said), len(left)) == ((0, 1) if tied else (1, 0))
    if tied:
        assert (left[0].rule, left[0].reason) == (
            "tied head", f"a second copy of {EMBEDDING}, to which it is tied",
        )  # fmt: skip
    assert plan.to_json()["parameters"]["agrees"] is True
    alone = sum(array.size for name, array in tensors.items() if name != HEAD)
    assert plan.parameters == alone + (0 if tied else tensors[HEAD].size)
    convert(folder, tmp_path / "target", to)
    assert wherry.verify(tmp_path / "target", level="roundtrip", against=folder).verdict == "ok"
    convert(tmp_path / "target", tmp_path / "back", "huggingface")
    back = load_file(tmp_path / "back" / WEIGHTS)
    assert config_of(tmp_path / "back")["tie_word_embeddings"] is stays
    assert back.keys() == tensors.keys() - ({HEAD} if stays else set())
    for name, array in back.items():
        np.testing.assert_allclose(array, tensors[name], rtol=1e-6, err_msg=name)


@pytest.mark.parametrize("copies", [equal, different])
def test_transformers_agrees(copies, made, tmp_path):
    folder, _tensors = made(change=copies)
    convert(folder, tmp_path / "lingua", "lingua")
    convert(tmp_path / "lingua", tmp_path / "back", "huggingface")
    tokens = torch.arange(8)[None]
    with torch.no_grad():
        first, second = (
            transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()(tokens).logits
            for path in (folder, tmp_path / "back")
        )
    assert torch.equal(first, second)


@pytest.mark.parametrize("copies", [equal, different])
def test_within_hugging_face_both_are_kept(copies, made, tmp_path):
    folder, tensors = made(change=copies)
    convert(folder, tmp_path / "same", "huggingface")
    convert(folder, tmp_path / "half", "huggingface", layout=LayoutRequest(dtype="bfloat16"))
    for name in ("same", "half"):
        with wherry.open(tmp_path / name) as checkpoint:
            assert {path[0] for path in checkpoint.manifest.tensors} == tensors.keys()


def test_one_storage_in_a_file_of_torch(made, tmp_path):
    """torch saves both names of a tied matrix with one storage."""
    folder, tensors = made()
    state = {name: torch.from_numpy(array) for name, array in tensors.items()}
    (folder / WEIGHTS).unlink()
    torch.save({**state, HEAD: state[EMBEDDING]}, folder / "pytorch_model.bin")
    convert(folder, tmp_path / "maxtext", "maxtext")
    with wherry.open(tmp_path / "maxtext") as checkpoint:
        assert not any("logits_dense" in path for path in checkpoint.manifest.tensors)


def test_another_element_type_is_another_tensor(made, tmp_path):
    folder, _tensors = made(change=lambda tensors: {HEAD: tensors[EMBEDDING].astype("f2")})
    assert any(HEAD in note for note in wherry.plan(folder, tmp_path / "target", to="maxtext").notes)


def test_what_the_user_states_is_used_or_refused(made, tmp_path):
    folder, _tensors = made(change=equal)
    untied = wherry.plan(folder, tmp_path / "target", to="maxtext", options={"tied": "false"})
    assert any("logits_dense" in path for path in untied.manifest.tensors)
    folder, _tensors = made(change=different)
    with pytest.raises(MismatchError, match="tied=true"):
        wherry.plan(folder, tmp_path / "target", to="maxtext", options={"tied": "true"})


@pytest.mark.parametrize("copies", [equal, different])
def test_a_matrix_of_several_pieces(copies, made, tmp_path):
    """It is compared in pieces of 8 MiB; here the last element of the second one differs."""
    folder, _tensors = made(change=copies, vocab_size=100_000)
    notes = wherry.plan(folder, tmp_path / "target", to="maxtext").notes
    assert any(HEAD in note for note in notes) is (copies is different)


@pytest.mark.parametrize("copies", [equal, different])
def test_factors_that_depend_on_the_tie(copies, made, tmp_path):
    """Granite multiplies the embedding, so the last norm of a tied one is divided in other systems."""
    folder, tensors = made("granite", change=copies)
    convert(folder, tmp_path / "maxtext", "maxtext")
    convert(tmp_path / "maxtext", tmp_path / "back", "huggingface", layout=LayoutRequest(family="granite"))
    back = load_file(tmp_path / "back" / WEIGHTS)
    for name, array in back.items():
        np.testing.assert_allclose(array, tensors[name], rtol=1e-5, err_msg=name)
    assert (HEAD in back) is (copies is different)


def test_gpt2(tmp_path):
    folder, first = tmp_path / "hf", "transformer.wte.weight"
    config = transformers.GPT2Config(vocab_size=60, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    tensors = load_file(folder / WEIGHTS)
    for copy in (tensors[first], tensors[first] + 1):
        save_file({**tensors, HEAD: copy.copy()}, folder / WEIGHTS, metadata={"format": "pt"})
        plan = wherry.plan(folder, tmp_path / "target", to="huggingface-flax")
        tied = copy is tensors[first]
        assert [row.rule for row in plan.ignored if row.path == (HEAD,)] == (["tied head"] if tied else [])
        assert any(HEAD in note for note in plan.notes) is not tied


@pytest.mark.parametrize("version", ["4.46.3", "5.23.0"])
@pytest.mark.parametrize("name", [HEAD, "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"])
def test_t5(name, version, made, tmp_path):
    shared = "shared.weight"
    folder, tensors = made("t5", change=lambda one: {name: one[shared].copy()})
    config = {**config_of(folder), "transformers_version": version}
    if version.startswith("4"):  # which does not write what is the default
        del config["tie_word_embeddings"]
    (folder / "config.json").write_text(json.dumps(config))
    plan = wherry.plan(folder, tmp_path / "target", to="t5x-legacy")
    (left,) = [row for row in plan.ignored if row.path == (name,)]
    assert left.reason == f"a second copy of {shared}, to which it is tied"
    save_file({**tensors, name: tensors[name] + 1}, folder / WEIGHTS, metadata={"format": "pt"})
    with pytest.raises(UnrepresentableError) as caught:
        wherry.plan(folder, tmp_path / "target", to="t5x-legacy")
    assert name == HEAD or name in str(caught.value)


def test_copies_of_bert(tmp_path):
    folder = tmp_path / "hf"
    config = transformers.BertConfig(
        vocab_size=60, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48
    )
    transformers.BertForMaskedLM(config).save_pretrained(folder)
    tensors = load_file(folder / WEIGHTS)
    copies = {
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    }
    both = {**tensors, **{name: tensors[first] for name, first in copies.items()}}
    save_file(both, folder / WEIGHTS, metadata={"format": "pt"})
    plan = wherry.plan(folder, tmp_path / "target", to="huggingface-flax")
    assert {row.path[0] for row in plan.ignored} >= copies.keys()
    for name, first in copies.items():
        save_file({**both, name: both[name] + 1}, folder / WEIGHTS, metadata={"format": "pt"})
        with pytest.raises(UnrepresentableError) as caught:
            wherry.plan(folder, tmp_path / "target", to="huggingface-flax")
        assert name in str(caught.value)
        assert first in str(caught.value)


@pytest.mark.parametrize("copies", [equal, different])
def test_another_system_that_states_a_tie(copies, made, tmp_path):
    """torchtitan always has a head of its own, and its config says whether it is tied."""
    folder, _tensors = made()
    convert(folder, tmp_path / "titan", "torchtitan")
    config = json.loads((tmp_path / "titan" / "torchtitan_config.json").read_text())
    assert config["enable_weight_tying"] is True
    with wherry.open(tmp_path / "titan") as checkpoint:
        tree = {path[0]: checkpoint.read(path) for path in checkpoint.manifest.tensors}
    if copies is different:
        tree = {name: array + (name == HEAD) for name, array in tree.items()}
    wherry.export(tree, tmp_path / "again", to="torchtitan", step=1).result(60)
    (tmp_path / "again" / "torchtitan_config.json").write_text(json.dumps(config))
    convert(tmp_path / "again", tmp_path / "back", "huggingface")
    assert config_of(tmp_path / "back")["tie_word_embeddings"] is (copies is equal)
