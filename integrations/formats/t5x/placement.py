"""What a legacy T5X checkpoint can hold, and how a tree is laid over its msgpack file and its arrays.

Facts: T5X stores a leaf in the msgpack file where it has no partition spec (step, small optimizer slots), else as a
zarr array in the folder that is named by its path, `/` and `.` alike turned into `.`. Readers, T5X too, accept any
split. A spec of an array is what T5X writes with tensorstore from 0.1.14 on; `.zarray` repeats it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from wherry.core.keypath import KeyPath, joined_names, render
from wherry.core.manifest import Manifest
from wherry.errors import UnrepresentableError
from wherry.integrations.containers.msgpack.heads import packed
from wherry.integrations.containers.orbax.layout import reserved
from wherry.integrations.containers.orbax.representable import chunks_of
from wherry.integrations.containers.zarr import metadata as zarr
from wherry.integrations.containers.zarr import new
from wherry.integrations.formats.t5x import layout

if TYPE_CHECKING:
    from wherry.core.tensorspec import TensorSpec
    from wherry.formats.format import Options

_MOST_INLINE = 64 << 10
_UNFINISHED = ".__lock"  # tensorstore's name of a file that it has not renamed yet
_LONGEST_NAME = 255  # bytes of a file name


def prepared(manifest: Manifest, options: Options) -> Manifest:
    """The manifest with a chunk grid for every tensor that will be an array of its own, and none for the others.

    Raises:
        UnrepresentableError: something in it cannot be held.
    """
    specs = {
        path: replace(
            spec,
            chunks=None if _inline(spec, options["inline"]) else chunks_of(spec, options["chunks"]),
            sharding=None,
        )
        for path, spec in manifest.tensors.items()
    }
    whole = replace(manifest, tensors=specs)
    array_names(whole)
    return whole


def array_names(manifest: Manifest, uri: str = "") -> dict[KeyPath, str]:
    """The folder of each tensor that is an array of its own.

    Raises:
        UnrepresentableError: two tensors would share a folder, or a name cannot be one.
    """
    stored = [path for path, spec in manifest.tensors.items() if spec.chunks is not None]
    names = joined_names(stored, folder_name, uri)
    taken = {companion.name.split("/")[0] for companion in manifest.companions}
    for companion in sorted(taken & {layout.MSGPACK, layout.PINNED}):
        raise UnrepresentableError(
            f"{companion!r} is a name of T5X's own", uri=uri, cure="leave companions behind"
        )
    for name, path in names.items():
        if name in taken or _unfit(name):
            raise UnrepresentableError(
                f"{name[:60]!r} cannot be a folder of its own",
                uri=uri,
                path=render(path),
                cure="write it with --set inline=all",
            )
        if manifest.tensors[path].dtype not in zarr.STORABLE:
            raise UnrepresentableError(
                f"zarr has no dtype {manifest.tensors[path].dtype}", uri=uri, path=render(path)
            )
    return {path: name for name, path in names.items()}


def folder_name(path: KeyPath) -> str:
    """The folder of a tensor, as T5X names it."""
    return "/".join(path).replace("/", ".")


def enveloped(manifest: Manifest, uri: str) -> Manifest:
    """The leaves that go into the msgpack file, below its envelope."""
    head = (layout.OPTIMIZER,)
    inline = {
        (*head, *path): replace(spec, path=(*head, *path))
        for path, spec in manifest.tensors.items()
        if spec.chunks is None
    }
    if manifest.tensors.keys() & manifest.values.keys():
        raise UnrepresentableError("a leaf that is both a tensor and a value", uri=uri)
    return Manifest(
        tensors=inline,
        values={(*head, *path): value for path, value in manifest.values.items()},
        empties={(*head, *path): kind for path, kind in manifest.empties.items()},
        lists=frozenset((*head, *path) for path in manifest.lists),
    )


def pointers(manifest: Manifest, names: dict[KeyPath, str], compression: Any) -> dict[KeyPath, bytes]:
    """The version, and the specs of the arrays, as msgpack."""
    return {
        (layout.VERSION,): packed(layout.NEWEST_VERSION),
        **{
            (layout.OPTIMIZER, *path): packed(_spec(manifest.tensors[path], name, compression))
            for path, name in names.items()
        },
    }


def _spec(spec: TensorSpec, name: str, compression: Any) -> zarr.JsonObject:
    metadata = new.build(spec.dtype, spec.shape, spec.chunks or (), version=2, compression=compression)
    return {
        "driver": "zarr",
        "dtype": spec.dtype,
        "kvstore": {"driver": "file", "path": f"{name}/"},
        "metadata": {key: metadata[key] for key in ("chunks", "compressor", "shape")},
    }


def _inline(spec: TensorSpec, option: str) -> bool:
    """Whether a tensor goes into the msgpack file; without elements it has no chunk that zarr could hold."""
    if spec.size == 0 or option == "all":
        return True
    small = spec.path[:1] != (layout.TARGET,) and spec.nbytes <= _MOST_INLINE
    return option == "auto" and small


def _unfit(name: str) -> bool:
    odd = name in ("", ".", "..") or "\0" in name or name.endswith(_UNFINISHED)
    return (
        odd or reserved(name) or name == layout.PINNED or len(name.encode("utf-8", "replace")) > _LONGEST_NAME
    )
