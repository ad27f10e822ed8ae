"""The contract of readers: the guarantees of `wherry.formats.format.Contents` and `Checkpoint`, for any checkpoint.

Regions are slices of the whole; bytes are canonical (C order, little endian) however they are read; extents name
exactly these bytes; invalid requests raise a WherryError; all of this from several threads.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from wherry.core import dtypes
from wherry.core.keypath import KeyPath
from wherry.core.tensorspec import Region, TensorSpec, region_shape
from wherry.errors import NotFoundError, UsageError, WherryError
from wherry.formats.checkpoint import Checkpoint
from wherry.formats.format import ChunkDecoder, Stored
from wherry.mover.move import cells
from wherry.mover.read import fill
from wherry.store.local_store import locate

if TYPE_CHECKING:
    from wherry.formats.format import Opened

THREADS = 8
_REGIONS = 4


def check_reader(
    opened: Opened, contents: Mapping[KeyPath, bytes] | None = None, *, seed: int = 0, regions: int = _REGIONS
) -> None:
    """Check the whole contract of a reader on an opened checkpoint.

    Args:
        opened: the result of a format's `open`; it stays open.
        contents: canonical bytes of each tensor, if they are known; otherwise the result of `read` is used.
        seed: of the regions.
        regions: number of random regions that are read of each tensor.

    Raises:
        AssertionError: the contract was violated.
    """
    checkpoint = Checkpoint(opened)
    check_complete(opened)
    check_refusals(checkpoint)
    for path, spec in opened.manifest.tensors.items():
        expected = canonical(opened, spec) if contents is None else contents[path]
        check_tensor(checkpoint, spec, expected)
    check_threads(checkpoint, contents or {}, seed=seed, regions=regions)


def check_complete(opened: Opened) -> None:
    """No chunk is missing, and every member is a file of the stated size, in the folder or next to the single file."""
    absent = list(opened.reader.absent())
    assert not absent, f"missing chunks: {absent[:3]}"
    members = list(opened.reader.members())
    assert members, "the checkpoint has no members"
    home = locate(opened.detection.uri)
    folder = home if home.entry is None or home.entry.is_dir else home.parent
    for entry in members:
        file = folder.join(entry.name)
        there = file.stat()
        assert there is not None, f"member not found: {entry.name}"
        assert (there.size, there.mark) == (entry.size, entry.mark), f"{entry.name}: size or mark differs"
    for companion in opened.manifest.companions:
        size = sum(len(piece) for piece in opened.reader.companion(companion.name).pieces())
        assert size == companion.size, f"{companion.name}: expected {companion.size} bytes, got {size}"


def check_tensor(checkpoint: Checkpoint, spec: TensorSpec, expected: bytes) -> None:
    """One whole tensor, read in every way that its access allows."""
    data = checkpoint.read_bytes(spec.path)
    assert len(data) == spec.nbytes, f"{spec.name}: expected {spec.nbytes} bytes, got {len(data)}"
    assert data == expected, f"{spec.name}: read_bytes differs"
    access = checkpoint.reader.access(spec)
    if isinstance(access, Stored):
        position = 0
        for extent in access.extents:
            with Path(locate(extent.file).path).open("rb") as opened:
                opened.seek(extent.offset)
                part = opened.read(extent.length)
            assert part == expected[position : position + extent.length], (
                f"{spec.name}: bytes differ in {extent}"
            )
            position += extent.length
        assert position == spec.nbytes, (
            f"{spec.name}: expected extents of {spec.nbytes} bytes, got {position}"
        )
    elif spec.nbytes:
        buffer = memoryview(bytearray(spec.nbytes))
        fill(access, spec, spec.whole, buffer)
        assert bytes(buffer) == expected, f"{spec.name}: fill differs"
    has_cells = spec.chunks and spec.size and not dtypes.opaque(spec.dtype)
    if has_cells and access.decoder is not None:
        _check_decoder(access.decoder, spec, expected)
    if dtypes.opaque(spec.dtype):
        assert_refuses(UsageError, lambda: checkpoint.read(spec.path))
        return
    array = checkpoint.read(spec.path)
    assert array.shape == spec.shape, f"{spec.name}: expected shape {spec.shape}, got {array.shape}"
    assert array.dtype == dtypes.numpy_dtype(spec.dtype), (
        f"{spec.name}: expected {spec.dtype}, got {array.dtype}"
    )
    assert array.flags.c_contiguous, f"{spec.name}: the array is not in C order"
    assert array.flags.writeable, f"{spec.name}: the array is not writeable"
    assert array.tobytes() == expected, f"{spec.name}: read differs"


def check_refusals(checkpoint: Checkpoint) -> None:
    """Unknown key paths and invalid regions are errors."""
    assert_refuses(NotFoundError, lambda: checkpoint.read(("no", "such", "tensor")))
    assert_refuses(NotFoundError, lambda: checkpoint.read_bytes("no/such/tensor"))
    assert_refuses(NotFoundError, lambda: checkpoint.reader.companion("no such companion").read(0, 1))
    for path, spec in checkpoint.manifest.tensors.items():
        if dtypes.opaque(spec.dtype):
            continue
        bad: list[Region] = [(*spec.whole, slice(0, 1))]
        if spec.shape:
            rest = spec.whole[1:]
            outside = (slice(0, spec.shape[0] + 1), slice(-1, spec.shape[0]), slice(0, spec.shape[0], 2))
            bad += [rest, *((part, *rest) for part in outside)]
        for region in bad:
            assert_refuses(UsageError, lambda path=path, region=region: checkpoint.read(path, region))


def check_threads(
    checkpoint: Checkpoint, contents: Mapping[KeyPath, bytes], *, seed: int = 0, regions: int = _REGIONS
) -> None:
    """Random regions of all tensors, read by eight threads at once, are slices of the whole."""
    generator = random.Random(seed)  # noqa: S311
    specs = [spec for spec in checkpoint.manifest.tensors.values() if not dtypes.opaque(spec.dtype)]
    wanted = [(spec, random_region(spec, generator)) for spec in specs for _ in range(regions)]
    generator.shuffle(wanted)
    with ThreadPoolExecutor(THREADS) as executor:
        done = [
            executor.submit(_check_region, checkpoint, spec, region, contents.get(spec.path))
            for spec, region in wanted
        ]
        for one in done:
            one.result()


def _check_region(checkpoint: Checkpoint, spec: TensorSpec, region: Region, known: bytes | None) -> None:
    import numpy as np

    whole = (
        checkpoint.read(spec.path)
        if known is None
        else np.frombuffer(known, dtypes.numpy_dtype(spec.dtype)).reshape(spec.shape)
    )
    part, expected = checkpoint.read(spec.path, region), whole[region]
    assert part.shape == expected.shape, (
        f"{spec.name}{region}: expected shape {expected.shape}, got {part.shape}"
    )
    assert part.dtype == expected.dtype, f"{spec.name}{region}: expected {expected.dtype}, got {part.dtype}"
    assert part.flags.c_contiguous, f"{spec.name}{region}: the array is not in C order"
    assert part.tobytes() == expected.tobytes(), f"{spec.name}{region}: differs from the slice of the whole"


def random_region(spec: TensorSpec, generator: random.Random) -> Region:
    """Step-1 slices inside the tensor, empty ones among them."""
    return tuple(
        slice(start, generator.randint(start, extent))
        for extent in spec.shape
        for start in (generator.randint(0, extent),)
    )


def canonical(opened: Opened, spec: TensorSpec) -> bytes:
    """Canonical bytes of a whole tensor."""
    return Checkpoint(opened).read_bytes(spec.path)


def _check_decoder(decoder: ChunkDecoder, spec: TensorSpec, expected: bytes) -> None:
    """A chunk that can be decoded in pieces yields the same bytes so."""
    import numpy as np

    cell = next(cells(spec.whole, spec.chunks or ()))
    if decoder.memory(cell) is None:
        return
    dtype = dtypes.numpy_dtype(spec.dtype)
    whole = np.frombuffer(expected, dtype).reshape(spec.shape)
    for block in decoder.decode(cell):
        shape = region_shape(block.region)
        elements = np.frombuffer(b"".join(map(bytes, block.pieces)), dtype).reshape(shape)
        inside = tuple(slice(0, extent) for extent in whole[block.region].shape)  # the rest is padding
        assert elements[inside].tobytes() == whole[block.region].tobytes(), f"{spec.name}: stream differs"


def assert_refuses(kind: type[WherryError], act: Callable[[], object]) -> None:
    """Assert that a call raises this error."""
    try:
        act()
    except kind:
        return
    except WherryError as error:
        raise AssertionError(f"expected {kind.__name__}, got {type(error).__name__}: {error.what}") from error
    raise AssertionError(f"expected {kind.__name__}, but no error was raised")
