"""Receipts and origins that somebody else wrote: a value of another type is an error that names its field."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, fields

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from wherry.core.json_forms import Record
from wherry.core.manifest import ORIGIN, Manifest, tensor_row
from wherry.core.manifest import from_json as from_json_of_origin
from wherry.core.manifest import from_json as manifest_from_json
from wherry.core.receipt import CheckpointRef, Receipt, from_json, reference_from_json
from wherry.errors import CorruptError

DIGEST = "sha256:" + "0" * 64
REFERENCE = CheckpointRef("/a", "dcp", "2.9", DIGEST, DIGEST, "f", step=1)
RECEIPT = Receipt(REFERENCE, REFERENCE, "plan")
VALUES = (None, 7, 2**70, -(2**70), 1.5, "x", [], {}, True)
OF_THE_TYPE = {  # by annotation: the values above that a field takes
    "str": ["x"],
    "str | None": [None, "x"],
    "int": [7],
    "int | None": [None, 7],
    "float": [7, 1.5],
    "bool": [True],
    "dict[str, Any]": [{}],
    "dict[str, str]": [{}],
    "dict[str, Any] | None": [None, {}],
    "list[str]": [[]],
    "list[dict[str, str]]": [[]],
    "list[dict[str, Any]]": [[]],
    "CheckpointRef": [],
}


TIMES = ("started", "finished")


def takes(field, value):
    return field.name not in TIMES and any(
        type(one) is type(value) and one == value for one in OF_THE_TYPE[field.type]
    )


@pytest.mark.parametrize("value", VALUES, ids=repr)
@pytest.mark.parametrize("field", fields(CheckpointRef), ids=lambda field: field.name)
def test_a_checkpoint_has_the_types_of_its_fields(field, value):
    data = {**asdict(REFERENCE), field.name: value}
    if field.name.endswith("_digest"):
        with pytest.raises((TypeError, AttributeError, CorruptError)):
            reference_from_json({**data, field.name: value if value != "x" else None})
    elif takes(field, value):
        assert getattr(reference_from_json(data), field.name) == value
    else:
        with pytest.raises(TypeError, match=field.name):
            reference_from_json(data)


@pytest.mark.parametrize("value", VALUES, ids=repr)
@pytest.mark.parametrize("field", fields(Receipt), ids=lambda field: field.name)
def test_a_receipt_has_the_types_of_its_fields(field, value):
    data = {**RECEIPT.to_json(), field.name: value}
    if takes(field, value):
        assert getattr(from_json(data), field.name) == value
    else:
        with pytest.raises(CorruptError):
            from_json(data)


@pytest.mark.parametrize("schema", [None, "1", 1.0, True, [], 2**70], ids=repr)
def test_a_schema_is_an_integer_that_is_supported(schema):
    with pytest.raises(CorruptError, match="schema"):
        from_json({**RECEIPT.to_json(), "schema": schema})


@pytest.mark.parametrize("data", [None, [], "x", 7, {}, {"schema": 2, "source": []}], ids=repr)
def test_what_is_no_receipt_is_an_error(data):
    with pytest.raises(CorruptError, match="invalid receipt"):
        from_json(data)


@pytest.mark.parametrize("parents", [[1], [{}], [{"checkpoint": None}], ["x"]], ids=repr)
def test_the_parents_of_a_receipt_are_checkpoints(parents):
    with pytest.raises(CorruptError, match="invalid receipt"):
        from_json({**RECEIPT.to_json(), "parents": parents})


@pytest.mark.parametrize("verification", [{"ok": True}, {"ok": True, "level": 3}], ids=repr)
def test_a_verification_has_a_level(verification):
    with pytest.raises(CorruptError, match="level"):
        from_json({**RECEIPT.to_json(), "verification": verification})


@pytest.mark.parametrize(
    "change",
    [{"shape": [None]}, {"shape": [-1]}, {"shape": [True]}, {"chunks": [1.5]}, {"dtype": 3}, {"tags": "x"}],
    ids=repr,
)
def test_a_tensor_has_extents_and_a_data_type(change):
    row = {"path": "a/b", "shape": [2], "dtype": "float32"}
    assert tensor_row(row)[0].shape == (2,)
    with pytest.raises(TypeError, match="expected"):
        tensor_row({**row, **change})


@pytest.mark.parametrize(
    "change", [{"custom": ["x"]}, {"origin": "x"}, {"step": "7"}, {"kind": None}], ids=repr
)
def test_a_manifest_has_the_types_of_its_fields(change):
    data = Manifest({}).to_json()
    assert manifest_from_json(data).to_json() == data
    with pytest.raises(CorruptError, match="invalid manifest"):
        manifest_from_json({**data, **change})


# What a manifest's origin records is read again: a record of another form is an error that names its
# place.


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
    "names": {"requested": {"box": "flax"}, "renamed": {"a/b": "c"}, "inverse": ["c -> a/b"]},
    "pinned": True,
    "quantized": {"scheme": "fp8", "scales": "/a"},
    "scan": {"requested": "layers_{layers} -> layers:0", "inverse": "layers:0 -> layers_{layers}"},
    "tied": {"lm_head": "embed"},
    "values": {"type": "q8_0"},
}  # fmt: skip
VALUES_OF_ORIGIN = (None, 0, 2**70, 1.5, "x", [], [1], {}, {"a": 1}, True)
FREE = ["quantization_config", "facts", "requested"]  # tables whose contents their readers check


def read(origin):
    return from_json_of_origin({**Manifest({}).to_json(), "origin": origin}).origin


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
    for value in VALUES_OF_ORIGIN:
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
