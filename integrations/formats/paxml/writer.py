"""Writes a PaxML checkpoint folder: `state/` through the Orbax writer, and the item `metadata`.

Version 1.1 is only one zarr folder for each array under PaxML's flat name: PaxML restores by the names of its own train
state, and would read a `_METADATA` there as another structure (orbax 0.5.9). Key paths that the names cannot represent
are noted in the item `metadata`, whose further keys PaxML ignores. Version 1.2 is OCDBT with Orbax's tree files,
including the msgpack tree with its placeholders.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from wherry.core.keypath import KeyPath, joined_names, render
from wherry.integrations.containers.orbax import layout as orbax
from wherry.integrations.containers.orbax.representable import chunks_of, refuse_unrepresentable
from wherry.integrations.containers.orbax.small_files import WRITTEN
from wherry.integrations.containers.orbax.step import StepWriter
from wherry.integrations.containers.orbax.writer import OrbaxWriter
from wherry.integrations.formats.paxml import metadata
from wherry.integrations.formats.paxml import names as naming
from wherry.integrations.formats.paxml.layout import COMMITTED, STATE
from wherry.integrations.formats.paxml.placeholders import placeholder_file
from wherry.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterator

    from wherry.core.manifest import Manifest
    from wherry.core.tensorspec import Region, Span
    from wherry.formats.format import Options
    from wherry.formats.reader import EncodedChunk, Extent
    from wherry.storage.location import Location

_OCDBT = "1.2"
_TYPES = (bool, int, float)


class _StateWriter(OrbaxWriter):
    """The item `state`, with PaxML's small files; PaxML restores with its own state, whose keys are plain data."""

    typed_keys = False
    kept: frozenset[str] = frozenset({orbax.STRINGS, orbax.TREE})

    def _small_files(self) -> Iterator[tuple[str, str]]:
        return (row for row in super()._small_files() if row[0] in self.kept)


class _FlatStateWriter(_StateWriter):
    """The item `state` of version 1.1, which has no tree."""

    kept = frozenset({orbax.STRINGS})


class PaxWriter(StepWriter):
    """Writes one checkpoint folder."""

    def __init__(self, staging: Location, manifest: Manifest, options: Options) -> None:
        super().__init__(staging, manifest)
        self._version: str = options["version"]
        self._flat = flat_paths(manifest, staging.uri) if self._version != _OCDBT else None
        self._placeholders = placeholder_file(manifest) if self._flat is None else b""
        inner = manifest if self._flat is None else flat_manifest(manifest, self._flat)
        kind = _StateWriter if self._flat is None else _FlatStateWriter
        self._item = kind(staging.join(STATE), inner, state_options(options))

    def grid(self, path: KeyPath) -> tuple[int, ...] | None:
        """Extents of the chunk of the tensor in the state."""
        return super().grid(self._inner(path))

    def write(self, path: KeyPath, where: Region | Span, data: memoryview) -> None:
        """Write a chunk of the state, under its name in the state."""
        super().write(self._inner(path), where, data)

    def place(self, path: KeyPath, where: Region | Span) -> int | None:
        """The offset of a chunk in its file."""
        return super().place(self._inner(path), where)

    def extents(self, path: KeyPath, where: Region | Span) -> tuple[Extent, ...] | None:
        """The byte range of a chunk."""
        return super().extents(self._inner(path), where)

    def home(self, path: KeyPath, where: Region | Span) -> Location | None:
        """The file of a chunk."""
        return super().home(self._inner(path), where)

    def encoded(self, path: KeyPath, where: Region) -> EncodedChunk | None:
        """A compressed chunk."""
        return super().encoded(self._inner(path), where)

    def stored(self, path: KeyPath, where: Region | Span) -> bool:
        """Whether a chunk is durable after a `sync`."""
        return super().stored(self._inner(path), where)

    def finish(self) -> None:
        """Write the placeholders into the state, complete it, then write the item `metadata`."""
        if self._placeholders and not self._finished:
            self._staging.join(STATE).join(orbax.MSGPACK).put(self._placeholders)
        super().finish()

    def _around(self) -> Iterator[tuple[str, bytes]]:
        item = metadata.build(float(self._version), self._manifest.tensors, self._notes())
        yield metadata.FILE, json.dumps(item).encode()
        yield COMMITTED, WRITTEN

    def _inner(self, path: KeyPath) -> KeyPath:
        return path if self._flat is None else self._flat[path]

    def _notes(self) -> dict[str, Any]:
        notes: dict[str, Any] = {"version": __version__, "kind": self._manifest.kind}
        return notes if self._flat is None else notes | flat_notes(self._manifest, self._flat)


def state_options(options: Options) -> dict[str, Any]:
    """Translate PaxML's options to those of the Orbax writer."""
    return {
        "ocdbt": options["version"] == _OCDBT,
        "zarr": "2",
        "compression": options["compression"],
        "chunks": options["chunks"],
        "data_file_size": options["data_file_size"],
    }


def prepare_grids(manifest: Manifest, options: Options) -> Manifest:
    """The manifest with the chunk grid that the writer will use.

    Raises:
        UnrepresentableError: that version cannot represent a part of the manifest.
    """
    if options["version"] == _OCDBT:
        refuse_unrepresentable(manifest, state_options(options))
        placeholder_file(manifest)
    else:
        flat = flat_manifest(manifest, flat_paths(manifest, ""))
        refuse_unrepresentable(flat, state_options(options), top=False, cure=f"pass --set version={_OCDBT}")
    specs = {
        path: replace(spec, chunks=chunks_of(spec, options["chunks"]), sharding=None)
        for path, spec in manifest.tensors.items()
    }
    return replace(manifest, tensors=specs)


def flat_paths(manifest: Manifest, uri: str) -> dict[KeyPath, KeyPath]:
    """Key path → its flat name as a path of one part, for every stored leaf.

    Raises:
        UnrepresentableError: two leaves have the same name, or a leaf has none.
    """
    leaves = [*manifest.tensors, *(path for path, value in manifest.values.items() if value is not None)]
    names = joined_names(leaves, lambda path: naming.flat_name(path, manifest.lists), uri)
    return {path: (name,) for name, path in names.items()}


def flat_manifest(manifest: Manifest, flat: dict[KeyPath, KeyPath]) -> Manifest:
    """The manifest in flat form: one folder for each name, without nodes and empties."""
    return replace(
        manifest,
        tensors={flat[path]: replace(spec, path=flat[path]) for path, spec in manifest.tensors.items()},
        values={flat[path]: value for path, value in manifest.values.items() if value is not None},
        empties={},
        lists=frozenset(),
    )


def flat_notes(manifest: Manifest, flat: dict[KeyPath, KeyPath]) -> dict[str, Any]:
    """Facts about the tree that flat names and arrays cannot represent."""
    texts = {flat[path][0] for path, value in manifest.values.items() if isinstance(value, str)}
    empties = dict(manifest.empties) | {
        path: "none" for path, value in manifest.values.items() if value is None
    }
    item = {key: value for key, value in (manifest.custom.get("item") or {}).items() if key != metadata.NOTES}
    notes: dict[str, Any] = {
        "stored": sorted(name for (name,) in flat.values() if name not in texts),
        "names": {name: render(path) for path, (name,) in flat.items() if naming.split_name(name) != path},
        "lists": sorted(render(path) for path in manifest.lists),
        "empties": {render(path): kind for path, kind in sorted(empties.items())},
        "scalars": [flat[path][0] for path, value in manifest.values.items() if isinstance(value, _TYPES)],
        "prng": {
            flat[path][0]: spec.tags["prng"]
            for path, spec in manifest.tensors.items()
            if spec.tags and "prng" in spec.tags
        },
        "axes": {
            flat[path][0]: spec.axes for path, spec in manifest.tensors.items() if spec.axes is not None
        },
        "custom": {**manifest.custom, "item": item},
    }
    return {key: value for key, value in notes.items() if value}
