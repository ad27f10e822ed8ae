"""The forms of the flows in the Prefect UI: what comes first, what is in the group `advanced`, and no type "None"."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("prefect")

from prefect.flows import load_flow_from_entrypoint
from prefect.utilities.schema_tools.validation import validate
from pydantic import ValidationError

from wherry.flows.audit import AuditSpec, audit
from wherry.flows.convert import ConvertSpec, convert_checkpoint
from wherry.flows.export import export
from wherry.flows.nightly import nightly
from wherry.flows.promote import PromoteSpec, promote
from wherry.flows.work import work_on_units
from wherry.formats.registry import find_target_format, formats

FLOWS = (convert_checkpoint, export, nightly, promote, audit, work_on_units)
FIRST = {
    "convert-checkpoint": ["source", "target", "to"],
    "post-training-export": ["source", "routes"],
    "nightly-convert": ["routes", "dry_run"],
    "promote": ["subject", "alias"],
    "audit": ["scope", "roots", "level"],
    "work": ["job"],
}
REQUIRED = {
    "convert-checkpoint": {"source", "target", "to"},
    "post-training-export": {"source"},
    "promote": {"subject"},
    "work": {"job"},
}
every_flow = pytest.mark.parametrize("flow", FLOWS, ids=lambda flow: flow.name)


def form(flow):
    """Schema, name of the model and its fields as the form shows them."""
    schema = flow.parameters.model_dump_for_openapi()
    model = schema["definitions"][schema["properties"]["spec"]["$ref"].rpartition("/")[2]]
    return SimpleNamespace(schema=schema, model=model, fields=model["properties"])


def every_field(schema):
    """Every field of every model, those of groups included."""
    for name, field in schema.get("properties", {}).items():
        yield name, field
        yield from every_field(field)
    for model in schema.get("definitions", {}).values():
        yield from every_field(model)


@every_flow
def test_a_flow_is_loaded_from_its_file_and_from_its_module(flow):
    file, function = Path(flow.fn.__code__.co_filename).resolve(), flow.fn.__name__
    for entrypoint in (f"{file}:{function}", f"{flow.fn.__module__}.{function}"):
        assert load_flow_from_entrypoint(entrypoint).name == flow.name


@every_flow
def test_the_form_begins_with_what_every_run_states(flow):
    shown = form(flow)
    order = sorted(shown.fields, key=lambda name: shown.fields[name]["position"])
    assert order == list(shown.fields), "with and without positions"
    assert order[: len(FIRST[flow.name])] == FIRST[flow.name]
    assert set(shown.model.get("required", ())) == REQUIRED.get(flow.name, set())
    assert order[-1] == "advanced"
    assert [name for name, field in shown.fields.items() if field.get("type") == "object"] in (
        ["advanced"],
        ["options", "advanced"],
    )
    assert len(order) <= 12
    group = shown.fields["advanced"]["properties"]
    assert len(group) >= 2
    assert not group.keys() & shown.fields.keys()


@every_flow
def test_no_field_has_the_type_none_and_each_is_described(flow):
    for name, field in every_field(form(flow).schema):
        if name == "spec":
            continue
        assert "anyOf" not in field, name
        assert field.get("type") != "null", name
        assert "const" not in field, name
        assert field.get("default", "") is not None, name
        assert field.get("description"), name


@every_flow
def test_every_field_of_the_model_is_in_the_form(flow):
    model = flow.fn.__annotations__["spec"]
    fields = form(flow).fields
    shown = {*fields, *fields["advanced"]["properties"]} - {"advanced"}
    assert shown == set(model.model_fields)
    assert set(model.FIRST) <= set(model.model_fields)


def test_the_target_format_is_a_list_of_what_can_be_written():
    schema = form(convert_checkpoint)
    for model in ("ConvertSpec", "TargetSpec"):
        choices = schema.schema["definitions"][model]["properties"]["to"]["enum"]
        assert len(choices) == len(set(choices))
        assert {find_target_format(one).name for one in choices} == {
            row.name for row in formats().values() if row.is_written
        }
    assert "equinox" not in choices


FILLED = {
    "source": "/a",
    "target": "/b",
    "to": "orbax",
    "only": "params",
    "further": [{"target": "/c", "to": "hf", "advanced": {"dtype": "bfloat16"}}],
    "advanced": {"memory": "1GiB", "meta": {"team": "x"}, "as_step": 7},
}


def test_what_the_form_sends_is_accepted_by_server_and_flow():
    schema = form(convert_checkpoint).schema
    validate({"spec": FILLED}, schema, raise_on_error=True)
    spec = ConvertSpec(**FILLED)
    assert (spec.memory, spec.meta, spec.as_step, spec.only) == ("1GiB", {"team": "x"}, 7, "params")
    assert spec.further[0].dtype == "bfloat16"
    assert ConvertSpec(**spec.model_dump()) == spec, "fields at the same level mean the same"
    for name in ("family", "alias"):
        validate({"spec": {**FILLED, name: None}}, schema, raise_on_error=True)
    assert ConvertSpec(**{**FILLED, "advanced": None}).memory == "128MiB"


@pytest.mark.parametrize(
    "changed",
    [{"to": "nothing"}, {"adv": {}}, {"advanced": {"memroy": "1GiB"}}, {"source": 1}],
    ids=["format", "field", "rare field", "type"],
)
def test_the_server_refuses_what_the_form_does_not_have(changed):
    assert validate({"spec": {**FILLED, **changed}}, form(convert_checkpoint).schema)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"advanced": {"memroy": "1GiB"}}, "memroy"),
        ({"advanced": {"deep": True}, "deep": True}, "deep is stated twice"),
        ({"advanced": "deep"}, "advanced"),
    ],
)
def test_the_flow_refuses_it_too(fields, words):
    with pytest.raises(ValidationError, match=words):
        AuditSpec(**fields)


def test_a_rollback_names_its_model_by_the_subject():
    assert PromoteSpec(subject="models:/m@champion", rollback=True).known_model == "m"
    assert PromoteSpec(subject="/data/x", model="m", rollback=True).known_model == "m"
    assert PromoteSpec(subject="/data/x").known_model == ""
