"""The peers of T5X and PaxML: the script that people write, which loads with tensorstore and transposes with numpy.

All reads are started at once and awaited in turn, as in T5X's own loader, so tensorstore decodes with all cores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.files import make_durable

if TYPE_CHECKING:
    import numpy as np

_STACK = ".x_layers_0."
# Name's end → order of PaxML's axes in MaxText; of everything else in the stack, the layer becomes the second axis.
_ORDERS = {
    "logits_ffn.linear.w": (1, 0),
    "combined_qkv.w": (2, 0, 1, 3, 4),
    "post.w": (2, 0, 3, 1),
}


def t5x_to_huggingface(source: str, target: str) -> Callable[[], None]:
    """Read every array, transpose the kernels as torch has them, save the whole; names stay as they are."""
    import numpy as np
    from safetensors.numpy import save_file

    def run() -> None:
        tensors = {
            name: np.ascontiguousarray(array.T) if name.endswith((".kernel", ".rel_embedding")) else array
            for name, array in _arrays(Path(source))
        }
        save_file(tensors, target)
        make_durable(Path(target))

    return run


def paxml_to_maxtext(source: str, target: str) -> Callable[[], None]:
    """Read every array, move its axes to MaxText's places, save the whole with StandardCheckpointer."""
    import numpy as np
    import orbax.checkpoint as ocp

    def run() -> None:
        (state,) = Path(source).glob("checkpoint_*/state")
        tree = {name: np.ascontiguousarray(_move_array(name, array)) for name, array in _arrays(state)}
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(Path(target).resolve(), tree)
            checkpointer.wait_until_finished()
        make_durable(Path(target))

    return run


def _move_array(name: str, array: np.ndarray) -> np.ndarray:
    import numpy as np

    for end, order in _ORDERS.items():
        if name.endswith(end):
            return array.transpose(order)
    return np.moveaxis(array, 0, 1) if _STACK in name else array


def _arrays(folder: Path) -> Iterator[tuple[str, np.ndarray]]:
    import tensorstore as ts

    names = [path.parent.name for path in sorted(folder.glob("*/.zarray"))]
    specs = [{"driver": "zarr", "kvstore": {"driver": "file", "path": f"{folder / name}/"}} for name in names]
    opened = [ts.open(spec, open=True) for spec in specs]
    reads = [store.result().read() for store in opened]
    while reads:
        yield names.pop(0), reads.pop(0).result()
