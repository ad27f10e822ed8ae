"""The JSON reader: equal to the standard library on valid text, whatever the pieces, and bounded on hostile text."""

import json
import random
import tracemalloc

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from wherry.core import json_document
from wherry.core.json_document import DROPPED, file_pieces, parse_json, scan_json
from wherry.core.limits import JsonLimits
from wherry.errors import CorruptError, HostileError, UsageError

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
SMALL = JsonLimits(nbytes=1 << 16, nodes=100, depth=8, rows=10)


def kept(_key, value):
    return value


def cut(data, *sizes):
    """The data in pieces of these sizes, again and again."""
    at, number = 0, 0
    while at < len(data):
        size = sizes[number % len(sizes)]
        yield data[at : at + size]
        at, number = at + size, number + 1


def scan(data, rows=kept, size=3, **options):
    return scan_json(cut(data, size), "x.json", rows, **options)


@pytest.fixture(autouse=True, params=["whole", "entries"])
def way(request, monkeypatch):
    """Small documents are parsed as a whole; the rules are the same for those that are read by entries."""
    if request.param == "entries":
        monkeypatch.setattr(json_document, "_MOST_WHOLE", -1)
        monkeypatch.setattr(json_document, "_MOST_WHOLE_BYTES", 0)
    return request.param


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    VALUES,
    st.integers(1, 9),
    st.sampled_from([None, 2]),
    st.sampled_from([(", ", ": "), (",", ":"), (" , ", " : ")]),
)
def test_entries_in_any_pieces_are_those_of_the_standard_library(value, size, indent, separators):
    text = json.dumps(value, indent=indent, separators=separators, ensure_ascii=size % 2 == 0).encode()
    for rows in (kept, {"*": kept}, {}):
        assert scan(text, rows, size) == value
    assert parse_json(text, "x.json") == value


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(alphabet='{}[]",:01e.-tru \\n', max_size=24), st.integers(1, 5))
@example(" 00", 3)
def test_text_is_refused_exactly_where_the_standard_library_does(text, size):
    try:
        expected = json.loads(text)
    except ValueError:
        for read in (lambda: scan(text.encode(), kept, size), lambda: scan(text.encode(), {"*": kept}, size)):
            with pytest.raises(CorruptError, match=r"invalid JSON in x\.json"):
                read()
    else:
        assert scan(text.encode(), kept, size) == expected


def test_rows_convert_and_drop_entries_at_their_places():
    text = (
        b'{"a": {"x": 1, "y": 2}, "b": [3, 4], "long": "\\"skip\\\\", "c": {"k": {"z": 5}}, "rest": {"x": 9}}'
    )
    rows = {
        "a": lambda key, value: f"{key}{value}",
        "b": lambda number, value: DROPPED if number else value,
        "long": DROPPED,
        "c": {"*": lambda _key, value: -value},
    }
    expected = {"a": {"x": "x1", "y": "y2"}, "b": [3], "c": {"k": {"z": -5}}, "rest": {"x": 9}}
    assert all(scan(text, rows, size) == expected for size in (1, 2, 7, 1000))


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (b"[" + b"{}," * 200 + b"{}]", "100 JSON values|10 entries"),
        (b'{"a":' * 12 + b"1" + b"}" * 12, "8 nested"),
        (b"[" * 12 + b"]" * 12, "8 nested"),
        (b"[" * 50_000, "8 nested|100 JSON values"),
        (b" " * 70_000 + b"1", "65,536 bytes"),
    ],
)
def test_a_document_beyond_a_limit_is_hostile(text, what):
    for read in (lambda: parse_json(text, "x.json", limits=SMALL), lambda: scan(text, {}, 999, limits=SMALL)):
        with pytest.raises(HostileError, match=what):
            read()


def test_entries_are_counted_and_each_is_limited(monkeypatch):
    monkeypatch.setattr(json_document, "PIECE", 64)
    with pytest.raises(HostileError, match="limit of 10 entries"):
        scan(json.dumps(dict.fromkeys(map(str, range(11)))).encode(), limits=SMALL)
    with pytest.raises(HostileError, match="limit of 10 entries"):
        scan(json.dumps([0] * 11).encode(), limits=SMALL)
    with pytest.raises(HostileError, match=r"x\.json exceeds the limit of 100 JSON values"):
        scan(b'{"a": [' + b"{}," * 200 + b"{}]}", limits=SMALL)
    assert scan(b'{"a": [' + b"{}," * 20 + b"{}]}", limits=SMALL) == {"a": [{}] * 21}


def test_values_that_no_function_converts_count_together():
    text = json.dumps({str(n): [0] * 15 for n in range(9)}).encode()
    with pytest.raises(HostileError, match="100 JSON values"):
        scan(text, {}, 1000, limits=SMALL)
    assert len(scan(text, {"*": DROPPED}, 1000, limits=SMALL)) == 0


def test_what_a_function_takes_of_an_entry_may_be_nested_and_what_stays_of_it_not(way):
    text = b'{"a": ' + b"[" * 12 + b"]" * 12 + b"}"
    assert scan(text, lambda _key, value: len(value), limits=SMALL) == {"a": 1}
    if way == "whole":
        with pytest.raises(HostileError, match="8 nested"):
            scan(text, limits=SMALL)


def test_the_user_can_raise_the_limits(monkeypatch):
    text = json.dumps(dict.fromkeys(map(str, range(30)))).encode()
    monkeypatch.setenv("WHERRY_LIMITS", "3")
    assert len(scan(text, limits=SMALL)) == 30
    for wrong in ("0", "0.5", "x", "inf", "nan"):
        monkeypatch.setenv("WHERRY_LIMITS", wrong)
        with pytest.raises(UsageError, match="WHERRY_LIMITS"):
            scan(text, limits=SMALL)


@pytest.mark.parametrize(("factor", "advised"), [("1", "=4 "), ("4", "=16 "), ("999", "=1000 ")])
def test_the_cure_raises_the_limits_further(monkeypatch, factor, advised):
    monkeypatch.setenv("WHERRY_LIMITS", factor)
    with pytest.raises(HostileError) as caught:
        scan(json.dumps(dict.fromkeys(map(str, range(30_000)))).encode(), limits=SMALL)
    assert f"WHERRY_LIMITS{advised}" in caught.value.cure


def test_duplicate_keys_and_constants_can_be_refused():
    for text in (b'{"a": 1, "a": 2}', b'{"b": {"a": 1, "a": 2}}'):
        with pytest.raises(CorruptError, match="duplicate key 'a'"):
            scan(text, {"*": kept}, unique=True)
        with pytest.raises(CorruptError, match="duplicate key 'a'"):
            parse_json(text, "x.json", unique=True)
    assert scan(b'{"a": 1, "a": 2}') == {"a": 2}
    for read in (scan, lambda data, **more: parse_json(data, "x.json", **more)):
        with pytest.raises(CorruptError, match="NaN is not valid JSON"):
            read(b'{"a": NaN}', constants=False)
        assert read(b'{"a": Infinity}') == {"a": float("inf")}


def test_bytes_that_are_not_utf_8_are_corrupt():
    for read in (lambda: scan(b'{"a": "\xff"}'), lambda: parse_json(b'"\xff"', "x.json")):
        with pytest.raises(CorruptError, match=r"invalid JSON in x\.json"):
            read()
    assert scan(b"\xef\xbb\xbf{}") == parse_json(b"\xef\xbb\xbf{}", "x.json") == {}


def test_an_error_in_the_middle_does_not_read_the_rest(way):
    read = []
    with pytest.raises(CorruptError, match="char"):
        scan_json(
            (read.append(piece) or piece for piece in cut(b'{"a": x' + b" " * 9999, 100)), "x.json", kept
        )
    assert way == "whole" or len(read) < 5


def test_memory_depends_on_what_is_kept(monkeypatch, way):
    if way == "whole":
        return
    monkeypatch.setattr(json_document, "PIECE", 1 << 12)
    rng = random.Random(0)
    text = json.dumps({f"w{n}": {"shape": [rng.randrange(999)] * 9} for n in range(4_000)}).encode()
    tracemalloc.start()
    try:
        found = scan_json(
            file_pieces(lambda a, b: text[a:b], 0, len(text)), "x.json", lambda _key, _value: DROPPED
        )
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found == {}
    assert peak < 150_000 < len(text)
