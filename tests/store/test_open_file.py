"""Files: the one open, regular files only, pinned, replaced durably, past the page cache, and no descriptor left."""

from __future__ import annotations

import ast
import errno
import mmap
import os
import random
import socket
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

import wherry
from tests.support.processes import open_descriptors
from wherry.errors import HostileError, MismatchError, NotFoundError, WherryError
from wherry.families.companions import config_file
from wherry.mover import read as reading
from wherry.store import open_file
from wherry.store import open_file as straight
from wherry.store.folders import is_there, replace_file
from wherry.store.local_store import LocalStore, PinnedStore, locate
from wherry.store.open_file import BLOCK, Descriptors, open_regular, opened_folder, readinto, root_at
from wherry.store.sidecar import read_sidecar

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
    before = open_descriptors()
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
    assert open_descriptors() == before


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
    "wherry/core/child.py", "wherry/cli/errors.py",
    "wherry/core/interpreter.py", "wherry/store/folders.py",
    "wherry/prove/bundle.py", "wherry/prove/check.py", "wherry/layout/axes.py", "wherry/cli/ledger.py",
    "wherry/core/config_text.py", "wherry/cli/routes.py", "wherry/transform/schemes.py", "wherry/transform/ggml.py",
    "wherry/nightly/first.py", "integrations/formats/gguf/write.py", "integrations/formats/gguf/tokenizer.py",
    "wherry/transform/merged_adapter.py", "wherry/kernels/compile.py",
    "wherry/trace/site_pages.py",
    "wherry/nightly/doctor.py", "wherry/families/__init__.py", "wherry/target/signed_log.py", "wherry/target/lease.py",
    "wherry/trace/page.py", "wherry/models/policy.py", "wherry/live/shares.py", "wherry/live/snapshot.py",
    "wherry/target/staging.py", "wherry/config/settings.py",
    "wherry/families/config_files.py", "wherry/transform/overview.py", "wherry/target/copied_staging.py",
    "wherry/live/checkpoint.py", "wherry/store/open_file.py", "wherry/store/copy.py",
    "wherry/mover/chunk_writer.py", "integrations/formats/orbax/rewrite.py",
    "wherry/layout/memory_names.py", "integrations/openlineage/transport.py",
    "integrations/engines/dask_cluster.py",
    "integrations/prefect/automations.py", "integrations/prefect/deploy.py", "integrations/prefect/pools.py",
    "integrations/signing/bundle.py", "integrations/native/with_jax.py", "integrations/native/with_torch.py",
    "wherry/families/facts.py", "wherry/installation.py", "wherry/target/janitor.py",
    "wherry/formats/registry.py",  # files of wherry itself
    "integrations/formats/vllm/modules.py",  # rules of wherry itself
    "wherry/core/packages.py",  # metadata of installed packages
    "wherry/core/sandbox.py",  # with O_PATH, which reads nothing
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


# A source whose files are pinned: what is opened again must be the file that was opened first.


@pytest.fixture
def files(tmp_path):
    for name in "ab":
        (tmp_path / name).write_text(f"first {name}")
    return [str(tmp_path / name) for name in "ab"]


def test_an_open_file_is_read_on_whatever_takes_its_name(files, tmp_path):
    store = PinnedStore(None)
    assert store.read(files[0], 0, 9) == b"first a"
    (tmp_path / "new").write_text("second")
    (tmp_path / "new").replace(files[0])
    assert store.read(files[0], 0, 9) == b"first a"
    store.close()


def test_a_file_that_was_replaced_before_it_is_opened_again_is_refused(files, tmp_path, monkeypatch):
    """Of many files only some stay open; one that was closed in between may be another one by then."""
    monkeypatch.setattr(open_file, "MOST_OPEN", 1)
    store = PinnedStore(None)
    assert store.read(files[0], 0, 9) == b"first a"
    assert store.read(files[1], 0, 9) == b"first b"
    (tmp_path / "new").write_text("second")
    (tmp_path / "new").replace(files[0])
    with pytest.raises(MismatchError, match="replaced while it was read"):
        store.read(files[0], 0, 9)
    store.close()


# Descriptors: what is in use stays open, and nothing stays open after the end.


@pytest.fixture
def files_of_descriptors(tmp_path):
    for number in range(6):
        (tmp_path / str(number)).write_bytes(b"%d" % number)
    return Descriptors(lambda number: os.open(tmp_path / str(number), os.O_RDONLY))


def is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def test_what_is_in_use_is_closed_when_its_block_ends(files_of_descriptors):
    with files_of_descriptors.using(0) as idle:
        pass
    with files_of_descriptors.using(1) as outer:
        with files_of_descriptors.using(1) as inner:
            files_of_descriptors.close()
            assert not is_open(idle)
            assert os.pread(inner, 1, 0) == b"1"
        assert inner == outer
        assert os.pread(outer, 1, 0) == b"1"
    assert not is_open(outer)


def test_what_is_opened_after_the_end_does_not_stay(files_of_descriptors):
    files_of_descriptors.close()
    with files_of_descriptors.using(2) as late:
        assert os.pread(late, 1, 0) == b"2"
    assert not is_open(late)


def test_the_one_that_was_used_longest_ago_makes_room(files_of_descriptors, monkeypatch):
    monkeypatch.setattr(open_file, "MOST_OPEN", 2)
    with files_of_descriptors.using(0) as busy:
        for number in (1, 2):
            with files_of_descriptors.using(number):
                pass
        assert set(files_of_descriptors._open) == {0, 2}
        assert os.pread(busy, 1, 0) == b"0"
    files_of_descriptors.close()
    assert not is_open(busy)


# Whether a path exists is not decided by an error of the storage.


def test_a_link_to_nothing_and_a_file_below_a_file(tmp_path):
    (tmp_path / "link").symlink_to("nothing")
    (tmp_path / "file").touch()
    assert is_there(tmp_path / "link")
    assert is_there(tmp_path / "file")
    assert not is_there(tmp_path / "none")
    assert not is_there(tmp_path / "file" / "x")


def test_an_error_of_the_storage_is_not_taken_for_absence(tmp_path, monkeypatch):
    def fail(_path):
        raise OSError(errno.EIO, "the disk does not answer")

    monkeypatch.setattr(os, "lstat", fail)
    with pytest.raises(OSError, match="does not answer"):
        is_there(tmp_path)


# Files that are replaced durably: whoever reads meanwhile has the old one or the new one, whole.


def test_a_reader_of_the_old_file_keeps_it_whole(tmp_path):
    place = tmp_path / "a.json"
    place.write_text("the old contents")
    with place.open() as reading:
        replace_file(place, b"new")
        assert reading.read() == "the old contents"
    assert place.read_text() == "new"
    assert [one.name for one in tmp_path.iterdir()] == ["a.json"]


def test_what_fails_leaves_the_old_file_and_no_draft(tmp_path):
    place = tmp_path / "a.json"
    place.mkdir()
    with pytest.raises(OSError, match="directory"):
        replace_file(place, b"new")
    assert place.is_dir()
    assert [one.name for one in tmp_path.iterdir()] == ["a.json"]


def test_the_mode_is_that_of_the_new_file_from_its_first_moment(tmp_path):
    place = tmp_path / "a.json"
    replace_file(place, b"new", mode=0o600)
    assert place.stat().st_mode & 0o777 == 0o600


# Reading past the page cache gives the same bytes as reading through it, wherever memory and file lie.


SIZE = 5 * (64 << 10) + 777
CONTENT = random.Random(0).randbytes(SIZE)
if not straight.DIRECT:
    pytest.skip("this system has no O_DIRECT", allow_module_level=True)


@pytest.fixture
def file_of_straight(tmp_path):
    (tmp_path / "f").write_bytes(CONTENT)
    with (tmp_path / "f").open("rb") as opened:
        os.fsync(opened.fileno())
    return str(tmp_path / "f")


@given(st.integers(0, SIZE + 10), st.integers(0, SIZE + 2 * BLOCK), st.integers(0, BLOCK))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_any_part_at_any_place(file_of_straight, offset, length, slack):
    """Memory that lies as the file does (no slack), or does not."""
    memory = memoryview(mmap.mmap(-1, SIZE + 4 * BLOCK))
    first = (offset + slack) % BLOCK
    buffer = memory[first : first + length]
    there = len(CONTENT[offset : offset + length])
    assert readinto(file_of_straight, offset, buffer) == there
    assert buffer[:there] == CONTENT[offset : offset + length]
    assert not any(memory[:first])
    assert not any(memory[first + length :])


def test_whole_blocks_go_straight(file_of_straight, monkeypatch):
    flags, real = [], os.open
    monkeypatch.setattr(os, "open", lambda path, how, *rest: (flags.append(how), real(path, how, *rest))[1])
    memory = memoryview(mmap.mmap(-1, SIZE + BLOCK))
    assert readinto(file_of_straight, 100, memory[100:SIZE]) == SIZE - 100
    assert any(how & os.O_DIRECT for how in flags)
    flags.clear()
    assert readinto(file_of_straight, 100, memory[101 : 101 + SIZE]) == SIZE - 100
    assert not any(how & os.O_DIRECT for how in flags)


@pytest.mark.parametrize("where", ["open", "read"])
def test_a_file_system_without_it_is_read_through_the_cache(file_of_straight, monkeypatch, where):
    real_open, real_read, direct = os.open, os.preadv, set()

    def opened(path, how, *rest):
        if how & os.O_DIRECT and where == "open":
            raise OSError(errno.EINVAL, "Invalid argument")
        descriptor = real_open(path, how, *rest)
        (direct.add if how & os.O_DIRECT else direct.discard)(descriptor)
        return descriptor

    def read(descriptor, buffers, offset):
        if descriptor in direct:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_read(descriptor, buffers, offset)

    monkeypatch.setattr(os, "open", opened)
    monkeypatch.setattr(os, "preadv", read)
    memory = memoryview(mmap.mmap(-1, SIZE + BLOCK))
    assert readinto(file_of_straight, 0, memory[:SIZE]) == SIZE
    assert memory[:SIZE] == CONTENT


def test_an_error_of_the_storage_is_one(file_of_straight, monkeypatch):
    def read(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", read)
    with pytest.raises(OSError, match="Input/output"):
        readinto(file_of_straight, 0, memoryview(mmap.mmap(-1, SIZE)))


def test_the_read_back_of_a_conversion_goes_straight(tmp_path, monkeypatch):
    source = tmp_path / "a.safetensors"
    save_file({"w": np.arange(1 << 18, dtype=np.float32)}, source)
    read, real = [], reading.readinto
    monkeypatch.setattr(
        reading, "readinto", lambda path, *rest, **more: (read.append(path), real(path, *rest, **more))[1]
    )
    wherry.convert(source, tmp_path / "none", to="dcp", verify="none")
    assert read == []
    wherry.convert(source, tmp_path / "out", to="dcp")
    assert read
    assert all(str(tmp_path / ".wherry-out") in path for path in read)
