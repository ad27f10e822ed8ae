"""Numbers in names and texts of others."""

from __future__ import annotations

_MOST_DIGITS = (
    18  # each such number fits 64 bits; int() refuses texts of thousands of digits with a ValueError
)


def decimal_number(text: str) -> int | None:
    """The number that a text of decimal digits states; None for any other text, and for over 18 digits."""
    short = len(text) <= _MOST_DIGITS
    return int(text) if short and text.isascii() and text.isdecimal() else None
