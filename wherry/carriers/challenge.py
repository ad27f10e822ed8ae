"""Challenge: what a worker has to show before it gets a unit: that it can make it, and sees the same storage.

The coordinator leaves a record with a secret beside the target. A worker opens the job, which it can only do with the
same wherry, key, plan and source, reads the secret there, and leaves it in a record of its own. So both see what the
other writes. The secret does not pass through the engine.
"""

from __future__ import annotations

import re
import secrets
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from wherry.errors import MismatchError
from wherry.units.make import this_worker
from wherry.units.worker_needs import require_able
from wherry.version import __version__

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping

    from wherry.units.split_job import SplitJob

_NAME = re.compile("[0-9a-f]{8}")


@dataclass(frozen=True, slots=True)
class Challenge:
    """What the coordinator of a job asks of its workers.

    Attributes:
        job: the job.
        token: id of the coordinator; names its records, and marks the claims of its workers.
        secret: what its record holds.
    """

    job: SplitJob
    token: str
    secret: str = field(repr=False)

    def problem(self, answer: Mapping[str, Any]) -> str:
        """Why a worker that gave this answer cannot make units; empty if it can.

        Raises:
            StorageError: the storage failed.
        """
        if answer.get("problem"):
            return str(answer["problem"])
        if answer.get("version") != __version__:
            return f"it has wherry {answer.get('version')}; this process has wherry {__version__}"
        if answer.get("plan") != self.job.job.plan.digest:
            return "it has another plan"
        name = str(answer.get("name"))
        row = self.job.records.read(_record(self.token, name)) if _NAME.fullmatch(name) else None
        if row is None or row.get("secret") != self.secret:
            return "what it writes beside the target is not seen here"
        return ""


@contextmanager
def challenge_of(job: SplitJob) -> Generator[Challenge]:
    """Challenge workers while the block runs; its records are removed at the end.

    Raises:
        StorageError: the storage failed.
    """
    challenge = Challenge(job, secrets.token_hex(4), secrets.token_hex(16))
    job.records.create(
        _record(challenge.token, ""), {"secret": challenge.secret, "run": challenge.token}, challenge.token
    )
    try:
        yield challenge
    finally:
        for name in job.records.names():
            if name.startswith(_record(challenge.token, "")):
                job.records.remove(name)


def answer_to(job: SplitJob, token: str) -> dict[str, Any]:
    """What a worker answers to a coordinator.

    Args:
        job: as this worker has opened it.
        token: id of the coordinator.

    Raises:
        MismatchError: this worker sees another storage.
        StorageError: it has too little memory, or the storage failed.
        MissingExtraError: a codec is not installed.
    """
    require_able(job)
    row = job.records.read(_record(token, ""))
    if row is None:
        raise MismatchError("it does not see the files that the coordinator wrote next to the target")
    name = secrets.token_hex(4)
    job.records.create(_record(token, name), {"secret": row["secret"], "run": name}, name)
    return {
        "version": __version__,
        "plan": job.job.plan.digest,
        "name": name,
        "worker": this_worker(),
    }


def _record(token: str, name: str) -> str:
    return f"challenge-{token}-{name}"
