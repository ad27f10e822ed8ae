"""torchtitan computes, in float32: see `tests/support/oracles/torchtitan_judge.py`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from serving import module_of, serve

if TYPE_CHECKING:
    import numpy as np

_FILE = Path(__file__).parents[1] / "oracles" / "torchtitan_judge.py"


def main() -> None:
    program = module_of(_FILE)
    program.start()

    def compute(job: dict[str, Any], tokens: np.ndarray) -> np.ndarray:
        config, biased = f"{job['folder']}/torchtitan_config.json", job["label"] == "deepseek_v3"
        model, _adapter = program.loaded(config, job["folder"], biased=biased)
        return program.computed(model, torch.from_numpy(tokens)).double().numpy()

    serve(compute)


main()
