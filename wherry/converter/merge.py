"""merge: make one checkpoint of several, verified and recorded like a conversion.

Sources are opened, joined and read in one pass, in which each of them is hashed too: the receipt and the ledger have
every parent with its identity. `A*0.5 B*0.5` is a weighted sum; of `BASE ADAPTER` the second is a PEFT adapter, and the
result is the base with the adapter in its weights.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Unpack

from wherry.converter.convert import convert_all, settled_source
from wherry.converter.job import Job
from wherry.converter.keywords import spelled_out
from wherry.core.lazy_dataclass import dataclass
from wherry.core.progress import OnProgress
from wherry.core.receipt import Receipt
from wherry.core.request import (
    ConvertRequest,
    MergeKeywords,
    SourceRequest,
    TargetRequest,
    convert_request,
    options_of,
)
from wherry.cures import Argument, Blank, Command, Cure
from wherry.errors import UnrepresentableError, UsageError
from wherry.formats.checkpoint import Checkpoint, present_fingerprint
from wherry.formats.format import Options
from wherry.transform.merge_view import weighted_sum
from wherry.transform.merged_adapter import adapter_config, with_adapter
from wherry.transform.view import View

_FEWEST = 2
_CURE = Cure(
    "write {}, or {}",
    Command("merge", "A*0.5", "B*0.5", Blank("DST"), Argument("to", Blank("FORMAT"))),
    Command("merge", Blank("BASE"), Blank("ADAPTER"), Blank("DST"), Argument("to", Blank("FORMAT"))),
)


@dataclass(frozen=True, slots=True)
class MergeSource:
    """One source of a merge.

    Attributes:
        uri: a checkpoint, a step folder or a run folder.
        weight: its weight in a sum; None for a base and for an adapter.
    """

    uri: str
    weight: float | None = None


def parse_source(text: str) -> MergeSource:
    """A source as the command line names it: `URI` or `URI*WEIGHT`.

    Raises:
        UsageError: the weight is not a number.
    """
    uri, star, weight = text.rpartition("*")
    if not star:
        return MergeSource(text)
    try:
        return MergeSource(uri, float(weight))
    except ValueError as error:
        raise UsageError(f"invalid weight {weight!r} of {uri}", cure=_CURE) from error


@spelled_out(
    MergeKeywords,
    options_of(SourceRequest, TargetRequest, ConvertRequest),
    without=("format", "step", "item"),
)
def merge(
    sources: Sequence[str | MergeSource],
    target: str | os.PathLike[str],
    *,
    to: str,
    options: Options | None = None,
    **common: Unpack[MergeKeywords],
) -> Receipt:
    """Merge checkpoints into one.

    Args:
        sources: each with its weight, as `URI*WEIGHT`; or a base and a PEFT adapter, without weights.
        target: URI of the committed checkpoint.
        to: target format, a name or alias.
        options: format-specific options and `split` / `join`.
        common: the other options, as in MergeKeywords; they mean what they mean in `wherry.convert`.

    Raises:
        UnrepresentableError: the sources differ in key paths, shapes or element types, or the adapter is of a kind that
            cannot be merged; the difference is named.
        WherryError: see `wherry.convert`; nothing is left at the destination.
    """
    progress = common.pop("progress", None)
    named = [parse_source(one) if isinstance(one, str) else one for one in sources]
    request = convert_request(
        named[0].uri if named else "", [TargetRequest(str(target), to, options or {})], **common
    )
    return merge_request(named, request, progress=progress)


def merge_request(
    sources: Sequence[MergeSource], request: ConvertRequest, *, progress: OnProgress | None = None
) -> Receipt:
    """Carry out a merge; see `merge`. The request's own source is the first of them."""
    opening = partial(open_merged, sources, request)
    return convert_all(request, progress=progress, prepare=_name_sources, opened=opening).receipts[0]


@contextmanager
def open_merged(sources: Sequence[MergeSource], request: ConvertRequest) -> Generator[View]:
    """What a merge makes of its sources, which are open meanwhile."""
    if len(sources) < _FEWEST:
        raise UsageError(f"expected at least {_FEWEST} sources, got {len(sources)}", cure=_CURE)
    with ExitStack() as stack:
        opened = [
            stack.enter_context(
                settled_source(SourceRequest(one.uri, allow_opaque=request.source.allow_opaque))
            )
            for one in sources
        ]
        for one in opened:
            if one.manifest.kind == "train-state" and request.targets[0].only != "params":
                raise UnrepresentableError(
                    "the state of an optimizer cannot be merged",
                    uri=one.uri,
                    cure=Cure("pass {}", Argument("only", "params")),
                )
        yield _merge(sources, opened, request.targets[0].layout.config)


def _merge(sources: Sequence[MergeSource], opened: Sequence[Checkpoint], config: str | None) -> View:
    adapters = [one for one in opened if adapter_config(one) is not None]
    weights = [one.weight for one in sources if one.weight is not None]
    if not adapters and len(weights) == len(sources):
        return weighted_sum(list(zip(opened, weights, strict=True)))
    if adapters and not weights and len(opened) == _FEWEST and adapters == [opened[1]]:
        return with_adapter(opened[0], opened[1], config)
    if adapters and all(one in adapters for one in opened) and len(weights) == len(sources):
        what = "adapters cannot be added: the product of their sums is not the sum of their products"
        raise UsageError(what, uri=adapters[0].uri, cure="merge each into its base, and add the results")
    what = "expected a base and one adapter, without weights" if adapters else "a source has no weight"
    raise UsageError(what, uri=(adapters or opened)[0].uri, cure=_CURE)


def _name_sources(job: Job) -> Job:
    """A job whose request names all sources, for `lineage stale` and for the command that repeats it."""
    merge = job.plan.manifest.origin["merge"]
    rows = [
        {
            **row,
            "format": part.checkpoint.detection.format,
            "fingerprint": present_fingerprint(part.checkpoint),
        }
        for row, part in zip(merge["sources"], job.checkpoint.original.parts, strict=True)
    ]
    return replace(job, stated={**job.stated, "merge": {**merge, "sources": rows}})
