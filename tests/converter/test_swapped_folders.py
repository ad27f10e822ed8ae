"""The folder of a source becomes a link to another one, at every moment of a conversion: the other one is never read.

What comes of it is the original's bytes, or an error of wherry.
"""

from __future__ import annotations

import shutil
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import save_file

import wherry
from wherry.converter.convert import convert_all
from wherry.core.request import TargetRequest, convert_request
from wherry.errors import MismatchError, WherryError
from wherry.formats import checkpoint as checkpoints
from wherry.store import open_file
from wherry.store.local_store import LocalStore

SECRET = "what only this user may read"
TENSORS = {"a": np.arange(12, dtype="f4").reshape(3, 4), "b": np.ones(5, "i8")}
FORMATS = {"huggingface": {}, "orbax": {"ocdbt": "false"}, "dcp": {}, "npz": {}}

pytestmark = pytest.mark.usefixtures("own_home")


@pytest.fixture(autouse=True)
def settled(monkeypatch):
    monkeypatch.setenv("WHERRY_SETTLE_SECONDS", "0")


@pytest.fixture(params=["openat2", "part by part"])
def way(request, monkeypatch):
    """With the call of the kernel, and without."""
    if request.param != "openat2":
        monkeypatch.setattr(open_file, "_load_call", lambda: None)
    elif open_file._load_call() is None or open_file._load_call()(0, "", 0)[0] in open_file._NO_CALL:
        pytest.skip("this kernel has no openat2")
    return request.param


class Swap:
    """A folder and the link that takes its place.

    Args:
        folder: what is exchanged; its parent is the root of the route.
        other: where the link leads.
        at: the number of the opening before which they are exchanged; never if it is 0.
        back: the number of openings after which the folder is in its place again; never if it is 0.
    """

    def __init__(self, folder, other, at=0, back=0):
        self.folder, self.other, self.aside = folder, other, folder.with_name("aside")
        self.at, self.until, self.count = at, at + back if back else 0, 0

    def step(self):
        self.count += 1
        if self.count == self.at:
            self.folder.rename(self.aside)
            self.folder.symlink_to(self.other)
        if self.count == self.until:
            self.undo()

    def undo(self):
        if self.folder.is_symlink():
            self.folder.unlink()
            self.aside.rename(self.folder)


def made(folder, form, tensors):
    """A checkpoint with a text next to its tensors, where its format has such files."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    plain = folder.with_name(f"{folder.name}-plain")
    plain.mkdir()
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    place = folder / "w.npz" if form == "npz" else folder
    wherry.convert(plain, place, to=form, options=FORMATS[form], lineage=False, family="none")
    for sidecar in folder.rglob("*wherry.json"):
        sidecar.unlink()
    shutil.rmtree(plain)
    return place


@pytest.fixture
def run(tmp_path, request):
    """The source, its folder, and another folder of the same form that is nobody's business."""
    form = request.param
    place = made(tmp_path / "runs" / "run", form, TENSORS)
    outside = tmp_path / "private" / "run"
    made(outside, form, {name: np.full_like(one, 42) for name, one in TENSORS.items()})
    (outside / "notes.txt").write_text(SECRET)
    (outside.parent / "config.json").write_text("{}")
    return place, tmp_path / "runs" / "run", outside


def converted(place, target, monkeypatch, swap, below=None):
    """Convert while the folder is exchanged; the values of the target, or None where wherry refused."""
    real = open_file._open_admitted

    def stepping(*values, **named):
        swap.step()
        return real(*values, **named)

    request = convert_request(
        place, [TargetRequest(str(target), "huggingface")], lineage=False, family="none"
    )
    request = replace(request, source=replace(request.source, below=below))
    with monkeypatch.context() as patch:
        patch.setattr(open_file, "_open_admitted", stepping)
        try:
            convert_all(request)
        except WherryError:
            assert not target.exists()
            return None
        finally:
            swap.undo()
    assert not any(SECRET in file.read_text(errors="replace") for file in target.rglob("*") if file.is_file())
    with wherry.open(target) as found:
        values = {name: found.read(name) for name in TENSORS}
    shutil.rmtree(target)
    return values


@pytest.mark.parametrize(
    "run",
    [one if one == "huggingface" else pytest.param(one, marks=pytest.mark.full) for one in FORMATS],
    indirect=True,
)
@pytest.mark.parametrize(
    ("back", "named"), [(0, "by a route"), (1, "by the user"), (3, "by a route")], ids=["stays", "1", "3"]
)
def test_a_swap_at_every_moment_gives_the_original_or_an_error(run, way, back, named, tmp_path, monkeypatch):
    place, folder, outside = run
    below = str(folder.parent) if named == "by a route" else None
    never = Swap(folder, outside)
    assert converted(place, tmp_path / "out", monkeypatch, never, below) is not None
    assert never.count > 3, "every moment"
    outcomes = set()
    for at in range(1, never.count + 1):
        swap = Swap(folder, outside, at, back)
        found = converted(place, tmp_path / "out", monkeypatch, swap, below)
        outcomes.add(found is not None)
        for name, values in (found or {}).items():
            assert values.tolist() == TENSORS[name].tolist(), f"swapped before opening {at}"
    assert True in outcomes, "an open folder is read to its end"


@pytest.mark.parametrize("run", ["huggingface"], indirect=True)
def test_a_path_that_leads_elsewhere_once_the_source_has_settled_is_refused(run, tmp_path, monkeypatch):
    place, folder, outside = run
    monkeypatch.setenv("WHERRY_SETTLE_SECONDS", "3600")
    swap = Swap(folder, outside, at=1)
    monkeypatch.setattr(
        checkpoints, "time", SimpleNamespace(time=time.time, sleep=lambda _seconds: swap.step())
    )
    with pytest.raises(MismatchError, match="the folder of the source was replaced"):
        wherry.convert(place, tmp_path / "out", to="npz", lineage=False)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("run", ["huggingface"], indirect=True)
def test_what_lies_above_an_open_checkpoint_is_not_read_through_a_link(run, tmp_path):
    """Trainers keep files of the model next to its steps: a folder above the checkpoint is exchanged."""
    place, folder, outside = run
    with wherry.open(place) as found:
        config = found.location.parent.join("config.json")
        (folder.parent / "config.json").write_text('{"own": 1}')
        assert config.read_whole(100) == b'{"own": 1}'
        folder.parent.rename(tmp_path / "old")
        folder.parent.symlink_to(outside.parent)
        with pytest.raises(WherryError, match="symbolic link points outside"):
            config.read_whole(100)
        assert found.read("b").tolist() == [1] * 5


def test_a_folder_beneath_is_opened_as_the_kernel_would(way, tmp_path):
    (tmp_path / "in" / "deep").mkdir(parents=True)
    (tmp_path / "in" / "deep" / "file").write_text("inside")
    (tmp_path / "secret").write_text(SECRET)
    for name, leads in {"up": "..", "far": str(tmp_path), "loop": "loop"}.items():
        (tmp_path / "in" / name).symlink_to(leads)
    root = open_file.open_root(open_file.root_at(str(tmp_path / "in")))
    assert LocalStore(root).read(f"{tmp_path}/in/deep/file", 0, 99) == b"inside"
    assert LocalStore(root).read(f"{tmp_path}/in/./deep//file", 0, 99) == b"inside"
    for name in ("up/secret", "far/secret", "deep/../../secret", "loop"):
        with pytest.raises(WherryError):
            LocalStore(root).read(f"{tmp_path}/in/{name}", 0, 99)
    with pytest.raises(NotADirectoryError):
        LocalStore(root).read(f"{tmp_path}/in/deep/file/x", 0, 99)
    with pytest.raises(FileNotFoundError):
        LocalStore(root).read(f"{tmp_path}/in/none/x", 0, 99)
    with pytest.raises(ValueError, match="null"):
        LocalStore(root).read(f"{tmp_path}/in/a\0b", 0, 99)
