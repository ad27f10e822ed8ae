"""Deprecated alias of `wherry.formats.format`, for plug-ins of the entry point group `wherry.formats`; until 0.2."""

from __future__ import annotations

import warnings

from wherry.formats import format as _format

warnings.warn("import wherry.formats.format instead of wherry.format", DeprecationWarning, stacklevel=2)


def __getattr__(name: str) -> object:
    """Return an attribute of `wherry.formats.format`."""
    return getattr(_format, name)
