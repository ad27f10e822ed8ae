"""Can batches of a scanned tensor follow the order of a pack within the budget? This module prints a table of it.

A chunk of a scanned kernel needs, of every layer, `run` bytes side by side (its extent along the axis on which the
source's bytes lie side by side) for each of its other elements, `across`. To read runs of B bytes, chunks that follow
one another along that axis are held together: B × across bytes, whatever the chunks' extent along the axis. If the pack
goes along that axis first, these chunks are its next ones; in C order, those of the whole band lie between.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from infra.spikes.filemap.measure import row
from wherry.core.tensorspec import TensorSpec
from wherry.integrations.containers.orbax.partition import chunks_for

MIB = 1 << 20
BATCH = 64 * MIB  # half of the budget: another batch is being computed
SIZE = 2  # bytes of an element
BLOCK = 4096  # what a device reads at least
_LARGEST = 8 * MIB  # of a chunk by default
HEAD = (
    "kernel", "grid", "chunk", "MiB", "bytes of a run", "MiB held for runs of 4 KiB, source's order", "C order",
    "bytes of a run in a batch, source's order", "C order", "the source is read",
)  # fmt: skip


@dataclass(frozen=True)
class Model:
    """A Llama."""

    name: str
    layers: int
    embed: int
    ffn: int
    heads: int
    keys: int
    fsdp: int  # devices that each hold a part of `embed`
    head: int = 128

    @property
    def kernels(self) -> dict[str, tuple[tuple[int, ...], int]]:
        """Name → shape in MaxText, and the axis on which the bytes of Hugging Face's tensors lie side by side."""
        layers, embed = self.layers, self.embed
        return {
            "wi_0, wi_1": ((embed, layers, self.ffn), 0),
            "wo": ((self.ffn, layers, embed), 0),
            "query": ((embed, layers, self.heads, self.head), 0),
            "key, value": ((embed, layers, self.keys, self.head), 0),
        }


MODELS = (
    Model("Llama 70B", 80, 8192, 28672, 64, 8, 64),
    Model("Llama 405B", 126, 16384, 53248, 128, 8, 256),
)


def by_layers(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The grid that wherry chooses: each chunk is of one layer."""
    chunks = [shape[0], 1, *shape[2:]]
    while math.prod(chunks) * SIZE > _LARGEST:
        axis = chunks.index(max(chunks))
        chunks[axis] = -(-chunks[axis] // 2)
    return tuple(chunks)


def by_shards(shape: tuple[int, ...], model: Model) -> tuple[int, ...]:
    """The grid of MaxText's own checkpoints: a chunk is what one device holds, all layers of a part of `embed`."""
    axis = next(at for at, extent in enumerate(shape) if extent == model.embed)
    return tuple(extent // model.fsdp if at == axis else extent for at, extent in enumerate(shape))


def main() -> None:
    for model in MODELS:
        print(f"\n{model.name}, batches of {BATCH // MIB} MiB")
        row(*HEAD)
        row(*len(HEAD) * ["---"])
        for name, (shape, axis) in model.kernels.items():
            spec = TensorSpec((name,), shape, "bfloat16")
            grids = {"by layers": by_layers(shape), "2x1x4": chunks_for(spec, "2x1x4"),
                     "shards": by_shards(shape, model)}  # fmt: skip
            for grid, chunk in grids.items():
                row(name, grid, "x".join(map(str, chunk)), *measures(shape, chunk, axis))


def measures(shape: tuple[int, ...], chunk: tuple[int, ...], axis: int) -> list[str]:
    """The numbers of a row."""
    nbytes, run = math.prod(chunk) * SIZE, chunk[axis] * SIZE
    across = nbytes // run  # bytes that are held for each byte of a run
    counts = [-(-extent // size) for extent, size in zip(shape, chunk, strict=True)]
    band = math.prod(counts[at] for at in range(len(shape)) if at > axis)  # chunks between two along the axis
    row_bytes = shape[axis] * SIZE
    held = max(min(BLOCK, row_bytes) * across, nbytes)
    fits = min(max(BATCH // nbytes, 1) * run, row_bytes) if nbytes <= BATCH else BATCH // across
    in_c = fits if band == 1 else (run if nbytes <= BATCH else fits)
    again = min(BLOCK, row_bytes) / max(min(fits, BLOCK), 1)
    mib = f"{nbytes / MIB:.1f}"
    return [
        mib,
        f"{run}",
        f"{held / MIB:.0f}",
        f"{held * band / MIB:,.0f}",
        f"{fits}",
        f"{in_c}",
        f"{again:.0f}×",
    ]


if __name__ == "__main__":
    main()
