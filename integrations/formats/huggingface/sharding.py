"""Distributes tensors over the files of a new Hugging Face folder, and builds its index.

A tensor's name in the index is its key path joined by `/`. As in transformers, files are filled in order up to
`max_shard_size`; a larger tensor gets a separate file. Names are sorted with digits compared as numbers, so that layer
2 comes before layer 10. File names and index are those of `save_pretrained`, the index with sorted keys.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from wherry.integrations.containers.flat.pack import stored_size
from wherry.integrations.formats.huggingface.weights import CONTAINER_WORDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from wherry.core.tensorspec import TensorSpec
    from wherry.integrations.formats.huggingface.weights import Container

_DIGITS = re.compile(r"(\d+)")


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """The files of a checkpoint to write.

    Attributes:
        files: file name → its tensors.
        index_name: name of the index; None for a single file.
        container: of the files.
    """

    files: dict[str, list[TensorSpec]]
    index_name: str | None
    container: Container = "safetensors"

    @property
    def version(self) -> str:
        """The format version of the checkpoint to write."""
        return f"{'sharded' if self.index_name else 'single'} {CONTAINER_WORDS[self.container]}"

    @property
    def index(self) -> tuple[str, Callable[[], bytes]] | None:
        """Name of the index, and what computes its contents."""
        return (self.index_name, partial(_index, self.files)) if self.index_name else None


def spread_tensors(
    tensors: Iterable[TensorSpec], most: int, stem: str, container: Container = "safetensors"
) -> ShardPlan:
    """Distribute tensors over files.

    Args:
        tensors: the tensors.
        most: bytes of tensors in one file, unless a single tensor is larger.
        stem: first part of the file names.
        container: their ending.
    """
    groups: list[list[TensorSpec]] = [[]]
    filled = 0
    for spec in sorted(tensors, key=lambda spec: natural_key(_name(spec))):
        size = stored_size(spec)
        if groups[-1] and filled + size > most:
            groups.append([])
            filled = 0
        groups[-1].append(spec)
        filled += size
    if len(groups) == 1:
        return ShardPlan({f"{stem}.{container}": groups[0]}, None, container)
    count = len(groups)
    files = {
        f"{stem}-{number:05d}-of-{count:05d}.{container}": group for number, group in enumerate(groups, 1)
    }
    return ShardPlan(files, f"{stem}.{container}.index.json", container)


def _name(spec: TensorSpec) -> str:
    return "/".join(spec.path)


def natural_key(name: str) -> list[tuple[int, str]]:
    """A sort key in which runs of digits compare as numbers."""
    parts = _DIGITS.split(name)
    return [
        (len(part.lstrip("0")), part.lstrip("0")) if at % 2 else (0, part) for at, part in enumerate(parts)
    ]


def _index(files: dict[str, list[TensorSpec]]) -> bytes:
    specs = [spec for group in files.values() for spec in group]
    total = {
        "total_parameters": sum(spec.size for spec in specs),
        "total_size": sum(stored_size(spec) for spec in specs),
    }
    weight_map = {_name(spec): name for name, group in files.items() for spec in group}
    text = json.dumps(
        {"metadata": total, "weight_map": weight_map}, indent=2, sort_keys=True, ensure_ascii=False
    )
    return f"{text}\n".encode()
