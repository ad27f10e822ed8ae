"""The rows of buckets: `infra/bench --buckets` runs them on emulators and writes infra/bench-buckets.md.

Each row converts between a disk and a bucket, or between two folders of a bucket, and has a floor in the same round:
the fastest client of the store, which downloads, hashes, uploads and reads back the same bytes. Every process runs
alone.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks import machine
from benchmarks.bucket_servers import BUCKET, SERVERS
from benchmarks.inputs import make_huggingface
from benchmarks.measure import RowFailedError, measure

if TYPE_CHECKING:
    from benchmarks.bucket_servers import Emulator
    from benchmarks.measure import Cost

INFRA = Path(__file__).resolve().parent.parent
NAME = "bench-buckets"
MOST_RATIO, MOST_MB, MOST_BYTES = (
    1.3,
    250,
    1.02,
)  # what issue 16 requires; bytes are those of the source, each way
_HEAD = ("row", "GB", "wherry s", "floor s", "ratio", "required", "peak MB", "staged MB", "bytes sent",
         "bytes received", "processor s a GB", "floor's", "emulator s a GB", "its for the floor",
         "requests")  # fmt: skip
_PEER_HEAD = ("peer", "GB", "s", "peak MB", "processor s a GB", "emulator s a GB")
_SHARDS = (
    5  # of the huggingface target at every size: a target of one file has no commit member but that file
)
_UNREAD = ", verify store"
_MEANING = """\
wherry proves what it wrote: it hashes the source, sends it, reads the target back and hashes that. The floor does the
same with obstore, and on gs:// with gcsfs, since the emulator does not take obstore's parts; floor and wherry use the
same server and alternate. Seconds and processor seconds begin after the imports, those of s3fs and gcsfs too.
*Bytes* are what a process sent or received, as a multiple of the source's size: a row that reads from a bucket and
reads its target back receives 2×.
*Staged* are bytes in the folder for temporary files. *Emulator* is the processor time of the server, which has the
same cores. A single file (safetensors) is its own commit member: the store copies it from its staging name to its
final one, with no byte over the network, but the emulator writes all of it once more, which no floor asks for. Rows
with *verify store* prove the target by the checksums that the store computes: nothing is read back, by the floor
neither, and nothing is copied. A number that misses what is required is bold."""


@dataclass(frozen=True, slots=True)
class Row:
    """One conversion.

    Attributes:
        scheme: whose emulator is used.
        source: `local`, or `bucket`.
        target: the same.
        to: the target format.
        verify: how the target is proved.
    """

    scheme: str
    source: str
    target: str
    to: str
    verify: str = "digest"

    @property
    def name(self) -> str:
        """As it is printed."""
        ends = [self.scheme if end == "bucket" else "local" for end in (self.source, self.target)]
        return f"{' → '.join(ends)}, {self.to}" + _UNREAD * (self.verify == "store")


@dataclass(frozen=True, slots=True)
class Peer:
    """One peer: a work of `bucket_work` from a folder to another."""

    scheme: str
    name: str
    work: str
    source: str
    target: str


TARGETS = ("huggingface", "safetensors", "dcp", "orbax")  # shards, one file, files of ranks, a database
_ENDS = (
    ("s3", "local", "bucket"),
    ("s3", "bucket", "local"),
    ("s3", "bucket", "bucket"),
    ("gs", "bucket", "bucket"),
)
ROWS = [Row(*ends, to) for ends in _ENDS for to in TARGETS] + [
    Row("s3", source, "bucket", "safetensors", "store") for source in ("local", "bucket")
]
PEERS = [
    Peer("s3", "s3fs put", "copy", "local", "bucket"),
    Peer("s3", "s3fs get", "copy", "bucket", "local"),
    Peer("s3", "torch.save through s3fs", "torch-save", "local", "bucket"),
    Peer("s3", "tensorstore's s3 driver", "tensorstore", "local", "bucket"),
    Peer("gs", "gcsfs get + put", "copy", "bucket", "bucket"),
    Peer("gs", "torch.save through gcsfs", "torch-save", "local", "bucket"),
    Peer("gs", "tensorstore's gcs driver", "tensorstore", "local", "bucket"),
]


@dataclass(frozen=True, slots=True)
class Measured:
    """One process.

    Attributes:
        cost: what it cost.
        staged: the most bytes that it had in its folder for temporary files.
        emulator: processor seconds of the server meanwhile.
    """

    cost: Cost
    staged: int
    emulator: float

    @property
    def counted(self) -> dict[str, float]:
        """What the process counted itself."""
        value: Any = self.cost.value
        return value


@dataclass(slots=True)
class Bench:
    """One run of the rows of one store.

    Attributes:
        scheme: of the store.
        scratch: folder for everything on the disk.
        emulator: the server that the processes use.
        size: bytes of the checkpoint.
    """

    scheme: str
    scratch: Path
    emulator: Emulator
    size: int
    _count: int = 0

    @property
    def local(self) -> Path:
        """The checkpoint on the disk."""
        return self.scratch / f"model-{self.scheme}"

    def prepare(self) -> None:
        """Bring the checkpoint into the bucket."""
        work = "copy" if self.scheme == "gs" else "client-unread"
        self._run(work, str(self.local), f"{self.scheme}://{BUCKET}/model")

    def row(self, row: Row) -> Measured:
        """Run a conversion."""
        return self._between("wherry", row.source, row.target, row.to, row.verify, *self._options(row.to))

    def _options(self, to: str) -> list[str]:
        return [f"max_shard_size={-(-self.size // _SHARDS)}"] if to == "huggingface" else []

    def floor(self, row: Row) -> Measured:
        """Run the fastest client between the same ends."""
        if self.scheme == "gs":  # the emulator does not take the parts of obstore's XML interface
            return self._between("copy-proved", row.source, row.target)
        work = "client-unread" if row.verify == "store" else "client"
        return self._between(work, row.source, row.target)

    def peer(self, peer: Peer) -> Measured:
        """Run a peer."""
        return self._between(peer.work, peer.source, peer.target)

    def _between(self, work: str, source: str, target: str, *more: str) -> Measured:
        self._count += 1
        begin = str(self.local) if source == "local" else f"{self.scheme}://{BUCKET}/model"
        folder = f"out-{self._count}"
        end = str(self.scratch / folder) if target == "local" else f"{self.scheme}://{BUCKET}/{folder}"
        try:
            return self._run(work, begin, end, *more)
        finally:
            for made in self.scratch.glob(f"{folder}*"):  # a file has its sidecar next to it
                shutil.rmtree(made) if made.is_dir() else made.unlink()
            if target == "bucket":
                self._run("remove", end, end)

    def _run(self, *words: str) -> Measured:
        temporary = self.scratch / "temporary"
        temporary.mkdir()
        variables = {
            "TMPDIR": str(temporary),
            "WHERRY_HOME": str(self.scratch / "home"),
            "JAX_PLATFORMS": "cpu",
        }
        try:
            with _watch_folder(temporary) as most:
                command = [sys.executable, "-m", "benchmarks.bucket_work", *words]
                before = self.emulator.processor
                cost = measure(command, {**os.environ, **self.emulator.environment, **variables}, INFRA)
            return Measured(cost, max(most), self.emulator.processor - before)
        finally:
            shutil.rmtree(temporary)


@dataclass(slots=True)
class Results:
    """What was measured so far.

    Attributes:
        folder: where the table is written.
        described: the machine.
        rounds: number of runs of each row.
        sizes: scheme → bytes of the checkpoint.
        rows: name of a row → the floor and wherry, each round.
        peers: name of a peer → each round.
    """

    folder: Path
    described: Mapping[str, Any]
    rounds: int
    sizes: dict[str, int] = field(default_factory=dict[str, int])
    rows: dict[str, list[tuple[Measured, Measured]]] = field(default_factory=dict[str, "list[Any]"])
    peers: dict[str, list[Measured]] = field(default_factory=dict[str, "list[Any]"])

    def write(self) -> str:
        """Replace the table: a run that is stopped leaves the rows that it has measured."""
        text = _text(self)
        (self.folder / f"{NAME}.md").write_text(text)
        (self.folder / f"{NAME}.json").write_text(json.dumps(_values(self), indent=1) + "\n")
        return text


def bench(scratch: Path, sizes: Mapping[str, int], rounds: int, rows: str, results: Path) -> int:
    """Run all rows, and write the table after each of them; 1 if a row misses what is required or failed.

    Args:
        scratch: folder for everything on the disk.
        sizes: scheme → bytes of the checkpoint, about.
        rounds: number of runs of each row.
        rows: part of the names of the rows that are run.
        results: folder for the table.
    """
    found = Results(results, machine.describe(scratch), rounds)
    for scheme, server in SERVERS.items():
        wanted = [row for row in ROWS if row.scheme == scheme and rows in row.name]
        others = [peer for peer in PEERS if peer.scheme == scheme and rows in peer.name]
        if not wanted + others:
            continue
        model = scratch / f"model-{scheme}"
        make_huggingface(model, sizes[scheme])
        found.sizes[scheme] = sum(file.stat().st_size for file in model.iterdir())
        for each in wanted + others:
            with server(
                scratch
            ) as emulator:  # each row has its own: one keeps what was removed, in memory or on a disk
                one = Bench(scheme, scratch, emulator, found.sizes[scheme])
                if each.source == "bucket":
                    one.prepare()
                for _round in range(rounds):
                    _run_round(one, each, found)
    text = found.write()
    print("\n" + text)
    missing = any(len(found.rows.get(row.name, ())) < rounds for row in ROWS if rows in row.name)
    return int("**" in text or missing)


def _run_round(one: Bench, each: Row | Peer, found: Results) -> None:
    if isinstance(each, Row):
        _note(found.rows, each.name, lambda: (one.floor(each), one.row(each)))
    else:
        _note(found.peers, each.name, lambda: one.peer(each))
    found.write()


def _note(found: dict[str, list[Any]], name: str, act: Any) -> None:
    try:
        made = act()
    except RowFailedError as error:
        print(f"· {name}: FAILED: {error.reason}", flush=True)
        return
    found.setdefault(name, []).append(made)
    costs = [one.cost for one in made] if isinstance(made, tuple) else [made.cost]
    words = ", ".join(f"{cost.work:.2f} s (peak {cost.peak / 1e6:.0f} MB)" for cost in costs)
    print(f"· {name}: {words}", flush=True)


def _values(found: Results) -> dict[str, Any]:
    """The last round of everything, as JSON."""

    def values(one: Measured) -> dict[str, Any]:
        stated = {
            "seconds": one.cost.work, "peak": one.cost.peak, "staged": one.staged, "emulator": one.emulator,
        }  # fmt: skip
        return stated | one.counted

    rows = {
        name: {"floor": values(pairs[-1][0]), "wherry": values(pairs[-1][1])}
        for name, pairs in found.rows.items()
    }
    peers = {name: values(costs[-1]) for name, costs in found.peers.items()}
    about = {"machine": found.described, "rounds": found.rounds, "bytes": found.sizes}
    return {**about, "rows": rows, "peers": peers}


def _text(found: Results) -> str:
    sizes = found.sizes
    schemes = {one.name: one.scheme for one in (*ROWS, *PEERS)}
    rows = [_cells(name, sizes[schemes[name]], pairs) for name, pairs in found.rows.items()]
    others = [_peer_cells(name, sizes[schemes[name]], costs) for name, costs in found.peers.items()]
    described, load = found.described, f"load before the run {found.described['load_before']}"
    words = f"{described['date']} · {described['cores']} cores ({described['processor']}) · "
    return "\n\n".join([
        f"{words}rounds: {found.rounds} · s3: SeaweedFS, gs: fake-gcs-server · {load}",
        _MEANING, _table(_HEAD, rows), _table(_PEER_HEAD, others), ""
    ])  # fmt: skip


def _cells(name: str, size: int, pairs: Sequence[tuple[Measured, Measured]]) -> list[str]:
    floor, ours = (median(pair[at].cost.work for pair in pairs) for at in (0, 1))
    base, last = pairs[-1]
    seen, gigabytes = last.counted, size / 1e9
    peak = max(pair[1].cost.peak for pair in pairs) / 1e6
    staged = max(pair[1].staged for pair in pairs) / 1e6
    return [
        name,
        f"{gigabytes:.2f}",
        f"{ours:.2f}",
        f"{floor:.2f}",
        _judge(f"{ours / floor:.2f}×", ours / floor <= MOST_RATIO),
        f"≤ {MOST_RATIO}×",
        _judge(f"{peak:.0f}", peak <= MOST_MB),
        f"{staged:.0f}",
        *(
            _judge(f"{seen[way] / size:.3f}×", seen[way] <= max(MOST_BYTES * times, MOST_BYTES - 1) * size)
            for way, times in (("sent", 1), ("received", _reads(name)))
        ),
        *(f"{one.counted['processor'] / gigabytes:.2f}" for one in (last, base)),
        *(f"{one.emulator / gigabytes:.2f}" for one in (last, base)),
        str(seen["requests"]),
    ]


def _reads(name: str) -> int:
    """How often the bytes of a row come out of a bucket: from the source, and when the target is read back."""
    ends = name.partition(",")[0].split(" → ")
    return sum(end != "local" for end in ends[: 1 if name.endswith(_UNREAD) else 2])


def _peer_cells(name: str, size: int, costs: Sequence[Measured]) -> list[str]:
    return [
        name, f"{size / 1e9:.2f}", f"{median(one.cost.work for one in costs):.2f}",
        f"{max(one.cost.peak for one in costs) / 1e6:.0f}",
        f"{costs[-1].counted['processor'] / size * 1e9:.2f}", f"{costs[-1].emulator / size * 1e9:.2f}",
    ]  # fmt: skip


def _judge(text: str, reached: bool) -> str:
    return text if reached else f"**{text}**"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *rows))


@contextmanager
def _watch_folder(folder: Path) -> Iterator[list[int]]:
    """The bytes in a folder, looked at ten times a second."""
    seen, over = [0], threading.Event()

    def look() -> None:
        while not over.wait(0.1):
            seen.append(sum(_size(file) for file in folder.rglob("*")))

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()


def _size(file: Path) -> int:
    try:
        return file.stat().st_size if file.is_file() else 0
    except FileNotFoundError:
        return 0  # it was removed meanwhile
