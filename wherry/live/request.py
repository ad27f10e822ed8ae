"""What is asked of an export: everything that `wherry.export` takes beside the state."""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wherry.converter.convert import Asked, Target
from wherry.converter.plan import DEFAULT_MEMORY
from wherry.core.receipt import utc_now
from wherry.core.request import Wish
from wherry.errors import UsageError
from wherry.mover.spill import FOLDER_VARIABLE
from wherry.storage.folders import PREFIX
from wherry.storage.stores import locate

if TYPE_CHECKING:
    from collections.abc import Mapping

SNAPSHOTS = ("host", "disk")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is asked of an export.

    Attributes:
        uri, to, snapshot, step: see `wherry.export`.
        options: format-specific options, `split` / `join`, layout options.
        meta: kept with the checkpoint.
        name: what the run is called in the lineage; the target's name by default.
        system: format whose names and shapes the state has (`maxtext`, `huggingface`, `lingua`, …), where the target is
            another system's.
        only, ignore, memory, verify, if_exists, into: as `wherry.convert` takes them.
        family, config, dtype, assets: what is asked for of layouts; see `wherry.core.request.Wish`.
        spool: a folder for `disk` and for what other processes give; all of them must see it. By default it is on the
            target's file system, and where the target is in an object store among this host's temporary files.
        patience: seconds that rank 0 waits for the share of each other process, and the others after the last sign of
            life of rank 0.
        alone: this process's state is its own, as a stage of a pipeline is: every process that calls exports what it
            has, to a target of its own. Without it a state that no other process has parts of is taken to be the same
            in all processes, and rank 0 alone exports it.
    """

    uri: str
    to: str
    snapshot: str
    step: int | None = None
    options: Mapping[str, Any] | None = None
    meta: Mapping[str, str] | None = None
    name: str | None = None
    system: str | None = None
    only: str | None = None
    ignore: tuple[str, ...] = ()
    memory: str | int = DEFAULT_MEMORY
    verify: str = "digest"
    if_exists: str | None = None
    into: bool = False
    family: str | None = None
    config: str | None = None
    dtype: str | None = None
    assets: str | None = None
    spool: str | None = None
    patience: float = 1800.0
    alone: bool = False


def request_of(**asked: Any) -> Request:
    """A request.

    Raises:
        UsageError: something is asked for that an export does not take.
    """
    try:
        request = Request(**asked)
    except TypeError as error:
        raise UsageError(
            str(error).replace("Request.__init__()", "export"), cure="see wherry.export"
        ) from error
    if request.snapshot not in SNAPSHOTS:
        raise UsageError(f"snapshot={request.snapshot} is not possible", cure="choose host or disk")
    return request


def target_of(request: Request) -> Target:
    """What the engine writes."""
    return Target(request.uri, request.to, request.options or {})


def asked_of(request: Request) -> Asked:
    """What is asked of the engine, from this moment on."""
    wish = Wish(request.family, None, request.config, request.dtype, request.assets)
    return Asked(
        request.memory, request.verify, request.only, request.ignore, request.into, None, None, request.meta or {},
        wish, utc_now(), time.monotonic(),
    )  # fmt: skip


def spool_of(request: Request, mark: str) -> Path:
    """A folder of its own on the target's file system, or where temporary files go.

    Args:
        request: says the target, and where the folder shall lie.
        mark: of the export.
    """
    location = locate(request.uri)
    if request.spool is not None:
        parent = Path(request.spool)
    elif location.store.capabilities.local:
        parent = next(one for one in Path(location.path).parents if one.is_dir())
    else:
        parent = Path(os.environ.get(FOLDER_VARIABLE) or tempfile.gettempdir())
    return parent / f"{PREFIX}{location.name}.{mark[:8]}.spool"
