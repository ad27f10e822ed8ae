"""Train, export every hundred steps without waiting for the storage, and resume from the newest checkpoint.

python examples/export_while_training.py FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

import wherry


def steps(state: dict[str, Any], first: int, last: int, folder: Path) -> dict[str, Any]:
    """A few steps of gradient descent on a line; each hundredth step is exported in the background."""
    generator = np.random.default_rng(first)
    exports = []
    for step in range(first + 1, last + 1):
        x = generator.normal(size=(32, 4)).astype(np.float32)
        error = x @ state["params"]["w"] + state["params"]["b"] - x.sum(axis=1)
        state["params"]["w"] -= 0.05 * x.T @ error / len(x)
        state["params"]["b"] -= 0.05 * error.mean()
        if step % 100 == 0:
            exports.append(wherry.export(state, folder / str(step), to="orbax", step=step))
    for one in exports:
        one.result()  # raises what went wrong
    return state


def main(folder: str) -> None:
    """Train twice: from the beginning, and from what the first run has left."""
    place = Path(folder)
    fresh = {"params": {"w": np.zeros(4, np.float32), "b": np.zeros((), np.float32)}}
    steps(fresh, 0, 200, place)
    newest = max(int(path.name) for path in place.iterdir() if path.name.isdigit())
    resumed = wherry.restore(place / str(newest), into=fresh).state
    trained = steps(resumed, newest, newest + 100, place)
    print(f"resumed at step {newest}; weights are now {np.round(trained['params']['w'], 2).tolist()}")


if __name__ == "__main__":
    main(*sys.argv[1:])
