"""Cases for the kernels: pieces of bytes in any order, compared with the `blake3` package and with numpy.

The checks need no pytest, so that a process with a sanitizer can run them too.
"""

from __future__ import annotations

import os
import random
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise, permutations, product

import numpy as np
from blake3 import blake3

from wherry.kernels import OpenLeaves, count_above, gather, load, look_up, permute

LEAF = 4 << 20
KIB = 1 << 10


def expected(data: bytes) -> list[bytes]:
    """The hashes of the leaves of some bytes, by the package."""
    return [blake3(data[start : start + LEAF]).digest() for start in range(0, len(data), LEAF)]


def random_bytes(count: int, seed: int) -> bytes:
    """Random bytes of a seed."""
    return np.random.default_rng(seed).integers(0, 256, count, "u1").tobytes()


def pieces(count: int, cuts: int, again: int, random: random.Random) -> list[tuple[int, int]]:
    """The pieces of so many bytes in a random order; some of them come twice."""
    ends = sorted({0, count, *(random.randrange(count + 1) for _ in range(cuts))})
    found = list(pairwise(ends))
    found += random.sample(found, min(again, len(found)))
    random.shuffle(found)
    return found


def check_pieces(count: int, cuts: int, again: int, seed: int) -> None:
    """Leaves of random bytes that come in random pieces."""
    chosen = random.Random(seed)
    data = random_bytes(count, seed)
    leaves, found = OpenLeaves(count), {}
    for start, stop in pieces(count, cuts, again, chosen):
        found |= dict(leaves.add(memoryview(data)[start:stop], start))
    assert [found.get(leaf) for leaf in range(-(-count // LEAF))] == expected(data), (
        count,
        cuts,
        again,
        seed,
    )


def check_runs(rows: int, layers: int, width: int, cut: int, seed: int) -> None:
    """Leaves of a tensor whose layers come one after another, each cut into columns."""
    data = random_bytes(rows * layers * width, seed)
    array = np.frombuffer(data, "u1").reshape(rows, layers, width)
    boxes = [(layer, start) for layer in range(layers) for start in range(0, width, cut)]
    random.Random(seed).shuffle(boxes)
    leaves, found = OpenLeaves(len(data)), {}
    for layer, start in boxes:
        box = np.ascontiguousarray(array[:, layer, start : start + cut])
        runs = {"length": box.shape[1], "count": rows, "apart": box.shape[1], "step": layers * width}
        found |= dict(leaves.add(box.reshape(-1).data, layer * width + start, **runs))
    assert [found.get(leaf) for leaf in range(-(-len(data) // LEAF))] == expected(data), (
        rows,
        layers,
        width,
        cut,
    )


def exported(leaves: OpenLeaves, count: int, complete: dict[int, bytes]) -> dict[int, bytes]:
    """What has come of each leaf that is not complete."""
    found = {leaf: leaves.values(leaf) for leaf in range(-(-count // LEAF)) if leaf not in complete}
    assert all(values is not None for values in found.values())
    return {leaf: values for leaf, values in found.items() if values}


def take_shares(
    leaves: OpenLeaves, shares: Iterable[tuple[dict[int, bytes], dict[int, bytes]]]
) -> dict[int, bytes]:
    """Take what several processes have: complete leaves, and values. Returns the leaves that are complete now."""
    found: dict[int, bytes] = {}
    for complete, values in shares:
        for leaf, digest in complete.items():
            leaves.skip(leaf)
            found[leaf] = digest
        for leaf, part in values.items():
            if digest := leaves.take_values(leaf, part):
                found[leaf] = digest
    return found


def joined(
    count: int, shares: list[tuple[dict[int, bytes], dict[int, bytes]]], then: list[tuple[int, memoryview]]
) -> list[bytes | None]:
    """The leaves of which several processes have parts: complete ones and values, and pieces that come last."""
    leaves = OpenLeaves(count)
    found = take_shares(leaves, shares)
    for start, piece in then:
        found |= dict(leaves.add(piece, start))
    return [found.get(leaf) for leaf in range(-(-count // LEAF))]


def check_shares(count: int, cuts: int, again: int, workers: int, last: int, seed: int) -> None:
    """Leaves of random bytes whose pieces come to several workers, which exchange what they have.

    Args:
        count: bytes.
        cuts: between pieces.
        again: pieces that come to two workers.
        workers: their number.
        last: pieces that come when the values of all workers have.
        seed: of everything.
    """
    chosen = random.Random(seed)
    data = memoryview(random_bytes(count, seed))
    rows = pieces(count, cuts, again, chosen)
    then = [(start, data[start:stop]) for start, stop in rows[:last]]
    shares = []
    for worker in range(workers):
        leaves, complete = OpenLeaves(count), {}
        for start, stop in rows[last:][worker::workers]:
            complete |= dict(leaves.add(data[start:stop], start))
        shares.append((complete, exported(leaves, count, complete)))
    wanted = expected(data.tobytes())
    chosen.shuffle(shares)
    assert joined(count, shares, then) == wanted, (count, cuts, again, workers, last, seed)
    # Half of them are joined first, and given on.
    half = len(shares) // 2
    leaves = OpenLeaves(count)
    complete = take_shares(leaves, shares[:half])
    relayed = (complete, exported(leaves, count, complete))
    assert joined(count, [*shares[half:], relayed], then) == wanted


def check_same_values(count: int, cuts: int, seed: int) -> None:
    """The same bytes give the same values, in whatever pieces they come, and no more than 35 bytes a KiB and edges."""
    chosen = random.Random(seed)
    data = memoryview(random_bytes(count, seed))
    kept = pieces(count, cuts, 0, chosen)[: cuts // 2 + 1]
    found = []
    for parts in (1, 3, 50):
        leaves, rows = OpenLeaves(count), []
        for start, stop in kept:
            inner = sorted({start, stop, *(chosen.randrange(start, stop + 1) for _ in range(parts))})
            rows += pairwise(inner)
        chosen.shuffle(rows)
        complete = {}
        for start, stop in rows:
            complete |= dict(leaves.add(data[start:stop], start))
        found.append((complete, exported(leaves, count, complete)))
    assert found[0] == found[1] == found[2], (count, cuts, seed)


def check_grid(shape: tuple[int, ...], grid: tuple[int, ...], word: int, workers: int, seed: int) -> None:
    """The boxes of a grid over an array, shared out to workers, which exchange values."""
    data = random_bytes(word * int(np.prod(shape)), seed)
    array = np.frombuffer(data, f"u{word}").reshape(shape)
    boxes = [
        tuple(slice(at, min(at + step, extent)) for at, step, extent in zip(corner, grid, shape, strict=True))
        for corner in product(*(range(0, extent, step) for extent, step in zip(shape, grid, strict=True)))
    ]
    chosen = random.Random(seed)
    boxes += chosen.sample(boxes, len(boxes) // 5)  # some come to two workers
    chosen.shuffle(boxes)
    shares = []
    for worker in range(workers):
        leaves, complete = OpenLeaves(len(data)), {}
        for box in boxes[worker::workers]:
            for row in np.ndindex(array[box].shape[:-1]):
                place = [part.start + at for part, at in zip(box, (*row, 0), strict=True)]
                offset = int(np.ravel_multi_index(place, shape)) * word
                run = np.ascontiguousarray(array[box][row]).view("u1")
                complete |= dict(leaves.add(run.data, offset))
        shares.append((complete, exported(leaves, len(data), complete)))
    assert joined(len(data), shares, []) == expected(data), (shape, grid, word, workers)


def hostile_values(count: int) -> Iterator[bytes]:
    """Bytes that are no values of the first leaf of so many bytes."""
    value = bytes(32)

    def subtree(chunk: int, level: int, data: bytes = value) -> bytes:
        return chunk.to_bytes(2, "little") + bytes([level]) + data

    def edge(chunk: int, start: int, stop: int, data: bytes) -> bytes:
        return subtree(chunk, 255, start.to_bytes(2, "little") + stop.to_bytes(2, "little") + data)

    chunks = -(-min(count, LEAF) // KIB)
    yield from (b"\0", b"\0\0", subtree(0, 0, value[:31]), subtree(0, 0) + b"\0")
    yield from (subtree(chunks, 0), subtree(65535, 0), subtree(0, 12), subtree(0, 13), subtree(0, 200))
    yield from (subtree(1, 1), subtree(2, 2), subtree(0, 0) + subtree(0, 0), subtree(1, 0) + subtree(0, 0))
    yield subtree(0, max(chunks - 1, 0).bit_length())  # the whole leaf, or more
    yield from (edge(0, 0, 2, b"a"), edge(0, 3, 3, b""), edge(0, 5, 3, b"ab"), edge(0, 1000, 1030, bytes(30)))
    yield from (edge(0, 0, min(count, KIB), bytes(min(count, KIB))), edge(chunks, 0, 1, b"a"))
    yield from (edge(0, 0, 1, b"a") + edge(0, 1, 2, b"b"), edge(0, 4, 5, b"a") + edge(0, 0, 1, b"b"))
    yield from (edge(0, 0, 1, b"a") + subtree(0, 0), subtree(0, 0) + edge(0, 0, 1, b"a"))
    last = (min(count, LEAF) - 1) % KIB + 1
    yield edge(chunks - 1, last, last + 1, b"a")
    yield edge(0, 0, 65535, b"a" * 70000)


def check_hostile(count: int, seed: int) -> None:
    """Values that are none are refused, whatever they are, and change nothing."""
    chosen, data = random.Random(seed), random_bytes(count, seed)
    leaves = OpenLeaves(count)
    for values in hostile_values(count):
        assert is_refused(leaves, 0, values), (count, values)
    for leaf in (-1, -(-count // LEAF), 1 << 40):
        assert is_refused(leaves, leaf, b"")
    assert is_refused(leaves, 0, bytes(LEAF))
    # Values of random bytes, with random changes: what is taken may be wrong, but is within the leaf.
    half = OpenLeaves(count)
    half.add(memoryview(data)[: count // 2 + 7], min(5, count - count // 2 - 7) if count > 20 else 0)
    held = bytearray(half.values(0) or b"")
    for _ in range(300):
        changed = bytearray(held)
        for _ in range(chosen.randrange(1, 4)):
            if changed:
                changed[chosen.randrange(len(changed))] = chosen.randrange(256)
        is_refused(OpenLeaves(count), 0, bytes(changed[: chosen.randrange(len(changed) + 1)]))
        is_refused(OpenLeaves(count), 0, chosen.randbytes(chosen.randrange(200)))
    assert [digest for _leaf, digest in sorted(leaves.add(memoryview(data), 0))] == expected(data)


def is_refused(leaves: OpenLeaves, leaf: int, values: bytes) -> bool:
    """Whether values are refused."""
    try:
        leaves.take_values(leaf, values)
    except ValueError:
        return True
    return False


def _in_threads(work: Callable[[Iterable[int]], None], shares: Iterable[Iterable[int]]) -> None:
    """Have each share done by a thread of its own."""
    workers = [threading.Thread(target=work, args=(share,)) for share in shares]
    for one in workers:
        one.start()
    for one in workers:
        one.join()


def check_threads(count: int, piece: int, seed: int, threads: int = 4) -> None:
    """Leaves whose pieces come from several threads."""
    data = memoryview(random_bytes(count, seed))
    starts = list(range(0, count, piece))
    random.Random(seed).shuffle(starts)
    leaves, found, lock = OpenLeaves(count), {}, threading.Lock()

    def work(own: Iterable[int]) -> None:
        for start in own:
            complete = leaves.add(data[start : start + piece], start)
            with lock:
                found.update(complete)

    _in_threads(work, [starts[at::threads] for at in range(threads)])
    assert [found.get(leaf) for leaf in range(-(-count // LEAF))] == expected(data.tobytes())


def check_threaded_runs(rows: int, layers: int, width: int, seed: int, threads: int = 4) -> None:
    """Leaves of a tensor whose layers come from several threads at once: runs of two threads meet inside of pages."""
    data = random_bytes(rows * layers * width, seed)
    array = np.frombuffer(data, "u1").reshape(rows, layers, width)
    leaves, found, lock = OpenLeaves(len(data)), {}, threading.Lock()
    begin = threading.Barrier(threads)

    def work(own: Iterable[int]) -> None:
        begin.wait()
        for layer in own:
            box = np.ascontiguousarray(array[:, layer])
            runs = {"length": width, "count": rows, "apart": width, "step": layers * width}
            complete = leaves.add(box.reshape(-1).data, layer * width, **runs)
            with lock:
                found.update(complete)

    _in_threads(work, [range(at, layers, threads) for at in range(threads)])
    assert [found.get(leaf) for leaf in range(-(-len(data) // LEAF))] == expected(data)


def lengths() -> Iterator[int]:
    """Lengths around the borders of blocks, chunks and leaves, and a few between."""
    yield from range(1, 5 * KIB + 2, 37)
    for border in (64, KIB, 2 * KIB, 3 * KIB, 4 * KIB, 5 * KIB):
        yield from (border - 1, border, border + 1)
    yield from (LEAF - KIB, LEAF - 1, LEAF, LEAF + 1, LEAF + KIB, 2 * LEAF + 777)


def check_lanes(lanes: int) -> None:
    """All lengths and many pieces with so many chunks side by side, or as many as this processor has."""
    library = load()
    assert library is not None
    library.wherry_lanes(lanes)
    try:
        for number, count in enumerate(lengths()):
            check_pieces(count, number % 7, number % 3, seed=number)
        for count in (LEAF - KIB, LEAF + KIB + 1, 3 * LEAF):
            check_pieces(count, 300, 20, seed=count)
        check_runs(64, 8, 7168, 1792, seed=1)
        check_runs(33, 3, 5001, 777, seed=2)
        check_threads(3 * LEAF + 5, 100_003, seed=3)
        for seed in range(8):
            check_threaded_runs(700, 12, 1500 + 611 * seed, seed)
        for number, count in enumerate(lengths()):
            check_shares(count, number % 9, number % 3, 1 + number % 4, number % 2, seed=number)
            check_same_values(count, number % 9, seed=number)
        check_shares(2 * LEAF + 777, 900, 50, 3, 9, seed=4)
        for word in WORDS:
            for count in (0, 1, 31, 64, 65, 4096, 70_001):
                check_count(count, word, count % 9, seed=count)
    finally:
        library.wherry_lanes(0)


def check_count(count: int, word: str, start: int, seed: int) -> None:
    """The words of which numpy finds a magnitude above a limit, anywhere in memory."""
    draw = np.random.default_rng(seed)
    size = np.dtype(word).itemsize
    words = np.frombuffer(random_bytes(start + count * size, seed), word, count, start)
    highest = (1 << (8 * size - 1)) - 1
    for limit in (0, int(draw.integers(highest)), highest - 1, highest):
        data = memoryview(words).cast("B") if count else b""
        assert count_above(data, size, limit) == np.count_nonzero((words & words.dtype.type(highest)) > limit)


def check_permute(word: str, shape: tuple[int, ...], seed: int) -> None:
    """Every order of the axes of an array, into an array in C order and into one with gaps."""
    array = np.random.default_rng(seed).integers(0, 255, shape).astype(word)
    for order in permutations(range(len(shape))):
        view = array.transpose(order)
        plain = np.zeros(view.shape, word)
        gaps = np.zeros(tuple(2 * extent for extent in view.shape), word)
        apart = gaps[tuple(slice(0, 2 * extent, 2) for extent in view.shape)]
        for out in (plain, apart):
            assert permute(view, out)
            assert (out == view).all(), (word, shape, order)
        assert np.count_nonzero(gaps) == np.count_nonzero(apart), "nothing is written between the elements"


def check_look_up(
    rows: int, columns: int, block: tuple[int, int], first: tuple[int, int], word: str, bits: int
) -> None:
    """Codes of a matrix that begins inside of a block, and of a byte."""
    draw = np.random.default_rng(rows * columns)
    grid = tuple(
        -(-(start + extent) // size)
        for start, extent, size in zip(first, (rows, columns), block, strict=True)
    )
    tables = draw.integers(0, 60_000, (*grid, 1 << bits)).astype(word)
    skip = columns % 3
    codes = draw.integers(0, 256, (rows, -(-(skip + columns) * bits // 8))).astype("u1")
    every = (
        codes if bits == 8 else np.stack([codes & 15, codes >> 4], axis=2).reshape(rows, 2 * codes.shape[1])
    )
    wanted = every[:, skip : skip + columns]
    down = (first[0] + np.arange(rows))[:, None] // block[0]
    across = (first[1] + np.arange(columns))[None] // block[1]
    orders = np.argsort(draw.random(tables.shape), axis=-1).astype("u1")
    seen = np.zeros(tables.shape, bool)
    seen[down, across, wanted] = True
    places = np.argsort(orders, axis=-1)
    library = load()
    assert library is not None
    for lanes, turned in product((4, 0), (False, True)):
        library.wherry_lanes(lanes)
        memory = np.zeros((columns, rows + 3) if turned else (rows, columns + 3), word)
        rest = memory[:, rows if turned else columns :]
        words = memory[:, :rows].T if turned else memory[:, :columns]
        try:
            found = look_up(codes, tables, orders if bits == 8 else None, first, block, words, skip)
        finally:
            library.wherry_lanes(0)
        assert not rest.any()
        assert (words == tables[down, across, wanted]).all()
        if bits == 4:
            assert (found == seen).all()
        else:
            assert not (found & ~seen).any(), "no code is seen that does not occur"
            assert (np.where(found, places, -1).max(-1) == np.where(seen, places, -1).max(-1)).all()


def check_gather(rows: int, columns: int, width: int, room: int, seed: int) -> None:
    """Columns of rows of a file, into memory whose rows are farther apart; a file that is too short is noticed."""
    data = random_bytes(rows * columns * width, seed)
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.flush()
        grid = [(rows, columns * width, 2 * width + 3)]
        out, held = bytearray(rows * (2 * width + 3)), memoryview(bytearray(room))
        assert gather(file.fileno(), width, width, grid, memoryview(out), held)
        found = np.frombuffer(out, "u1").reshape(rows, 2 * width + 3)[:, :width]
        assert (found == np.frombuffer(data, "u1").reshape(rows, columns, width)[:, 1]).all()
        os.ftruncate(file.fileno(), len(data) - columns * width)
        assert not gather(file.fileno(), width, width, grid, memoryview(out), held)


GATHERED = ((1, 2, 2, 0), (700, 3, 2, 4096), (700, 3, 2, 0), (64, 5, 1000, 1 << 16), (9, 2, 5000, 4096))
SHAPES = ((1,), (0, 3), (5, 7), (64, 64), (33, 130), (1, 9), (3, 40, 50), (2, 3, 20, 17), (16, 2, 8, 3))
GRIDS = (
    ((4096,), (1000,)),
    ((64, 2048), (64, 700)),
    ((40, 3, 1000), (7, 1, 400)),
    ((5, 6, 7, 801), (5, 2, 7, 801)),
    ((700, 2, 1024), (100, 1, 1024)),
)
CODES = (
    (1, 1, (1, 1), (0, 0)),
    (300, 200, (128, 128), (0, 0)),
    (77, 130, (128, 64), (100, 63)),
    (5, 4096, (1, 4096), (0, 0)),
    (7, 96, (1, 32), (0, 0)),
    (6, 77, (1, 32), (2, 5)),
    (0, 9, (4, 4), (0, 0)),
    (130, 191, (3, 70), (1, 5)),
    (65, 129, (128, 128), (0, 0)),
    (3, 64, (128, 128), (127, 64)),
)
WORDS = ("u1", "u2", "u4", "u8")


def check_all() -> None:
    """Everything, for a process with a sanitizer."""
    for lanes in (4, 8, 16):
        check_lanes(lanes)
    for number, (shape, grid) in enumerate(GRIDS):
        check_grid(shape, grid, 1 << number % 4, 3, seed=number)
    for count in (1, 900, KIB, KIB + 1, 5 * KIB - 3, LEAF - 1, LEAF, LEAF + 5):
        check_hostile(count, seed=count)
    for word in WORDS:
        for shape in SHAPES:
            check_permute(word, shape, seed=len(shape))
    for rows, columns, block, first in CODES:
        for word, bits in product(("u2", "u4"), (8, 4)):
            check_look_up(rows, columns, block, first, word, bits)
    for rows, columns, width, room in GATHERED:
        check_gather(rows, columns, width, room, seed=rows)


if __name__ == "__main__":
    check_all()
    print("all kernels are right")
