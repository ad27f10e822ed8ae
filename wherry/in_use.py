"""in_use: which checkpoints are being read at this moment, so that nothing removes the input of a running job.

A conversion holds a mark of its own for its source while it runs: a lease in `WHERRY_HOME/in-use`, renewed by a
heartbeat, void half a minute after its process is gone (at once on the same machine). Several may read one source.
Marks are seen by whoever shares the home; where it cannot be written the conversion goes on without a mark.
"""

from __future__ import annotations

import logging
import secrets
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from wherry.digest import sha256_of
from wherry.errors import WherryError
from wherry.home import ensure_home, home
from wherry.lease import EXPIRY_SECONDS, Lease, holder_is_dead

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

_FOLDER = "in-use"
_SUFFIX = ".lease"
_log = logging.getLogger(__name__)


@contextmanager
def in_use(uri: str) -> Generator[None]:
    """Say that a checkpoint is being read while the context is open.

    Args:
        uri: the checkpoint itself, as its detection names it.
    """
    try:
        folder = ensure_home() / _FOLDER
        folder.mkdir(exist_ok=True)
        lease = Lease(folder / f"{_key(uri)}.{secrets.token_hex(4)}{_SUFFIX}", uri)
        lease.__enter__()
    except (WherryError, OSError) as error:
        _log.warning("nobody is told that %s is being read: %s", uri, error)
        yield
        return
    try:
        yield
    finally:
        lease.__exit__(None, None, None)


def is_in_use(uri: str) -> bool:
    """Whether a living job reads the checkpoint."""
    return any(_alive(mark) for mark in (home() / _FOLDER).glob(f"{_key(uri)}.*{_SUFFIX}"))


def _alive(mark: Path) -> bool:
    try:
        fresh = time.time() - mark.stat().st_mtime < EXPIRY_SECONDS
    except FileNotFoundError:
        return False  # released at this moment
    return fresh and not holder_is_dead(mark)


def _key(uri: str) -> str:
    return sha256_of("in-use", uri)[:16]
