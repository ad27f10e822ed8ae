"""The contract of writers: the guarantees of `wherry.mover.map_writer.MapWriter`, for any format that can be written.

Random order, several threads, parts written twice, syncs in between, `finish` twice, a run abandoned and resumed by
another writer: the result must hold exactly the sample, and nothing may be detected as a checkpoint before `finish`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from wherry.core.digest import BLAKE3
from wherry.core.manifest import checkpoint_digest
from wherry.core.request import SourceRequest
from wherry.formats.checkpoint import Checkpoint
from wherry.formats.companions import MemoryFiles
from wherry.formats.detect import detect_source, examine
from wherry.formats.format import Glimpse, Opened
from wherry.mover.hashing import hash_checkpoint
from wherry.mover.map_writer import MapWriter, writer_of
from wherry.store.local_store import locate, make_folder
from wherry.store.location import Location
from wherry.testing.readers import check_reader
from wherry.testing.samples import Piece, Sample, pieces

THREADS = 4
_MEMORY = 64 << 20
_SYNC_EVERY = 16
_TWICE = 0.25


def staging_place(folder: Path, name: str = "out") -> Location:
    """The location where the engine would stage a target of this name, in an existing staging area."""
    area = folder / f".wherry-{name}.0123abcd-89abcdef"
    area.mkdir(mode=0o700, exist_ok=True)
    return locate(area / name)


def start(sample: Sample, place: Location) -> MapWriter:
    """A writer on a staging place as the engine creates it: its companions already exist."""
    for name, data in sample.companions.items() if sample.row.holds.companions else ():
        member = place.join(f"{sample.row.companion_folder}{name}")
        make_folder(member.parent)
        member.put(data)
    companion = partial(Location, MemoryFiles(files=sample.companions))
    return writer_of(sample.row, place, sample.manifest, sample.options, companion)


def make(sample: Sample, place: Location) -> None:
    """Write a whole sample, without faults."""
    writer = start(sample, place)
    write_pieces(writer, pieces(sample))
    writer.finish()
    writer.close()


def write_pieces(writer: MapWriter, parts: Sequence[Piece]) -> None:
    """Write parts from several threads, with a sync after every few."""

    def one(numbered: tuple[int, Piece]) -> None:
        number, piece = numbered
        writer.write(piece.path, piece.where, memoryview(piece.data))
        if number % _SYNC_EVERY == _SYNC_EVERY - 1:
            writer.sync()

    with ThreadPoolExecutor(THREADS) as executor:
        list(executor.map(one, enumerate(parts)))


def repeat_parts(parts: Sequence[Piece], seed: int = 0) -> list[Piece]:
    """Parts in random order, a quarter of them twice."""
    generator = random.Random(seed)  # noqa: S311
    some = [*parts, *(piece for piece in parts if generator.random() < _TWICE)]
    generator.shuffle(some)
    return some


def check_writer(sample: Sample, folder: Path, seed: int = 0) -> str:
    """Write a sample in random order, some parts twice, and compare all of it.

    Args:
        sample: the sample.
        folder: an empty folder to work in.
        seed: of the cuts and of the order.

    Returns:
        The checkpoint digest of the written checkpoint.

    Raises:
        AssertionError: the contract was violated.
    """
    place = staging_place(folder)
    writer = start(sample, place)
    check_grids(sample, writer)
    parts = pieces(sample, seed)
    write_pieces(writer, repeat_parts(parts, seed))
    check_unfinished(sample, place)
    finish_twice(writer)
    return check_written(sample, place, seed)


def check_kill_between(
    sample: Sample, folder: Path, seed: int = 0, wreck: Callable[[Location], None] | None = None
) -> str:
    """Abandon a writer after a sync, resume with a new one that writes only the rest, and compare.

    Parts that were written after the last sync are written again, as in a resumed run.

    Args:
        sample: the sample.
        folder: an empty folder to work in.
        seed: of the cuts, the order and the moment.
        wreck: called with the place between the two writers, to simulate a harsher crash.

    Returns:
        The checkpoint digest of the written checkpoint.

    Raises:
        AssertionError: the contract was violated.
    """
    place = staging_place(folder)
    parts = pieces(sample, seed)
    synced, late = len(parts) // 2, len(parts) * 3 // 4
    first = start(sample, place)
    write_pieces(first, parts[:synced])
    first.sync()
    for piece in parts[synced:late]:
        first.write(piece.path, piece.where, memoryview(piece.data))
    first.close()
    check_unfinished(sample, place)
    if wreck is not None:
        wreck(place)
    second = start(sample, place)
    write_pieces(second, parts[synced:])
    finish_twice(second)
    return check_written(sample, place, seed)


def check_kill_after_finish(sample: Sample, folder: Path, seed: int = 0) -> str:
    """Resume a place that was finished but not committed: nothing is left to write, and `finish` must succeed.

    Returns:
        The checkpoint digest of the written checkpoint.

    Raises:
        AssertionError: the contract was violated.
    """
    place = staging_place(folder)
    first = start(sample, place)
    write_pieces(first, pieces(sample, seed))
    first.finish()
    first.close()
    finish_twice(start(sample, place))
    return check_written(sample, place, seed)


def check_grids(sample: Sample, writer: MapWriter) -> None:
    """The writer's grid of each tensor is the one that `prepare` returned."""
    for path, spec in sample.manifest.tensors.items():
        assert writer.grid(path) == spec.chunks, (
            f"{spec.name}: expected grid {spec.chunks}, got {writer.grid(path)}"
        )


def check_unfinished(sample: Sample, place: Location) -> None:
    """A staged checkpoint is not detected as complete.

    The staging name alone must make `detect` refuse it. If a format's checkpoint is below that name, in a step
    folder, the name does not protect it, so the format itself must not report it as complete.
    """
    found = detect_source(SourceRequest(place.uri))
    assert found.verdict != "ok", f"{place.name} is detected as {found.format} before it is finished"
    if sample.row.step_folder is not None and "/" in sample.row.step_folder(1):
        claim = sample.row.detect(Glimpse(locate(place.uri)))
        if claim is not None:
            verdict = examine(locate(place.uri), claim).verdict
            assert verdict != "ok", f"{sample.row.name} reports it as complete before it is finished"


def finish_twice(writer: MapWriter) -> None:
    """Finish twice and close twice."""
    writer.finish()
    writer.finish()
    writer.close()
    writer.close()


def check_written(sample: Sample, place: Location, seed: int = 0) -> str:
    """Open the written checkpoint with the same format and compare structure and every byte.

    Returns:
        The checkpoint digest.

    Raises:
        AssertionError: something differs.
    """
    opened = open_as(sample, place)
    try:
        check_structure(sample, opened)
        check_reader(opened, sample.contents, seed=seed)
        for name, data in sample.companions.items() if sample.row.holds.companions else ():
            assert b"".join(opened.reader.companion(name).pieces()) == data, f"companion {name} differs"
        return digest_of(opened)
    finally:
        opened.reader.close()


def open_as(sample: Sample, place: Location) -> Opened:
    """Open a place with the sample's own format."""
    detection = sample.row.detect(Glimpse(locate(place.uri)))
    assert detection is not None, f"{sample.row.name} does not recognise what it wrote"
    examined = examine(locate(place.uri), detection)
    assert examined.verdict == "ok", f"{sample.row.name}: {examined.verdict}: {examined.reason}"
    return sample.row.open(locate(place.uri), detection)


def check_structure(sample: Sample, opened: Opened) -> None:
    """Key paths, shapes, dtypes and everything that is not a tensor are preserved."""
    wanted, found = sample.manifest, opened.manifest
    expected = {path: (spec.shape, spec.dtype) for path, spec in wanted.tensors.items()}
    seen = {path: (spec.shape, spec.dtype) for path, spec in found.tensors.items()}
    odd = sorted(set(expected.items()) ^ set(seen.items()))
    assert not odd, f"structure differs at {odd[0]} and {len(odd) - 1} more"
    for name in ("values", "empties", "lists"):
        assert getattr(found, name) == getattr(wanted, name), (
            f"{name} differ: expected {getattr(wanted, name)}, got {getattr(found, name)}"
        )
    names = {companion.name for companion in found.companions}
    assert names == sample.companions.keys() or names <= sample.row.holds.stated, (
        f"companions: expected {sorted(sample.companions)}, got {sorted(names)}"
    )
    version = sample.row.version(wanted, sample.options)
    assert opened.detection.format == sample.row.name
    assert opened.detection.format_version == version, (
        f"expected format version {version}, got {opened.detection.format_version}"
    )


def digest_of(opened: Opened) -> str:
    """The checkpoint digest, computed from every byte."""
    checkpoint = Checkpoint(opened)
    digests = hash_checkpoint(checkpoint, BLAKE3, memory=_MEMORY).digests
    manifest = opened.manifest.with_digests(digests)
    return checkpoint_digest(manifest, opened.detection.format, opened.detection.format_version, BLAKE3)


def file_bytes(place: Location) -> bytes:
    """The bytes of a single-file checkpoint."""
    return Path(place.path).read_bytes()
