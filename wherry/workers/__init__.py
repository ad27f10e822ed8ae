"""workers: one conversion, or one read of a checkpoint, by several processes on one machine or on many.

- Unit: files of the target, or a region of one, with the moves that fill them (`unit`).
- Job: a conversion that is cut into units; its plan is the queue, and the store of the target is the memory (`job`).
- Records: small signed files in the folder of the job, by which its processes agree; claims are some of them
  (`records`).
- Task: what a worker does at a time: it makes a unit, or reads back what another has made (`tasks`). A
  worker takes tasks by itself, or a `coordinator` gives them to the workers of an engine (`work`); engines have names
  (`engines`), and their adapters lie in `wherry.integrations.engines`.
- Commit: takes what records name and confirm, and finishes the target (`commit`).
- Read unit: a part of a checkpoint that a worker reads and hashes, for a verification (`hash_on`).

Whatever dies leaves a job that the same command, another engine or `wherry work` takes up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from wherry.core.units import DEFAULT_UNIT, parse_size

if TYPE_CHECKING:
    from wherry.core.progress import OnProgress
    from wherry.core.receipt import GroupReceipt
    from wherry.core.request import ConvertRequest

THREADS = "threads"  # the name for this process, which needs no workers


def convert_on(
    request: ConvertRequest,
    on: str,
    *,
    unit_bytes: int = parse_size(DEFAULT_UNIT),
    progress: OnProgress | None = None,
) -> GroupReceipt:
    """Convert a checkpoint in this process, or to one target with an engine, whose code is read only then.

    Args:
        request: with one target, unless the engine is `threads`.
        on: the engine; `wherry.workers.engines` lists them.
        unit_bytes: size of a unit.
        progress: called a few times a second; while units are made, and read back, for each of them with its name.

    Raises:
        UsageError: there is no such engine, or there are several targets.
        StorageError: units are left; the same call goes on with them.
        WherryError: what `convert_all`, `split` and `commit` raise.
    """
    if on == THREADS:
        from wherry.converter.convert import convert_all

        return convert_all(request, progress=progress)
    from wherry.workers.engines import convert_units

    return convert_units(request, on, unit_bytes, progress)
