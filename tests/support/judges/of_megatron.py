"""Megatron-Core computes: see `tests/support/megatron_program.py`."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from serving import serve

if TYPE_CHECKING:
    import numpy as np

# By its path: the folder that it lies in has modules with the names of libraries.
_FILE = Path(__file__).parents[1] / "megatron_program.py"


def main() -> None:
    spec = importlib.util.spec_from_file_location("megatron_program", _FILE)
    assert spec is not None
    assert spec.loader is not None
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    torch.set_num_threads(1)
    program.start()

    def compute(job: dict[str, Any], tokens: np.ndarray) -> np.ndarray:
        ids = torch.from_numpy(tokens)
        return program.computed(program.loaded(job["folder"]), ids).double().numpy()

    serve(compute)


main()
