"""Checks what Orbax can hold, and chooses chunk grids, when a conversion is planned and before any byte moves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wherry.core.keypath import KeyPath, joined_names, render
from wherry.core.tensorspec import GRID, TensorSpec
from wherry.errors import UnrepresentableError, UsageError
from wherry.integrations.containers.orbax import partition
from wherry.integrations.containers.orbax.layout import is_reserved
from wherry.integrations.containers.orbax.tree import stored_name
from wherry.integrations.containers.zarr import metadata, new
from wherry.text.numbers import decimal_number

if TYPE_CHECKING:
    from wherry.core.manifest import Manifest
    from wherry.formats.format import Options

LOCK_SUFFIX = ".__lock"  # tensorstore ignores such files, as temporary files that it has not renamed yet
_INT64 = range(-(1 << 63), 1 << 63)
_WHOLE_MIB = 1 << 20
_LONGEST_NAME = 255  # bytes of a file name
_SHOWN = 60  # characters of a name in an error
# Endings of the files by which folders of other systems are recognised.
_WEIGHTS = (".safetensors", ".index.json", ".bin", ".msgpack", ".pth", ".distcp")


def refuse_unrepresentable(
    manifest: Manifest,
    options: Options,
    uri: str = "",
    *,
    top: bool = True,
    cure: str = "omit --set ocdbt=false",
) -> None:
    """Refuse a manifest with leaves that Orbax cannot hold or would lose.

    Args:
        manifest: what will be written.
        options: of the Orbax writer.
        uri: the target, for errors.
        top: whether arrays may lie at the top of the checkpoint, where files of other systems would be.
        cure: what to do where a key path cannot be a folder.

    Raises:
        UnrepresentableError: a dtype or value, a tensor without elements, or two leaves with the same name.
        HostileError: a key path would leave the folder.
    """
    leaves = [*manifest.tensors, *(path for path, value in manifest.values.items() if value is not None)]
    names = joined_names(leaves, stored_name, uri)
    for spec in manifest.tensors.values():
        if spec.dtype not in metadata.STORABLE:
            raise UnrepresentableError(
                f"Orbax does not support dtype {spec.dtype}",
                uri=uri,
                path=spec.name,
                cure="pass --dtype to cast it",
            )
        if spec.size == 0:
            raise UnrepresentableError(
                "Orbax does not support tensors without elements", uri=uri, path=spec.name
            )
    for path, value in manifest.values.items():
        if isinstance(value, int) and value not in _INT64:
            raise UnrepresentableError(f"{value} exceeds 64 bits", uri=uri, path=render(path))
    if not options["ocdbt"]:
        _refuse_file_names(names, uri, top=top, cure=cure)


def _refuse_file_names(names: dict[str, KeyPath], uri: str, *, top: bool, cure: str) -> None:
    """Without OCDBT a name is a folder: it must stay inside, fit a file system, and not contain another array.

    At the top it must be no file of Orbax, nor named like weights of another system, as which the folder would then be
    detected. A single leaf with the empty name is stored in the item folder itself.
    """
    for name, path in names.items():
        parts = name.split("/")
        inside_another = any("/".join(parts[:depth]) in names for depth in range(1, len(parts)))
        odd = any(map(_unfit, parts)) or (top and parts[0].endswith(_WEIGHTS))
        alone = not name and len(names) == 1
        if not alone and (odd or inside_another or is_reserved(parts[0])):
            raise UnrepresentableError(
                f"{name[:_SHOWN]!r} cannot be the folder of an array", uri=uri, path=render(path), cure=cure
            )


def _unfit(part: str) -> bool:
    """Whether a part of a name cannot be the name of a folder."""
    long = len(part.encode(errors="surrogatepass")) > _LONGEST_NAME
    return part in ("", ".", "..") or part.endswith(LOCK_SUFFIX) or "\0" in part or long


def chunks_of(spec: TensorSpec, option: str) -> tuple[int, ...]:
    """The chunk grid of a tensor under the option `chunks`; see `partition`.

    Raises:
        UsageError: the option is invalid, or does not fit the tensor.
    """
    hinted = (spec.tags or {}).get(GRID)
    if option in ("auto", new.IN_STORE) and hinted is not None:
        return tuple(map(int, hinted.split("x")))
    if option == "auto":
        return new.auto_chunks(spec.shape, spec.dtype)
    if option == new.IN_STORE:
        return new.chunks_in_store(spec.shape, spec.dtype)
    if option == "whole":
        return tuple(max(extent, 1) for extent in spec.shape)
    if partition.matches(option):
        return partition.chunks_for(spec, option)
    mib = decimal_number(option)
    if not mib:
        raise UsageError(
            f"invalid value for chunks: {option!r}",
            cure="pass auto, store, whole, a number of MiB, parts along each axis (8x1), or mesh:…;spec:… for a mesh",
        )
    return new.auto_chunks(spec.shape, spec.dtype, mib * _WHOLE_MIB)
