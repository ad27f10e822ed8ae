"""Statistics of tensors: equal to those of NumPy, whatever the dtype, the container and the memory."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

import wherry
from tests.support.command import command
from wherry.errors import NotFoundError, UsageError

RANDOM = np.random.default_rng(7)
ARRAYS = {
    "float32": RANDOM.standard_normal((300, 70), dtype="f4"),
    "bfloat16": RANDOM.standard_normal((64, 64)).astype(ml_dtypes.bfloat16),
    "float8": RANDOM.standard_normal((40, 8)).astype(ml_dtypes.float8_e4m3fn),
    "special": np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 2.5], "f4"),
    "nothing_but_nan": np.array([np.nan, np.nan], "f2"),
    "int64": np.array([2**62 + 1, -5, 0], "i8"),
    "bool": np.array([True, False, False]),
    "empty": np.zeros((0, 4), "f4"),
    "scalar": np.array(3.5, "f4"),
}


def of_numpy(array):
    """The statistics as NumPy computes them over the whole array."""
    wide = array if array.dtype.kind in "biu" else array.astype("f8")
    kept = wide[~np.isnan(wide)] if wide.dtype.kind == "f" else wide
    finite = kept[np.isfinite(kept)]
    return {
        "count": array.size,
        "minimum": kept.min() if kept.size else None,
        "maximum": kept.max() if kept.size else None,
        "mean": pytest.approx(finite.mean(dtype="f8"), rel=1e-6) if finite.size else None,
        "nans": array.size - kept.size,
        "infinities": kept.size - finite.size,
        "zeros": int((wide == 0).sum()),
    }


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    place = tmp_path_factory.mktemp("statistics") / "a.safetensors"
    save_file(ARRAYS, place)
    return place


@pytest.mark.parametrize("name", ARRAYS)
def test_they_are_those_of_numpy(name, file):
    found = wherry.inspect(file, stats=True).statistics[(name,)]
    assert {field: getattr(found, field) for field in of_numpy(ARRAYS[name])} == of_numpy(ARRAYS[name])


@pytest.mark.parametrize("format", ["dcp", "orbax", "npz", "torch-zip"])
def test_they_are_the_same_in_every_container(format, file, tmp_path):
    source = tmp_path / "plain.safetensors"
    save_file({name: ARRAYS[name] for name in ("float32", "int64", "special")}, source)
    wherry.convert(source, tmp_path / "out", to=format, lineage=False)
    expected, found = (wherry.inspect(place, stats=True).statistics for place in (source, tmp_path / "out"))
    assert {path[-1]: one for path, one in found.items()} == {path[-1]: one for path, one in expected.items()}


def test_a_tensor_larger_than_a_move_is_one_row(tmp_path):
    array = RANDOM.standard_normal(5 << 20, dtype="f4")  # 20 MiB
    save_file({"large": array}, tmp_path / "a.safetensors")
    found = wherry.inspect(tmp_path / "a.safetensors", stats=True, memory="16MiB").statistics[("large",)]
    assert (found.count, found.minimum, found.maximum) == (array.size, array.min(), array.max())
    assert found.mean == pytest.approx(array.mean(dtype="f8"))


def test_complex_values_have_a_mean_and_no_order(tmp_path):
    import torch

    torch.save({"z": torch.tensor([1 + 2j, 3 - 2j])}, tmp_path / "a.pt")
    found = wherry.inspect(tmp_path / "a.pt", stats=True).statistics[("z",)]
    assert (found.minimum, found.maximum, found.mean) == (None, None, 2 + 0j)
    assert found.to_json()["mean"] == "(2+0j)"


def test_only_the_tensors_that_match_are_read_and_listed(file):
    found = wherry.inspect(file, stats=True, sha256=True, filter="*float*")
    assert sorted(found.statistics) == sorted(found.sha256) == [("bfloat16",), ("float32",), ("float8",)]
    assert [row["path"] for row in found.to_json()["tensors"]] == ["bfloat16", "float32", "float8"]


def test_a_filter_without_a_match_is_an_error(file):
    with pytest.raises(NotFoundError, match=r"no tensor matches 'kernel\*'"):
        wherry.inspect(file, filter="kernel*")


def test_a_sidecar_is_never_written_for_some_tensors(file):
    with pytest.raises(UsageError, match="a sidecar describes all tensors"):
        wherry.inspect(file, write=True, filter="*")
    assert not list(file.parent.glob("*.wherry.json"))


def test_the_command_prints_them_as_valid_json(file):
    ran = command("inspect", file, "--stats", "--filter", "special", "--json")
    row = json.loads(ran.stdout, parse_constant=lambda text: pytest.fail(f"{text} is no JSON"))["tensors"][0]
    assert row["statistics"] == {
        "count": 6, "minimum": "-inf", "maximum": "inf", "mean": 0.8333333333333334, "nans": 1, "infinities": 2,
        "zeros": 2,
    }  # fmt: skip


def test_the_tree_states_the_size_of_each_branch(tmp_path):
    arrays = {f"model.layers.{n}.w": np.zeros((5, 50), "f4") for n in range(2)}
    save_file({**arrays, "head": np.zeros(10, "f4")}, tmp_path / "a.safetensors")
    lines = command("inspect", tmp_path / "a.safetensors", "--tree").stdout.splitlines()
    assert ".  (3 tensors, 2.0 kB)" in lines
    assert any(line.endswith("layers  (2 tensors, 2.0 kB)") for line in lines)
    assert sum(line.endswith("w  float32[5, 50]") for line in lines) == 2
