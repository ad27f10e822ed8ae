"""inspect: list the contents of a checkpoint, with hashes on request; and record its identity in a sidecar.

The sidecar that `wherry inspect --digest --write` writes has manifest and digests but no receipt, as nothing was
converted. With it the checkpoint can be verified, fetched, signed, registered and promoted like any other. No file of
the checkpoint is changed, and an existing sidecar is never replaced.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import field
from functools import partial
from pathlib import Path
from typing import Any

from wherry.config.settings import digest_choice
from wherry.converter.references import reference
from wherry.core.detection import Detection
from wherry.core.digest import BLAKE3
from wherry.core.keypath import KeyPath, parse, render
from wherry.core.lazy_dataclass import dataclass
from wherry.core.manifest import Manifest
from wherry.core.progress import OnProgress
from wherry.core.request import SourceRequest
from wherry.core.units import DEFAULT_MEMORY, parse_budget
from wherry.cures import Argument, Command, Cure
from wherry.errors import IncompleteError, TargetExistsError, UsageError, storage_error
from wherry.formats.checkpoint import Checkpoint, Pin, present_fingerprint, settled_checkpoint, take_pin
from wherry.formats.companions import digest_companion
from wherry.formats.recorded_files import recorded_files
from wherry.ledger.resolve import open_checkpoint, proved_digest
from wherry.mover.hashing import Hashes, flat_hashes, hash_checkpoint
from wherry.prove.statistics import TensorStatistics, constants_notes, is_match, matching, statistics
from wherry.store.folders import create_file
from wherry.store.local_store import locate
from wherry.store.location import Location
from wherry.store.sidecar import Sidecar, encode, read_sidecar, sidecar_location


@dataclass(frozen=True, slots=True)
class Inspection:
    """The contents of a checkpoint.

    Attributes:
        detection: its detected format.
        manifest: its contents, with tensor digests if they were requested.
        sha256: key path → flat SHA-256 of canonical bytes, if it was requested.
        statistics: key path → statistics of the values, if they were requested.
        pattern: the shell pattern for the key paths that are listed; None lists all.
        warnings: what digests and statistics say of tensors that hold only zeros, one value only, or NaN.
    """

    detection: Detection
    manifest: Manifest
    sha256: Mapping[KeyPath, str] = field(default_factory=dict[KeyPath, str])
    statistics: Mapping[KeyPath, TensorStatistics] = field(default_factory=dict[KeyPath, "TensorStatistics"])
    pattern: str | None = None
    warnings: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The output of `inspect --json`."""
        data = self.manifest.to_json()
        tensors = [self._row(row) for row in data["tensors"] if is_match(row["path"], self.pattern)]
        warnings = {"warnings": list(self.warnings)} if self.warnings else {}
        return {"detection": self.detection.to_json(), **data, "tensors": tensors, **warnings}

    def _row(self, row: dict[str, Any]) -> dict[str, Any]:
        path = parse(row["path"])
        counted = {"statistics": self.statistics[path].to_json()} if path in self.statistics else {}
        return {**row, "sha256": self.sha256.get(path), **counted}


def inspect(
    uri: str | os.PathLike[str] | SourceRequest,
    *,
    sha256: bool = False,
    digest: bool = False,
    write: bool = False,
    stats: bool = False,
    filter: str | None = None,
    memory: str | int = DEFAULT_MEMORY,
    progress: OnProgress | None = None,
    format: str | None = None,
    step: int | None = None,
    item: str | None = None,
) -> Inspection:
    """List a checkpoint's contents.

    Args:
        uri: a checkpoint, step or run, or a request for one.
        sha256: also hash each tensor's canonical bytes as a whole.
        digest: also compute the tensor digests.
        write: also write them to a sidecar next to it, so that it can be registered; implies `digest`.
        stats: also compute minimum, maximum, mean and the number of NaNs, infinities and zeros of each tensor.
        filter: list only tensors whose printed key path matches this shell pattern.
        memory: budget for the hashing.
        progress: called a few times a second while hashing.
        format, step, item: which checkpoint; a request states them itself.

    Raises:
        TargetExistsError: with `write`, if it has a sidecar with different contents.
        NotFoundError: the filter matches no tensor.
        UsageError: `write` with a filter.
        WherryError: it cannot be opened, or its bytes cannot be read.
    """
    source = uri if isinstance(uri, SourceRequest) else SourceRequest(os.fspath(uri), format, step, item)
    if write and filter is not None:
        raise UsageError(
            "a sidecar describes all tensors",
            cure=Cure("leave out {}, or {}", Argument("filter"), Argument("write")),
        )
    opened = partial(open_checkpoint, source)
    with settled_checkpoint(opened) if write else opened() as checkpoint:
        budget, pin = parse_budget(memory), take_pin(checkpoint) if write else None
        paths = None if filter is None else matching(checkpoint, filter)
        hashes = Hashes(BLAKE3)
        if digest or write:  # by the algorithm of an existing sidecar, so that they can be compared with it
            there = read_sidecar(checkpoint.location)
            algorithm = digest_choice().algorithm if there is None else there.algorithm
            del there
            hashes = hash_checkpoint(checkpoint, algorithm, memory=budget, progress=progress, paths=paths)
        flat = flat_hashes(checkpoint, memory=budget, progress=progress, paths=paths) if sha256 else {}
        counted = statistics(checkpoint, memory=budget, progress=progress, paths=paths) if stats else {}
        tensors = checkpoint.manifest.tensors
        warnings = tuple(constants_notes(counted) if counted else hashes.notes(tensors))
        manifest = checkpoint.manifest.with_digests(hashes.digests)
        if pin is not None:
            manifest = take_stock(checkpoint, hashes, pin)
        return Inspection(checkpoint.detection, manifest, flat, counted, filter, warnings)


def take_stock(checkpoint: Checkpoint, hashes: Hashes, pin: Pin) -> Manifest:
    """Write the sidecar of a checkpoint; do nothing if it has one with the same contents.

    Args:
        checkpoint: opened.
        hashes: of all its tensors.
        pin: the state of its files before they were read.

    Returns:
        The manifest that was written, companion digests included.

    Raises:
        TargetExistsError: it has a sidecar with different contents.
        MismatchError: its files changed while they were read.
        IncompleteError: a tensor could not be digested.
        StorageError: the sidecar cannot be written there.
    """
    found, uri = checkpoint.detection, checkpoint.uri
    lacking = next((path for path in checkpoint.manifest.tensors if path not in hashes.digests), None)
    if lacking is not None:
        raise IncompleteError("the tensor has no digest", uri=uri, path=render(lacking))
    companions = tuple(digest_companion(checkpoint, one) for one in checkpoint.manifest.companions)
    mark, files = present_fingerprint(checkpoint), recorded_files(checkpoint.reader, locate(uri))
    pin.require_unchanged(checkpoint)  # so the fingerprint is that of the files that were read
    manifest = checkpoint.manifest.with_digests(hashes.digests, companions)
    node = reference(found.uri, found.format, found.format_version, manifest, mark, hashes.algorithm)
    location = locate(found.uri)
    there = read_sidecar(location)
    if there is None:
        _put_new(sidecar_location(location), encode(Sidecar(manifest, node, None, hashes.leaves, files)))
    elif proved_digest(there) != node.checkpoint_digest:
        raise TargetExistsError(
            "the existing sidecar describes another checkpoint",
            uri=uri,
            cure=Cure(
                "run {} to see what changed; remove the sidecar if it is out of date",
                Command("verify", Argument("level", "digest")),
            ),
        )
    return manifest


def _put_new(place: Location, data: bytes) -> None:
    """Write a small file atomically and durably, without replacing an existing one."""
    try:
        if not place.store.capabilities.local:
            place.store.put(place.path, data, create_only=True)
            return
        create_file(Path(place.path), data)
    except FileExistsError as error:
        raise TargetExistsError(
            "another process wrote the sidecar at the same time", uri=place.uri, cure="run the command again"
        ) from error
    except OSError as error:
        raise storage_error(error, place.uri) from error
