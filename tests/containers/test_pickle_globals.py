"""What pickles may name, by a list that is kept: no change of it goes unnoticed, and nothing outside of it passes."""

from __future__ import annotations

import ast
import json
import pickle
import tracemalloc
import zipfile
from functools import cache
from pathlib import Path

import pytest

from tests.support.make_golden_pickles import GOLDEN, listed, rule_sets
from wherry.errors import HostileError, UnsupportedError
from wherry.integrations.containers.pickle.machine import load
from wherry.integrations.containers.pickle.survey import survey

ROOT = Path(__file__).resolve().parents[2]
RULES = rule_sets()
DANGEROUS = [
    ("os", "system"), ("posix", "system"), ("nt", "system"), ("subprocess", "Popen"), ("builtins", "eval"),
    ("builtins", "exec"), ("builtins", "getattr"), ("builtins", "__import__"), ("builtins", "open"),
    ("__builtin__", "eval"), ("__builtin__", "getattr"), ("__builtin__", "apply"), ("importlib", "import_module"),
    ("operator", "attrgetter"), ("operator", "methodcaller"), ("functools", "partial"), ("copyreg", "_reconstructor"),
    ("copy_reg", "_reconstructor"), ("types", "CodeType"), ("types", "FunctionType"), ("runpy", "run_path"),
    ("pickle", "loads"), ("_pickle", "loads"), ("torch", "load"), ("torch.hub", "load"), ("numpy", "load"),
    ("shutil", "rmtree"), ("pathlib", "Path.unlink"), ("collections", "OrderedDict.__init__"), ("codecs", "open"),
    ("torch.jit", "load"), ("torch.serialization", "load"), ("torch.storage", "_load_from_bytes"),
    ("webbrowser", "open"),
]  # fmt: skip


@cache
def golden():
    return {
        name: {(module, one) for module, names in rows.items() for one in names}
        for name, rows in json.loads(GOLDEN.read_text()).items()
    }


def test_the_rule_sets_are_those_that_are_kept():
    assert set(RULES) == set(golden())


@pytest.mark.parametrize("name", sorted(golden()))
def test_a_rule_set_lets_through_what_is_kept_and_nothing_else(name):
    now = {(module, one) for module, names in listed(RULES[name]).items() for one in names}
    said = "if that is meant: python -m tests.support.make_golden_pickles tests/golden/pickle-globals.json"
    assert not now - golden()[name], f"{name} lets through more than before; {said}"
    assert not golden()[name] - now, f"{name} lets through less than before; {said}"


def calls_with_an_allow_list():
    """Where the code makes rules, or makes others of them with another allow-list: (file, whether in a function)."""
    for path in sorted((ROOT / "integrations").rglob("*.py")) + sorted((ROOT / "wherry").rglob("*.py")):
        tree = ast.parse(path.read_text())
        inner = {
            node
            for one in ast.walk(tree)
            if isinstance(one, ast.FunctionDef | ast.Lambda)
            for node in ast.walk(one)
        }
        for node in ast.walk(tree):
            named = isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", ""))
            if named == "Rules" or (named and any(word.arg == "allowed" for word in node.keywords)):
                yield path.stem, node in inner


def test_no_rules_are_made_that_the_list_does_not_know():
    """Only the survey, which reads nothing and lists what a pickle wants, makes rules of its own as it goes."""
    found = list(calls_with_an_allow_list())
    assert [stem for stem, inside in found if inside] == ["survey"]
    assert sorted(stem for stem, inside in found if not inside) == sorted(
        name.split(":")[0].split(".")[-1] for name in golden()
    )


def spelled(module, name):
    """The ways in which a pickle can name a global, each called with no arguments."""
    texts = b"".join(b"\x8c" + bytes([len(word.encode())]) + word.encode() for word in (module, name))
    line = f"{module}\n{name}\n".encode()
    return {
        "GLOBAL": b"\x80\x02c" + line + b")R.",
        "GLOBAL alone": b"\x80\x02c" + line + b".",
        "STACK_GLOBAL": b"\x80\x04" + texts + b"\x93)R.",
        "NEWOBJ": b"\x80\x02c" + line + b")\x81.",
        "NEWOBJ_EX": b"\x80\x04" + texts + b"\x93)}\x92.",
        "below data": b"\x80\x02}(X\x01\x00\x00\x00a](c" + line + b")Reu.",
        "dropped": b"\x80\x02c" + line + b"0N.",
        "memoized": b"\x80\x04" + texts + b"\x93\x940h\x00)R.",
        "as an argument": b"\x80\x02ccollections\nOrderedDict\n(c" + line + b"tR.",
        "INST": b"(i" + line + b".",
        "OBJ": b"(c" + line + b"o.",
    }


@pytest.mark.parametrize("name", sorted(RULES))
def test_what_is_not_on_the_list_is_refused_however_it_is_spelled(name):
    for module, one in DANGEROUS:
        assert (module, one) not in golden()[name]
        for how, data in spelled(module, one).items():
            with pytest.raises((HostileError, UnsupportedError)) as caught:
                load(data, RULES[name], "x")
            known = caught.value.exit_code == 4 and module.startswith(("torch", "numpy"))
            assert caught.value.exit_code == 6 or known, (module, one, how)


@pytest.mark.parametrize("name", sorted(RULES))
def test_neighbours_of_what_is_on_the_list_are_refused(name):
    """A list that is matched by prefix, by module, by name alone or without regard to case would let these through."""
    allowed = golden()[name]
    near = {
        other
        for module, one in allowed
        for other in (
            (module, f"{one}x"), (module, one[:-1]), (f"{module}.x", one), (f"x.{module}", one),
            (module, f"{one}.__init__"),
            (module.upper(), one), (module, one.swapcase()), (f" {module}", one), (module, f"{one} "), ("x", one),
            (module.split(".")[0], f"{module}.{one}"), (module, ""), ("", one), ("", f"{module}.{one}"), (one, module),
        )
    }  # fmt: skip
    for module, one in sorted(near - allowed):
        with pytest.raises((HostileError, UnsupportedError)):
            load(spelled(module, one)["STACK_GLOBAL"], RULES[name], "x")


@pytest.mark.parametrize("name", sorted(RULES))
def test_extensions_of_the_registry_are_refused(name):
    for data in (b"\x80\x02\x82\x01.", b"\x80\x02\x83\x01\x00.", b"\x80\x02\x84\x01\x00\x00\x00."):
        with pytest.raises(HostileError):
            load(data, RULES[name], "x")


@pytest.mark.parametrize("how", ["INST", "OBJ"])
@pytest.mark.parametrize("name", [name for name in sorted(RULES) if RULES[name].allowed])
def test_opcodes_that_make_objects_are_refused_for_what_is_on_the_list_too(name, how):
    data = spelled("collections", "OrderedDict")
    assert load(data["GLOBAL"], RULES[name], "x")[0] == {}
    with pytest.raises(HostileError, match="creates objects of classes"):
        load(data[how], RULES[name], "x")


class Evil:
    def __reduce__(self):
        return eval, ("1",)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("name", sorted(RULES))
def test_what_pickle_itself_writes_is_refused(name, protocol):
    with pytest.raises(HostileError, match="eval"):
        load(pickle.dumps([1, Evil()], protocol), RULES[name], "x")


@pytest.mark.parametrize("inner", ["archive/data.pkl", "a.npy"])
def test_a_member_that_begins_with_no_pickle_is_not_inflated(tmp_path, inner):
    file = tmp_path / "model.pt"
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(inner, bytes(64 << 20))
    tracemalloc.start()
    found = survey(file)
    _now, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert [bool(stream.error) for stream in found] == ([True] if inner.endswith("pkl") else [])
    assert peak < 4 << 20
