"""names: one concept has one name on the command line, in `wherry.toml`, in Python, in forms and in receipts.

A name is written with `_`, on the command line with `-` (`as_step`, `--as-step`). Other names for a concept are refused
everywhere, with the name as the cure. docs/reference/names.md is made of this table; `tests/house/test_names.py`
compares it with all commands, sections, functions and forms.
"""

from __future__ import annotations

from collections.abc import Collection

from wherry.core.lazy_dataclass import dataclass


@dataclass(frozen=True, slots=True)
class Concept:
    """Something that a user states by name.

    Attributes:
        name: its name.
        meaning: what is stated.
        refused: other names for it, which nothing takes.
        hints: names of other concepts that stand for it where only this one can be meant.
        exceptions: where it has another name still: door (`command line`, `wherry.toml`, `Python`, `form`) and name.
    """

    name: str
    meaning: str
    refused: tuple[str, ...]
    hints: tuple[str, ...] = ()
    exceptions: tuple[tuple[str, str], ...] = ()

    def written(self, door: str) -> str:
        """The name as one interface spells it (command line, Python, or a file)."""
        plain = f"--{self.name.replace('_', '-')}" if door == "command line" else self.name
        return dict(self.exceptions).get(door, plain)


CONCEPTS = (
    Concept("format", "format of the checkpoint that is read", ("from", "source_format")),
    Concept(
        "to", "format of the checkpoint that is written", ("target_format",), hints=("format",),
        exceptions=(("wherry.toml", "format"),),
    ),
    Concept(
        "options", "options of the target's format and layout, and facts of the model", ("option", "set"),
        exceptions=(("command line", "--set"),),
    ),
    Concept("allow_opaque", "class whose objects in pickles are read as opaque values", ("opaque",)),
    Concept("verify", "how a target is read back before its commit", ("read_back", "readback")),
    Concept("level", "level of a verification", (), hints=("verify",)),
    Concept("on", "what makes a conversion, or reads bytes: threads, processes, Dask, Ray", ("engine",)),
    Concept("unit", "size of what one worker writes, or reads, at a time", ("unit_bytes", "unit_size")),
    Concept("model", "registered model in MLflow", ("model_name", "name")),
    Concept("alias", "alias of a model version", ("to_alias",), hints=("to",)),
    Concept("policy", "gates that a promotion must pass", ("gates", "policy_name")),
)  # fmt: skip


def meant_names(name: str, known: Collection[str]) -> list[str]:
    """The names, of those that are known in a place, of the concepts for which another name is used.

    Args:
        name: a name that the place does not take, with `_` or `-`.
        known: the names that it takes, with `_` or `-`.
    """
    plain = name.strip("-_").replace("-", "_")
    names = {one.strip("-_").replace("-", "_"): one for one in known}
    meant = [
        one.strip("-_")
        for concept in CONCEPTS
        if plain in (concept.name, *concept.refused, *concept.hints)
        for one in (concept.name, *dict(concept.exceptions).values())
    ]
    return [names[one] for one in dict.fromkeys(meant) if one in names]
