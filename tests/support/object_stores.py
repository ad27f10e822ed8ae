"""What tests of targets in stores of objects share: small parts, calls that fail, and what is left."""

from __future__ import annotations

from contextlib import contextmanager

import numpy as np
import pytest
from safetensors.numpy import save_file

from wherry.store.local_store import locate
from wherry.store.memory import MemoryStore
from wherry.store.sidecar import sidecar_name
from wherry.store.store import PartLimits
from wherry.target import uploaded_file

CALLS = (
    "head",
    "put_object",
    "remove_object",
    "remove_many",
    "begin",
    "put_part",
    "copy_object",
    "parts",
    "assemble",
    "abort",
)


class PartLog(list):
    """The log of a file that is uploaded: the numbers of the parts that were sent."""

    def part(self, _upload, part):
        self.append(part.number)

    def whole(self, _path, _part):
        pass


class Killed(BaseException):
    """The process was killed here: nothing that it does later reaches the store."""


@contextmanager
def small_parts(nbytes=32 << 10):
    """Parts of a few KiB, so that a small checkpoint has many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MemoryStore, "part_limits", PartLimits(4, 1 << 30, 10_000))
        patch.setattr(uploaded_file, "PART_BYTES", nbytes)
        yield


@contextmanager
def waiting_parts(nbytes=32 << 10):
    """Small parts, and so little memory for them that writing waits for sending; each move is recorded by itself."""
    with small_parts(nbytes), pytest.MonkeyPatch.context() as patch:
        patch.setattr("wherry.mover.output._GROUP_BYTES", 1)
        patch.setattr("wherry.target.parts.HELD_BYTES", 128 << 10)
        yield


@contextmanager
def watched(fatal=0, error=Killed, only=CALLS, at=lambda _path: True):
    """Count the calls of the store of memory://; at one of them, and at every later one, it fails.

    Args:
        fatal: number of the first call that fails; none does if it is 0.
        error: what it raises.
        only: the calls that are counted.
        at: of which paths.
    """
    calls = []
    with pytest.MonkeyPatch.context() as patch:
        for name in CALLS:
            real = getattr(MemoryStore, name)

            def call(self, *args, real=real, name=name, **kwargs):
                if name in only and at(args[0]):
                    calls.append((name, args))
                if fatal and len(calls) >= fatal:
                    raise error(f"{name} is call {len(calls)}")
                return real(self, *args, **kwargs)

            patch.setattr(MemoryStore, name, call)
        yield calls


def release(target):
    """Remove the lease of a run that was killed in this process, which itself lives on."""
    place = locate(target)
    lease = place.parent.join(f".wherry-{place.name}.lease")
    store = lease.store
    if found := store.head(lease.path):
        store.remove_object(lease.path, found.mark)


def leftover_names(target):
    """Names of the objects in the folder of a target that are not its own; it has no sidecar unless it is a file."""
    place = locate(target)
    file = place.entry is not None and not place.entry.is_dir
    own = (place.name, sidecar_name(place.name)) if file else (place.name,)
    return sorted(entry.name for entry in place.parent.walk() if entry.name.split("/")[0] not in own)


def uploads_below(target):
    """Uploads that are neither assembled nor aborted."""
    place = locate(target).parent
    return list(place.store.uploads(place.path))


def model(folder, rows=100, count=12, seed=0):
    """A Hugging Face folder with tensors of `rows` KB and one companion."""
    folder.mkdir()
    generator = np.random.default_rng(seed)
    tensors = {f"layer.{n}.weight": generator.standard_normal((rows, 250), dtype="f4") for n in range(count)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text("{}")
    return folder
