"""Links in checkpoints lead inside, into the blobs of the same Hugging Face cache, or where the user allows it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import wherry
from tests.support.formats import CORPUS, place
from wherry.errors import HostileError, IncompleteError, NotFoundError
from wherry.store import copy
from wherry.store.local_store import LocalStore, locate

SECRET = b"what only this user may read"
TENSORS = {"a": np.arange(12, dtype="f4").reshape(3, 4), "b": np.ones(5, "i8")}


def hub(folder: Path) -> Path:
    folder.mkdir(parents=True)
    save_file(TENSORS, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def model(tmp_path):
    return hub(tmp_path / "in" / "model")


@pytest.fixture
def outside(tmp_path):
    """A folder of the user's that no checkpoint has any business in."""
    folder = tmp_path / "home"
    (folder / "deep").mkdir(parents=True)
    (folder / "secret.txt").write_bytes(SECRET)
    (folder / "deep" / "other.txt").write_bytes(SECRET)
    return folder


def refused(source, tmp_path, match="outside the checkpoint", to="torch-zip"):
    with pytest.raises(HostileError, match=match) as caught:
        wherry.convert(source, tmp_path / "to" / "out", to=to, lineage=False)
    assert not (tmp_path / "to").exists()
    return caught.value


def carried(source, tmp_path, name):
    wherry.convert(source, tmp_path / "to" / name, to="huggingface", lineage=False)
    return {
        path.relative_to(tmp_path / "to" / name).as_posix() for path in (tmp_path / "to" / name).rglob("*")
    }


def test_a_file_outside_is_not_carried(model, outside, tmp_path):
    (model / "notes.txt").symlink_to(outside / "secret.txt")
    error = refused(model, tmp_path, to="huggingface")
    text = str(error)
    assert str(model / "notes.txt") in text
    assert str(outside / "secret.txt") in text
    assert f'links = ["{outside}"]' in (error.cure or "")
    assert wherry.detect(model).verdict == "malicious"
    assert (
        wherry.detect(model).reason
        == f"symbolic link points outside the checkpoint: {outside / 'secret.txt'}"
    )


@pytest.mark.parametrize("target", ["home/deep", "home", "."])
def test_a_folder_outside_is_not_entered(model, outside, tmp_path, target):
    (model / "extra").symlink_to(tmp_path / target, target_is_directory=True)
    refused(model, tmp_path, to="huggingface")


def test_a_chain_ends_where_its_last_link_leads(model, outside, tmp_path):
    (model / "one").symlink_to("two")
    (model / "two").symlink_to(Path("..", "three"))
    (model.parent / "three").symlink_to(outside / "secret.txt")
    refused(model, tmp_path, to="huggingface")


def test_links_inside_are_followed(model, tmp_path):
    (model / "texts").mkdir()
    (model / "texts" / "notes.txt").write_text("hello")
    (model / "relative.txt").symlink_to("texts/notes.txt")
    (model / "absolute.txt").symlink_to(model / "texts" / "notes.txt")
    (model / "chain.txt").symlink_to("relative.txt")
    (model / "more").symlink_to("texts")
    assert {"relative.txt", "absolute.txt", "chain.txt", "more/notes.txt"} <= carried(model, tmp_path, "out")
    assert (tmp_path / "to" / "out" / "chain.txt").read_text() == "hello"
    assert not any(path.is_symlink() for path in (tmp_path / "to" / "out").rglob("*"))


def test_the_path_that_the_user_names_may_have_links(model, tmp_path):
    (tmp_path / "data").symlink_to(tmp_path / "in")
    (tmp_path / "checkpoint").symlink_to(model)
    for number, named in enumerate((tmp_path / "data" / "model", tmp_path / "checkpoint")):
        assert wherry.detect(named).verdict == "ok"
        assert "config.json" in carried(named, tmp_path, f"out{number}")
    (tmp_path / "file.safetensors").symlink_to(model / "model.safetensors")
    with wherry.open(tmp_path / "file.safetensors") as found:
        assert found.read("b").tolist() == [1] * 5


@pytest.mark.parametrize("way", ["variable", "file"])
def test_the_user_may_allow_more(model, outside, tmp_path, monkeypatch, wherry_home, way):
    (model / "notes.txt").symlink_to(outside / "secret.txt")
    (model / "extra").symlink_to(outside / "deep")
    if way == "variable":
        monkeypatch.setenv("WHERRY_LINKS", f"{tmp_path / 'nothing'}:{outside}")
    else:
        (wherry_home / "wherry.toml").write_text(f'links = ["{outside}"]\n')
    assert {"notes.txt", "extra/other.txt"} <= carried(model, tmp_path, "out")


def test_a_checkpoint_cannot_allow_more(model, outside, tmp_path, monkeypatch):
    (model / "notes.txt").symlink_to(outside / "secret.txt")
    (model / "wherry.toml").write_text(f'links = ["{outside}"]\n')
    monkeypatch.chdir(model)
    refused(".", tmp_path, to="huggingface")


def test_links_to_nothing_and_to_themselves(model, tmp_path):
    (model / "gone.txt").symlink_to("nothing")
    with pytest.raises(IncompleteError, match=r"gone\.txt"):
        wherry.convert(model, tmp_path / "out", to="huggingface")
    (model / "gone.txt").unlink()
    (model / "loop.txt").symlink_to("loop.txt")
    refused(model, tmp_path, "back to itself", to="huggingface")
    (model / "model.safetensors").unlink()
    (model / "model.safetensors").symlink_to("model.safetensors")
    refused(model, tmp_path, "back to itself")


NOWHERE = {"below a file": "config.json/x", "too long": "x" * 300, "nothing": "nothing"}


@pytest.mark.parametrize("target", NOWHERE.values(), ids=NOWHERE)
def test_no_link_hides_the_files_next_to_it(model, target):
    (model / "z").symlink_to(target)
    assert {"config.json", "model.safetensors", "z"} <= {entry.name for entry in locate(model).entries()}
    assert wherry.detect(model).format == "huggingface"
    assert [found.uri for found in wherry.discover(model.parent)] == [str(model)]


def test_a_link_below_a_file_leads_to_nothing(model):
    (model / "z").symlink_to("config.json/x")
    (entry,) = [entry for entry in locate(model).entries() if entry.name == "z"]
    assert (entry.size, entry.barred) == (-1, "")
    with pytest.raises(NotFoundError):
        locate(model / "z").read(0, 1)


def test_a_link_that_cannot_be_followed_is_named(model, tmp_path):
    (model / "z").symlink_to("x" * 300)
    (entry,) = [entry for entry in locate(model).entries() if entry.name == "z"]
    assert entry.barred == "symbolic link cannot be followed: File name too long"
    assert refused(model, tmp_path, "File name too long", to="huggingface").uri == str(model / "z")
    assert wherry.detect(model).verdict == "malicious"


@pytest.fixture
def orbax(model, tmp_path):
    wherry.convert(model, tmp_path / "orbax", to="orbax", options={"ocdbt": "false"}, lineage=False)
    return tmp_path / "orbax"


@pytest.mark.parametrize("links", [["."], ["..", "../a"], [".", ".", "../b", "../a", ".."]])
def test_folders_that_lead_back_end_soon(orbax, tmp_path, links):
    for number, link in enumerate(links):
        (orbax / "a" / f"link{number}").symlink_to(link)
        (orbax / "b" / f"link{number}").symlink_to(link)
    began = time.process_time()
    refused(orbax, tmp_path, "more than 16 links lead to this folder|back to itself")
    assert time.process_time() - began < 5


def test_folders_that_branch_by_links_end_soon(orbax, tmp_path):
    last = orbax / "a"
    for number in range(30):
        level = orbax / f"level{number}"
        level.mkdir()
        (level / "left").symlink_to(last)
        (level / "right").symlink_to(last)
        last = level
    began = time.process_time()
    refused(orbax, tmp_path, "more than 16 links lead to this folder|back to itself")
    assert time.process_time() - began < 5


def test_folders_nest_only_so_deep(orbax, tmp_path):
    deep = orbax.joinpath("a", *["n"] * 80)
    deep.mkdir(parents=True)
    refused(orbax, tmp_path, "nested more than 64 levels deep")
    found = list(wherry.discover(tmp_path))
    assert {one.uri for one in found} >= {str(tmp_path / "in" / "model")}


def test_chunks_outside_are_refused_before_any_library_opens_them(orbax, outside, tmp_path):
    (chunk,) = [path for path in (orbax / "b").iterdir() if path.name.isdecimal()]
    shutil.move(chunk, outside / "chunk")
    chunk.symlink_to(outside / "chunk")
    refused(orbax, tmp_path)


def test_steps_of_a_run(tmp_path, outside):
    run = tmp_path / "run"
    hub(run / "checkpoint-1")
    hub(run / "kept")
    (run / "checkpoint-2").symlink_to("kept")
    assert wherry.detect(run).uri == str(run / "checkpoint-2")
    hub(outside / "checkpoint-3")
    (run / "checkpoint-3").symlink_to(outside / "checkpoint-3")
    for options in ({}, {"step": 3}):
        with pytest.raises(HostileError, match="outside"):
            wherry.open(run, **options)
    assert wherry.detect(run).verdict == "malicious"
    wherry.open(run, step=2).close()
    wherry.open(run / "checkpoint-3").close()  # the user named it


def cache(folder: Path) -> Path:
    """A model in the cache of the hub: its files are links to blobs."""
    snapshot, blobs = folder / "snapshots" / "0123abc", folder / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for file in sorted(hub(folder / "made").iterdir()):
        file.rename(blobs / f"blob-{file.name}")
        (snapshot / file.name).symlink_to(f"../../blobs/blob-{file.name}")
    (folder / "made").rmdir()
    return snapshot


def test_a_hub_cache(tmp_path):
    root = tmp_path / "hub"
    snapshot = cache(root / "models--org--name")
    assert "config.json" in carried(snapshot, tmp_path, "whole")
    with wherry.open(snapshot / "model.safetensors") as found:
        assert found.read("b").tolist() == [1] * 5
    assert [one.uri for one in wherry.discover(root)] == [str(snapshot)]
    assert [one.uri for one in wherry.discover(snapshot)] == [str(snapshot)]
    other = cache(root / "models--org--other")
    (snapshot / "notes.txt").symlink_to(other / "config.json")
    refused(snapshot, tmp_path / "further", to="huggingface")


def test_blobs_that_are_a_link_are_no_blobs(tmp_path, outside):
    snapshot = cache(tmp_path / "models--org--name")
    blobs = snapshot.parent.parent / "blobs"
    blobs.rename(outside / "blobs")
    blobs.symlink_to(outside / "blobs")
    refused(snapshot, tmp_path)


@pytest.mark.parametrize(
    "case",
    ["hf-gpt2-conv1d-fp32", "hf-llama-bin-single-fp32", "dcp-torch-2-3-1", "lingua-noshard-w2",
     "paxml-gpt3-l3-flax", "t5x-upstream-tiny-t5"],
)  # fmt: skip
def test_what_is_exchanged_after_the_look_is_not_read(case, tmp_path, outside):
    """Every file becomes a link to other bytes outside, once the checkpoint is open: what is opened first then is
    refused, and what was open is read from the file that it was."""
    if not (CORPUS / case).exists():
        pytest.skip("the corpus is not here; set WHERRY_CORPUS to its folder")
    shutil.copytree(CORPUS / case / "checkpoint", tmp_path / "copy")
    where = tmp_path / "copy" / place(case).relative_to(CORPUS / case / "checkpoint")
    with wherry.open(where) as found, wherry.open(place(case)) as original:
        for number, path in enumerate([path for path in where.rglob("*") if path.is_file()]):
            (outside / str(number)).write_bytes(b"\x2a" * path.stat().st_size)
            path.unlink()
            path.symlink_to(outside / str(number))
        for path in found.manifest.tensors:
            with contextlib.suppress(HostileError):
                assert found.read_bytes(path) == original.read_bytes(path)


def test_a_folder_above_is_exchanged_after_the_look(tmp_path, outside):
    source = hub(tmp_path / "in" / "model")
    save_file({"a": np.zeros((3, 4), "f4"), "b": np.zeros(5, "i8")}, outside / "model.safetensors")
    (outside / "config.json").write_text("{}")
    with wherry.open(source) as found:
        source.rename(tmp_path / "in" / "old")
        source.symlink_to(outside)
        assert found.read("b").tolist() == [1] * 5
        with pytest.raises(HostileError, match="outside"):
            LocalStore(locate(tmp_path / "in").store.root).read(str(source / "model.safetensors"), 0, 1)


def test_discovery_names_strange_entries_and_goes_on(tmp_path, outside):
    root = tmp_path / "root"
    hub(root / "run" / "checkpoint-1")
    os.mkfifo(root / "pipe.safetensors")
    (root / "zero").symlink_to("/dev/zero")
    (root / "elsewhere").symlink_to(outside)
    (root / "loop").symlink_to("loop")
    (root / "run" / "latest").symlink_to("checkpoint-1")
    (root / "config.json").symlink_to(outside / "secret.txt")
    bad = hub(root / "bad")
    (bad / "config.json").unlink()
    (bad / "config.json").symlink_to(outside / "secret.txt")
    skipped = []
    found = [
        Path(one.uri).relative_to(root).as_posix() for one in wherry.discover(root, on_skip=skipped.append)
    ]
    assert "run/checkpoint-1" in found
    reasons = {Path(row.uri).name: row.reason for row in skipped}
    assert reasons["pipe.safetensors"] == "a FIFO"
    assert "outside" in reasons["zero"]
    assert "outside" in reasons["elsewhere"]
    assert "back to itself" in reasons["loop"]
    assert "link" in reasons["latest"]
    assert "outside" in reasons["bad"]


def test_what_is_next_to_one_file(tmp_path, outside):
    folder = tmp_path / "files"
    folder.mkdir()
    save_file(TENSORS, folder / "a.safetensors")
    (folder / "a.safetensors.wherry.json").symlink_to(outside / "secret.txt")
    assert wherry.verify(folder / "a.safetensors", level="digest").verdict == "malicious"
    (folder / "a.safetensors.wherry.json").unlink()
    (outside / "note").write_text(json.dumps({"schema": 1}))
    (outside / "note").rename(folder / "kept.json")
    (folder / "a.safetensors.wherry.json").symlink_to("kept.json")
    assert wherry.verify(folder / "a.safetensors", level="digest").verdict == "corrupt"


def test_rewriting_and_signing_follow_the_rule(orbax, outside, tmp_path):
    pytest.importorskip("cryptography")
    from wherry.integrations import signing

    (orbax / "note").symlink_to(outside / "secret.txt")
    for look in (copy.list_files, signing._names):
        with pytest.raises(HostileError, match="outside"):
            look(locate(orbax))
    with pytest.raises(HostileError, match="outside"):
        copy.carry_file(locate(orbax).join("note"), tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


def test_nothing_is_written_through_a_link(outside):
    link = outside / "link"
    link.symlink_to(outside / "secret.txt")
    for options in ({}, {"create_only": True}):
        with pytest.raises((HostileError, FileExistsError)):
            LocalStore().put(str(link), b"changed", **options)
    os.mkfifo(outside / "pipe")
    with pytest.raises(HostileError, match="FIFO"):
        LocalStore().put(str(outside / "pipe"), b"changed")
    assert (outside / "secret.txt").read_bytes() == SECRET


def test_a_link_that_is_none_at_the_second_look_is_looked_at_again(model, tmp_path, monkeypatch):
    """Python's realpath raises OSError where a name is a link, and is none once the link is read."""
    (tmp_path / "link").symlink_to(model)
    real, refused = os.readlink, []

    def readlink(path, **named):
        if os.fspath(path) == str(tmp_path / "link") and len(refused) < allowed:
            refused.append(path)
            raise OSError(22, "Invalid argument", path)
        return real(path, **named)

    monkeypatch.setattr(os, "readlink", readlink)
    allowed = 3
    assert wherry.detect(tmp_path / "link").verdict == "ok"
    assert len(refused) == 3
    allowed = 10_000
    with pytest.raises(HostileError, match="change all the time"):
        locate(tmp_path / "link")
