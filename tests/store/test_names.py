"""Names of files: not ASCII, no text at all, long, relative, and of the home folder."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from itertools import product
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import wherry
from tests.support.command import command, small, typed
from tests.support.signing import key_pair
from wherry.core.digest import canonical_json
from wherry.errors import HostileError, UsageError
from wherry.ledger.record import check_chain, open_ledger
from wherry.nightly.removal import removing
from wherry.store.folders import short_name, staging_stem
from wherry.store.local_store import local_location, locate
from wherry.store.location import path_uri
from wherry.store.open_file import native_path
from wherry.store.sidecar import sidecar_name, signature_name
from wherry.target.clean import clean
from wherry.target.janitor import in_use, is_in_use
from wherry.trace.lineage import show

pytest_plugins = ["tests.support.warm_command"]

LOCALES = {
    "C": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    "UTF-8": {"LC_ALL": "C.UTF-8"},
}
ANEW = {"C": {"PYTHONUTF8": "1"}, "UTF-8": {}}  # what wherry sets where it starts anew
STARTED = ("discover", "detect", "plan", "convert")  # as processes of their own
NAMES = {"text": "mü 模".encode(), "bytes": b"m\xff\xfe"}
KINDS = pytest.mark.parametrize("kind", ["bytes", pytest.param("text", marks=pytest.mark.slow)])
CONFIG = b"""
links = ["%s"]
[routes.r]
root = "%s"
min_age = 0
model = "night"
[[routes.r.targets]]
format = "npz"
uri = "%s/{run}-{step}.npz"
"""


def uri_of(path):
    """How wherry prints and records a path."""
    try:
        return path.decode()
    except UnicodeDecodeError:
        return f"file://{quote(path)}"


@pytest.mark.parametrize("locale", ["C", pytest.param("UTF-8", marks=pytest.mark.slow)])
@KINDS
def test_every_verb_takes_the_name_and_records_it(tmp_path, locale, kind, warm_command, registry_database):
    folder = os.fsencode(tmp_path) + b"/" + NAMES[kind]
    small(Path(os.fsdecode(folder)) / "run" / "checkpoint-1" / "model.safetensors")
    source, target = folder + b"/run/checkpoint-1/model.safetensors", folder + b"/out"
    (tmp_path / "wherry.toml").write_bytes(
        CONFIG % tuple(uri_of(place).encode() for place in (folder, folder + b"/run", folder + b"/night"))
    )
    env = {
        **LOCALES[locale], "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db",
        "WHERRY_CONFIG": str(tmp_path / "wherry.toml"),
    }  # fmt: skip

    shutil.copy(registry_database, tmp_path / "mlflow.db")

    def run(*words, code=0):
        alone = words[0] in STARTED
        done = command(*words, env=env) if alone else warm_command(*words, env=env | ANEW[locale])
        assert done.returncode == code, f"{words}: {done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stderr
        return done.stdout

    private, public = key_pair(tmp_path)
    run("discover", folder)
    assert json.loads(run("detect", source, "--json"))["uri"] == uri_of(source)
    run("inspect", source, "--sha256")
    run("plan", source, target, "--to", "orbax")
    receipt = json.loads(run("convert", source, target, "--to", "orbax", "--json"))
    assert (receipt["lineage"], receipt["target"]["uri"]) == ("recorded", uri_of(target))
    assert receipt["source"]["uri"] == uri_of(source)
    assert "already converted" in run("convert", source, target, "--to", "orbax")
    run("verify", target, "--level", "digest")
    run("verify", target, "--against", source, "--level", "roundtrip")
    assert uri_of(source) in run("lineage", "show", target)
    assert uri_of(source) in run("lineage", "why", target)
    run("lineage", "impact", source)
    run("lineage", "stale", code=0)
    run("lineage", "show", target, "--html", folder + b"/page.html")
    run("register", target, "--model", "m", "--alias", "candidate")
    assert run("resolve", "models:/m@candidate").strip() == uri_of(target)
    run("promote", "models:/m@candidate", "--quiet")
    run("fetch", "models:/m@champion", folder + b"/copy")
    assert run("ledger", "record", target) == f"{uri_of(target)}: already recorded\n"
    run("sign", target, "--key", private)
    run("verify-signature", target, "--key", public)
    run("routes", "explain", folder + b"/run/checkpoint-1")
    run("nightly", "--go")
    run("prune")
    run("audit", folder, "--level", "digest", "--bundle", folder + b"/evidence.zip")
    run("ledger", "check")
    run("ledger", "rebuild", folder, "--ledger", f"sqlite:///{tmp_path}/rebuilt.db")
    run("clean", folder)
    run("metrics")
    assert command("detect", folder + b"/nothing", env=env).returncode == 3
    tree = show(uri_of(target))
    assert uri_of(source) in {place.uri for node in tree.nodes.values() for place in node.places}
    with open_ledger() as ledger:
        assert check_chain(ledger).altered is None


@KINDS
def test_a_rewrite_takes_the_name_and_records_it(tmp_path, kind):
    pytest.importorskip("torch.distributed.checkpoint")
    from tests.support.torch import save, torch

    folder = os.fsencode(tmp_path) + b"/" + NAMES[kind]
    (tmp_path / "model").mkdir()
    save({"a": torch.ones(3)}, tmp_path / "model" / "a")
    (tmp_path / "model").rename(os.fsdecode(folder))
    line = ["rewrite", folder + b"/a", folder + b"/b", "--as", "for-torch=2.3", "--json"]
    done = command(*line, env=LOCALES["C"])
    assert done.returncode == 0, done.stderr
    receipt = json.loads(done.stdout)["receipt"]
    assert (receipt["lineage"], receipt["target"]["uri"]) == ("recorded", uri_of(folder + b"/b"))


def test_one_file_has_one_name_in_the_ledger_whatever_the_locale(tmp_path):
    folder = os.fsencode(tmp_path) + b"/" + NAMES["text"]
    small(Path(os.fsdecode(folder)) / "a.safetensors")
    line = ["convert", folder + b"/a.safetensors", folder + b"/out", "--to", "orbax", "--json"]
    first, again = (json.loads(command(*line, env=LOCALES[name]).stdout) for name in ("C", "UTF-8"))
    assert again["already"]
    assert again["lineage"] == "recorded"
    assert first["target"] == again["target"]


def test_a_companion_with_such_a_name_is_carried_and_proved_in_every_locale(tmp_path):
    model = tmp_path / "model"
    small(model / "model.safetensors")
    (model / "config.json").write_text('{"model_type": "llama"}')
    (model / "tokenizer_ü.model").write_bytes(b"words")
    for first, second in (("C", "UTF-8"), ("UTF-8", "C")):
        out = tmp_path / f"out-{first}"
        made = command("convert", model, out, "--to", "huggingface", env=LOCALES[first])
        assert made.returncode == 0, made.stderr
        done = command("verify", out, "--level", "digest", env=LOCALES[second])
        assert done.returncode == 0, done.stdout + done.stderr


LIBRARY = """
import os, sys, wherry
assert sys.getfilesystemencoding() == "ascii"
receipt = wherry.convert(sys.argv[1], sys.argv[2], to="orbax")
assert receipt.lineage == "recorded", receipt.lineage
assert wherry.verify(receipt.target.uri, level="digest").ok
from wherry.trace.lineage import show
assert len(show(receipt.target.uri).edges) == 1
sys.stdout.buffer.write(receipt.target.uri.encode())
"""


@pytest.mark.parametrize("kind", NAMES)
def test_the_library_in_a_process_that_does_not_know_utf8(tmp_path, kind):
    folder = os.fsencode(tmp_path) + b"/" + NAMES[kind]
    small(Path(os.fsdecode(folder)) / "a.safetensors")
    line = [sys.executable, "-c", LIBRARY, folder + b"/a.safetensors", folder + b"/out"]
    done = subprocess.run(line, capture_output=True, env={**os.environ, **LOCALES["C"]}, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode() == uri_of(folder + b"/out")
    assert wherry.verify(done.stdout.decode(), level="digest").ok, "and a process that does"


@pytest.mark.parametrize("data", [b"/a/b", "/ä/模".encode(), b"/a\xff/b c%?#", b"/\xc3/x"])
def test_a_path_and_its_uri(data):
    path = os.fsdecode(data)
    uri = path_uri(path)
    uri.encode()  # text for every database
    place = locate(uri)
    assert (os.fsencode(place.path), place.uri) == (data, uri)
    assert native_path(path) == path


def test_digests_take_every_text():
    assert canonical_json(["ü"]) == '["ü"]'.encode()
    assert json.loads(canonical_json(["a\udcff\\"])) == ["a\udcff\\"]


def test_a_terminal_that_cannot_show_a_name_gets_it_escaped(tmp_path):
    path = os.fsencode(tmp_path) + b"/\xff.safetensors"
    small(Path(os.fsdecode(path)))
    done = command("discover", tmp_path, env={"PYTHONIOENCODING": "latin-1"})
    assert done.returncode == 0, done.stderr
    words = os.fsencode(tmp_path) + b"/nothing\xff\xe6\xa8\xa1"
    failed = command("detect", words, env={"PYTHONIOENCODING": "ascii"})
    assert failed.returncode == 3
    assert "Traceback" not in failed.stderr


def test_a_name_in_data_that_no_file_can_have_is_refused(tmp_path):
    with pytest.raises(HostileError, match="not Unicode"):
        locate(tmp_path).member("a/\ud800")
    assert locate(tmp_path).member("m\udcff").stat() is None  # a byte that is no UTF-8


# Names as long as a file system takes them: what wherry derives from them is not longer.


LONGEST = 255


@given(st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1))
def test_derived_names_fit_and_differ_as_their_names_do(text):
    name = (text * 255).encode()[:LONGEST].decode("utf-8", "ignore")
    assert len(os.fsencode(staging_stem(name))) + 40 <= LONGEST
    for derived in (sidecar_name, signature_name):
        assert len(os.fsencode(derived(name))) <= LONGEST
    assert short_name(f"{name[:-1]}") != short_name(name)


@pytest.mark.parametrize("count", [207, 208, 250, 255])
def test_a_checkpoint_with_a_long_name_is_written_verified_read_and_removed(tmp_path, count):
    source = small(tmp_path / "s.safetensors")
    folder = tmp_path / ("n" * count)
    wherry.convert(source, folder, to="dcp")
    file = tmp_path / ("f" * (count - 12) + ".safetensors")
    with in_use(str(folder)):
        assert is_in_use(str(folder))
        receipt = wherry.convert(folder, file, to="safetensors")
    assert wherry.verify(file, level="digest").verdict == "ok"
    assert wherry.convert(folder, file, to="safetensors").already
    assert receipt.lineage == "recorded"
    handle = wherry.export(
        {"w": np.ones(3, np.float32)}, tmp_path / ("e" * (count - 4) + ".npz"), to="npz", snapshot="disk"
    )
    assert handle.wait(60)
    assert {len(os.fsencode(path.name)) <= LONGEST for path in tmp_path.iterdir()} == {True}
    with removing(str(file), str(file), "safetensors"):
        assert not file.exists()
    assert clean(tmp_path) == []
    assert not (tmp_path / sidecar_name(file.name)).exists()


def test_what_a_killed_conversion_left_is_cleaned(tmp_path):
    name = "n" * 250
    area = tmp_path / f"{staging_stem(name)}.01234567-89abcdef"
    (area / name).mkdir(parents=True)
    assert [one.removed for one in clean(tmp_path, min_age=0)] == [True]
    assert not area.exists()


# A local path is made absolute, and the name of its entry is its last part, as pathlib says.


PARTS = ("", ".", "..", "a", ".a", "a.", "...", ".\n", " ")
PATHS = [first + "/".join(parts) for first in ("", "/") for parts in product(PARTS, repeat=3)]


@pytest.mark.parametrize("root", ["", "/", "//", "///", "./"])
def test_paths_are_absolute_as_pathlib_says(root, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    paths = [root + path for path in PATHS]
    assert [local_location(path).path for path in paths] == [str(Path(path).absolute()) for path in paths]


def test_an_entry_has_the_last_part_of_its_path_as_its_name(tmp_path):
    (tmp_path / "a" / "b.c").mkdir(parents=True)
    paths = [str(tmp_path / "a"), str(tmp_path / "a" / "b.c"), "/", f"{tmp_path}/a/.."]
    store = local_location(str(tmp_path)).store
    assert [store.stat(path).name for path in (*paths, f"{tmp_path}/a/")] == [
        *(Path(path).name for path in paths),
        "a",
    ]
    assert store.stat(os.fspath(tmp_path / "missing")) is None


# `~` is the home folder in every path that a user states; a shell leaves it in `--config=~/x` and in
# quotes.


@pytest.fixture
def home(tmp_path, monkeypatch, own_home):
    (tmp_path / "home").mkdir()
    (tmp_path / "work").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "work")
    small(tmp_path / "home/a.safetensors")
    return tmp_path / "home"


def test_a_conversion_reads_and_writes_there(home):
    receipt = wherry.convert("~/a.safetensors", "~/out", to="orbax")
    assert (receipt.source.uri, receipt.target.uri) == (str(home / "a.safetensors"), str(home / "out"))
    assert wherry.verify("~/out", level="roundtrip", against="~/a.safetensors").ok
    assert not list((home.parent / "work").iterdir())


def test_a_request_for_other_processes_names_the_same_place(home, capfd):
    code, text = typed("convert '~/a.safetensors' '~/b' --to dcp --on processes:2", home, capfd)
    assert code == 0, text
    assert (home / "b").is_dir()


def test_an_export_writes_there(home):
    target = (
        wherry.export({"w": np.ones(3)}, "~/x.npz", to="npz", snapshot="disk", spool="~").result(60).target
    )
    assert target.uri == str(home / "x.npz")
    assert not list((home.parent / "work").iterdir())


def test_files_that_a_user_states_are_there(home, capfd):
    (home / "family.toml").write_text("name = 1")
    code, text = typed("layouts '--family-file=~/family.toml'", home, capfd)
    assert code == 2, text
    assert "not found" not in text
    assert typed("layouts '--family-file=~/nope.toml'", home, capfd)[0] == 3
    assert typed("promote models:/m '--policy=~/nope.toml'", home, capfd)[0] == 3


@pytest.mark.parametrize("system", ["lama", "orbax", "dcp", ""])
def test_a_system_that_does_not_exist_is_refused(home, system):
    with pytest.raises(UsageError, match=f"unknown system '{system}'"):
        wherry.export({"w": np.ones(3)}, "~/x.npz", to="npz", system=system)
    assert not (home / "x.npz").exists()
