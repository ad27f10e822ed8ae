"""The names of transformers 5 in memory: of tensors, and as a second form of a family's Hugging Face checkpoints.

transformers 5 keeps a model under other names than those that are published: `mlp.experts.gate_up_proj` holds the
matrices of all experts, ViT's `attention.attention.query` is `attention.q_proj`. The one table of both, by model type,
is `families/tables/transformers_names.toml`. From it follow

    memory_name("vit", "vit.encoder.layer.0.output.dense.weight")    the name of a tensor that is renamed, not merged
    with_memory_names(system, ("qwen3_moe",))                        a system whose form `names` is `saved` or `memory`

A source is in the form that its names show; a target has the published names unless the user asks for others.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from wherry.families.schema import Form, Row

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from wherry.families.schema import System

_TABLE = Path(__file__).parent / "tables" / "transformers_names.toml"
_FORM, _SAVED, _MEMORY = "names", "saved", "memory"
_ABSENT = "-/"  # what stands in a key path that does not exist, see `wherry.families.schema`


@dataclass(frozen=True, slots=True)
class Merge:
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
    merged: tuple[Merge, ...] = ()

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
            tuple(Merge(tuple(saved), memory) for saved, memory in row.get("merged", ())),
        )
        for row in rows
        for kind in row["model_types"]
    }


def memory_name(model_type: object, name: str) -> str:
    """The name in memory of a tensor of a model type, or of one of its modules; experts keep their published names."""
    own = memory_names().get(model_type) if isinstance(model_type, str) else None
    return own.rename(name) if own else name


def with_memory_names(system: System, model_types: Sequence[str]) -> System:
    """A system with both forms of names, if the models of these types have two."""
    own = [memory_names()[kind] for kind in model_types if kind in memory_names()]
    changed = {row: twins for row in system.layouts if (twins := list(_twins(row, system.layouts, own)))}
    if not changed:
        return system
    assert _FORM not in system.forms, system.name
    assert not {_SAVED, _MEMORY} & {*system.macros, *system.stacks}, system.name
    layouts = [replace(row, key=f"<{_SAVED}>{row.key}") if row in changed else row for row in system.layouts]
    layouts += dict.fromkeys(twin for twins in changed.values() for twin in twins)
    return replace(
        system,
        layouts=tuple(layouts),
        forms={**system.forms, _FORM: Form((_SAVED, _MEMORY))},
        macros={
            **system.macros,
            _SAVED: {"by": _FORM, _SAVED: "", _MEMORY: _ABSENT},
            _MEMORY: {"by": _FORM, _SAVED: _ABSENT, _MEMORY: ""},
        },
    )


def _twins(row: Row, rows: Iterable[Row], names: Iterable[MemoryNames]) -> Iterator[Row]:
    """The rows in memory that hold what a row holds; none if its name is the same there."""
    for own in names:
        merged = next((twin for one in own.merged if (twin := _merged(row, rows, one))), None)
        twin = merged or row
        key = own.rename(twin.key)
        if key != row.key:
            yield replace(twin, key=f"<{_MEMORY}>{key}")
            return


def _merged(row: Row, rows: Iterable[Row], merge: Merge) -> Row | None:
    """The row in memory of all that are merged with this one; None if this is none of them."""
    place = next((found for text in merge.saved if (found := _place(row, text))), None)
    if place is None:
        return None
    whole = [one for text in merge.saved for one in rows if _place(one, text) == place]
    assert len(whole) == len(merge.saved), f"{row.key}: of {merge.saved} only {[one.key for one in whole]}"
    assert len({one.words for one in whole}) == 1 == len({len(one.parameters) for one in whole}), row.key
    start, expert = place
    return Row(
        tuple(name for one in whole for name in one.parameters),
        start + merge.memory,
        tuple(f"{expert} {axes}" for one in whole for axes in one.axes),
        along=1 if len(whole) > 1 else 0,
        words=row.words,
    )


def _place(row: Row, end: str) -> tuple[str, str] | None:
    """The start of a row's name and its axis of experts, if the name ends so."""
    before, after = end.split("*")
    found = re.fullmatch(rf"(.*){re.escape(before)}\{{([^{{}}]+)\}}{re.escape(after)}", row.key)
    return (found[1], found[2]) if found else None
