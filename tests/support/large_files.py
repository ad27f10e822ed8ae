"""What tests of regions share: a model with a tensor of several moves, jobs of it, and what one process makes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

import wherry
from wherry.core.request import LayoutRequest, TargetRequest, convert_request
from wherry.workers.job import split

MB = 1_000_000
SHAPES = {
    "a.big": (3001, 1500),  # 18 MB in moves of 8 MiB, which end where regions do not
    "b.odd": (37, 11),
    "c.scalar": (),
    **{f"d.{n}.w": (70_001,) for n in range(8)},
    "e.empty": (0, 4),
    **{f"f.{n}.small": (n + 1,) for n in range(40)},
}


def saved(path):
    """The arrays of the model, which are saved to a path."""
    random = np.random.default_rng(0)
    arrays = {name: random.standard_normal(shape).astype("f4") for name, shape in SHAPES.items()}
    save_file(arrays, path)
    return arrays


def job_of(source, target, to="safetensors", unit=4 * MB, **more):
    """A job of six units, of which each makes a region."""
    targets = [TargetRequest(str(target), to, layout=LayoutRequest("none"))]
    return split(convert_request(str(source), targets, lineage=False, **more), unit)


def alone(source, tmp_path, to="safetensors"):
    """The receipt of a conversion by one process, and the large file that it makes."""
    receipt = wherry.convert(source, tmp_path / "alone", to=to, family="none", lineage=False)
    return receipt, large_file(tmp_path / "alone")


def large_file(target):
    """The largest file of a target."""
    place = Path(target)
    files = [place] if place.is_file() else [one for one in place.rglob("*") if one.is_file()]
    return max(files, key=lambda one: one.stat().st_size)


def read_back(path, to):
    """The arrays of a target, by the library of its format."""
    if to == "safetensors":
        from safetensors.numpy import load_file

        return load_file(path)
    if to == "npz":
        return dict(np.load(path))
    if to == "torch-zip":
        import torch

        return {name: one.numpy() for name, one in torch.load(path, weights_only=True).items()}
    import flax.serialization

    return flax.serialization.msgpack_restore(Path(path).read_bytes())
