"""source_digests: which tensors of the source of a view are read once more, for their own digests."""

from __future__ import annotations

from wherry.converter.plan import Plan, hashes_on_the_way, joint_moves
from wherry.core.digest import BLAKE3, hashes_boxes
from wherry.core.keypath import KeyPath
from wherry.formats.checkpoint import Checkpoint
from wherry.transform.view import ChangeLayout, TransformReader, View


def read_for_digests(seen: Checkpoint, plan: Plan) -> frozenset[KeyPath]:
    """The stored tensors of the source of a view that workers read once more, for their digests alone.

    Others are hashed while they are moved: kernels are there, and the runs of what is taken of them are long.

    Args:
        seen: the opened source, or its view in the layout of the target's system.
        plan: of the conversion.
    """
    stored = seen.original.manifest.tensors
    if not seen.is_view:
        return frozenset()
    reader = seen.reader
    if not hashes_on_the_way() or not isinstance(seen, View) or not isinstance(reader, TransformReader):
        return frozenset(stored)
    layout = reader.transform
    if not isinstance(layout, ChangeLayout):
        return frozenset(stored)
    again = set(stored)
    moves = joint_moves([plan])
    for source in plan.pairs.values():
        spec, first = seen.manifest.tensors[source], next(moves.of(source), None)
        region = first.region if first is not None else None
        parts = [] if region is None else layout.parts(spec, region, reader)
        same = seen.same_bytes(source)
        if same is not None or (
            parts and all(hashes_boxes(one.source, one.region, (BLAKE3,)) for one in parts)
        ):
            again.difference_update(seen.made_of(source))
    return frozenset(again)
