"""The last catch-all: a bug is one message and exit code 70; what can be expected has an error of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
import types
from pathlib import Path

import pytest

from tests.support.command import command, small
from wherry.cli.errors import to_wherry_error
from wherry.errors import StorageError, UnsupportedError, UsageError
from wherry.ledger.record import open_ledger
from wherry.store.failures import translate_error
from wherry.store.local_store import locate
from wherry.store.remote_store import FsspecStore

# A module that Python imports at its start; it breaks one verb as a bug would.
BUG = """
import builtins, sys, threading
from importlib.abc import MetaPathFinder

class Finder(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "wherry.cli.format_list":
            thread = threading.Thread(target=lambda: 1 / 0)
            thread.start()
            thread.join()
            raise {error}
        return None

sys.meta_path.insert(0, Finder())
"""


def with_bug(tmp_path, error='KeyError("first line\\nsecond line")'):
    (tmp_path / "sitecustomize.py").write_text(BUG.format(error=error))
    return {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}


def test_a_bug_is_one_message_and_70(tmp_path):
    done = command("formats", "--json", env=with_bug(tmp_path))
    assert done.returncode == 70
    assert "Traceback" not in done.stderr
    first, cure = done.stderr.splitlines()
    assert first.startswith("error: this is a bug in wherry 0.1.0: KeyError: ")
    assert cure == "cure: report the traceback that this command prints: wherry --debug formats --json"
    data = json.loads(done.stdout)
    assert (data["error"], data["exit_code"], data["stage"]) == ("InternalError", 70, "formats")


@pytest.mark.parametrize(("words", "env"), [(["--debug"], {}), ([], {"WHERRY_DEBUG": "1"})])
def test_debug_shows_the_traceback(tmp_path, words, env):
    done = command(*words, "formats", env={**with_bug(tmp_path), **env})
    assert done.returncode == 70
    assert "Traceback (most recent call last)" in done.stderr
    assert "ZeroDivisionError" in done.stderr, "that of the thread too"
    assert done.stderr.splitlines()[-2].startswith("error: this is a bug in wherry")


def test_debug_shows_where_an_ordinary_error_comes_from(tmp_path):
    done = command("--debug", "detect", tmp_path / "nothing")
    assert done.returncode == 3
    assert "NotFoundError" in done.stderr
    assert "Traceback" not in command("detect", tmp_path / "nothing", env={"WHERRY_DEBUG": "0"}).stderr


def test_no_memory_is_no_bug(tmp_path):
    done = command("formats", env=with_bug(tmp_path, "MemoryError()"))
    assert (done.returncode, "out of memory" in done.stderr) == (10, True)


def test_an_unexpected_end_of_file_is_no_interrupt(tmp_path):
    done = command("formats", env=with_bug(tmp_path, "EOFError('marshal data too short')"))
    assert done.returncode == 70
    assert "EOFError: marshal data too short" in done.stderr


def test_an_error_of_the_system_is_no_bug(tmp_path):
    done = command("formats", env=with_bug(tmp_path, "OSError(28, 'No space left on device', '/tmp/x')"))
    assert done.returncode == 10
    assert "error: storage failed: No space left on device (/tmp/x)" in done.stderr


def test_the_cure_shows_no_credentials():
    error = to_wherry_error(KeyError("x"), ["register", "u", "--tracking-uri", "https://me:secret@host/x"])
    assert "secret" not in str(error)


# Output and signals.


def test_a_reader_that_has_enough_is_no_error(tmp_path):
    line = f"{sys.executable} -m wherry.cli formats --json | head -c 1"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True, timeout=60)
    assert (done.stdout, done.stderr) == ("{", "") or (done.stdout, done.stderr) == ("[", "")


def test_an_output_that_cannot_be_written_is_said():
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "wherry.cli", "formats"], stdout=full, stderr=subprocess.PIPE, text=True,
            check=False, timeout=60,
        )  # fmt: skip
    assert done.returncode == 10
    assert done.stderr.startswith("error: storage failed: No space left on device (standard output)")
    assert "Traceback" not in done.stderr


def test_an_output_that_cannot_be_written_hides_no_error(tmp_path):
    source = small(tmp_path / "a.safetensors")
    ledger = {"WHERRY_LEDGER": f"sqlite:///{tmp_path}"}
    for words, code, what in (
        (["detect", "--json", tmp_path / "nothing"], 3, "error: file or folder not found"),
        (
            ["convert", source, tmp_path / "b.npz", "--to", "npz"],
            12,
            f"wherry ledger record {tmp_path / 'b.npz'}",
        ),
        (
            ["convert", source, tmp_path / "b.npz", "--to", "npz", "--json"],
            12,
            "error: done, but not recorded",
        ),
    ):
        with Path("/dev/full").open("w") as full:
            done = subprocess.run(
                [sys.executable, "-m", "wherry.cli", *map(str, words)], stdout=full, stderr=subprocess.PIPE,
                text=True, check=False, timeout=60, env={**os.environ, **ledger},
            )  # fmt: skip
        assert (done.returncode, what in done.stderr) == (code, True), done.stderr
        assert "Exception ignored" not in done.stderr


def test_an_interrupt_stays_130(tmp_path):
    done = command("formats", env=with_bug(tmp_path, "KeyboardInterrupt()"))
    assert (done.returncode, "Traceback" in done.stderr) == (130, False)
    assert "interrupted before completion" in done.stderr


def test_loggers_of_libraries_print_no_traceback(tmp_path):
    broken = "[__import__('logging').getLogger('x').exception('it broke', exc_info=ValueError('v')), 1 / 0]"
    done = command("formats", env=with_bug(tmp_path, f"RuntimeError({broken})"))
    assert done.returncode == 70
    assert done.stderr.splitlines()[0] == "it broke"
    assert "Traceback" not in done.stderr


# The ledger.


@pytest.mark.parametrize(
    ("url", "kind", "words"),
    [
        ("postgresql://host:port/db", UsageError, "invalid ledger URL"),
        ("postgresql://me:hush@host:port/db", UsageError, "invalid ledger URL"),
        ("postgresql://me:hush%zz@host/db", UsageError, "invalid ledger URL"),
        ("sqlite:///{folder}/x.db?timeout=soon", UsageError, "invalid ledger URL"),
        ("sqlite+aiosqlite:///{folder}/x.db", UsageError, "unsupported ledger driver"),
        ("postgresql+nothing://host/db", UsageError, "unsupported ledger driver"),
        ("mysql://host/db", UnsupportedError, "unsupported ledger database; expected SQLite or PostgreSQL"),
        ("nonsense", UnsupportedError, "unsupported ledger database; expected SQLite or PostgreSQL"),
        ("sqlite:///{folder}", StorageError, "cannot be used"),
        ("sqlite:///{folder}/file", StorageError, "cannot be used"),
        ("sqlite:////proc/self/ledger.db", StorageError, "cannot be used"),
    ],
)
def test_a_ledger_that_cannot_be_opened(tmp_path, url, kind, words):
    (tmp_path / "file").write_text("no database " * 1000)
    with pytest.raises(kind, match=words) as caught, open_ledger(url.format(folder=tmp_path)):
        pass
    assert caught.value.cure
    assert "hush" not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("url", ["postgresql://host:port/db", "sqlite:///{folder}", "mysql://host/db"])
def test_a_command_that_needs_the_ledger_prints_no_traceback(tmp_path, url):
    env = {"WHERRY_LEDGER": url.format(folder=tmp_path)}
    shown = command("lineage", "show", small(tmp_path / "a.safetensors"), env=env)
    assert shown.returncode in (2, 4, 10)
    assert shown.stderr.startswith("error: ")
    assert "Traceback" not in shown.stderr


def test_a_home_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    env = {"WHERRY_HOME": str(tmp_path / "file")}
    source = small(tmp_path / "a.safetensors")
    for words, code in (
        (["lineage", "show", source], 10),
        (["convert", source, tmp_path / "o", "--to", "npz"], 12),
    ):
        done = command(*words, env=env)
        assert done.returncode == code
        assert "storage failed" in done.stderr
        assert "set WHERRY_HOME to a folder that can be written" in done.stderr
        assert "Traceback" not in done.stderr


# The stores.


def library(package, name, *bases):
    """A class as a library that may not be installed defines it."""
    return types.new_class(name, bases or (Exception,), {}, lambda body: body.update(__module__=package))


BOTO = library("botocore.exceptions", "BotoCoreError")
GOOGLE = library("google.auth.exceptions", "GoogleAuthError")
HUB = library("huggingface_hub.errors", "HfHubHTTPError", OSError)
ENTRY = library("huggingface_hub.errors", "EntryNotFoundError")
NO_KEYS = library("botocore.exceptions", "NoCredentialsError", BOTO)("Unable to locate credentials")
NO_HOST = library("botocore.exceptions", "EndpointConnectionError", BOTO)("Could not connect")
NO_LOGIN = library("google.auth.exceptions", "DefaultCredentialsError", GOOGLE)("not found")
OFFLINE = library("huggingface_hub.errors", "OfflineModeIsEnabled", ConnectionError)("offline mode")
NOT_CACHED = library("huggingface_hub.errors", "LocalEntryNotFoundError", FileNotFoundError, ENTRY)(
    "no cache"
)
NO_REPOSITORY = library("huggingface_hub.errors", "RepositoryNotFoundError", HUB)("404")
GATED = library("huggingface_hub.errors", "GatedRepoError", type(NO_REPOSITORY))("gated")
HTTP = library("gcsfs.retry", "HttpError")("Anonymous caller")
HTTP.code = 401


@pytest.mark.parametrize(
    ("protocol", "error", "words", "cure", "retryable"),
    [
        ("s3", NO_KEYS, "no credentials for s3://", "aws configure", False),
        ("s3", PermissionError("Access Denied"), "access denied: Access Denied", "aws configure", False),
        ("s3", NO_HOST, "the store is unreachable: Could not connect", "endpoint", True),
        ("gs", NO_LOGIN, "no credentials for gs://", "gcloud auth application-default login", False),
        ("gs", HTTP, "no credentials for gs://: Anonymous caller", "gcloud auth", False),
        ("hf", OFFLINE, "hf:// is offline", "unset HF_HUB_OFFLINE", False),
        ("hf", NOT_CACHED, "hf:// is offline", "unset HF_HUB_OFFLINE", False),
        ("hf", GATED, "access denied: gated", "hf auth login", False),
    ],
)
@pytest.mark.parametrize("call", ["stat", "entries", "read"])
def test_errors_of_storage_libraries(protocol, error, words, cure, retryable, call, monkeypatch):
    place = locate("memory://bucket/model")
    store = place.store
    assert isinstance(store, FsspecStore)
    store.protocol = protocol

    def fails(*_, **__):
        raise error

    store.fs = types.SimpleNamespace(
        info=fails, ls=fails, cat_file=fails, call=fails, call_s3=fails, invalidate_cache=str,
        endpoint="https://huggingface.co",
    )  # fmt: skip
    monkeypatch.setattr("wherry.store.hub.api_of", lambda _fs: types.SimpleNamespace(repo_info=fails))
    with pytest.raises(StorageError, match=words) as caught:
        getattr(place, call)(*((0, 1) if call == "read" else ()))
    assert (caught.value.uri, caught.value.retryable) == (f"{protocol}://bucket/model", retryable)
    assert cure in caught.value.cure


def test_a_repository_that_is_not_there_is_absent():
    place = locate("memory://bucket/model")

    def fails(*_, **__):
        raise NO_REPOSITORY

    place.store.fs = types.SimpleNamespace(info=fails, invalidate_cache=str)
    assert place.stat() is None


def test_what_is_not_known_is_left_as_it_is():
    assert translate_error(KeyError("x"), "s3", "b") is None
    assert translate_error(OSError(28, "full"), "s3", "b") is None
    assert translate_error(UsageError("ours"), "s3", "b") is None
    assert isinstance(translate_error(ValueError("odd"), "hf", "gpt2"), UsageError)
    assert isinstance(translate_error(NotImplementedError(), "http", "h"), UnsupportedError)


def test_the_hub_offline_in_a_process_of_its_own(tmp_path):
    pytest.importorskip("huggingface_hub")
    done = command("detect", "hf://someone/something", env={"HF_HUB_OFFLINE": "1"})
    assert done.returncode == 10
    assert done.stderr.splitlines()[0].startswith("error: hf:// is offline")
    assert done.stderr.splitlines()[1] == "cure: unset HF_HUB_OFFLINE"


def test_s3_without_credentials_in_a_process_of_its_own(tmp_path):
    """A stand-in for s3fs that raises what botocore raises, by the names that it has there."""
    (tmp_path / "botocore").mkdir()
    (tmp_path / "botocore" / "__init__.py").write_text("")
    (tmp_path / "botocore" / "exceptions.py").write_text(
        "class BotoCoreError(Exception): ...\nclass NoCredentialsError(BotoCoreError): ...\n"
    )
    (tmp_path / "s3fs.py").write_text(
        "from botocore.exceptions import NoCredentialsError\n"
        "__version__ = '2026.1'\n"
        "from fsspec import AbstractFileSystem\n"
        "class S3FileSystem(AbstractFileSystem):\n"
        "    protocol = 's3'\n"
        "    def info(self, path, **_):\n"
        "        raise NoCredentialsError('Unable to locate credentials')\n"
        "    ls = cat_file = info\n"
    )
    env = {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    for words in (
        ["detect", "s3://b/x"],
        ["discover", "s3://b"],
        ["convert", "s3://b/x", tmp_path / "o", "--to", "npz"],
    ):
        done = command(*words, env=env)
        assert "Traceback" not in done.stderr
        assert "no credentials for s3://: Unable to locate credentials" in done.stderr + done.stdout, words
        assert "aws configure" in done.stderr + done.stdout
        assert done.returncode == 10, words
