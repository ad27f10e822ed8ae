"""The key that signs journals, so that a run resumes only conversions of the same user.

It is the text of `WHERRY_KEY`, which several machines can share; otherwise a random key that is created once in
`WHERRY_HOME`, readable by its user alone. If neither is available, a process has a key of its own, which the workers
that it starts get: it works, but what it leaves cannot be resumed after an interruption.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shlex
import stat
from contextlib import suppress
from functools import cache
from pathlib import Path

from wherry.core.progress import logger
from wherry.errors import StorageError, UsageError
from wherry.storage.folders import rename_without_replacing
from wherry.storage.home import ensure_home, home

KEY_ENV = "WHERRY_KEY"
_NAME = "journal.key"
_SHORTEST = 16  # characters of WHERRY_KEY
_MOST = 1024
_log = logger(__name__)


def journal_key() -> bytes:
    """The key, 32 bytes.

    Raises:
        UsageError: `WHERRY_KEY` is too short to be a secret.
    """
    given = os.environ.get(KEY_ENV)
    if given is None:
        text = _stored_key() or _own_key()
    elif len(given) >= _SHORTEST:
        text = os.fsencode(given)  # the variable may hold any bytes
    else:
        raise UsageError(
            f"{KEY_ENV} is shorter than {_SHORTEST} characters",
            cure=f"export {KEY_ENV}=$(openssl rand -hex 32)",
        )
    return hashlib.sha256(b"wherry-journal-key" + text).digest()


def key_for_workers() -> dict[str, str]:
    """The variable that another process on this machine, of the same user, needs to have the key of this one."""
    return {} if KEY_ENV in os.environ or _stored_key() else {KEY_ENV: _own_key().decode()}


def require_shared_key() -> None:
    """Refuse a job for processes that this one does not start, where they could not have its key.

    Raises:
        UsageError: the home has no key that can be used, and `WHERRY_KEY` is not set.
    """
    if key_for_workers():
        raise UsageError(
            f"the processes of a job need one key, and WHERRY_HOME ({home()}) has none that can be used",
            cure=f"export {KEY_ENV}=$(openssl rand -hex 32)",
        )


def _stored_key() -> bytes | None:
    """The random key in the home; None if the home cannot store it."""
    try:
        path = ensure_home() / _NAME
        return _read(path) or _create_key(path)
    except OSError as error:
        if not _own_key.cache_info().currsize:  # once
            _log.warning(
                "the journal cannot be signed, so this run cannot be resumed if it is interrupted: %s", error
            )
        return None


@cache
def _own_key() -> bytes:
    return secrets.token_hex(32).encode()


def _read(path: Path) -> bytes | None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        found = os.fstat(descriptor)
        private = found.st_uid == os.geteuid() and not found.st_mode & 0o077
        if not stat.S_ISREG(found.st_mode) or not private:
            raise StorageError(
                "the journal key must be a regular file that only its owner can access",
                uri=str(path),
                cure=f"rm {shlex.quote(str(path))}",
            )
        text = os.read(descriptor, _MOST)
    finally:
        os.close(descriptor)
    if len(text) < _SHORTEST:
        raise StorageError(
            f"the journal key is shorter than {_SHORTEST} characters",
            uri=str(path),
            cure=f"rm {shlex.quote(str(path))}",
        )
    return text


def _create_key(path: Path) -> bytes:
    """Create the key; if several runs create it at the same time, the first one wins."""
    draft = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.write(descriptor, secrets.token_hex(32).encode())
        os.fsync(descriptor)
        with suppress(FileExistsError):
            rename_without_replacing(draft, path)
    finally:
        os.close(descriptor)
        draft.unlink(missing_ok=True)
    found = _read(path)
    if found is None:
        raise FileNotFoundError(path)
    return found
