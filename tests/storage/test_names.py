"""Names of files that are not ASCII, or no text at all, under locales that know UTF-8 and under those that do not.

An interpreter that does not know UTF-8 starts anew in UTF-8 mode. Some verbs are started as users start them; the
others, thirty of which would import wherry and MLflow again each, are forked from a process in the mode that they would
end up in.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import quote

import pytest

import wherry
from tests.support.command import command, small
from tests.support.signing import key_pair
from wherry.core.digest import canonical_json
from wherry.errors import HostileError
from wherry.ledger.record import check_chain, open_ledger
from wherry.lineage.lineage import show
from wherry.storage.location import path_uri
from wherry.storage.open_file import native_path
from wherry.storage.stores import locate

pytest_plugins = ("tests.support.warm_command",)

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
from wherry.lineage.lineage import show
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
