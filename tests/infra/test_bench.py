"""The benches measure a row from its input to table and plot, and the docs have the results."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
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
    made, peers = load("benchmarks.inputs", monkeypatch), load("benchmarks.peers", monkeypatch)
    made.make_t5x(tmp_path / "t5x", 3_000_000)
    peers.t5x_to_huggingface(str(tmp_path / "t5x"), str(tmp_path / "peer.safetensors"))()
    peer_arrays = load_file(tmp_path / "peer.safetensors")
    assert 3_000_000 <= sum(array.nbytes for array in peer_arrays.values()) < 6_000_000
    assert converted(tmp_path / "t5x", tmp_path / "out", "huggingface") == bits(peer_arrays.values())


def test_paxml_s_input_becomes_the_same_by_us_and_by_its_peer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import orbax.checkpoint as ocp

    made, peers = load("benchmarks.inputs", monkeypatch), load("benchmarks.peers", monkeypatch)
    made.make_paxml(tmp_path / "paxml", 1_000_000)
    peers.paxml_to_maxtext(str(tmp_path / "paxml"), str(tmp_path / "peer"))()
    with ocp.StandardCheckpointer() as checkpointer:
        peer_arrays = checkpointer.restore(tmp_path / "peer")
    assert 1_000_000 <= sum(array.nbytes for array in peer_arrays.values()) < 4_000_000
    assert len(peer_arrays) == 3 * 16 + 9
    assert converted(tmp_path / "paxml", tmp_path / "out", "maxtext", scan_layers="true") == bits(
        peer_arrays.values()
    )


def test_maxtext_s_own_way_gives_the_tensors_that_we_give(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Both ways: what Orbax saved equals what we write, and what we read from it equals the source."""
    made, peers = load("benchmarks.inputs", monkeypatch), load("benchmarks.peers", monkeypatch)
    made.make_wide(tmp_path / "hf", 1_000_000)
    peers.huggingface_to_maxtext(str(tmp_path / "hf"), str(tmp_path / "saved"))()
    peers.maxtext_to_huggingface(str(tmp_path / "saved"), str(tmp_path / "back.safetensors"))()
    saved = tmp_path / "saved" / "run" / "0"
    wherry.convert(
        tmp_path / "hf", tmp_path / "scanned", to="maxtext", options={"scan_layers": True}, lineage=False
    )
    wherry.convert(
        saved, tmp_path / "hf2", to="huggingface", config=tmp_path / "saved" / "llama.yml", lineage=False
    )
    assert digests(saved) == digests(tmp_path / "scanned")
    assert digests(tmp_path / "hf2") == digests(tmp_path / "hf") == digests(tmp_path / "back.safetensors")


def digests(source: Path) -> dict[str, str]:
    """Key path → SHA-256 of the bytes; the step, which a params-only checkpoint need not have, is left out."""
    opened = wherry.open(source)
    return {
        ".".join(map(str, path)): hashlib.sha256(opened.read_bytes(path)).hexdigest()
        for path in opened.manifest.tensors
        if path != ("step",)
    }


def test_a_row_is_measured_from_its_input_to_table_and_plot(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, INFRA / "bench.py", "--rows", PAIR, "--size", "3MB", "--rounds", "1",
         "--scratch", tmp_path / "scratch", "--results", tmp_path / "results"],
        check=False, capture_output=True, text=True,
    )  # fmt: skip
    record = json.loads((tmp_path / "results" / "bench-results.json").read_text())
    rows = record["rows"]
    kinds = [(row["kind"], row["peer"]) for row in rows]
    assert kinds == [("peer", "dcp.save"), ("machine", ""), ("line", "")], done.stderr
    names = ("faster", "multiple", "cpu_start")
    assert all(row["measures"][name] > 0 for row, name in zip(rows, names, strict=True))
    assert rows[1]["bound"]["seconds"] > 0
    assert done.returncode == (0 if all(row["reached"] for row in rows) else 1)
    assert {one["run"] for one in record["processes"]} == {
        "copy + BLAKE3 (huggingface)", "dcp.save",
        *(f"{PAIR}: wherry{way}{tenth}" for way in (" --verify none", "") for tenth in ("", " (a tenth)")),
    }  # fmt: skip
    assert all(one["wall_s"] > 0 and one["peak_bytes"] > 0 for one in record["processes"])
    assert all(one["written_bytes"] > 300_000 for one in record["processes"])
    assert record["machine"]["rates"]["core"]["BLAKE3"]["per_core"] > 0
    ET.parse(tmp_path / "results" / "bench-results.svg")
    text = (tmp_path / "results" / "bench-results.md").read_text()
    assert f"| {PAIR} | dcp.save |" in text
    assert "| BLAKE3, per core |" in text
    assert [*(tmp_path / "scratch").iterdir()] == []


# `infra/bench --against DIR`: warm processes of two checkouts do the same, and a slower one is named.


@pytest.fixture
def checkouts(monkeypatch):
    """The comparison of two checkouts."""
    return load("benchmarks.against", monkeypatch)


def test_this_checkout_against_itself(checkouts, tmp_path):
    scratch, results = tmp_path / "scratch", tmp_path / "results"
    scratch.mkdir()
    results.mkdir()
    checkouts.bench(INFRA.parent, scratch, 40, 1, "GGUF", results)
    found = json.loads((results / "bench-against.json").read_text())
    assert [(row["operation"], row["tensors"]) for row in found["rows"]] == [
        (operation, tensors) for tensors in (24, 40) for operation in ("detect", "plan", "convert")
    ]
    assert all(row["ours_s"] > 0 and row["other_s"] > 0 for row in found["rows"]), found["rows"]
    assert found["ours"] == found["other"]
    assert not list(scratch.glob("made/*/*"))


# The scale bench: the double answers as S3 does, the model as a conversion, and the docs have the
# results.


@pytest.fixture
def scale(monkeypatch):
    """Loads modules of the bench."""
    return lambda name: load(f"benchmarks.scale.{name}", monkeypatch)


def results():
    return json.loads((INFRA / "bench-scale.json").read_text())


def test_the_tables_of_the_docs_and_of_readme_are_those_of_the_results(scale):
    report, found = scale("report"), results()
    for file, text in (
        ("docs/many-machines.md", report.docs_text(found)),
        ("README.md", report.readme_text(found)),
    ):
        page = (INFRA.parent / file).read_text()
        assert f"<!-- scale:start -->\n\n{text}\n\n<!-- scale:end -->" in page
    assert (INFRA / "bench-scale.md").read_text() == report.markdown(found)
    assert (INFRA / "bench-scale.svg").read_text() == report.svg(found, report.place(found))


@pytest.mark.slow
@pytest.mark.parametrize("carrier", ["work", "dask"])
def test_workers_of_which_one_is_killed_and_one_paused_make_what_one_process_makes(scale, tmp_path, carrier):
    fleet = scale("fleet")
    one = fleet.Row("convert", 1, 32_000_000, 0, 16)
    (tmp_path / "one").mkdir()
    (tmp_path / "many").mkdir()
    expected = fleet.run(one, tmp_path / "one")
    found = fleet.run(
        replace(one, carrier=carrier, workers=4, rate=2_000_000, killed=1, paused=1), tmp_path / "many"
    )
    assert found.digest == expected.digest
    assert [state for _name, state, _at in found.strikes].count("killed") == 1
    assert found.peak < 250_000_000
    assert fleet.row_from(json.loads(json.dumps(found.to_json()))) == found


def test_a_row_of_two_workers_is_measured_and_proved_by_the_checksums_of_the_store(scale, tmp_path):
    fleet = scale("fleet")
    found = fleet.run(fleet.Row("work", 2, 8_000_000, 4_000_000, 8), tmp_path)
    assert len(found.unit_seconds) == 8
    assert found.seconds > 1
    assert found.verification == {"level": "store", "ok": True, "tensors": 40, "checksum": "crc32c"}
    assert 8_000_000 * 0.9 < found.bytes_out < found.bytes_in * 1.1


@pytest.mark.slow
def test_two_workers_and_one_process_make_one_checkpoint_on_a_store_that_keeps_its_bytes(scale, tmp_path):
    found = scale("fleet").run_on_disk(40_000_000, 2, tmp_path)
    assert found["same_digest"]
    assert found["verification"]["level"] == "digest"
    assert found["verification"]["ok"]


# infra/giants.py: checkpoints that are only metadata, and that `wherry plan` takes for whole ones.


SCRIPT = Path(__file__).resolve().parents[2] / "infra" / "giants.py"


def loaded():
    spec = importlib.util.spec_from_file_location("giants", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["giants"] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


giants = loaded()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_giant_with_the_most_chunks_is_planned_in_the_seconds_and_the_memory_of_the_goal(tmp_path):
    step = giants.paxml_gpt3(tmp_path / "gpt3")
    one = giants.plan_giant(giants.Giant("GPT-3 175B", step, ("--to", "maxtext")), tmp_path)
    print(f"{one.seconds:.1f} s of a processor, {one.memory / 1e6:.0f} MB")
    assert len(one.plan["workers"]["units"]) > 2_000_000_000_000 >> 30  # of a gibibyte each
    assert one.seconds <= 20
    assert one.memory <= 300_000_000


def test_the_table_of_the_docs_has_a_row_for_each_giant():
    text = giants.DOCS.read_text()
    for title in ("Llama 405B", "DeepSeek-V3", "1 T parameters", "GPT-3 175B"):
        assert f"| {title}" in text
    assert giants.HEAD in text
