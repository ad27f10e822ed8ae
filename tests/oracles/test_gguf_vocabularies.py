"""Tokenizers that are written into GGUF files: transformers reads the file as it reads the folder; what metadata cannot
state is refused by name."""

from __future__ import annotations

import json
import shutil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import wherry
from tests.support.gguf_tokenizers import MADE, TEMPLATE, file_of, readings
from wherry.core.manifest import Manifest
from wherry.core.request import LayoutRequest
from wherry.core.tensorspec import TensorSpec
from wherry.errors import UnrepresentableError, WherryError
from wherry.formats.companions import MemoryFiles
from wherry.formats.registry import checked_options, find_format
from wherry.integrations.formats.gguf.write import header_of
from wherry.store.location import Location

gguf = pytest.importorskip("gguf")
pytest.importorskip("transformers")
NAMES = [name for name, (label, _tokenizer) in MADE.items() if label == "llama"]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """Hugging Face folders of a Llama with each of the tokenizers."""
    made = {}

    def folder(name):
        if name not in made:
            home = tmp_path_factory.mktemp(name)
            label, tokenizer = MADE[name]
            converted(
                file_of(label, tokenizer, home / "in", **{"tokenizer.chat_template": TEMPLATE}), home / "hf"
            )
            made[name] = home / "hf"
        return made[name]

    return folder


def converted(file, target):
    return wherry.convert(file, target, to="huggingface", lineage=False)


def write(source, target, **how):
    return wherry.convert(source, target, to="gguf", lineage=False, **how)


@pytest.mark.parametrize("name", NAMES)
def test_texts_are_encoded_as_before(name, folder_of, tmp_path):
    receipt = write(folder_of(name), tmp_path / "in" / "model.gguf")
    stated = [one for one in receipt.warnings if "tokenizer" in one]
    assert ["after" if "follows a special token" in one else one for one in stated] == ["after"] * (
        name == "llama-pieces"
    )
    assert readings(tmp_path / "in", gguf_file="model.gguf") == readings(folder_of(name))
    converted(tmp_path / "in" / "model.gguf", tmp_path / "out")
    for file in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        assert (tmp_path / "out" / file).read_bytes() == (folder_of(name) / file).read_bytes()


@pytest.mark.parametrize("name", NAMES)
def test_the_metadata_are_those_of_llama_cpp_s_converter(name, folder_of, tmp_path):
    write(folder_of(name), tmp_path / "model.gguf")
    fields = gguf.GGUFReader(tmp_path / "model.gguf").fields
    _label, wanted = MADE[name]
    scores = "tokenizer.ggml.scores"
    for key, value in wanted.items():
        assert key == scores or fields[key].contents() == value, key
    if scores in wanted:
        assert_same_order(fields[scores].contents(), wanted[scores], wanted["tokenizer.ggml.tokens"])


def test_letters_that_the_tokenizer_composes_are_said(folder_of, tmp_path):
    """As llama.cpp's own converter writes it: a file has no words for it, and llama.cpp never composes."""
    source = changed(
        folder_of("qwen3"), tmp_path / "hf", "tokenizer.json", nested("normalizer", value={"type": "NFC"})
    )
    receipt = write(source, tmp_path / "in" / "model.gguf")
    assert [one for one in receipt.warnings if "composes letters first (NFC), and llama.cpp does not" in one]
    fields = gguf.GGUFReader(tmp_path / "in" / "model.gguf").fields
    _label, wanted = MADE["qwen3"]
    assert {key: fields[key].contents() for key in wanted} == wanted
    readings_of_file = readings(tmp_path / "in", auto=False, gguf_file="model.gguf")
    assert readings_of_file == readings(source, auto=False)  # of texts without accents of their own


@pytest.mark.parametrize("name", ["gemma", "gemma2", "gemma3"])
def test_spaces_of_gemma_are_spelled_without_one_before_a_text(name, folder_of, tmp_path):
    source = folder_of(name)
    receipt = write(source, tmp_path / "in" / "model.gguf")
    assert not [one for one in receipt.warnings if "tokenizer" in one]
    fields = gguf.GGUFReader(tmp_path / "in" / "model.gguf").fields
    assert fields["tokenizer.ggml.add_space_prefix"].contents() is False
    assert readings(tmp_path / "in", auto=False, gguf_file="model.gguf") == readings(source, auto=False)
    converted(tmp_path / "in" / "model.gguf", tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()


def test_spaces_that_gemma_adds_as_tokens_are_made_by_merges(folder_of, tmp_path):
    """Gemma's list of added tokens has runs of spelled spaces, which no text has as they are spelled."""
    source = folder_of("gemma2")
    document = json.loads((source / "tokenizer.json").read_text())
    number = document["model"]["vocab"]["▁▁▁▁"]
    added = {"id": number, "content": "▁▁▁▁", "single_word": False, "lstrip": False, "rstrip": False,
             "normalized": False, "special": False}  # fmt: skip
    source = changed(source, tmp_path / "hf", "tokenizer.json", lambda one: one["added_tokens"].append(added))
    write(source, tmp_path / "model.gguf")
    fields = gguf.GGUFReader(tmp_path / "model.gguf").fields
    assert fields["tokenizer.ggml.token_type"].contents()[number] == gguf.TokenType.NORMAL


def assert_same_order(scores, wanted, tokens):
    """Merged tokens have scores in the same order."""
    merged = [
        number
        for number, token in enumerate(tokens)
        if wanted[number] < 0 and len(token) > 1 and token != "▁"
    ]
    merged = [number for number in merged if tokens[number].strip(" ")]
    orders = [sorted(merged, key=lambda number: -one[number]) for one in (scores, wanted)]
    assert orders[0] == orders[1]


def test_a_file_is_copied_with_its_tokenizer(folder_of, tmp_path):
    write(folder_of("llama-bpe"), tmp_path / "model.gguf")
    write(tmp_path / "model.gguf", tmp_path / "again.gguf")
    assert (tmp_path / "again.gguf").read_bytes() == (tmp_path / "model.gguf").read_bytes()


def test_a_tokenizer_that_the_user_states_is_taken(folder_of, tmp_path):
    """Also a chat template in a file of its own, as transformers 5 saves it."""
    shutil.copytree(folder_of("llama-bpe"), tmp_path / "own")
    (tmp_path / "own" / "chat_template.jinja").write_text("{{ messages }}")
    (tmp_path / "bare").mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(folder_of("llama-bpe") / name, tmp_path / "bare" / name)
    with pytest.raises(UnrepresentableError, match=r"missing tokenizer\.json"):
        write(tmp_path / "bare", tmp_path / "model.gguf")
    write(tmp_path / "bare", tmp_path / "model.gguf", layout=LayoutRequest(assets=str(tmp_path / "own")))
    fields = gguf.GGUFReader(tmp_path / "model.gguf").fields
    assert fields["tokenizer.chat_template"].contents() == "{{ messages }}"
    assert fields["tokenizer.ggml.pre"].contents() == "llama-bpe"


def test_rows_without_a_token_get_unused_ones(folder_of, tmp_path):
    """The embedding is longer than the vocabulary, as where it is padded."""
    source = changed(
        folder_of("llama-bpe"), tmp_path / "hf", "tokenizer.json", lambda one: one["added_tokens"].pop()
    )
    document = json.loads((source / "tokenizer.json").read_text())
    number = max(document["model"]["vocab"].values())
    document["model"]["vocab"] = {
        token: one for token, one in document["model"]["vocab"].items() if one != number
    }
    (source / "tokenizer.json").write_text(json.dumps(document))
    write(source, tmp_path / "model.gguf")
    fields = gguf.GGUFReader(tmp_path / "model.gguf").fields
    assert fields["tokenizer.ggml.tokens"].contents()[-1] == f"[PAD{number}]"
    assert fields["tokenizer.ggml.token_type"].contents()[-1] == gguf.TokenType.UNUSED


def changed(source, target, file, change):
    shutil.copytree(source, target)
    document = json.loads((target / file).read_text())
    change(document)
    (target / file).write_text(json.dumps(document))
    return target


def nested(*path, value):
    def change(document):
        *outer, last = path
        for name in outer:
            document = document[name]
        document[last] = value

    return change


REFUSED = {
    "unigram": ("tokenizer.json", nested("model", "type", value="Unigram"), "Unigram, not BPE"),
    "normaliser": ("tokenizer.json", nested("normalizer", value={"type": "NFKC"}), "the normaliser NFKC"),
    "split": ("tokenizer.json", nested("pre_tokenizer", "pretokenizers", 0, "pattern", "Regex", value=r"\d"),
              "none that llama.cpp has a name for"),
    "prefix": ("tokenizer.json", nested("pre_tokenizer", "pretokenizers", 1, "add_prefix_space", value=True),
               "none that llama.cpp has a name for"),
    "strip": ("tokenizer.json", nested("added_tokens", 0, "lstrip", value=True), r"<\|begin\|>' is lstrip"),
    "beyond": ("tokenizer.json", nested("added_tokens", 0, "id", value=10**6), "a token number 1000000"),
    "twice": ("tokenizer.json", nested("added_tokens", 0, "content", value="<|end|>"), "the same text"),
    "processor": ("tokenizer.json", nested("post_processor", "type", value="BertProcessing"), "BertProcessing"),
    "around": ("tokenizer.json", nested("post_processor", "single", 0, "SpecialToken", "id", value="<|pad|>"),
               "puts other tokens around a text"),
    "words": ("tokenizer.json", nested("model", "merges", value=[]), "takes words that are tokens whole"),
    "flag": ("tokenizer_config.json", nested("add_bos_token", value=False), "add_bos_token = False"),
    "token": ("tokenizer_config.json", nested("eos_token", value="<none>"), "is none of its tokens"),
    "number": ("config.json", nested("eos_token_id", value=7), "number 1, and the model's config 7"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_metadata_cannot_state_is_refused(name, folder_of, tmp_path):
    file, change, reason = REFUSED[name]
    source = changed(folder_of("llama-bpe"), tmp_path / "hf", file, change)
    with pytest.raises(UnrepresentableError, match=reason) as refused:
        write(source, tmp_path / "model.gguf")
    assert "tokenizer" in str(refused.value.cure)
    assert not (tmp_path / "model.gguf").exists()
    if file == "tokenizer.json":
        write(source, tmp_path / "model.gguf", options={"tokenizer": "none"})


def test_merges_that_no_scores_mean_are_refused(folder_of, tmp_path):
    def swap(document):
        merges = document["model"]["merges"]
        merges[0], merges[-1] = merges[-1], merges[0]

    source = changed(
        folder_of("llama-pieces"), tmp_path / "hf", "tokenizer.json", lambda one: one["model"]["merges"].pop()
    )
    with pytest.raises(UnrepresentableError, match="no scores of its tokens mean its merges"):
        write(source, tmp_path / "model.gguf")
    write(
        changed(folder_of("llama-pieces"), tmp_path / "other", "tokenizer.json", swap),
        tmp_path / "model.gguf",
    )


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


def places(node, at=()):
    """Where the values of a document are; of long lists and tables the first two."""
    rows = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, child in list(rows)[:2] if len(node if rows else ()) > 20 else rows:
        yield (*at, key)
        yield from places(child, (*at, key))


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json", "config.json"])
@pytest.mark.parametrize("name", ["llama-bpe", "llama-pieces"])
def test_a_file_with_any_other_value_is_written_or_refused(name, file, folder_of):
    source = folder_of(name)
    files = {
        one: (source / one).read_bytes() for one in ("config.json", "tokenizer.json", "tokenizer_config.json")
    }
    document = json.loads(files[file])
    row, embedding = find_format("gguf"), TensorSpec(("token_embd.weight",), (800, 4), "float32")
    manifest = Manifest({embedding.path: embedding})
    every = sorted(places(document), key=str)

    @settings(max_examples=150, deadline=None)
    @given(at=st.sampled_from(every), value=ANYTHING)
    def change(at, value):
        copy = json.loads(files[file])
        nested(*at, value=value)(copy)
        held = MemoryFiles(files={**files, file: json.dumps(copy).encode()})
        outcome = None
        try:
            header_of(
                manifest, checked_options(row, {}), lambda one: Location(held, one) if one in files else None
            )
        except WherryError as error:
            outcome = error.exit_code
        assert outcome in (None, 2, 5, 6, 7, 9)

    change()
