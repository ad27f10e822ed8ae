"""Conversions count what casts and scales lose, refuse overflow, and say so of tensors that hold only zeros."""

from __future__ import annotations

import json
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from safetensors.torch import load_file

import wherry
from tests.support.command import command
from wherry.core.request import LayoutRequest, TargetRequest, convert_request
from wherry.errors import UnrepresentableError
from wherry.mover.output import Output
from wherry.workers.commit import commit
from wherry.workers.job import split
from wherry.workers.work import work

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False, "max_position_embeddings": 64,
    "hidden_act": "silu", "torch_dtype": "float32", "attention_bias": False, "mlp_bias": False,
}  # fmt: skip
QUERY = "params/params/decoder/layers/self_attention/query/kernel"
EMBEDDING, NORM = "model.embed_tokens.weight", "model.norm.weight"
SMALL = {"max_shard_size": "50KB"}


def shapes():
    found = {"model.embed_tokens.weight": (128, 64), "lm_head.weight": (128, 64), "model.norm.weight": (64,)}
    for layer in range(2):
        at = f"model.layers.{layer}"
        found |= {
            f"{at}.self_attn.q_proj.weight": (64, 64), f"{at}.self_attn.k_proj.weight": (32, 64),
            f"{at}.self_attn.v_proj.weight": (32, 64), f"{at}.self_attn.o_proj.weight": (64, 64),
            f"{at}.mlp.gate_proj.weight": (96, 64), f"{at}.mlp.up_proj.weight": (96, 64),
            f"{at}.mlp.down_proj.weight": (64, 96), f"{at}.input_layernorm.weight": (64,),
            f"{at}.post_attention_layernorm.weight": (64,),
        }  # fmt: skip
    return found


def saved(folder, change=lambda _tensors: None):
    random = np.random.default_rng(0)
    tensors = {name: random.standard_normal(shape, dtype="f4") for name, shape in shapes().items()}
    change(tensors)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def of_all_sizes(tensors):
    """Values from 1e-45 to 1e38, and a few that are no numbers."""
    random = np.random.default_rng(1)
    for name, array in tensors.items():
        tensors[name] = array * np.float32(10) ** random.uniform(-40, 37, array.shape).astype("f4")
        tensors[name].reshape(-1)[:3] = 0, np.inf, np.nan


def ordinary(tensors):
    tensors |= {name: array * np.float32(0.02) for name, array in tensors.items()}


@pytest.fixture(scope="module")
def extreme(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("extreme") / "hf", of_all_sizes)


def by_torch(value, dtype):
    """What torch's own cast does to a tensor."""
    made, tiny = value.to(dtype), torch.finfo(dtype).smallest_normal
    finite = value.isfinite()
    kept = finite & made.isfinite()
    return {
        "infinite": int((finite & ~made.isfinite()).sum()),
        "zero": int(((made == 0) & (value != 0)).sum()),
        "subnormal": int(((made != 0) & (made.float().abs() < tiny) & (value.abs() >= 2**-126)).sum()),
        "nan": int(value.isnan().sum()),
        "error": float((value - made.float())[kept].abs().max()),
    }


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_the_losses_of_each_tensor_are_those_of_torch_s_cast(extreme, tmp_path, name):
    receipt = wherry.convert(
        extreme, tmp_path / "out", to="huggingface", dtype=name, allow_overflow=True, lineage=False
    )
    expected = {
        path: by_torch(value, getattr(torch, name))
        for path, value in load_file(extreme / "model.safetensors").items()
    }
    assert {row["path"]: {**row, "path": None} for row in receipt.losses} == {
        path: {**row, "path": None} for path, row in expected.items()
    }
    assert not receipt.lossless
    nans = sum(row["nan"] for row in expected.values())
    assert any(text.startswith(f"{nans:,} NaNs in the source: ") for text in receipt.warnings)


@pytest.fixture(scope="module")
def undivided(extreme, tmp_path_factory):
    out = tmp_path_factory.mktemp("undivided") / "out"
    return cast(extreme, out)


def cast(source, target, **more):
    return wherry.convert(
        source, target, to="maxtext", dtype="float16", allow_overflow=True, lineage=False, **more
    )


def test_less_memory_counts_the_same(extreme, undivided, tmp_path):
    assert cast(extreme, tmp_path / "out", memory="9MiB").losses == undivided.losses


@contextmanager
def interrupted_after(moves, monkeypatch):
    deliver, left = Output.deliver, [moves]

    def stopping(self, *arguments):
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        deliver(self, *arguments)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Output, "deliver", stopping)
        yield


@pytest.mark.parametrize("moves", [1, 4, 9])
def test_a_resumed_run_counts_the_same(extreme, undivided, tmp_path, monkeypatch, moves):
    with interrupted_after(moves, monkeypatch):
        cast(extreme, tmp_path / "out")
    receipt = cast(extreme, tmp_path / "out")
    assert receipt.resumed_bytes > 0
    assert receipt.losses == undivided.losses
    assert set(undivided.warnings) <= set(receipt.warnings)


def test_workers_count_the_same(extreme, tmp_path):
    layout = LayoutRequest(dtype="float16", allow_overflow=True)
    target = TargetRequest(str(tmp_path / "out"), "huggingface", SMALL, layout=layout)
    job = split(convert_request(str(extreme), [target], lineage=False), 50_000)
    assert len(job.units) > 2
    work(target.uri)
    [divided] = commit(target.uri).receipts
    one = wherry.convert(
        extreme, tmp_path / "one", to="huggingface", options=SMALL, dtype="float16", allow_overflow=True,
        lineage=False,
    )  # fmt: skip
    assert divided.losses == one.losses
    assert len(divided.losses) == len(shapes())


def test_a_value_that_would_become_infinite_ends_the_conversion(tmp_path):
    def change(tensors):
        ordinary(tensors)
        tensors["model.norm.weight"][3] = 1e6

    source, out = saved(tmp_path / "hf", change), tmp_path / "made" / "out"
    out.parent.mkdir()
    words = ("convert", source, out, "--to", "huggingface", "--dtype", "float16", "--no-lineage")
    refused = command(*words)
    assert refused.returncode == UnrepresentableError.exit_code
    assert "1 finite value would become infinite as float16 (tensor model.norm.weight)" in refused.stderr
    assert list(out.parent.iterdir()) == []
    assert "--allow-overflow" in refused.stderr
    done = command(*words, "--allow-overflow", "--json")
    assert done.returncode == 0, done.stderr
    assert "1 value became infinite: model.norm.weight" in json.loads(done.stdout)["warnings"]
    assert load_file(out / "model.safetensors")["model.norm.weight"][3] == torch.inf
    assert wherry.verify(out, level="roundtrip", against=source).ok
    assert command(*words[:2], tmp_path / "wide", *words[3:5], "--dtype", "bfloat16").returncode == 0


@pytest.mark.parametrize("to", ["huggingface", "maxtext"])
def test_a_right_float16_model_passes_a_roundtrip(tmp_path, to):
    source, out = saved(tmp_path / "hf", ordinary), tmp_path / "out"
    receipt = wherry.convert(source, out, to=to, dtype="float16", lineage=False)
    assert any("values became subnormal" in text for text in receipt.warnings)
    proof = wherry.verify(out, level="roundtrip", against=source)
    assert proof.ok, proof.failed
    assert 0 < proof.measured.share <= 1


def test_overflow_is_not_allowed_where_nothing_can_overflow(tmp_path):
    source = saved(tmp_path / "hf", ordinary)
    refused = command("convert", source, tmp_path / "out", "--to", "huggingface", "--allow-overflow")
    assert refused.returncode == 2
    assert "none can overflow" in refused.stderr
    assert not (tmp_path / "out").exists()


def test_a_scale_that_underflows_is_lossy(tmp_path):
    """MaxText scales queries by 4 here, and back: exact, unless a value is too small."""

    def change(tensors):
        tensors["model.layers.1.self_attn.q_proj.weight"][0, :3] = 3e-45, 1.3e-38, 1e-30

    source = saved(tmp_path / "hf")
    there = wherry.convert(source, tmp_path / "there", to="maxtext", lineage=False)
    assert there.lossless
    assert [row for row in there.losses if row["error"]] == []
    source = saved(tmp_path / "small", change)
    assert wherry.plan(source, tmp_path / "out", to="maxtext").to_json()["lossless"]
    receipt = wherry.convert(source, tmp_path / "out", to="maxtext", lineage=False)
    scaled = np.array([3e-45, 1.3e-38, 1e-30], "f4") / np.float32(4)
    changed = float(np.abs(scaled * 4 - np.array([3e-45, 1.3e-38, 1e-30], "f4")).max())
    assert changed > 0
    [row] = receipt.losses
    assert row == {"path": QUERY, "infinite": 0, "zero": 1, "subnormal": 1, "nan": 0, "error": changed}
    assert not receipt.lossless
    proof = wherry.verify(tmp_path / "out", level="roundtrip", against=source)
    assert proof.ok, proof.failed
    assert 0 < proof.measured.share <= 1


# ---- Zeros


def cut_off(folder):
    """A download that was cut off: the second half of the file is zeros."""
    file = folder / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2] + bytes(len(data) - len(data) // 2))
    return sum(not value.any() for value in load_file(file).values())


@pytest.mark.parametrize("to", ["huggingface", "maxtext"])
def test_tensors_of_zeros_are_named_wherever_they_are_hashed(tmp_path, to):
    source = saved(tmp_path / "hf")
    zeros = cut_off(source)
    assert zeros > 3
    words = f"{zeros} of {len(shapes())} tensors hold only zeros: "
    done = command("convert", source, tmp_path / "out", "--to", to, "--no-lineage", "--json")
    assert any(text.startswith(words) for text in json.loads(done.stdout)["warnings"])
    for result in (command("inspect", source, "--digest"), command("verify", source, "--level", "digest")):
        assert f"warning: {words}" in result.stdout


def test_whole_models_and_counters_are_not_named(tmp_path):
    tensors = {"weight": np.ones(9, "f4"), "step": np.zeros((), "f4"), "mask": np.zeros(9, "i4")}
    save_file(tensors, tmp_path / "a.safetensors")
    assert wherry.inspect(tmp_path / "a.safetensors", digest=True).warnings == ()
    assert wherry.verify(tmp_path / "a.safetensors", level="digest").warnings == ()


def test_a_tensor_of_several_leaves_is_named(tmp_path):
    save_file({"a": np.zeros((3 << 20) + 1, "f4"), "b": np.ones(4, "f4")}, tmp_path / "a.safetensors")
    [warning] = wherry.inspect(tmp_path / "a.safetensors", digest=True).warnings
    assert warning.startswith("1 of 2 tensors hold only zeros: a;")


@pytest.mark.parametrize("to", ["huggingface", "maxtext"])
def test_nan_and_single_values_are_named_while_bytes_are_hashed(tmp_path, to):
    def change(tensors):
        tensors[EMBEDDING][3, 5:8] = np.nan
        tensors[NORM][:] = 0.25

    source = saved(tmp_path / "hf", change)
    done = command("convert", source, tmp_path / "out", "--to", to, "--no-lineage", "--json")
    receipt = json.loads(done.stdout)
    assert f"3 NaNs in the source: {receipt['losses'][0]['path']}" in receipt["warnings"]
    assert [row["nan"] for row in receipt["losses"]] == [3]
    assert receipt["lossless"]
    assert any("hold a single value: " in text for text in receipt["warnings"])
    for found in (command("inspect", source, "--digest"), command("verify", source, "--level", "digest")):
        assert f"tensors contain NaN: {EMBEDDING}" in found.stdout
        assert f"tensors hold a single value: {NORM};" in found.stdout


def test_a_resumed_run_counts_the_same_nan(tmp_path, monkeypatch):
    whole = np.random.default_rng(1).standard_normal((24, 1 << 18)).astype("f4")
    whole[::5, 7] = np.nan
    save_file({"a": whole}, tmp_path / "a.safetensors")
    words = {"to": "safetensors", "memory": "9MiB", "lineage": False}
    with interrupted_after(2, monkeypatch):
        wherry.convert(tmp_path / "a.safetensors", tmp_path / "out.safetensors", **words)
    receipt = wherry.convert(tmp_path / "a.safetensors", tmp_path / "out.safetensors", **words)
    assert receipt.resumed_bytes > 0
    assert [row["nan"] for row in receipt.losses] == [5]


def test_statistics_name_single_values_and_nan(tmp_path):
    tensors = {
        "zeros": np.zeros(4, "f4"), "same": np.full(4, 0.5, "f2"), "holes": np.array([1, np.nan], "f4"),
        "one": np.ones(1, "f4"), "plain": np.arange(4, dtype="f4"),
    }  # fmt: skip
    save_file(tensors, tmp_path / "a.safetensors")
    assert wherry.inspect(tmp_path / "a.safetensors", stats=True).warnings == (
        "1 of 5 tensors hold only zeros: zeros",
        "1 of 5 tensors hold a single value: same",
        "1 of 5 tensors contain NaN: holes",
    )
