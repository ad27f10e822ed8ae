"""Held: whether a target format can hold everything of a manifest, each fault named before any byte moves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wherry.core import dtypes
from wherry.core.keypath import render
from wherry.errors import UnrepresentableError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from wherry.core.manifest import Manifest
    from wherry.formats.format import Format

_SHOWN_FAULTS = 3


def require_held(manifest: Manifest, row: Format, uri: str) -> None:
    """Refuse what a format cannot hold.

    Raises:
        UnrepresentableError: naming the first few things that it cannot hold, and the cure.
    """
    faults = list(_faults(manifest, row))
    if faults:
        more = len(faults) - _SHOWN_FAULTS
        shown = "; ".join(faults[:_SHOWN_FAULTS]) + (f"; and {more} more" if more > 0 else "")
        raise UnrepresentableError(f"{row.name} cannot hold {shown}", uri=uri, cure=_cure(manifest, row))


def _faults(manifest: Manifest, row: Format) -> Iterator[str]:
    holds = row.holds
    for spec in manifest.tensors.values():
        if spec.dtype not in holds.dtypes:
            yield f"dtype {spec.dtype} (tensor {spec.name})"
        if not dtypes.known(spec.dtype):
            yield f"unknown dtype {spec.dtype} (tensor {spec.name})"
        if holds.depth is not None and len(spec.path) > holds.depth:
            yield f"a key path of {len(spec.path)} parts (tensor {spec.name})"
        if not holds.zero_size and spec.size == 0:
            yield f"a tensor without elements (tensor {spec.name})"
    if not holds.values:
        yield from (f"the non-tensor leaf {render(path)}" for path in manifest.values)
    if not holds.empties:
        yield from (f"the empty node {render(path)}" for path in manifest.empties)


def _cure(manifest: Manifest, row: Format) -> str:
    if row.holds.depth is not None and any(len(path) > row.holds.depth for path in manifest.tensors):
        return "join the parts of key paths with `--set join=.`, and see --only and --ignore"
    if (manifest.values and not row.holds.values) or (manifest.empties and not row.holds.empties):
        return "leave them behind by name: --ignore values,empties"
    return f"choose a target that holds them; `wherry formats {row.name}` lists what this one holds"
