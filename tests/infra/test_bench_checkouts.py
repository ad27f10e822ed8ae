"""`infra/bench --against DIR`: warm processes of two checkouts do the same, and a slower one is named."""

from __future__ import annotations

import json

import pytest

import wherry
from tests.support.infra import INFRA, load


@pytest.fixture
def checkouts(monkeypatch):
    """Loads modules of the comparison."""
    return lambda name: load(f"benchmarks.checkouts.{name}", monkeypatch)


def test_this_checkout_against_itself(checkouts, tmp_path):
    scratch, results = tmp_path / "scratch", tmp_path / "results"
    scratch.mkdir()
    results.mkdir()
    checkouts("bench").bench(INFRA.parent, scratch, 40, 1, "GGUF", results)
    found = json.loads((results / "bench-against.json").read_text())
    assert [(row["operation"], row["tensors"]) for row in found["rows"]] == [
        (operation, tensors) for tensors in (24, 40) for operation in ("detect", "plan", "convert")
    ]
    assert all(row["ours_s"] > 0 and row["other_s"] > 0 for row in found["rows"]), found["rows"]
    assert found["ours"] == found["other"]
    assert not list(scratch.glob("made/*/*"))


@pytest.mark.parametrize("number", range(9))
def test_every_container_has_the_same_tensors(number, checkouts, tmp_path):
    """Inputs are made by the command in the bench; here by the same function of the library."""
    rows, inputs = checkouts("rows"), checkouts("inputs")
    container, options = rows.CONTAINERS[number], inputs.options_of

    def convert(source, target, container):
        wherry.convert(
            source,
            target,
            to=container.format,
            options=options(rows.SOURCE, container),
            family=inputs.family_of(container),
            lineage=False,
            verify="none",
        )

    path = inputs.make_input(container, 20, tmp_path, convert)
    assert wherry.detect(path).format == container.format
    with wherry.open(path) as checkpoint:
        assert len(checkpoint.manifest.tensors) == 20
        assert len({".".join(path) for path in checkpoint.manifest.tensors}) == 20
        assert {spec.shape for spec in checkpoint.manifest.tensors.values()} == {(8, 8)}
    if container != rows.SOURCE:
        made = tmp_path / "made.safetensors"
        wherry.convert(path, made, to="safetensors", options=options(container, rows.SOURCE), lineage=False)
        with wherry.open(made) as checkpoint:
            assert {".".join(path) for path in checkpoint.manifest.tensors} == set(inputs.tensor_names(20))


def test_a_slower_row_and_one_that_was_not_measured_are_named(checkouts):
    report = checkouts("report")
    row = {"row": "detect npz, 24 tensors", "operation": "detect", "container": "npz", "tensors": 24}
    slower = {**row, "ours_s": 2.2e-3, "other_s": 2e-3, "ratio": 1.1}
    assert [*report.problems({"rows": [slower]})] == ["detect npz, 24 tensors: 1.10× of 1.05×"]
    assert not [*report.problems({"rows": [{**row, "ours_s": 2.2e-6, "other_s": 2e-6, "ratio": 1.1}]})]
    assert not [*report.problems({"rows": [{**row, "ours_s": 2.0e-3, "other_s": 2e-3, "ratio": 1.0}]})]
    assert [*report.problems({"rows": [{**row, "failed": "the other: no such format"}]})] == [
        "detect npz, 24 tensors: the other: no such format"
    ]


def test_an_error_of_one_checkout_is_the_answer(checkouts, tmp_path):
    request = {"operation": "detect", "source": str(tmp_path), "target": str(tmp_path / "x"), "repeats": 1}
    assert checkouts("child").answer(request)["error"].startswith("ValueError: ")
