"""preflight: would the worker that runs this see the same bytes as everybody else?

A worker in a container has a disk of its own that dies with it: a target at `file://`, a SQLite ledger or the embedded
MLflow store there would look like a success and be gone. Such a place is refused before a byte moves, unless its folder
is declared shared (`WHERRY_SHARED_PATHS`, or `shared_paths` in `wherry.toml`): mounted at one path for all workers.

The base job templates in `infra/pools` set `WHERRY_WORKER` to the type of their pool; where it is not set, this is
somebody's own machine, and nothing is refused. A path says nothing of a bucket: object stores pass.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from wherry.config import settings
from wherry.errors import UsageError
from wherry.storage import home

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

WORKER_ENV = "WHERRY_WORKER"
SHARED_ENV = "WHERRY_SHARED_PATHS"

# type of a work pool → whether its workers run in the file system of their machine.
POOL_TYPES = {"process": True, "docker": False, "kubernetes": False}


@dataclass(frozen=True, slots=True)
class UnsharedPlace:
    """A place that a container would keep to itself.

    Attributes:
        what: which place it is: `target`, `ledger`, …
        uri: where it lies, without secrets.
        path: its path in the container.
    """

    what: str
    uri: str
    path: str


def shared_paths() -> tuple[str, ...]:
    """The folders that all workers see at the same path, as they were declared.

    Raises:
        UsageError: one of them is not absolute.
    """
    text = os.environ.get(SHARED_ENV)
    paths = (
        tuple(filter(None, text.split(os.pathsep)))
        if text
        else tuple(settings.configured("shared_paths") or ())
    )
    for path in paths:
        if not Path(path).is_absolute():
            raise UsageError(f"a shared path must be absolute: {path!r}", cure=f"correct {SHARED_ENV}")
    return paths


def stores() -> dict[str, str]:
    """The places that every run needs besides its checkpoints."""
    return {
        "ledger": settings.ledger_url(),
        "MLflow tracking store": settings.mlflow_tracking_uri(),
        "MLflow registry": settings.mlflow_registry_uri(),
    }


def unshared(places: Mapping[str, str], pool_type: str, shared: Collection[str]) -> list[UnsharedPlace]:
    """Those of the places that the workers of a pool would keep to themselves.

    Args:
        places: what it is → URI, path or database URL.
        pool_type: of `POOL_TYPES`.
        shared: folders declared shared.

    Raises:
        UsageError: an unknown type of pool.
    """
    if pool_type not in POOL_TYPES:
        raise UsageError(f"unknown type of work pool {pool_type!r}", cure=f"one of: {', '.join(POOL_TYPES)}")
    return [] if POOL_TYPES[pool_type] else list(_kept(places, shared))


def refuse_unshared(places: Mapping[str, str], pool_type: str, shared: Collection[str] | None = None) -> None:
    """Refuse places that the workers of a pool would keep to themselves.

    Raises:
        UsageError: there are such places; it names them all.
    """
    found = unshared(places, pool_type, shared_paths() if shared is None else shared)
    if found:
        named = ", ".join(f"{one.what} {one.uri}" for one in found)
        raise UsageError(
            f"a worker of a {pool_type} pool would keep to itself: {named}",
            uri=found[0].uri,
            cure="use an object store and servers (WHERRY_LEDGER, MLFLOW_TRACKING_URI), or mount a shared folder "
            f"at the same path everywhere and name it in {SHARED_ENV}",
            stage="preflight",
        )


def refuse_here(*targets: str) -> None:
    """The same, inside of a run: on the worker that carries it out, for its targets and all its stores.

    Raises:
        UsageError: this is a container's worker, and a place is not shared.
    """
    worker = os.environ.get(WORKER_ENV)
    if worker:
        refuse_unshared({**{f"target {at}": uri for at, uri in enumerate(targets, 1)}, **stores()}, worker)


def refuse_slice(topology: str, chips: int) -> None:
    """Refuse a TPU pod that no node could take: on one host the chips of the pod are all of the topology.

    Raises:
        UsageError: they differ, or the topology is none.
    """
    try:
        held = math.prod(int(side) for side in topology.split("x"))
    except ValueError:
        raise UsageError(f"not a TPU topology: {topology!r}", cure="write it as 2x4 or 2x2x1") from None
    if held != chips:
        raise UsageError(
            f"topology {topology} has {held} chips, not {chips}",
            cure=f"set tpu_chips to {held}",
            stage="preflight",
        )


def _kept(places: Mapping[str, str], shared: Collection[str]) -> Iterator[UnsharedPlace]:
    roots = [os.path.normpath(root) for root in shared]
    for what, uri in places.items():
        path = _local_path(uri)
        if path is not None and not any(_inside(path, root) for root in roots):
            yield UnsharedPlace(what, home.without_secrets(uri), path)


def _local_path(uri: str) -> str | None:
    """The path behind a URI, a path or a SQLite URL; None where it is not of a file system."""
    scheme, separator, rest = uri.partition("://")
    if not separator:
        return os.path.normpath(Path(uri).absolute())
    if scheme.partition("+")[0] == "sqlite":
        return os.path.normpath(Path(rest.partition("?")[0][1:] or ":memory:").absolute())
    if scheme == "file":
        return os.path.normpath(unquote(urlsplit(uri).path))
    return None


def _inside(path: str, root: str) -> bool:
    return path == root or path.startswith(root.rstrip("/") + "/")
