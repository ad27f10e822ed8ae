"""A registered version as every way to an MLflow registry returns it, and the errors for one that does not exist.

MLflow's client, its REST API and its SQLite file get the same requests, and give the same answers and errors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from wherry.config.settings import embedded_registry_uri
from wherry.core.units import plural
from wherry.cures import Argument, Blank, Command, Cure
from wherry.errors import NotFoundError, similar
from wherry.ledger.record import open_ledger, versions_in
from wherry.store.home import without_secrets

MOST_NAMES = 1000  # models or versions that are read for the cure of an error
_REGISTER = Cure(
    "register the checkpoint: {}", Command("register", Blank("URI"), Argument("model", Blank("NAME")))
)


class RegisteredVersion(NamedTuple):
    """A registered version: the model's name, its number, its tags and the aliases that are on it."""

    name: str
    version: str
    tags: Mapping[str, str]
    aliases: tuple[str, ...]


def promote_command(name: str, alias: str | None) -> Command:
    """The command that sets an alias of a model on a checkpoint."""
    to = [] if alias in (None, "champion") else [Argument("alias", alias)]
    return Command("promote", Blank("URI"), Argument("model", name), *to)


def unknown_alias(name: str, alias: str | None, aliases: Mapping[str, object]) -> NotFoundError:
    """The error for an alias that a model does not have.

    Args:
        name: the registered model.
        alias: the requested alias.
        aliases: alias → version, for those that it has.
    """
    there = ", ".join(f"{word} → {number}" for word, number in sorted(aliases.items()))
    promote = Cure("promote a version: {}", promote_command(name, alias))
    return NotFoundError(
        f"unknown alias {alias} of {name}", cure=f"choose one of: {there}" if there else promote
    )


def no_version(name: str, uri: str) -> NotFoundError:
    """The error for a model without versions."""
    return not_registered(f"Registered Model with name={name} has no version", uri)


def not_registered(message: str, uri: str) -> NotFoundError:
    """The error for a model or version that a registry does not have.

    Args:
        message: what MLflow says about it.
        uri: the registry, without secrets.
    """
    return NotFoundError(message, uri=uri, cure=_REGISTER)


def unknown_model(name: str, known: Sequence[str], uri: str) -> NotFoundError:
    """The error for a model that a registry does not have.

    Args:
        name: the requested model.
        known: models that it has, not necessarily all.
        uri: the registry, without secrets.
    """
    what = f"Registered Model with name={name} not found"
    home, embedded = without_secrets(embedded_registry_uri()), 0
    if uri != home:
        with open_ledger() as ledger:
            embedded = versions_in(ledger, name, home)  # before another store was configured
    if embedded:
        only = f"{plural(embedded, 'version', 'is/are')} only in the registry in this home"
        cure = Cure("run {} to register them here too", Command("ledger deliver", "mlflow"))
        return NotFoundError(f"{what}: {only}", uri=uri, cure=cure)
    near = similar(name, known)
    others = f"did you mean {' or '.join(near)}? " if near else ""
    return NotFoundError(what, uri=uri, cure=Cure("{}{}", others, _REGISTER))


def unknown_version(name: str, number: str, known: Sequence[int], uri: str) -> NotFoundError:
    """The error for a version that a model does not have.

    Args:
        name: the registered model.
        number: the requested version.
        known: its versions.
        uri: the registry, without secrets.
    """
    what = f"Model Version (name={name}, version={number}) not found"
    return NotFoundError(what, uri=uri, cure=f"choose one of: {', '.join(map(str, sorted(known))) or 'none'}")
