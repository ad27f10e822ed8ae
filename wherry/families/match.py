"""Matching: the templates that match each tensor's key path. If several match, sizes decide later."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from wherry.layout.layout import skeleton, skeletons

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping

    from wherry.core.keypath import KeyPath
    from wherry.core.tensorspec import TensorSpec
    from wherry.families.templates import Template


@dataclass(frozen=True, slots=True)
class Match:
    """A tensor that matches a template.

    Attributes:
        spec: the tensor.
        template: the template.
        numbers: at each index of the template's key path.
    """

    spec: TensorSpec
    template: Template
    numbers: tuple[int, ...]

    @property
    def form(self) -> Hashable:
        """The same for tensors that differ only in their numbers."""
        return id(self.template), self.spec.shape, self.spec.axes


@dataclass(frozen=True, slots=True)
class FamilyMatch:
    """The result of matching key paths.

    Attributes:
        found: tensor → the templates that match it.
        unmatched: tensors that match no template.
    """

    found: Mapping[KeyPath, tuple[Match, ...]]
    unmatched: tuple[KeyPath, ...]


def match_tensors(specs: Iterable[TensorSpec], templates: Iterable[Template]) -> FamilyMatch:
    """Find the templates of every tensor."""
    index: defaultdict[str, list[Template]] = defaultdict(list)
    for template in templates:
        for shape in set(skeletons(template.layouts[0])):
            index[shape].append(template)
    found: dict[KeyPath, tuple[Match, ...]] = {}
    unmatched: list[KeyPath] = []
    for spec in specs:
        matches = tuple(
            [
                Match(spec, template, numbers)
                for template in index.get(skeleton(spec.path), ())
                if (numbers := template.layouts[0].match(spec.path)) is not None
            ]
        )
        if matches:
            found[spec.path] = matches
        else:
            unmatched.append(spec.path)
    return FamilyMatch(found, tuple(unmatched))
