"""The keyword arguments of convert and export are the options of the requests, and `help` names each of them."""

from __future__ import annotations

import inspect
import pydoc
from dataclasses import fields

import pytest

import wherry
from wherry.converter.keywords import ExportKeywords, RestoreKeywords
from wherry.core.option import options_of
from wherry.core.request import ConvertKeywords, ConvertRequest, SourceRequest, TargetRequest
from wherry.live.request import _OF_FILES, ExportRequest

PUBLIC = [getattr(wherry, name) for name in sorted(wherry._DOOR)]
METHODS = [
    method
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
    assert {*ConvertKeywords.__annotations__, "options"} == {*ALL, "wish", "progress"}


def test_those_of_export_are_its_own_and_the_options_that_concern_a_live_state():
    own = {one.name for one in fields(ExportRequest)} - {"convert", "snapshot", "step"}
    assert set(ExportKeywords.__annotations__) == {*own, *(ALL - {"step", *_OF_FILES})}


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
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
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
