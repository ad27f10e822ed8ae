"""clocks: the clock of this machine against that of what stores the ledger, and against the ledger itself.

The order of the statements is that of the hash chain; a time is what the clock of a writer claimed. A clock that is off
by more than a day is refused before it enters the ledger, where nothing could be taken back.
"""

from __future__ import annotations

import os
import tempfile
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import func, select

from wherry.core.receipt import utc_now
from wherry.errors import StorageError

if TYPE_CHECKING:
    from sqlalchemy import Connection

SKEW = timedelta(days=1)  # by which clocks may differ
CLOCK_CURE = "set the clock of this machine (`timedatectl` shows it), and run the command again"


def require_plausible(connection: Connection) -> None:
    """Require that the clock of this machine is that of the ledger's storage, give or take a day.

    Args:
        connection: a connection to the ledger.

    Raises:
        StorageError: the clocks differ.
    """
    stored = _storage_time(connection)
    if stored is None:
        return
    ahead = datetime.fromisoformat(utc_now()) - stored
    if abs(ahead) > SKEW:
        raise StorageError(
            f"the clock of this machine is {_words(ahead)} that of the ledger's storage",
            uri=connection.engine.url.render_as_string(),
            cure=CLOCK_CURE,
        )


def is_ahead(time: str, now: str) -> bool:
    """Whether a stored time is more than a day after another."""
    return datetime.fromisoformat(time) - datetime.fromisoformat(now) > SKEW


def _storage_time(connection: Connection) -> datetime | None:
    """The present time by the database server, or by the file system of a SQLite file; None if it cannot be asked."""
    if connection.dialect.name != "sqlite":
        return connection.scalar(select(func.now()))
    try:
        with tempfile.TemporaryFile(dir=Path(str(connection.engine.url.database)).parent) as probe:
            probe.write(b"\0")
            probe.flush()
            return datetime.fromtimestamp(os.fstat(probe.fileno()).st_mtime, UTC)
    except OSError:
        return None


def _words(ahead: timedelta) -> str:
    return f"{abs(ahead) / timedelta(days=1):.0f} d {'ahead of' if ahead > timedelta(0) else 'behind'}"
