"""plan: everything that a conversion will do, resolved before any byte moves.

A plan lists which source tensor becomes which target tensor, what is ignored and by which named rule, the bytes
in and out, the largest piece of memory, the parameter count against what the config says, and the target's own
manifest. Making a plan reads metadata only and writes nothing. Its digest identifies the conversion: the same
source structure, target format, options and rules give the same digest on any machine.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from wherry.converter.planned import Plan
from wherry.core.digest import sha256_of
from wherry.core.keypath import KeyPath, render
from wherry.core.request import PLAIN, Wish
from wherry.core.tensorspec import GRID
from wherry.core.units import parse_size
from wherry.errors import IncompleteError, UnsupportedError, UsageError
from wherry.formats.checkpoint import Checkpoint, open_checkpoint
from wherry.formats.detect import absence
from wherry.formats.registry import checked_options, find_format
from wherry.ledger.resolve import checkpoint_uri
from wherry.mover.pool import Pool
from wherry.mover.source import Spill
from wherry.storage.stores import locate
from wherry.tree.axes import settled
from wherry.tree.held import require_held
from wherry.tree.mapping import TREE_OPTIONS, Mapped, map_tree
from wherry.view.choose import relaid

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping

    from wherry.core.manifest import Manifest
    from wherry.formats.format import Format, Options

DEFAULT_MEMORY = "128MiB"


def plan(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    to: str,
    options: Options | None = None,
    memory: str | int = DEFAULT_MEMORY,
    only: str | None = None,
    ignore: tuple[str, ...] = (),
    verify: str = "digest",
    format: str | None = None,
    step: int | None = None,
    item: str | None = None,
    wish: Wish = PLAIN,
    as_step: int | None = None,
) -> Plan:
    """Resolve a conversion without writing anything.

    Args:
        source: URI of a checkpoint, step or run.
        target: URI of exactly what will be committed.
        to: target format, a name or alias.
        options: format-specific options and `split` / `join`.
        memory: budget, for example `128MiB`.
        only: `params` carries the parameters and leaves optimizer state and counters.
        ignore: named rules for what the target cannot hold: `values`, `empties`, `companions`.
        verify: `digest` reads the target back before the commit, `none` does not.
        format, step, item: which checkpoint of the source.
        wish: what is asked for of layouts; see `wherry.view.choose`.
        as_step: the step to write, where the source states none (or another one is wanted).

    Raises:
        UsageError, NotFoundError, NotACheckpointError, DamagedError, HostileError: the request or the source is bad,
            or a chunk of the source cannot be decoded in that much memory.
        UnrepresentableError: the target cannot hold the source; every reason is named.
    """
    with open_checkpoint(checkpoint_uri(source), format=format, step=step, item=item) as checkpoint:
        seen, options, only = relaid(checkpoint, _writable(to), options or {}, wish, only)
        return make_plan(
            seen, target, to=to, options=options, memory=memory, only=only, ignore=ignore, verify=verify,
            as_step=as_step,
        )  # fmt: skip


def make_plan(
    checkpoint: Checkpoint,
    target: str | os.PathLike[str],
    *,
    to: str,
    options: Options | None = None,
    memory: str | int = DEFAULT_MEMORY,
    only: str | None = None,
    ignore: tuple[str, ...] = (),
    verify: str = "digest",
    as_step: int | None = None,
) -> Plan:
    """The plan for a checkpoint that is already open; see `plan`."""
    row = _writable(to)
    if verify not in ("digest", "none"):
        raise UsageError(f"verify={verify} is not possible", cure="choose digest or none")
    if only is None:
        _require_present(checkpoint)
    given = dict(options or {})
    tree = settled({name: given.pop(name) for name in TREE_OPTIONS if name in given})
    checked = checked_options(row, given)
    mapped = map_tree(checkpoint.manifest, row, tree, only=only, ignore=ignore, uri=str(target))
    if only is not None:
        _require_present(checkpoint, left=_left_by(mapped, checkpoint.manifest))
    require_held(mapped.manifest, row, str(target))
    manifest = mapped.manifest if as_step is None else replace(mapped.manifest, step=as_step)
    prepared = _without_hints(row.prepare(manifest, checked))
    carried = [checkpoint.manifest.tensors[path] for path in mapped.pairs.values()]
    budget = parse_size(memory)
    bytes_of = Spill(checkpoint.reader, Pool(budget))
    return Plan(
        source=checkpoint.detection,
        target=locate(target).uri,
        to=row.name,
        format_version=row.version(prepared, checked),
        options={**checked, **tree},
        manifest=prepared,
        source_manifest=checkpoint.manifest,
        pairs=mapped.pairs,
        ignored=(*checkpoint.ignored, *mapped.ignored),
        raw=frozenset(spec.path for spec in carried if bytes_of.by_span(spec)),
        spilled=frozenset(
            spec.path for spec in carried if bytes_of.spills(spec) and not bytes_of.flows(spec)
        ),
        regions=frozenset(spec.path for spec in carried if bytes_of.by_region(spec)),
        free=frozenset(spec.path for spec in carried if bytes_of.free(spec)),
        parameters=checkpoint.original.manifest.parameters,
        expected_parameters=checkpoint.manifest.origin.get("expected_parameters"),
        memory=budget,
        verify=verify,
        digest=_digest(checkpoint, row, {**checked, **tree}, prepared, mapped),
        lossy=checkpoint.lossy,
        notes=checkpoint.notes,
        snippet=checkpoint.snippet,
    )


def _without_hints(manifest: Manifest) -> Manifest:
    """A target's manifest without what its format was told of chunks."""
    kept = {
        path: replace(spec, tags=_rest(spec.tags)) for path, spec in manifest.tensors.items() if spec.tags
    }
    return replace(manifest, tensors={**manifest.tensors, **kept})


def _rest(tags: Mapping[str, str] | None) -> dict[str, str] | None:
    return {name: text for name, text in (tags or {}).items() if name != GRID} or None


def _writable(to: str) -> Format:
    row = find_format(to)
    if row.create is None:
        raise UnsupportedError(
            f"{row.name} is read but not written", cure="`wherry formats` shows what is written"
        )
    return row


def _left_by(mapped: Mapped, source: Manifest) -> Callable[[KeyPath], bool]:
    """Whether a leaf is left behind, and so may be missing; also one of which not even the shape is there."""
    carried = set(mapped.pairs.values())
    roots = {path[:1] for path in carried}
    return lambda path: path not in carried and (path in source.tensors or path[:1] not in roots)


def _require_present(checkpoint: Checkpoint, *, left: Callable[[KeyPath], bool] | None = None) -> None:
    reason = absence(checkpoint.reader, left=left)
    if reason is not None:
        choice = (
            "take another step" if left else "take another step, or carry --only params where these are whole"
        )
        raise IncompleteError(reason, uri=checkpoint.uri, cure=f"restore the missing files, {choice}")


def _digest(
    checkpoint: Checkpoint, row: Format, options: Mapping[str, Any], prepared: Manifest, mapped: Mapped
) -> str:
    source = checkpoint.detection
    return sha256_of(
        "plan",
        {
            "from": [source.format, source.format_version],
            "to": [row.name, row.version(prepared, options)],
            "options": {name: value for name, value in sorted(options.items()) if value is not None},
            "tensors": [
                [list(path), list(mapped.pairs[path]), list(spec.shape), spec.dtype, list(spec.chunks or ())]
                for path, spec in sorted(prepared.tensors.items())
            ],
            "ignored": sorted((render(entry.path), entry.rule) for entry in mapped.ignored),
            "companions": sorted((companion.name, companion.size) for companion in prepared.companions),
            **({"layout": layout} if (layout := prepared.origin.get("layout")) else {}),
        },
    )
