"""The layout of safetensors files: one, or the shards of a Hugging Face folder.

Four-bit floats come one byte per element and are packed, so their spans begin and end at even elements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from wherry.core.keypath import KeyPath
from wherry.core.tensorspec import Span, TensorSpec
from wherry.integrations.containers.flat.reader import PACKED, pack_nibbles
from wherry.integrations.containers.safetensors import header
from wherry.target.file_map import (
    Codec,
    Coded,
    File,
    FileMap,
    Literal,
    Segment,
    SegmentRange,
    Segments,
    TensorSegments,
)


def lay_out(
    files: Mapping[str, Sequence[TensorSpec]],
    metadata: Mapping[str, str],
    index: tuple[str, Callable[[], bytes]] | None = None,
    skipped: int = 0,
) -> FileMap:
    """The files of a checkpoint.

    Args:
        files: name → the tensors of a file.
        metadata: `__metadata__` of every file.
        index: name and contents of the index, which names the other files.
        skipped: how many first parts of key paths are no part of the names in a file.

    Raises:
        UnrepresentableError: safetensors cannot hold one of the tensors.
    """
    shards = _Shards(files, metadata, skipped)
    found = [File(name, body) for name, body in zip(files, shards.bodies, strict=True)]
    if index is not None:
        found.append(File(*index))
    return FileMap(found, shards.places, codecs=shards.codecs)


class _Shards:
    """Each file is its header, then its tensors."""

    def __init__(
        self, files: Mapping[str, Sequence[TensorSpec]], metadata: Mapping[str, str], skipped: int
    ) -> None:
        self._metadata = metadata
        held = [{spec.path[skipped:]: spec for spec in specs} for specs in files.values()]
        self._specs = [header.in_order(_named_specs(specs, skipped)) for specs in files.values()]
        self.bodies: list[Segments] = []
        self.codecs: dict[KeyPath, Codec] = {}
        self._tensors = TensorSegments(self.bodies)
        for number, specs in enumerate(self._specs):
            body = Segments(partial(self._segment, number))
            self.bodies.append(body)
            body.add(len(header.build(specs, metadata)))
            for named in specs:
                spec = held[number][named.path]
                if spec.nbytes:
                    self._tensors.add(spec, number, len(body))
                body.add(header.stored_bytes(named), tensor=True)
                if spec.dtype == PACKED:
                    self.codecs[spec.path] = Codec(2, 1, partial(pack_nibbles, path=spec.name))

    def places(self, path: KeyPath, span: Span) -> Sequence[SegmentRange]:
        """See FileMap."""
        codec = self.codecs.get(path)
        if codec is not None:
            span = Span(span.start // codec.block * codec.stored, -(-span.stop // codec.block) * codec.stored)
        return self._tensors.places(path, span)

    def _segment(self, file: int, number: int) -> Segment:
        if not self.bodies[file].tensors[number]:
            return Literal(header.build(self._specs[file], self._metadata) if number == 0 else b"")
        raw = self._tensors.raw(file, number)
        codec = self.codecs.get(raw.tensor)
        return raw if codec is None else Coded(raw.tensor, codec)


def _named_specs(specs: Iterable[TensorSpec], skipped: int) -> Iterable[TensorSpec]:
    """Tensors with the key paths that are their names in a file."""
    return [replace(spec, path=spec.path[skipped:]) for spec in specs] if skipped else specs


def kept_metadata(custom: Mapping[str, object], metadata_format: str) -> dict[str, str]:
    """The `__metadata__` of a target: the source's own strings, and the framework name that readers require.

    The shard descriptions of torch's HuggingFaceStorageWriter are left out: they say how its files were sharded,
    and would be wrong for ours.
    """
    strings = {key: value for key, value in custom.items() if isinstance(value, str)}
    kept = {key: value for key, value in strings.items() if not key.startswith("DCP_")}
    return {**kept, "format": metadata_format}
