"""Comparisons and statistics of tensors: equal to those of NumPy."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

import wherry
from tests.support.command import command
from tests.support.tiny_models import save_tiny
from wherry.errors import NotFoundError, UsageError, WherryError

ONE = {
    "a/kernel": np.arange(12, dtype="f4").reshape(3, 4),
    "b": np.array([2**53, 1], "i8"),
    "c": np.array([np.nan, 0.0, 1.0], "f4"),
    "d": np.ones(3, "f2"),
}


def folder(place, arrays=ONE, **config):
    place.mkdir()
    save_file(arrays, place / "model.safetensors", metadata={"format": "pt"})
    (place / "config.json").write_text(json.dumps({"model_type": "strange", **config}))
    return place


@pytest.fixture
def pair(tmp_path):
    """Two folders; `pair(**changes)` makes the second with other arrays."""

    def of(arrays, **config):
        return folder(tmp_path / "one"), folder(tmp_path / "two", {**ONE, **arrays}, **config)

    return of


def rows(found):
    return [(row.path, row.what, row.error, row.elements) for row in found.differences]


def test_a_copy_has_no_differences(pair):
    found = wherry.diff(*pair({}))
    assert found.same
    assert (found.tensors, found.equal, found.layout) == (4, 4, "")


def test_values_differ_by_their_largest_error(pair):
    changed = ONE["a/kernel"].copy()
    changed[0, 0], changed[2, 3] = 0.25, 14
    assert rows(wherry.diff(*pair({"a/kernel": changed}))) == [("a~1kernel", "values", 3.0, 2)]


def test_integers_beyond_the_precision_of_float64_are_compared_exactly(pair):
    assert rows(wherry.diff(*pair({"b": np.array([2**53 + 1, 1], "i8")}))) == [("b", "values", 0.0, 1)]


def test_nans_are_equal_and_the_sign_of_zero_is_a_difference_of_bytes(pair):
    found = wherry.diff(*pair({"c": np.array([np.nan, -0.0, 1.0], "f4")}))
    assert rows(found) == [("c", "values", 0.0, 0)]


def test_a_nan_or_infinity_on_one_side_is_an_infinite_error(pair):
    found = wherry.diff(*pair({"c": np.array([1.0, 0.0, np.inf], "f4")}))
    assert rows(found) == [("c", "values", float("inf"), 2)]
    assert found.to_json()["differences"][0]["error"] == "inf"


def test_another_dtype_is_compared_by_value(pair):
    found = wherry.diff(*pair({"d": np.full(3, 1.5, "f4"), "a/kernel": ONE["a/kernel"].astype("f8")}))
    assert rows(found) == [("a~1kernel", "dtype", 0.0, 0), ("d", "dtype", 0.5, 3)]
    assert (found.differences[1].a, found.differences[1].b) == ("float16[3]", "float32[3]")


def test_shapes_and_tensors_of_one_side_are_named(tmp_path):
    less = {name: array for name, array in ONE.items() if name != "d"}
    two = folder(tmp_path / "two", {**less, "b": np.zeros((2, 1), "i8"), "e": ONE["d"]})
    found = wherry.diff(folder(tmp_path / "one"), two)
    assert [(row.path, row.what, row.a, row.b) for row in found.differences] == [
        ("b", "shape", "int64[2]", "int64[2, 1]"),
        ("d", "only in A", "float16[3]", None),
        ("e", "only in B", None, "float16[3]"),
    ]
    assert (found.tensors, found.equal) == (3, 2)


def test_config_attributes_are_named_by_their_joined_names(pair):
    one, two = pair({}, rope={"theta": 5}, hidden_size=3)
    (one / "tokenizer.json").write_text("{}")
    (two / "vocab.txt").write_text("x")
    found = wherry.diff(one, two)
    assert [(row.file, row.name, row.a, row.b) for row in found.attributes] == [
        ("config.json", "hidden_size", None, "3"),
        ("config.json", "rope.theta", None, "5"),
        ("tokenizer.json", "", "2 bytes", None),
        ("vocab.txt", "", None, "1 bytes"),
    ]
    assert not found.same


def test_without_values_no_tensor_is_read(pair, monkeypatch):
    one, two = pair({"d": np.zeros(3, "f2")})
    monkeypatch.setattr("wherry.prove.differences.hash_checkpoint", pytest.fail)
    found = wherry.diff(one, two, values=False)
    assert found.same
    assert not found.values_read


def test_a_filter_limits_what_is_compared(pair):
    one, two = pair({"d": np.zeros(3, "f2"), "e": ONE["d"]})
    assert rows(wherry.diff(one, two, filter="[a-c]*")) == []
    with pytest.raises(NotFoundError, match="no tensor matches 'z'"):
        wherry.diff(one, two, filter="z")


def test_a_checkpoint_of_another_system_is_compared_in_the_layout_of_the_first(tmp_path):
    source = save_tiny(tmp_path / "source", "llama")
    wherry.convert(source, tmp_path / "maxtext", to="maxtext", options={"scan_layers": True}, lineage=False)
    there = wherry.diff(tmp_path / "maxtext", source)
    assert there.same
    assert (there.layout, there.equal) == ("maxtext", there.tensors)
    back = wherry.diff(
        source, tmp_path / "maxtext"
    )  # a scale of the query was folded in and out: two roundings
    assert back.layout == "huggingface"
    assert {row.what for row in back.differences} <= {"values"}
    assert max(row.error for row in back.differences) < 1e-7


def test_a_changed_value_is_found_through_the_layout(tmp_path):
    from safetensors.numpy import load_file

    source = save_tiny(tmp_path / "source", "llama")
    wherry.convert(source, tmp_path / "maxtext", to="maxtext", options={"scan_layers": True}, lineage=False)
    arrays = load_file(source / "model.safetensors")
    arrays["model.layers.1.mlp.up_proj.weight"][3, 2] += 2
    save_file(arrays, source / "model.safetensors", metadata={"format": "pt"})
    (row,) = wherry.diff(tmp_path / "maxtext", source).differences
    assert row.path == "params/params/decoder/layers/mlp/wi_1/kernel"
    assert (row.error, row.elements) == (pytest.approx(2), 1)


def test_a_system_that_cannot_be_compared_is_an_error(tmp_path):
    strange = tmp_path / "strange.npz"
    np.savez(strange, x=np.ones(3))
    source = save_tiny(tmp_path / "source", "llama")
    with pytest.raises(WherryError):
        wherry.diff(strange.parent / "strange.npz", source, family="bert")


def test_the_command_ends_with_9_and_prints_what_differs(pair):
    one, two = pair({"d": np.zeros(3, "f2")}, hidden_size=3)
    ran = command("diff", one, two)
    assert ran.returncode == 9, ran.stderr
    assert "3 of 4 tensors in both" in ran.stdout
    assert ["d", "values", "float16[3]", "float16[3]", "1", "3"] in [
        line.split() for line in ran.stdout.splitlines()
    ]
    assert ["config.json", "hidden_size", "-", "3"] in [line.split() for line in ran.stdout.splitlines()]
    same = command("diff", one, one)
    assert (same.returncode, same.stdout.splitlines()[-1]) == (0, "no differences")
    assert json.loads(command("diff", one, two, "--json").stdout)["same"] is False


# Statistics of tensors: equal to those of NumPy, whatever the dtype, the container and the memory.


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
