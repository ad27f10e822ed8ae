"""A source whose files are pinned: what is opened again must be the file that was opened first."""

from __future__ import annotations

import pytest

from wherry.errors import MismatchError
from wherry.storage import open_file
from wherry.storage.stores import PinnedStore


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
