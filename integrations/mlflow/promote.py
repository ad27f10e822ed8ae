"""Promotion in a registry: candidate → champion → previous, and rollback.

The version that had the alias before gets `previous`, and a tag of the promoted version names the version that it
replaced, so that rollbacks can be repeated. All moves of one promotion happen under the registered model's lock, and
all of them are undone if the caller's block fails.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from mlflow.exceptions import MlflowException

from wherry.core.lazy_dataclass import dataclass
from wherry.cures import Cure
from wherry.errors import NotFoundError
from wherry.integrations.mlflow.aliases import aliases, exclusive, move_aliases, tag_version
from wherry.integrations.mlflow.client import ABSENT, Stores, open_client
from wherry.integrations.mlflow_version import promote_command

if TYPE_CHECKING:
    from mlflow import MlflowClient

CHAMPION = "champion"
CANDIDATE = "candidate"
_REPLACED_TAG = "wherry.replaced."  # with the alias


@dataclass(frozen=True, slots=True)
class AliasMove:
    """How a promotion or a rollback changed an alias.

    Attributes:
        version: the version that the alias points to now.
        replaced: the version that it pointed to before; None if the alias did not exist.
        already: whether the alias pointed to the version already, so that nothing was changed.
    """

    version: str
    replaced: str | None
    already: bool


def previous_of(alias: str) -> str:
    """The alias that keeps the previous version of another alias."""
    return "previous" if alias == CHAMPION else f"{alias}-previous"


@contextmanager
def promoting(
    name: str, version: str, alias: str, *, tags: Mapping[str, str], tracking_uri: str, registry_uri: str
) -> Generator[AliasMove]:
    """Point an alias at a version, and undo it if the block fails.

    Args:
        name: the registered model.
        version: the version to promote.
        alias: such as `champion`.
        tags: set on the version.
        tracking_uri, registry_uri: the stores.

    Raises:
        TargetInUseError: another process is moving aliases of this model.
        StorageError: the registry cannot be reached or written; aliases and tags are unchanged.
    """
    with open_client(Stores(tracking_uri, registry_uri)) as client, exclusive(client, name):
        held = aliases(client, name)
        before = held.get(alias)
        if before == version:
            yield AliasMove(version, before, already=True)
            return
        moves: dict[str, str | None] = {previous_of(alias): before} if before else {}
        moves[alias] = version  # after `previous`: a crash in between leaves an extra alias, and loses none
        if held.get(CANDIDATE) == version and alias != CANDIDATE:
            moves[CANDIDATE] = None
        memory = {f"{_REPLACED_TAG}{alias}": before or ""}
        with (
            tag_version(client, name, version, {**tags, **memory}),
            move_aliases(client, name, moves, expected=held),
        ):
            yield AliasMove(version, before, already=False)


def rollback_target(name: str, alias: str, *, tracking_uri: str, registry_uri: str) -> tuple[str, str | None]:
    """The version to which a rollback would move an alias, and its current version.

    Raises:
        NotFoundError: the alias has no previous version.
    """
    with open_client(Stores(tracking_uri, registry_uri)) as client:
        held = aliases(client, name)
        target, now = held.get(previous_of(alias)), held.get(alias)
        if target is None or target == now:
            raise NotFoundError(
                f"no previous version of alias {alias} of {name}",
                cure=Cure("promote a version: {}", promote_command(name, alias)),
            )
        return target, now


@contextmanager
def rolling_back(
    name: str, alias: str, target: str, now: str | None, *, when: str, tracking_uri: str, registry_uri: str
) -> Generator[AliasMove]:
    """Move an alias back to its previous version, and undo it if the block fails.

    Args:
        name: the registered model.
        alias: such as `champion`.
        target: the previous version that `rollback_target` returned.
        now: the current version that `rollback_target` returned.
        when: time in UTC; kept on the version that is rolled back.
        tracking_uri, registry_uri: the stores.

    Raises:
        TargetInUseError: another process is moving aliases of this model, or has moved this one.
    """
    with open_client(Stores(tracking_uri, registry_uri)) as client, exclusive(client, name):
        keeper = previous_of(alias)
        seen = {keeper: target, **({alias: now} if now else {})}
        older = client.get_model_version(name, target).tags.get(f"{_REPLACED_TAG}{alias}") or None
        moves = {alias: target, keeper: older if older and _is_there(client, name, older) else None}
        with move_aliases(client, name, moves, expected=seen):
            if now is None:
                yield AliasMove(target, None, already=False)
                return
            with tag_version(client, name, now, {"wherry.rolled_back": when}):
                yield AliasMove(target, now, already=False)


def _is_there(client: MlflowClient, name: str, version: str) -> bool:
    try:
        client.get_model_version(name, version)
    except MlflowException as error:
        if error.error_code != ABSENT:
            raise
        return False
    return True
