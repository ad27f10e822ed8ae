"""Imports the modules of every format: named to `tests.support.warm`, its forks need not import them."""

from __future__ import annotations

from wherry.formats.registry import formats

list(formats().values())
