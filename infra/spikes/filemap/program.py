"""One process of a conversion: `python -m infra.spikes.filemap.program JOB ROLE [MOMENT]`.

JOB is a JSON file (`JobFile`), ROLE is `begin` (prints what workers share), the number of a slice, `commit`, or `today`
(what `wherry.convert` does with the same). MOMENT kills the process, by SIGKILL, before its n-th write to storage. It
prints what it has used and found, as JSON.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infra.spikes.filemap import maxtext, npz
from infra.spikes.filemap.engine import STEP, Job, commit, work
from infra.spikes.filemap.log import FileLog, ObjectLog, SignedLog
from infra.spikes.filemap.nouns import Pack, Scene, Segments, slices
from infra.spikes.filemap.sinks import DiskSink, PartsSink
from infra.spikes.filemap.transform import from_checkpoint
from wherry.storage.stores import locate
from wherry.store.store import Upload

if TYPE_CHECKING:
    from collections.abc import Iterator

    from infra.spikes.filemap.nouns import FileMap
    from infra.spikes.filemap.sinks import Sink
    from infra.spikes.filemap.transform import FromCheckpoint
    from wherry.storage.location import Location

LAYOUTS = {"npz": npz.layout, "maxtext": maxtext.layout}
_KEY = b"the key of the user that signs lines"
_MOST_ARENAS = -8  # a parameter of mallopt
_GRAIN = 64 << 10  # of slices on a file system


@dataclass(frozen=True, slots=True)
class JobFile:
    """What all processes of a job are told.

    Attributes:
        source: URI of the checkpoint.
        target: URI of the target.
        to: its format.
        options: of the format.
        common: other options of `wherry.convert`.
        workers: number of slices.
        uploads: file → path, key and run of an upload that several workers share.
        ordered: whether packs follow the source.
        box_bytes: of a batch of chunks.
        group: bytes between two records.
    """

    source: str
    target: str
    to: str
    options: dict[str, str]
    common: dict[str, str]
    workers: int = 1
    uploads: dict[str, list[str]] = field(default_factory=dict[str, "list[str]"])
    ordered: bool = True
    box_bytes: int = 16 << 20
    group: int = 64 << 20

    @property
    def place(self) -> Location:
        """The target."""
        return locate(self.target)

    @property
    def folder(self) -> Location:
        """What is beside the target until it is there: the log, and what nobody may see."""
        return self.place.parent.join(f".spike-{self.place.name}")


@contextmanager
def opened(job: JobFile) -> Iterator[tuple[Job, FromCheckpoint]]:
    """The same in every process: manifest, options and scene decide it."""
    found = from_checkpoint(job.source, job.target, job.to, job.options, ordered=job.ordered, **job.common)
    with found as transform:
        scene = Scene(job.place.name, transform.manifest.step, created_ns=1_700_000_000_000_000_000)
        file_map = LAYOUTS[job.to](transform.manifest, transform.plan.options, scene)
        yield Job(file_map, transform, box_bytes=job.box_bytes, group=job.group), transform


def sink_of(job: JobFile, file_map: FileMap) -> Sink:
    """Where the target's bytes go."""
    names, store = [file.name for file in file_map.files], job.place.store
    if not store.capabilities.parts:
        return DiskSink(Path(job.folder.path), Path(job.place.path), names)
    sizes = {
        at: file.body.nbytes for at, file in enumerate(file_map.files) if isinstance(file.body, Segments)
    }
    sink = PartsSink(store, job.place, job.folder, names, file_map.commit_members, sizes, STEP, "0" * 16)
    sink.uploads |= {int(file): Upload(*row) for file, row in job.uploads.items()}
    return sink


def log_of(job: JobFile, name: str, digest: str) -> SignedLog:
    """A log of the job; a codec of another build begins none that goes on with this one's bytes."""
    header = {"plan": digest, "codec": maxtext.zstd().build, "log": name, "workers": job.workers}
    place, store = job.folder.join(f"log-{name}"), job.place.store
    if not store.capabilities.parts:
        Path(job.folder.path).mkdir(parents=True, exist_ok=True)
        return SignedLog(FileLog(Path(place.path)), _KEY, header)

    def read(path: str) -> bytes | None:
        found = type(place)(place.store, path)
        return found.read_whole(1 << 30) if found.exists() else None

    return SignedLog(ObjectLog(store, place.path, "0" * 16, read), _KEY, header)


class Deadly:
    """A sink before whose n-th write the process is killed."""

    def __init__(self, sink: Sink, moment: int) -> None:
        self._sink, self._left = sink, moment

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sink, name)

    def write(self, file: int, offset: int, data: memoryview) -> None:
        self._left -= 1
        if not self._left:
            os.kill(os.getpid(), signal.SIGKILL)
        self._sink.write(file, offset, data)


def main(path: str, role: str, moment: str = "0") -> dict[str, Any]:
    """Do the part of one process."""
    job_file = JobFile(**json.loads(Path(path).read_text()))
    if role == "today":
        return _today(job_file)
    ctypes.CDLL(None).mallopt(_MOST_ARENAS, 1)  # threads do not keep what codecs and numpy have freed
    with opened(job_file) as (job, transform):
        digest, sink = transform.plan.digest, sink_of(job_file, job.file_map)
        if role == "begin":
            return {"uploads": _begin(job, sink)}
        sink = Deadly(sink, int(moment)) if int(moment) else sink
        base, cpu, clock = _memory("VmRSS"), time.process_time(), time.monotonic()
        own = log_of(job_file, role, digest)
        found: dict[str, Any] = {}
        if role == "commit":
            others = [
                log_of(job_file, str(at), digest) for at in range(job_file.workers) if job_file.workers > 1
            ]
            outcome = commit(job, sink, own, others)
            found = {"source": outcome.source, "target": outcome.target, "again": outcome.again}
            found |= {"swept": outcome.swept}
        else:
            grain = _GRAIN if not job_file.place.store.capabilities.parts else STEP
            work(job, slices(job.file_map, job_file.workers, grain)[int(role)], sink, own)
        return found | {
            "cpu": time.process_time() - cpu,
            "wall": time.monotonic() - clock,
            "base": base,
            "peak": _memory("VmHWM"),
            "log": own.nbytes,
            "taken": transform.taken[0],
            "runs": transform.taken[1],
            "dropped": getattr(sink, "again", 0),
        }


def _begin(job: Job, sink: Sink) -> dict[int, list[str]]:
    """The uploads of files that several slices share: all of known size that are sent in parts."""
    if not isinstance(sink, PartsSink):
        return {}
    files = enumerate(job.file_map.files)
    shared = [at for at, file in files if not isinstance(file.body, Pack) and file.weight > STEP]
    return {at: [upload.path, upload.key, upload.run] for at in shared for upload in (sink.begin(at),)}


def _today(job: JobFile) -> dict[str, Any]:
    """What the conversion of today finds and uses."""
    import wherry

    base, cpu, clock = _memory("VmRSS"), time.process_time(), time.monotonic()
    receipt = wherry.convert(
        job.source, job.target, to=job.to, options=job.options, lineage=False, **job.common
    )
    return {
        "source": receipt.source.weights_digest,
        "target": receipt.target.weights_digest,
        "cpu": time.process_time() - cpu,
        "wall": time.monotonic() - clock,
        "base": base,
        "peak": _memory("VmHWM"),
    }


def _memory(name: str) -> int:
    rows = Path("/proc/self/status").read_text().splitlines()
    return next(int(row.split()[1]) << 10 for row in rows if row.startswith(f"{name}:"))


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
