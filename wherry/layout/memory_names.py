"""The names of transformers 5 in memory.

transformers 5 keeps a model under other names than those that are published: `mlp.experts.gate_up_proj` holds the
matrices of all experts, ViT's `attention.attention.query` is `attention.q_proj`. `transformers_names.toml` has both, by
model type. Of it families make a second form of their Hugging Face checkpoints (`wherry.families.parse`), and a merge
finds the modules of a base:

    memory_name("vit", "vit.encoder.layer.0.output.dense.weight")    "vit.layers.0.mlp.fc2.weight"
"""

from __future__ import annotations

import re
import tomllib
from functools import cache
from pathlib import Path

from wherry.core.lazy_dataclass import dataclass

_TABLE = Path(__file__).parent / "transformers_names.toml"


@dataclass(frozen=True, slots=True)
class MergedNames:
    """Tensors of one module that are one tensor in memory.

    Attributes:
        saved: the ends of their published names, with * for the number of an expert.
        memory: the end of the name in memory.
    """

    saved: tuple[str, ...]
    memory: str


@dataclass(frozen=True, slots=True)
class MemoryNames:
    """The names in memory of the models of one type.

    Attributes:
        renamed: patterns of a published name with their replacements, which apply in this order.
        merged: what is one tensor in memory.
    """

    renamed: tuple[tuple[re.Pattern[str], str], ...] = ()
    merged: tuple[MergedNames, ...] = ()

    def rename(self, name: str) -> str:
        """The name in memory of a published one; a name that is one in memory does not change."""
        for pattern, replacement in self.renamed:
            name = pattern.sub(replacement, name)
        return name


@cache
def memory_names() -> dict[str, MemoryNames]:
    """Model type → the names in memory, of the types whose names differ."""
    rows = tomllib.loads(_TABLE.read_text(encoding="utf-8"))["models"]
    return {
        kind: MemoryNames(
            tuple((re.compile(pattern), text) for pattern, text in row.get("renamed", ())),
            tuple(MergedNames(tuple(saved), memory) for saved, memory in row.get("merged", ())),
        )
        for row in rows
        for kind in row["model_types"]
    }


def memory_name(model_type: object, name: str) -> str:
    """The name in memory of a tensor of a model type, or of one of its modules; experts keep their published names."""
    own = memory_names().get(model_type) if isinstance(model_type, str) else None
    return own.rename(name) if own else name
