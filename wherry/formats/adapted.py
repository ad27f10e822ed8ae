"""Adapted: a source's tree under the names that a target system gives it, where that knows one way of naming only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from wherry.core.keypath import KeyPath


@dataclass(frozen=True, slots=True)
class Adapted:
    """What `Format.adapt` gives.

    Attributes:
        names: key path in the source → key path in the target, for every tensor, value and empty.
        lists: the target's nodes that are sequences.
        custom: what is added to the manifest's `custom`.
    """

    names: Mapping[KeyPath, KeyPath]
    lists: frozenset[KeyPath]
    custom: Mapping[str, Any]
