"""The layout of a MaxText step folder: `items/` as Orbax would write it, in the files of a CheckpointManager.

Facts (MaxText 0.2.5): the step folder has `_CHECKPOINT_METADATA`, which names the handler of `items` and states in
`custom_metadata` whether layers are scanned, and `commit_success.txt`; the item has another `commit_success.txt` and no
`_CHECKPOINT_METADATA`. MaxText refuses to load if the recorded `scan_layers` differs from its config.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from wherry.integrations.containers.orbax.item_map import arrays_of, item_files
from wherry.integrations.containers.orbax.small_files import MARKER, checkpoint_file
from wherry.integrations.formats.maxtext.step import ITEM, NAME, look, parameter_root
from wherry.target.file_map import FileMap, Scene, map_of_chunks, within

if TYPE_CHECKING:
    from wherry.core.manifest import Manifest
    from wherry.formats.format import Options

_HANDLER = "orbax.checkpoint.experimental.v1._src.handlers.pytree_handler.PyTreeHandler"


def lay_out(manifest: Manifest, options: Options, scene: Scene) -> FileMap:
    """The files of a step."""
    step = record_scan(manifest)
    files = [*item_files(step, options, {"format": NAME}), MARKER]
    item = within(ITEM, map_of_chunks(arrays_of(step, options, scene), files))
    around = checkpoint_file({ITEM: _HANDLER}, scene.created_ns, step), MARKER
    return replace(item, files=(*item.files, *around))


def scan_form(manifest: Manifest) -> bool | None:
    """Whether the layers of a tree are scanned, as MaxText determines it; None without layers."""
    root = parameter_root(manifest.tensors, confirmed=True)
    found = look(manifest.tensors, root) if root is not None else None
    if found is not None and found.scanned is not None:
        return found.scanned
    value = (manifest.custom.get("checkpoint") or {}).get("scan_layers")
    return value if isinstance(value, bool) else None


def record_scan(manifest: Manifest) -> Manifest:
    """The manifest with `scan_layers` added to the step's `custom_metadata`."""
    form = scan_form(manifest)
    if form is None:
        return manifest
    around = {**(manifest.custom.get("checkpoint") or {}), "scan_layers": form}
    return replace(manifest, custom={**manifest.custom, "checkpoint": around})
