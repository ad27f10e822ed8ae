"""Container conversion there and back, for every pair of formats: what keeps the weights digest.

    python infra/pairs.py

measures all pairs and writes the table into `docs/reference/pairs.md`, between two markers. Small trees of float32
and bfloat16 are carried: one with one-part key paths, one with nested ones, and for the formats that know one way of
naming only (Lingua's) one with their names and the file that they cannot be without. A format that cannot hold a tree
refuses it by name before it writes anything; every other pair must keep the digest, or this fails.
`tests/contract/test_pairs.py` runs the same measurement and compares the page with it.
"""

from __future__ import annotations

import re
import tempfile
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from wherry.converter.convert import convert
from wherry.core.manifest import Manifest
from wherry.core.request import NONE, LayoutRequest
from wherry.core.tensorspec import Span, TensorSpec
from wherry.errors import UnrepresentableError, UnsupportedError, UsageError
from wherry.formats.registry import checked_options, find_format, formats
from wherry.storage.stores import locate

if TYPE_CHECKING:
    from collections.abc import Mapping

    from wherry.core.keypath import KeyPath

ROOT = Path(__file__).resolve().parents[1]


class Tree(NamedTuple):
    """A tree that is carried.

    Attributes:
        name: what the table calls it.
        seed: the format in which it is made; it holds any tree of its kind and takes any span.
        paths: its key paths, one for each of `SPECS`.
        owner: the format whose own names these are; then only pairs with it are measured.
    """

    name: str
    seed: str
    paths: tuple[KeyPath, ...]
    owner: str = ""


_LINGUA = ("tok_embeddings.weight", "layers.0.attention.wq.weight", "norm.weight")
TREES = (
    Tree("flat", "safetensors", (("embed.weight",), ("layers.0.weight",), ("norm",))),
    Tree(
        "nested",
        "torch-zip",
        (("params", "embed", "kernel"), ("params", "layer_0", "kernel"), ("params", "norm", "scale")),
    ),
    Tree("own", "lingua", tuple((f"model.{name}",) for name in _LINGUA), "lingua"),
    Tree(
        "own",
        "lingua-consolidated",
        tuple(("model", name) for name in _LINGUA),
        "lingua-consolidated",
    ),
)
SPECS = (((4, 6), "float32"), ((3, 4, 2), "bfloat16"), ((5,), "float32"))
SAME_TREE = LayoutRequest(family=NONE)  # containers alone: no tree is taken for a model's
# What a format answers that does not hold a tree after all.
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
        """Whether all three are the same."""
        return len(set(self.digests)) == 1


def measure(folder: Path) -> list[Pair]:
    """Carry every tree through every pair of formats that hold it.

    Args:
        folder: an empty folder to work in.
    """
    return [pair for tree in TREES for pair in _measure_tree(tree, folder / f"{tree.name}.{tree.seed}")]


def _measure_tree(tree: Tree, folder: Path) -> list[Pair]:
    folder.mkdir()
    made = {name: folder / name for name in candidates(tree)}
    seed = _make_seed(tree, folder)
    digests = {name: _carried(seed, place, name) for name, place in made.items()}
    pairs: list[Pair] = []
    for source, target in permutations(made, 2):
        first = digests[source]
        if first is None or digests[target] is None or tree.owner not in {"", source, target}:
            continue
        there = folder / f"{source}.{target}"
        middle = _carried(made[source], there, target) or "refused"
        last = _carried(there, folder / f"{source}.{target}.back", source) or "refused"
        pairs.append(Pair(tree.name, source, target, (first, middle, last)))
    return pairs


def candidates(tree: Tree) -> list[str]:
    """Names of the formats that may hold a tree: those with names of their own hold theirs, with its companions."""
    depth = max(map(len, tree.paths))
    rows = {name: find_format(name) for name in written()}
    return [
        name
        for name, row in rows.items()
        if (row.holds.depth or depth) >= depth
        and (name == tree.owner or (row.adapt is None and (row.holds.companions or not tree.owner)))
    ]


def written() -> list[str]:
    """Names of the formats that are written, in the order of the table."""
    return sorted(name for name, row in formats().items() if row.create is not None)


def _carried(source: Path, target: Path, to: str) -> str | None:
    """Weights digest of the target; None where its format does not hold the source."""
    try:
        return convert(source, target, to=to, wish=SAME_TREE, lineage=False).target.weights_digest
    except REFUSALS:
        return None


def _make_seed(tree: Tree, folder: Path) -> Path:
    row, place = find_format(tree.seed), folder / "seed"
    specs = {
        path: TensorSpec(path, shape, dtype) for path, (shape, dtype) in zip(tree.paths, SPECS, strict=True)
    }
    for name, content in row.holds.needs.items():
        place.mkdir(exist_ok=True)
        (place / name).write_bytes(content)
    assert row.create is not None
    writer = row.create(locate(place), Manifest(specs, kind="params"), checked_options(row, {}))
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
    trees = kept.get((source, target), [])
    return "" if source == target else "both" if trees == ["flat", "nested"] else ", ".join(trees) or "–"


def main() -> None:
    """Measure, and rewrite the table of the page in place."""
    with tempfile.TemporaryDirectory() as folder:
        pairs = measure(Path(folder))
    lost = [pair for pair in pairs if not pair.kept]
    if lost:
        raise SystemExit(f"these pairs do not keep the weights digest: {lost}")
    page = ROOT / "docs" / "reference" / "pairs.md"
    block = f"<!-- pairs:start -->\n\n{render(pairs)}\n<!-- pairs:end -->"
    text = page.read_text()
    page.write_text(
        re.sub(r"<!-- pairs:start -->.*?<!-- pairs:end -->", lambda _found: block, text, flags=re.DOTALL)
    )


if __name__ == "__main__":
    main()
