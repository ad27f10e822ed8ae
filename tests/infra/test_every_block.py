"""Every block of code in README and `docs/` is one that its language takes; most of them are run elsewhere too.

A command is parsed by the command line that it is meant for, so that no page names an option that does not exist.
"""

from __future__ import annotations

import ast
import re
import textwrap
import tomllib

import click
import pytest

from tests.support.readme import TEXTS, code, commands
from wherry.cli import cli

# Languages that are parsed here; output and pictures are compared where the page is run.
PARSED = ("sh", "python", "toml")
OTHERS = {"console", "text", "mermaid", "json", "yaml", "dockerfile", ""}


def of(language):
    """Each block of a language, by its page and number."""
    return [
        pytest.param(text, id=f"{page}-{number}")
        for page, pages in TEXTS.items()
        if page != "docs/reference/python.md"  # signatures, which are generated
        for number, text in enumerate(code(pages, language))
    ]


def test_every_block_says_its_language():
    fence = re.compile(r"^```(\S*)[^\n]*\n(?:.*?)^```", re.DOTALL | re.MULTILINE)
    fences = {one for text in TEXTS.values() for one in fence.findall(text)}
    assert set(PARSED) <= fences <= {*PARSED, *OTHERS}


@pytest.mark.parametrize("block", of("sh"))
def test_commands_are_understood(block, monkeypatch):
    monkeypatch.setattr(click.Command, "invoke", lambda _self, context: context.info_name)
    for words in commands(block):
        if words[0] != "wherry":
            continue
        end = next((at for at, word in enumerate(words) if re.fullmatch(r"\d?>>?|\||&&|&|;", word)), None)
        cli.main(words[1:end], standalone_mode=False)


@pytest.mark.parametrize("block", of("python"))
def test_programs_are_programs(block):
    entry = re.match(r'\s*"\w+":', block)  # of a dictionary that the page speaks of
    assert ast.parse(f"{{{block}}}" if entry else textwrap.dedent(block)).body


@pytest.mark.parametrize("block", of("toml"))
def test_tables_are_tables(block):
    assert tomllib.loads(block)


def test_an_option_that_does_not_exist_is_seen(monkeypatch):
    with pytest.raises(click.NoSuchOption):
        test_commands_are_understood("wherry convert a b --too orbax\n", monkeypatch)
