"""Moving aliases from version to version while other callers move them too.

MLflow sets an alias without comparing its previous value, so this module adds three safeguards. A tag of the registered
model serves as a lock for its alias moves. Before an alias is set, it must still have the value that the caller has
seen. If a later step fails, every alias is moved back, unless another caller has moved it meanwhile.

The tag is a lock after Fischer's algorithm: a process that finds it free writes its own mark, waits for longer than a
write takes and continues only if the mark is still its own. It needs nothing of the registry but tags, and the lock of
a process that died expires after two minutes. A write that hangs for longer than the wait can bypass the lock; then
only the comparison before each move protects the alias.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from wherry.errors import TargetInUseError
from wherry.integrations.mlflow.client import colliding
from wherry.store.waits import waiting

if TYPE_CHECKING:
    from mlflow import MlflowClient

LOCK_TAG = "wherry.lock"
_SETTLE_SECONDS = 0.5
_EXPIRY_SECONDS = 120.0
_PATIENCE_SECONDS = 60.0
_POLL_SECONDS = 0.2


def aliases(client: MlflowClient, name: str) -> dict[str, str]:
    """Alias → version of a registered model."""
    found: Mapping[str, object] = client.get_registered_model(name).aliases
    return {alias: str(version) for alias, version in found.items()}


@contextmanager
def exclusive(client: MlflowClient, name: str) -> Generator[None]:
    """Hold the registered model's lock.

    Raises:
        TargetInUseError: another process has held the lock for a minute.
    """
    mark = f"{uuid.uuid4().hex} {time.time() + _EXPIRY_SECONDS:.0f}"
    with waiting(f"models:/{name}", what="another process that moves its aliases"):
        _take(client, name, mark)
    try:
        yield
    finally:
        if _mark(client, name) == mark:
            client.delete_registered_model_tag(name, LOCK_TAG)


@contextmanager
def move_aliases(
    client: MlflowClient,
    name: str,
    moves: Mapping[str, str | None],
    *,
    expected: Mapping[str, str] | None = None,
) -> Generator[None]:
    """Move aliases, and move them back if the block fails.

    Args:
        client: client of the registry.
        name: the registered model.
        moves: alias → version, or None to delete the alias; carried out in this order.
        expected: alias → version as the caller saw them; not compared by default.

    Raises:
        TargetInUseError: an alias has another value than the caller saw.
    """
    before = aliases(client, name)
    for alias in moves if expected is not None else ():
        if before.get(alias) != (expected or {}).get(alias):
            raise TargetInUseError(
                f"alias {alias} of {name} was moved by another process, to version {before.get(alias)}",
                cure="check where the alias points now, then repeat the command",
                retryable=True,
            )
    begun: list[str] = []
    try:
        for alias, version in moves.items():
            begun.append(alias)
            _set(client, name, alias, version)
        yield
    except BaseException as error:
        _restore(client, name, moves, before, begun, error)
        raise


@contextmanager
def tag_version(client: MlflowClient, name: str, version: str, tags: Mapping[str, str]) -> Generator[None]:
    """Set tags of a version, and restore the previous values if the block fails."""
    before: Mapping[str, str] = client.get_model_version(name, version).tags
    try:
        for key, value in tags.items():
            set_tag(client, name, version, key, value)
        yield
    except BaseException as error:
        try:
            for key in tags:
                _put_back(client, name, version, key, before.get(key))
        except Exception as failure:  # noqa: BLE001  the first error is the one to raise; this one is added to it
            error.add_note(f"could not restore the tags of {name} version {version}: {failure}")
        raise


def set_tag(client: MlflowClient, name: str, version: str, key: str, value: str) -> None:
    """Set a tag of a version that other callers may set at the same time."""
    colliding(lambda: client.set_model_version_tag(name, version, key, value))


def _take(client: MlflowClient, name: str, mark: str) -> None:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not _take_mark(client, name, mark):
        if time.monotonic() > deadline:
            raise TargetInUseError(
                f"another process is moving aliases of {name}",
                cure=f"try again; the lock of a dead process expires after {_EXPIRY_SECONDS:.0f} s",
                retryable=True,
            )
        time.sleep(_POLL_SECONDS)


def _take_mark(client: MlflowClient, name: str, mark: str) -> bool:
    if _expiry(_mark(client, name) or "") > time.time():
        return False
    colliding(lambda: client.set_registered_model_tag(name, LOCK_TAG, mark))
    time.sleep(_SETTLE_SECONDS)
    return _mark(client, name) == mark


def _expiry(mark: str) -> float:
    """Expiry time of a lock; a mark in another form has expired."""
    try:
        return float(mark.partition(" ")[2])
    except ValueError:
        return 0.0


def _mark(client: MlflowClient, name: str) -> str | None:
    found: Mapping[str, str] = client.get_registered_model(name).tags
    return found.get(LOCK_TAG)


def _set(client: MlflowClient, name: str, alias: str, version: str | None) -> None:
    if version is None:
        client.delete_registered_model_alias(name, alias)
    else:
        colliding(lambda: client.set_registered_model_alias(name, alias, version))


def _restore(
    client: MlflowClient,
    name: str,
    moves: Mapping[str, str | None],
    before: Mapping[str, str],
    begun: list[str],
    error: BaseException,
) -> None:
    """Undo moves, the last one first; leave aliases that another caller has moved since."""
    try:
        now = aliases(client, name)
        for alias in reversed(begun):
            if now.get(alias) == moves[alias] != before.get(alias):
                _set(client, name, alias, before.get(alias))
    except Exception as failure:  # noqa: BLE001  the first error is the one to raise; this one is added to it
        error.add_note(f"could not restore the aliases of {name}: {failure}")


def _put_back(client: MlflowClient, name: str, version: str, key: str, value: str | None) -> None:
    if value is None:
        client.delete_model_version_tag(name, version, key)
    else:
        set_tag(client, name, version, key, value)
