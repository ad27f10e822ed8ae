"""Leaves of a T5X msgpack tree that refer to an array elsewhere: tensorstore specs and placeholders.

Facts: a **spec** is a map with at least `driver`, `kvstore` and `metadata`. Its path is `kvstore.path` (with or
without a trailing slash) or, from tensorstore before 0.1.14, `path` of the spec. The element type is `dtype` of the
spec (`float32`) or of the metadata (`<f4`). Driver `file`, `gfile` or `gcs` and the bucket state the original location,
not the current one: they are ignored, and the path is relative to the folder of the msgpack file. `.zarray` takes
precedence over the spec; if that file is missing (copy tools drop dot-files), the spec and T5X's constants (`order` C,
no filters, no fill value) rebuild it exactly. A **placeholder** is the text `PLACEHOLDER://<name>` (`AGGREGATED://` in
the oldest) and has only the name.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from wherry.core.keypath import KeyPath, render
from wherry.errors import CorruptError, HostileError, UnsupportedError
from wherry.integrations.containers.msgpack.index import Node, Scalar, Sequence, Table
from wherry.integrations.containers.zarr import metadata as zarr
from wherry.integrations.formats.t5x.layout import PLACEHOLDERS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from wherry.integrations.containers.zarr.metadata import JsonObject

_SPEC_KEYS = frozenset({"driver", "kvstore", "metadata"})
_KNOWN_SPEC_KEYS = _SPEC_KEYS | {
    "dtype",
    "path",
    "transform",
    "recheck_cached_data",
    "recheck_cached_metadata",
}
_TRANSFORM_KEYS = frozenset({"input_inclusive_min", "input_exclusive_max", "input_labels", "output"})
_KVSTORES = frozenset({"file", "gfile", "gcs"})
_ZARR = "zarr"
_GDA = "//GDAPlaceholder:"


@dataclass(frozen=True, slots=True)
class ArrayReference:
    """A leaf that refers to an array.

    Attributes:
        name: the folder of the array, relative to that of the msgpack file.
        spec: the tensorstore spec; None for a placeholder.
        old_path: whether the spec has its path in the position of tensorstore before 0.1.14.
    """

    name: str
    spec: JsonObject | None = None
    old_path: bool = False


def stored_leaves(root: Node, uri: str) -> dict[KeyPath, ArrayReference]:
    """Every leaf of a tree that refers to an array, by key path.

    Raises:
        HostileError: a spec names storage that T5X never writes to, or a path that is absolute or has `..`.
        UnsupportedError: a spec of another driver, or a view of an array.
        CorruptError: a spec without a path, or with an invalid form.
    """
    return dict(_stored_references(root, (), uri))


def is_spec(node: Node) -> bool:
    """Whether a node is a tensorstore spec instead of a part of the tree."""
    return (
        isinstance(node, Table)
        and node.entries.keys() >= _SPEC_KEYS
        and isinstance(node.entries["driver"], Scalar)
        and isinstance(node.entries["driver"].value, str)
    )


def rebuilt_metadata(spec: JsonObject | None) -> JsonObject | None:
    """The `.zarray` rebuilt from a spec; None if the spec lacks shape, chunks, compressor or dtype."""
    if spec is None:
        return None
    metadata = cast("JsonObject", spec["metadata"])
    dtype = metadata.get("dtype") or zarr.ZARR2_STRINGS.get(str(spec.get("dtype")))
    if dtype is None or any(key not in metadata for key in ("shape", "chunks", "compressor")):
        return None
    # flax turns lists into maps, and an empty list into an empty map, which is ambiguous.
    metadata = {
        key: [] if key in ("shape", "chunks") and value == {} else value for key, value in metadata.items()
    }
    fixed = {"zarr_format": 2, "order": "C", "filters": None, "fill_value": None, "dimension_separator": "."}
    return {**fixed, **metadata, "dtype": dtype}


def _stored_references(node: Node, path: KeyPath, uri: str) -> Iterator[tuple[KeyPath, ArrayReference]]:
    if isinstance(node, Table):
        if is_spec(node):
            yield path, _from_spec(cast("JsonObject", _plain(node, path, uri)), path, uri)
            return
        for key, child in node.entries.items():
            yield from _stored_references(child, (*path, key), uri)
    elif isinstance(node, Sequence):
        for number, child in enumerate(node.items):
            yield from _stored_references(child, (*path, str(number)), uri)
    elif isinstance(node, Scalar) and isinstance(node.value, str):
        text = node.value
        prefix = next((prefix for prefix in PLACEHOLDERS if text.startswith(prefix)), None)
        if prefix is not None:
            yield path, ArrayReference(_checked_name(text.removeprefix(prefix), path, uri))
        elif text.startswith(_GDA):
            raise UnsupportedError(
                "unsupported placeholder of flax's multi-process format in a T5X checkpoint",
                uri=uri,
                path=render(path),
            )


def _from_spec(spec: JsonObject, path: KeyPath, uri: str) -> ArrayReference:
    unknown = set(spec) - _KNOWN_SPEC_KEYS
    kvstore = spec["kvstore"]
    if unknown or spec["driver"] != _ZARR:
        odd = f"driver {spec['driver']!r}" if spec["driver"] != _ZARR else ", ".join(sorted(unknown))
        raise UnsupportedError(f"unsupported tensorstore spec with {odd}", uri=uri, path=render(path))
    if not isinstance(kvstore, dict) or not isinstance(spec["metadata"], dict):
        raise CorruptError(
            "invalid tensorstore spec: missing kvstore or metadata", uri=uri, path=render(path)
        )
    driver = kvstore.get("driver")
    if not isinstance(driver, str) or driver not in _KVSTORES:
        raise HostileError(
            f"tensorstore spec with forbidden driver {driver!r}",
            uri=uri,
            path=render(path),
            cure="do not use this checkpoint; T5X writes only file, gfile and gcs",
        )
    transform, shape = spec.get("transform"), spec["metadata"].get("shape")
    if transform is not None and not (isinstance(transform, dict) and _is_whole(transform, shape)):
        raise UnsupportedError("unsupported tensorstore spec: a view of an array", uri=uri, path=render(path))
    name = kvstore.get("path") or spec.get("path")
    if not isinstance(name, str):
        raise CorruptError("invalid tensorstore spec: missing path", uri=uri, path=render(path))
    return ArrayReference(_checked_name(name, path, uri), spec, old_path="path" not in kvstore)


def _checked_name(name: str, path: KeyPath, uri: str) -> str:
    """The folder of an array; a name that points outside is refused."""
    parts = name.rstrip("/").split("/")
    if name.startswith("/") or "\\" in name or "\0" in name or any(part in ("..", ".", "") for part in parts):
        raise HostileError(
            f"a path in the data points outside its folder: {name!r}",
            uri=uri,
            path=render(path),
            cure="do not use this checkpoint; it was created or altered to reach other files",
        )
    return "/".join(parts)


def _is_whole(transform: JsonObject, shape: object) -> bool:
    """Whether a transform maps every element to itself; bounds in brackets are implicit."""
    stops = transform.get("input_exclusive_max", shape)
    if not isinstance(stops, list) or not isinstance(shape, list):
        return False
    bounds = [stop[0] if isinstance(stop, list) and stop else stop for stop in stops]
    straight = [{"input_dimension": axis} for axis in range(len(shape))]
    return (
        set(transform) <= _TRANSFORM_KEYS
        and bounds == shape
        and not any(transform.get("input_inclusive_min", ()))
        and transform.get("output", straight) == straight
    )


def _plain(node: Node, path: KeyPath, uri: str) -> Any:
    """A spec as JSON values; maps that flax has made from lists become lists again."""
    if isinstance(node, Scalar):
        return node.value
    if isinstance(node, Sequence):
        return [_plain(item, path, uri) for item in node.items]
    if isinstance(node, Table):
        fields = {key: _plain(child, path, uri) for key, child in node.entries.items()}
        numbered = list(fields) == [str(number) for number in range(len(fields))]
        return list(fields.values()) if fields and numbered else fields
    raise CorruptError("invalid tensorstore spec: it contains an array", uri=uri, path=render(path))


def as_bytes(metadata: JsonObject) -> bytes:
    """Array metadata as the bytes of a file."""
    return json.dumps(metadata).encode()
