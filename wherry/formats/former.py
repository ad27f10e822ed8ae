"""Deprecated protocols, kept for plug-ins that were written for earlier releases; they will be removed in 0.2.

The engine does not use them: a reader declares with `access` how its bytes can be read, and a reader without `access`
is adapted by `formats.reader.with_access`.
"""

from __future__ import annotations

import types
from functools import cache
from typing import Any, Protocol, runtime_checkable

# Module → protocol → its methods.
_PROTOCOLS: dict[str, dict[str, tuple[str, ...]]] = {
    "wherry.formats.format": {"StreamingReader": ("held", "stream")},
    "wherry.formats.reader": {
        "FillingReader": ("fill", "overhead"), "RegionReader": ("cheap", "region"), "PlacingWriter": ("place",),
    },
    "wherry.formats.detect": {"ReckoningReader": ("shortfall",)},
}  # fmt: skip


@cache
def former(module: str, name: str) -> Any:
    """The deprecated protocol that a module had under a name.

    Raises:
        AttributeError: the module never had a protocol of this name.
    """
    methods = _PROTOCOLS[module].get(name)
    if methods is None:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    empty = dict.fromkeys(methods, _empty)
    return runtime_checkable(types.new_class(name, (Protocol,), {}, lambda body: body.update(empty)))


def _empty(*_given: Any) -> None:
    """A method of a protocol."""
