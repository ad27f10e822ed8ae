"""infra/attack: its commands are all of the command line, its terminal obeys, and its files are read in two ways."""

import io
import json
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _attacks(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.syspath_prepend(str(ROOT / "infra"))


def leaves(group, above=()):
    """The names of all commands."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from leaves(command, (*above, name))
        else:
            yield " ".join((*above, name))


def test_every_command_is_attacked_or_has_a_reason():
    from attacks import verbs

    from wherry.cli import cli

    commands = set(leaves(cli))
    attacked = {line[0] if line[0] in commands else " ".join(line[:2]) for line in verbs.VERBS.values()}
    assert attacked <= commands
    assert commands - attacked == set(verbs.LEFT)
    assert all(len(reason) > 10 for reason in verbs.LEFT.values())


@pytest.mark.parametrize(
    ("text", "obeyed"),
    [
        ("plain\n", False),
        ("\x1b[?25l\r\x1b[2Kmodel [red]MARKUP[/red]\x1b[1A\x1b[2K\x1b[?25h\rok\n", False),
        ("\x1b[1;31mcolour\x1b[0m \\x1b]0;title\\x07\n", False),
        ("a\\nb: forged\n", False),
        ("\x1b]0;title\x07", True),
        ("\x9b31m", True),
        ("a\rb", True),
        ("a\nb: forged", True),
        ("\u202egnp.exe", True),
        ("\x1b[31mMARKUP\x1b[0m", True),
    ],
)
def test_what_a_terminal_obeys_and_the_program_did_not_mean(text, obeyed):
    from attacks.terminal import obeys

    assert obeys(text) is obeyed


def test_half_of_the_cases_run_on_a_terminal_with_their_progress_bar():
    from attacks import terminal

    chosen = [terminal.on_terminal(f"kind/{number}") for number in range(400)]
    assert 120 < sum(chosen) < 280
    assert terminal.Terminal().isatty()
    assert terminal.words_for(["verify", "x", "--quiet"], terminal=True) == ["verify", "x"]
    assert terminal.words_for(["verify", "--quiet"], terminal=False) == ["verify", "--quiet"]


def test_archives_of_two_lists_have_both_and_python_reads_one_of_them():
    from attacks import ambiguous, pickles

    first = pickles.archive({"a": b"sound", "b": b"sound"})
    second = pickles.archive({"a": b"evil"})
    read = set()
    for name, data in ambiguous.two_lists(ambiguous.Archive(first), ambiguous.Archive(second)):
        assert b"sound" in data, name
        assert b"evil" in data, name
        try:
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                read.add(archive.read("a"))
        except (zipfile.BadZipFile, KeyError):
            read.add(None)
    assert {b"sound", b"evil"} <= read


def test_an_archive_of_two_names_is_one_that_python_notices_or_renames():
    from attacks import ambiguous, pickles

    sound = ambiguous.Archive(pickles.archive({"first": b"1", "other": b"2"}))
    found = dict(ambiguous.two_names(sound))
    with (
        zipfile.ZipFile(io.BytesIO(found["local-name"])) as archive,
        pytest.raises(zipfile.BadZipFile, match="differ"),
    ):
        archive.read("first")
    assert b"../outside" in found["unicode-name-1"]


def test_a_name_is_stated_twice():
    from attacks import ambiguous, lies

    sound = {"a": {"b": 1, "c": [2]}}
    text = lies.duplicate_at(sound, ("a", "b"), 9)
    rows = []
    json.loads(text, object_pairs_hook=lambda pairs: rows.append(pairs) or dict(pairs))
    assert [("b", 1), ("b", 9), ("c", [2])] in rows
    texts = list(ambiguous.texts_with_a_name_twice(sound, "seed"))
    assert len(texts) == 3 + 4
    assert list(ambiguous.texts_with_a_name_twice([1], "seed")) == []


def test_a_number_of_a_config_is_huge(tmp_path):
    from attacks import counts

    huge = {str(value) for value in counts.HUGE}
    for name, text in (
        ("config.json", '{"layers": 2, "heads": [3]}'),
        ("base.yml", "layers: 2\nname: a\n"),
        ("model.gin", "L = 4\nnetwork.heads = 2\n"),
    ):
        (tmp_path / name).write_text(text)
        found = [one.decode() for one in counts.texts_with_a_huge_number(tmp_path / name)]
        assert found, name
        assert all(any(value in one for value in huge) or "e+300" in one for one in found)
    (tmp_path / "weights.json").write_text('{"a": "b"}')
    assert list(counts.texts_with_a_huge_number(tmp_path / "weights.json")) == []


def test_every_family_has_configs_with_its_own_attributes():
    from attacks import counts

    family = tomllib.loads((ROOT / "wherry" / "families" / "llama.toml").read_text())
    assert {"num_hidden_layers", "vocab_size", "rope_theta", "head_dim"} <= set(counts.attributes(family))
    assert not {"activation", "rope", "or"} & set(counts.attributes(family))
