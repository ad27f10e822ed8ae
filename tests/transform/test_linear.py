"""Weighted sums of checkpoints, of any container, within the budget."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

import wherry
from tests.support.command import command as run
from tests.support.large import make_source, measured
from tests.support.merging import SHAPES, made, read, save
from tests.support.tiny_models import save_tiny
from wherry.core.digest import weights_digest
from wherry.errors import UnrepresentableError, UsageError


def summed(terms, dtype):
    """By the definition: float32 products, added in order, rounded once."""
    total = sum((tensor.astype("f4") * np.float32(weight) for tensor, weight in terms[1:]), start=(
        terms[0][0].astype("f4") * np.float32(terms[0][1])))  # fmt: skip
    return total.astype(dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("weights", [(0.5, 0.5), (0.7, -0.2, 0.3)])
def test_a_sum_is_that_of_float32(dtype, weights, tmp_path):
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    tensors = [made(seed, kind) for seed in range(len(weights))]
    sources = [save(tmp_path / f"s{number}", one) for number, one in enumerate(tensors)]
    words = [f"{folder}*{weight}" for folder, weight in zip(sources, weights, strict=True)]
    receipt = wherry.merge(words, tmp_path / "out", to="huggingface", memory="64MiB")
    found = read(tmp_path / "out")
    assert set(found) == {(name,) for name in SHAPES}
    for name in SHAPES:
        wanted = summed([(one[name], weight) for one, weight in zip(tensors, weights, strict=True)], kind)
        np.testing.assert_array_equal(found[(name,)], wanted)
        assert found[(name,)].dtype == kind
    assert not receipt.lossless
    assert [row["weight"] for row in receipt.parents] == list(weights)
    assert receipt.verification == receipt.verification | {"level": "digest", "ok": True}
    assert receipt.bytes_read == sum(one.nbytes for tensor in tensors for one in tensor.values())


def test_every_parent_is_in_the_lineage(tmp_path):
    sources = [save(tmp_path / name, made(seed)) for seed, name in enumerate("abc")]
    words = [f"{folder}*{weight}" for folder, weight in zip(sources, (0.2, 0.3, 0.5), strict=True)]
    receipt = wherry.merge(words, tmp_path / "out", to="huggingface")
    for folder, one in zip(sources, receipt.sources, strict=True):
        inspected = wherry.inspect(folder, digest=True)
        assert one.weights_digest == weights_digest(inspected.manifest.digests, one.algorithm)
    answer = wherry.why(tmp_path / "out")
    assert {step.edge.source for step in answer.steps} == {one.checkpoint_digest for one in receipt.sources}
    shown = run("lineage", "why", str(tmp_path / "out"))
    assert all(str(folder) in shown.stdout for folder in sources)
    assert run("ledger", "check").returncode == 0
    assert not wherry.stale(tmp_path / "out")
    save_file(made(9), sources[2] / "model.safetensors", metadata={"format": "pt"})
    (reason,) = wherry.stale(tmp_path / "out")[0].reasons
    assert reason.kind == "source-changed"
    assert str(sources[2]) in reason.detail


def test_a_rerun_does_nothing_and_another_weight_is_another_merge(tmp_path):
    sources = [save(tmp_path / name, made(seed)) for seed, name in enumerate("ab")]
    words = [f"{folder}*0.5" for folder in sources]
    first = wherry.merge(words, tmp_path / "out", to="orbax")
    assert wherry.merge(words, tmp_path / "out", to="orbax").already
    with pytest.raises(wherry.WherryError, match="already exists"):
        wherry.merge([words[0], f"{sources[1]}*0.25"], tmp_path / "out", to="orbax")
    save_file(made(7), sources[1] / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(wherry.WherryError, match="already exists"):
        wherry.merge(words, tmp_path / "out", to="orbax")
    assert not first.already


@pytest.mark.parametrize(("change", "words"), [
    (lambda one: one | {"more": np.zeros(3, "f4")}, "1 tensor of only one of .*more"),
    (lambda one: one | {"model.b.weight": np.zeros(6, "f4")}, r"shape is \(5,\) in .* and \(6,\) in"),
    (lambda one: one | {"model.b.weight": np.zeros(5, "f2")}, "type is float32 in .* and float16 in"),
])  # fmt: skip
def test_sources_that_differ_are_refused_by_name(change, words, tmp_path):
    a, b = save(tmp_path / "a", made(0)), save(tmp_path / "b", change(made(1)))
    with pytest.raises(UnrepresentableError, match=words):
        wherry.merge([f"{a}*0.5", f"{b}*0.5"], tmp_path / "out", to="huggingface")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["a", "b"]


def test_what_cannot_be_merged_is_refused(tmp_path):
    a = save(tmp_path / "a", made(0) | {"ids": np.arange(4)})
    b = save(tmp_path / "b", made(1) | {"ids": np.arange(4)})
    with pytest.raises(UnrepresentableError, match="tensors of type int64"):
        wherry.merge([f"{a}*0.5", f"{b}*0.5"], tmp_path / "out", to="huggingface")
    for words, refusal in (
        ([f"{a}*0.5", str(b)], "no weight"), ([f"{a}*1"], "at least 2"), ([f"{a}*x", f"{b}*1"], "invalid weight 'x'"),
        ([f"{a}*nan", f"{b}*1"], "invalid weight nan"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=refusal):
            wherry.merge(words, tmp_path / "out", to="huggingface")
    assert not (tmp_path / "out").exists()


def test_the_command_plans_and_merges(tmp_path):
    a, b = (save(tmp_path / name, made(seed)) for seed, name in enumerate("ab"))
    words = ["merge", f"{a}*0.25", f"{b}*0.75", str(tmp_path / "out"), "--to", "huggingface", "--json"]
    planned = json.loads(run(*words, "--dry-run").stdout)
    assert planned["manifest"]["origin"]["merge"]["kind"] == "linear" if "manifest" in planned else planned
    assert not (tmp_path / "out").exists()
    done = run(*words)
    assert done.returncode == 0, done.stderr
    assert [row["weight"] for row in json.loads(done.stdout)["parents"]] == [0.25, 0.75]
    assert run("merge", str(a), "out", "--to", "huggingface").returncode == 2
    assert run("verify", str(tmp_path / "out"), "--level", "digest").returncode == 0


# Merges of any container into any format, within the memory budget.


CODE = """
import sys, wherry
a, b, out = sys.argv[1:]
result = wherry.merge([f"{a}*0.5", f"{b}*0.5"], out, to="huggingface", memory="64MiB", lineage=False).bytes_written
"""


def test_a_merge_becomes_another_system(tmp_path):
    """The layout of the target lies over the merge: equal to a conversion of the merged checkpoint."""
    pytest.importorskip("transformers")
    a = save_tiny(tmp_path / "a", "llama")
    b = save_tiny(tmp_path / "b", "llama", drawn=True)
    words = [f"{a}*0.25", f"{b}*0.75"]
    wherry.merge(words, tmp_path / "hf", to="huggingface")
    wherry.convert(tmp_path / "hf", tmp_path / "wanted", to="maxtext")
    receipt = wherry.merge(words, tmp_path / "found", to="maxtext")
    wanted, found = read(tmp_path / "wanted"), read(tmp_path / "found")
    assert set(wanted) == set(found)
    for path, tensor in wanted.items():
        np.testing.assert_array_equal(found[path], tensor)
    assert receipt.family == "llama"
    assert len(receipt.parents) == 2


def test_sources_may_lie_in_different_containers(tmp_path):
    """Compressed chunks are decoded once; the sums are those of plain files."""
    a, b = made(1), made(2)
    one, other = save(tmp_path / "a", a), save(tmp_path / "b", b)
    options = {"compression": "zstd", "chunks": "65536"}
    wherry.convert(other, tmp_path / "zarr", to="orbax", options=options)
    receipt = wherry.merge([f"{one}*0.5", f"{tmp_path / 'zarr'}*0.5"], tmp_path / "out", to="npz")
    assert [one.format for one in receipt.sources] == ["huggingface", "orbax"]
    for name, tensor in a.items():
        np.testing.assert_array_equal(
            read(tmp_path / "out")[(name,)], tensor * np.float32(0.5) + b[name] * np.float32(0.5)
        )


def test_memory_does_not_grow_with_the_tensors(tmp_path):
    """256 MiB from each of two sources in a budget of 64 MiB, above what the interpreter takes."""
    for name in "ab":
        make_source(tmp_path / name, {"w": (8192, 16384)}, "bfloat16")
    written, peak = measured(CODE, tmp_path / "a", tmp_path / "b", tmp_path / "out")
    assert written == 256 << 20
    assert peak < 300 << 20
