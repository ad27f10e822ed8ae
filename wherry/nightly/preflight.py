"""preflight: refuse targets and stores on the private disk of a container.

The disk of a container is deleted with it: a target at `file://`, a SQLite ledger or an embedded MLflow store there
would be lost after a successful run. Such a place is refused before any byte moves, unless its folder is declared
shared (`WHERRY_SHARED_PATHS`, or `shared_paths` in `wherry.toml`), that is, mounted at the same path for all workers.

The base job templates in `infra/pools` set `WHERRY_WORKER` to the type of their pool; where it is not set, the process
does not run in a container's worker, and nothing is refused. Object stores are always accepted.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from urllib.parse import unquote, urlsplit

from wherry.config import settings
from wherry.core.lazy_dataclass import dataclass
from wherry.errors import UsageError, choose
from wherry.store import home

WORKER_ENV = "WHERRY_WORKER"
SHARED_ENV = "WHERRY_SHARED_PATHS"

# type of a work pool → whether its workers run in the file system of their machine.
POOL_TYPES = {"process": True, "docker": False, "kubernetes": False}


@dataclass(frozen=True, slots=True)
class UnsharedPlace:
    """A place on the private disk of a container.

    Attributes:
        what: which place it is: `target`, `ledger`, …
        uri: its URI, without secrets.
        path: its path in the container.
    """

    what: str
    uri: str
    path: str


def shared_paths() -> tuple[str, ...]:
    """The folders that are declared as mounted at the same path for all workers.

    Raises:
        UsageError: a folder is not absolute.
    """
    text = os.environ.get(SHARED_ENV)
    paths = (
        tuple(filter(None, text.split(os.pathsep)))
        if text
        else tuple(settings.configured_value("shared_paths") or ())
    )
    for path in paths:
        if not Path(path).is_absolute():
            raise UsageError(f"a shared path must be absolute, got {path!r}", cure=f"correct {SHARED_ENV}")
    return paths


def stores() -> dict[str, str]:
    """The stores that every run needs besides its checkpoints."""
    return {
        "ledger": settings.ledger_url(),
        "MLflow tracking store": settings.mlflow_tracking_uri(),
        "MLflow registry": settings.mlflow_registry_uri(),
    }


def unshared_places(
    places: Mapping[str, str], pool_type: str, shared: Collection[str]
) -> list[UnsharedPlace]:
    """The places that are on private disks of the workers of a pool.

    Args:
        places: name → URI, path or database URL.
        pool_type: one of `POOL_TYPES`.
        shared: folders that are declared shared.

    Raises:
        UsageError: the type of pool is unknown.
    """
    if pool_type not in POOL_TYPES:
        raise UsageError(f"unknown work pool type {pool_type!r}", cure=choose(pool_type, POOL_TYPES))
    if POOL_TYPES[pool_type]:
        return []
    roots = [os.path.normpath(root) for root in shared]
    found: list[UnsharedPlace] = []
    for what, uri in places.items():
        path = _local_path(uri)
        if path is not None and not any(
            path == root or path.startswith(root.rstrip("/") + "/") for root in roots
        ):
            found.append(UnsharedPlace(what, home.without_secrets(uri), path))
    return found


def refuse_unshared(places: Mapping[str, str], pool_type: str, shared: Collection[str] | None = None) -> None:
    """Refuse places on private disks of the workers of a pool.

    Raises:
        UsageError: there are such places; it names all of them.
    """
    found = unshared_places(places, pool_type, shared_paths() if shared is None else shared)
    if found:
        named = ", ".join(f"{one.what} {one.uri}" for one in found)
        raise UsageError(
            f"not shared with the workers of a {pool_type} pool: {named}",
            uri=found[0].uri,
            cure="use an object store and servers (WHERRY_LEDGER, MLFLOW_TRACKING_URI), or mount a shared folder "
            f"at the same path everywhere and name it in {SHARED_ENV}",
            stage="preflight",
        )


def refuse_here(*targets: str) -> None:
    """Refuse as `refuse_unshared` does, on the worker during a run, for its targets and all stores.

    Raises:
        UsageError: this process runs in a container's worker, and a place is not shared.
    """
    worker = os.environ.get(WORKER_ENV)
    if worker:
        refuse_unshared({**{f"target {at}": uri for at, uri in enumerate(targets, 1)}, **stores()}, worker)


def refuse_slice(topology: str, chips: int) -> None:
    """Refuse a TPU pod that cannot be scheduled: on a single host, it must use all chips of the topology.

    Raises:
        UsageError: the numbers differ, or the topology is invalid.
    """
    try:
        held = math.prod(int(side) for side in topology.split("x"))
    except ValueError:
        raise UsageError(
            f"invalid TPU topology {topology!r}", cure="write for example 2x4 or 2x2x1"
        ) from None
    if held != chips:
        raise UsageError(
            f"topology {topology} has {held} chips, but tpu_chips is {chips}",
            cure=f"set tpu_chips to {held}",
            stage="preflight",
        )


def _local_path(uri: str) -> str | None:
    """The path of a file URI, a path or a SQLite URL; None where it is not in a file system."""
    scheme, separator, rest = uri.partition("://")
    if not separator:
        return os.path.normpath(Path(uri).absolute())
    if scheme.partition("+")[0] == "sqlite":
        return os.path.normpath(Path(rest.partition("?")[0][1:] or ":memory:").absolute())
    if scheme == "file":
        return os.path.normpath(unquote(urlsplit(uri).path))
    return None
