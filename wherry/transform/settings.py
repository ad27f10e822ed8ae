"""settings: the owner of each word of `--set`: the target's format, its tree, a transform, or the layout of a family.

The command line, routes and the library resolve the words here, once for all targets. A word that no owner knows is
refused. One that is known, but changes nothing in a conversion, is refused by its plan
(`wherry.converter.plan.require_used`), and its value by its owner.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from wherry.core.lazy_dataclass import dataclass
from wherry.core.request import DEQUANTIZE, GROUP_SIZE, QUANTIZE, SCALES, SCAN
from wherry.cures import Command, Cure
from wherry.errors import UsageError, similar
from wherry.layout.mapping import TREE_OPTIONS

if TYPE_CHECKING:
    from wherry.families.schema import Family
    from wherry.formats.format import Format

TRANSFORMS = frozenset({SCAN, DEQUANTIZE, QUANTIZE, SCALES, GROUP_SIZE})


@dataclass(frozen=True, slots=True)
class TargetSettings:
    """The words of a target and their values, by owner.

    Attributes:
        format: those of the target's format.
        tree: those of every target: how the tree is spelled.
        transform: those of a transform.
        layout: those of a layout, in the spelling of declarations and of JSON: forms, conventions, facts, token ids.
    """

    format: Mapping[str, Any]
    tree: Mapping[str, Any]
    transform: Mapping[str, Any]
    layout: Mapping[str, str]

    @property
    def names(self) -> list[str]:
        """All words."""
        return [*self.format, *self.tree, *self.transform, *self.layout]


def settle(row: Format, options: Mapping[str, Any], family_file: str | None = None) -> TargetSettings:
    """The words of a target by owner.

    Args:
        row: the target format.
        options: the words and their values; library callers may pass True, numbers and tables.
        family_file: a file that declares a family, whose words are known too.

    Raises:
        UsageError: no owner knows a word.
    """
    taken_by([row], options, family_file)
    of_format, tree, transform = (
        {name: options[name] for name in owned if name in options}
        for owned in (row.options, TREE_OPTIONS, TRANSFORMS)
    )
    layout = {
        name: value if isinstance(value, str) else json.dumps(value)
        for name, value in options.items()
        if name not in {*of_format, *tree, *transform}
    }
    return TargetSettings(of_format, tree, transform, layout)


def taken_by(
    rows: Sequence[Format], names: Collection[str], family_file: str | None = None
) -> list[frozenset[str]]:
    """The words that each of several targets takes; families are read only for those that are of nothing else.

    Args:
        rows: the formats of the targets.
        names: the words.
        family_file: a file that declares a family, whose words are known too.

    Raises:
        UsageError: no target takes one.
    """
    own = [frozenset(names) & {*row.options, *TREE_OPTIONS, *TRANSFORMS} for row in rows]
    further = frozenset(names).difference(*own)
    of_layouts = frozenset[str]()
    for known in _words_by_family(family_file) if further else ():
        of_layouts |= known & further
        if of_layouts == further:  # so that no other family is read
            break
    unknown = sorted(further - of_layouts)
    if unknown:
        options = [option for row in rows for option in row.options]
        near = similar(unknown[0], {*options, *TREE_OPTIONS, *layout_options()})
        start = f"did you mean {' or '.join(near)}? " if near else ""
        raise UsageError(
            f"unknown option {', '.join(map(repr, unknown))} for format {' and '.join(row.name for row in rows)}",
            cure=Cure("{}{} lists its options", start, Command("formats", rows[0].name)),
        )
    return [words | of_layouts for words in own]


def layout_options() -> frozenset[str]:
    """All words of layouts and transforms: forms and conventions of all systems, facts, and those of values."""
    return TRANSFORMS.union(*_words_by_family())


def _words_by_family(family_file: str | None = None) -> Iterator[frozenset[str]]:
    """The words of each family, those of the user's first; the family of most models comes next."""
    from wherry.families import families, load_family, load_family_file
    from wherry.families.adapters import ALPHA

    yield frozenset({ALPHA})
    if family_file:
        yield _words(load_family_file(family_file))
    for name in sorted(families(), key=lambda name: (name != "llama", name)):
        yield _words(load_family(name))


def _words(family: Family) -> frozenset[str]:
    systems = [(*one.forms, *one.conventions, *one.write.token_ids) for one in family.systems.values()]
    return frozenset(family.facts).union(*systems)
