"""Makes the checkpoints of the rows: many small tensors, so that calls count and not bytes.

safetensors and GGUF are written here, byte by byte; the others are conversions of the first by the wherry of this
checkout, which tests hold against the libraries of their systems.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.checkouts.rows import SOURCE

if TYPE_CHECKING:
    from benchmarks.checkouts.rows import Container

_SIDE, _ITEM = 8, 4
_EACH = _SIDE * _SIDE * _ITEM
_KINDS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "norm")
_SHARD = "200KB"


def make_input(
    container: Container, tensors: int, folder: Path, convert: Callable[[Path, Path, Container], None]
) -> Path:
    """The checkpoint of a container with so many tensors, made once.

    Args:
        container: what it is stored in.
        tensors: how many there are.
        folder: where checkpoints lie.
        convert: converts the first path to the second.
    """
    path = folder / f"{container.format}-{tensors}" / container.file
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    if container == SOURCE:
        _write_safetensors(path, tensors)
    elif container.format == "gguf":
        _write_gguf(path, tensors)
    else:
        convert(make_input(SOURCE, tensors, folder, convert), path, container)
    return path


def options_of(source: Container, target: Container) -> dict[str, str]:
    """The options with which a container is written from another."""
    options = {} if source.split == target.split else {"split" if target.split else "join": "."}
    return options | ({"max_shard_size": _SHARD} if target.format == "huggingface" else {})


def family_of(container: Container) -> str | None:
    """The family that is stated for a target: the names are those of no model of Hugging Face."""
    return "none" if container.format == "huggingface" else None


def tensor_names(count: int) -> list[str]:
    """Names as those of a model; T5X wants them below `params`."""
    width = len(_KINDS)
    return [f"params.layers_{at // width}.{_KINDS[at % width]}.kernel" for at in range(count)]


def _values(count: int) -> bytes:
    return b"".join(struct.pack("<f", number) * (_SIDE * _SIDE) for number in range(count))


def _write_safetensors(path: Path, count: int) -> None:
    header = {
        name: {"dtype": "F32", "shape": [_SIDE, _SIDE], "data_offsets": [at * _EACH, (at + 1) * _EACH]}
        for at, name in enumerate(tensor_names(count))
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + _values(count))


def _write_gguf(path: Path, count: int) -> None:
    """Version 3 of GGUF, after https://github.com/ggml-org/ggml/blob/master/docs/gguf.md."""
    string, alignment = 8, 32
    key = b"general.architecture"
    head = b"GGUF" + struct.pack("<IQQ", 3, count, 1)
    head += struct.pack("<Q", len(key)) + key + struct.pack("<IQ", string, 5) + b"llama"
    rows = [
        struct.pack("<Q", len(name)) + name + struct.pack("<IQQIQ", 2, _SIDE, _SIDE, 0, at * _EACH)
        for at, name in enumerate(name.encode() for name in tensor_names(count))
    ]
    head += b"".join(rows)
    path.write_bytes(head + bytes(-len(head) % alignment) + _values(count))
