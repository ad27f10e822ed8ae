"""Names and words of the code."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from pydantic import ValidationError

import wherry
from tests.support.command import typed
from tests.support.house import MODULES, ROOT, label
from tests.support.infra import load
from tests.support.workers import LONG, TOGETHER
from wherry.config.config import load_config
from wherry.core.names import CONCEPTS
from wherry.core.units import plural
from wherry.errors import UsageError

# Names that are refused for one concept, and are the right ones for another: (door, place, name) → what it is there.
OTHERS = {
    ("wherry.toml", "notify", "on"): "when a notification is sent",
    ("wherry.toml", "routes", "name"): "the name of the route, which is the key of its table",
    ("Python", "export", "name"): "the name of the model that a config of the target states",
    (
        "form",
        "promote",
        "policy_name",
    ): "the policy of wherry.toml; the field `policy` has the gates themselves",
}
# What only the command line has: how it prints, asks and previews, and what other functions do.
SHELL = {
    "check", "config", "dry_run", "env", "json", "markdown", "pickles", "price", "quiet", "rate", "registered",
    "rollback", "tree", "workers", "yes",
}  # fmt: skip
# What only Python has: arguments without a name on the command line, and objects.
ARGUMENTS = {
    "a", "b", "layout", "now",
    "on_skip", "payload", "progress", "root", "routes", "run_page", "scope", "source", "sources",
    "strict", "target", "timeout", "uri", "uri_or_model", "uri_or_receipt",
}  # fmt: skip


@pytest.fixture
def stated(monkeypatch):
    """Every name that a user may state."""
    return load("names", monkeypatch).stated_names()


def test_no_door_takes_a_second_name_for_a_concept(stated):
    taken = defaultdict(list)
    for concept in CONCEPTS:
        for one in stated:
            second = one.name in concept.refused and one.written != concept.written(one.door)
            of_another = any(one.written == other.written(one.door) for other in CONCEPTS if other != concept)
            if second and not of_another and (one.door, one.where, one.written) not in OTHERS:
                taken[concept.name].append(f"{one.door}, {one.where}: {one.written}")
    assert not taken, "rename them, or say in OTHERS what they are there"


def test_every_name_and_exception_of_the_table_is_taken(stated):
    doors = defaultdict(set)
    for one in stated:
        doors[one.door].add(one.written)
    for concept in CONCEPTS:
        assert sum(concept.written(door) in names for door, names in doors.items()) >= 2, concept.name
        for door, name in concept.exceptions:
            assert name in doors[door], f"{concept.name} has its own name at {door}: remove the exception"
    assert {*OTHERS} <= {(one.door, one.where, one.written) for one in stated}


def test_a_command_and_its_function_take_the_same_names(stated):
    names = defaultdict(set)
    renamed = {(door, name): one.name for one in CONCEPTS for door, name in one.exceptions}
    for one in stated:
        names[one.door, one.where].add(renamed.get((one.door, one.written), one.name))
    for (door, verb), options in names.items():
        arguments = names.get(("Python", verb), set())
        if door == "command line" and arguments:
            plural = {f"{name}s" for name in options} & arguments  # an option that is repeated
            singular = {name.removesuffix("s") for name in plural}
            assert options - arguments - singular - SHELL - _MORE.get(verb, set()) == set(), verb
            assert arguments - options - plural - ARGUMENTS - _FEWER.get(verb, set()) == set(), verb


# What a command does with other functions: `convert --engine` (of a job), readers of a pickle; and what a plan ignores.
_MORE = {
    "convert": {"on", "unit"}, "plan": {"unit"}, "detect": {"allow_opaque"}, "inspect": {"allow_opaque"},
    "verify": {"allow_opaque"},
}  # fmt: skip
_FEWER = {
    "merge": {"allow_opaque"},
    "plan": {"as_step", "if_exists", "into", "lineage", "meta", "sign"},
    "prune": {"dry_run"},
}

REFUSED = [
    ("convert a b --to dcp --from hf", "--format"),
    ("convert a b --to dcp --engine dask:2", "--on"),
    ("verify a --opaque x.Y", "--allow-opaque"),
    ("verify a --unit-bytes 1GiB", "--unit"),
    ("register a --name m", "--model"),
    ("promote models:/m@c --to champion", "--alias"),
    ("promote models:/m@c --gates release", "--policy"),
    ("convert a b --to dcp --read-back none", "--verify"),
    ("convert a b --to dcp --options join=.", "--set"),
]


@pytest.mark.parametrize(("line", "cure"), REFUSED)
def test_the_command_line_refuses_another_name_with_the_cure(line, cure, tmp_path, capfd):
    code, printed = typed(line, tmp_path, capfd)
    assert code == 2
    assert f"cure: did you mean {cure}?" in printed


@pytest.mark.parametrize(
    ("call", "cure"),
    [
        (lambda: wherry.convert("a", "b", to="dcp", source_format="hf"), "format"),
        (lambda: wherry.convert("a", "b", to="dcp", read_back=False), "verify"),
        (lambda: wherry.verify("a", verify="digest"), "level"),
        (lambda: wherry.verify("a", engine="dask:2"), "on"),
        (lambda: wherry.verify("a", unit_bytes=1), "unit"),
        (lambda: wherry.open("a", opaque=["x.Y"]), "allow_opaque"),
        (lambda: wherry.register("a", name="m"), "model"),
        (lambda: wherry.promote("a", to_alias="champion"), "alias"),
        (lambda: wherry.promote("a", gates="release"), "policy"),
        (lambda: wherry.convert("a", "b", to="dcp", set={"join": "."}), "options"),
    ],
)
def test_python_refuses_another_name_with_the_cure(call, cure):
    with pytest.raises(UsageError) as caught:
        call()
    assert caught.value.cure.startswith(f"did you mean {cure}?")


ROUTE = '[routes.a]\nroot = "runs"\n{route}\n[[routes.a.targets]]\nuri = "out/{{name}}"\n{target}\n'


@pytest.mark.parametrize(
    ("route", "target", "cure"),
    [
        ('source_format = "hf"', 'format = "dcp"', "format"),
        ("read_back = false", 'format = "dcp"', "verify"),
        ('engine = "dask:2"', 'format = "dcp"', "on"),
        ('unit_size = "1GiB"', 'format = "dcp"', "unit"),
        ('model_name = "m"', 'format = "dcp"', "model"),
        ("", 'to = "dcp"', "format"),
        ("", 'format = "dcp"\nset = { join = "." }', "options"),
    ],
)
def test_wherry_toml_refuses_another_name_with_the_cure(route, target, cure, tmp_path):
    (tmp_path / "wherry.toml").write_text(ROUTE.format(route=route, target=target))
    with pytest.raises(UsageError) as caught:
        load_config(tmp_path / "wherry.toml")
    assert any((one.cure or "").startswith(f"did you mean {cure}?") for one in caught.value.faults)


@pytest.mark.parametrize(
    ("form", "fields", "cure"),
    [
        ("convert_spec:ConvertSpec", {"source": "a", "target": "b", "to": "dcp", "model_name": "m"}, "model"),
        (
            "convert_spec:ConvertSpec",
            {"source": "a", "target": "b", "to": "dcp", "read_back": False},
            "verify",
        ),
        ("audit:AuditSpec", {"verify": "digest"}, "level"),
        ("promote:PromoteSpec", {"subject": "a", "advanced": {"to_alias": "b"}}, "alias"),
    ],
)
def test_a_form_refuses_another_name_with_the_cure(form, fields, cure):
    from importlib import import_module

    module, _, name = form.partition(":")
    with pytest.raises(ValidationError, match=f"did you mean {cure}"):
        getattr(import_module(f"wherry.flows.{module}"), name)(**fields)


# Nobody reads "1 steps": a number and its noun come from `counted`, which knows both forms.


# What wherry counts, in the words of its commands, errors and flows.
NOUNS = (
    "tensors statements versions checkpoints conversions steps files units workers edges places targets arrays "
    "parameters weights chunks problems findings routes"
).replace(" ", "|")
_PLURAL = re.compile(rf" (?:[a-z]+ )?(?:{NOUNS})\b")
# The program of an evidence bundle imports nothing of ours; formats say what they saw, for experts.
_APART = ("wherry/prove/check.py", "wherry/core/units.py", "integrations/")


def plurals(tree: ast.AST) -> Iterator[str]:
    """Each number in a text with a plural noun behind it; constants, which are never 1, and sizes are not meant."""
    for text in (node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)):
        for value, after in zip(text.values, text.values[1:], strict=False):
            if isinstance(value, ast.FormattedValue) and isinstance(after, ast.Constant):
                number = ast.unparse(value.value)
                found = _PLURAL.match(str(after.value))
                if found and not number.isupper() and not number.startswith("show_"):
                    yield f"{{{number}}}{found[0]}"


def test_numbers_agree_with_their_nouns():
    found = {
        f"{label(path)}: {one}"
        for path in MODULES
        if not label(path).startswith(_APART)
        for one in plurals(ast.parse(path.read_text()))
    }
    assert found == set(), "write {counted(number, 'noun')}"


def test_both_forms_and_their_verbs():
    assert [plural(number, "tensor") for number in (0, 1, 2000)] == ["0 tensors", "1 tensor", "2,000 tensors"]
    assert [plural(number, "chunk", "is/are") for number in (1, 2)] == ["1 chunk is", "2 chunks are"]


# The vocabulary of the house: names say what a thing is, and each name is one thing's; see
# infra/lexicon.md.


LEXICON = ROOT / "infra" / "lexicon.md"
# Words that end as participles do and are nouns of the field.
NOUNS_OF_VOCABULARY = frozenset(
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
    if len(parts) != 1 or parts[0] in NOUNS_OF_VOCABULARY:
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


# How tests are spread over workers: files stay whole, flows share a server, and the list of long ones is
# no dead letter.


def test_every_long_one_is_there():
    names = {path.stem for path in (ROOT / "tests").rglob("test_*.py")}
    assert set(LONG) <= names | {folder.rstrip("/").rpartition("/")[2] for folder in TOGETHER}
    assert all((ROOT / folder).is_dir() for folder in TOGETHER)
