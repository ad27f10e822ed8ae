"""Marks of what is being read: where they lie, what needs none, and that nothing removes what bears one."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import save_file

import wherry
from wherry.target.in_use import in_use, is_in_use


def checkpoint(folder, run, step):
    place = folder / "runs" / run / f"checkpoint-{step}"
    place.mkdir(parents=True)
    save_file({"w": np.full((8, 4), step, np.float32)}, place / "model.safetensors")
    return place


def made(folder):
    """A checkpoint that wherry wrote, so that a mark is needed while it is read."""
    return wherry.convert(checkpoint(folder, "a", 1), folder / "made", to="orbax", lineage=False).target.uri


def test_in_use_is_seen_while_it_lasts(tmp_path, wherry_home):
    uri = made(tmp_path)
    before = sorted(tmp_path.iterdir())
    with in_use(uri), in_use(uri):
        assert is_in_use(uri)
        assert not is_in_use(f"{uri}.other")
        assert not is_in_use(str(tmp_path / "mad"))
    assert not is_in_use(uri)
    assert sorted(tmp_path.iterdir()) == before
    assert not (wherry_home / "in-use").exists()


def test_a_reader_of_an_item_keeps_its_whole_step(tmp_path, monkeypatch):
    from wherry.errors import TargetInUseError
    from wherry.routes import removal

    step = tmp_path / "run" / "1"
    uri = wherry.convert(checkpoint(tmp_path, "a", 1), step / "items", to="orbax", lineage=False).target.uri
    reader, rename = in_use(uri), removal.rename_without_replacing

    def read_first(source, target):
        if source == step:
            reader.__enter__()
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(removal, "rename_without_replacing", read_first)
        with pytest.raises(TargetInUseError), removal.removing(str(step), uri, "orbax"):
            pytest.fail("it was taken away")
    assert is_in_use(uri), "it is back with its mark"
    assert [one.uri for one in wherry.discover(tmp_path / "run")] == [uri]
    reader.__exit__(None, None, None)
    with removal.removing(str(step), uri, "orbax"):
        pass
    assert not list((tmp_path / "run").iterdir())


def test_what_wherry_did_not_write_needs_no_mark(tmp_path, wherry_home):
    source = checkpoint(tmp_path, "a", 1)
    with in_use(str(source)):
        assert not is_in_use(str(source))
        assert [path.name for path in source.parent.iterdir()] == [source.name]
    assert not (wherry_home / "in-use").exists()


def test_a_mark_that_cannot_lie_next_to_its_source_is_in_the_home(tmp_path, monkeypatch, caplog, wherry_home):
    from wherry.target import in_use as module

    uri = made(tmp_path)
    monkeypatch.setattr(module, "_at_source", lambda _location: None)  # as on an object store
    with in_use(uri):
        assert is_in_use(uri)
        assert list((wherry_home / "in-use").iterdir())
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("WHERRY_HOME", str(tmp_path / "file" / "home"))
    with in_use(uri):
        assert "could not be marked as in use" in caplog.text


def test_a_dead_reader_does_not_hold(tmp_path):
    import subprocess
    import sys

    uri = made(tmp_path)
    script = f"import os; from wherry.target.in_use import in_use\nwith in_use({uri!r}): os._exit(0)"
    subprocess.run([sys.executable, "-c", script], check=True)
    assert list(tmp_path.glob(".wherry-made.*.reading")), "it was killed and left its mark"
    assert not is_in_use(uri)


@pytest.mark.parametrize("job", ["restore", "fetch"])
def test_what_a_restore_or_a_fetch_reads_is_in_use(tmp_path, job):
    uri = made(tmp_path)
    seen = []

    def look(_):
        seen.append(is_in_use(uri))

    if job == "fetch":
        wherry.fetch(uri, tmp_path / "copy", progress=look)
    else:
        wherry.restore(uri, into={"w": np.zeros((8, 4), np.float32)}, progress=look)
    assert any(seen)
    assert not is_in_use(uri)
