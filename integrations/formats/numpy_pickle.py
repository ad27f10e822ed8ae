"""Pickles of nested numpy arrays: Flax and Haiku parameters, trainer states, any tree saved with `pickle.dump`.

The files have no standard name and any ending (`.pkl`, `.pickle`, `.ckpt`, `.bin`). Python's own unpickler would
execute them; wherry interprets them without executing anything, with numpy's few globals as the exact allow-list. A
file is detected by its first 4 KiB: a pickle that refers there to numpy's array functions, or to a global that is not
allowed (which opening then refuses by name), or to no global yet. A pickle that ends within these bytes and refers to
neither is not a checkpoint. `containers/pickle/numpy_objects.py` has the facts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from wherry.core.detection import Detection, Evidence
from wherry.core.keypath import KeyPath, render
from wherry.core.tensorspec import TensorSpec
from wherry.errors import CorruptError, NotACheckpointError
from wherry.formats.format import HEAD_BYTES, Format, Glimpse, Holds, Opened, Signs
from wherry.integrations.containers.flat.strides import StridedReader
from wherry.integrations.containers.pickle.machine import load
from wherry.integrations.containers.pickle.numpy_objects import NUMPY_RULES, PickledArray, placed_array
from wherry.integrations.containers.pickle.survey import Stream, one_stream
from wherry.integrations.containers.pickle.tree import PickleTree, plant
from wherry.integrations.containers.pickle.values import open_for_walk
from wherry.integrations.containers.safetensors.header import plausible
from wherry.integrations.containers.torch.archive import is_legacy
from wherry.layout.tree_reading import read_tree
from wherry.store.location import Location

_MARKS = tuple(bytes([0x80, protocol]) for protocol in range(2, 6))
_TEXT_STARTS = tuple(bytes([opcode]) for opcode in b"(cid]}l")  # protocols 0 and 1 have no magic
_STEPS = ("step", "global_step", "iteration")


def _detect(glimpse: Glimpse) -> Detection | None:
    head = glimpse.head
    binary = head.startswith(_MARKS)
    if not (binary or head.startswith(_TEXT_STARTS)) or is_legacy(head) or plausible(head, glimpse.size):
        return None  # no pickle has the zeros of a header's length behind its magic, and then a brace
    stream, _ = one_stream(head, glimpse.location.name)
    if not (_may_be(stream, glimpse) if binary else _is_text_pickle(stream, glimpse)):
        return None
    protocol = head[1] if binary else 0
    names = [wanted.name for wanted in stream.globals]
    wants = f"refers to {', '.join(names[:3])}" if names else "refers to no globals in its first bytes"
    seen = f"a pickle of protocol {protocol} that {wants}"
    return glimpse.detected("numpy-pickle", f"pickle protocol {protocol}", "python pickle", seen)


def _wants_arrays(stream: Stream) -> bool:
    return any(wanted.name.startswith(("numpy.", "jax")) for wanted in stream.globals)


def _wants_unknown(stream: Stream, glimpse: Glimpse) -> bool:
    return any(not wanted.known and wanted.name not in glimpse.location.opaque for wanted in stream.globals)


def _may_be(stream: Stream, glimpse: Glimpse) -> bool:
    """Whether a pickle may be a checkpoint: it refers to arrays or unknown globals, is invalid or incomplete."""
    broken = stream.error is not None
    return broken or _wants_arrays(stream) or _wants_unknown(stream, glimpse) or glimpse.size > HEAD_BYTES


def _is_text_pickle(stream: Stream, glimpse: Glimpse) -> bool:
    """Whether bytes without a magic are a pickle of protocol 0 or 1: with arrays, or complete with unknown globals."""
    return _wants_arrays(stream) or (stream.error is None and _wants_unknown(stream, glimpse))


def _open(location: Location, detection: Detection) -> Opened:
    entry = location.present()
    with open_for_walk(location) as data:
        root, end = load(data, replace(NUMPY_RULES, opaque=location.opaque), location.uri)
        if end != len(data):
            raise CorruptError(
                f"{len(data) - end} trailing bytes after the pickle",
                uri=location.uri,
                cure="restore the file",
            )
    tree = plant(root, end, PickledArray, location.uri)
    arrays: dict[KeyPath, PickledArray] = tree.tensors
    if not arrays:
        raise NotACheckpointError(
            "the pickle contains no arrays", uri=location.uri, cure="pass the file with the weights"
        )
    placed = {path: placed_array(location, array) for path, array in arrays.items()}
    step = _step(tree) if detection.step is None else detection.step
    manifest = tree.manifest(_specs(arrays), step)
    tops = {path[0] for path in (*manifest.tensors, *manifest.values) if path}
    # Training scripts pickle a step next to the parameters.
    is_state = len(tops) > 1 and not tops.isdisjoint(_STEPS)
    manifest = replace(manifest, kind="train-state" if is_state else read_tree(manifest).whole)
    seen = Evidence(location.name, f"{len(placed)} arrays, {len(tree.values)} other values")
    precise = replace(detection, kind=manifest.kind, step=manifest.step).seen(seen)
    return Opened(precise, manifest, StridedReader(location, placed, (entry,)))


def _specs(arrays: dict[KeyPath, PickledArray]) -> dict[KeyPath, TensorSpec]:
    first: dict[int, KeyPath] = {}
    specs: dict[KeyPath, TensorSpec] = {}
    for path, array in arrays.items():
        same = first.setdefault(id(array), path)
        tags = None if same == path else {"shares": render(same)}
        specs[path] = TensorSpec(path, array.shape, array.dtype, tags=tags)
    return specs


def _step(tree: PickleTree) -> int | None:
    """The training step, if a number at the top level states it."""
    for name in _STEPS:
        said: Any = tree.values.get((name,))
        array = tree.tensors.get((name,))
        if isinstance(array, PickledArray) and array.shape == () and "int" in array.dtype:
            order = "big" if array.big_endian else "little"
            said = int.from_bytes(array.data, order, signed=True) if isinstance(array.data, bytes) else None
        if type(said) is int:
            return said
    return None


FORMATS = (
    Format(
        name="numpy-pickle",
        title="Pickle of NumPy arrays",
        detect=_detect,
        signs=Signs(head=rb"[\x80(cid\]}l]"),
        open=_open,
        holds=Holds(dtypes=frozenset()),
        single_file=True,
        pickle_globals=lambda: NUMPY_RULES.allowed,
    ),
)
