"""The request of an export: everything that `wherry.export` takes besides the state."""

from __future__ import annotations

import os
import tempfile
from dataclasses import fields
from pathlib import Path
from typing import Any

from wherry.core.lazy_dataclass import dataclass
from wherry.core.request import ConvertRequest, TargetRequest, convert_request
from wherry.errors import UsageError
from wherry.formats.registry import find_system_format
from wherry.store.folders import SPILL_VARIABLE, staging_stem
from wherry.store.local_store import LiveStore, locate

SNAPSHOTS = ("host", "disk")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportRequest:
    """The request of an export.

    Attributes:
        convert: the conversion of the live state to the target.
        snapshot, step: see `wherry.export`.
        name: the name of the run in the lineage; the target's name by default.
        system: the format whose names and shapes the state has (`maxtext`, `huggingface`, `lingua`, …), if the target
            has those of another system.
        spool: a folder for `disk` snapshots and for the shares of other processes, which all of them must share. By
            default it is on the target's file system, or in this host's temporary folder if the target is in an object
            store.
        patience: seconds that rank 0 waits for the share of each other process, and that the others wait after the
            last heartbeat of rank 0.
        alone: whether this process has a separate state, such as a stage of a pipeline: every process that calls
            exports its own state to its own target. Otherwise a state of which no other process has parts is assumed
            to be the same in all processes, and only rank 0 exports it.
    """

    convert: ConvertRequest
    snapshot: str
    step: int | None = None
    name: str | None = None
    system: str | None = None
    spool: str | None = None
    patience: float = 1800.0
    alone: bool = False

    @property
    def uri(self) -> str:
        """The target."""
        return self.convert.targets[0].uri


_OWN = tuple(one.name for one in fields(ExportRequest) if one.name != "convert")


def export_request(*, uri: str, to: str, **keywords: Any) -> ExportRequest:
    """Create a request; see `wherry.export`.

    Raises:
        UsageError: a keyword argument has an invalid value.
        TypeError: a keyword argument is unknown.
    """
    own = {name: keywords.pop(name) for name in _OWN if name in keywords}
    if own.get("system") is not None:
        own["system"] = find_system_format(own["system"]).name
    convert = convert_request(f"{LiveStore.protocol}://", [TargetRequest(uri, to)], **keywords)
    request = ExportRequest(convert=convert, **own)
    if request.snapshot not in SNAPSHOTS:
        raise UsageError(f"invalid value for snapshot: {request.snapshot!r}", cure="choose host or disk")
    return request


def spool_of(request: ExportRequest, mark: str) -> Path:
    """The path of a new folder on the target's file system, or in the temporary folder.

    Args:
        request: has the target and the parent folder.
        mark: of the export.
    """
    location = locate(request.uri)
    if request.spool is not None:
        parent = Path(request.spool).expanduser()
    elif location.store.capabilities.local:
        parent = next(one for one in Path(location.path).parents if one.is_dir())
    else:
        parent = Path(os.environ.get(SPILL_VARIABLE) or tempfile.gettempdir())
    return parent / f"{staging_stem(location.name)}.{mark[:8]}.spool"
