"""Trees without a family: layers stacked or apart by a pattern that the user gives, all else as it is.

The pattern names the part of the key paths that differs: `layers` where the layers are one tensor, `layers_{layer}`
where each has its own. A family is made of the checkpoint itself, one parameter for every tensor or row of layers, so
that the same checks and moves apply as to any other; the scan axis is found by all tensors together, or asked for.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from wherry.core.keypath import KeyPath, parse, render
from wherry.errors import UnrepresentableError, UsageError
from wherry.families.parse import family_of
from wherry.layout.layout import parse_layout

if TYPE_CHECKING:
    from wherry.core.manifest import Manifest
    from wherry.families.schema import Family

SYSTEM = "tree"
_AXIS = "layer"
_RESERVED = re.compile(r"[{}<>@*%]")


def tree_family(manifest: Manifest, stacked: str, unrolled: str) -> Family:
    """A family with one system, `tree`, whose form `scan_layers` says how layers lie.

    Args:
        manifest: the checkpoint.
        stacked: the parts of a key path at which layers are one tensor, for example `layers`.
        unrolled: the same where each layer has its own, with `{layer}`, for example `layers_{layer}`.

    Raises:
        UsageError: the patterns cannot be read, or fit nothing.
        UnrepresentableError: a key path holds a sign that templates reserve.
    """
    layout = parse_layout(unrolled, "")
    if layout.unrolled != (_AXIS,) or "{" in stacked or not stacked:
        raise UsageError(
            f"{stacked!r} and {unrolled!r} are no pattern", cure="write for example layers and layers_{layer}"
        )
    alone, together = len(layout.key), parse(stacked)
    keys: dict[str, int] = {}
    found = False
    for path, spec in sorted(manifest.tensors.items()):
        key, rank = _escaped(path), len(spec.shape)
        for place in range(len(path)):
            before, after = path[:place], path[place + alone :]
            if layout.match(path[place : place + alone]) is not None:
                key, found = _around(before, after), True
                break
            if path[place : place + len(together)] == together:
                key, rank, found = _around(before, path[place + len(together) :]), rank - 1, True
                break
        keys[key] = rank
    if not found:
        raise UsageError(
            f"no key path has {stacked} or {unrolled}", cure="`wherry inspect` lists the key paths"
        )
    return family_of(_declared(keys, stacked, unrolled), "the tree")


def _declared(keys: dict[str, int], stacked: str, unrolled: str) -> dict[str, object]:
    names = {key: f"t{place}" for place, key in enumerate(keys)}
    axes = {key: [f"{names[key]}_{axis}" for axis in range(max(rank, 0))] for key, rank in keys.items()}
    return {
        "name": SYSTEM,
        "about": "a tree without a family",
        "axes": {_AXIS: "layers", **{name: "an axis" for own in axes.values() for name in own}},
        "parameters": {
            names[key]: " ".join([*([_AXIS] if "<layers>" in key else []), *axes[key]]) for key in keys
        },
        "systems": {
            SYSTEM: {
                "about": "unchanged, with layers stacked or separate",
                "formats": [],
                "forms": {"scan_layers": ["true", "false"], "param_scan_axis": ["1", "0"]},
                "stacks": {
                    "layers": {
                        "axis": _AXIS,
                        "form": "scan_layers",
                        "stacked": stacked,
                        "unrolled": unrolled,
                        "at": "param_scan_axis",
                    }
                },
                "slots": {"params": "@"},
                "layouts": {names[key]: [key, " ".join(axes[key])] for key in keys},
            }
        },
    }


def _around(before: KeyPath, after: KeyPath) -> str:
    return "/".join(part for part in (_escaped(before), "<layers>", _escaped(after)) if part)


def _escaped(path: KeyPath) -> str:
    text = render(path)
    if _RESERVED.search(text):
        raise UnrepresentableError(
            "the key path holds a sign that patterns reserve", path=text, cure="rename it in the source"
        )
    return text
