"""units: sizes, durations and digests in the forms that people read and write."""

from __future__ import annotations

import math
import re

from wherry.cures import Argument, Cure
from wherry.errors import UsageError

DEFAULT_MEMORY = "128MiB"  # budget of what is in flight
DEFAULT_UNIT = "1GiB"  # what one worker writes, or reads, at a time
_SMALLEST_BUDGET = 1 << 20
_MOST_BITS = 256  # of a whole number that is printed; str() refuses thousands of digits
_FACTORS = {
    "": 1,
    "b": 1,
    **{unit: 1000**power for power, unit in enumerate(("kb", "mb", "gb", "tb"), 1)},
    **{unit: 1024**power for power, unit in enumerate(("kib", "mib", "gib", "tib"), 1)},
    **{unit: 1024**power for power, unit in enumerate(("k", "m", "g", "t"), 1)},
}
# int() refuses thousands of digits, and float() makes infinity of hundreds.
_NUMBER = r"\s*([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*"
_SIZE = re.compile(_NUMBER + r"([a-zA-Z]*)\s*")


def parse_size(text: str | int) -> int:
    """Bytes of a size such as `128MiB`, `5GB` or `8m`; a bare number is bytes.

    Raises:
        UsageError: it is not a size, or not positive.
    """
    found = _SIZE.fullmatch(_short_text(text))
    if not found or found.group(2).lower() not in _FACTORS:
        raise UsageError(
            f"invalid size {_short_text(text)!r}", cure="write for example 128MiB, 2GB or a number of bytes"
        )
    size = int(float(found.group(1)) * _FACTORS[found.group(2).lower()])
    if size <= 0:
        raise UsageError(f"invalid size {text!r}: it must be positive", cure="write for example 128MiB")
    return size


def _short_text(text: str | float) -> str:
    """The text of a setting, which is no longer than any that is valid."""
    return (
        "a number of many digits"
        if isinstance(text, int) and text.bit_length() > _MOST_BITS
        else str(text)[:80]
    )


def parse_budget(text: str | int) -> int:
    """Bytes of a memory budget; see `parse_size`.

    Raises:
        UsageError: it is not a size, or less than 1 MiB, which no conversion can work with.
    """
    size = parse_size(text)
    if size < _SMALLEST_BUDGET:
        raise UsageError(
            f"a memory budget of {plural(size, 'byte')} is too small; the smallest is 1MiB",
            cure=Cure("write a unit, for example {}", Argument("memory", f"{text}GiB"))
            if str(text).isdecimal()
            else "write for example 128MiB",
        )
    return size


def show_size(size: float) -> str:
    """A size with a decimal unit (kB, MB, GB, TB)."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:  # noqa: PLR2004  the step between decimal units
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.2f} TB"


def show_seconds(seconds: float) -> str:
    """A duration as `8 s`, `2:05` or `3:10:00`."""
    whole = round(seconds)
    if whole < 60:  # noqa: PLR2004  seconds in a minute
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


_DURATION = re.compile(_NUMBER + r"([smhdw]?)\s*")
_LONGEST = 365_000 * 86400  # seconds; a date cannot be much further back


def duration(text: str | float) -> float:
    """Seconds of a duration such as `15m`, `2h` or `30d`; a bare number is seconds.

    Raises:
        UsageError: it is not a duration.
    """
    found = _DURATION.fullmatch(_short_text(text))
    seconds = float(found.group(1)) * _SECONDS[found.group(2)] if found else math.inf
    if seconds > _LONGEST:
        raise UsageError(
            f"invalid duration {_short_text(text)!r}", cure="write for example 900, 15m, 2h or 30d"
        )
    return seconds


def short(digest: str) -> str:
    """The first 12 hex digits of a digest after its algorithm, for display."""
    algorithm, colon, digits = digest.rpartition(":")
    return f"{algorithm}{colon}{digits[:12]}"


def plural(number: int, noun: str, verb: str = "") -> str:
    """A number with a noun in singular or plural, and its verb.

    Args:
        number: how many.
        noun: in singular.
        verb: in both forms, for example `is/are`.
    """
    one, _, many = verb.partition("/")
    form = one if number == 1 else many
    return f"{number:,} {noun}{'' if number == 1 else 's'}{form and f' {form}'}"
