"""clocks: the clock of this machine against that of what stores the ledger, and against the ledger itself.

The order of the statements is that of the hash chain; a time is what a clock claimed. A statement has two of them, in
fields of their own: that of the machine which wrote it, and that of the storage. A clock that is off by more than a day
is refused before it enters the ledger, where nothing could be taken back.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from wherry.core.receipt import utc_now
from wherry.errors import StorageError, storage_error
from wherry.ledger.connection import SQLITE

if TYPE_CHECKING:
    from wherry.ledger.connection import LedgerConnection

SKEW = timedelta(days=1)  # by which clocks may differ
CLOCK_CURE = "set the clock of this machine (`timedatectl` shows it), and run the command again"


@dataclass(frozen=True, slots=True)
class ClockReadings:
    """What two clocks said at one moment; UTC.

    Attributes:
        machine: the clock of this machine.
        storage: the clock of what stores the ledger.
    """

    machine: str
    storage: str


def plausible_clocks(connection: LedgerConnection) -> ClockReadings:
    """The clocks of this machine and of the ledger's storage, which agree, give or take a day.

    Args:
        connection: a connection to the ledger.

    Raises:
        StorageError: the clocks differ, or that of the storage cannot be read.
    """
    read = ClockReadings(utc_now(), _storage_time(connection))
    ahead = datetime.fromisoformat(read.machine) - datetime.fromisoformat(read.storage)
    if abs(ahead) > SKEW:
        days, side = abs(ahead) / timedelta(days=1), "ahead of" if ahead > timedelta(0) else "behind"
        raise StorageError(
            f"the clock of this machine is {days:.0f} d {side} that of the ledger's storage",
            uri=connection.uri,
            cure=CLOCK_CURE,
        )
    return read


def is_ahead(time: str, now: str) -> bool:
    """Whether a stored time is more than a day after another."""
    return datetime.fromisoformat(time) - datetime.fromisoformat(now) > SKEW


def _storage_time(connection: LedgerConnection) -> str:
    """The present time by the database server, or by the file system of a SQLite file."""
    if connection.dialect != SQLITE:
        # Not now(), which is the start of the transaction: it may have waited for the ledger's lock since.
        return _text(connection.value("SELECT clock_timestamp()"))
    folder = Path(connection.uri).parent  # in which SQLite makes its own files, too
    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"\0")
            probe.flush()
            return _text(datetime.fromtimestamp(os.fstat(probe.fileno()).st_mtime, UTC))
    except OSError as error:
        raise storage_error(error, str(folder)) from error


def _text(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat(timespec="milliseconds")
