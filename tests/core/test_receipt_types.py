"""Receipts that somebody else wrote: a value of another type is an error that names its field."""

from __future__ import annotations

from dataclasses import asdict, fields

import pytest

from wherry.core.manifest import Manifest, tensor_row
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
