"""Forecast: the model is fitted to one worker, has to reproduce the other rows, and then goes where no row was.

What is fitted, for each carrier, on its row of one worker: the seconds of a unit besides its bytes, and the seconds of
a small request. The window was measured on units of several sizes: a unit of B bytes took the time of
B + min(B, window) at the rate, since a worker sends when what it holds in memory has come. It is 62 MB with the default
memory of 128 MiB, and 21 MB with that of the rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

from benchmarks.scale.content import layer_bytes
from benchmarks.scale.model import Setting, Simulated, simulate
from benchmarks.scale.place import EXPIRY

if TYPE_CHECKING:
    from benchmarks.scale.rows import RowResult

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
