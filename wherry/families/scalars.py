"""Sorting: which tensors are numbers of the run, which are ignored by a named rule, and the key paths of slots."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from wherry.core.account import IgnoredEntry
from wherry.core.keypath import KeyPath, render
from wherry.core.lazy_dataclass import dataclass
from wherry.core.manifest import Manifest
from wherry.families.templates import replace_macros
from wherry.layout.expr import evaluate, names_in

if TYPE_CHECKING:
    from wherry.families.schema import Family, System


_INDEX = "index"  # what `when` of a rule reads: the first number among what `*` stands for in a key path
_TEXT_ALONE = "the target's layouts are those of the text model alone"


@dataclass(frozen=True, slots=True)
class SortedTensors:
    """The tensors of a checkpoint before they are matched.

    Attributes:
        rest: tensors that must be parameters or moments.
        scalars: name → the key path that it is read from.
        ignored: each with its rule.
        copies: second copies of parameters → the rule, and the parameter.
        apart: tensors of modules that only this system has, towers included, each with its rule.
    """

    rest: tuple[KeyPath, ...]
    scalars: Mapping[str, KeyPath]
    ignored: tuple[IgnoredEntry, ...]
    copies: Mapping[KeyPath, tuple[str, str]]
    apart: tuple[IgnoredEntry, ...] = ()


def scalar_texts(
    system: System, optimizer: str | None, chosen: Mapping[str, str]
) -> dict[str, tuple[str, ...]]:
    """Name → key paths of each number of the run, macros replaced."""
    own = system.optimizers[optimizer].scalars if optimizer else {}
    return {
        name: tuple(replace_macros(text, system, chosen) for text in texts)
        for name, texts in {**system.scalars, **own}.items()
    }


def sort_tensors(
    manifest: Manifest,
    family: Family,
    system: System,
    optimizer: str | None,
    chosen: Mapping[str, str],
    known: Mapping[str, Any],
) -> SortedTensors:
    """Separate the tensors that are neither parameters nor moments."""
    rest: list[KeyPath] = []
    ignored: list[IgnoredEntry] = []
    apart: list[IgnoredEntry] = []
    modules = list(_modules_apart(manifest, system))
    copies: dict[str, dict[int, list[KeyPath]]] = {}
    texts = scalar_texts(system, optimizer, chosen)
    numbers = [(glob(text), key, rank) for key, ranks in texts.items() for rank, text in enumerate(ranks)]
    rules = list(_rules(system, chosen, known))
    own = system.optimizers.get(optimizer or "")
    slots = own.slots.values() if own and own.filler else ()
    fillers = [
        glob(replace_macros(text, system, chosen).replace("@", "**")) for slot in slots for text in slot
    ]
    second = _copy_keys(family, system, chosen)
    copied: dict[KeyPath, tuple[str, str]] = {}
    for path in sorted(manifest.tensors):
        name = render(path)
        scalar = next(((key, rank) for pattern, key, rank in numbers if pattern.fullmatch(name)), None)
        rule = next((one for one in rules if one.is_of(name, known)), None)
        if any(pattern.fullmatch(name) for pattern in fillers) and manifest.tensors[path].shape == (1,):
            ignored.append(IgnoredEntry(path, "filler", "placeholder for a moment that the parameter lacks"))
        elif scalar:
            copies.setdefault(scalar[0], {}).setdefault(scalar[1], []).append(path)
        elif name in second:
            copied[path] = second[name]
        elif module := next((entry for entry in modules if name.startswith(entry.start)), None):
            apart.append(IgnoredEntry(path, f"{system.name}: {module.start}*", module.reason))
        elif rule:
            ignored.append(IgnoredEntry(path, f"{system.name}: {rule.text}", rule.reason))
        elif tower := next((row for row in system.towers if name.startswith(row[0])), None):
            # outside the text model: other systems get it only if their own layouts have it
            start, what = tower
            apart.append(IgnoredEntry(path, f"{system.name}: {start}*", _TEXT_ALONE, what, weights=True))
        else:
            rest.append(path)
    scalars: dict[str, KeyPath] = {}
    for name, ranks in copies.items():
        first, *others = [path for rank in sorted(ranks) for path in ranks[rank]]
        scalars[name] = first
        ignored += [
            IgnoredEntry(path, f"copies of {name}", f"another copy of {render(first)}") for path in others
        ]
    return SortedTensors(tuple(rest), scalars, tuple(ignored), copied, tuple(apart))


def _copy_keys(family: Family, system: System, chosen: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """The printed key paths of second copies that a system stores → the rule, and the parameter."""
    found = {key: (f"{system.name}: {key}", name) for name, keys in system.copies.items() for key in keys}
    for name in system.tied:
        tie = family.parameters[name].tie
        assert tie, f"{system.name} declares a tie of {name}, which is tied to nothing"
        found.update(dict.fromkeys(tied_keys(system, name, chosen), (f"tied {name}", tie)))
    return found


class _Rule(NamedTuple):
    """A rule by which tensors are ignored; `when` is left to decide for each of them if it reads their index."""

    text: str
    reason: str
    when: str | None

    def is_of(self, name: str, known: Mapping[str, Any]) -> bool:
        """Whether a tensor is ignored by it."""
        found = _glob_parts(self.text).fullmatch(name)
        if found is None or self.when is None:
            return found is not None
        number = next((int(part) for part in found.groups() if re.fullmatch(r"\d{1,18}", part)), None)
        return evaluate(self.when, {**known, _INDEX: number}) is True


def _rules(system: System, chosen: Mapping[str, str], known: Mapping[str, Any]) -> Iterator[_Rule]:
    """The rules of a system that hold for a checkpoint, macros replaced."""
    for pattern, reason, when in system.ignore:
        of_one = _INDEX in names_in(when)
        if of_one or evaluate(when, known) is True:
            yield _Rule(replace_macros(pattern, system, chosen), reason, when if of_one else None)


class _Module(NamedTuple):
    start: str
    reason: str


def _modules_apart(manifest: Manifest, system: System) -> Iterator[_Module]:
    """The beginnings of the names of modules that only this system has."""
    for start, mark, reason in system.apart:
        marked = glob(start + mark)
        for path in manifest.tensors:
            name = render(path)
            if marked.fullmatch(name):
                yield _Module(name.removesuffix(mark), reason)


def tied_keys(system: System, parameter: str, chosen: Mapping[str, str]) -> tuple[str, ...]:
    """The key paths of the second copy of the parameter that this one is tied to."""
    return tuple(
        replace_macros(slot, system, chosen).replace("@", system.tied[parameter])
        for slot in system.slots["params"]
    )


def concrete_slots(
    system: System, optimizer: str | None, chosen: Mapping[str, str], manifest: Manifest
) -> dict[str, tuple[str, ...]]:
    """Slot → key paths with @, every * replaced by the text at its place in this checkpoint."""
    own = system.optimizers[optimizer].slots if optimizer else {}
    return {
        slot: tuple(
            concrete
            for text in texts
            for concrete in _concrete(replace_macros(text, system, chosen), manifest.tensors)
        )
        for slot, texts in {**system.slots, **own}.items()
    }


def _concrete(text: str, paths: Iterable[KeyPath]) -> list[str]:
    if "*" not in text:
        return [text]
    before, after = text.split("@")
    pattern = re.compile("(" + glob(before).pattern + ").+" + glob(after).pattern)
    return sorted({found[1] + "@" + after for path in paths if (found := pattern.fullmatch(render(path)))})


@cache
def glob(text: str) -> re.Pattern[str]:
    """A pattern of printed key paths: `*` stands for anything in one part, `**` for anything."""
    return _compile(text, {"**": ".*", "*": "[^/]*"})


@cache
def _glob_parts(text: str) -> re.Pattern[str]:
    """The same pattern, with a group for what each `*` stands for."""
    return _compile(text, {"**": ".*", "*": "([^/]*)"})


def _compile(text: str, words: Mapping[str, str]) -> re.Pattern[str]:
    return re.compile("".join(words.get(part, re.escape(part)) for part in re.split(r"(\*\*?)", text)))
