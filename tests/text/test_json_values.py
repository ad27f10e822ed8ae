"""JSON of wherry's own, of children and of servers: what is none or too much is a ValueError with a short text."""

from __future__ import annotations

import json

import pytest

from wherry.text import json_values
from wherry.text.json_values import json_value
from wherry.text.limits import JsonLimits


@pytest.mark.parametrize("value", [None, 1, 1.5, "é\u202e", [1, [2]], {"a": {"b": []}}])
def test_what_json_writes_is_read_as_text_and_as_bytes(value):
    text = json.dumps(value)
    assert json_value(text) == json_value(text.encode()) == value


@pytest.mark.parametrize(
    "text", ["", "{", "[1,", "nul", "x" * (1 << 20), b"\xff\xfe{", "[" * 1_000_000, '{"a":' * 1_000_000]
)
def test_anything_else_is_a_short_error(text):
    with pytest.raises(ValueError, match=r".") as caught:
        json_value(text)
    assert len(str(caught.value)) < 300


def test_a_text_of_too_many_values_is_refused_before_it_is_parsed(monkeypatch):
    monkeypatch.setattr(json_values, "_OWN", JsonLimits(nodes=1000))
    with pytest.raises(ValueError, match="exceeds the limit of 1,000 JSON values"):
        json_value("[" + "0," * 2000 + "0]")
    assert json_value(json.dumps("x" * 5000)) == "x" * 5000
