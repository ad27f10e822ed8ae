"""`wherry inspect`, `wherry layouts` and `wherry diff`: what checkpoints contain, and how two of them differ."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import click

from wherry.cli.options import as_json, chosen, memory, quiet, settings
from wherry.cli.say import bar, print_json, print_rows, print_table, say
from wherry.core.request import SourceRequest
from wherry.core.units import plural, show_size
from wherry.errors import MismatchError, printable

if TYPE_CHECKING:
    from rich.tree import Tree

    from wherry.prove.differences import Comparison, TensorDifference
    from wherry.prove.inspect import Inspection

_MOST_ROWS = 40
_filter = click.option(
    "--filter", metavar="GLOB", help="Only tensors whose key path matches, for example '*/kernel'."
)


@click.command()
@click.argument("uri")
@click.option("--sha256", is_flag=True, help="Compute the SHA-256 of each tensor's canonical bytes.")
@click.option(
    "--digest",
    is_flag=True,
    help="Compute the tensor digests, and warn of tensors that hold only zeros, a single value, or NaN.",
)
@click.option(
    "--write",
    is_flag=True,
    help="Write the digests to a sidecar of the checkpoint, so that it can be registered.",
)
@click.option(
    "--stats",
    is_flag=True,
    help="Compute minimum, maximum, mean and the number of NaNs, infinities and zeros.",
)
@_filter
@click.option("--tree", is_flag=True, help="Show the tensors as a tree, with the size of each branch.")
@click.option("--pickles", is_flag=True, help="Instead, list what each pickle at URI would import.")
@memory
@quiet
@chosen
@as_json
def inspect(
    uri: str, json_: bool, quiet: bool, pickles: bool, tree: bool, given: dict[str, Any], **arguments: Any
) -> None:
    """List the contents of the checkpoint at URI."""
    from wherry.prove.inspect import inspect as list_contents

    if pickles:
        _show_pickles(uri, json_=json_)
        return
    with bar(quiet=quiet or json_) as progress:
        inspection = list_contents(SourceRequest(uri, **given), progress=progress, **arguments)
    if json_:
        print_json(inspection.to_json())
        return
    _show_inspection(inspection, tree=tree)
    if arguments["write"]:
        from wherry.store.local_store import locate
        from wherry.store.sidecar import sidecar_location

        sidecar = sidecar_location(locate(inspection.detection.uri)).uri
        say(f"wrote {sidecar}: `wherry ledger record` and `register` can use these digests")


@click.command()
@click.argument("a")
@click.argument("b")
@click.option("--no-values", is_flag=True, help="Compare only metadata; read no tensor.")
@_filter
@click.option("--family", metavar="NAME", help="Model family, to compare B in the layout of A's system.")
@click.option("--set", "options", multiple=True, metavar="NAME=VALUE", help="Option of that layout.")
@memory
@quiet
@as_json
def diff(
    a: str, b: str, no_values: bool, options: Sequence[str], json_: bool, quiet: bool, **arguments: Any
) -> None:
    """List the differences between the checkpoints A and B.

    Compares tensors, their values, and config attributes. If A and B have different formats and no key path in common,
    B is compared in the layout of A's system, as a conversion would write it. Exits with 9 if anything differs.
    """
    from wherry.prove.differences import diff

    with bar(quiet=quiet or json_) as progress:
        found = diff(a, b, values=not no_values, options=settings(options), progress=progress, **arguments)
    if json_:
        print_json(found.to_json())
    else:
        _show_differences(found)
    sys.exit(0 if found.same else MismatchError.exit_code)


@click.command()
@click.argument("family", required=False)
@click.option("--family-file", metavar="FILE", help="TOML file that declares or changes a model family.")
@as_json
def layouts(family: str | None, family_file: str | None, json_: bool) -> None:
    """List the model families, or show the layouts of FAMILY.

    Shows key paths and axes in every system, the facts of the model, and what judged its conversions.
    """
    from wherry.transform.system import table

    if family is None and family_file is None:
        _list_families(json_=json_)
        return
    found = table(family, family_file)
    if json_:
        print_json(found)
        return
    for parameter, systems in found["parameters"].items():
        _show_group(parameter, [(system, text) for system, texts in systems.items() for text in texts])
    for name, fact in found["facts"].items():
        _show_group(f"fact {name}: {fact['about']}", list(fact["systems"].items()))
    _show_group("judges, apart from the way there and back", [
        (system, f"{ways['into']} (to {system}); {ways['out_of']} (from {system})")
        for system, ways in found["judged"].items()
    ])  # fmt: skip


def _show_group(heading: str, rows: list[tuple[str, str]]) -> None:
    say(heading)
    width = max((len(system) for system, _text in rows), default=0)
    for system, text in rows:
        say(f"  {system:<{width}}  {text}")


def _list_families(*, json_: bool) -> None:
    from wherry.families import adapter_families, families, load_family
    from wherry.transform.overview import (
        blocks_without_layouts,
        matrix,
        models_without_layouts,
        without_layouts,
    )
    from wherry.transform.schemes import schemes

    rows = [load_family(name) for name in families()]
    (_corner, *columns), *lines = matrix()
    if json_:
        print_json([
            {"name": row.name, "about": row.about, "systems": sorted(row.systems),
             "forms": dict(zip(columns, cells, strict=True))}
            for row, (_name, *cells) in zip(rows, lines, strict=True)
        ])  # fmt: skip
        return
    print_table(
        ["family", "models", "systems"], [[row.name, row.about, ", ".join(row.systems)] for row in rows]
    )
    say("")
    print_table(["family", *columns], lines)
    say("")
    print_table(
        ["scheme", "quantised weights that are dequantised"], [[one.name, one.about] for one in schemes()]
    )
    _show_group(
        "families of LoRA adapters, in PEFT and MaxText",
        [(name, load_family(name).about) for name in adapter_families()],
    )
    _show_group("model types without layouts", list(without_layouts().items()))
    _show_group("decoder blocks of MaxText without layouts", list(blocks_without_layouts().items()))
    _show_group("other models of MaxText's list without layouts", list(models_without_layouts().items()))


def _show_pickles(uri: str, *, json_: bool) -> None:
    """Print the pickles of one file or folder; it need not be a checkpoint, and may be hostile."""
    from wherry.integrations.containers.pickle.survey import survey

    found = survey(uri)
    if json_:
        print_json([stream.to_json() for stream in found])
        return
    rows = [
        [stream.file, str(one.position), one.name, str(one.count), "yes" if one.known else "NO"]
        for stream in found
        for one in stream.globals
    ]
    if rows:
        print_table(["pickle", "byte", "global", "times", "known"], rows)
    for stream in found:
        if stream.error:
            say(f"{stream.file}: reading stopped: {stream.error}")
    unknown = {one.name for stream in found for one in stream.globals if not one.known}
    total = f"{plural(len(found), 'pickle')}, {plural(len(rows), 'global')}"
    say(f"{total}, {len(unknown)} of them unknown to all readers")


def _show_inspection(inspection: Inspection, *, tree: bool) -> None:
    manifest, found = inspection.manifest, inspection.detection
    print_rows([
        ("uri", found.uri),
        ("format", f"{found.format} ({found.format_version})"),
        ("kind", manifest.kind),
        ("step", manifest.step),
        ("tensors", len(manifest.tensors)),
        ("parameters", f"{manifest.parameters:,}"),
        ("bytes", show_size(manifest.nbytes)),
        ("companions", ", ".join(one.name for one in manifest.companions)),
    ])  # fmt: skip
    for warning in inspection.warnings:
        say(f"  warning: {warning}")
    rows = inspection.to_json()["tensors"]
    if tree:
        _show_tree(rows)
        return
    hashed = [name for name in ("digest", "sha256") if any(row[name] for row in rows)]
    statistics = list(rows[0]["statistics"]) if rows and "statistics" in rows[0] else []
    cells = (
        [
            row["path"],
            " x ".join(map(str, row["shape"])),
            row["dtype"],
            *(row[name] or "" for name in hashed),
            *(_number(row["statistics"][name]) for name in statistics),
        ]
        for row in rows
    )
    print_table(["tensor", "shape", "dtype", *hashed, *statistics], cells)


def _number(value: Any) -> str:
    if value is None:
        return ""
    return f"{value + 0.0:.6g}" if isinstance(value, float) else str(value)


def _show_tree(rows: Iterable[Mapping[str, Any]]) -> None:
    """Print key paths as a tree; each branch states its number of tensors and its bytes."""
    from rich.console import Console
    from rich.tree import Tree

    from wherry.core.dtypes import canonical_bytes

    branches: dict[tuple[str, ...], Tree] = {(): Tree("")}
    totals: dict[tuple[str, ...], list[int]] = {}
    for row in rows:
        *parents, leaf = row["path"].split("/" if "/" in row["path"] else ".")
        nbytes = canonical_bytes(row["dtype"], tuple(row["shape"]))
        for depth in range(len(parents) + 1):
            path = tuple(parents[:depth])
            if path not in branches:
                branches[path] = branches[path[:-1]].add("")
            total = totals.setdefault(path, [0, 0])
            total[0] += 1
            total[1] += nbytes
        branches[tuple(parents)].add(
            printable(f"{leaf}  {row['dtype']}[{', '.join(map(str, row['shape']))}]")
        )
    for path, (count, nbytes) in totals.items():
        name = path[-1] if path else "."
        branches[path].label = printable(f"{name}  ({plural(count, 'tensor')}, {show_size(nbytes)})")
    Console(width=None if sys.stdout.isatty() else 400, markup=False, highlight=False).print(branches[()])


def _show_differences(found: Comparison) -> None:
    unread = "" if found.values_read else " (shape and dtype only; values were not read)"
    print_rows([
        ("a", f"{found.a} ({found.formats[0]})"),
        ("b", f"{found.b} ({found.formats[1]})"),
        ("layout", f"B is compared in the layout of {found.layout}" if found.layout else ""),
        ("equal", f"{found.equal} of {plural(found.tensors, 'tensor')} in both{unread}"),
    ])  # fmt: skip
    if found.differences:
        print_table(
            ["tensor", "difference", "a", "b", "max error", "elements"],
            ([row.path, *_difference(row)] for row in islice(found.differences, _MOST_ROWS)),
        )
    if found.attributes:
        print_table(
            ["file", "attribute", "a", "b"],
            (
                [row.file or "checkpoint", row.name, row.a or "-", row.b or "-"]
                for row in islice(found.attributes, _MOST_ROWS)
            ),
        )
    more = max(len(found.differences) - _MOST_ROWS, 0) + max(len(found.attributes) - _MOST_ROWS, 0)
    if more:
        say(f"and {more} more; --json has all")
    if found.same:
        say("no differences" if found.values_read else "no differences in the metadata")


def _difference(row: TensorDifference) -> list[str]:
    what = "bytes only" if row.what == "values" and row.elements == 0 else row.what
    return [what, row.a or "-", row.b or "-", _number(row.error), _number(row.elements)]
