"""What a command waits for before its first result, as one line on a terminal: the model registry of a model URI."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING

from wherry.cli.errors import OneLine

if TYPE_CHECKING:
    from collections.abc import Sequence

_RESOLVER = "wherry.ledger.resolve"  # logs each registry that it asks
_SILENT = {"--json", "--quiet"}


def show_waits(words: Sequence[str]) -> None:
    """Print on the standard error what looking up a model URI waits for; only where a progress bar would be shown."""
    named = any(word.startswith("models:/") for word in words)
    if not named or _SILENT & set(words) or not sys.stderr.isatty():
        return
    log = logging.getLogger(_RESOLVER)
    log.setLevel(logging.INFO)
    handler = logging.StreamHandler()
    handler.setFormatter(OneLine())
    log.addHandler(handler)
