"""Model: a conversion through workers in simulated time. A worker is a generator that yields the seconds it waits.

A unit takes the time of its bytes at the worker's rate, first those that are read before anything can be sent, and a
fixed time beyond. It is not done before the store has answered its requests, of which the store takes so many a second
from all workers. Before each unit come the requests of a claim: a listing, the looks at claims of others that
`wherry.workers.work` takes, and the claim; or, under Dask, a listing and the claim.

With read-back, workers then read units that others have made, with the requests for a receipt and the state of a file.
Units that only their makers could read are left to the commit, which also asks for all records and states.

Then the model is fitted to one worker, has to reproduce the other rows, and goes where no row was. What is fitted, for
each carrier, on its row of one worker: the seconds of a unit besides its bytes, and the seconds of a small request. The
window was measured on units of several sizes: a unit of B bytes took the time of B + min(B, window) at the rate, since
a worker sends when what it holds in memory has come. It is 62 MB with the default memory of 128 MiB, and 21 MB with
that of the rows.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import count
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from benchmarks.scale.fleet import EXPIRY
from benchmarks.scale.server import layer_bytes
from wherry.workers.work import LOOKED_AT, LOOKED_AT_LAST

if TYPE_CHECKING:
    from benchmarks.scale.fleet import RowResult

Steps = Generator[float]

_PAGE = 1000  # entries of a listing
_LOOK = 1.0  # seconds between two looks of a worker that finds no unit
_STRAGGLER = 3.0  # times the median
_COMMIT_REQUESTS = 4  # for each unit: receipt, proof, and the state of the file twice
_AT_ONCE = 16  # of them


@dataclass(frozen=True, slots=True)
class Setting:
    """What is simulated.

    Attributes:
        carrier: `work` or `dask`.
        workers, units: how many.
        unit_bytes: bytes of a unit, read and written.
        rate: bytes a second of a worker, each way.
        window: bytes that a worker reads before it sends the first.
        overhead: seconds of a unit besides its bytes.
        latency: seconds of one small request.
        request_bytes: bytes of a unit for each request that reads, or writes.
        reads, writes: requests a second that the store takes from all workers; 0 for no limit.
        strikes: fraction of the units done → a worker that is then lost or paused for good, as pairs.
        visible_losses: whether others see at once that a worker was killed: on one machine, and under Dask.
        expiry: seconds after which a claim expires that is not renewed.
        looked_at: claims of others that a worker looks at before it takes a free unit; -1 for all.
        read_back: whether the workers also read back what others have made, as units of their own, and the commit the
            rest.
        seed: of the choices.
    """

    carrier: str
    workers: int
    units: int
    unit_bytes: float
    rate: float
    window: float = 0.0
    overhead: float = 0.0
    latency: float = 0.0
    request_bytes: float = 8 << 20
    reads: float = 0.0
    writes: float = 0.0
    strikes: tuple[tuple[float, int, str], ...] = ()
    visible_losses: bool = True
    expiry: float = 60.0
    looked_at: int = LOOKED_AT
    read_back: bool = False
    seed: int = 0


@dataclass(slots=True)
class Simulated:
    """What came of it.

    Attributes:
        seconds: until every unit was done, and read back.
        busy, claiming, throttled: seconds of all workers in units, in requests of claims, and in waiting for the store,
            which takes so many requests a second.
        requests: of claims, by kind.
        moved: bytes of units that were begun, whether they were finished or not.
    """

    seconds: float = 0.0
    busy: float = 0.0
    claiming: float = 0.0
    throttled: float = 0.0
    requests: Counter[str] = field(default_factory=Counter[str])
    moved: float = 0.0


def simulate(setting: Setting) -> Simulated:
    """Run the model to its end.

    Raises:
        RuntimeError: units are left, since all workers are lost.
    """
    world = _World(setting)
    found = _phase(world).found
    if len(world.done) < setting.units:
        raise RuntimeError("all workers are lost")
    found.seconds = world.now
    if setting.read_back:
        world.begin_again()
        left = setting.units - len(_phase(world).done)
        requests = setting.units * _COMMIT_REQUESTS * setting.latency / _AT_ONCE
        found.seconds = world.now + left * setting.unit_bytes / setting.rate + requests
    return found


def _phase(world: _World) -> _World:
    """All workers take units until all are done, or nobody takes one."""
    setting, order, waiting = world.setting, count(), list[tuple[float, int, "Steps"]]()
    for worker in range(setting.workers):
        if worker not in world.struck:
            waiting.append((world.now, next(order), _worker(world, worker)))
    heapq.heapify(waiting)
    while waiting and len(world.done) < setting.units:
        world.now, _number, steps = heapq.heappop(waiting)
        wait = next(steps, None)
        if wait is not None:
            heapq.heappush(waiting, (world.now + wait, next(order), steps))
    return world


@dataclass(slots=True)
class _Claim:
    worker: int
    since: float


class _World:
    """The state that all workers share: the records, the store, and who is lost."""

    def __init__(self, setting: Setting) -> None:
        self.setting, self.now, self.found = setting, 0.0, Simulated()
        self.chance = random.Random(setting.seed)
        self.struck: dict[int, tuple[float, str]] = {}
        self._strikes = sorted(setting.strikes)
        self._free = {"read": 0.0, "write": 0.0}
        self.reading_back, self.records_before = False, 0
        self.makers: dict[int, int] = {}  # of units, while they are read back
        self.begin()

    def begin(self) -> None:
        """No unit is claimed or done."""
        self.claims: dict[int, list[_Claim]] = {}
        self.free, self.held = set(range(self.setting.units)), set[int]()
        self.done: set[int] = set()
        self.finishers: dict[int, int] = {}
        self.taken: list[float] = []
        self.watched: dict[tuple[int, int, int], float] = {}

    def begin_again(self) -> None:
        """The same units, to be read back."""
        self.reading_back, self._strikes = True, []
        self.records_before, self.makers = len(self.claims) + len(self.done), self.finishers
        self.begin()

    def free_for(self, worker: int) -> list[int]:
        """The units that nobody has claimed and that a worker can take: it does not read back its own."""
        return sorted(unit for unit in self.free if self.makers.get(unit) != worker)

    @property
    def pages(self) -> int:
        """Requests of a listing of all records."""
        return 1 + (self.records_before + len(self.claims) + len(self.done)) // _PAGE

    def claim(self, unit: int, worker: int) -> None:
        """A worker makes a unit."""
        self.claims.setdefault(unit, []).append(_Claim(worker, self.now))
        self.free.discard(unit)
        self.held.add(unit)

    def finish(self, unit: int, worker: int, seconds: float) -> None:
        """A unit is done; workers whose moment has come are struck."""
        self.done.add(unit)
        self.finishers[unit] = worker
        self.held.discard(unit)
        self.taken.append(seconds)
        while self._strikes and len(self.done) >= self._strikes[0][0] * self.setting.units:
            _at, worker, state = self._strikes.pop(0)
            self.struck[worker] = (self.now, state)

    def request(self, kind: str, number: int = 1) -> float:
        """Seconds that requests of one worker take, one after the other."""
        own, waited = number * self.setting.latency, self.queued(kind, number)
        self.found.requests[kind] += number
        self.found.claiming += own
        self.found.throttled += max(0.0, waited - own)
        return max(own, waited)

    def queued(self, kind: str, number: float) -> float:
        """Seconds until the store has taken so many requests, behind those of others."""
        limit = self.setting.reads if kind == "read" else self.setting.writes
        if not limit or number <= 0:
            return 0.0
        self._free[kind] = max(self._free[kind], self.now) + number / limit
        return self._free[kind] - self.now

    def has_ended(self, unit: int, watcher: int) -> bool:
        """Whether a worker sees that the last claim on a unit has expired."""
        claim, number = self.claims[unit][-1], len(self.claims[unit])
        struck = self.struck.get(claim.worker)
        if struck is None or struck[0] > self.now:
            return False
        if struck[1] == "killed" and self.setting.visible_losses:
            return True
        first = self.watched.setdefault((watcher, unit, number), self.now)
        return self.now - max(first, struck[0]) >= self.setting.expiry


def _worker(world: _World, worker: int) -> Steps:
    """One worker until nothing is left, or until it is struck."""
    choose = _choose_by_claims if world.setting.carrier == "work" else _choose_by_coordinator
    while True:
        unit = yield from choose(world, worker)
        if unit is None:
            if world.reading_back or world.setting.units == len(world.done):
                return  # nobody waits for what others read back
            yield _LOOK
            continue
        if world.reading_back:
            yield world.request("read", 3)  # who made it, its receipt, and the state of the file
        seconds = _unit_seconds(world)
        yield seconds
        struck = world.struck.get(worker)
        if struck is not None:
            lost = max(0.0, struck[0] - world.now + seconds)
            world.found.moved += world.setting.unit_bytes * min(1.0, lost / seconds)
            return
        world.found.moved += world.setting.unit_bytes
        world.found.busy += seconds
        if unit not in world.done:
            world.finish(unit, worker, seconds)


def _unit_seconds(world: _World) -> float:
    setting, back = world.setting, world.reading_back
    ahead = 0.0 if back else min(setting.window, setting.unit_bytes)
    own = (setting.unit_bytes + ahead) / setting.rate + setting.overhead
    number = setting.unit_bytes / setting.request_bytes
    waits = [world.queued("read", number), 0.0 if back else world.queued("write", number)]
    world.found.throttled += max(0.0, max(waits) - own)
    return max(own, *waits)


def _choose_by_claims(world: _World, worker: int) -> Generator[float, None, int | None]:
    """As `wherry work` does; None if every unit is claimed by another."""
    held, free = sorted(world.held), world.free_for(worker)
    yield world.request("read", world.pages)
    looked, others = _order(world, worker, held, free)
    if looked:
        yield world.request("read", 2 * len(looked))
    attempts = {unit: len(world.claims[unit]) for unit in looked}
    ended = [unit for unit in looked if unit not in world.done and world.has_ended(unit, worker)]
    for candidate in [*ended, *others]:
        yield world.request("write")
        if len(world.claims.get(candidate, ())) == attempts.get(candidate, 0):
            world.claim(candidate, worker)
            return candidate
        yield world.request("read")  # another was faster: is it our own claim, of which the answer was lost?
    return None


def _order(world: _World, worker: int, held: list[int], free: list[int]) -> tuple[list[int], list[int]]:
    """The claims at which a worker looks, and the order in which it tries free units."""
    setting = world.setting
    if setting.looked_at < 0:
        return held, free
    held.sort(key=lambda unit: blake2b(f"{worker}-{unit}".encode(), digest_size=8).digest())
    if not free:
        return held[:LOOKED_AT_LAST], []
    first = [] if held else free[:1]
    others = free[len(first) :]
    return held[: setting.looked_at], [*first, *world.chance.sample(others, len(others))]


def _choose_by_coordinator(world: _World, worker: int) -> Generator[float, None, int | None]:
    """As the coordinator of an engine does: lost units first, then free ones, then stragglers."""
    unit = _next_unit(world, worker)
    if unit is None:
        return None
    world.claim(unit, worker)
    yield world.request("read", world.pages)
    yield world.request("write")
    return unit


def _next_unit(world: _World, worker: int) -> int | None:
    open_units = sorted(world.held)
    for unit in open_units:
        struck = world.struck.get(world.claims[unit][-1].worker)
        if struck is not None and struck[1] == "killed":
            return unit
    free = next(iter(world.free_for(worker)), None)
    if free is not None or not world.taken or len(world.taken) < (len(world.taken) + len(open_units)) / 2:
        return free
    limit = _STRAGGLER * median(world.taken)
    slow = [unit for unit in open_units if len(world.claims[unit]) == 1 and world.makers.get(unit) != worker]
    return next((unit for unit in slow if world.now - world.claims[unit][0].since > limit), None)


WINDOW, ROW_WINDOW = 62_000_000, 21_000_000
MOST_ERROR = 0.1  # of the simulated time of a row
_CLAIM_REQUESTS = 3  # listing, claim and receipt: what lies between two units of one worker
GIB = 1 << 30
# A store and machines as docs of vendors and measurements of others have them (S3, one prefix; 5,500 GET and 3,500 PUT
# a second; a small request takes 30 ms).
CLOUD = Setting(
    "work", 16, 0, GIB, 400e6, window=WINDOW, overhead=0.2, latency=0.03, reads=5500, writes=3500,
    visible_losses=False, read_back=True,
)  # fmt: skip
FLEETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
BEND = 0.85  # of the time of one worker divided by the number of workers
GOAL_SECONDS = 720


def fit_setting(one: RowResult) -> Setting:
    """The setting of a carrier, from its row of one worker."""
    row = one.row
    nbytes = layer_bytes(row.size, row.units)
    own = (nbytes + min(nbytes, ROW_WINDOW)) / row.rate
    between = max(0.0, one.seconds - sum(one.unit_seconds)) / row.units
    return Setting(
        row.carrier, 1, row.units, nbytes, row.rate, window=ROW_WINDOW,
        overhead=max(0.0, fmean(one.unit_seconds) - own), latency=between / _CLAIM_REQUESTS, expiry=EXPIRY,
    )  # fmt: skip


def predict_row(base: Setting, result: RowResult) -> Simulated:
    """What the model says of a row."""
    row = result.row
    strikes = tuple((at, int(name.rpartition("-")[2]), state) for name, state, at in result.strikes)
    return simulate(
        replace(
            base, workers=row.workers, units=row.units, unit_bytes=layer_bytes(row.size, row.units),
            rate=row.rate, strikes=strikes,
        )
    )  # fmt: skip


def comparison(results: Iterable[RowResult]) -> list[dict[str, Any]]:
    """Measured and simulated seconds of every row of workers."""
    rows = [one for one in results if one.row.carrier != "convert"]
    bases = {one.row.carrier: fit_setting(one) for one in rows if one.row.workers == 1}
    found: list[dict[str, Any]] = []
    for one in rows:
        if one.row.carrier in bases:
            simulated = predict_row(bases[one.row.carrier], one).seconds
            error = simulated / one.seconds - 1
            found.append({
                "carrier": one.row.carrier, "workers": one.row.workers, "killed": one.row.killed,
                "measured": one.seconds, "simulated": round(simulated, 2), "error": round(error, 4),
            })  # fmt: skip
    return found


def curves(size: float) -> list[dict[str, Any]]:
    """A checkpoint through ever more workers, of both carriers, and of `wherry work` as it was; where each bends."""
    found: list[dict[str, Any]] = []
    for title, more in (
        ("work", {"carrier": "work"}),
        ("work, looking at all claims", {"carrier": "work", "looked_at": -1}),
        ("dask", {"carrier": "dask"}),
    ):
        base = replace(CLOUD, units=-(-int(size) // GIB), **more)
        points = [_point(base, workers) for workers in FLEETS]
        for point in points:
            point["efficiency"] = round(points[0]["seconds"] / point["seconds"] / point["workers"], 3)
        bend = next((point for point in points if point["efficiency"] < BEND), None)
        found.append({"title": title, "size": size, "points": points, "bend": bend and bend["workers"],
                      "why": bend and bend["why"]})  # fmt: skip
    return found


def _point(base: Setting, workers: int) -> dict[str, Any]:
    found = simulate(replace(base, workers=workers))
    return {"workers": workers, "seconds": round(found.seconds, 1), "why": _longest(found, base, workers),
            "claim_requests": sum(found.requests.values())}  # fmt: skip


def _longest(found: Simulated, base: Setting, workers: int) -> str:
    """What takes most of the time that workers lose."""
    lost = {
        "requests of claims": found.claiming,
        "the requests that the store takes a second": found.throttled,
        "the last units, at which few workers work": _idle(base, workers),
    }
    return max(lost, key=lambda name: lost[name])


def _idle(base: Setting, workers: int) -> float:
    """Worker seconds after the last unit of each worker, if units are alike."""
    rounds = -(-base.units // workers)
    one = (base.unit_bytes + base.window) / base.rate + base.unit_bytes / base.rate * base.read_back
    return (rounds * workers - base.units) * one


def goal(strikes: Sequence[float] = (0.2, 0.5, 0.8)) -> dict[str, Any]:
    """1 TB through 16 workers of which a fifth is killed, with read-back by the workers; and by the commit alone."""
    lost = tuple((at, number, "killed") for number, at in enumerate(strikes))
    base = replace(CLOUD, units=-(-(10**12) // GIB), strikes=lost)
    spread = {carrier: simulate(replace(base, carrier=carrier)) for carrier in ("work", "dask")}
    alone = simulate(replace(base, read_back=False)).seconds + base.units * GIB / base.rate
    return {
        "seconds": {carrier: round(one.seconds, 1) for carrier, one in spread.items()},
        "seconds_commit_alone": round(alone, 1),
        "moved": {carrier: round(one.moved / (2 * base.units * GIB), 4) for carrier, one in spread.items()},
        "required": GOAL_SECONDS,
    }
