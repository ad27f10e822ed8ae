"""What is asked of an export: everything that `wherry.export` takes beside the state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from wherry.errors import UsageError
from wherry.plan import DEFAULT_MEMORY

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
        family, config, dtype, assets: what is asked for of layouts; see `wherry.layouts.Wish`.
        spool: a folder for `disk` and for what other processes give; all of them must see it.
        patience: seconds that rank 0 waits for the share of each other process.
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
