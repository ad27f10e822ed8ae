"""Every format that streams into a store of objects writes there the same bytes as on a local disk."""

from functools import cache

import numpy as np
import pytest
from safetensors.numpy import save_file

import wherry
from tests.support.model_files import MAKERS
from tests.support.object_stores import Killed, leftover_names, release, small_parts, uploads_below, watched
from tests.support.stated import FACTS
from wherry.core import threads
from wherry.core.request import LayoutRequest
from wherry.formats.registry import formats
from wherry.store.local_store import locate
from wherry.store.sidecar import sidecar_name
from wherry.target.parts import SENDERS, Sender
from wherry.target.uploaded_file import UploadedFile

pytest_plugins = ("tests.support.crash_fixtures",)
STREAMED = [name for name, row in formats().items() if row.is_written]
KIB = 1 << 10


@pytest.fixture(autouse=True)
def parts():
    with small_parts(4 * KIB), pytest.MonkeyPatch.context() as patch:
        patch.setattr("wherry.mover.output._GROUP_BYTES", 1)
        patch.setattr("wherry.mover.move.SMALL", 1 * KIB)
        patch.setattr("wherry.target.parts.HELD_BYTES", 32 * KIB)
        patch.setattr("time.time_ns", lambda: 1_700_000_000_000_000_000)  # Orbax notes when it was written
        yield


def convert(source, target, to):
    """Names are kept."""
    return wherry.convert(source, target, to=to, family="none", lineage=False)


def contents(uri):
    """The bytes of each file but the sidecar, by name."""
    place = locate(uri)
    entry = place.stat()
    assert entry is not None
    if not entry.is_dir:
        return {"": place.read(0, entry.size)}
    own = ("wherry.json", sidecar_name(place.name))
    return {one.name: place.join(one.name).read(0, one.size) for one in place.walk() if one.name not in own}


@cache
def made_locally(source, folder, to):
    convert(source, folder / to, to)
    return contents(folder / to)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, key):
    folder = tmp_path_factory.mktemp("undisturbed")
    return lambda source, to: made_locally(source, folder, to)


@pytest.fixture
def peaks(monkeypatch):
    """The largest number of bytes that each run held in parts."""
    made = []

    class Seen(Sender):
        def __init__(self, *args):
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr("wherry.target.object_staging.Sender", Seen)
    return lambda: [one.peak for one in made]


@pytest.mark.parametrize("to", STREAMED)
def test_a_target_has_the_bytes_of_a_local_one_also_after_kills(source, tmp_path, undisturbed, peaks, to):
    with watched(only=("put_part",)) as calls:
        convert(source, f"memory://streamed{tmp_path}/whole/{to}", to)
    assert contents(f"memory://streamed{tmp_path}/whole/{to}") == undisturbed(source, to)
    total, target = len(calls), f"memory://streamed{tmp_path}/target/{to}"
    assert total > 10
    for _kill in range(2):
        with watched(fatal=total // 3, only=("put_part",)), pytest.raises(Killed):
            convert(source, target, to)
        release(target)
    with watched(only=("put_part",)) as calls:
        convert(source, target, to)
    assert len(calls) < total * 2 / 3
    assert contents(target) == undisturbed(source, to)
    assert leftover_names(target) == []
    assert uploads_below(target) == []
    # Parts come in order: little more is held than the budget, although every move is larger than a part.
    assert max(peaks()) <= 128 * KIB


def test_moves_come_in_the_order_of_the_files(tmp_path, monkeypatch):
    """Tensors lie in the source in another order than in the target, which sorts them by name."""
    names = [f"layer.{n}.weight" for n in (7, 1, 9, 3, 0, 5)]
    tensors = {name: np.full((64, 64), n, dtype="f4" if n % 2 else "f8") for n, name in enumerate(names)}
    save_file(tensors, tmp_path / "m.safetensors", metadata={"format": "pt"})
    written = []
    real = UploadedFile.write
    monkeypatch.setattr(
        UploadedFile, "write", lambda self, at, data: (written.append((self.path, at)), real(self, at, data))
    )
    monkeypatch.setattr("wherry.core.threads.carrier_count", lambda: 1)
    monkeypatch.setattr("wherry.mover.carrier.SMALL", 0)
    convert(tmp_path / "m.safetensors", f"memory://streamed{tmp_path}/out", "huggingface")
    places = [row for row in written if row[0].endswith("model.safetensors") and row[1] > 8]
    assert len(places) >= len(names) - 1  # the header is written with the first tensor
    assert places == sorted(places)


def unstacked(source, target):
    """Convert MaxText's stacked layers to Hugging Face's."""
    layout = LayoutRequest(family="llama")
    wherry.convert(
        source,
        target,
        to="huggingface",
        options={"rope": "half", **FACTS["llama", "maxtext"]},
        layout=layout,
        lineage=False,
    )


def test_another_systems_layout_is_streamed_in_bounded_memory(tmp_path, peaks, monkeypatch):
    """Each stacked tensor holds a slice of every layer, so that many parts are begun before any is whole."""
    source, held, part = MAKERS["llama"]["maxtext-scan"](tmp_path), 8 * KIB, 4 * KIB
    monkeypatch.setattr("wherry.target.parts.HELD_BYTES", held)
    unstacked(source, tmp_path / "local")
    target = f"memory://streamed{tmp_path}/out"
    with watched(only=("put_object",), at=lambda path: "overflow-" in path) as made:
        unstacked(source, target)
    assert contents(target) == contents(tmp_path / "local")
    assert max(peaks()) <= held + (SENDERS + threads.worker_count()) * part
    assert made
    assert leftover_names(target) == []


def test_bytes_that_waited_in_the_store_for_a_killed_run_are_removed(tmp_path, monkeypatch):
    source = MAKERS["llama"]["maxtext-scan"](tmp_path)
    monkeypatch.setattr("wherry.target.parts.HELD_BYTES", 8 * KIB)
    target = f"memory://streamed{tmp_path}/out"
    with watched(only=("put_part",)) as calls:
        unstacked(source, f"memory://whole{tmp_path}/out")
    with watched(fatal=len(calls) // 2, only=("put_part",)), pytest.raises(Killed):
        unstacked(source, target)
    assert [name for name in leftover_names(target) if "overflow-" in name]
    release(target)
    unstacked(source, target)
    assert contents(target) == contents(f"memory://whole{tmp_path}/out")
    assert leftover_names(target) == []


def test_small_tensors_between_large_ones_hold_no_parts_back(tmp_path, peaks, monkeypatch):
    """Small tensors are carried in batches; a part that lacks one of them cannot be sent."""
    tensors = {f"layer.{n:03}.weight": np.full((3 * KIB,), n, dtype="f4") for n in range(100)}
    tensors |= {f"layer.{n:03}.norm": np.full((30,), n, dtype="f4") for n in range(100)}
    save_file(tensors, tmp_path / "m.safetensors", metadata={"format": "pt"})
    monkeypatch.setattr("wherry.mover.carrier.SMALL", 1 * KIB)
    monkeypatch.setattr("wherry.mover.carrier._MOST_BEHIND", 32 * KIB)
    monkeypatch.setattr("wherry.target.parts.HELD_BYTES", 192 * KIB)
    monkeypatch.setattr("wherry.target.upload_run.StoredBytes", None)
    convert(tmp_path / "m.safetensors", f"memory://streamed{tmp_path}/out", "safetensors")
    assert max(peaks()) <= 192 * KIB
