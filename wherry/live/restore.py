"""restore: a live training state filled straight from a checkpoint of any format.

    state = wherry.restore(uri, into=state).state
    model = wherry.restore(uri, into=model, to="huggingface", only="params").state     # through another system's layout

The template says what is wanted: arrays, or stand-ins with shape, element type and sharding. Every name, shape, element
type and axis name is compared before the first byte is read, and everything that does not fit is named at once; what
was made is compared again before the state is put together. Of a sharded array each device's shard is read alone, so
that no process reads what lies on another's devices. A tree of JAX is never changed, a new one is returned; torch
modules and tensors and NNX modules are filled in place.

Filling: the arrays of a live state made from a checkpoint's tensors, in parallel and within a budget.

What holds memory on its way to a device is counted; a shard that is larger than the budget goes alone. The frameworks
are behind the service `live`; here is only what is read for them.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from wherry.converter.plan import DEFAULT_MEMORY
from wherry.core import dtypes
from wherry.core.keypath import KeyPath, render
from wherry.core.progress import Meter
from wherry.core.request import LayoutRequest
from wherry.core.services import service
from wherry.core.units import parse_size
from wherry.errors import IncompleteError, MismatchError, UnrepresentableError, UsageError
from wherry.formats.checkpoint import Checkpoint
from wherry.formats.detect import describe_absent
from wherry.formats.registry import find_format
from wherry.ledger.open import open_named
from wherry.live.match import TemplateMatch, match
from wherry.runtime import threads
from wherry.staging.in_use import in_use
from wherry.tree.forms import rule_texts
from wherry.tree.mapping import parameters_of
from wherry.tree.renames import parse_rules, renamed
from wherry.view.choose import relaid

if TYPE_CHECKING:
    import os
    from collections.abc import Generator, Iterable, Mapping, Sequence

    import numpy as np

    from wherry.core.manifest import Manifest
    from wherry.core.progress import OnProgress
    from wherry.core.tensorspec import Region
    from wherry.formats.checkpoint import Checkpoint
    from wherry.live.match import Leaf, Pair


_SHOWN = 100  # names that an error lists


@dataclass(frozen=True, slots=True)
class Restored:
    """What came of a restoration.

    Attributes:
        state: the template, filled; a new tree, or the module itself.
        step: of the checkpoint, where known.
        missing: printed names of the template's leaves that the checkpoint lacks; they are as they were.
        unexpected: printed key paths of the checkpoint that the template lacks.
        notes: what was decided about names, in words.
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
    wish: LayoutRequest | None = None,
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
        only: `params`, or patterns of printed key paths by commas: what of the checkpoint is restored.
        strict: whether a leaf that the checkpoint lacks, or an entry that the template lacks, is an error.
        rename: rules of `wherry.tree.renames` for the checkpoint's key paths, one text with `;` between or several.
        cast: whether element types may differ; values are then converted.
        to: the format of whose system the template has names and shapes, where it is another's (`huggingface`).
        options: forms and conventions of the layouts, as for `convert`.
        wish: family, config and the like, as for `convert`.
        memory: bytes of shards that are held in memory on their way at a time; a larger shard goes alone.
        progress: called a few times a second.
        format, step, item: which checkpoint of `uri`.
        allow_opaque: as for `wherry.open`.

    Raises:
        UnrepresentableError: names are unmatched and `strict`; all of them are named.
        MismatchError: shapes, element types or axis names differ, or an array was made otherwise than asked for.
        IncompleteError: chunks of what is wanted are missing.
        UsageError: the template holds nothing, or an option that nothing takes.
        MissingExtraError: the template's framework is not installed.
    """
    live = service("live")
    leaves: list[Leaf] = live.survey(into).leaves
    if not leaves:
        raise UsageError(
            "the template holds no arrays", cure="give a state with arrays or stand-ins for them"
        )
    opened = open_named(uri, format=format, step=step, item=item, allow_opaque=allow_opaque)
    with opened as source, in_use(source.uri):
        seen, rest = _view(source, to, dict(options or {}), wish or LayoutRequest(), only)
        named = seen is source or to == "penzai"
        matched = match(leaves, seen.manifest, _names(seen, rest, rename), cast=cast, named=named)
        _require(matched, seen, strict=strict)
        return _restored(into, matched, seen, live, (parse_size(memory), progress))


def _restored(
    into: Any, matched: TemplateMatch, seen: Checkpoint, live: Any, how: tuple[int, OnProgress | None]
) -> Restored:
    """Read and fill what was found to fit."""
    total = sum(pair.source.nbytes for pair in matched.pairs if pair.source)
    filling = FillPass(seen, how[0], Meter("restore", total, how[1]))
    made = filled(matched.pairs, filling, live)

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


def _view(
    source: Checkpoint, to: str | None, options: dict[str, Any], wish: LayoutRequest, only: str | None
) -> tuple[Checkpoint, str | None]:
    """The checkpoint under the template's system, and what of `only` is left to do."""
    if to is None and not options and not wish.explicit:
        return source, only
    row = find_format(to or source.detection.format)
    seen, left, rest = relaid(source, row, options, wish, "params" if only == "params" else None)
    if left:
        raise UsageError(
            f"restoring has no option {', '.join(sorted(left))}", cure="names are changed with rename=…"
        )
    return seen, rest if only == "params" else only


def _names(seen: Checkpoint, only: str | None, rename: str | Sequence[str] | None) -> dict[KeyPath, KeyPath]:
    """Key path in the checkpoint → the name that it counts under, for what is wanted."""
    chosen = _chosen(seen.manifest, only, seen.uri)
    if rename is None:
        return {path: path for path in chosen}
    return {path: path for path in chosen} | renamed(chosen, parse_rules(rule_texts(rename)))


def _chosen(manifest: Manifest, only: str | None, uri: str) -> list[KeyPath]:
    every = sorted({*manifest.tensors, *manifest.values})
    if only is None:
        return every
    if only == "params":
        return parameters_of(manifest, uri)
    patterns = [pattern.strip() for pattern in only.split(",")]
    found = [path for path in every if any(fnmatchcase(render(path), pattern) for pattern in patterns)]
    if not found:
        raise UsageError(
            f"only={only} matches nothing",
            uri=uri,
            cure="`wherry inspect` lists the key paths, or write params",
        )
    return found


def _require(matched: TemplateMatch, seen: Checkpoint, *, strict: bool) -> None:
    """Say everything that does not fit, before a byte is read."""
    lost = [f"{leaf.name}: the checkpoint lacks it" for leaf in matched.missing] if strict else []
    left = [f"{render(path)}: the template lacks it" for path in matched.unexpected] if strict else []
    wrong = [*matched.wrong, *lost, *left]
    if wrong:
        more = f"\n  and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise (MismatchError if matched.wrong else UnrepresentableError)(
            f"{len(wrong)} things do not fit between checkpoint and template:\n  "
            + "\n  ".join(wrong[:_SHOWN]) + more,
            uri=seen.uri,
            cure=_cure(matched),
        )  # fmt: skip
    wanted = {pair.source.path for pair in matched.pairs if pair.source}
    for piece in seen.reader.absent():
        if piece.path in wanted:
            raise IncompleteError(
                f"missing: {describe_absent(piece)}", uri=seen.uri, path=render(piece.path),
                cure="restore another step; `wherry verify` lists all that is missing",
            )  # fmt: skip


def _cure(matched: TemplateMatch) -> str:
    if not matched.pairs:
        return (
            "does the template have another system's names? say whose: to='huggingface' (or maxtext, t5x, …)"
        )
    if matched.unexpected and not matched.missing and not matched.wrong:
        return "restore a part of it with only='params', or list what is left with strict=False"
    return "give rename=…, cast=True for element types, or strict=False for what is unmatched"


@dataclass(slots=True)
class FillPass:
    """One pass: what is read, and how much of it may be in memory at once.

    Attributes:
        checkpoint: the source, or a view of it.
        memory: the budget in bytes.
        meter: counts what was read.
        held: bytes that are in memory now.
        free: told when there are less.
    """

    checkpoint: Checkpoint
    memory: int
    meter: Meter
    held: int = 0
    free: threading.Condition = field(default_factory=threading.Condition)

    @contextmanager
    def room(self, nbytes: int) -> Generator[None]:
        """Wait until so many bytes fit into the budget; what is larger than it goes alone."""
        with self.free:
            self.free.wait_for(lambda: self.held == 0 or self.held + nbytes <= self.memory)
            self.held += nbytes
        try:
            yield
        finally:
            with self.free:
                self.held -= nbytes
                self.free.notify_all()


def filled(pairs: Sequence[Pair], filling: FillPass, live: Any) -> dict[KeyPath, Any]:
    """Fill every leaf, several at a time.

    Args:
        pairs: leaves and what fills them; all of it was found to fit.
        filling: the pass.
        live: the service of that name.

    Returns:
        Stored key path of each leaf → what it becomes.

    Raises:
        MismatchError: something was made otherwise than asked for.
        DamagedError, StorageError: it could not be read.
    """
    tied = {pair.leaf.path: pair for pair in pairs}
    first = [pair for pair in pairs if pair.leaf.alias not in tied]

    def one(pair: Pair) -> Any:
        return _fill(pair, filling, live)

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


def _fill(pair: Pair, filling: FillPass, live: Any) -> Any:
    spec = pair.source
    if spec is None:
        return live.of_value(pair.leaf, pair.value)

    def read(region: Region) -> np.ndarray:
        return _read(pair, region, filling)

    def room(nbytes: int) -> Any:
        return filling.room(nbytes)

    return live.fill(pair.leaf, read, room, filling.memory)


def _read(pair: Pair, region: Region, filling: FillPass) -> np.ndarray:
    """A region of the leaf out of the checkpoint, in its element type; a new C-order array."""
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
    return made if alone else made.copy()  # the reader of a view uses its memory again


def _require_equal(pair: Pair, kept: Any, filling: FillPass, live: Any) -> None:
    """Refuse two tensors of a checkpoint for what is one tensor in the template, unless they are equal."""
    if pair.source is None:
        return
    whole = tuple(slice(0, extent) for extent in pair.leaf.shape)
    with filling.room(pair.source.nbytes):
        if not live.equals(kept, _read(pair, whole, filling)):
            raise MismatchError(
                f"in the template it is {render(pair.leaf.alias or ())} too, in the checkpoint they differ",
                uri=filling.checkpoint.uri, path=pair.leaf.name, cure="untie them, or leave one out with only=…",
            )  # fmt: skip
