"""The keyword arguments of convert and export are the options of the requests, and `help` names each of them."""

from __future__ import annotations

import inspect
import pickle
import pydoc
import re
from dataclasses import fields

import pytest

import wherry
from wherry.converter.keywords import OF_FILES, ExportKeywords, RestoreKeywords
from wherry.core.request import ConvertKeywords, ConvertRequest, SourceRequest, TargetRequest, options_of
from wherry.errors import UsageError
from wherry.live.request import ExportRequest

PUBLIC = [getattr(wherry, name) for name in sorted(wherry._DOOR)]
METHODS = [
    one if name == "__init__" else method
    for one in PUBLIC
    if inspect.isclass(one)
    for name, method in vars(one).items()
    if inspect.isfunction(method) and (name == "__init__" or not name.startswith("_"))
]
FUNCTIONS = [one for one in PUBLIC if inspect.isfunction(one)]
ALL = {one.name for one in options_of(SourceRequest, TargetRequest, ConvertRequest)}


def parameters(function):
    return inspect.signature(function).parameters


def test_those_of_convert_are_all_options_of_its_request():
    assert {*ConvertKeywords.__annotations__, "options"} == {*ALL, "layout", "progress"}


def test_those_of_export_are_its_own_and_the_options_that_concern_a_live_state():
    own = {one.name for one in fields(ExportRequest)} - {"convert", "snapshot", "step"}
    assert set(ExportKeywords.__annotations__) == {
        *own,
        *(ALL - {"format", "item", "step", "allow_opaque", *OF_FILES}),
    }


def test_those_of_a_stores_restore_are_those_of_restore():
    others = set(parameters(wherry.restore)) - {"uri", "into", "step"}
    assert set(RestoreKeywords.__annotations__) == others


@pytest.mark.parametrize("function", [*FUNCTIONS, *METHODS], ids=lambda function: function.__qualname__)
def test_every_public_signature_names_every_argument(function):
    kinds = {one.kind for one in parameters(function).values()}
    assert inspect.Parameter.VAR_KEYWORD not in kinds


@pytest.mark.parametrize(
    "function",
    [wherry.convert, wherry.merge, wherry.export, wherry.Store, wherry.Store.save, wherry.Store.restore],
    ids=lambda function: function.__qualname__,
)
def test_a_signature_has_the_options(function):
    assert len(parameters(function)) > 10


def test_those_of_a_merge_are_those_of_a_conversion_that_do_not_choose_a_step():
    others = {"format", "step", "item"}
    assert set(parameters(wherry.convert)) - set(parameters(wherry.merge)) == {*others, "source"}
    for name in others:
        with pytest.raises(UsageError, match=f"unknown argument '{name}' of wherry.merge"):
            wherry.merge(["a*1", "b*1"], "c", to="orbax", **{name: None})


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_help_names_every_argument(function):
    shown = pydoc.render_doc(function, renderer=pydoc.plaintext)
    assert [name for name in parameters(function) if name not in shown] == []


def test_a_signature_shows_the_defaults():
    found = parameters(wherry.convert)
    assert (found["memory"].default, found["verify"].default, found["into"].default) == (
        "128MiB",
        "digest",
        False,
    )
    assert found["memory"].annotation == "str | int"


def test_those_of_a_plan_are_those_of_a_conversion():
    assert parameters(wherry.plan).keys() == parameters(wherry.convert).keys()


CALLED = [
    (name, getattr(wherry, name))
    for name in sorted(wherry._DOOR)
    if inspect.isfunction(getattr(wherry, name))
]
CALLED += [
    ("Store", wherry.Store),
    ("Store.save", wherry.Store.save),
    ("Store.restore", wherry.Store.restore),
]


@pytest.mark.parametrize(("verb", "function"), CALLED, ids=lambda one: one if isinstance(one, str) else "")
def test_an_argument_that_a_function_does_not_take_is_an_error_of_the_call(verb, function):
    """An unknown name, a misspelled one of each, and no argument where some are required."""
    names = parameters(function).keys() - {"self"}
    with pytest.raises(UsageError, match=f"unknown argument 'zebra' of wherry.{verb}"):
        function(zebra=1)
    for name in names:
        wrong = f"{name}x"
        with pytest.raises(UsageError, match=f"unknown argument '{wrong}' of wherry.{verb}") as caught:
            function(**{wrong: 1})
        assert re.search(rf"did you mean [^?]*\b{name}\b[^?]*\?", caught.value.cure), name
    required = [
        one
        for one in parameters(function).values()
        if one.default is one.empty and one.kind is not one.VAR_POSITIONAL
    ]
    if required:
        with pytest.raises(UsageError, match=f"wherry.{verb}: missing"):
            function()


@pytest.mark.parametrize(
    ("option", "keyword"),
    [("set", "options"), ("from_", "format"), ("opaque", "allow_opaque"), ("no_lineage", "lineage")],
)
def test_an_option_of_the_command_line_leads_to_its_keyword(option, keyword):
    with pytest.raises(UsageError) as caught:
        wherry.convert("a", "b", to="orbax", **{option: 1})
    assert f"did you mean {keyword}?" in caught.value.cure


@pytest.mark.parametrize(
    "name", ["source", "target", "to", "family", "only", "dtype", "config", "assets", "format", "item"]
)
def test_a_list_is_not_a_text(name):
    stated = {"source": "a", "target": "b", "to": "orbax", name: ["orbax", "dcp"]}
    with pytest.raises(UsageError, match=f"invalid value for {name}: .*expected text.*got list"):
        wherry.plan(**stated)


@pytest.mark.parametrize("function", [wherry.detect, wherry.open, wherry.inspect, wherry.verify])
@pytest.mark.parametrize("value", [["a"], None, 1])
def test_what_is_no_checkpoint_s_name_is_an_error_of_the_call(function, value):
    with pytest.raises(UsageError, match=r"invalid value for uri: .*expected text or a path"):
        function(value)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_a_public_function_can_be_sent_to_another_process(function):
    assert pickle.loads(pickle.dumps(function)) is function


def test_an_option_that_only_the_command_line_has_is_named_so():
    with pytest.raises(UsageError, match=r"unknown argument 'on' of wherry\.convert") as caught:
        wherry.convert("a", "b", to="orbax", on="processes:2")
    assert str(caught.value).endswith("cure: only the command line has it: see `wherry convert --help`")
