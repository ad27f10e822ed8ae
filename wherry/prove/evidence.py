"""evidence: every byte of a checkpoint is read once, and compared with what its sidecar records.

This is the one comparison of stored bytes with a record: `verify` makes it of a checkpoint, `audit` of each place in
the ledger, and `fetch` of a copy before its commit. What nobody recorded is read all the same: the checksums of its
container are compared on the way, and its digests are computed, so that they can be compared with the ledger's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from wherry.core.keypath import KeyPath, render
from wherry.core.lazy_dataclass import dataclass
from wherry.core.manifest import Manifest
from wherry.core.progress import OnProgress
from wherry.core.request import SourceRequest
from wherry.errors import NotFoundError
from wherry.formats.checkpoint import Checkpoint
from wherry.formats.companions import digest_companion
from wherry.mover.hashing import Failure, Hashes, hash_checkpoint
from wherry.mover.hashing import compare as compare_digests
from wherry.prove.records import contradictions
from wherry.store.sidecar import Sidecar
from wherry.workers import THREADS
from wherry.workers.hash_on import ReadOrder, hash_on, source_of
from wherry.workers.unit import UNIT_BYTES


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """How a checkpoint is read.

    Attributes:
        memory: the budget in bytes, of each worker.
        progress: called a few times a second.
        on: the carrier whose workers read it; see `wherry.workers.engines`.
        unit_bytes: what one worker reads at a time.
        source: the checkpoint, as workers open it; needed if `on` is not `threads`.
    """

    memory: int
    progress: OnProgress | None = None
    on: str = THREADS
    unit_bytes: int = UNIT_BYTES
    source: SourceRequest | None = None


@dataclass(frozen=True, slots=True)
class BytesEvidence:
    """The results of reading every byte of a checkpoint.

    Attributes:
        hashes: digests and leaves of its tensors, as they were read.
        manifest: what it holds, with digests: by its sidecar, from which it differs by `failed`; without a sidecar, as
            it was read.
        failed: the differences of what was read from the sidecar, and what the sidecar itself contradicts.
    """

    hashes: Hashes
    manifest: Manifest
    failed: tuple[Failure, ...]


def compare(
    checkpoint: Checkpoint,
    sidecar: Sidecar | None,
    algorithm: str,
    options: ReadOptions,
    *,
    without: Collection[KeyPath] = (),
) -> BytesEvidence:
    """Read every byte of a checkpoint, and compare it with its sidecar.

    Args:
        checkpoint: the opened checkpoint.
        sidecar: its record, if it has one.
        algorithm: of the digests; that of the sidecar, if there is one.
        options: budget, progress, and what reads.
        without: tensors of which parts are missing; only without a sidecar.

    Raises:
        CorruptError: a checksum of its container differs.
        WherryError: it cannot be read.
    """
    assert sidecar is None or (algorithm == sidecar.algorithm and not without)
    manifest = checkpoint.manifest
    if without:
        held = {path: spec for path, spec in manifest.tensors.items() if path not in without}
        manifest = replace(manifest, tensors=held)
        hashes = hash_checkpoint(
            checkpoint, algorithm, memory=options.memory, progress=options.progress, paths=held
        )
    else:
        hashes = hash_tensors(checkpoint, algorithm, options)
    if sidecar is None:
        companions = tuple(digest_companion(checkpoint, one) for one in manifest.companions)
        full = manifest.with_digests(hashes.digests, companions)
        return BytesEvidence(hashes, full, ())
    failed = (
        *contradictions(sidecar),
        *tensor_differences(hashes, sidecar.manifest.digests, sidecar.leaves),
        *_altered_fields(sidecar, hashes, manifest),
        *altered_companions(checkpoint, sidecar),
    )
    return BytesEvidence(hashes, sidecar.manifest, failed)


def hash_tensors(checkpoint: Checkpoint, algorithm: str, options: ReadOptions) -> Hashes:
    """The digests of all tensors, read by this process or by the workers of a carrier."""
    if options.on == THREADS or options.source is None:
        return hash_checkpoint(checkpoint, algorithm, memory=options.memory, progress=options.progress)
    order = ReadOrder(source_of(options.source), options.unit_bytes, algorithm, options.memory)
    return hash_on(checkpoint, order, options.on, progress=options.progress)


def tensor_differences(
    found: Hashes, expected: Mapping[KeyPath, str], leaves: Mapping[KeyPath, tuple[bytes, ...]]
) -> Iterator[Failure]:
    """The tensors that differ from all that are expected: other bytes, missing ones, and unexpected ones."""
    yield from compare_digests(found, expected, leaves)
    for path in sorted(set(found.digests) - set(expected)):
        yield Failure(render(path), "unexpected tensor")


def _altered_fields(sidecar: Sidecar, found: Hashes, manifest: Manifest) -> Iterator[Failure]:
    """The fields of tensors, besides their digests, in which a sidecar differs from the checkpoint."""
    recorded = sidecar.manifest.digests
    for path, spec in sorted(sidecar.manifest.tensors.items()):
        seen = manifest.tensors.get(path)
        if seen is None and path not in recorded:  # the comparison of digests does not know it
            yield Failure(render(path), "missing tensor")
        elif seen is not None and (spec.shape, spec.dtype) != (seen.shape, seen.dtype):
            has, says = (f"{one.dtype}{list(one.shape)}" for one in (seen, spec))
            yield Failure(render(path), f"the sidecar was altered: it states {says}, the tensor is {has}")
    for path, leaves in sorted(sidecar.leaves.items()):
        if path not in recorded:
            yield Failure(render(path), "the sidecar was altered: it has hashes of leaves of no tensor")
        elif found.digests.get(path) == recorded[path] and found.leaves.get(path, leaves) != leaves:
            yield Failure(
                render(path), "the sidecar was altered: its hashes of leaves are not those of its digest"
            )


def altered_companions(checkpoint: Checkpoint, sidecar: Sidecar) -> Iterator[Failure]:
    """The companion files whose bytes differ from their record.

    Raises:
        HostileError, StorageError: one cannot be read.
    """
    sizes = {one.name: one.size for one in checkpoint.manifest.companions}
    for companion in sidecar.manifest.companions:
        size = sizes.get(companion.name, companion.size)
        try:
            found = digest_companion(checkpoint, companion)
        except NotFoundError:
            yield Failure(companion.name, "companion file not found")
            continue
        if found.sha256 != companion.sha256:
            yield Failure(companion.name, "digest mismatch in the companion file")
        elif size != companion.size:
            what = f"the sidecar was altered: it states {companion.size} bytes, the file has {size}"
            yield Failure(companion.name, what)
