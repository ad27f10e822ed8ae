"""References: a checkpoint as one node of the lineage, from its manifest and digests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from wherry.core.digest import weights_digest
from wherry.core.keypath import KeyPath
from wherry.core.manifest import Companion, Manifest, checkpoint_digest
from wherry.core.receipt import CheckpointRef
from wherry.errors import MismatchError
from wherry.formats.checkpoint import Checkpoint, JoinedPart, present_fingerprint
from wherry.formats.companions import digest_companion
from wherry.mover.hashing import DigestsWhenNeeded, Hashes, compare, hash_checkpoint
from wherry.store.sidecar import Sidecar, read_sidecar

T = TypeVar("T")


def reference(
    uri: str, name: str, version: str | None, manifest: Manifest, mark: str, algorithm: str
) -> CheckpointRef:
    """The node of a checkpoint.

    Args:
        uri: its URI.
        name: its format.
        version: the format's version of the layout.
        manifest: its contents, tensor and companion digests included.
        mark: its fingerprint.
        algorithm: of its tensors' digests.
    """
    digests = manifest.digests
    known = isinstance(digests, DigestsWhenNeeded)
    weights = digests.weights if known else weights_digest(digests, algorithm)
    return CheckpointRef(
        uri=uri,
        format=name,
        format_version=version,
        checkpoint_digest=checkpoint_digest(manifest, name, version, algorithm, weights),
        weights_digest=weights,
        fingerprint=mark,
        kind=manifest.kind,
        step=manifest.step,
        tensors=len(manifest.tensors),
        parameters=manifest.parameters,
        nbytes=manifest.nbytes,
    )


def source_references(
    checkpoint: Checkpoint,
    recorded: Sidecar | None,
    digests: Mapping[KeyPath, str],
    companions: tuple[Companion, ...],
    algorithm: str,
    memory: int,
    folder: Path | None = None,
) -> tuple[CheckpointRef, ...]:
    """The node of the source, or of each of several that were read as one; see `source_reference`."""
    if not checkpoint.parts:
        return (source_reference(checkpoint, recorded, digests, companions, algorithm, memory, folder),)
    return tuple(
        source_reference(
            part.checkpoint,
            read_sidecar(part.checkpoint.location),
            below(digests, part.prefix),
            (),
            algorithm,
            memory,
            folder,
        )
        for part in checkpoint.parts
    )


def below(found: Mapping[KeyPath, T], prefix: KeyPath) -> dict[KeyPath, T]:
    """The entries of one of several checkpoints, by its own key paths."""
    return {path[len(prefix) :]: one for path, one in found.items() if path[: len(prefix)] == prefix}


def source_reference(
    checkpoint: Checkpoint,
    recorded: Sidecar | None,
    digests: Mapping[KeyPath, str],
    companions: tuple[Companion, ...],
    algorithm: str,
    memory: int,
    folder: Path | None = None,
) -> CheckpointRef:
    """The node of the checkpoint that was converted.

    Its tensor digests are known from the conversion's pass; tensors that were not carried are read here, as the
    identity covers them too. Missing tensors (when only parameters were requested) are not part of it. If wherry wrote
    the source, its sidecar contains the node.

    Args:
        checkpoint: the source.
        recorded: its sidecar.
        digests: source key path → tensor digest, of the carried tensors.
        companions: its companion files that were copied as they are, with their digests.
        algorithm: of the digests.
        memory: budget for reading tensors that were not carried.
        folder: for spill files; a temporary folder by default.
    """
    mark = present_fingerprint(checkpoint)
    detection, manifest = checkpoint.detection, checkpoint.manifest
    if recorded is not None:
        return replace(recorded.checkpoint, uri=detection.uri, fingerprint=mark)
    gone = {piece.path for piece in checkpoint.reader.absent()}
    if gone:
        manifest = replace(manifest, tensors={p: s for p, s in manifest.tensors.items() if p not in gone})
    rest = [path for path in manifest.tensors if path not in digests]
    others = (
        hash_checkpoint(checkpoint, algorithm, memory=memory, paths=rest, folder=folder).digests
        if rest
        else {}
    )
    known = {companion.name: companion for companion in companions}
    digested = tuple(known.get(c.name) or digest_companion(checkpoint, c) for c in manifest.companions)
    full = manifest.with_digests({**digests, **others} if others else digests, digested)
    return reference(detection.uri, detection.format, detection.format_version, full, mark, algorithm)


def agree_with_source(checkpoint: Checkpoint, recorded: Sidecar, hashes: Hashes) -> None:
    """Compare the digests of the source, by its sidecar's algorithm, with its sidecar.

    Raises:
        MismatchError: they differ; the tensor is named.
    """
    known = recorded.manifest.digests
    failed = compare(hashes, {path: known[path] for path in hashes.digests if path in known}, recorded.leaves)
    if failed:
        raise MismatchError(
            f"the source has changed since it was recorded: {failed[0].reason}",
            uri=checkpoint.uri,
            path=failed[0].path,
            cure="restore the source, or delete its sidecar if the change was intended",
        )


def agree_with_sources(
    checkpoint: Checkpoint, recorded: Mapping[KeyPath, Sidecar], hashes: Mapping[str, Hashes]
) -> None:
    """Compare the digests of each of several checkpoints, which were read as one, with its own sidecar.

    Args:
        checkpoint: the source.
        recorded: prefix of a part → its sidecar; the source itself has no prefix.
        hashes: the digests of all their tensors, by algorithm.
    """
    parts = checkpoint.parts or (JoinedPart((), checkpoint),)
    for prefix, one in parts:
        if prefix in recorded:
            found = hashes[recorded[prefix].algorithm]
            part_hashes = Hashes(found.algorithm, below(found.digests, prefix), below(found.leaves, prefix))
            agree_with_source(one, recorded[prefix], part_hashes)


def recorded_of(checkpoint: Checkpoint) -> dict[KeyPath, Sidecar]:
    """The sidecars of a source, or of each of several that are read as one, by the prefix of each."""
    parts = checkpoint.parts or (JoinedPart((), checkpoint),)
    found = {prefix: read_sidecar(one.location) for prefix, one in parts}
    return {prefix: sidecar for prefix, sidecar in found.items() if sidecar is not None}
