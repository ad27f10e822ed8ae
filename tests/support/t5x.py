"""T5X's on-disk contract, followed without T5X and without our code: flax's msgpack and tensorstore.

`save` writes what T5X's legacy checkpointer writes; `load` reads it as its `load_t5x_checkpoint` does: the msgpack
tree, specs taken at their word but for chunks and compressor, paths resolved in the folder of the file.
"""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import tensorstore as ts
from flax import serialization, traverse_util


def arrays(seed: int = 0) -> dict[str, np.ndarray]:
    """Leaves of a small train state, by their path."""
    rng = np.random.default_rng(seed)
    kernel = rng.standard_normal((12, 10)).astype(np.float32)
    return {
        "target/encoder/mlp/wi/kernel": kernel,
        "target/decoder/norm/scale": rng.standard_normal(12).astype(ml_dtypes.bfloat16),
        "state/param_states/encoder/mlp/wi/kernel/v_row": kernel.mean(1),
        "state/param_states/encoder/mlp/wi/kernel/v": np.zeros(1, np.float32),
        "state/param_states/decoder/norm/scale/v": rng.standard_normal(12).astype(np.float32),
        "state/step": np.asarray(7, np.int32),
    }


def stored(name: str) -> bool:
    """The leaves that T5X would store as arrays."""
    return name.startswith("target/") or name.endswith("scale/v")


def save(
    folder: Path,
    leaves: dict[str, np.ndarray],
    *,
    version: int | None = 3,
    is_stored=stored,
    chunks=None,
    compressor=None,
    placeholders: bool = False,
    prefix: str = "",
    old_path: bool = False,
    zarr_dtype: bool = False,
    to_bytes: bool = False,
    extra=None,
) -> Path:
    """Write a checkpoint; `compressor={}` is none; `extra` are leaves as they stand in the msgpack."""
    folder.mkdir(parents=True)
    tree: dict[str, object] = dict(extra or {})
    for name, array in leaves.items():
        if not is_stored(name):
            tree[name] = array
            continue
        where = prefix + name.replace("/", ".")
        metadata = {"shape": list(array.shape), "chunks": list((chunks or {}).get(name, array.shape))}
        metadata["compressor"] = {"id": "gzip", "level": 1} if compressor is None else compressor or None
        spec = {"driver": "zarr", "dtype": array.dtype.name, "metadata": metadata}
        live = {**spec, "kvstore": {"driver": "file", "path": f"{folder}/{where}/"}}
        ts.open(live, create=True).result().write(array).result()
        stored_spec = {**spec, "kvstore": {"driver": "gfile", "path": f"{where}/"}}
        if old_path:
            stored_spec |= {"kvstore": {"driver": "gcs", "bucket": "t5x-dummy-bucket"}, "path": where}
        if zarr_dtype:
            del stored_spec["dtype"]
            stored_spec["metadata"]["dtype"] = (
                array.dtype.str if array.dtype.kind != "V" else array.dtype.name
            )
        tree[name] = f"PLACEHOLDER://{where}" if placeholders else stored_spec
    content: dict[str, object] = traverse_util.unflatten_dict(tree, sep="/")
    if version is not None:
        content = {"version": version, "optimizer": content}
    pack = (
        serialization.to_bytes
        if to_bytes
        else lambda one: serialization.msgpack_serialize(one, in_place=True)
    )
    (folder / "checkpoint").write_bytes(pack(content))
    return folder


def load(folder: Path) -> dict[str, object]:
    """Leaves by path, read as T5X reads them."""
    content = serialization.msgpack_restore((folder / "checkpoint").read_bytes())
    assert set(content) == {"version", "optimizer"}
    assert content["version"] >= 2
    flat = traverse_util.flatten_dict(
        content["optimizer"],
        keep_empty_nodes=True,
        is_leaf=lambda _key, value: (
            isinstance(value, dict) and {"driver", "kvstore", "metadata"} <= set(value)
        ),
        sep="/",
    )
    return {name: read_leaf(folder, leaf) for name, leaf in flat.items()}


def read_leaf(folder: Path, leaf):
    """A leaf of the msgpack tree: what it is, or the array that its spec names."""
    if not isinstance(leaf, dict) or not leaf:
        return leaf
    spec = ts.Spec(leaf).to_json()
    shape = tuple(spec["metadata"]["shape"])
    del spec["metadata"]["chunks"]
    del spec["metadata"]["compressor"]
    spec["kvstore"]["path"] = f"{folder}/{spec['kvstore']['path']}"
    array = ts.open(spec, open=True).result().read().result()
    assert array.shape == shape
    return array


def assert_same(found: dict, wanted: dict[str, np.ndarray]) -> None:
    """Equal in names, dtypes, shapes and bits."""
    assert set(found) == set(wanted)
    for name, array in wanted.items():
        assert found[name].dtype == array.dtype, name
        assert found[name].shape == array.shape, name
        assert np.asarray(found[name]).tobytes() == array.tobytes(), name
