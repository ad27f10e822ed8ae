"""The benchmark measures what it says, and holds it against what is required."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import numpy as np
import pytest
from safetensors.numpy import load_file

import wherry
from tests.support.infra import INFRA, load
from wherry.mover.read import read_array

PAIR = "safetensors → DCP"


def test_measuring_sees_time_and_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    measure = load("benchmarks.measure", monkeypatch)
    code = "import time; block = bytearray(80_000_000); time.sleep(0.3); print('{\"seconds\": 0.25}')"
    cost = measure.measure([sys.executable, "-c", code], dict(os.environ), tmp_path)
    assert cost.work == 0.25
    assert 0.3 < cost.wall < 30
    assert 80_000_000 < cost.anonymous <= cost.peak < 200_000_000
    with pytest.raises(measure.RowFailedError):
        measure.measure([sys.executable, "-c", "raise SystemExit(3)"], dict(os.environ), tmp_path)
    with pytest.raises(measure.RowFailedError, match="no seconds"):
        measure.measure(["true"], dict(os.environ), tmp_path)


@pytest.mark.parametrize("mode", ["--buckets", "--scale", "--against=."])
def test_listing_starts_no_other_bench(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    bench = load("bench", monkeypatch)
    monkeypatch.setattr(sys, "argv", ["bench", "--list", mode])
    for name in ("run_buckets", "run_scale", "run_against"):
        monkeypatch.setattr(bench, name, lambda _options: pytest.fail("it started"))
    assert bench.main() == 2


def test_measuring_counts_child_processes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    measure = load("benchmarks.measure", monkeypatch)
    child = "import time; block = bytearray(80_000_000); time.sleep(0.3)"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}]); print('{{\"seconds\": 1}}')"
    cost = measure.measure([sys.executable, "-c", code], dict(os.environ), tmp_path)
    assert 80_000_000 < cost.anonymous <= cost.peak


def test_synthetic_models_have_201_tensors_of_the_requested_size(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    inputs = load("benchmarks.inputs", monkeypatch)
    for size in (3_000_000, 2_000_000_000):
        tensors = inputs.model(size)
        assert len(tensors) == len({tensor.name for tensor in tensors}) == 201
        assert size <= sum(tensor.nbytes for tensor in tensors) < 1.2 * size
    inputs.make_huggingface(tmp_path / "model", 3_000_000)
    from safetensors import safe_open

    index = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())["weight_map"]
    found = {}
    for shard in sorted((tmp_path / "model").glob("*.safetensors")):
        with safe_open(shard, "np") as file:
            found |= {name: (tuple(file.get_slice(name).get_shape()), shard.name) for name in file.keys()}  # noqa: SIM118
    assert found == {tensor.name: (tensor.shape, index[tensor.name]) for tensor in inputs.model(3_000_000)}


def test_wide_models_become_scanned_kernels_of_the_requested_size(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    inputs = load("benchmarks.inputs", monkeypatch)
    inputs.make_wide(tmp_path / "model", 1_000_000)
    assert len([*(tmp_path / "model").glob("*.safetensors")]) == 2
    options = {"scan_layers": "true"}
    wherry.convert(tmp_path / "model", tmp_path / "out", to="maxtext", options=options, lineage=False)
    sizes = sorted(spec.nbytes for spec in wherry.open(tmp_path / "out").manifest.tensors.values())
    assert all(1_000_000 <= size < 1_010_000 for size in sizes[-3:])


def test_layers_of_deepseek_are_dequantized_with_one_projection_plain(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    inputs = load("benchmarks.inputs_deepseek", monkeypatch)
    small = inputs.Dimensions(4, embed=256, heads=2, dense=256, expert=128, q_rank=128, kv_rank=128)
    inputs.make_layers(tmp_path / "fp8", small, plain=True)
    with wherry.open(tmp_path / "fp8") as stored:
        names = {".".join(path): spec.dtype for path, spec in stored.manifest.tensors.items()}
    assert names["model.layers.0.self_attn.kv_a_proj_with_mqa.weight"] == "bfloat16"
    assert names["model.layers.0.self_attn.o_proj.weight"] == "float8_e4m3fn"
    receipt = wherry.convert(tmp_path / "fp8", tmp_path / "out", to="maxtext", lineage=False)
    assert receipt.verification is not None


def bits(arrays: Iterable[Any]) -> Counter[tuple[Any, ...]]:
    """What arrays hold, whatever their names are; counts and steps left out, which systems keep differently."""
    return Counter(
        (array.shape, hashlib.sha256(np.ascontiguousarray(array)).hexdigest())
        for array in map(np.asarray, arrays)
        if array.dtype == np.float32
    )


def converted(source: Path, target: Path, to: str, **options: str) -> Counter[tuple[Any, ...]]:
    """What our conversion of an input holds."""
    wherry.convert(source, target, to=to, options=options, lineage=False)
    result = wherry.open(target)
    specs = result.manifest.tensors.values()
    return bits(read_array(result.reader, spec, spec.whole) for spec in specs)


def test_t5x_s_input_becomes_the_same_by_us_and_by_its_peer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made, peers = load("benchmarks.inputs_zarr", monkeypatch), load("benchmarks.peers_zarr", monkeypatch)
    made.make_t5x(tmp_path / "t5x", 3_000_000)
    peers.t5x_to_huggingface(str(tmp_path / "t5x"), str(tmp_path / "peer.safetensors"))()
    peer_arrays = load_file(tmp_path / "peer.safetensors")
    assert 3_000_000 <= sum(array.nbytes for array in peer_arrays.values()) < 6_000_000
    assert converted(tmp_path / "t5x", tmp_path / "out", "huggingface") == bits(peer_arrays.values())


def test_paxml_s_input_becomes_the_same_by_us_and_by_its_peer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import orbax.checkpoint as ocp

    made, peers = load("benchmarks.inputs_zarr", monkeypatch), load("benchmarks.peers_zarr", monkeypatch)
    made.make_paxml(tmp_path / "paxml", 1_000_000)
    peers.paxml_to_maxtext(str(tmp_path / "paxml"), str(tmp_path / "peer"))()
    with ocp.StandardCheckpointer() as checkpointer:
        peer_arrays = checkpointer.restore(tmp_path / "peer")
    assert 1_000_000 <= sum(array.nbytes for array in peer_arrays.values()) < 4_000_000
    assert len(peer_arrays) == 3 * 16 + 9
    assert converted(tmp_path / "paxml", tmp_path / "out", "maxtext", scan_layers="true") == bits(
        peer_arrays.values()
    )


def test_why_a_row_failed_fits_into_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    measure = load("benchmarks.measure", monkeypatch)
    said = "exit code 4 of python /a/b/c.py\nTraceback:\nerror: nothing knows /some/where/else/model\n  cure: look"
    assert measure.RowFailedError(said).reason == "error: nothing knows model"
    assert measure.RowFailedError("exit code 3 of x\nvery sad").reason == "very sad"
    assert measure.RowFailedError("File y\nsome.odd.WrongError: 1 / 2 is not 3/4").reason.endswith(
        "1 / 2 is not 3/4"
    )


def test_every_input_and_name_of_the_table_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = load("benchmarks.cases", monkeypatch)
    runs = [run for case in cases.CASES for run in cases.runs_of(case)]
    by_name = {run.name: run for run in runs}
    assert all(by_name[run.name] == run for run in runs)
    assert {run.source for run in runs} - {""} <= set(cases.INPUTS)
    assert len({case.name for case in cases.CASES}) == len(cases.CASES)


def test_a_row_is_measured_from_its_input_to_table_and_plot(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, INFRA / "bench.py", "--rows", PAIR, "--size", "3MB", "--rounds", "1",
         "--scratch", tmp_path / "scratch", "--results", tmp_path / "results"],
        check=False, capture_output=True, text=True,
    )  # fmt: skip
    record = json.loads((tmp_path / "results" / "bench-results.json").read_text())
    rows = record["rows"]
    assert [(row["kind"], row["peer"]) for row in rows] == [("peer", "dcp.save"), ("machine", "")], (
        done.stderr
    )
    assert all(row["measures"][name] > 0 for row, name in zip(rows, ("faster", "multiple"), strict=True))
    assert rows[1]["bound"]["seconds"] > 0
    assert done.returncode == (0 if all(row["reached"] for row in rows) else 1)
    assert {one["run"] for one in record["processes"]} == {
        "copy + BLAKE3 (huggingface)", f"{PAIR}: wherry --verify none", f"{PAIR}: wherry", "dcp.save",
    }  # fmt: skip
    assert all(one["wall_s"] > 0 and one["peak_bytes"] > 0 for one in record["processes"])
    assert all(one["written_bytes"] > 3_000_000 for one in record["processes"])
    assert record["machine"]["rates"]["core"]["BLAKE3"]["per_core"] > 0
    ET.parse(tmp_path / "results" / "bench-results.svg")
    text = (tmp_path / "results" / "bench-results.md").read_text()
    assert f"| {PAIR} | dcp.save |" in text
    assert "| BLAKE3, per core |" in text
    assert [*(tmp_path / "scratch").iterdir()] == []


def test_the_rewrite_keeps_the_layout_of_the_input(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    inputs = load("benchmarks.inputs", monkeypatch)
    size = 3_000_000
    inputs.make_huggingface(tmp_path / "model", size)
    wherry.convert(
        tmp_path / "model", tmp_path / "out", to="huggingface", lineage=False,
        options={"max_shard_size": str(int(inputs.SHARD * size))},
    )  # fmt: skip
    shards = [
        sorted(path.name for path in (tmp_path / name).glob("*.safetensors")) for name in ("model", "out")
    ]
    assert shards[0] == shards[1]
    assert len(shards[0]) > 1


def test_a_plan_that_reads_tensors_fails_its_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    probes, inputs = load("benchmarks.probes", monkeypatch), load("benchmarks.inputs", monkeypatch)
    inputs.make_sparse(tmp_path / "model", 2, 40)
    source, target = str(tmp_path / "model"), str(tmp_path / "out")
    assert 0 < probes.plan(source, target)() < 60
    monkeypatch.setattr(probes, "_WHERRY", (sys.executable, "-c", READS_ALL))
    with pytest.raises(SystemExit, match="more than metadata"):
        probes.plan(source, target)()


READS_ALL = "import pathlib, sys; [path.read_bytes() for path in pathlib.Path(sys.argv[2]).iterdir()]"
