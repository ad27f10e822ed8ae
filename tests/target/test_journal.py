"""The journal and its key: only whole lines that this user signed, in their order, say what is done."""

from __future__ import annotations

import errno
import json
import os

import pytest

from tests.support.processes import open_descriptors
from wherry.core.account import Losses
from wherry.core.digest import LEAF
from wherry.core.tensorspec import Span
from wherry.errors import StorageError, TargetInUseError, UsageError
from wherry.store import folders
from wherry.target import signed_log
from wherry.target.journal import DurableMove, open_journal

HEADER = {"plan": "p", "source": "s", "version": "1"}
ROWS = [DurableMove(("w", str(number)), Span(0, 8), {0: bytes(32)}) for number in range(4)]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "journal"


def write(path, rows=ROWS, header=HEADER):
    journal = open_journal(path, header)
    for row in rows:
        journal.record([row])
    journal.close()


def read(path, header=HEADER):
    """What is done, and why nothing is."""
    journal = open_journal(path, header)
    journal.close()
    return list(journal.done), journal.reason


def lines(path):
    return path.read_bytes().splitlines(keepends=True)


def test_what_was_recorded_is_read_and_continued(path):
    write(path, ROWS[:2])
    write(path, ROWS[2:])
    assert read(path) == (ROWS, None)


def test_lines_of_an_earlier_run_are_durable_before_more_follow(path, monkeypatch):
    """It can have been stopped between a line and its sync; a loss of power could keep only the later line."""
    write(path, ROWS[:2])
    synced, real = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (synced.append(os.fstat(file).st_size), real(file)))
    size = path.stat().st_size
    write(path, ROWS[2:])
    assert synced[0] == size


def forged(text):
    """A line as somebody without the key would write it."""
    return text + b"\t" + b"0" * 64 + b"\n"


@pytest.mark.parametrize("how", ["swap", "cut", "first", "alter", "add", "plain", "moved", "tab"])
def test_lines_that_were_altered_are_not_believed(path, tmp_path, how):
    write(path)
    head, *rest = lines(path)
    if how == "moved":
        write(tmp_path / "other", header={**HEADER, "plan": "q"})
        rest = lines(tmp_path / "other")[1:]
    changed = {
        "swap": [head, rest[1], rest[0], *rest[2:]],
        "cut": [head, *rest[1:]],
        "first": rest,
        "alter": [head, rest[0].replace(b"w/0", b"w/1"), *rest[1:]],
        "add": [head, *rest, forged(rest[0].split(b"\t")[0])],
        "plain": [line.split(b"\t")[0] + b"\n" for line in (head, *rest)],
        "moved": [head, *rest],
        "tab": [head.replace(b"\t", b"\t\t"), *rest],
    }[how]
    path.write_bytes(b"".join(changed))
    done, reason = read(path)
    assert done == []
    assert "altered, or signed with another key" in reason
    assert len(lines(path)) == 1, "it is begun anew"


@pytest.mark.parametrize("field", HEADER)
def test_the_journal_of_another_conversion_is_named(path, field):
    write(path)
    done, reason = read(path, {**HEADER, field: "other"})
    assert done == []
    assert reason == f"the interrupted run had a different {field}"


def test_what_is_not_signed_is_not_even_parsed(path):
    path.write_bytes(b"[" * 100_000 + b"\n")
    assert "altered" in read(path)[1]


@pytest.mark.parametrize("kind", ["fifo", "link"])
def test_a_journal_is_a_file(path, kind):
    from wherry.errors import StorageError

    os.mkfifo(path) if kind == "fifo" else path.symlink_to("/etc/passwd")
    with pytest.raises(StorageError):
        read(path)


def test_nothing_is_recorded_by_a_run_that_lost_its_target(path):
    def lost():
        raise TargetInUseError("another run took over")

    journal = open_journal(path, HEADER, lost)
    with pytest.raises(TargetInUseError):
        journal.record(ROWS[:1])
    journal.close()
    assert len(lines(path)) == 1


def test_another_machine_with_the_same_key_reads_it(path, monkeypatch, tmp_path):
    monkeypatch.setenv("WHERRY_KEY", "sixteen letters, or more")
    write(path)
    monkeypatch.setenv("WHERRY_HOME", str(tmp_path / "another home"))
    assert read(path) == (ROWS, None)
    monkeypatch.setenv("WHERRY_KEY", "sixteen other letters, or more")
    assert "another key" in read(path)[1]


def test_the_key_of_the_home_is_made_once_and_private(path, wherry_home, monkeypatch, tmp_path):
    write(path)
    kept = wherry_home / "journal.key"
    assert kept.stat().st_mode & 0o777 == 0o600
    text = kept.read_bytes()
    assert len(text) == 64
    assert read(path) == (ROWS, None)
    assert kept.read_bytes() == text
    assert os.listdir(wherry_home) == ["journal.key"]
    monkeypatch.setenv("WHERRY_HOME", str(tmp_path / "another home"))
    assert "another key" in read(path)[1]


def test_of_two_that_make_the_key_the_first_counts(wherry_home, monkeypatch):
    found = []
    rename = folders.rename_without_replacing

    def later(source, target):
        if not found:
            found.append(None)
            found[0] = signed_log.journal_key()
        rename(source, target)

    monkeypatch.setattr(folders, "rename_without_replacing", later)
    assert signed_log.journal_key() == found[0]
    assert os.listdir(wherry_home) == ["journal.key"]


def test_a_key_that_gets_no_name_is_reported(wherry_home, monkeypatch, caplog):
    signed_log._own_key.cache_clear()  # another test of this process may have got the warning

    def failing(*_names):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(folders, "rename_without_replacing", failing)
    assert len(signed_log.journal_key()) == 32
    assert os.listdir(wherry_home) == []
    assert "cannot be signed" in caplog.text


def test_a_home_with_neither_renameat2_nor_hard_links_has_a_key(wherry_home, monkeypatch):
    def link_nothing(*_names, **_options):
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(folders.ctypes, "CDLL", lambda *_args, **_options: object())
    monkeypatch.setattr(os, "link", link_nothing)
    found = signed_log.journal_key()
    assert os.listdir(wherry_home) == ["journal.key"]
    assert (wherry_home / "journal.key").stat().st_mode & 0o777 == 0o600
    assert signed_log.journal_key() == found
    assert signed_log.key_for_workers() == {}, "it is that of the home"


@pytest.mark.parametrize("fault", ["open to others", "link", "fifo", "short", "no home"])
def test_without_a_key_a_run_works_and_is_not_resumed(
    path, wherry_home, monkeypatch, caplog, fault, tmp_path
):
    kept = wherry_home / "journal.key"
    if fault == "open to others":
        kept.write_text("0" * 64)
        kept.chmod(0o644)
    elif fault == "link":
        (tmp_path / "key").write_text("0" * 64)
        (tmp_path / "key").chmod(0o600)
        kept.symlink_to(tmp_path / "key")
    elif fault == "fifo":
        os.mkfifo(kept, 0o600)
    elif fault == "short":
        kept.write_text("0")
        kept.chmod(0o600)
    else:
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("WHERRY_HOME", str(tmp_path / "file" / "home"))
    signed_log._own_key.cache_clear()
    write(path)
    assert caplog.text.count("the journal cannot be signed, so this run cannot be resumed") == 1
    assert not read(path)[1], "a process has one key"
    with monkeypatch.context() as patch:
        patch.setenv(signed_log.KEY_ENV, signed_log.key_for_workers()[signed_log.KEY_ENV])
        assert not read(path)[1], "a worker gets it"
    signed_log._own_key.cache_clear()  # as in another process
    assert "another key" in read(path)[1]


def test_a_key_that_is_too_short_is_refused(path, monkeypatch):
    monkeypatch.setenv("WHERRY_KEY", "secret")
    with pytest.raises(UsageError, match="shorter than 16") as failure:
        write(path)
    assert "secret" not in str(failure.value).replace("WHERRY_KEY", "")
    assert "openssl" in failure.value.cure


def test_each_line_is_json_and_a_mac(path):
    write(path, ROWS[:1])
    head, row = (line.rstrip(b"\n").split(b"\t") for line in lines(path))
    assert json.loads(head[0]) == HEADER
    assert json.loads(row[0])["small"]["paths"] == ["w/0"]
    assert {len(head[1]), len(row[1])} == {64}


def test_a_journal_that_cannot_be_begun_keeps_no_descriptor_open(path, monkeypatch):
    def full(*_arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = open_descriptors()
    monkeypatch.setattr(os, "write", full)
    with pytest.raises(StorageError):
        open_journal(path, HEADER)
    monkeypatch.undo()
    assert open_descriptors() == before


def test_a_key_of_any_bytes_is_a_key(monkeypatch):
    monkeypatch.setenv(signed_log.KEY_ENV, os.fsdecode(b"\xff\xfe" * 10))
    assert len(signed_log.journal_key()) == 32


# The journal believes only whole lines of the very same conversion.


ROWS_OF_LINES = [
    DurableMove((f"tensor {number}",), Span(0, 8), {0: bytes([number]) * 32}) for number in range(3)
]


def written(path, rows=ROWS_OF_LINES, header=HEADER):
    """A journal with a line for each row, closed; its path."""
    journal = open_journal(path, header)
    for row in rows:
        journal.record([row])
    journal.close()
    return path


def found(path, header=HEADER):
    """What a later run finds done, and why nothing where it is nothing."""
    journal = open_journal(path, header)
    journal.close()
    return list(journal.done), journal.reason


def test_what_is_no_small_tensor_is_recorded_as_it_is(tmp_path):
    """Two leaves, a part that does not begin with the tensor, checksums, losses."""
    leaf = bytes(32)
    rows = [
        DurableMove(("two leaves",), Span(0, LEAF + 8), {0: leaf, 1: leaf}),
        DurableMove(("end",), Span(8, 16), {0: leaf}),
        DurableMove(("box",), Span(0, 8), {}),
        DurableMove(("checks",), Span(0, 8), {0: leaf}, ((0, 8, 1),)),
        DurableMove(("losses",), Span(0, 8), {0: leaf}, (), Losses(nan=1)),
        DurableMove(("two algorithms",), Span(0, 8), {0: 2 * leaf}),
    ]
    assert found(written(tmp_path / "journal", rows)) == (rows, None)
    assert found(written(tmp_path / "together", [])) == ([], None)
    journal = open_journal(tmp_path / "together", HEADER)
    journal.record(rows)
    journal.close()
    assert sorted(found(tmp_path / "together")[0]) == sorted(rows)


@pytest.mark.parametrize(
    "small",
    [
        {"paths": ["w"], "sizes": [0], "leaves": "AAAA"},
        {"paths": ["w"], "sizes": [LEAF + 1], "leaves": "AAAA"},
        {"paths": ["w"], "sizes": ["8"], "leaves": "AAAA"},
        {"paths": ["w"], "sizes": [], "leaves": "AAAA"},
        {"paths": ["w"], "sizes": [8], "leaves": "?"},
        {"paths": ["w"]},
        [],
    ],
)
def test_columns_that_cannot_be_read_make_all_of_it_worthless(tmp_path, small):
    journal = open_journal(tmp_path / "journal", HEADER)
    journal.log.append({"done": [], "small": small})
    journal.close()
    assert found(tmp_path / "journal")[0] == []


def test_a_torn_line_is_forgotten_whole_and_the_next_one_is_not_joined_to_it(tmp_path):
    path = written(tmp_path / "journal")
    whole = path.read_bytes()
    last = whole.rindex(b"\n", 0, -1) + 1
    for stop in range(last, len(whole)):
        path.write_bytes(whole[:stop])
        assert found(path) == (ROWS_OF_LINES[:2], None), stop
        assert found(written(path, ROWS_OF_LINES[2:])) == (ROWS_OF_LINES, None), stop


@pytest.mark.parametrize(
    "line", [b"nonsense", b"[]", b'{"done": 1}', b'{"done": []}', b'{"done": [[]]}', b"\xff\xfe"]
)
def test_a_line_that_cannot_be_read_makes_all_of_it_worthless(tmp_path, line):
    path = written(tmp_path / "journal")
    path.write_bytes(path.read_bytes() + line + b"\n")
    done, reason = found(path)
    assert done == []
    assert reason
