"""restore: fill a live training state directly from a checkpoint of any format.

    state = wherry.restore(uri, into=state).state
    model = wherry.restore(uri, into=model, to="huggingface", only="params").state     # through another system's layout

The template states what to restore: arrays, or stand-ins with shape, element type and sharding. Every name, shape,
element type and axis name is compared before the first byte is read, and all mismatches are reported at once; the
created arrays are compared again before the state is assembled. Each device's shard of a sharded array is read
separately, so that no process reads data of another's devices. A JAX tree is never changed, a new one is returned;
torch modules and tensors and NNX modules are filled in place.

Arrays are filled in parallel and within a memory budget, which counts the shards that are on their way to a device; a
shard that is larger than the budget is read alone. The frameworks are behind the service `live`; this module only reads
for them.
"""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from wherry.core import dtypes, threads
from wherry.core.keypath import KeyPath, render
from wherry.core.lazy_dataclass import dataclass
from wherry.core.manifest import Manifest
from wherry.core.progress import Meter, OnProgress
from wherry.core.request import LayoutRequest
from wherry.core.services import service
from wherry.core.tensorspec import Region
from wherry.core.units import DEFAULT_MEMORY, parse_budget
from wherry.cures import Command, Cure
from wherry.errors import IncompleteError, MismatchError, UnrepresentableError, UsageError
from wherry.formats.checkpoint import Checkpoint
from wherry.formats.detect import describe_absent
from wherry.formats.registry import find_format
from wherry.layout.forms import rule_texts
from wherry.layout.mapping import parameters_of
from wherry.layout.renames import parse_rules, rename_paths
from wherry.ledger.resolve import open_checkpoint
from wherry.live.match import Leaf, Pair, TemplateMatch, match
from wherry.target.janitor import in_use
from wherry.transform.choose import plan_view

if TYPE_CHECKING:
    import numpy as np


_SHOWN = 100  # names that an error lists


@dataclass(frozen=True, slots=True)
class Restored:
    """The result of a restoration.

    Attributes:
        state: the template, filled; a new tree, or the module itself.
        step: of the checkpoint, if known.
        missing: printed names of the template's leaves that are missing in the checkpoint; they are unchanged.
        unexpected: printed key paths of the checkpoint that are missing in the template.
        notes: decisions about names, as text.
        filled: number of leaves that were filled.
        nbytes: bytes that were read.
    """

    state: Any
    step: int | None
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    notes: tuple[str, ...]
    filled: int
    nbytes: int


def restore(
    uri: str | os.PathLike[str],
    into: Any,
    *,
    only: str | None = None,
    strict: bool = True,
    rename: str | Sequence[str] | None = None,
    cast: bool = False,
    to: str | None = None,
    options: Mapping[str, Any] | None = None,
    layout: LayoutRequest | None = None,
    memory: str | int = DEFAULT_MEMORY,
    progress: OnProgress | None = None,
    format: str | None = None,
    step: int | None = None,
    item: str | None = None,
    allow_opaque: Iterable[str] = (),
) -> Restored:
    """Fill a live state from a checkpoint; `wherry.restore`.

    Args:
        uri: a checkpoint, or a run folder (the newest complete step).
        into: the template: a JAX pytree of arrays or `jax.ShapeDtypeStruct` (boxes, optax states, dataclasses
            included), an NNX module or state, a Penzai model, a torch module, optimizer or state dict.
        only: the part of the checkpoint to restore: `params`, or patterns of printed key paths, separated by commas.
        strict: whether a leaf that is missing in the checkpoint, or an entry that is missing in the template, is an
            error.
        rename: rules of `wherry.layout.renames` for the checkpoint's key paths: one text with `;` between rules, or
            several texts.
        cast: whether element types may differ; values are then converted.
        to: the format with the template's names and shapes, if it differs from the checkpoint's (`huggingface`).
        options: forms and conventions of the layouts, as for `convert`.
        layout: family, config and similar options, as for `convert`.
        memory: bytes of shards that are held in memory at a time; a larger shard is read alone.
        progress: called a few times a second.
        format, step, item: which checkpoint of `uri`.
        allow_opaque: as for `wherry.open`.

    Raises:
        UnrepresentableError: names are unmatched and `strict` is set; all of them are named.
        MismatchError: shapes, element types or axis names differ, or an array was not created as requested.
        IncompleteError: chunks of requested tensors are missing.
        UsageError: the template contains no arrays, or an option is unknown.
        MissingExtraError: the template's framework is not installed.
    """
    live = service("live")
    leaves: list[Leaf] = live.survey(into).leaves
    if not leaves:
        raise UsageError(
            "the template contains no arrays", cure="pass a state with arrays or stand-ins for them"
        )
    opened = open_checkpoint(uri, format=format, step=step, item=item, allow_opaque=allow_opaque)
    with opened as source, in_use(source.uri):
        seen, rest = _view(source, to, dict(options or {}), layout or LayoutRequest(), only)
        named = seen is source or to == "penzai"
        chosen = _choose_paths(seen.manifest, rest, seen.uri)
        names = {path: path for path in chosen}
        if rename is not None:
            names |= rename_paths(chosen, parse_rules(rule_texts(rename)))
        matched = match(leaves, seen.manifest, names, cast=cast, named=named)
        _require(matched, seen, strict=strict)
        total = sum(pair.source.nbytes for pair in matched.pairs if pair.source)
        filling = FillPass(seen, parse_budget(memory), Meter("restore", total, progress))
        return _restore(into, matched, filling, live)


def _view(
    source: Checkpoint, to: str | None, options: dict[str, Any], layout: LayoutRequest, only: str | None
) -> tuple[Checkpoint, str | None]:
    """The checkpoint in the template's system, and the part of `only` that remains to be applied."""
    if to is None and not options and not layout.explicit:
        return source, only
    row, part = find_format(to or source.detection.format), "params" if only == "params" else None
    seen, left, rest = plan_view(source, row, options, layout, part, files=False)
    if left.names:
        raise UsageError(
            f"unknown option {', '.join(map(repr, sorted(left.names)))} for restore",
            cure="remove it; to change names, pass rename=…",
        )
    return seen, rest if only == "params" else only


def _restore(into: Any, matched: TemplateMatch, filling: FillPass, live: Any) -> Restored:
    """Read and fill the matched leaves."""
    made, seen = fill_leaves(matched.pairs, filling, live), filling.checkpoint

    def change(leaf: Leaf) -> Any:
        return made.get(leaf.stored, leaf.value)

    return Restored(
        state=live.rebuilt(into, change),
        step=seen.manifest.step,
        missing=tuple(leaf.name for leaf in matched.missing),
        unexpected=tuple(map(render, matched.unexpected)),
        notes=(*seen.notes, *matched.notes),
        filled=len(matched.pairs),
        nbytes=filling.meter.done,
    )


def _choose_paths(manifest: Manifest, only: str | None, uri: str) -> list[KeyPath]:
    every = sorted({*manifest.tensors, *manifest.values})
    if only is None:
        return every
    if only == "params":
        return parameters_of(manifest, uri)
    patterns = [pattern.strip() for pattern in only.split(",")]
    found = [path for path in every if any(fnmatchcase(render(path), pattern) for pattern in patterns)]
    if not found:
        raise UsageError(
            f"only={only} matches no key path",
            uri=uri,
            cure=Cure("run {} to list the key paths, or pass only='params'", Command("inspect")),
        )
    return found


def _require(matched: TemplateMatch, seen: Checkpoint, *, strict: bool) -> None:
    """Report all mismatches before a byte is read."""
    lost = [f"{leaf.name}: missing in the checkpoint" for leaf in matched.missing] if strict else []
    left = [f"{render(path)}: missing in the template" for path in matched.unexpected] if strict else []
    wrong = [*matched.wrong, *lost, *left]
    if wrong:
        more = f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        number = f"{len(wrong)} {'mismatch' if len(wrong) == 1 else 'mismatches'}"
        raise (MismatchError if matched.wrong else UnrepresentableError)(
            f"{number} between template (expected) and checkpoint (got): {'; '.join(wrong[:_SHOWN])}{more}",
            uri=seen.uri,
            cure=_cure(matched, seen.manifest),
        )
    wanted = {pair.source.path for pair in matched.pairs if pair.source}
    for piece in seen.reader.absent():
        if piece.path in wanted:
            raise IncompleteError(
                f"missing {describe_absent(piece)}", uri=seen.uri, path=render(piece.path),
                cure=Cure("restore another step, or run {} to list all missing chunks", Command("verify")),
            )  # fmt: skip


def _cure(matched: TemplateMatch, manifest: Manifest) -> str:
    renames = _renames(matched, manifest)
    if renames:
        return f"if these are the same tensors under other names, pass rename={renames!r}"
    if not matched.pairs:
        return "if the template has the names of another system, pass that: to='huggingface' (or maxtext, t5x, …)"
    if matched.unexpected and not matched.missing and not matched.wrong:
        return "restore a part of it with only='params', or accept unmatched entries with strict=False"
    return "pass rename=… for names, cast=True for element types, or strict=False to accept unmatched entries"


def _renames(matched: TemplateMatch, manifest: Manifest) -> list[str]:
    """Rename rules that would match everything; empty unless shape and element type leave no choice."""
    lost: dict[tuple[object, ...], list[str]] = defaultdict(list)
    for leaf in matched.missing:
        lost[leaf.shape, leaf.dtype].append(leaf.name)
    left: dict[tuple[object, ...], list[str]] = defaultdict(list)
    for path in matched.unexpected:
        spec = manifest.tensors.get(path)
        left[(spec.shape, spec.dtype) if spec else ()].append(render(path))
    alone = all(len(names) == 1 for names in (*lost.values(), *left.values()))
    if matched.wrong or not alone or lost.keys() != left.keys() or len(lost) > _SHOWN:
        return []
    return [f"{left[kind][0]} -> {names[0]}" for kind, names in lost.items()]


@dataclass(slots=True)
class FillPass:
    """One pass over a checkpoint with a memory budget.

    Attributes:
        checkpoint: the source, or a view of it.
        memory: the budget in bytes.
        meter: counts the bytes read.
        held: bytes that are in memory now.
        free: notified when `held` decreases.
    """

    checkpoint: Checkpoint
    memory: int
    meter: Meter
    held: int = 0
    free: threading.Condition = field(default_factory=threading.Condition)

    @contextmanager
    def room(self, nbytes: int) -> Generator[None]:
        """Wait until `nbytes` fit into the budget, or until nothing else is held if they exceed it."""
        with self.free:
            self.free.wait_for(lambda: self.held == 0 or self.held + nbytes <= self.memory)
            self.held += nbytes
        try:
            yield
        finally:
            with self.free:
                self.held -= nbytes
                self.free.notify_all()


def fill_leaves(pairs: Sequence[Pair], filling: FillPass, live: Any) -> dict[KeyPath, Any]:
    """Fill every leaf, several at a time.

    Args:
        pairs: leaves and the entries that fill them, already checked.
        filling: the pass.
        live: the service of that name.

    Returns:
        Stored key path of each leaf → its new value.

    Raises:
        MismatchError: an array was not created as requested.
        DamagedError, StorageError: a tensor could not be read.
    """
    tied = {pair.leaf.path: pair for pair in pairs}
    first = [pair for pair in pairs if pair.leaf.alias not in tied]

    def one(pair: Pair) -> Any:
        if pair.source is None:
            return live.of_value(pair.leaf, pair.value)

        def read(region: Region) -> np.ndarray:
            return _read(pair, region, filling)

        return live.fill(pair.leaf, read, filling.room, filling.memory)

    with threads.executor(threads.worker_count(), "wherry-restore") as executor:
        try:
            values = list(executor.map(one, first))
        except BaseException:
            executor.shutdown(wait=False, cancel_futures=True)
            raise
    made = {pair.leaf.stored: value for pair, value in zip(first, values, strict=True)}
    for pair in pairs:
        if pair.leaf.alias in tied:
            kept = made[tied[pair.leaf.alias].leaf.stored]
            _require_equal(pair, kept, filling, live)
            made[pair.leaf.stored] = kept
    return made


def _read(pair: Pair, region: Region, filling: FillPass) -> np.ndarray:
    """A region of the leaf, read from the checkpoint, in the leaf's element type; a new C-order array."""
    import numpy as np

    spec, order = pair.source, pair.order
    if spec is None:
        raise AssertionError("a value has no regions")
    wanted = region
    if order is not None:
        turned: list[slice] = [slice(0)] * len(order)
        for axis, place in enumerate(order):
            turned[place] = region[axis]
        wanted = tuple(turned)
    found = filling.checkpoint.read(spec.path, wanted)
    filling.meter.add(found.nbytes, spec.name)
    made = np.asarray(found.transpose(order) if order is not None else found, order="C")
    made = made.astype(dtypes.numpy_dtype(pair.leaf.dtype or spec.dtype), copy=False)
    alone = made.flags.owndata or not np.shares_memory(made, found)
    return made if alone else made.copy()  # the reader of a view reuses its memory


def _require_equal(pair: Pair, kept: Any, filling: FillPass, live: Any) -> None:
    """Check that two tensors of a checkpoint that are one tensor in the template are equal."""
    if pair.source is None:
        return
    whole = tuple(slice(0, extent) for extent in pair.leaf.shape)
    with filling.room(pair.source.nbytes):
        if not live.equals(kept, _read(pair, whole, filling)):
            raise MismatchError(
                f"tied to {render(pair.leaf.alias or ())} in the template, but the two differ in the checkpoint",
                uri=filling.checkpoint.uri, path=pair.leaf.name, cure="untie them, or omit one with only=…",
            )  # fmt: skip
