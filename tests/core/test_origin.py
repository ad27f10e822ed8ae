"""What a manifest's origin records is read again: a record of another form is an error that names its place."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from wherry.core.manifest import ORIGIN, Manifest, from_json
from wherry.errors import CorruptError
from wherry.text.json_forms import Record

FORMS = ORIGIN.optional

SYSTEM = {"system": "huggingface", "scan_layers": "true", "param_scan_axis": 1, "folded": False}
WORDS = SYSTEM.keys() - {"system"}
SOUND = {
    "dequantized": {"dtype": "bfloat16", "quantization_config": {"quant_method": "fp8"}},
    "expected_parameters": 7,
    "least_parameters": 7,
    "layout": {
        "family": "llama", "from": SYSTEM, "to": SYSTEM, "facts": {"rope": [1]}, "sizes": {"layer": 2},
        "dtype": "float32", "only": "params",
    },
    "merge": {"sources": [{"uri": "/a", "weight": 0.5}]},
    "meta": {"run": "7"},
    "names": {"asked": {"box": "flax"}, "renamed": {"a/b": "c"}, "inverse": ["c -> a/b"]},
    "pinned": True,
    "quantized": {"scheme": "fp8", "scales": "/a"},
    "scan": {"asked": "layers_{layers} -> layers:0", "inverse": "layers:0 -> layers_{layers}"},
    "tied": {"lm_head": "embed"},
    "values": {"type": "q8_0"},
}  # fmt: skip
VALUES = (None, 0, 2**70, 1.5, "x", [], [1], {}, {"a": 1}, True)
FREE = ["quantization_config", "facts", "asked"]  # tables whose contents their readers check


def read(origin):
    return from_json({**Manifest({}).to_json(), "origin": origin}).origin


def places(table, start=()):
    """The places of all values of a table, in tables."""
    for name, value in table.items():
        yield (*start, name)
        if isinstance(value, dict) and name not in FREE:
            yield from places(value, (*start, name))


def changed(table, place, value):
    first, *rest = place
    return {**table, first: changed(table[first], rest, value) if rest else value}


def value_at(table, place):
    for name in place:
        table = table[name]
    return table


def test_every_record_has_a_sound_example():
    assert SOUND.keys() == FORMS.keys()
    assert read(SOUND) == SOUND
    assert read({}) == {}


@pytest.mark.parametrize("place", list(places(SOUND)), ids="/".join)
def test_a_record_of_another_type_is_an_error_that_names_it(place):
    kind = type(value_at(SOUND, place))
    for value in VALUES:
        if type(value) is kind or (
            value is None and place in [("expected_parameters",), ("least_parameters",)]
        ):
            continue
        if place[-1] in WORDS and type(value) in (str, int, bool):
            continue
        with pytest.raises(CorruptError, match=r"invalid manifest.*origin\." + r"\.".join(place)):
            read(changed(SOUND, place, value))


@pytest.mark.parametrize("name", [name for name, form in FORMS.items() if isinstance(form, Record)])
def test_a_record_has_all_its_fields(name):
    for missing in FORMS[name].required:
        rest = {key: value for key, value in SOUND[name].items() if key != missing}
        with pytest.raises(CorruptError, match=rf"missing origin\.{name}\.{missing}"):
            read({**SOUND, name: rest})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dequantized", {"quantization_config": {"quant_method": "fp8"}}),
        ("dequantized", {"dtype": ["a"]}),
        ("layout", {"family": "llama"}),
        ("layout", {"family": ["llama"]}),
        ("layout", {**SOUND["layout"], "sizes": {"layer": "2"}}),
        ("layout", {**SOUND["layout"], "to": {"system": "maxtext", "rope": ["half"]}}),
        ("merge", {"sources": [1]}),
        ("names", {"renamed": {"a": 1}}),
        ("names", {"renamed": {}, "inverse": [1]}),
        ("tied", {"a": 1}),
        ("meta", {"a": None}),
    ],
    ids=repr,
)
def test_a_record_within_another_has_its_form(name, value):
    with pytest.raises(CorruptError, match=rf"origin\.{name}"):
        read({name: value})


FIELDS = [*FORMS, "family", "from", "to", "system", "sizes", "renamed", "sources", "dtype", "x"]
PLAIN = st.sampled_from([None, True, 0, -1, 1.5, "", "x", [], {}])
JSON = st.recursive(
    PLAIN,
    lambda one: st.lists(one, max_size=2) | st.dictionaries(st.sampled_from(FIELDS), one, max_size=3),
    max_leaves=6,
)
QUICK = settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@QUICK
@given(st.dictionaries(st.sampled_from([*FORMS, "architectures", "x"]), JSON))
def test_any_origin_is_read_or_an_error_of_types(origin):
    with suppress(CorruptError):
        assert read(origin) == origin


@QUICK
@given(st.dictionaries(st.sampled_from(["architectures", "model_type", "x", ""]), JSON))
def test_names_that_nothing_reads_may_be_anything(origin):
    assert read(origin) == origin
