"""Large ledgers for tests: a hub with many children, a long chain and many small families, appended in batches.

Statements and rows are made by the functions of `wherry.ledger.statements`, so such a ledger passes every check; only
the transactions are larger than those of `append`.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import islice
from types import FrameType
from typing import Any

from tests.support.ledger import REGISTRY, conversion, node
from wherry.core.digest import canonical_json
from wherry.core.receipt import CheckpointRef
from wherry.ledger import schema as tables
from wherry.ledger.record import ChainHead, Ledger, head, open_ledger
from wherry.ledger.statements import content_of, hash_of, rows_of, write

HUB, CHAIN = "hub", "chain"  # names of the hub, and of the members of the chain before their numbers
FAMILY = 5  # checkpoints of a small family
_BATCH = 2000
_START = "2026-11-01T00:00:00.000+00:00"
_SOFTWARE = {
    "wherry": "0.9.0",
    "python": "3.12.1",
    "numpy": "2.1.0",
    "ml_dtypes": "0.5.0",
    "fsspec": "2026.1.0",
}
_READ_BACK = {"level": "digest", "verdict": "ok", "ok": True, "tensors": 291, "seconds": 3.2}


@dataclass(frozen=True, slots=True)
class LedgerShape:
    """The contents of a large ledger.

    Attributes:
        children: children of the hub; each tenth has a child of its own.
        chain: length of the chain, in which each checkpoint is made from the one before.
        families: number of families: a source, two results, and a result of each.
    """

    children: int
    chain: int
    families: int

    @classmethod
    def of(cls, nodes: int) -> LedgerShape:
        """The shape with about so many checkpoints: a tenth are children of the hub, a fiftieth is the chain."""
        children, chain = nodes // 10, nodes // 50
        return cls(children, chain, (nodes - children - children // 10 - chain) // FAMILY)


def grow(url: str, shape: LedgerShape) -> None:
    """Make a ledger of a shape."""
    with open_ledger(url) as ledger:
        append_all(ledger, _statements(shape))


def append_all(ledger: Ledger, statements: Iterable[tuple[str, dict[str, Any]]]) -> None:
    """Append kinds and bodies, many in one transaction."""
    last, rest = head(ledger), iter(statements)
    while some := list(islice(rest, _BATCH)):
        rows = list(_chained(last, some))
        with ledger.write() as connection:
            connection.change(tables.statement.insertion(), *(row for row, _body in rows))
            write(
                connection,
                (
                    table_row
                    for row, body in rows
                    for table_row in rows_of(row["kind"], body, row["seq"], row["time"])
                ),
            )
        last = replace(last, seq=rows[-1][0]["seq"], hash=rows[-1][0]["hash"])


def _chained(
    last: ChainHead, some: Iterable[tuple[str, dict[str, Any]]]
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """The rows of statements, each with its body."""
    seq, prev = last.seq, last.hash
    for kind, body in some:
        seq, text = seq + 1, canonical_json(body).decode()
        row: dict[str, Any] = {
            "seq": seq, "prev": prev, "kind": kind, "schema": tables.SCHEMA, "content": content_of(kind, text),
            "body": text, "time": _START, "storage_time": _START,
        }  # fmt: skip
        prev = row["hash"] = hash_of(row)
        yield row, body


def _statements(shape: LedgerShape) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, (source, target) in enumerate(_pairs(shape)):
        subject = _named(target)
        yield "conversion", _conversion(_named(source), subject)
        about = {"checkpoint_digest": subject.checkpoint_digest, "subject": asdict(subject)}
        if number % 4 == 0:
            yield "verification", {**about, "verification": {"level": "digest", "verdict": "ok", "ok": True}}
        if number % 10 == 1:
            named = {**about, "registry": REGISTRY, "name": f"model-{number % 70}"}
            yield "claim", named
            yield "registration", {**named, "version": str(number)}
        if number % 10 == 2:
            yield "deletion", {**about, "uri": subject.uri, "reason": "keep_last", "by": "prune"}
        if number % 20 == 3:
            yield "conversion", _conversion(subject, replace(subject, uri=f"/archive/{target}"))


def _pairs(shape: LedgerShape) -> Iterator[tuple[str, str]]:
    """Source and target of every conversion, by name."""
    for number in range(shape.children):
        yield HUB, f"child-{number}"
        if number % 10 == 0:
            yield f"child-{number}", f"grandchild-{number}"
    for number in range(1, shape.chain):
        yield f"{CHAIN}-{number - 1}", f"{CHAIN}-{number}"
    for number in range(shape.families):
        root = f"run-{number}/step-{number % 1000}"
        for made, other in (("hf", "maxtext"), ("orbax", "npz")):
            yield root, f"{root}/{made}"
            yield f"{root}/{made}", f"{root}/{other}"


def _named(name: str) -> CheckpointRef:
    return node(
        name, f"weights of {name}", kind="params", step=1000, tensors=291, parameters=10**9, nbytes=10**9
    )


def _conversion(source: CheckpointRef, target: CheckpointRef) -> dict[str, Any]:
    receipt = conversion(
        "", "", options={"compression": "zstd", "max_shard_size": "5GB", "split": None},
        software=_SOFTWARE, started=_START, finished=_START, seconds=8.5, bytes_read=10**9, bytes_written=10**9,
        verification=_READ_BACK, requested={"to": target.format, "options": {"compression": "zstd"}},
    )  # fmt: skip
    body = replace(receipt, source=source, target=target).to_json()
    return {name: value for name, value in body.items() if name not in ("already", "lineage")}


def steps_in(act: Callable[[], object]) -> int:
    """The work of an act in all threads, which no other process disturbs.

    Counts calls of functions, of Python and of C, and the lines that wherry runs, a line once for each turn of a loop.
    """
    found = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal found
        found += event in ("call", "c_call")

    def line(_frame: object, event: str, _argument: object) -> Callable[..., Any]:
        nonlocal found
        found += event == "line"
        return line

    def enter(frame: FrameType, _event: str, _argument: object) -> Callable[..., Any] | None:
        return line if frame.f_globals.get("__name__", "").startswith("wherry.") else None

    before = sys.gettrace()
    for module in (threading, sys):
        module.setprofile(count)
        module.settrace(enter)
    try:
        act()
    finally:
        for module in (threading, sys):
            module.setprofile(None)
            module.settrace(before if module is sys else None)
    return found
