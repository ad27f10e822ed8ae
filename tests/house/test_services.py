"""Rules of the code about services, waits, skips, interpreters and printed commands."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from tests.support.house import MODULES, label
from wherry.core.services import _SERVICES


def is_service(node):
    return (
        isinstance(node, ast.Call)
        and getattr(node.func, "id", "") == "service"
        and bool(node.args)
        and isinstance(node.args[0], ast.Constant)
    )


def assigned(tree):
    """Variable → the service that it is, also where several are assigned at once."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                both = isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
                pairs = zip(target.elts, node.value.elts, strict=True) if both else [(target, node.value)]
                yield from (
                    (one.id, value.args[0].value)
                    for one, value in pairs
                    if isinstance(one, ast.Name) and is_service(value)
                )


def uses(tree):
    """Service and attribute, for each attribute of a service that a module uses."""
    names = dict(assigned(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            if is_service(node.value):
                yield node.value.args[0].value, node.attr
            elif isinstance(node.value, ast.Name) and node.value.id in names:
                yield names[node.value.id], node.attr


def used_attributes():
    """Service → its attributes that the engine uses, each with the last module that uses it."""
    found = defaultdict(dict)
    for path in MODULES:
        text = path.read_text()
        for name, attribute in uses(ast.parse(text)) if "service(" in text else ():
            found[name][attribute] = label(path)
    return found


USED = used_attributes()


@pytest.mark.parametrize("name", sorted(USED))
def test_a_service_has_every_attribute_that_is_used(name):
    module_name, package, _extra = _SERVICES[name]
    pytest.importorskip(package or "wherry", reason=f"{package} is not installed")
    module = import_module(module_name)
    assert {one: file for one, file in USED[name].items() if not hasattr(module, one)} == {}


# Nothing waits in silence: what sleeps or waits stands in a `waiting` block, or says here why it need
# not.


# Method names that stop a thread until something happens.
STOPS = ("sleep", "wait", "wait_for")
# File and function → why nobody is left without a word.
ALLOWED = {
    # in parallel with the work: threads that run again and again
    ("wherry/store/waits.py", "_has_waits_after_pause"): "it is what tells",
    ("wherry/target/lease.py", "_beat"): "renews a lease, in a thread of its own",
    ("wherry/target/lease.py", "_release_later"): "releases a lease, in a thread of its own",
    ("wherry/workers/records.py", "beat"): "renews a claim, in a thread of its own",
    # work goes on meanwhile, and its progress is shown
    ("wherry/workers/coordinator.py", "_collect_results"): "units are made meanwhile",
    ("wherry/workers/engines.py", "_carry_with_processes"): "units are made meanwhile",
    ("wherry/workers/hash_on.py", "_call"): "a unit is read meanwhile",
    ("wherry/mover/pool.py", "reserved"): "other ranges are moved meanwhile",
    ("wherry/mover/decode.py", "complete"): "ranges are written meanwhile",
    ("wherry/target/parts.py", "_reserve"): "parts are sent meanwhile",
    ("wherry/target/parts.py", "drain"): "parts are sent meanwhile",
    ("wherry/target/parts.py", "loaded"): "another part is completed and sent meanwhile",
    ("wherry/live/restore.py", "room"): "other tensors are read meanwhile",
    ("flows/nightly.py", "result"): "the task is shown by Prefect, with its progress",
    # the caller tells
    ("wherry/store/remote_store.py", "in_thread"): "a call of a store, which retries and probes watch",
    ("wherry/ledger/database.py", "_begin_wal"): "called where a connection is waited for",
    (
        "wherry/live/shares.py",
        "_until",
    ): "each caller is in a block, or looks for signs of life once a second",
    ("wherry/live/store.py", "save"): "Export.wait tells",
    ("wherry/live/store.py", "wait"): "Export.wait tells",
    ("wherry/live/handle.py", "result"): "Export.wait tells",
    ("wherry/core/forks.py", "without_forks"): "two seconds at most, until a fork is done",
    ("wherry/core/background.py", "_wait"): "it logs what it waits for before the process exits",
    ("wherry/store/azure.py", "_await_copy"): "the copy is waited for in a block",
    ("integrations/mlflow/aliases.py", "_take"): "the lock is waited for in a block",
    ("integrations/mlflow/aliases.py", "_take_mark"): "the lock is waited for in a block",
    # it says itself what it waits for
    ("wherry/target/lease.py", "judge_all"): "warns with the time that it takes at most",
    ("wherry/core/child.py", "run"): "a check works, whose limit is stated",
    ("wherry/core/child.py", "wait"): "a check works, whose limit is stated",
    # two seconds at most
    ("wherry/core/forks.py", "_before_fork"): "transactions of other threads are waited for",
    ("wherry/target/lease.py", "_lock"): "held for a moment",
    ("wherry/core/child.py", "result"): "the time that a process gets to end",
    ("wherry/workers/work.py", "_note_failure"): "one pause",
    ("integrations/mlflow/client.py", "colliding"): "pauses of parts of a second, a few times",
}


def stopping(tree: ast.AST, function: str = "", watched: bool = False) -> Iterator[tuple[str, bool]]:
    """Function and whether it stands in a `waiting` block, of each call that stops a thread."""
    for node in ast.iter_child_nodes(tree):
        inside, announced = function, watched
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            inside, announced = node.name, False
        if isinstance(node, ast.With | ast.AsyncWith):
            announced = watched or any(_name(item.context_expr) == "waiting" for item in node.items)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in STOPS:
            yield inside, announced
        yield from stopping(node, inside, announced)


def _name(node: ast.expr) -> str:
    return node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""


def _unwatched() -> set[tuple[str, str]]:
    return {
        (label(path), function)
        for path in MODULES
        if not label(path).startswith("wherry/testing/")
        for function, announced in stopping(ast.parse(path.read_text()))
        if not announced
    }


def test_nothing_waits_in_silence():
    assert _unwatched() - set(ALLOWED) == set(), "put it into `with waiting(where, what=...)`"


# What a command changes of its interpreter, and that what the user has set of it stays.


PROGRAM = """
import gc, json, os, sys
from wherry.core.interpreter import tune
tune()
import numpy
print(json.dumps([gc.get_threshold()[0], sys.getswitchinterval(), os.environ["OPENBLAS_NUM_THREADS"],
                  len(os.listdir("/proc/self/task"))]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads as Linux shows them")
@pytest.mark.parametrize("given", [None, "2"])
def test_a_command_starts_no_threads_that_wait_for_matrices(given):
    env = {name: text for name, text in os.environ.items() if name != "OPENBLAS_NUM_THREADS"}
    env |= {"OPENBLAS_NUM_THREADS": given} if given else {}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=env, check=True, capture_output=True, text=True
    )
    threshold, interval, blas, threads = json.loads(done.stdout)
    assert (threshold, round(interval, 6), blas) == (10_000, 0.001, given or "1")
    assert threads == 1 or given


REUSE = """
import resource, sys
from wherry.core.interpreter import keep_freed_memory
if sys.argv[1] == "kept":
    keep_freed_memory()
for _turn in range(8):
    blocks = [b"x" * (8 << 20) for _block in range(4)]
    del blocks
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
"""


@pytest.mark.skipif(
    sys.platform != "linux" or not os.confstr("CS_GNU_LIBC_VERSION"), reason="only glibc has mallopt"
)
def test_freed_blocks_are_used_again_without_new_pages():
    def faults(word: str) -> int:
        done = subprocess.run([sys.executable, "-c", REUSE, word], check=True, capture_output=True, text=True)
        return int(done.stdout)

    pages = (8 << 20) // os.sysconf("SC_PAGE_SIZE")
    assert faults("not kept") - faults("kept") > 8 * pages


# Every name in a printed command is quoted, so that the command does only what it says when it is pasted.


ROOT_OF_COMMANDS = Path(__file__).parents[2]
# Names that wherry itself makes: of formats and variables, digests, file names of bundles, and quoted before.
QUOTES = {"quote", "join", "extra_command", "package_command", "promote_command"}
_SAFE = {
    "larger_factor()",
    "row.name",
    "formats[0]",
    "short(digest)",
    "_VARIABLE",
    "nbytes",
    "where",
    "found[1]",
    "found[2]",
}


# The same, where only one file has them under such a name.
_SAFE_IN = {
    "integrations/mlflow_version.py": {"to"},  # quoted before
    "wherry/cli/errors.py": {"option"},  # of click
    "wherry/cli/format_list.py": {"name", "option.default"},
    "wherry/core/units.py": {"text"},  # a decimal number
    "wherry/families/bind.py": {"differing[0]"},  # facts, and their values, which families declare
    "wherry/families/config_written.py": {"name"},
    "wherry/families/fact_checks.py": {"fact"},
    "wherry/families/facts.py": {"name", "choice"},
    "wherry/formats/detect.py": {"winners[0]"},  # a format
    "wherry/installation.py": {"name"},  # quoted before
    "wherry/mover/source.py": {"-(-_SHARE * (held or chunk) // _MIB)"},
    "wherry/transform/system.py": {"name"},  # a fact
}
# What stands before a name that is pasted: a command or an option in backquotes, an option in a sentence, and the start
# of a command or a variable in a sentence.
_COMMAND = re.compile(r"(?:^|[^`])`(?:[a-z][a-z-]* |--)[^`]*$")
_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]* (?:'?[\w.-]+=)?$")
_SENTENCE = re.compile(r"(?:\brm (?:-r )?'?|\bexport [A-Z_]*=?|\bcreate |\b[A-Z]+_[A-Z_]+=)$")


def _is_quoted(value):
    if isinstance(value, ast.IfExp):
        return _is_quoted(value.body) and _is_quoted(value.orelse)
    if isinstance(value, ast.Name) and value.id.isupper():
        return True  # a constant
    return isinstance(value, ast.Constant) or (
        isinstance(value, ast.Call)
        and isinstance(value.func, ast.Attribute | ast.Name)
        and getattr(value.func, "attr", getattr(value.func, "id", "")) in QUOTES
    )


def _unquoted(text):
    """The expressions of an f-string that stand where a user copies them from, into a shell."""
    before = ""
    for part in text.values:
        if isinstance(part, ast.Constant):
            before += str(part.value)
            continue
        pasted = any(pattern.search(before) for pattern in (_COMMAND, _OPTION, _SENTENCE))
        if pasted and not _is_quoted(part.value) and ast.unparse(part.value) not in _SAFE:
            yield ast.unparse(part.value)
        before += "x"


def test_names_in_printed_commands_are_quoted():
    found = []
    for top in ("wherry", "integrations", "tasks", "flows"):
        for file in sorted((ROOT_OF_COMMANDS / top).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.JoinedStr):
                    place = file.relative_to(ROOT_OF_COMMANDS).as_posix()
                    bare = set(_unquoted(node)) - _SAFE_IN.get(place, set())
                    found += [f"{place}:{node.lineno}: {name}" for name in bare]
    assert not found, found
