"""What is asked of an export: everything that `wherry.export` takes beside the state."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from wherry.core.request import ConvertRequest, TargetRequest, convert_request
from wherry.errors import UsageError
from wherry.mover.spill import FOLDER_VARIABLE
from wherry.storage.folders import PREFIX
from wherry.storage.stores import LiveStore, locate

SNAPSHOTS = ("host", "disk")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportRequest:
    """What is asked of an export.

    Attributes:
        convert: the conversion of the live state to the target.
        snapshot, step: see `wherry.export`.
        name: what the run is called in the lineage; the target's name by default.
        system: format whose names and shapes the state has (`maxtext`, `huggingface`, `lingua`, …), where the target is
            another system's.
        spool: a folder for `disk` and for what other processes give; all of them must see it. By default it is on the
            target's file system, and where the target is in an object store among this host's temporary files.
        patience: seconds that rank 0 waits for the share of each other process, and the others after the last sign of
            life of rank 0.
        alone: this process's state is its own, as a stage of a pipeline is: every process that calls exports what it
            has, to a target of its own. Without it a state that no other process has parts of is taken to be the same
            in all processes, and rank 0 alone exports it.
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
_OF_FILES = (
    "source",
    "targets",
    "format",
    "item",
    "opaque",
    "family_file",
    "wish",
    "as_step",
    "sign",
    "lineage",
    "rename",
)


def export_request(*, uri: str, to: str, **asked: Any) -> ExportRequest:
    """A request; see `wherry.export`.

    Raises:
        UsageError: something is asked for that an export does not take.
    """
    own = {name: asked.pop(name) for name in _OWN if name in asked}
    if refused := next((name for name in _OF_FILES if name in asked), None):
        raise UsageError(f"export got an unexpected keyword argument {refused!r}", cure="see wherry.export")
    try:
        convert = convert_request(f"{LiveStore.protocol}://", [TargetRequest(uri, to)], **asked)
        request = ExportRequest(convert=convert, **own)
    except TypeError as error:
        what = (
            str(error)
            .replace("ConvertRequest.__init__()", "export")
            .replace("ExportRequest.__init__()", "export")
        )
        raise UsageError(what, cure="see wherry.export") from error
    if request.snapshot not in SNAPSHOTS:
        raise UsageError(f"snapshot={request.snapshot} is not possible", cure="choose host or disk")
    return request


def spool_of(request: ExportRequest, mark: str) -> Path:
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
