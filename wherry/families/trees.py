"""Trees without a family: stack or unstack layers by a pattern that the user gives, and keep everything else.

The pattern names the part of the key paths that differs: `layers` if the layers are one tensor, `layers_{layer}` if
each layer is a tensor. A family is derived from the checkpoint itself, with one parameter for every tensor or row of
layers, so that the same checks and moves apply as for any other family. The scan axis is determined from all tensors
together; if that is ambiguous, the user must state it.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from wherry.core.keypath import KeyPath, parse, render
from wherry.core.manifest import Manifest
from wherry.cures import Command, Cure
from wherry.errors import UnrepresentableError, UsageError
from wherry.families.parse import family_of
from wherry.layout.layout import parse_layout

if TYPE_CHECKING:
    from wherry.families.schema import Family

SYSTEM = "tree"
_AXIS = "layer"
_RESERVED = re.compile(r"[{}<>@*%]")


def tree_family(manifest: Manifest, stacked: str, unrolled: str) -> Family:
    """A family with one system, `tree`, whose form `scan_layers` states whether layers are stacked.

    Args:
        manifest: of the checkpoint.
        stacked: the parts of a key path if layers are one tensor, for example `layers`.
        unrolled: the parts if each layer is a tensor, with `{layer}`, for example `layers_{layer}`.

    Raises:
        UsageError: the patterns are invalid, or match nothing.
        UnrepresentableError: a key path contains a character that templates reserve.
    """
    layout = parse_layout(unrolled, "")
    if layout.unrolled != (_AXIS,) or "{" in stacked or not stacked:
        raise UsageError(
            f"invalid patterns {stacked!r} and {unrolled!r}",
            cure="write for example layers and layers_{layer}",
        )
    alone, together = len(layout.key), parse(stacked)
    keys: dict[str, int] = {}
    found = False
    for path, spec in sorted(manifest.tensors.items()):
        key, rank = _escape(path), len(spec.shape)
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
            f"no key path matches {stacked} or {unrolled}",
            cure=Cure("run {} to list the key paths", Command("inspect")),
        )
    return family_of(_declare_keys(keys, stacked, unrolled), "the tree")


def _declare_keys(keys: dict[str, int], stacked: str, unrolled: str) -> dict[str, object]:
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
    return "/".join(part for part in (_escape(before), "<layers>", _escape(after)) if part)


def _escape(path: KeyPath) -> str:
    text = render(path)
    if _RESERVED.search(text):
        raise UnrepresentableError(
            "key path contains a reserved character, one of {}<>@*%",
            path=text,
            cure="rename it in the source",
        )
    return text
