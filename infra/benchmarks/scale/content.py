"""The source: a Hugging Face checkpoint of any size whose tensors are generated on read, from a seed.

A file begins with a real safetensors header. Behind it lies a block of random bytes, again and again, at a phase of its
own in each file. The length of the block is a prime number, so two leaves of 4 MiB of one file are never equal, and a
leaf that lands in the wrong place has another hash. Serving costs no arithmetic: answers are views of the block.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from wherry.core.tensorspec import TensorSpec
from wherry.integrations.containers.safetensors import header
from wherry.integrations.formats.huggingface.weights import spread_tensors

BLOCK = 1_048_583  # bytes; a prime number
_PHASE = 7919  # bytes between the phases of two files
_FILES = 16
_ROWS = 32  # extents are multiples of it


@dataclass(frozen=True, slots=True)
class GeneratedFile:
    """A file whose bytes are generated.

    Attributes:
        head: its first bytes.
        nbytes: its size.
        phase: offset in the block of the first byte after the head.
        block: what is repeated.
    """

    head: bytes
    nbytes: int
    phase: int
    block: memoryview

    @property
    def etag(self) -> str:
        """Names its contents."""
        text = self.head + repr((self.nbytes, self.phase)).encode()
        return f'"{hashlib.md5(text, usedforsecurity=False).hexdigest()}"'

    def pieces(self, start: int, stop: int, most: int) -> Iterator[memoryview]:
        """The bytes of a range, as views.

        Args:
            start: offset of the first byte.
            stop: offset after the last byte.
            most: bytes of a view.
        """
        while start < min(stop, len(self.head)):
            end = min(stop, len(self.head), start + most)
            yield memoryview(self.head)[start:end]
            start = end
        while start < stop:
            at = (start - len(self.head) + self.phase) % BLOCK
            end = min(stop, start + most, start + BLOCK - at)
            yield self.block[at : at + end - start]
            start = end


def block_of(seed: int) -> memoryview:
    """The block of a seed."""
    return memoryview(np.random.Generator(np.random.Philox(seed)).bytes(BLOCK))


def checkpoint(size: int, seed: int = 0, layers: int = 64, files: int = _FILES) -> dict[str, GeneratedFile]:
    """The files of a checkpoint of about a size, by name: layers of four matrices and a vector each.

    Args:
        size: bytes of all tensors.
        seed: of the tensors.
        layers: number of layers.
        files: number of shards, about.
    """
    shapes = _shapes(size, layers)
    specs = [TensorSpec((name,), shape, "bfloat16") for name, shape in shapes.items()]
    plan = spread_tensors(specs, -(-size // files), "model")
    block = block_of(seed)
    found: dict[str, GeneratedFile] = {}
    for number, (name, group) in enumerate(plan.files.items()):
        head = header.build(header.in_order(group), {"format": "pt"})
        nbytes = len(head) + sum(map(header.stored_bytes, group))
        found[name] = GeneratedFile(head, nbytes, number * _PHASE % BLOCK, block)
    assert plan.index is not None, "there are several files"
    index, contents = plan.index
    for name, text in (
        (index, contents()),
        ("config.json", json.dumps({"architectures": ["Generated"]}).encode()),
    ):
        found[name] = GeneratedFile(text, len(text), 0, block)
    return found


def layer_bytes(size: int, layers: int) -> int:
    """Bytes of one layer of a checkpoint of about a size."""
    side = _side(size, layers)
    return 2 * (4 * side + 1) * side


def _side(size: int, layers: int) -> int:
    return max(_ROWS, round(math.sqrt(size / (2 * 4 * layers)) / _ROWS) * _ROWS)


def _shapes(size: int, layers: int) -> dict[str, tuple[int, ...]]:
    """Matrices of which every layer has the same, so that units are alike."""
    side = _side(size, layers)
    names = ("q_proj", "k_proj", "up_proj", "down_proj")
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(layers):
        shapes |= {f"model.layers.{layer}.{name}.weight": (side, side) for name in names}
        shapes[f"model.layers.{layer}.norm.weight"] = (side,)
    return shapes
