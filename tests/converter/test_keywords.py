"""The keyword arguments of convert and export are the options of the requests, and `help` names each of them."""

from __future__ import annotations

import inspect
from dataclasses import fields

import pytest

import wherry
from wherry.converter.keywords import ExportKeywords, RestoreKeywords
from wherry.core.option import options_of
from wherry.core.request import ConvertKeywords, ConvertRequest, SourceRequest, TargetRequest
from wherry.live.request import _OF_FILES, ExportRequest

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


@pytest.mark.parametrize(
    "function",
    [wherry.convert, wherry.export, wherry.Store, wherry.Store.save, wherry.Store.restore],
    ids=lambda function: function.__qualname__,
)
def test_a_signature_names_every_keyword(function):
    kinds = {one.kind for one in parameters(function).values()}
    assert inspect.Parameter.VAR_KEYWORD not in kinds
    assert len(parameters(function)) > 10


def test_a_signature_shows_the_defaults():
    found = parameters(wherry.convert)
    assert (found["memory"].default, found["verify"].default, found["into"].default) == (
        "128MiB",
        "digest",
        False,
    )
    assert found["memory"].annotation == "str | int"
