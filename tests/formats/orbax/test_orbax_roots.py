"""Aggregates whose root is a tuple or a list, as brax and optax states are: complete, with and without `_METADATA`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

import wherry

K = np.arange(6, dtype=np.float32).reshape(2, 3)
# Name → the tree as Orbax's msgpack file has it; a tuple is a list there, an empty NamedTuple is nil.
ROOTS: dict[str, Any] = {
    "brax": [{"mean": K[0]}, {"w": K}, {"w": -K}],
    "optax": [{"trace": {"w": K}}, None],
    "adam": [{"count": np.asarray(3, np.int32), "mu": {"w": K}, "nu": {"w": K}}, None],
    "chain": [None, [{"mu": {"w": K}}, None]],
    "nested": [[K], [{"b": K}]],
    "one": [K],
    "many": [K + number for number in range(20)],
    "scalars": [1, 2.5, K],
}


def _packed(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return msgpack.ExtType(1, msgpack.packb((value.shape, value.dtype.name, value.tobytes())))
    if isinstance(value, list):
        return [_packed(child) for child in value]
    return {key: _packed(child) for key, child in value.items()} if isinstance(value, dict) else value


def _leaves(
    value: Any, path: tuple[tuple[str, int], ...] = ()
) -> list[tuple[tuple[tuple[str, int], ...], Any]]:
    if isinstance(value, list):
        children = [(str(number), 1, child) for number, child in enumerate(value)]
    elif isinstance(value, dict):
        children = [(key, 2, child) for key, child in value.items()]
    else:
        return [(path, value)]
    return [leaf for key, kind, child in children for leaf in _leaves(child, (*path, (key, kind)))]


def _save(folder: Path, tree: Any, *, described: bool) -> None:
    folder.mkdir()
    (folder / "checkpoint").write_bytes(msgpack.packb(_packed(tree)))
    if described:
        rows = {
            repr(tuple(key for key, _ in path)): {
                "key_metadata": [{"key": key, "key_type": kind} for key, kind in path],
                "value_metadata": {
                    "value_type": "None"
                    if leaf is None
                    else "jax.Array"
                    if isinstance(leaf, np.ndarray)
                    else "scalar",
                    "skip_deserialize": True,
                },
            }
            for path, leaf in _leaves(tree)
        }
        (folder / "_METADATA").write_text(json.dumps({"tree_metadata": rows, "use_zarr3": False}))


@pytest.mark.parametrize("described", [True, False], ids=["with _METADATA", "msgpack only"])
@pytest.mark.parametrize("name", ROOTS)
def test_a_sequence_at_the_root(tmp_path, name, described):
    folder = tmp_path / "step"
    _save(folder, ROOTS[name], described=described)
    found = wherry.detect(folder)
    assert (found.verdict, found.format) == ("ok", "orbax"), found
    target = tmp_path / "out"
    wherry.convert(folder, target, to="orbax")
    with wherry.open(target) as checkpoint:
        assert () in checkpoint.manifest.lists
        for path, leaf in _leaves(ROOTS[name]):
            key = tuple(part for part, _ in path)
            if leaf is None:
                assert checkpoint.manifest.empties[key] == "none"
            else:
                np.testing.assert_array_equal(checkpoint.read(key), leaf)


@pytest.mark.parametrize(
    "data",
    [b"\x92\x93\xa1a\xa1b\xa1c\xc4\x01x", b"\x93ascii text", b"\x9a" + bytes(80)],
    ids=["EasyLM", "text", "zeros"],
)
def test_a_file_that_only_begins_as_an_array_is_not_orbax(tmp_path, data):
    (tmp_path / "step").mkdir()
    (tmp_path / "step" / "checkpoint").write_bytes(data)
    assert wherry.detect(tmp_path / "step").format != "orbax"
