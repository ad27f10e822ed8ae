"""A tokenizer that is made from a GGUF file's metadata is what transformers reads in the file itself.

The class that reads any tokenizer judges in every run; `AutoTokenizer`, which needs the package `gguf`, in a slow test.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytest.importorskip("transformers")

import wherry
from tests.support.command import typed
from tests.support.generations import ROOT, old_python
from tests.support.gguf_tokenizers import (
    CONTROL,
    DECOMPOSED,
    MADE,
    TEMPLATE,
    bytes_metadata,
    file_of,
    pieces_metadata,
    readings,
)
from wherry.core.request import LayoutRequest

NOT_READ = ("gemma",)  # architectures that AutoTokenizer of transformers does not read in GGUF


def converted(file, target, **how):
    return wherry.convert(file, target, to="huggingface", lineage=False, **how)


@pytest.mark.parametrize("name", MADE)
def test_texts_are_encoded_and_decoded_as_transformers_reads_the_file(name, tmp_path):
    label, tokenizer = MADE[name]
    file = file_of(label, tokenizer, tmp_path / "in", **{"tokenizer.chat_template": TEMPLATE})
    done = converted(file, tmp_path / "out")
    assert not [one for one in done.warnings if "tokenizer" in one]
    assert readings(tmp_path / "out") == readings(tmp_path / "in", auto=False, gguf_file="model.gguf")
    assert wherry.verify(tmp_path / "out", level="roundtrip", against=str(file)).ok


BY_AUTO = """
import json, sys
sys.path[:0] = [sys.argv[1]]
sys.path.append(sys.argv[2])
from pathlib import Path
from tests.support.gguf_tokenizers import readings
for folder in sys.argv[3:]:
    assert readings(Path(folder) / "out") == readings(Path(folder) / "in", gguf_file="model.gguf"), folder
"""


@pytest.mark.slow
def test_auto_tokenizer_reads_the_file_as_the_target(tmp_path):
    folders = []
    for name, (label, tokenizer) in MADE.items():
        if label in NOT_READ:
            continue
        folder = tmp_path / name
        folder.mkdir()
        converted(file_of(label, tokenizer, folder / "in"), folder / "out")
        folders.append(str(folder))
    packages = next((old_python("gguf").parents[1] / "lib").glob("python*/site-packages"))
    run = subprocess.run(
        [sys.executable, "-c", BY_AUTO, str(ROOT), str(packages), *folders],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]


def test_text_is_not_normalised_unless_a_class_of_transformers_does(tmp_path):
    from transformers import AutoTokenizer

    for label, same in (
        ("qwen3", True),
        ("llama", True),
        ("qwen2", False),
    ):  # the class of qwen2 composes letters
        file = file_of(label, bytes_metadata("qwen2"), tmp_path / label)
        converted(file, tmp_path / f"{label}-out")
        found = AutoTokenizer.from_pretrained(str(tmp_path / f"{label}-out"))
        assert (found.decode(found.encode(DECOMPOSED, add_special_tokens=False)) == DECOMPOSED) is same


@pytest.mark.parametrize(
    ("label", "tokenizer", "reason"),
    [
        ("llama", bytes_metadata("deepseek-llm"), "the pre-tokenizer deepseek-llm is not known"),
        ("llama", bytes_metadata("default"), "the pre-tokenizer default is not known"),
        ("llama", bytes_metadata(None), "the pre-tokenizer that is not stated is not known"),
        ("qwen2", bytes_metadata("llama-bpe"), "splits the text of qwen2 in another way"),
        ("llama", bytes_metadata("llama-bpe", model="bert"), "its kind, bert, is none of"),
        ("llama", bytes_metadata("llama-bpe", token_type=None), "does not say which tokens are special"),
        ("llama", bytes_metadata("llama-bpe", add_space_prefix=True), "add_space_prefix is true"),
        ("llama", pieces_metadata(add_space_prefix=False), "add_space_prefix is false"),
        ("qwen2", pieces_metadata(), "does not read SentencePiece's tokens of qwen2"),
        ("llama", pieces_metadata(scores=None), "does not say which tokens are made first"),
        ("llama", pieces_metadata(remove_extra_whitespaces=True), "remove_extra_whitespaces is not read"),
        ("llama", pieces_metadata(precompiled_charsmap=[1, 2]), "precompiled_charsmap is not read"),
    ],
)
def test_what_transformers_does_not_read_alike_is_not_made_and_said(label, tokenizer, reason, tmp_path):
    done = converted(file_of(label, tokenizer, tmp_path / "in"), tmp_path / "out")
    assert any(reason in one and "--assets" in one for one in done.warnings), done.warnings
    assert not (tmp_path / "out" / "tokenizer.json").exists()


HOSTILE = {
    "negative": ({"bos_token_id": -1}, 5, "bos_token_id has -1"),
    "beyond": ({"padding_token_id": 10**6}, 5, "padding_token_id has 1000000"),
    "id-of-text": ({"eos_token_id": "</s>"}, 5, "eos_token_id has '</s>'"),
    "id-of-list": ({"eos_token_id": [1, 2]}, 5, "eos_token_id has 'a list or text'"),
    "numbers-as-tokens": ({"tokens": [1, 2, 3]}, 5, "elements of another type"),
    "text-as-tokens": ({"tokens": "abc"}, 5, "tokens has a value that is no list"),
    "duplicate": ({"tokens": ["a", "a"], "token_type": [1, 1]}, 5, "a token more than once"),
    "types-short": ({"token_type": [1]}, 5, "token_type has 1 value"),
    "types-unknown": ({"token_type": [9] * 484}, 5, "token_type has"),
    "merge-of-one": ({"merges": ["abc"]}, 5, "that is not of two tokens"),
    "merge-of-none": ({"merges": ["q zzzz"]}, 5, "of what is no token"),
    "flag": ({"add_bos_token": 1}, 5, "neither true nor false"),
    "model": ({"model": 7}, 5, "no short text"),
    "long-token": ({"tokens": ["x" * 5000], "token_type": [1]}, 5, "exceeds the limit of 1024"),
    "template": ({"tokenizer.chat_template": 3}, 5, "chat_template is no text"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_metadata_that_contradict_themselves_are_errors_and_leave_nothing(name, tmp_path, capfd):
    change, code, words = HOSTILE[name]
    file_of("llama", bytes_metadata("llama-bpe"), tmp_path / "in", **{
        key if key.startswith("tokenizer.") else f"tokenizer.ggml.{key}": value for key, value in change.items()
    })  # fmt: skip
    ended, printed = typed("convert HOME/in/model.gguf HOME/out --to huggingface", tmp_path, capfd)
    assert (ended, words in printed) == (code, True), printed
    assert "--assets" in printed
    assert not [one.name for one in tmp_path.iterdir() if "out" in one.name]


def test_a_tokenizer_that_the_user_states_is_taken_and_the_metadata_are_not_read(tmp_path):
    file = file_of("llama", bytes_metadata("llama-bpe", bos_token_id=-1), tmp_path / "in")
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "tokenizer.json").write_text("{}")
    converted(file, tmp_path / "out", layout=LayoutRequest(assets=str(tmp_path / "own")))
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    assert not (tmp_path / "out" / "tokenizer_config.json").exists()


def test_what_llama_cpp_reads_differently_is_said(tmp_path):
    tokenizer = bytes_metadata("llama-bpe", add_bos_token=None)
    whole = {**tokenizer, "tokenizer.ggml.merges": tokenizer["tokenizer.ggml.merges"][:-1]}
    done = converted(file_of("llama", whole, tmp_path / "in"), tmp_path / "out")
    said = " ".join(done.warnings)
    assert "add_bos_token is not stated" in said
    assert "no merges make" in said
    assert readings(tmp_path / "out") == readings(tmp_path / "in", auto=False, gguf_file="model.gguf")


def test_a_plan_names_the_files_that_are_made(tmp_path, capfd):
    file_of(
        "llama", bytes_metadata("llama-bpe"), tmp_path / "in", **{"tokenizer.chat_template": "x" * 70_000}
    )
    ended, printed = typed("convert HOME/in/model.gguf HOME/out --to huggingface --dry-run", tmp_path, capfd)
    assert ended == 0, printed
    assert "tokenizer.json" in printed
    converted(tmp_path / "in" / "model.gguf", tmp_path / "out")
    assert (
        len(json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())["chat_template"]) == 70_000
    )
    assert json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())["bos_token"] == CONTROL[0]
