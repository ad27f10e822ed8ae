"""processes: carries units by processes of this machine, each of which is a `wherry work`."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

from wherry.config.file import CONFIG_ENV, config_file
from wherry.core.progress import UnitCounts
from wherry.core.units import plural
from wherry.errors import StorageError
from wherry.records.claims import claims_among
from wherry.records.unit_proof import proofs_in
from wherry.records.unit_receipt import receipts_by_unit
from wherry.runtime import child
from wherry.staging.key import key_for_workers
from wherry.text.json_values import json_value

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from wherry.carriers.worker_pool import Workplace
    from wherry.runtime.child import Child
    from wherry.units.split_job import SplitJob

LOOK_SECONDS = 0.5
_GRACE = 10.0  # seconds in which a worker that is stopped removes what it has begun


def carry_with_processes(
    made: SplitJob, where: Workplace, counts: UnitCounts | None = None
) -> Generator[str]:
    """Have the units of a job made by worker processes of this machine; see Carry."""
    seen, counts = set[str](), counts or UnitCounts()

    def fresh() -> list[str]:
        records = made.records.names()
        counts.failed = sum(attempt > 0 for _unit, attempt in claims_among(records))
        counts.workers = sum(not one.has_ended() for one in workers)
        names = [*receipts_by_unit(records).values(), *proofs_in(records).values()]
        found = [name for name in sorted(names[0] for names in names) if name not in seen]
        seen.update(found)
        return found

    with ExitStack() as stack:
        workers = [_start(stack, made) for _ in range(where.workers)]
        stack.callback(stop, workers, _GRACE)
        while not all(one.has_ended() for one in workers):
            time.sleep(LOOK_SECONDS)
            yield from fresh()
        yield from fresh()
        errors = [text for one in workers if (text := _error(one))]
    require_made(made, errors)


def variables() -> dict[str, str]:
    """The environment of a worker of this machine: that of this process, its configuration and its key."""
    file = config_file()
    return {**child.own_variables(), **key_for_workers(), **({CONFIG_ENV: str(file)} if file else {})}


def _start(stack: ExitStack, made: SplitJob) -> Child:
    words = ["work", made.uri, "--json"]
    return stack.enter_context(
        child.child_process("wherry.cli", words, purpose="wherry work", variables=variables())
    )


def stop(workers: Sequence[Child], grace: float) -> None:
    """Ask processes to end, and kill those that have not after some seconds."""
    for one in workers:
        one.ask_to_end()
    deadline = time.monotonic() + grace
    for one in workers:
        one.result(max(0.0, deadline - time.monotonic()))


def require_made(made: SplitJob, errors: Sequence[str]) -> None:
    """Refuse to go on if units are left after all workers have ended.

    Args:
        made: the job.
        errors: of workers that have failed.

    Raises:
        StorageError: units are left.
    """
    left = len(made.units) - len(receipts_by_unit(made.records.names()))
    if left:
        raise StorageError(
            f"{left} of {plural(len(made.units), 'unit')} are not written; {plural(len(errors), 'worker')} failed"
            f"{': ' if errors else ''}{'; '.join(dict.fromkeys(errors))}",
            uri=made.uri,
            cure="run the same command again; it resumes with the units that are left",
            retryable=True,
        )


def _error(worker: Child) -> str:
    """What a worker has said about its failure; empty if it did not fail."""
    done_ = worker.result()
    if not done_.code:
        return ""
    try:
        return json_value(done_.output)["what"]
    except (ValueError, KeyError, TypeError):
        return f"process {worker.pid} ended with exit code {done_.code}"
