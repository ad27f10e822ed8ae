"""Warnings of a conversion about the tokens at which a server stops: one planted fault each, and each cure."""

from __future__ import annotations

import json
import shutil

import pytest

import wherry
from tests.support.tiny_models import save_tiny
from tests.support.tokenizers import BOS, CHATML, END, EOS, save_tokenizer
from wherry.core.request import LayoutRequest
from wherry.formats.end_tokens import CONFIG, GENERATION, SETTINGS, read_end_tokens
from wherry.store.local_store import locate

for package in ("torch", "transformers", "tokenizers"):
    pytest.importorskip(package, reason=f"{package} is not installed")

WORDS = ("eos", "bos", "end tokens", "chat template")


@pytest.fixture(scope="module")
def instruct(tmp_path_factory):
    """A tiny model that ends a turn where its template does."""
    folder = tmp_path_factory.mktemp("models") / "instruct"
    save_tiny(folder, "llama", bos_token_id=BOS, eos_token_id=END)
    return save_tokenizer(folder, eos="<|im_end|>")


@pytest.fixture
def model(instruct, tmp_path):
    return shutil.copytree(instruct, tmp_path / "model")


def state(file, **attributes):
    """Change attributes of a JSON file; None removes one."""
    table = {**json.loads(file.read_text()), **attributes}
    file.write_text(json.dumps({name: value for name, value in table.items() if value is not None}))


def warned(source, target, to="huggingface", **how):
    receipt = wherry.convert(source, target, to=to, lineage=False, **how)
    plan = wherry.plan(source, f"{target}-planned", to=to, **how)
    found = [one for one in receipt.warnings if any(word in one for word in WORDS)]
    assert [one for one in plan.notes if one in found] == found, "a plan says the same"
    return found


def read(folder):
    names = {path.name for path in folder.iterdir()}
    return read_end_tokens(names, locate(str(folder)).member)


@pytest.mark.parametrize("to", ["huggingface", "vllm-sharded"])
def test_files_that_agree_are_no_warning(model, to, tmp_path):
    assert warned(model, tmp_path / "out", to) == []


PLANTED = {
    "eos outside of the vocabulary": (GENERATION, {"eos_token_id": [END, 60]}, "eos token 60, outside of the"),
    "negative eos": (CONFIG, {"eos_token_id": [END, -1]}, "config.json states the eos token -1, outside"),
    "bos outside of the vocabulary": (CONFIG, {"bos_token_id": 128000}, "the bos token 128000, outside of the"),
    "another eos in the config": (CONFIG, {"eos_token_id": EOS}, f"config.json states the eos token {EOS}, but"),
    "another bos in the generation config": (
        GENERATION, {"bos_token_id": 3}, f"config.json states the bos token {BOS}, but generation_config.json",
    ),
    "another eos of the tokenizer": (SETTINGS, {"eos_token": "</s>"}, f"the tokenizer states the eos token {EOS}, but"),
    "a template that ends elsewhere": (
        GENERATION, {"eos_token_id": EOS},
        f"<|im_end|> ({END}), at which no server stops by generation_config.json, whose eos_token_id is {EOS}",
    ),
    "a file that is not JSON": (GENERATION, None, "generation_config.json are not compared: invalid JSON"),
}  # fmt: skip


@pytest.mark.parametrize("planted", PLANTED)
def test_a_planted_fault_is_a_warning_and_no_error(planted, model, instruct, tmp_path):
    file, attributes, words = PLANTED[planted]
    if attributes is None:
        (model / file).write_text("{")
    else:
        state(model / file, **attributes)
    found = warned(model, tmp_path / "out")
    assert any(words in one for one in found), found
    assert (tmp_path / "out" / file).exists(), "nothing is left out"
    if attributes is not None:
        assert all("convert again" in one for one in found)
    # The cure: the right files next to the source, or those of another folder.
    shutil.copy(instruct / file, model / file)
    assert warned(model, tmp_path / "corrected") == []


def test_the_right_files_of_another_folder_are_a_cure(model, instruct, tmp_path):
    state(model / GENERATION, eos_token_id=EOS)
    assert warned(model, tmp_path / "wrong")
    assert warned(model, tmp_path / "out", layout=LayoutRequest(assets=str(instruct))) == []


def test_a_template_of_another_tokenizer_is_named(model, tmp_path):
    template = CHATML.replace("<|im_end|>", "<|eot_id|>")
    (model / "chat_template.jinja").write_text(template)
    (found,) = warned(model, tmp_path / "out")
    assert "ends a turn with <|eot_id|>, which is no added token of the tokenizer" in found


@pytest.mark.parametrize("to", ["huggingface", "megatron"])
def test_a_base_model_with_the_template_of_another_is_a_warning(to, instruct, tmp_path):
    """Once from its own folder, once through another system, whose files carry the tokenizer."""
    base = tmp_path / "base"
    save_tiny(base, "llama", bos_token_id=BOS, eos_token_id=EOS)
    save_tokenizer(base, None)
    if to != "huggingface":
        wherry.convert(base, tmp_path / "there", to=to, lineage=False)
    source = base if to == "huggingface" else tmp_path / "there"
    assert warned(source, tmp_path / "plain") == []
    template = tmp_path / "assets"
    template.mkdir()
    for name in ("chat_template.jinja", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(instruct / name, template / name)
    found = warned(source, tmp_path / "out", layout=LayoutRequest(assets=str(template)))
    assert any("the source has a tokenizer without one, as a base model has" in one for one in found)
    assert any(f"ends a turn with <|im_end|> ({END}), at which no server stops" in one for one in found)


def test_a_template_of_several_ends_needs_one_of_them(model, tmp_path):
    """As gpt-oss: it ends messages with one token, and the answer with another."""
    (model / "chat_template.jinja").write_text(CHATML + "<|return|><|end|>")
    assert warned(model, tmp_path / "out") == []


def test_what_no_file_states_is_not_guessed(model, tmp_path):
    for name in (CONFIG, GENERATION):
        state(model / name, eos_token_id=None, bos_token_id=None, vocab_size=60)
    (model / "chat_template.jinja").unlink()
    assert warned(model, tmp_path / "out") == []


def test_other_targets_are_not_served(model, tmp_path):
    state(model / GENERATION, eos_token_id=EOS)
    assert not [one for one in warned(model, tmp_path / "out", "megatron") if "eos" in one]


OLD = {
    "added_tokens_decoder": {
        "50": {"content": "<s>", "special": True}, "53": {"content": "<|im_end|>", "special": True},
    },
    "bos_token": {"__type": "AddedToken", "content": "<s>", "special": True}, "eos_token": "<|im_end|>",
    "chat_template": [{"name": "rag", "template": "x"}, {"name": "default", "template": CHATML}],
}  # fmt: skip


@pytest.mark.parametrize("form", ["new", "old", "old without tokenizer.json"])
def test_the_files_are_read_as_transformers_reads_them(form, model):
    import transformers

    if form != "new":
        (model / "chat_template.jinja").unlink()
        state(model / SETTINGS, **OLD)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    generation = transformers.GenerationConfig.from_pretrained(model)
    if form == "old without tokenizer.json":
        (model / "tokenizer.json").unlink()
    found = read(model)
    assert found.template == tokenizer.get_chat_template() == CHATML
    assert found.ends["the tokenizer"] == (tokenizer.eos_token_id,)
    assert found.begins["the tokenizer"] == (tokenizer.bos_token_id,)
    assert found.ends[GENERATION] == (generation.eos_token_id,)
    assert {BOS, END} <= found.special
    assert found.faults == ()


def test_hostile_files_stop_nothing(model, tmp_path):
    (model / "tokenizer.json").write_bytes(b'{"added_tokens": [{"id": ' + b"[" * 200_000)
    (model / SETTINGS).write_text(
        json.dumps({"added_tokens_decoder": [1], "eos_token": 7, "chat_template": [[]]})
    )
    state(model / GENERATION, eos_token_id={"a": [True, "x"]})
    state(model / CONFIG, vocab_size="x", text_config=7)
    assert read(model).numbers == {}
    assert read(model).faults == ()
