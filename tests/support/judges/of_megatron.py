"""Megatron-Core computes: see `tests/support/megatron_program.py`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from serving import module_of, serve

if TYPE_CHECKING:
    import numpy as np

_FILE = Path(__file__).parents[1] / "megatron_program.py"


def main() -> None:
    program = module_of(_FILE)
    torch.set_num_threads(1)
    program.start()

    def compute(job: dict[str, Any], tokens: np.ndarray) -> np.ndarray:
        ids = torch.from_numpy(tokens)
        return program.computed(program.loaded(job["folder"]), ids).double().numpy()

    serve(compute)


main()
