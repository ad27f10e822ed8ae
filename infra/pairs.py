"""Container conversion and back, for every pair of formats: the pairs that keep the weights digest.

    python infra/pairs.py

measures all pairs and writes the table into `docs/reference/pairs.md`, between two markers. It converts small trees of
float32 and bfloat16: one with one-part key paths, one with nested ones, and for each system that restores only trees of
its own form one in that form, with the required companion file. A format that cannot represent a tree refuses it before
it writes anything; every other pair must keep the digest, or this script fails. Two systems are no pair: only a layout
leads from one to the other. `tests/contract/test_pairs.py` runs the same measurement and compares the page with it.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import NamedTuple

from wherry.converter.convert import convert
from wherry.core.keypath import KeyPath
from wherry.core.manifest import Companion, Manifest
from wherry.core.request import NONE, LayoutRequest
from wherry.core.tensorspec import Span, TensorSpec
from wherry.errors import UnrepresentableError, UnsupportedError, UsageError
from wherry.formats.companions import MemoryFiles
from wherry.formats.registry import checked_options, find_format, formats
from wherry.mover.map_writer import writer_of
from wherry.store.local_store import locate
from wherry.store.location import Location

ROOT = Path(__file__).resolve().parents[1]


class Tree(NamedTuple):
    """A tree to convert.

    Attributes:
        name: its name in the table.
        seed: the format in which it is created; it can hold any tree of its kind and accepts any span.
        paths: its key paths, one for each of `SPECS`.
        owner: the format that requires these names; then only pairs with it are measured.
    """

    name: str
    seed: str
    paths: tuple[KeyPath, ...]
    owner: str = ""


_MODEL: tuple[KeyPath, ...] = (("embed", "kernel"), ("layer_0", "kernel"), ("norm", "scale"))
_T5X: tuple[KeyPath, ...] = tuple(("target", *path) for path in _MODEL)
_LINGUA = ("tok_embeddings.weight", "layers.0.attention.wq.weight", "norm.weight")
_TORCHTITAN: tuple[KeyPath, ...] = tuple((name,) for name in _LINGUA)
_MEGATRON: tuple[KeyPath, ...] = tuple(
    (name,)
    for name in ("embedding.word_embeddings.weight", "output_layer.weight", "decoder.final_layernorm.weight")
)
TREES = (
    Tree("flat", "safetensors", (("embed.weight",), ("layers.0.weight",), ("norm",))),
    Tree("nested", "torch-zip", tuple(("params", *path) for path in _MODEL)),
    Tree("own", "torch-zip", tuple(("model", *path) for path in _MODEL), "huggingface-flax"),
    Tree("own", "torch-zip", _T5X, "t5x-legacy"),
    Tree("own", "torch-zip", _T5X, "t5x-orbax"),
    Tree("own", "torch-zip", tuple(("mdl_vars", "params", *path) for path in _MODEL), "paxml"),
    Tree("own", "torch-zip", tuple(("params", "params", "decoder", *path) for path in _MODEL), "maxtext"),
    Tree(
        "own", "safetensors", tuple((f"lm/{name}.weights",) for name in ("embed", "block", "norm")), "penzai"
    ),
    Tree("own", "lingua", tuple((f"model.{name}",) for name in _LINGUA), "lingua"),
    Tree("own", "lingua-consolidated", tuple(("model", name) for name in _LINGUA), "lingua-consolidated"),
    Tree("own", "safetensors", _TORCHTITAN, "torchtitan"),
    Tree("own", "safetensors", _MEGATRON, "megatron"),
    Tree("own", "safetensors", _MEGATRON, "megatron-ranks"),
    Tree("own", "gguf", (("token_embd.weight",), ("output.weight",), ("output_norm.weight",)), "gguf"),
)
SPECS = (((4, 6), "float32"), ((3, 4, 2), "bfloat16"), ((5,), "float32"))
SAME_TREE = LayoutRequest(family=NONE)  # containers only: no tree is treated as a model
# Errors of a format that cannot represent a tree.
REFUSALS = (UnrepresentableError, UnsupportedError, UsageError)


@dataclass(frozen=True, slots=True)
class Pair:
    """One tree, from one format to another and back.

    Attributes:
        tree: its name in the table.
        source, target: names of formats.
        digests: weights digests in the source, the target, and the source's format again.
    """

    tree: str
    source: str
    target: str
    digests: tuple[str, str, str]

    @property
    def kept(self) -> bool:
        """Whether all three digests are equal."""
        return len(set(self.digests)) == 1


def measure(folder: Path) -> list[Pair]:
    """Convert every tree through every pair of formats that can hold it.

    Args:
        folder: an empty folder to work in.
    """
    return [
        pair
        for tree in TREES
        for pair in _measure_tree(tree, folder / f"{tree.name}.{tree.owner or tree.seed}")
    ]


def _measure_tree(tree: Tree, folder: Path) -> list[Pair]:
    folder.mkdir()
    made = {name: folder / name for name in candidates(tree)}
    seed = _make_seed(tree, folder)
    digests = {name: _carry_weights(seed, place, name) for name, place in made.items()}
    pairs: list[Pair] = []
    for source, target in permutations(made, 2):
        first = digests[source]
        if first is None or digests[target] is None or not is_related(tree, source, target):
            continue
        there = folder / f"{source}.{target}"
        middle = _carry_weights(made[source], there, target) or "refused"
        last = _carry_weights(there, folder / f"{source}.{target}.back", source) or "refused"
        pairs.append(Pair(tree.name, source, target, (first, middle, last)))
    return pairs


def is_related(tree: Tree, source: str, target: str) -> bool:
    """Whether a pair is measured with a tree: one of them owns it if it has an owner, and no layout lies between."""
    systems = {find_format(name).system for name in (source, target)} - {""}
    return tree.owner in {"", source, target} and len(systems) <= 1


def candidates(tree: Tree) -> list[str]:
    """Names of the formats that may hold a tree: a system holds only trees of its form, with its companions."""
    depth = max(map(len, tree.paths))
    rows = {name: find_format(name) for name in writable_names()}
    needs = bool(tree.owner and rows[tree.owner].holds.needs)
    return [
        name
        for name, row in rows.items()
        if (row.holds.depth or depth) >= depth
        and (name == tree.owner or (row.adapt is None and (row.holds.companions or not needs)))
        and (row.form is None or row.form.holds(Manifest(_specs(tree))))
    ]


def _specs(tree: Tree) -> dict[KeyPath, TensorSpec]:
    return {
        path: TensorSpec(path, shape, dtype) for path, (shape, dtype) in zip(tree.paths, SPECS, strict=True)
    }


def writable_names() -> list[str]:
    """Names of the writable formats, in the order of the table."""
    return sorted(name for name, row in formats().items() if row.is_written)


def _carry_weights(source: Path, target: Path, to: str) -> str | None:
    """Weights digest of the target; None if its format cannot hold the source."""
    options = {"tokenizer": "none"} if "tokenizer" in find_format(to).options else {}
    try:
        return convert(
            source, target, to=to, options=options, layout=SAME_TREE, lineage=False
        ).target.weights_digest
    except REFUSALS:
        return None


def _make_seed(tree: Tree, folder: Path) -> Path:
    row, place, specs = find_format(tree.seed), folder / "seed", _specs(tree)
    needs = row.holds.needs
    for name, content in needs.items() if row.holds.companions else ():
        place.mkdir(exist_ok=True)
        (place / name).write_bytes(content)
    assert row.is_written
    manifest = Manifest(
        specs, kind="params", companions=tuple(Companion(name, len(one)) for name, one in needs.items())
    )
    companion = partial(Location, MemoryFiles(files=needs))
    writer = writer_of(row, locate(place), manifest, checked_options(row, {}), companion)
    for number, (path, spec) in enumerate(specs.items(), 1):
        data = bytes((number * 37 + at * 11) % 127 for at in range(spec.nbytes))
        writer.write(path, Span(0, len(data)), memoryview(data))
    writer.finish()
    writer.close()
    return place


def render(pairs: list[Pair]) -> str:
    """The table as Markdown: from the rows to the columns and back."""
    kept: dict[tuple[str, str], list[str]] = {}
    for pair in pairs:
        if pair.kept:
            kept.setdefault((pair.source, pair.target), []).append(pair.tree)
    names = sorted({name for pair in kept for name in pair})
    lines = [
        f"| from ↓ to → | {' | '.join(f'`{name}`' for name in names)} |",
        "|---" * (len(names) + 1) + "|",
    ]
    lines += [f"| `{one}` | {' | '.join(_cell(one, other, kept) for other in names)} |" for one in names]
    return "\n".join(lines) + "\n"


def _cell(source: str, target: str, kept: Mapping[tuple[str, str], list[str]]) -> str:
    trees = list(dict.fromkeys(kept.get((source, target), [])))
    return "" if source == target else "both" if trees == ["flat", "nested"] else ", ".join(trees) or "–"


def main() -> None:
    """Measure, and rewrite the table of the page in place."""
    with tempfile.TemporaryDirectory() as folder:
        pairs = measure(Path(folder))
    lost = [pair for pair in pairs if not pair.kept]
    if lost:
        raise SystemExit(f"digest mismatch in these pairs: {lost}")
    page = ROOT / "docs" / "reference" / "pairs.md"
    block = f"<!-- pairs:start -->\n\n{render(pairs)}\n<!-- pairs:end -->"
    text = page.read_text()
    page.write_text(
        re.sub(r"<!-- pairs:start -->.*?<!-- pairs:end -->", lambda _found: block, text, flags=re.DOTALL)
    )


if __name__ == "__main__":
    main()
