"""Limits of metadata: how much memory and time the files of a checkpoint may take before anything is known of them.

The length of a file says little about what it becomes: three bytes of JSON are an object of 64 bytes, a kilobyte of
zstd is a megabyte of keys. So readers count what they make (entries, values, text), and refuse a file before it takes
300 MB or 5 s. The largest models of today have 210,000 tensors (Kimi K2 with three tensors per expert).
`WHERRY_LIMITS` multiplies all limits, for larger checkpoints of a known origin.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from wherry.errors import HostileError, UsageError

FACTOR = "WHERRY_LIMITS"
MOST_TENSORS = 250_000  # of one file or folder
MOST_CHUNKS = 1_000_000  # stored pieces of all arrays of one checkpoint
MOST_ENTRIES = 250_000  # files and folders directly in one folder
MOST_NAME_TEXT = 32 << 20  # characters of all names of one file
_MOST_FACTOR = 1_000


class JsonLimits(NamedTuple):
    """Limits of one JSON document.

    Attributes:
        nbytes: bytes of the text.
        nodes: values, keys included, that are in memory at the same time.
        depth: nested arrays and objects.
        rows: entries of arrays and objects that are read one by one.
    """

    nbytes: int = 64 << 20
    nodes: int = 1 << 20
    depth: int = 200
    rows: int = MOST_TENSORS


DOCUMENT = JsonLimits()
SMALL = JsonLimits(nbytes=16 << 20, nodes=1 << 18)
LARGE = JsonLimits(nbytes=256 << 20)


def factor() -> float:
    """The factor by which the user multiplies all limits.

    Raises:
        UsageError: `WHERRY_LIMITS` is not a number of at least 1.
    """
    text = os.environ.get(FACTOR, "1")
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 1 <= found <= _MOST_FACTOR:  # not infinity
        raise UsageError(
            f"invalid value for {FACTOR}: {text!r}; expected a number from 1 to {_MOST_FACTOR}",
            cure=f"unset {FACTOR}",
        )
    return found


def scale_limit(limit: int) -> int:
    """A limit, multiplied by the factor of the user."""
    return int(limit * factor())


def larger_factor() -> str:
    """A factor that raises the limits further."""
    return f"{min(4 * factor(), _MOST_FACTOR):g}"


def exceeds(count: int, limit: int) -> bool:
    """Whether a count exceeds a limit; the factor of the user, which is never below 1, is looked up only if it may."""
    return count > limit and count > scale_limit(limit)


def beyond(what: str, limit: int, unit: str, *, uri: str | None = None) -> HostileError:
    """The error for metadata that exceeds a limit, for example `… exceeds the limit of 250,000 tensors`."""
    return HostileError(
        f"{what} exceeds the limit of {limit:,} {unit}",
        uri=uri,
        cure=f"do not use this checkpoint; if you trust its origin, set {FACTOR}={larger_factor()} to raise all limits "
        "of metadata",
    )
