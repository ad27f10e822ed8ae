"""Cures in the words of the caller: every command in one parses, and to Python every option is a keyword argument.

The cures and other texts are those of the code, so that a new one is checked without being listed here. What is filled
in when the program runs is `1`.
"""

from __future__ import annotations

import ast
import copy
import inspect
import pickle
import re
import shlex
from functools import cache

import click
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import wherry
from tests.support.command import small
from tests.support.cure_texts import COMMANDS, named, parts_of, spliced, stated_cures, stated_each, texts
from tests.support.house import label
from wherry import cures
from wherry.cli import cli, main
from wherry.core.request import ConvertKeywords, ConvertRequest, RewriteRequest, WritingKeywords, options_of
from wherry.cures import Argument, Arguments, Blank, Command, Cure, either, in_python, program
from wherry.errors import UsageError
from wherry.formats.registry import formats

# Modules whose cures no error carries to a caller in Python.
ROOF = ("wherry/cli/", "wherry/prove/bundle.py", "wherry/nightly/doctor.py")
FOR_PYTHON = [row for row in stated_cures() if not label(row[0]).startswith(ROOF)]
# What a text with an option or a command can be besides a cure: what went wrong, or what an option does.
OTHERS = ("what", "reason", "spelled", "help", "description", "form", "route")
# Texts of plans, receipts, reports and logs, which are the same to every reader.
NOTES = (
    "wherry/core/request.py: Option of the target format",
    "wherry/families/companions.py: 1: 1 needs one; pass its folder with --assets",
    "wherry/families/companions.py: 1 is copied unchanged",
    "wherry/prove/bundle.py: Evidence of an audit",
    "wherry/prove/full_read.py: 1it has the checkpoint as 1; pass --format",
    "wherry/prove/records.py: ; the ledger has no digests of single tensors",
    "wherry/prove/report.py: the store states the generations",
    "wherry/target/staging.py: the staging area %s was not removed",
    "wherry/trace/lineage_text.py: 1 of 1 are shown",
    "wherry/trace/page.py: 1\n(not all of 1",
    "wherry/transform/stated_config.py: no config.json",
)


def test_the_cures_are_those_of_the_code():
    found = {str(cure) for _path, cure in stated_cures()}
    assert "pass --only params" in found
    assert "run `wherry work 1`" in found, "with a word from elsewhere"
    assert "register it again: `wherry register URI --model NAME`" in found, "of a table"
    assert len(found) > 150


def test_a_cure_with_options_or_commands_is_no_plain_text():
    """As a plain text it would be in the words of the command line to every caller."""
    plain = [(label(path), text, role) for path, text, role in texts() if " " in text]
    assert [row for row in plain if "cure" in row[2].lower()] == []
    others = [f"{path}: {text}" for path, text, role in plain if role not in OTHERS]
    assert [one for one in others if not one.startswith(("wherry/cli/", *NOTES))] == []
    assert [note for note in NOTES if not any(one.startswith(note) for one in others)] == [], (
        "no longer there"
    )
    assert spliced() == []


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
    """Whether an option can have this value; a blank, or what the program fills in, stands for one."""
    if option.is_flag:
        return False
    if isinstance(value, Blank | tuple) or "1" in value:
        return True
    if option.name in ("to", "format"):
        return value in {name for row in formats().values() for name in (row.name, *row.aliases)}
    try:
        return option.type.convert(value, option, None) is not None
    except click.BadParameter:
        return False


@pytest.mark.parametrize("row", stated_each(Argument), ids=named)
def test_an_option_is_one_and_takes_the_value(row):
    part = row[1]
    same = [option for option in OPTIONS if f"--{part.name}" in option.opts]
    assert same or part.name in ("1", "help"), part
    assert part.value is None or not same or any(takes(option, part.value) for option in same), part


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


def call_of(text):
    """A call in Python, of which the reader fills in what is blank."""
    return ast.parse(text.strip("`").replace("…", "None"), mode="eval").body


@pytest.mark.parametrize("row", FOR_PYTHON, ids=named)
def test_to_python_an_option_is_a_keyword_argument(row):
    path, cure = row
    for part in (*parts_of(cure, Argument), *parts_of(cure, Arguments)):
        if part != Argument("1", "1"):  # that a family declares
            names = {one.arg for one in call_of(f"f({part.in_python()})").keywords}
            assert names <= public() | near(path.parent), part


@pytest.mark.parametrize("row", FOR_PYTHON, ids=named)
def test_a_call_binds_to_the_function(row):
    for command in parts_of(row[1].about("/ckpt"), Command):
        text = command.in_python()
        if text == str(command):
            options = {word.name for word in command.words if isinstance(word, Argument)}
            assert command.verb not in cures.CALLS or options & cures.COMMANDS_ONLY
            continue
        call = call_of(text)
        keywords = dict.fromkeys(one.arg for one in call.keywords)
        assert set(keywords) <= public()
        if "(…" not in text:
            inspect.signature(getattr(wherry, call.func.attr)).bind(*call.args, **keywords)


@pytest.mark.parametrize("one", options_of(ConvertRequest, RewriteRequest), ids=lambda one: one.flag)
def test_the_tables_are_those_of_the_requests(one):
    shown = {
        "flag": f"{one.name}={not one.default}", "word": f"{one.name}=VALUE", "rules": f"{one.name}=[VALUE]",
        "list": f"{one.name}=[VALUE]", "table": f'{one.name}={{"VALUE": …}}',
    }[one.kind]  # fmt: skip
    value = None if one.kind == "flag" else Blank("VALUE")
    assert Argument(one.flag.removeprefix("--"), value).in_python() == shown


@pytest.mark.parametrize(
    ("part", "shell", "python"),
    [
        (Argument("family-file"), "--family-file", "family_file=…"),
        (Argument("ignore", ("values", "empties")), "--ignore values,empties", 'ignore=["values", "empties"]'),
        (Argument("set", "boxed=p/*/kernel"), "--set 'boxed=p/*/kernel'", 'options={"boxed": "p/*/kernel"}'),
        (Argument("set", "join=."), "--set join=.", 'options={"join": "."}'),
        (Argument("set", Blank("axes=FILE")), "--set axes=FILE", 'options={"axes": FILE}'),
        (Argument("set", Blank("scan=…")), "--set scan=…", 'options={"scan": …}'),
        (Argument("set", "resume"), "--set resume", 'options={"resume": …}'),
        (Argument("set", "zarr=3"), "--set zarr=3", 'options={"zarr": 3}'),
        (Argument("set", "of=007"), "--set of=007", 'options={"of": "007"}'),
        (Argument("tag", "a=1"), "--tag a=1", 'tags={"a": "1"}'),
        (Argument("into"), "--into", "into=True"),
        (Argument("no-lineage"), "--no-lineage", "lineage=False"),
        (Argument("as-step", 7), "--as-step 7", "as_step=7"),
        (Argument("as-step", Blank("N")), "--as-step N", "as_step=N"),
        (Argument("item", "7"), "--item 7", 'item="7"'),
        (Argument("rename", "a -> b"), "--rename 'a -> b'", 'rename=["a -> b"]'),
        (Arguments(Argument("set", Blank("a=VALUE")), Argument("set", "b=half")),
         "--set a=VALUE --set b=half", 'options={"a": VALUE, "b": "half"}'),
        (Arguments(Argument("to", "orbax"), Argument("family", "none")),
         "--to orbax --family none", 'to="orbax", family="none"'),
        (Command("plan", Blank("A"), Blank("B"), Argument("to", "orbax"), Argument("set", "b=c d")),
         "`wherry plan A B --to orbax --set 'b=c d'`", '`wherry.plan(A, B, to="orbax", options={"b": "c d"})`'),
        (Command("inspect", Argument("digest"), Argument("write"), "/a b"),
         "`wherry inspect --digest --write '/a b'`", '`wherry.inspect("/a b", digest=True, write=True)`'),
        (Command("verify", Argument("level", "digest")),
         "`wherry verify --level digest`", '`wherry.verify(…, level="digest")`'),
        (Command("inspect"), "`wherry inspect`", "`wherry.inspect(…)`"),
        (Command("inspect", Argument("pickles")), "`wherry inspect --pickles`", "`wherry inspect --pickles`"),
        (Command("ledger rebuild", Blank("ROOT")), "`wherry ledger rebuild ROOT`", "`wherry ledger rebuild ROOT`"),
        (Command("", Argument("help")), "`wherry --help`", "`wherry --help`"),
        (program("prefect", "deploy", "--all"), "`prefect deploy --all`", "`prefect deploy --all`"),
        (Cure("pass {{}} or {}", Argument("to", "npz")), "pass {} or --to npz", 'pass {} or to="npz"'),
        (Cure("a {}; {}", "{}", either([Argument("into"), "it"])), "a {}; --into or it", "a {}; into=True or it"),
        ("a plain --text", "a plain --text", "a plain --text"),
    ],
)  # fmt: skip
def test_words_of_the_shell_and_of_python(part, shell, python):
    assert str(part) == shell
    assert in_python(part) == python


VALUES = st.text(st.characters(exclude_characters="\0"), min_size=1, max_size=8)


@settings(deadline=None)
@given(VALUES, VALUES, VALUES)
def test_any_value_can_be_pasted(place, item, join):
    """Quotes, spaces, braces, backquotes: each value is one word of a shell, and one literal of Python."""
    options = (Argument("item", item), Argument("set", f"join={join}"))
    cure = Cure("run {}", Command("plan", place, *options))
    assert shlex.split(str(cure).removeprefix("run ")[1:-1]) == [
        "wherry", "plan", place, "--item", item, "--set", f"join={join}",
    ]  # fmt: skip
    call = ast.parse(cure.in_python().removeprefix("run ")[1:-1], mode="eval").body
    assert [ast.literal_eval(one) for one in call.args] == [place]
    stated = {one.arg: ast.literal_eval(one.value) for one in call.keywords}
    assert (stated["item"], str(stated["options"]["join"])) == (item, join)


def test_a_cure_is_about_the_checkpoint_or_the_job():
    cure = Cure(
        "run {}, {}, {} or {}",
        Command("inspect"),
        Command("work"),
        Command("formats"),
        Command("verify", "/b"),
    )
    assert (
        cure.about("/a b")
        == "run `wherry inspect '/a b'`, `wherry work`, `wherry formats` or `wherry verify /b`"
    )
    assert cure.about(job="/j").startswith("run `wherry inspect`, `wherry work /j`")
    assert cure.about("live:torch") == cure
    assert Cure("see {}", Command("verify", Argument("help"))).about("/a") == "see `wherry verify --help`"
    assert Cure("{}; then stop", cure).about("/a").in_python().startswith('run `wherry.inspect("/a")`')


@pytest.mark.parametrize("other", [lambda cure: pickle.loads(pickle.dumps(cure)), copy.deepcopy])
def test_a_cure_comes_from_another_process_as_it_was(other):
    error = other(UsageError("x", cure=Cure("pass {}", Argument("set", "join=."))))
    assert error.for_shell() == "x\ncure: pass --set join=."
    assert str(error) == 'x\ncure: pass options={"join": "."}'


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
