"""What the model registry says to a removal: who bears an alias, and the tombstones of versions.

The registry is asked once, and only where there is one: configured, or the embedded store's file, or a registration in
the ledger. A version in a registry that is not the configured one cannot be asked about, so its checkpoint is kept.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from wherry.config.settings import configured, mlflow_registry_uri, mlflow_tracking_uri
from wherry.core.services import service
from wherry.errors import WherryError
from wherry.ledger.resolve import DIGEST_TAG
from wherry.storage.home import sqlite_file, without_secrets

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Mapping

    from wherry.ledger.nodes import Node


@dataclass(frozen=True, slots=True)
class Registry:
    """The versions of the configured registry, by checkpoint digest; empty where there is no registry."""

    uri: str
    versions: Mapping[str, list[Any]] = field(default_factory=dict[str, "list[Any]"])

    def holds(self, node: Node) -> str:
        """Why the registry keeps a checkpoint; empty where it does not."""
        for row in node.registrations:
            if row.state == "pending":
                return f"a registration as {row.name} is under way"
            if row.registry != self.uri:
                return (
                    f"it is registered as {row.name} in {row.registry}, which is not the configured registry"
                )
        for one in self.versions.get(node.checkpoint_digest, []):
            if one.aliases:
                return f"{one.name} version {one.version} bears the alias {', '.join(sorted(one.aliases))}"
        return ""

    @contextmanager
    def marked_deleted(self, node: Node, uri: str, *, by: str, reason: str) -> Generator[None]:
        """Say on every version of a checkpoint that its bytes are gone, where they lie nowhere else.

        It is taken back where the block fails, or where one of the versions cannot be marked.

        Raises:
            UsageError: an alias was put on one meanwhile.
            StorageError: the registry cannot be reached.
        """
        elsewhere = any(place.gone is None and place.uri != uri for place in node.places)
        versions = [] if elsewhere else self.versions.get(node.checkpoint_digest, [])
        stores = {"tracking_uri": mlflow_tracking_uri(), "registry_uri": mlflow_registry_uri()}
        marked: list[Any] = []
        try:
            for one in versions:
                service("mlflow").mark_deleted(one.name, one.version, by=by, reason=reason, **stores)
                marked.append(one)
            yield
        except BaseException as error:
            _unmark(marked, stores, error)
            raise


def _unmark(marked: Iterable[Any], stores: Mapping[str, str], error: BaseException) -> None:
    for one in marked:
        try:
            service("mlflow").unmark_deleted(one.name, one.version, **stores)
        except WherryError as failure:  # the first error is the one to raise; this one is added to it
            error.add_note(f"{one.name} version {one.version} is still marked as deleted: {failure}")


def ask(nodes: Iterable[Node]) -> Registry:
    """The registry as it is now.

    Raises:
        StorageError: it cannot be reached.
        MissingExtraError: mlflow is not installed.
    """
    uri = mlflow_registry_uri()
    if not any(node.registrations for node in nodes) and not _is_there(uri):
        return Registry(without_secrets(uri))
    versions: dict[str, list[Any]] = {}
    for one in service("mlflow").registered(mlflow_tracking_uri(), uri):
        versions.setdefault(one.tags[DIGEST_TAG], []).append(one)
    return Registry(without_secrets(uri), versions)


def _is_there(uri: str) -> bool:
    """Whether there is a registry at all: somebody stated one, or the embedded store has been made."""
    file = sqlite_file(uri)
    if file is not None:
        return file.is_file()
    variables = ("MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI")
    stated = any(os.environ.get(name) for name in variables)
    return stated or any(configured(f"mlflow.{name}") for name in ("tracking_uri", "registry_uri"))
