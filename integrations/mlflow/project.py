"""The registry as a projection of the ledger: restores what a registry has lost from the ledger's statements.

The projection takes every statement in order and adds only what is missing, so it can be run at any time. A restored
version gets a new number unless its old number is the next one, and the ledger gets a statement of it. Of the
promotions and rollbacks of an alias the last one counts; an alias that is correct is never moved. Aliases that
`register` set are not in the ledger and are not restored. A checkpoint that no longer exists cannot be registered
again; this is logged. What was registered in the store in the home, before a server was configured, is taken too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from wherry.config.settings import embedded_registry_uri, mlflow_tracking_uri
from wherry.core.digest import digest_uri
from wherry.core.progress import logger
from wherry.errors import MismatchError, NotFoundError
from wherry.integrations.mlflow.promote import promoting
from wherry.integrations.mlflow.read import find_digest, look_up
from wherry.ledger.record import open_ledger, statements
from wherry.ledger.resolve import resolve_model
from wherry.ledger.statements import Statement
from wherry.models.register import enter
from wherry.store.home import without_secrets
from wherry.store.local_store import locate
from wherry.store.sidecar import read_sidecar

_log = logger(__name__)


def projection(destination: str) -> Callable[[Statement], bool]:
    """Make a function that takes statements in order and restores what the registry lacks.

    Args:
        destination: the registry's URI; runs are written to the tracking store.

    Returns:
        A function that returns whether it changed anything; it raises StorageError if the registry cannot be reached.
    """
    stores = {"tracking_uri": mlflow_tracking_uri(), "registry_uri": destination}
    registry = without_secrets(destination)
    ours = {registry, without_secrets(embedded_registry_uri())}

    def take(statement: Statement) -> bool:
        body: Mapping[str, Any] = statement.body
        if body.get("registry") not in ours:
            return False
        if statement.kind == "registration":
            return _register(body, stores)
        return statement.kind in ("promotion", "rollback") and _set_alias(statement, stores)

    return take


def _register(body: Mapping[str, Any], stores: Mapping[str, str]) -> bool:
    name, digest = body["name"], body["checkpoint_digest"]
    if find_digest(digest, name=name, **stores) is not None:
        return False
    try:
        uri = resolve_model(digest_uri(digest), **stores).uri
        sidecar = read_sidecar(locate(uri))
    except (NotFoundError, MismatchError) as error:
        _log.warning("%s version %s was not restored: %s", name, body["version"], error.what)
        return False
    if sidecar is None:
        _log.warning("%s version %s was not restored: record not found at %s", name, body["version"], uri)
        return False
    return enter(uri, sidecar, name, alias=None, tags={}, **stores).created


def _set_alias(statement: Statement, stores: Mapping[str, str]) -> bool:
    """Point an alias at the version that its last statement names, and `previous` at the version before it."""
    name, alias = statement.body["name"], statement.body["alias"]
    meant = ("registry", "name", "alias")
    with open_ledger() as ledger:
        said = statements(ledger, kinds=("promotion", "rollback"))
        history = [one for one in said if all(one.body[key] == statement.body[key] for key in meant)]
    if history[-1].seq != statement.seq:
        return False  # a later statement supersedes this one
    digests = [one.body["checkpoint_digest"] for one in history]
    found = find_digest(digests[-1], name=name, **stores)
    if found is None:
        _log.warning("%s %s was not set: version %s not found", name, alias, statement.body["version"])
        return False
    try:
        holder = look_up(name, alias=alias, **stores).version
    except NotFoundError:
        holder = None
    if holder == found.version:
        return False
    if holder is not None and statement.body["registry"] != without_secrets(stores["registry_uri"]):
        return False  # what was promoted in the registry in the home moves no alias of another
    before = next((digest for digest in reversed(digests) if digest != digests[-1]), None)
    earlier = find_digest(before, name=name, **stores) if before is not None and holder is None else None
    for one in (earlier, found):
        if one is not None:
            tags = {"wherry.promoted_by": str(statement.body["by"])}
            with promoting(name, one.version, alias, tags=tags, **stores):
                _log.info("%s version %s is %s again", name, one.version, alias)
    return True
