"""Container conversion there and back, for every pair of formats: what keeps the weights digest.

    python infra/pairs.py

measures all pairs and writes the table into README.md, between `<!-- pairs:start -->` and `<!-- pairs:end -->`. Two
small trees of float32 and bfloat16 are carried: one with one-part key paths, one with nested ones. A format that
cannot hold a tree refuses it by name before it writes anything; every other pair must keep the digest, or this fails.
`tests/test_pairs.py` runs the same measurement and compares README with it.
"""

from __future__ import annotations

import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from wherry.convert import convert
from wherry.errors import UnrepresentableError, UnsupportedError, UsageError
from wherry.manifest import Manifest
from wherry.registry import checked_options, find_format, formats
from wherry.store import locate
from wherry.tensorspec import Span, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from wherry.keypath import KeyPath

ROOT = Path(__file__).resolve().parents[1]
# Each tree is made in a format that holds any of its kind and takes any span.
SEEDS = {"flat": "safetensors", "nested": "torch-zip"}
PATHS: dict[str, tuple[KeyPath, ...]] = {
    "flat": (("embed.weight",), ("layers.0.weight",), ("norm",)),
    "nested": (("params", "embed", "kernel"), ("params", "layer_0", "kernel"), ("params", "norm", "scale")),
}
SPECS = (((4, 6), "float32"), ((3, 4, 2), "bfloat16"), ((5,), "float32"))
# What a format answers that does not hold a tree.
REFUSALS = (UnrepresentableError, UnsupportedError, UsageError)


@dataclass(frozen=True, slots=True)
class Pair:
    """One tree, from one format to another and back.

    Attributes:
        tree: `flat` or `nested`.
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
    """Carry both trees through every pair of formats that hold them.

    Args:
        folder: an empty folder to work in.
    """
    return [pair for tree in PATHS for pair in _measure_tree(tree, folder / tree)]


def _measure_tree(tree: str, folder: Path) -> list[Pair]:
    folder.mkdir()
    seed = _make_seed(tree, folder)
    made: dict[str, Path] = {}
    digests: dict[str, str] = {}
    for name in written():
        digest = _carried(seed, folder / name, name)
        if digest is not None:
            made[name], digests[name] = folder / name, digest
    pairs: list[Pair] = []
    for source, place in made.items():
        for target in made.keys() - {source}:
            there = folder / f"{source}.{target}"
            digest = _carried(place, there, target)
            if digest is not None:
                back = _carried(there, folder / f"{source}.{target}.back", source)
                pairs.append(Pair(tree, source, target, (digests[source], digest, back or "refused")))
    return pairs


def written() -> list[str]:
    """Names of the formats that are written, in the order of the table."""
    return sorted(name for name, row in formats().items() if row.create is not None)


def _carried(source: Path, target: Path, to: str) -> str | None:
    """Weights digest of the target; None where its format does not hold the source."""
    try:
        return convert(source, target, to=to, lineage=False).target.weights_digest
    except REFUSALS:
        return None


def _make_seed(tree: str, folder: Path) -> Path:
    row, place = find_format(SEEDS[tree]), folder / "seed"
    specs = {
        path: TensorSpec(path, shape, dtype) for path, (shape, dtype) in zip(PATHS[tree], SPECS, strict=True)
    }
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
    return "" if source == target else "both" if len(trees) == len(PATHS) else "".join(trees) or "–"


def main() -> None:
    """Measure, and rewrite the table in README.md in place."""
    with tempfile.TemporaryDirectory() as folder:
        pairs = measure(Path(folder))
    lost = [pair for pair in pairs if not pair.kept]
    if lost:
        raise SystemExit(f"these pairs do not keep the weights digest: {lost}")
    readme = ROOT / "README.md"
    block = f"<!-- pairs:start -->\n\n{render(pairs)}\n<!-- pairs:end -->"
    text = readme.read_text()
    readme.write_text(
        re.sub(r"<!-- pairs:start -->.*?<!-- pairs:end -->", lambda _found: block, text, flags=re.DOTALL)
    )


if __name__ == "__main__":
    main()
