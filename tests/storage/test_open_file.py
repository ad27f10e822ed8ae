"""The one open: regular files only, no call waits, a cap on whole-file reads, and who reads around it."""

from __future__ import annotations

import ast
import os
import socket
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import wherry
from wherry.errors import HostileError, NotFoundError, WherryError
from wherry.families.companions import config_file
from wherry.storage.open_file import open_regular, opened_folder, root_at
from wherry.storage.sidecar import read_sidecar
from wherry.storage.stores import LocalStore, locate

ROOT = Path(__file__).resolve().parents[2]
HUGE = 64 << 30


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"0123456789")
    return path


def test_bytes_of_a_regular_file(file):
    assert LocalStore().read(str(file), 2, 5) == b"234"
    assert LocalStore().read(str(file), 8, 1 << 60) == b"89"
    assert LocalStore().read(str(file), 20, 30) == b""
    descriptor = open_regular(str(file))
    try:
        assert not os.get_inheritable(descriptor)
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("root", [False, True])
def test_nothing_else_is_opened_and_no_call_waits(tmp_path, root):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "zero").symlink_to("/dev/zero")
    (tmp_path / "loop").symlink_to("loop")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "s"))
    kept = root_at(str(tmp_path)) if root else None
    before = len(os.listdir("/proc/self/fd"))
    for name, error, match in (
        ("pipe", HostileError, "a FIFO"),
        ("zero", HostileError, "outside" if root else "a device"),
        ("s", HostileError, "a socket"),
        ("loop", HostileError, "back to itself"),
        ("folder", IsADirectoryError, None),
        ("none", FileNotFoundError, None),
    ):
        with pytest.raises(error, match=match):
            open_regular(str(tmp_path / name), root=kept)
    with pytest.raises(NotADirectoryError), opened_folder(str(tmp_path / "pipe"), kept):
        pass
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_system_without_proc_looks_where_the_path_leads(tmp_path, file, monkeypatch):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "link").symlink_to(file)

    def missing(*_arguments):
        raise FileNotFoundError

    monkeypatch.setattr(os, "readlink", missing)
    monkeypatch.setattr(os.path, "realpath", lambda path: str(file) if path.endswith("link") else path)
    with pytest.raises(HostileError, match="outside"):
        open_regular(str(tmp_path / "in" / "link"), root=root_at(str(tmp_path / "in")))


def test_a_file_that_was_replaced_meanwhile_is_still_the_one_that_was_opened(tmp_path, file, monkeypatch):
    """Publishing by rename leaves the opened file without a name; that is no link."""
    real = os.open

    def replaced(path, *rest):
        descriptor = real(path, *rest)
        if path == str(file):
            file.unlink()
        return descriptor

    monkeypatch.setattr(os, "open", replaced)
    assert LocalStore(root_at(str(file))).read(str(file), 0, 3) == b"012"


def test_a_whole_file_has_a_cap(tmp_path, file):
    assert locate(file).read_whole(10) == b"0123456789"
    with pytest.raises(HostileError, match="file has 10 bytes, which exceeds the limit of 9") as caught:
        locate(file).read_whole(9)
    assert caught.value.uri == str(file)
    with (tmp_path / "huge").open("wb") as made:
        made.truncate(HUGE)
    with pytest.raises(HostileError, match="68,719,476,736 bytes"):
        locate(tmp_path / "huge").read_whole(1 << 30)
    with pytest.raises(NotFoundError):
        locate(tmp_path / "none").read_whole(1)
    memory = locate(f"memory://{tmp_path}/file")
    memory.put(b"0123456789")
    with pytest.raises(HostileError, match="10 bytes, which exceeds the limit of 9"):
        memory.read_whole(9)


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"w": np.ones((2, 3), "f4")}, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text("{}")
    return folder


def made(kind, path):
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "zeros":
        path.symlink_to("/dev/zero")
    else:
        with path.open("wb") as sparse:
            sparse.truncate(HUGE)


@pytest.mark.parametrize("kind", ["fifo", "zeros", "sparse"])
@pytest.mark.parametrize(
    "name", ["notes.txt", "wherry.json", "wherry.sig", "tokenizer.model", "generation_config.json"]
)
def test_further_entries(model, tmp_path, kind, name, monkeypatch):
    """A sidecar is read where something asks for the record; every other file is a companion."""
    made(kind, model / name)
    monkeypatch.setattr("wherry.converter.convert.require_room", lambda _plan: None)  # disks differ
    try:
        wherry.convert(model, tmp_path / "to" / "out", to="huggingface", lineage=False)
    except WherryError as error:
        assert error.exit_code == 6, error  # noqa: PT017
        assert not (tmp_path / "to").exists()
    else:
        assert name == "wherry.sig"  # a conversion does not read the signature
    assert wherry.verify(model, level="present").verdict in ("ok", "malicious")


def test_the_sidecar_and_what_users_name(model, tmp_path):
    made("fifo", model / "wherry.json")
    with pytest.raises(HostileError, match="FIFO"):
        read_sidecar(locate(model))
    made("fifo", tmp_path / "config.json")
    with pytest.raises(HostileError, match="FIFO"):
        config_file(str(tmp_path / "config.json"))


# Modules that read no checkpoint by a path: their own parts, what the user names, /proc, staging, keys and the ledger.
OWN = {
    "wherry/target/area.py", "wherry/runtime/child.py", "wherry/cli/errors.py", "wherry/target/key.py",
    "wherry/runtime/interpreter.py", "wherry/target/lease_watch.py", "wherry/storage/folders.py",
    "wherry/auditor/bundle.py", "wherry/auditor/check.py", "wherry/tree/axes.py", "wherry/cli/ledger.py",
    "wherry/text/config_text.py", "wherry/cli/routes.py", "wherry/quantized/schemes.py", "wherry/quantized/ggml.py",
    "wherry/routes/first.py", "integrations/formats/gguf/write.py", "integrations/formats/gguf/tokenizer.py",
    "wherry/merger/orientation.py", "wherry/kernels/compile.py",
    "wherry/site/pages.py",
    "wherry/watch/doctor.py", "wherry/families/__init__.py", "wherry/target/signed_log.py", "wherry/target/lease.py",
    "wherry/lineage/page.py", "wherry/models/policy.py", "wherry/live/shares.py", "wherry/live/snapshot.py",
    "wherry/target/file_staging.py", "wherry/config/digests.py",
    "wherry/families/config_files.py", "wherry/view/overview.py", "wherry/target/copied_staging.py",
    "wherry/live/checkpoint.py", "wherry/storage/open_file.py", "wherry/storage/copy.py",
    "wherry/mover/chunk_writer.py", "integrations/formats/orbax/rewrite.py",
    "wherry/tree/memory_names.py", "integrations/openlineage/transport.py",
    "integrations/engines/dask_cluster.py",
    "integrations/prefect/automations.py", "integrations/prefect/deploy.py", "integrations/prefect/pools.py",
    "integrations/signing/bundle.py", "integrations/native/with_jax.py", "integrations/native/with_torch.py",
    "wherry/families/facts.py", "wherry/installation.py", "wherry/target/janitor.py",
    "wherry/formats/registry.py",  # files of wherry itself
    "wherry/runtime/sandbox.py",  # with O_PATH, which reads nothing
}  # fmt: skip
OPENING = {"read_text", "read_bytes", "memmap", "fromfile", "ZipFile"}


def opens_a_path(node: ast.Call) -> bool:
    function = node.func
    if isinstance(function, ast.Name):
        return function.id == "open"
    if not isinstance(function, ast.Attribute):
        return False
    of_os = isinstance(function.value, ast.Name) and function.value.id == "os" and function.attr == "open"
    of_numpy = (
        isinstance(function.value, ast.Name)
        and function.value.id in ("np", "numpy")
        and function.attr == "load"
    )
    modes = [one.value for one in node.args if isinstance(one, ast.Constant)]
    of_path = function.attr == "open" and any(isinstance(mode, str) and "b" in mode for mode in modes)
    plain = function.attr in OPENING and not (function.attr == "read_bytes" and node.args)
    return of_os or of_numpy or of_path or plain


def test_checkpoints_are_opened_in_one_place():
    sources = [path for room in ("wherry", "integrations") for path in (ROOT / room).rglob("*.py")]
    found = set()
    for path in sources:
        name = path.relative_to(ROOT).as_posix()
        if name.startswith(("wherry/integrations", "wherry/tasks", "wherry/flows", "wherry/testing")):
            continue
        if any(
            isinstance(node, ast.Call) and opens_a_path(node)
            for node in ast.walk(ast.parse(path.read_text()))
        ):
            found.add(name)
    assert found <= OWN, found - OWN
