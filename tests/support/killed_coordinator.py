"""A program: what coordinates a job, killed at a call of a function that tells others of it, or that changes a file.

`python -m tests.support.killed_coordinator VERB SOURCE TARGET PLACE NUMBER` does one of

    split        cuts the job of `job_of`
    commit       commits it
    pool         splits it, has its units made by workers of this process, and commits
    processes:N, dask:N     the same by an engine

    convert      the same by two processes, in a run of the flow `convert-checkpoint`
    work         writes the units of a job and commits it, in a run of the flow `work`

With NUMBER 0 it lives, and prints how often each place was called. The signal is
WHERRY_TEST_SIGNAL, SIGKILL by default.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections import Counter
from functools import wraps

from tests.support.worker_pools import ImaginaryPool, job_of, request_of
from wherry.core.progress import Meter, UnitCounts
from wherry.target import staging as stagings
from wherry.workers import convert_on, coordinator, engines, tasks
from wherry.workers import job as job_module
from wherry.workers.commit import commit
from wherry.workers.coordinator import Coordinator
from wherry.workers.records import Records
from wherry.workers.work import carry_with_pool

SHARD, UNIT = "200KB", 210_000  # of 6 units
FILES = ("mkdir", "rename", "link", "unlink", "rmdir", "fsync")
calls = Counter()


def deadly(function, place_of, fatal):
    """The function, which kills its process before a call."""

    @wraps(function)
    def call(*arguments, **options):
        place = place_of(*arguments)
        calls[place] += 1
        if place and (place, calls[place]) == fatal:
            os.kill(os.getpid(), signal.Signals[os.environ.get("WHERRY_TEST_SIGNAL", "SIGKILL")])
        return function(*arguments, **options)

    return call


def watch(fatal):
    """Count the calls of every place; the process is killed at one."""

    def at(owner, name, place_of):
        setattr(owner, name, deadly(getattr(owner, name), place_of, fatal))

    for name in ("create", "replace", "remove"):
        at(Records, name, lambda _records, row, *_more, name=name: f"{name} {row.partition('-')[0]}")
    at(Records, "begin", lambda *_: "begin")
    at(Records, "end", lambda *_: "end")
    at(Coordinator, "_start", lambda _self, _post, title, *_: f"out {title.partition('-')[0]}")
    at(tasks, "move", lambda *_: "move")
    at(Meter, "add", lambda meter, *_: "receipt in" if meter._units and meter._stage == "convert" else "")
    at(engines, "_start", lambda *_: "worker started")
    at(stagings, "rename_without_replacing", lambda *_: "commit")
    for name in FILES:
        at(os, name, lambda *_, name=name: f"os.{name}")


def carried(source, target):
    """As `convert_on` does it, by workers of this process."""
    made = job_module.split(request_of(source, target, SHARD), UNIT)
    meter = Meter("convert", 1, None, UnitCounts())
    for name in carry_with_pool(made, ImaginaryPool("ab")):
        meter.add(0, name)
    commit(made.uri)


def spec_of(verb, source, target):
    """The parameters of a flow; its units are those of `job_of`."""
    from wherry.flows.convert import ConvertSpec
    from wherry.flows.work import WorkSpec

    if verb == "work":
        return WorkSpec(job=target)
    options = {"max_shard_size": SHARD}
    return ConvertSpec(
        source=source, target=target, to="hf", options=options, on="processes:2", unit=str(UNIT)
    )


def run_flow(verb, source, target):
    from wherry.flows.convert import convert_checkpoint
    from wherry.flows.work import work_on_units

    flow = work_on_units if verb == "work" else convert_checkpoint
    flow(spec_of(verb, source, target))


def main(verb, source, target, place, number) -> None:
    coordinator.LOOK_SECONDS = engines.LOOK_SECONDS = coordinator.AGAIN_SECONDS = 0.05
    watch((place, int(number)))
    if verb == "split":
        job_of(source, target, SHARD, UNIT)
    elif verb == "commit":
        commit(target)
    elif verb in ("convert", "work"):
        run_flow(verb, source, target)
    elif verb == "pool":
        carried(source, target)
    else:
        convert_on(request_of(source, target, SHARD), verb, unit_bytes=UNIT)
    del calls[""]
    print(json.dumps(calls))


if __name__ == "__main__":
    main(*sys.argv[1:])
