"""transformers computes from a GGUF file, as wherry converts it, what the model that it was made of computes.

The files are written from the definitions of llama.cpp's architectures (`tests/support/gguf.py`). A slow test reads
them with transformers' own loader of GGUF, which judges both the files and wherry's reading of them.
"""

from __future__ import annotations

import os
import struct
import subprocess
import sys

import numpy as np
import pytest

import wherry
from tests.support.generations import old_python
from tests.support.gguf import model_parts, save_gguf
from tests.support.oracles import huggingface, judge
from tests.support.oracles.cases import GGUF, GGUF_BY_TRANSFORMERS
from tests.support.oracles.huggingface import TOKENS
from wherry.core.request import LayoutRequest
from wherry.errors import CorruptError, IncompleteError, UnrepresentableError, UnsupportedError, WherryError

pytest.importorskip("transformers")
BY_TRANSFORMERS = """
import sys
sys.path.append(sys.argv[1])
import numpy as np, torch, transformers
config = transformers.AutoConfig.from_pretrained(sys.argv[5])
model, report = transformers.AutoModelForCausalLM.from_pretrained(
    sys.argv[2], config=config, gguf_file="model.gguf", attn_implementation="eager", dtype=torch.float32,
    output_loading_info=True)
assert not report["missing_keys"], report
with torch.no_grad():
    np.save(sys.argv[3], model.double().eval()(torch.tensor(np.load(sys.argv[4]))).logits.numpy())
"""


def save(label, file, **metadata):
    """The GGUF file of a model of the table."""
    stated, tensors = model_parts(judge.source(label))
    return save_gguf(file, {**stated, **metadata}, tensors)


def converted(source, target, **layout):
    wherry.convert(source, target, to="huggingface", layout=LayoutRequest(**layout), lineage=False)
    return huggingface.logits(target)


@pytest.mark.parametrize("label", GGUF)
def test_transformers_computes_what_the_model_computed(label, tmp_path):
    file = save(label, tmp_path / "model.gguf")
    judge.require_equal(converted(file, tmp_path / "out"), judge.wanted(label))
    assert wherry.verify(tmp_path / "out", level="roundtrip", against=str(file)).ok


@pytest.mark.slow
@pytest.mark.parametrize("label", GGUF_BY_TRANSFORMERS)
def test_transformers_reads_the_same_file_itself(label, tmp_path):
    """It gets the model's config: of the metadata it reads a part, and takes defaults of its class for the rest."""
    save(label, tmp_path / "model.gguf")
    np.save(tmp_path / "tokens.npy", TOKENS)
    packages = next((old_python("gguf").parents[1] / "lib").glob("python*/site-packages"))
    words = (
        sys.executable, "-c", BY_TRANSFORMERS, packages, tmp_path, tmp_path / "logits.npy", tmp_path / "tokens.npy",
        judge.source(label),
    )  # fmt: skip
    run = subprocess.run(
        [str(one) for one in words],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert run.returncode == 0, run.stderr[-2000:]
    judge.require_equal(
        converted(tmp_path / "model.gguf", tmp_path / "out"), np.load(tmp_path / "logits.npy")
    )


def test_another_system_gets_it_too(tmp_path):
    file = save("llama", tmp_path / "model.gguf")
    wherry.convert(file, tmp_path / "maxtext", to="maxtext", lineage=False)
    wherry.convert(tmp_path / "maxtext", tmp_path / "out", to="huggingface", lineage=False)
    judge.require_equal(huggingface.logits(tmp_path / "out"), judge.wanted("llama"))


def test_blocks_are_dequantised_before_the_layout_applies(tmp_path):
    """Weights that Q8_0 holds exactly: small whole numbers times a half float for each block."""
    metadata, tensors = model_parts(judge.source("llama"))
    draw = np.random.default_rng(0)
    plain, blocks = dict(tensors), dict(tensors)
    for name, value in tensors.items():
        if value.ndim == 2 and value.shape[-1] % 32 == 0:
            codes = draw.integers(-127, 128, (value.size // 32, 32)).astype("i1")
            scales = draw.uniform(0.001, 0.002, (len(codes), 1)).astype("<f2")
            data = np.concatenate([scales.view("u1"), codes.view("u1")], axis=1)
            blocks[name] = (8, value.shape, data.tobytes())
            plain[name] = (codes * scales.astype("f4")).reshape(value.shape)
    assert blocks["blk.0.attn_q.weight"][0] == 8
    want = converted(save_gguf(tmp_path / "plain.gguf", metadata, plain), tmp_path / "plain")
    found = converted(save_gguf(tmp_path / "blocks.gguf", metadata, blocks), tmp_path / "blocks")
    np.testing.assert_array_equal(found, want)


def split(folder, label, count, **changes):
    """The files of a model, each with some of the tensors; the first has the metadata."""
    metadata, tensors = model_parts(judge.source(label))
    names = list(tensors)
    folder.mkdir()
    for number in range(count):
        own = {"split.no": number, "split.count": count, "split.tensors.count": len(names)}
        stated = {**(metadata if number == 0 else {}), **own, **changes.get(f"of_{number}", {})}
        save_gguf(
            folder / f"m-{number + 1:05}-of-{count:05}.gguf",
            stated,
            {one: tensors[one] for one in names[number::count]},
        )
    return folder / f"m-00001-of-{count:05}.gguf"


def test_a_model_in_several_files_is_read_from_its_first(tmp_path):
    first = split(tmp_path / "parts", "llama", 3)
    judge.require_equal(converted(first, tmp_path / "out"), judge.wanted("llama"))
    with pytest.raises(UnsupportedError, match="not the first of 3 files") as refused:
        wherry.open(first.with_name("m-00002-of-00003.gguf"))
    assert str(first) in str(refused.value.cure)
    first.with_name("m-00003-of-00003.gguf").unlink()
    with pytest.raises(IncompleteError, match=r"file not found: m-00003-of-00003\.gguf"):
        wherry.open(first)


@pytest.mark.parametrize(
    "change", [{"of_1": {"split.no": 0}}, {"of_1": {"split.count": 3}}, {"of_0": {"split.tensors.count": 7}}]
)
def test_files_of_another_model_are_refused(change, tmp_path):
    first = split(tmp_path / "parts", "llama", 2, **change)
    with pytest.raises(CorruptError, match=r"states that it is file|expected 7 tensors"):
        wherry.open(first)


@pytest.mark.parametrize(
    ("label", "key", "value"),
    [
        ("llama", "llama.logit_scale", 0.5),
        ("llama", "llama.rope.dimension_count", 8),
        ("llama", "llama.attention.value_length", 8),
        ("llama", "llama.rope.scaling.type", "longrope"),
        ("llama", "llama.attention.head_count_kv", [2, 2, 2]),
        ("qwen2", "qwen2.rope.scaling.attn_factor", 2.0),
        ("gemma3", "gemma3.attention.sliding_window_pattern", 4),
        ("llama", "llama.tokens", 60),
    ],
)
def test_metadata_that_are_not_understood_are_refused_by_name(label, key, value, tmp_path):
    file = save(label, tmp_path / "model.gguf", **{key: value})
    with pytest.raises(UnrepresentableError, match=key.replace(".", r"\.")):
        converted(file, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_factors_of_rotary_positions_that_no_rule_gives_are_refused(tmp_path):
    metadata, tensors = model_parts(judge.source("llama-3.1"))
    tensors["rope_freqs.weight"][0] *= np.float32(1.5)
    file = save_gguf(tmp_path / "model.gguf", metadata, tensors)
    with pytest.raises(UnrepresentableError, match=r"rope_freqs\.weight"):
        converted(file, tmp_path / "out")


@pytest.mark.parametrize("name", ["internlm2", "olmo2", "unheard-of"])
def test_an_architecture_without_rules_is_never_taken_for_another(name, tmp_path):
    metadata, tensors = model_parts(judge.source("llama"))
    renamed = {key.replace("llama.", f"{name}."): value for key, value in metadata.items()}
    file = save_gguf(tmp_path / "model.gguf", {**renamed, "general.architecture": name}, tensors)
    with pytest.raises((UnrepresentableError, UnsupportedError), match=name):
        converted(file, tmp_path / "out")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama.expert_count", "many"),
        ("llama.rope.freq_base", "x"),
        ("llama.embedding_length", "x"),
        ("llama.attention.head_count", 0),
        ("llama.block_count", True),
    ],
)
def test_metadata_of_another_kind_are_refused_and_never_a_bug(key, value, tmp_path):
    file = save("llama-3.1", tmp_path / "model.gguf", **{key: value})
    with pytest.raises(WherryError):
        converted(file, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_file_with_a_key_twice_is_refused_with_its_uri(tmp_path):
    pair = struct.pack("<Q", 1) + b"a" + struct.pack("<II", 4, 7)
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + 2 * pair)
    with pytest.raises(CorruptError, match="duplicate metadata key 'a'") as refused:
        wherry.open(file)
    assert refused.value.uri is not None
    assert refused.value.uri.endswith("model.gguf")
