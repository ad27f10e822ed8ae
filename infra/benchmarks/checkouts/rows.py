"""The rows: each container, small and large, is detected, planned, converted to safetensors, and written."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

SMALL = 24  # tensors


class Container(NamedTuple):
    """A container as the rows know it.

    Attributes:
        name: as the report prints it.
        format: the format of wherry.
        file: name of the file or folder.
        split: whether names become key paths.
        written: whether wherry writes it.
        most: tensors at most; a file for each tensor costs the file system more than wherry.
    """

    name: str
    format: str
    file: str
    split: bool = False
    written: bool = True
    most: int = 1 << 30


CONTAINERS = (
    Container("safetensors", "safetensors", "model.safetensors"),
    Container("Hugging Face shards", "huggingface", "model"),
    Container("torch zip", "torch-zip", "model.pt"),
    Container("DCP", "dcp", "step"),
    Container("Orbax", "orbax", "step", split=True),
    Container("Flax msgpack", "flax-msgpack", "model.msgpack", split=True),
    Container("T5X", "t5x-legacy", "checkpoint_1", split=True, most=5_000),
    Container("npz", "npz", "model.npz"),
    Container("GGUF", "gguf", "model.gguf", written=False),
)
SOURCE = CONTAINERS[0]


class Row(NamedTuple):
    """One row.

    Attributes:
        operation: `detect`, `plan`, `convert` (to safetensors; safetensors to DCP) or `write` (safetensors to it).
        container: what it is done with.
        tensors: how many there are.
    """

    operation: str
    container: Container
    tensors: int

    @property
    def name(self) -> str:
        """As `--rows` selects it and the table prints it."""
        return f"{self.operation} {self.container.name}, {self.tensors:,} tensors"

    @property
    def source(self) -> Container:
        """What is read."""
        return SOURCE if self.operation == "write" else self.container

    @property
    def target(self) -> Container:
        """What is written."""
        if self.operation == "write":
            return self.container
        return SOURCE if self.container != SOURCE else CONTAINERS[3]

    @property
    def repeats(self) -> int:
        """Calls a round: as many as take a few tenths of a second."""
        if self.tensors > SMALL:
            return 1
        return {"detect": 50, "plan": 20}.get(self.operation, 3)


def rows(tensors: int) -> Iterator[Row]:
    """All rows.

    Args:
        tensors: of a large checkpoint.
    """
    for count in (SMALL, tensors):
        for container in CONTAINERS:
            for operation in ("detect", "plan", "convert", "write"):
                if operation != "write" or (container.written and container != SOURCE):
                    yield Row(operation, container, min(count, container.most))
