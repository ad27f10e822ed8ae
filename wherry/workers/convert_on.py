"""convert_on: converts a checkpoint in this process, or with a carrier, whose code is read only then."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wherry.converter.convert import convert_all
from wherry.core.units import DEFAULT_UNIT, parse_size
from wherry.workers import THREADS

if TYPE_CHECKING:
    from wherry.core.progress import OnProgress
    from wherry.core.receipt import GroupReceipt
    from wherry.core.request import ConvertRequest


def convert_on(
    request: ConvertRequest,
    on: str,
    *,
    unit_bytes: int = parse_size(DEFAULT_UNIT),
    progress: OnProgress | None = None,
) -> GroupReceipt:
    """Convert a checkpoint to one target with a carrier; see `convert_all`.

    Args:
        request: with one target, unless the carrier is `threads`.
        on: the carrier; `wherry.workers.engines` lists them.
        unit_bytes: size of a unit.
        progress: called a few times a second; while units are made, and read back, for each of them with its name.

    Raises:
        UsageError: there is no such carrier, or there are several targets.
        StorageError: units are left; the same call goes on with them.
        WherryError: what `split` and `commit` raise.
    """
    if on == THREADS:
        return convert_all(request, progress=progress)
    from wherry.workers.engines import convert_units

    return convert_units(request, on, unit_bytes, progress)
