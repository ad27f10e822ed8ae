"""Numbers in texts of others: those that no 64 bits hold are none."""

from __future__ import annotations

import pytest

from wherry.text.numbers import decimal_number


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("0", 0),
        ("007", 7),
        ("9" * 18, 10**18 - 1),
        ("9" * 19, None),
        ("9" * 5000, None),
        ("", None),
        ("-1", None),
        ("+1", None),
        (" 1", None),
        ("1_0", None),
        ("²", None),
        ("٣", None),
    ],
)
def test_decimal_numbers(text, number):
    assert decimal_number(text) == number
