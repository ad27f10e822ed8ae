"""Opens a file in which each tensor is stored raw in one byte range."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from wherry.core.detection import Detection
from wherry.core.keypath import KeyPath
from wherry.core.manifest import Manifest
from wherry.core.tensorspec import TensorSpec
from wherry.core.threads import without_collection
from wherry.errors import IncompleteError
from wherry.formats.format import Opened
from wherry.integrations.containers.flat.reader import FlatReader, Places
from wherry.store.location import Location


def open_one(
    location: Location,
    detection: Detection,
    tensors: Iterable[tuple[TensorSpec, int, int]],
    custom: Mapping[str, Any] | None = None,
) -> Opened:
    """The contents of a file, from what its header states.

    Args:
        location: the file.
        detection: of the file.
        tensors: each tensor, with the offset and the number of its stored bytes.
        custom: further metadata of the container.

    Raises:
        IncompleteError: the file ends before one of the tensors does.
    """
    entry = location.present()
    specs: dict[KeyPath, TensorSpec] = {}
    places, end = Places(), 0
    places.begin(location)
    with without_collection():
        for spec, start, nbytes in tensors:
            specs[spec.path] = spec
            places.add(spec.path, start, nbytes)
            end = max(end, start + nbytes)
    if end > entry.size:
        raise IncompleteError(
            f"truncated: expected {end} bytes, got {entry.size}", uri=location.uri, cure="copy it again"
        )
    manifest = Manifest(specs, step=detection.step, kind="params", custom=custom or {})
    return Opened(detection, manifest, FlatReader(location, places, (entry,)))
