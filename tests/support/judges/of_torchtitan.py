"""torchtitan computes, in float32: see `tests/support/oracles/torchtitan_judge.py`."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from serving import serve

if TYPE_CHECKING:
    import numpy as np

# By its path: folders beside it have modules with the names of libraries.
_FILE = Path(__file__).parents[1] / "oracles" / "torchtitan_judge.py"


def main() -> None:
    spec = importlib.util.spec_from_file_location("torchtitan_judge", _FILE)
    assert spec is not None
    assert spec.loader is not None
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    program.start()

    def compute(job: dict[str, Any], tokens: np.ndarray) -> np.ndarray:
        config, biased = f"{job['folder']}/torchtitan_config.json", job["label"] == "deepseek_v3"
        model, _adapter = program.loaded(config, job["folder"], biased=biased)
        return program.computed(model, torch.from_numpy(tokens)).double().numpy()

    serve(compute)


main()
