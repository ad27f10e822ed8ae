"""Each rank's files hold, byte by byte, what vLLM's modules hold that have loaded the model; others get it all."""

from __future__ import annotations

import json

import pytest

import wherry
from tests.support.oracles.vllm_ranks import held
from tests.support.tiny_models import tiny_model
from tests.support.torch import torch
from wherry.errors import CorruptError, IncompleteError, MismatchError, UnrepresentableError, UsageError

MANY_GROUPS = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 4}
CASES = [
    ("llama", {}, 1), ("llama", {}, 2), ("llama", {}, 4), ("llama", {**MANY_GROUPS, "vocab_size": 150}, 2),
    ("llama", {"attention_bias": True, "mlp_bias": True}, 2), ("llama", {"tie_word_embeddings": True}, 2),
    ("mistral", {"num_key_value_heads": 1}, 4), ("qwen2", {}, 4), ("qwen3", MANY_GROUPS, 8),
]  # fmt: skip


def saved(folder, label, **more):
    """A tiny model as transformers saves it, its config, and its tensors."""
    model = tiny_model(label, drawn=True, **more).to(torch.bfloat16)
    model.save_pretrained(folder)
    return model.config, {name: tensor.detach() for name, tensor in model.state_dict().items()}


def ranks_of(source, target, tp, **options):
    return wherry.convert(
        source, target, to="vllm-sharded", options={"tp": str(tp), **options}, lineage=False
    )


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.glob("model-rank-*.safetensors")}


@pytest.mark.parametrize(("label", "more", "ranks"), CASES)
def test_each_rank_holds_what_its_module_holds(tmp_path, label, more, ranks):
    from safetensors.torch import save

    config, state = saved(tmp_path / "hf", label, **more)
    ranks_of(tmp_path / "hf", tmp_path / "ranks", ranks)
    expected = {
        f"model-rank-{rank}-part-0.safetensors": save(held(config, state, rank, ranks))
        for rank in range(ranks)
    }
    assert files_of(tmp_path / "ranks") == expected  # the bytes that vLLM's save_model writes of such modules
    written = json.loads((tmp_path / "ranks" / "config.json").read_text())
    assert written == {
        **json.loads((tmp_path / "hf" / "config.json").read_text()),
        "tie_word_embeddings": False,
    }


def test_the_whole_model_comes_back_and_is_divided_anew(tmp_path):
    from safetensors.torch import load_file

    _config, state = saved(tmp_path / "hf", "qwen3", **MANY_GROUPS)
    ranks_of(tmp_path / "hf", tmp_path / "eight", 8)
    assert wherry.verify(tmp_path / "eight", level="roundtrip", against=tmp_path / "hf").ok
    wherry.convert(tmp_path / "eight", tmp_path / "back", to="huggingface", lineage=False)
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], state[name]) for name in state)
    assert wherry.verify(tmp_path / "back", level="roundtrip", against=tmp_path / "eight").ok
    ranks_of(tmp_path / "eight", tmp_path / "two", 2)
    ranks_of(tmp_path / "hf", tmp_path / "expected", 2)
    assert files_of(tmp_path / "two") == files_of(tmp_path / "expected")


def test_another_systems_checkpoint_is_laid_out_before(tmp_path):
    saved(tmp_path / "hf", "llama")
    wherry.convert(tmp_path / "hf", tmp_path / "step", to="torchtitan", lineage=False)
    ranks_of(tmp_path / "step", tmp_path / "ranks", 2)
    ranks_of(tmp_path / "hf", tmp_path / "expected", 2)
    assert files_of(tmp_path / "ranks") == files_of(tmp_path / "expected")


def test_parts_have_a_largest_size_and_hold_the_same(tmp_path):
    from safetensors.torch import load

    saved(tmp_path / "hf", "llama")
    ranks_of(tmp_path / "hf", tmp_path / "one", 2)
    ranks_of(tmp_path / "hf", tmp_path / "parts", 2, max_file_size="8KB")
    parts, whole = files_of(tmp_path / "parts"), files_of(tmp_path / "one")
    assert len(parts) > len(whole) == 2
    for rank in range(2):
        found = {}
        for name, data in parts.items():
            found |= load(data) if name.startswith(f"model-rank-{rank}-") else {}
        expected = load(whole[f"model-rank-{rank}-part-0.safetensors"])
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in found)


def test_a_model_that_vllm_saved_tied_has_its_embedding_again(tmp_path):
    """Of two names of one tensor vLLM saves the first, which is that of the head."""
    from safetensors.torch import load_file, save_file

    config, state = saved(tmp_path / "hf", "qwen2", tie_word_embeddings=True)
    (tmp_path / "ranks").mkdir()
    config.save_pretrained(tmp_path / "ranks")
    for rank in range(2):
        tensors = held(config, state, rank, 2)
        tensors.pop("model.embed_tokens.weight")
        save_file(tensors, tmp_path / "ranks" / f"model-rank-{rank}-part-0.safetensors")
    wherry.convert(tmp_path / "ranks", tmp_path / "back", to="huggingface", lineage=False)
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert torch.equal(back["model.embed_tokens.weight"], state["model.embed_tokens.weight"])
    assert "lm_head.weight" not in back


def test_copies_that_differ_and_missing_files_are_refused(tmp_path):
    from safetensors.torch import load_file, save_file

    saved(tmp_path / "hf", "llama", num_key_value_heads=1)
    ranks_of(tmp_path / "hf", tmp_path / "ranks", 2)
    file = tmp_path / "ranks" / "model-rank-1-part-0.safetensors"
    tensors = load_file(file)
    (tmp_path / "ranks" / "wherry.json").unlink()
    save_file({**tensors, "model.norm.weight": tensors["model.norm.weight"] + 1}, file)
    with pytest.raises(CorruptError, match="differ"):
        wherry.convert(tmp_path / "ranks", tmp_path / "back", to="huggingface", lineage=False)
    tensors.pop("model.norm.weight")
    save_file(tensors, file)
    with pytest.raises(IncompleteError, match=r"rank 1 has no tensor model\.norm\.weight"):
        wherry.open(tmp_path / "ranks")
    file.rename(tmp_path / "ranks" / "model-rank-2-part-0.safetensors")
    with pytest.raises(IncompleteError, match=r"model-rank-1-part-0\.safetensors"):
        wherry.open(tmp_path / "ranks")


@pytest.mark.parametrize(
    ("config", "tp", "error", "words"),
    [
        ({"model_type": "gpt_neox"}, "2", UnrepresentableError, "of the type 'gpt_neox'"),
        (
            {"architectures": ["LlamaForSequenceClassification"]},
            "2",
            UnrepresentableError,
            "of the class LlamaForSeq",
        ),
        ({"quantization_config": {"quant_method": "fp8"}}, "2", UnrepresentableError, "quantised"),
        ({"qkv_bias": True}, "2", UnrepresentableError, "that has qkv_bias"),
        ({"attention_bias": True}, "2", IncompleteError, r"missing tensor .*q_proj\.bias"),
        ({"num_attention_heads": 8}, "2", MismatchError, "8 heads"),
        ({"num_attention_heads": "four"}, "2", MismatchError, "whole numbers"),
        ({}, "3", UnrepresentableError, "cannot be divided among 3 ranks"),
        ({}, "none", UsageError, "number of ranks"),
    ],
)
def test_what_no_rule_divides_is_refused(tmp_path, config, tp, error, words):
    from wherry.core.request import SourceRequest
    from wherry.formats.checkpoint import open_source
    from wherry.formats.registry import checked_options, find_format

    saved(tmp_path / "hf", "llama")
    place = tmp_path / "hf" / "config.json"
    place.write_text(json.dumps({**json.loads(place.read_text()), **config}))
    row = find_format("vllm-sharded")
    with open_source(SourceRequest(str(tmp_path / "hf"))) as checkpoint, pytest.raises(error) as caught:
        row.divided(checkpoint, checked_options(row, {"tp": tp}))
    assert caught.match(words) or words in str(caught.value.cure)


def test_a_tensor_without_a_place_stays_behind_on_request_only(tmp_path):
    saved(tmp_path / "hf", "llama")
    place = tmp_path / "hf" / "config.json"
    place.write_text(json.dumps({**json.loads(place.read_text()), "num_hidden_layers": 1}))
    with pytest.raises(UnrepresentableError) as caught:
        ranks_of(tmp_path / "hf", tmp_path / "ranks", 2)
    assert "--ignore others" in str(caught.value.cure) or "ignore=" in str(caught.value.cure)
    receipt = wherry.convert(
        tmp_path / "hf", tmp_path / "ranks", to="vllm-sharded", ignore=("others",), lineage=False
    )
    assert any("layers.1" in row["path"] for row in receipt.ignored)


def test_names_of_vllm_are_kept_without_a_family(tmp_path):
    from safetensors.torch import load_file, save_file

    save_file({"model.norm.weight": torch.ones(3)}, tmp_path / "one.safetensors")
    wherry.convert(
        tmp_path / "one.safetensors", tmp_path / "ranks", to="vllm-sharded", family="none", lineage=False
    )
    found = load_file(tmp_path / "ranks" / "model-rank-0-part-0.safetensors")
    assert list(found) == ["model.norm.weight"]
    with pytest.raises(UsageError, match="tp=2 divides a model"):
        wherry.convert(
            tmp_path / "one.safetensors", tmp_path / "two", to="vllm-sharded", family="none", options={"tp": "2"}
        )  # fmt: skip


def test_parts_of_two_element_types_are_refused(tmp_path):
    from safetensors.torch import load_file, save_file

    saved(tmp_path / "hf", "llama")
    file = tmp_path / "hf" / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.self_attn.k_proj.weight"
    save_file({**tensors, name: tensors[name].float()}, file)
    with pytest.raises(UnrepresentableError, match="element types bfloat16, float32"):
        ranks_of(tmp_path / "hf", tmp_path / "ranks", 2)
    wherry.convert(
        tmp_path / "hf", tmp_path / "ranks", to="vllm-sharded", dtype="bfloat16", options={"tp": "2"}, lineage=False
    )  # fmt: skip
    assert len(files_of(tmp_path / "ranks")) == 2
