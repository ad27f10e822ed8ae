"""A wherry.toml that somebody else wrote is refused or read in linear time, and an error stays readable."""

from __future__ import annotations

import time

import pytest

from wherry.config.config import load_config
from wherry.config.values import lines_of
from wherry.errors import HostileError, UsageError, WherryError

SECONDS = 5  # of processor time, as SECURITY.md promises
SIZE = 50_000
LINES = {
    "header": "[" + " " * SIZE,
    "closed": "[a" + " " * SIZE + "b",
    "comment": "[a]" + " " * SIZE + "x",
    "key": "a" * SIZE,
    "spaces": "a" + " " * SIZE,
    "parts": "a . " * SIZE,
    "quotes": '"a" . ' * SIZE,
    "indent": " " * SIZE + "x",
    "brackets": "[" * SIZE,
}


@pytest.mark.parametrize("line", LINES.values(), ids=LINES)
def test_a_line_is_looked_at_once(line):
    began = time.process_time()
    assert not any(number != 1 for number in lines_of(line).values())
    assert time.process_time() - began < SECONDS


def test_a_line_of_an_array_is_no_endless_header(tmp_path):
    file = tmp_path / "wherry.toml"
    file.write_text('[routes.x]\nroot = "/a"\nbogus = [\n[' + " " * SIZE + '\n"x"]]\n')
    began = time.process_time()
    with pytest.raises(UsageError, match=r"line 3, routes\.x\.bogus: unknown field"):
        load_config(file)
    assert time.process_time() - began < SECONDS


MANY = {
    "fields": '[routes.x]\nroot = "/a"\n' + "".join(f"b{at} = 1\n" for at in range(60_000)),
    "routes": "".join(f"[routes.r{at}]\nbogus = 1\n" for at in range(20_000)),
    "environments": "".join(f"[env.e{at}]\nx = 1\n" for at in range(20_000)),
    "settings": "[policy]\n" + "".join(f"p{at} = {{ level = 'x' }}\n" for at in range(20_000)),
}


@pytest.mark.parametrize("text", MANY.values(), ids=MANY)
def test_many_faults_are_found_in_linear_time_and_the_first_are_named(text, tmp_path):
    file = tmp_path / "wherry.toml"
    file.write_text(text)
    caught = None
    began = time.process_time()
    try:
        load_config(file)
    except WherryError as error:
        caught = error
    assert len(str(caught)) < 4000
    assert time.process_time() - began < SECONDS


def test_the_number_of_faults_that_are_not_named_is_stated(tmp_path):
    file = tmp_path / "wherry.toml"
    file.write_text('[routes.x]\nroot = "/a"\ntargets = []\n' + "".join(f"b{at} = 1\n" for at in range(25)))
    with pytest.raises(UsageError, match=r"line 22, routes\.x\.b18: unknown field; 6 more"):
        load_config(file)


def test_environments_are_limited(tmp_path):
    file = tmp_path / "wherry.toml"
    file.write_text("".join(f"[env.e{at}]\nlinks = []\n" for at in range(100)))
    load_config(file)
    file.write_text("".join(f"[env.e{at}]\nlinks = []\n" for at in range(101)))
    with pytest.raises(HostileError, match="limit of 100 environments"):
        load_config(file)
