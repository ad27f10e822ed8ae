"""Carrier: by which name it is chosen, and what it does.

threads              this process, without a job: the default
processes[:N]        N processes of this machine, which take units by claims
dask[:N]             a Dask cluster of N workers on this machine, which is started, and ended with the conversion
dask://HOST:PORT     the scheduler of a Dask cluster
ray[:N]              a Ray cluster of N workers on this machine, likewise
ray://HOST:PORT      the client port of a Ray cluster
"""

from __future__ import annotations

import os
import re
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from wherry.carriers.coordinator import carry_with_pool
from wherry.carriers.processes import carry_with_processes
from wherry.carriers.worker_pool import Workplace
from wherry.core.services import service
from wherry.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping

    from wherry.core.progress import UnitCounts
    from wherry.units.split_job import SplitJob

    # Has every unit of a job made, and read back by others than its makers as far as these are there; gives the name of
    # the record of each receipt and proof when it is there, and counts workers and failed attempts.
    # Raises StorageError if units are left, and UsageError or MissingExtraError at once.
    Carry = Callable[[SplitJob, Workplace, UnitCounts], Generator[str]]

PROCESSES = "processes"
CHOICES = "threads, processes:N, dask:N, dask://HOST:PORT, ray:N, ray://HOST:PORT"


class UnitCarrier(NamedTuple):
    """One way to have units made.

    Attributes:
        carry: has them made.
        remote: whether it can have an address.
    """

    carry: Carry
    remote: bool = False


def _on_engine(name: str, made: SplitJob, where: Workplace, counts: UnitCounts) -> Generator[str]:
    with service(name).pool(where) as workers:
        yield from carry_with_pool(made, workers, counts)


CARRIERS: Mapping[str, UnitCarrier] = {
    PROCESSES: UnitCarrier(carry_with_processes),
    **{name: UnitCarrier(partial(_on_engine, name), remote=True) for name in ("dask", "ray")},
}


def carrier_of(on: str) -> tuple[UnitCarrier, Workplace]:
    """The carrier of a name, and where its workers are.

    Raises:
        UsageError: there is no such carrier, or what follows its name is invalid.
        MissingExtraError: its engine is not installed.
    """
    name, _, rest = on.partition(":")
    carrier = CARRIERS.get(name)
    if carrier is None:
        raise UsageError(f"unknown engine {name!r}", cure=f"choose one of: {CHOICES}")
    if carrier.remote:
        service(name)
    address = rest.removeprefix("//")
    if address == rest:
        return carrier, Workplace(workers=_count(name, rest))
    if not carrier.remote or not address:
        raise UsageError(f"invalid engine {on!r}", cure=f"choose one of: {CHOICES}")
    return carrier, Workplace(address)


def _count(name: str, text: str) -> int:
    """A number of workers; as many as there are cores by default."""
    if not text:
        return os.cpu_count() or 1
    if not re.fullmatch(r"[1-9][0-9]{0,5}", text):
        raise UsageError(f"invalid number of workers: {text!r}", cure=f"write for example {name}:4")
    return int(text)
