"""`infra/bench --scale`: runs all rows, after each of which it writes the results, and then the forecast.

Rows: the same checkpoint in one process; through 1, 2, 4 and 8 workers of each carrier; four times as large through 10
workers of which two are killed and one is paused; and with read-back on SeaweedFS.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.scale import report
from benchmarks.scale.fleet import Row, RowFailedError, run, run_on_disk

NOMINAL = 4_000_000_000
RATE = 16_000_000
CARRIERS = ("work", "dask")
WORKERS = (1, 2, 4, 8)
FAULTS = Row("work", 10, 4 * NOMINAL, RATE, 128, killed=2, paused=1)  # a fifth of the workers is killed


def rows(size: int, rate: int) -> Iterator[Row]:
    """The rows on the double.

    Args:
        size: bytes of the checkpoint of the curves.
        rate: bytes a second of a worker.
    """
    units = 64
    yield Row("convert", 1, size, 0, units)
    for carrier in CARRIERS:
        for workers in WORKERS:
            yield Row(carrier, workers, size, rate, units)
    faults = replace(FAULTS, size=4 * size, rate=rate)
    yield Row("convert", 1, faults.size, 0, faults.units)
    for carrier in CARRIERS:
        yield replace(faults, carrier=carrier)


def bench(
    scratch: Path,
    size: int,
    rate: int,
    results: Path,
    words: str = "",
    *,
    again: bool = False,
    docs: bool = False,
) -> int:
    """Run the rows and write the results; 1 if a row failed, or missed what is required.

    Args:
        scratch: folder for logs, and for SeaweedFS.
        size: bytes of the checkpoint of the curves.
        rate: bytes a second of a worker.
        results: folder for the results.
        words: only rows whose name contains them; the others are kept from the results that are there.
        again: run nothing, and make the report anew from the results that are there.
        docs: put the tables into docs and README.
    """
    file = results / f"{report.NAME}.json"
    if again:
        return report.write(results, json.loads(file.read_text()), docs=docs)
    found = _begin_results(scratch, size, rate)
    if words and file.exists():
        found = json.loads(file.read_text())
    for row in rows(size, rate):
        if words in report.name(row):
            _note(found, row, scratch, file)
    if words in "SeaweedFS":
        found["disk"] = _within(scratch, lambda folder: run_on_disk(size // 2, 4, folder))
    return report.write(results, found, docs=docs)


def _begin_results(scratch: Path, size: int, rate: int) -> dict[str, Any]:
    return {"machine": machine.describe(scratch), "size": size, "rate": rate, "rows": [], "failed": []}


def _note(found: dict[str, Any], row: Row, scratch: Path, file: Path) -> None:
    found["failed"] = [one for one in found["failed"] if one["row"] != report.name(row)]
    try:
        made = _within(scratch, lambda folder: run(row, folder))
    except RowFailedError as error:
        found["failed"].append({"row": report.name(row), "reason": str(error)[-500:]})
        print(f"· {report.name(row)}: FAILED: {error}", flush=True)
    else:
        others = [one for one in found["rows"] if Row(**one["row"]) != row]
        found["rows"] = sorted([*others, made.to_json()], key=_order)
        print(f"· {report.name(row)}: {made.seconds:.1f} s, {made.peak / 1e6:.0f} MB each", flush=True)
    file.write_text(json.dumps(found, indent=1) + "\n")


def _order(result: Mapping[str, Any]) -> tuple[str, int, int]:
    row = result["row"]
    return row["carrier"], row["killed"], row["workers"]


def _within(scratch: Path, act: Any) -> Any:
    folder = Path(tempfile.mkdtemp(prefix="row-", dir=scratch))
    try:
        return act(folder)
    finally:
        shutil.rmtree(folder)
