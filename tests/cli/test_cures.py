"""Cures in the words of the caller: every command in one parses, and to Python every option is a keyword argument.

The texts are those of the code, so that a new one is checked without being listed here. What is filled in when the
program runs is filled with `1`.
"""

from __future__ import annotations

import ast
import inspect
import re
import shlex
from functools import cache

import click
import pytest

import wherry
from tests.support.command import small
from tests.support.cure_texts import COMMANDS, OPTION, named, texts
from tests.support.house import label
from wherry import cures
from wherry.cli import cli, main
from wherry.core.option import options_of
from wherry.core.request import ConvertKeywords, ConvertRequest, RewriteRequest, WritingKeywords
from wherry.errors import UsageError
from wherry.formats.registry import formats

ARGUMENT = re.compile(r"\b([a-z_]+)=(?=…|\"|\[|\{|[A-Z]|\d)")
# Texts that no error carries to a caller in Python.
ROOF = (
    "wherry/cli/",
    "wherry/console/",
    "wherry/auditor/bundle.py",
    "wherry/lineage/text.py",
    "wherry/watch/doctor.py",
)


FOR_PYTHON = [row for row in texts() if not label(row[0]).startswith(ROOF)]


def test_the_texts_are_those_of_the_code():
    found = {text for _path, text in texts()}
    assert "pass --only params" in found
    assert "run `wherry work 1`" in found, "of an f-string"
    assert "register it again: `wherry register URI --model NAME`" in found, "of a table"
    assert len(found) > 150


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_in_a_text_is_one(line, monkeypatch):
    """Its verbs and options exist, and nothing is missing, unless it only names the verb."""
    ran = []
    monkeypatch.setattr(click.Command, "invoke", lambda _self, context: ran.append(context.command_path))
    words = shlex.split(line)
    with pytest.MonkeyPatch.context() as patch:
        if all(re.fullmatch("[a-z-]+", word) for word in words):
            patch.setattr(click.Parameter, "required", False, raising=False)
            words += ["--help"]
            assert cli.main(words, standalone_mode=False) in (0, None)
            return
        cli.main(words, standalone_mode=False)
    assert ran, line


@pytest.mark.parametrize("row", FOR_PYTHON, ids=named)
def test_a_command_stands_in_backquotes(row):
    rest = re.sub("`[^`]*`", "", row[1])
    assert not re.search(rf"\bwherry ({'|'.join(cli.commands)}) (--|1|[A-Z]{{2}})", rest)


def commands(group):
    """Every command of a group, groups within it included."""
    for command in group.commands.values():
        yield command
        yield from commands(command) if isinstance(command, click.Group) else ()


OPTIONS = [
    option
    for command in (cli, *commands(cli))
    for option in command.params
    if isinstance(option, click.Option)
]


def takes(option, value):
    """Whether an option can have this value; a placeholder stands for one."""
    if option.is_flag:
        return False
    if "1" in value or re.fullmatch("[A-Z]+|…", value):
        return True
    if option.name in ("to", "format"):
        return value in {name for row in formats().values() for name in (row.name, *row.aliases)}
    try:
        return option.type.convert(value, option, None) is not None
    except click.BadParameter:
        return False


@pytest.mark.parametrize("row", texts(), ids=named)
def test_an_option_in_a_sentence_is_one_and_takes_the_value(row):
    rest = re.sub("`[a-z][^`]*`", "", row[1])
    for found in re.finditer(cures._OPTION, rest):
        same = [option for option in OPTIONS if f"--{found[1]}" in option.opts]
        assert same or found[1] == "help", found[0]
        value = (found[2] or "").strip("'") if row in FOR_PYTHON else ""
        assert not value or found[1] in cures.FLAGS or any(takes(option, value) for option in same), found[0]


@cache
def near(folder):
    """The names of arguments and fields in the modules of a folder."""
    nodes = [node for path in folder.glob("*.py") for node in ast.walk(ast.parse(path.read_text()))]
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    fields = {line.target.id for one in classes for line in one.body if isinstance(line, ast.AnnAssign)}
    return fields | {node.arg for node in nodes if isinstance(node, ast.arg)}


@cache
def public():
    """The names of the arguments of the library's functions."""
    functions = [getattr(wherry, name) for name in dir(wherry)]
    taken = {name for one in functions if callable(one) for name in inspect.signature(one).parameters}
    return taken | set(ConvertKeywords.__annotations__) | set(WritingKeywords.__annotations__)


@pytest.mark.parametrize("row", FOR_PYTHON, ids=named)
def test_to_python_an_option_is_a_keyword_argument(row):
    path, text = row
    translated = cures.in_python(text)
    sentences = re.sub(r"`[a-z][^`]*`", "", translated)
    assert not OPTION.search(sentences), translated
    known = public() | near(path.parent)
    assert {name for name in ARGUMENT.findall(translated) if f"{name}=" not in text} <= known, translated


@pytest.mark.parametrize("row", FOR_PYTHON, ids=named)
def test_to_python_options_in_backquotes_are_arguments_that_parse(row):
    """Values of marks alone, such as `join=.`, are in backquotes, where they do not end a sentence."""
    assert not re.search(r"--[a-z-]+ [^\s`]*=[.,:;]+(?=\s|$)", re.sub("`[^`]*`", "", row[1]))
    stated = [part for part in re.findall("`(--[a-z][^`]*)`", row[1]) if shlex.split(part)]
    for part in stated:
        call = cures.in_python(f"`{part}`").strip("`").replace("…", "None")
        assert ast.parse(f"f({call})", mode="eval"), call
        values = [word.partition("=")[2] or word for word in shlex.split(part) if not word.startswith("--")]
        assert all(value in call for value in values), call


@pytest.mark.parametrize("line", [one for one in COMMANDS if one.split()[0] in cures.CALLS])
def test_a_call_binds_to_the_function(line):
    translated = cures.in_python(f"`wherry {line}`").strip("`")
    if translated.endswith("(…)") or cures.COMMANDS_ONLY.intersection(line.split()):
        return
    call = ast.parse(translated.replace("…", "None"), mode="eval").body
    function = getattr(wherry, call.func.attr)
    keywords = {one.arg for one in call.keywords}
    inspect.signature(function).bind(*call.args, **dict.fromkeys(keywords))
    assert keywords <= public()


@pytest.mark.parametrize("one", options_of(ConvertRequest, RewriteRequest), ids=lambda one: one.flag)
def test_the_tables_are_those_of_the_requests(one):
    shown = {
        "flag": f"{one.name}={not one.default}", "word": f"{one.name}=VALUE", "rules": f"{one.name}=[VALUE]",
        "list": f"{one.name}=[VALUE]", "table": f'{one.name}={{VALUE: "…"}}'.replace('"…"', "…"),
    }[one.kind]  # fmt: skip
    value = "" if one.kind == "flag" else " VALUE"
    assert cures.in_python(f"pass {one.flag}{value}, then stop") == f"pass {shown}, then stop"


@pytest.mark.parametrize(
    ("cure", "expected"),
    [
        ("pass --family, or declare one with --family-file; then run `wherry layouts` to list the families",
         "pass family=…, or declare one with family_file=…; then run `wherry layouts` to list the families"),
        ("pass --dtype to cast it", "pass dtype=… to cast it"),
        ("omit them with --ignore values,empties", 'omit them with ignore=["values", "empties"]'),
        ("name them: --set 'boxed=params/*/kernel'", 'name them: options={"boxed": "params/*/kernel"}'),
        ("state them: --set a=VALUE --set b=half", 'state them: options={"a": VALUE, "b": "half"}'),
        ("leave out --into to go on", "leave out into=True to go on"),
        ("pass --as-step 7, or --as-step N.", "pass as_step=7, or as_step=N."),
        ("join them with `--set join=.`, or stop", 'join them with `options={"join": "."}`, or stop'),
        ("state `--set a=1 --set b=x.y`", 'state `options={"a": 1, "b": "x.y"}`'),
        ("run `wherry plan A B --to orbax --set a=1 --set 'b=c d'`",
         'run `wherry.plan(A, B, to="orbax", options={"a": 1, "b": "c d"})`'),
        ("pass `--only params` to write", 'pass `only="params"` to write'),
        ("run `wherry verify '/a b' --level digest`", 'run `wherry.verify("/a b", level="digest")`'),
        ("run `wherry inspect --digest --write /a`", 'run `wherry.inspect("/a", digest=True, write=True)`'),
        ("run `wherry register URI --model m --tag a=b`", 'run `wherry.register(URI, model="m", tags={"a": "b"})`'),
        ("run `prefect deploy --all` and `wherry clean /a`", "run `prefect deploy --all` and `wherry clean /a`"),
        ("run `wherry verify 'a`", "run `wherry verify 'a`"),
        ("a--b is no option, nor is -- or --x_y", "a--b is no option, nor is -- or --x_y"),
    ],
)  # fmt: skip
def test_words_of_python(cure, expected):
    assert cures.in_python(cure) == expected
    assert cures.in_python(expected) == expected


def test_each_caller_reads_its_own_words(tmp_path, capsys):
    small(tmp_path / "a.safetensors")
    with pytest.raises(UsageError) as caught:
        wherry.verify(tmp_path / "a.safetensors", level="roundtrip")
    assert str(caught.value).endswith("cure: pass against=SOURCE")
    assert caught.value.for_shell().endswith("cure: pass --against SOURCE")
    assert caught.value.to_json()["cure"] == "pass --against SOURCE"
    with pytest.raises(SystemExit):
        main(["verify", str(tmp_path / "a.safetensors"), "--level", "roundtrip"])
    assert capsys.readouterr().err.endswith("cure: pass --against SOURCE\n")
