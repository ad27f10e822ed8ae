"""Storage that fails, is full or falls short: a clear error, nothing half done, and running again ends the same.

The short version takes samples of the calls that can fail, the slow one up to forty of each function: all but some
of the many calls of `fsync`.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections import Counter

import pytest

import wherry
from tests.support.crash import (
    FAILING,
    RENAME,
    assert_done,
    assert_left_after,
    complete,
    convert,
    each_written,
    failure_of,
    order,
    spread,
    written,
)
from wherry.errors import StorageError
from wherry.testing import faults
from wherry.testing.faults import Fault, Faults

pytest_plugins = ("tests.support.crash_fixtures",)


@pytest.mark.parametrize(
    ("code", "lasting"), [(errno.ENOSPC, True), (errno.EIO, False)], ids=["ENOSPC", "EIO"]
)
@written(3, 40)
def test_storage_that_fails(source, undisturbed, tmp_path, record_property, caplog, to, code, lasting, most):
    with Faults() as counted:
        convert(source, tmp_path / "counted" / to)
    moments = [(place, number) for place in FAILING for number in spread(counted.calls[place], most)]
    assert len(moments) > 5
    record_property("faults", len(moments))
    for place, number in moments:
        target = tmp_path / f"{place}-{number}".replace(":", ".") / to
        with Faults(Fault(faults.failing(code), number, place, lasting)) as injected:
            failed = failure_of(source, target)
        if failed is None:  # a folder was there already; an area is removed where it cannot be renamed
            said = f"{target} is committed, but" in caplog.text
            assert place in ("os:mkdir", "os:rename") or said or not injected.struck, (
                f"call {number} of {place}: nobody said so"
            )
            assert set(os.listdir(target.parent)) == complete(target)
        else:
            assert (failed.exit_code, failed.retryable) == (10, code == errno.EIO), failed
            assert_left_after(failed, target)
        assert_done(convert(source, target), target, undisturbed[to])
        shutil.rmtree(target.parent)


@pytest.mark.parametrize("to", ["safetensors", "orbax"])
def test_after_the_rename_only_a_warning_says_what_failed(source, undisturbed, tmp_path, caplog, to):
    """The target is there: an error would say that it is not, and a second run would find it."""
    before = Counter()

    def note(function, *arguments, **options):
        before.update(counted.calls)
        return function(*arguments, **options)

    assert undisturbed[to]  # the first conversion makes wherry's home, too
    with Faults(Fault(note, 1, RENAME)) as counted:
        convert(source, tmp_path / "counted" / to)
    moments = [
        (place, number)
        for place in faults.PLACES
        for number in range(before[place] + 1, counted.calls[place] + 1)
    ]
    struck = set[str]()
    for place, number in moments:
        target = tmp_path / f"{place}-{number}".replace(":", ".") / to
        with Faults(Fault(faults.failing(errno.EIO), number, place, lasting=True)) as injected:
            done = convert(source, target)
        struck |= {place} if injected.struck else set()
        assert done["target"]["checkpoint_digest"] == undisturbed[to]
        assert wherry.verify(target, level="digest").ok
        said = f"{target} is committed, but a loss of power may undo it" in caplog.text
        assert said or place != "os:fsync" or not injected.struck
        caplog.clear()
    assert struck >= {"os:fsync", "os:unlink"}


@each_written
def test_short_writes_are_completed(source, undisturbed, tmp_path, to):
    for place in faults.WRITES:
        with Faults(Fault(faults.falling_short, 1, place, lasting=True)) as injected:
            receipt = convert(source, tmp_path / place / to)
        assert injected.struck or place == "os:pwrite"
        assert_done(receipt, tmp_path / place / to, undisturbed[to])


@each_written
def test_the_kernel_refuses_larger_files(source, undisturbed, children, tmp_path, to):
    for size in (2_000, 200_000, 3_000_000):
        target = tmp_path / str(size) / to
        outcome = children.run(order(source, target, to, file_size=size))
        if outcome.error is None:
            assert_done(outcome.receipt, target, undisturbed[to])  # its files are smaller
            continue
        assert outcome.error["exit_code"] == 10, outcome.error
        assert "File too large" in outcome.error["what"]
        assert not target.parent.exists()
        assert_done(convert(source, target), target, undisturbed[to])


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO], ids=errno.errorcode.get)
@pytest.mark.parametrize(
    ("function", "options"),
    [
        ("_append_to_log", ("compression=zstd",)),
        ("sync_folder", ("compression=zstd",)),
        ("_write_file", ("ocdbt=false",)),
        ("_sync_files", ("ocdbt=false",)),
    ],
)
def test_a_chunk_store_fails(sources, tmp_path, monkeypatch, function, options, code):
    source = sources["orbax"]
    from wherry.mover import chunk_writer

    def fails(*_arguments, **_options):
        raise OSError(code, os.strerror(code))

    target = tmp_path / "out" / "orbax"
    chosen = dict(option.split("=") for option in options)
    monkeypatch.setattr(chunk_writer, function, fails)
    with pytest.raises(StorageError) as caught:
        wherry.convert(source, target, to="orbax", options=chosen, lineage=False)
    assert (caught.value.exit_code, caught.value.retryable) == (10, code == errno.EIO)
    assert_left_after(caught.value, target)
    monkeypatch.undo()
    wherry.convert(source, target, to="orbax", options=chosen, lineage=False)
    assert wherry.verify(target, level="digest", against=source).ok
