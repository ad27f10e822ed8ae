"""Level serve: transformers generates the tokens of the source from a target, and its end tokens agree."""

from __future__ import annotations

import json
import shutil

import pytest

import wherry
from tests.support.command import typed
from tests.support.readme import blocks, commands
from tests.support.tiny_models import save_tiny
from tests.support.tokenizers import BOS, END, EOS, save_tokenizer
from wherry.core.request import LayoutRequest
from wherry.errors import UnsupportedError, UsageError

for package in ("torch", "transformers", "safetensors", "tokenizers", "jinja2"):
    pytest.importorskip(package, reason=f"{package} is not installed")

pytest_plugins = ("tests.support.warm_native",)
pytestmark = pytest.mark.usefixtures("forked_loaders")

IDS = {"bos_token_id": BOS, "eos_token_id": END}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Tiny models with a tokenizer that have learnt to end a turn: Llama and Qwen."""
    folder = tmp_path_factory.mktemp("served")
    for label in ("llama", "qwen2"):
        save_tiny(folder / label, label, drawn=True, max_position_embeddings=256, **IDS)
        save_tokenizer(folder / label, eos="<|im_end|>")
    return folder


@pytest.fixture
def llama(models, tmp_path):
    """A copy of the Llama, about which nothing is recorded."""
    return shutil.copytree(models / "llama", tmp_path / "llama")


def state(file, **attributes):
    """Change attributes of a JSON file; None removes one."""
    table = {**json.loads(file.read_text()), **attributes}
    file.write_text(json.dumps({name: value for name, value in table.items() if value is not None}))


def change(folder, name, by):
    """Change a tensor of a folder."""
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors[name] = by(tensors[name]).contiguous()
    save_file(tensors, file, {"format": "pt"})


def served(target, source, **how):
    return wherry.verify(target, level="serve", against=source, **how)


@pytest.mark.parametrize("label", ["llama", "qwen2"])
def test_a_conversion_there_and_back_generates_the_same(models, label, tmp_path):
    wherry.convert(models / label, tmp_path / "megatron", to="megatron", lineage=False)
    wherry.convert(tmp_path / "megatron", tmp_path / "back", to="huggingface", lineage=False)
    found = served(tmp_path / "back", models / label)
    assert (found.verdict, found.failed, found.warnings) == ("ok", (), ())
    assert found.native is not None
    assert found.native.checked == (4 + 1) * 32  # four prompts, and a message in the chat template
    assert "Jinja" in found.native.evidence


def test_the_commands_of_the_page_compare_the_models(models, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(models / "llama", tmp_path / "runs" / "hf" / "base")
    wherry.convert("runs/hf/base", "megatron", to="megatron", lineage=False)
    wherry.convert("megatron", "out/hf", to="huggingface", lineage=False)
    (served_block,) = [text for text in blocks("proof", "sh") if "--level serve" in text]
    lines = commands(served_block)
    assert len(lines) == 2
    for words in lines:
        code, printed = typed(" ".join(words[1:]), tmp_path, capfd)
        assert (code, "ok" in printed) == (0, True), printed


def test_the_source_of_another_system_is_named_by_the_receipt(models, tmp_path):
    wherry.convert(models / "llama", tmp_path / "megatron", to="megatron", lineage=False)
    wherry.convert(tmp_path / "megatron", tmp_path / "back", to="huggingface", lineage=False)
    found = wherry.verify(tmp_path / "back", level="serve", tokens=3)
    assert found.ok, found.failed
    assert found.native is not None
    assert found.native.checked >= 4 * 3


def test_the_tokens_are_those_that_transformers_itself_generates(models):
    """Generated here by the model as `from_pretrained` loads it, with a cache and without."""
    import torch
    import transformers

    from wherry.integrations.native.serve import _plain_prompts, generate

    model = transformers.LlamaForCausalLM.from_pretrained(models / "llama").eval()
    prompts = list(_plain_prompts(60, frozenset({BOS, EOS, END})))
    assert len({prompt.ids for prompt in prompts}) == 4
    assert not {BOS, EOS, END} & {number for prompt in prompts for number in prompt.ids}
    for prompt in prompts:
        ids, expected = list(prompt.ids), []
        for _ in range(12):
            with torch.no_grad():
                expected.append(int(model(torch.tensor([ids + expected])).logits[0, -1].argmax()))
        run = generate(model, prompt.ids, (), 12)
        assert list(run.tokens) == expected
        assert list(generate(model, prompt.ids, expected[:5], 7).tokens) == expected[5:]


def test_an_end_token_does_not_stop_the_comparison(models, llama):
    import transformers

    from wherry.integrations.native.serve import _plain_prompts, generate

    model = transformers.LlamaForCausalLM.from_pretrained(llama)
    prompt = next(_plain_prompts(60, frozenset()))
    token = generate(model, prompt.ids, (), 2).tokens[0]
    for name in ("config.json", "generation_config.json"):
        state(llama / name, eos_token_id=[END, token])
    found = served(llama, llama)
    assert found.native is not None
    assert found.native.checked == (4 + 1) * 32


def test_a_planted_wrong_weight_is_found(models, llama):
    change(llama, "model.layers.1.self_attn.q_proj.weight", lambda one: one.flip(0))
    change(llama, "model.layers.1.mlp.down_proj.weight", lambda one: one.flip(0))
    found = served(llama, models / "llama")
    assert (found.verdict, found.exit_code) == ("altered", 9)
    assert {one.path for one in found.failed} <= {f"prompt {n}" for n in range(1, 5)} | {"templated message"}
    assert "but the source generates" in found.failed[0].reason
    assert "of the largest one in the source" in found.failed[0].reason


def test_another_config_of_equal_shapes_is_found(models, llama):
    state(llama / "config.json", num_attention_heads=2, num_key_value_heads=1, head_dim=16)
    assert served(llama, models / "llama").verdict == "altered"


def test_weights_that_are_not_numbers_are_no_pass(models, llama):
    change(llama, "model.norm.weight", lambda one: one * float("nan"))
    found = served(llama, models / "llama")
    assert found.verdict == "altered"
    assert "the logits are not finite" in found.failed[0].reason
    with pytest.raises(UnsupportedError, match="the source's logits are not finite"):
        served(llama, llama)


def test_a_cast_may_turn_near_ties_only(models, tmp_path):
    layout = LayoutRequest(dtype="bfloat16")
    wherry.convert(models / "llama", tmp_path / "cast", to="huggingface", lineage=False, layout=layout)
    found = served(tmp_path / "cast", models / "llama")
    assert found.ok, found.failed
    assert found.native is not None
    ties = [one for one in found.warnings if "a near tie" in one]
    assert found.native.checked <= 160 - len(ties)
    assert 0 < found.native.error < 0.02
    change(tmp_path / "cast", "lm_head.weight", lambda one: one.roll(1, 0))
    wherry_json = tmp_path / "cast" / "wherry.json"
    wherry_json.unlink()
    found = served(tmp_path / "cast", models / "llama")
    assert found.verdict == "altered"
    assert "another element type explains" in found.failed[0].reason


def test_a_near_tie_without_a_change_of_type_is_a_difference(models, llama):
    """Two rows of the output that are almost equal: the smallest change turns them."""
    source = shutil.copytree(llama, llama.parent / "source")
    for folder, first, second in ((source, 1.0, 1.0001), (llama, 1.0001, 1.0)):
        change(folder, "lm_head.weight", lambda one: _two_rows(one, first, second))  # noqa: B023
    found = served(llama, source)
    assert found.verdict == "altered"
    assert any("token" in one.reason for one in found.failed)


def _two_rows(weight, first, second):
    made = weight * 0.01
    made[7], made[8] = weight[7] * first, weight[7] * second
    made[9], made[10] = -weight[7] * first, -weight[7] * second
    return made


def test_another_template_is_found(models, llama):
    template = llama / "chat_template.jinja"
    template.write_text(template.read_text().replace("<|im_start|>assistant", "<|im_start|>model"))
    found = served(llama, models / "llama")
    assert found.verdict == "altered"
    assert found.failed[0].path == "chat template"
    assert "other tokens than the source's" in found.failed[0].reason


def test_a_template_that_ends_in_an_error_is_found(models, llama):
    (llama / "chat_template.jinja").write_text("{{ raise_exception('no') }}<|im_end|>")
    found = served(llama, models / "llama")
    assert (found.verdict, found.failed[0].path) == ("altered", "chat template")
    found = served(models / "llama", llama)
    assert found.ok
    assert any("not judged: the chat template, because the source's message" in one for one in found.warnings)


@pytest.mark.parametrize(
    "name", [None, "chat_template.jinja", "tokenizer.json"], ids=["no sandbox", "no template", "no tokenizer"]
)
def test_what_is_not_judged_is_named(models, llama, name, monkeypatch):
    if name:
        (llama / name).unlink()
    else:
        monkeypatch.setenv("WHERRY_CHILD_SANDBOX", "off")
    found = served(llama, models / "llama")
    assert found.ok, found.failed
    assert found.native is not None
    assert found.native.checked == 4 * 32
    assert any(one.startswith("not judged: the chat template") for one in found.warnings)
    assert found.to_json()["warnings"] == list(found.warnings)


def test_a_template_reaches_no_file(models, llama, tmp_path):
    (tmp_path / "secret").write_text("x")
    attack = "{{ ''.__class__.__mro__[1].__subclasses__() }}{% include '" + str(tmp_path / "secret") + "' %}"
    (llama / "chat_template.jinja").write_text(attack)
    found = served(llama, llama)
    assert found.ok
    assert any("message is not rendered" in one for one in found.warnings)


def test_end_tokens_that_only_the_target_has_are_found(models, llama):
    state(llama / "generation_config.json", eos_token_id=EOS)
    found = served(llama, models / "llama")
    assert found.verdict == "altered"
    assert {one.path for one in found.failed} == {"config.json", "the tokenizer"}
    assert f"states the eos token {END}, but generation_config.json" in found.failed[0].reason


def test_end_tokens_of_the_source_are_warnings(llama):
    state(llama / "generation_config.json", eos_token_id=EOS)
    found = served(llama, llama)
    assert found.ok
    assert sum("eos token" in one for one in found.warnings) == 2
    assert any("the chat template ends a turn with <|im_end|> (53)" in one for one in found.warnings)


def test_no_end_token_is_not_judged(llama):
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        state(llama / name, eos_token_id=None, eos_token=None)
    assert any("not judged: the end tokens" in one for one in served(llama, llama).warnings)


def test_fewer_positions_are_named(models, tmp_path):
    save_tiny(tmp_path / "short", "llama", max_position_embeddings=20, **IDS)
    save_tokenizer(tmp_path / "short", eos="<|im_end|>")
    found = served(tmp_path / "short", tmp_path / "short")
    assert found.ok
    assert found.native is not None
    assert found.native.checked == 4 * 12
    assert sum(one.startswith("not judged") for one in found.warnings) == 2


def test_a_target_of_another_system_is_refused(models, tmp_path):
    wherry.convert(models / "llama", tmp_path / "megatron", to="megatron", lineage=False)
    with pytest.raises(UnsupportedError, match="transformers serves Hugging Face folders") as caught:
        served(tmp_path / "megatron", models / "llama")
    assert "--to huggingface" in str(caught.value.for_shell())


def test_an_encoder_is_refused(tmp_path):
    import transformers

    from tests.support.tiny_models import small_config

    transformers.BertModel(small_config("BertModel")).save_pretrained(tmp_path / "bert")
    with pytest.raises(UnsupportedError, match="generates no tokens"):
        served(tmp_path / "bert", tmp_path / "bert")


def test_an_encoder_and_decoder_generates(tmp_path):
    save_tiny(tmp_path / "t5", "t5-1.1", drawn=True, num_decoder_layers=2, decoder_start_token_id=0)
    found = served(tmp_path / "t5", tmp_path / "t5")
    assert found.ok, found.failed
    assert found.native is not None
    assert found.native.checked == 4 * 32


@pytest.mark.parametrize("how", [{"level": "native", "tokens": 4}, {"level": "serve", "tokens": 0}])
def test_a_number_of_tokens_is_used_or_refused(models, how):
    with pytest.raises(UsageError, match="tokens"):
        wherry.verify(models / "llama", **how)


def test_a_source_is_needed(models):
    with pytest.raises(UsageError, match="level serve needs a source to compare with"):
        wherry.verify(models / "llama", level="serve")
