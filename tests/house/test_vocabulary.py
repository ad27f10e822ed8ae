"""The vocabulary of the house: names say what a thing is, and each name is one thing's; see infra/lexicon.md."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

from tests.support.house import MODULES, ROOT, label

LEXICON = ROOT / "infra" / "lexicon.md"
# Words that end as participles do and are nouns of the field.
NOUNS = frozenset(
    {"encoding", "ending", "finding", "hashing", "listing", "mapping", "partitioning", "sharding", "sighting"}
    | {"signing", "spelling", "staging", "testing"}
)
# What programs of others import by its name: the door's, and those of format plug-ins.
PUBLIC = frozenset({"Restored", "Opened", "Adapted", "Coded", "Stored", "Chunked", "Computed"})
IRREGULAR = frozenset(
    {
        "built",
        "done",
        "drawn",
        "found",
        "given",
        "gone",
        "held",
        "kept",
        "known",
        "laid",
        "left",
        "lost",
        "made",
    }
    | {"meant", "met", "said", "seen", "sent", "shown", "taken", "thrown", "told", "worn", "written"}
)


@cache
def classes():
    """Name → the files that define a class of it."""
    found = defaultdict(list)
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(label(path))
    return found


@cache
def functions():
    """Module and name of every function of a module, without underscores; methods are left out: `Contents.held`."""
    return [
        (label(path), node.name.strip("_"))
        for path in MODULES
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def words(name):
    """The words of a name: `ContainerChecksums` and `container_checksums` have two."""
    return re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+", name)


def is_bare_participle(name):
    parts = [word.lower() for word in words(name)]
    if len(parts) != 1 or parts[0] in NOUNS:
        return False
    return (
        parts[0] in IRREGULAR or re.fullmatch(r"[a-z]{2,}[^e]ed|[a-z]{3,}(?<!str)ing", parts[0]) is not None
    )


def replaced():
    """The words of the third column: each stands for something that has another name."""
    rows = [line.split("|") for line in LEXICON.read_text().splitlines() if line.startswith("| ")]
    return {word.strip() for row in rows for word in row[3].split(",")} - {"", "instead of"}


def test_no_two_classes_have_one_name():
    assert {name: files for name, files in classes().items() if len(files) > 1} == {}


def test_no_class_is_named_by_a_bare_participle():
    assert [name for name in classes() if is_bare_participle(name) and name not in PUBLIC] == []


def test_no_function_is_named_by_a_bare_past_participle():
    """A function is named by a verb, a question or what it returns; `waiting` names a block in which that is so."""
    odd = [one for one in functions() if is_bare_participle(one[1]) and not one[1].endswith("ing")]
    assert odd == []


def test_no_module_is_named_by_a_bare_participle():
    assert [label(path) for path in MODULES if is_bare_participle(path.stem)] == []


def test_what_has_another_name_names_nothing():
    """Words that are participles or names of old: none of them is a class, and none a module."""
    taken = {name.lower().lstrip("_") for name in classes()} | {Path(path).stem for path in MODULES}
    general = {
        "path",
        "name",
        "row",
        "model",
        "system",
        "run",
        "block",
        "place",
        "lock",
        "event",
        "task",
        "box",
    }
    assert (replaced() - general) & taken == set()


@pytest.mark.parametrize(
    ("name", "bare"),
    [
        ("Stored", True), ("_Known", True), ("Filling", True), ("written", True), ("opening", True),
        ("StoredItem", False), ("Staging", False), ("Seed", False), ("read", False), ("String", False),
        ("hashing", False), ("Listing", False),
    ],
)  # fmt: skip
def test_the_check_tells_them_apart(name, bare):
    assert is_bare_participle(name) is bare


def test_every_line_of_the_lexicon_has_its_word_once():
    rows = [line.split("|") for line in LEXICON.read_text().splitlines() if line.startswith("| ")]
    names = [row[1].strip() for row in rows if row[1].strip() != "word"]
    assert len(names) == len(set(names)) > 50
    assert all(len(row) == 5 and row[2].strip() for row in rows)
