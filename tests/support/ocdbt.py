"""OCDBT databases as tensorstore writes them for Levanter and jax.experimental.array_serialization."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np


def write(folder: Path, arrays: Mapping[str, np.ndarray], driver: str = "zarr3") -> Path:
    """A database of arrays by their names."""
    import tensorstore as ts

    folder.mkdir(parents=True, exist_ok=True)
    field = {"zarr3": "data_type", "zarr": "dtype"}[driver]
    for name, array in arrays.items():
        words = array.dtype.name if driver == "zarr3" else array.dtype.str
        spec = {
            "driver": driver,
            "kvstore": {"driver": "ocdbt", "base": f"file://{folder}/", "path": f"{name}/"},
            "metadata": {"shape": list(array.shape), field: words},
            "create": True,
        }
        ts.open(spec).result().write(array).result()
    return folder
