"""verify: each level finds what it promises to find, and names it."""

import numpy as np
import pytest
from safetensors.numpy import save_file

import wherry
from wherry.errors import NotFoundError, UsageError

SIZE = (9 << 20) // 4


@pytest.fixture
def pair(tmp_path):
    """A file and what wherry made of it; the tensor has three leaves."""
    array = np.random.default_rng(1).standard_normal(SIZE, dtype="f4")
    save_file({"w": array, "b": np.zeros(3, dtype="f4")}, tmp_path / "m.safetensors")
    wherry.convert(tmp_path / "m.safetensors", tmp_path / "out", to="hf", family="none")
    return tmp_path / "m.safetensors", tmp_path / "out"


def flip(path, offset):
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def test_a_flipped_bit_is_found_with_tensor_and_leaf(pair):
    _source, out = pair
    weights = out / "model.safetensors"
    position = weights.stat().st_size - 12 - 5 if _tail_is_b(weights) else weights.stat().st_size - 5
    flip(weights, position)
    assert wherry.verify(out, level="present").ok
    found = wherry.verify(out, level="digest")
    assert not found.ok
    assert (found.verdict, found.exit_code) == ("altered", 9)
    assert [(row.path, row.leaf) for row in found.failed] == [("w", 2)]


def _tail_is_b(path):
    import json

    data = path.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return header["b"]["data_offsets"][1] > header["w"]["data_offsets"][1]


def test_against_another_checkpoint(pair, tmp_path):
    source, out = pair
    assert wherry.verify(out, against=source).ok
    other = tmp_path / "other.safetensors"
    save_file({"w": np.zeros(SIZE, dtype="f4"), "extra": np.zeros(1, dtype="f4")}, other)
    failed = wherry.verify(out, against=other).failed
    assert {(row.path, row.reason.split(":")[0]) for row in failed} == {
        ("w", "digest mismatch"),
        ("extra", "missing tensor"),
        ("b", "unexpected tensor"),
    }


def test_an_unknown_level_is_refused(pair):
    with pytest.raises(UsageError, match="unknown level"):
        wherry.verify(pair[0], level="perfect")


@pytest.mark.parametrize("other", ['{"other": 1}', "[]"])  # of another length, and of the same
def test_a_swapped_companion_is_found(tmp_path, other):
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"w": np.zeros(3)}, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "tokenizer.json").write_text("{}")
    wherry.convert(folder, tmp_path / "out", to="orbax")
    (swapped,) = (tmp_path / "out").rglob("tokenizer.json")
    swapped.write_text(other)
    found = wherry.verify(tmp_path / "out", level="digest")
    assert [(row.path, row.reason) for row in found.failed] == [
        ("tokenizer.json", "digest mismatch in the companion file")
    ]


def test_a_tensor_that_was_added_is_found(tmp_path):
    tensors = {"a": np.arange(6.0), "b": np.ones(3, "i4")}
    save_file(tensors, tmp_path / "m.safetensors")
    wherry.convert(tmp_path / "m.safetensors", tmp_path / "out.safetensors", to="safetensors")
    save_file({**tensors, "c": np.zeros(2)}, tmp_path / "out.safetensors")
    found = wherry.verify(tmp_path / "out.safetensors", level="digest")
    assert [(row.path, row.reason) for row in found.failed] == [("c", "unexpected tensor")]


def test_inspect_hashes_are_those_of_the_canonical_bytes(pair):
    import hashlib

    from safetensors.numpy import load_file

    found = wherry.inspect(pair[1], sha256=True, digest=True)
    for name, array in load_file(pair[0]).items():
        assert found.sha256[name,] == hashlib.sha256(array.tobytes()).hexdigest()
    assert set(found.manifest.digests) == {("w",), ("b",)}


def test_damage_is_a_verdict_not_an_error(pair, tmp_path):
    source, out = pair
    data = source.read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(data[:-9])
    found = wherry.verify(tmp_path / "cut.safetensors")
    assert (found.verdict, found.ok, found.exit_code) == ("corrupt", False, 5)
    assert found.failed[0].reason
    (out / "model.safetensors").write_bytes((out / "model.safetensors").read_bytes()[:-9])
    assert wherry.verify(out, level="digest").exit_code == 5
    with pytest.raises(NotFoundError):
        wherry.verify(tmp_path / "nothing")
