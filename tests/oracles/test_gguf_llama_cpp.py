"""llama.cpp itself loads the GGUF files that wherry writes, and computes from them what the model computes.

It is built once, from the sdist of llama-cpp-python, without instructions that round two operations at once in ggml's
own functions; that takes a while, so these tests run with `--full` only.
"""

from __future__ import annotations

import json
import re
import subprocess

import numpy as np
import pytest
from tokenizers import Tokenizer

import wherry
from tests.support.generations import ROOT, old_python
from tests.support.ggml_values import k_values
from tests.support.gguf_tokenizers import MADE, TEXTS, file_of
from tests.support.oracles import judge
from tests.support.oracles.cases import GGUF_WRITTEN
from tests.support.oracles.huggingface import TOKENS, apart
from wherry.transform.ggml import encode_blocks

pytestmark = pytest.mark.full
# The activation of Gemma comes from a table of float16.
ALLOWED = {"gemma": 2e-3, "gemma2": 2e-3, "gemma3": 2e-3, "gemma3-no-remainder": 2e-3}
SIZES = {"Q4_K": 144, "Q6_K": 210}
# Where llama.cpp puts a space before every text, also before one that begins with a space, or follows a special or an
# added token, such as four spaces here.
SPACES_AFTER_SPECIAL = ["llama-pieces"]
VOCABULARIES = [
    "llama-bpe",
    "llama-tekken",
    "llama-pieces",
    "qwen3",
    "phi3-pieces",
    "gemma",
    "gemma2",
    "gemma3",
]


@pytest.fixture(scope="module")
def judged(tmp_path_factory):
    """The folder of what llama.cpp computed."""
    folder = tmp_path_factory.mktemp("judged")
    for label in GGUF_WRITTEN:
        wherry.convert(
            judge.source(label),
            folder / f"{label}.gguf",
            to="gguf",
            options={"tokenizer": "none"},
            lineage=False,
        )
    np.save(folder / "values.npy", k_values())
    for name in VOCABULARIES:
        label, tokenizer = MADE[name]
        home = folder / name
        home.mkdir()
        wherry.convert(file_of(label, tokenizer, home / "in"), home / "hf", to="huggingface", lineage=False)
        wherry.convert(home / "hf", home / "model.gguf", to="gguf", lineage=False)
    job = {
        "vocabularies": [
            [str(folder / name / "model.gguf"), TEXTS, str(folder / name / "tokens.json")]
            for name in VOCABULARIES
        ],
        "tokens": TOKENS.tolist(),
        "models": [[str(folder / f"{label}.gguf"), str(folder / f"{label}.npy")] for label in GGUF_WRITTEN],
        "blocks": [
            [f"quantize_row_{kind.lower().replace('k', 'K')}_ref", str(folder / "values.npy"), size,
             str(folder / f"{kind}.npy")]
            for kind, size in SIZES.items()
        ],
    }  # fmt: skip
    (folder / "job.json").write_text(json.dumps(job))
    script = ROOT / "tests" / "support" / "llama_cpp_judge.py"
    run = subprocess.run(
        [str(old_python("llama-cpp")), str(script), str(folder / "job.json")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    return folder


@pytest.mark.parametrize("label", GGUF_WRITTEN)
def test_llama_cpp_computes_what_the_model_computes(label, judged):
    found = np.load(judged / f"{label}.npy")
    assert judge.wanted(label).std() > 0.05
    assert apart(found, judge.wanted(label)) <= ALLOWED.get(label, 1e-5)


@pytest.mark.parametrize("name", VOCABULARIES)
def test_llama_cpp_makes_the_tokens_of_the_model_s_tokenizer(name, judged):
    tokenizer = Tokenizer.from_file(str(judged / name / "hf" / "tokenizer.json"))
    apart = re.compile("<|    |^[ ▁]" if name in SPACES_AFTER_SPECIAL else "$^")
    wanted = {text: tokenizer.encode(text).ids for text in TEXTS if text and not apart.search(text)}
    assert len(wanted) > 10
    found = dict(zip(TEXTS, json.loads((judged / name / "tokens.json").read_text()), strict=True))
    assert {text: found[text] for text in wanted} == wanted


@pytest.mark.parametrize("kind", SIZES)
def test_k_blocks_have_the_bits_of_ggml_s_reference(kind, judged):
    assert np.array_equal(encode_blocks(k_values(), f"ggml:{kind}"), np.load(judged / f"{kind}.npy"))
