"""Makes the golden ledger with the code as it is.

    python -m tests.support.make_golden_ledger tests/golden

writes `ledger-<schema>.sql`: the SQL of a SQLite ledger with every kind of statement. It is text so that a change of it
can be read; `tests/ledger/test_ledger_rebuild.py` makes a database of it again. Times are fixed, so that running it
twice gives the same file.
"""

from __future__ import annotations

import hashlib
import itertools
import sqlite3
import sys
import tempfile
from collections.abc import Iterable
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

from wherry.core.digest import digits_of
from wherry.core.receipt import CheckpointRef, Receipt
from wherry.ledger import deliver, record, schema

REGISTRY = "https://models.example"
_STORAGE_TIME = "2026-11-02T00:00:00.000+00:00"
_CLOCKS = ("statements", "deliver")  # the modules that look at the clock


def digest(text: str) -> str:
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def node(name: str, format: str, *, step: int | None = None) -> CheckpointRef:
    return CheckpointRef(
        uri=f"/checkpoints/{name}",
        format=format,
        format_version=None,
        checkpoint_digest=digest(name),
        weights_digest=digest(f"weights of {name[:3]}"),
        fingerprint=digits_of(digest(f"files of {name}")),
        kind="params",
        step=step,
        tensors=2,
        parameters=17,
        nbytes=68,
    )


def in_blake3(name: str) -> CheckpointRef:
    """A checkpoint with digests of the other algorithm."""
    made = node(name, "dcp")
    checkpoint, weights = (
        f"blake3:{digits_of(one)}" for one in (made.checkpoint_digest, made.weights_digest)
    )
    return replace(made, checkpoint_digest=checkpoint, weights_digest=weights)


def conversion(source: CheckpointRef, target: CheckpointRef, minute: int) -> Receipt:
    return Receipt(
        source=source,
        target=target,
        plan_digest=digits_of(digest(f"{source.uri} to {target.uri}")),
        options={"scan_layers": True},
        software={"wherry": "0.1.0"},
        started=f"2026-11-01T02:{minute:02}:00.000+00:00",
        finished=f"2026-11-01T02:{minute:02}:30.000+00:00",
        seconds=30.0,
        verification={"level": "digest", "ok": True},
        lossless=minute != 20,
    )


def fill(opened: record.Ledger) -> None:
    """Two runs of conversions, a copy, an overwritten place, verifications, registrations, claims and events."""
    run, orbax, hf = (
        node("run/100", "t5x", step=100),
        node("run-orbax", "orbax"),
        node("run-hf", "huggingface"),
    )
    copy = replace(orbax, uri="/archive/run-orbax")
    record.record_conversion(opened, conversion(run, orbax, 10))
    record.record_conversion(opened, conversion(orbax, hf, 20))
    record.record_conversion(opened, conversion(orbax, copy, 30))
    record.record_verification(opened, hf, {"level": "present", "verdict": "ok", "ok": True})
    record.record_verification(opened, hf, {"level": "digest", "verdict": "altered", "ok": False})
    alone = node("only-verified", "dcp")
    record.record_verification(opened, alone, {"level": "digest", "verdict": "ok", "ok": True})
    record.claim_registration(opened, hf, REGISTRY, "model")
    record.record_registration(opened, hf, REGISTRY, "model", "1")
    record.claim_registration(opened, orbax, REGISTRY, "model")
    record.claim_registration(opened, alone, REGISTRY, "dropped")
    record.drop_claim(opened, alone, REGISTRY, "dropped")
    later = replace(node("run-2", "t5x"), uri=run.uri)
    record.record_conversion(opened, conversion(later, node("run-2-hf", "huggingface"), 40))
    record.record_conversion(
        opened, conversion(run, orbax, 10)
    )  # seen again: it is the first run's place now
    gone = node("run-2-hf", "huggingface")
    record.record_event(opened, "promotion", hf, {"name": "model", "version": "1", "alias": "champion"})
    record.record_event(opened, "deletion", gone, {"reason": "keep_last", "by": "prune"})
    record.record_event(opened, "note", None, {"text": "about no checkpoint"})
    deliver.record_delivery(opened, "openlineage", 4)
    deliver.record_failure(opened, "openlineage", 5, "nobody listens")
    record.record_conversion(opened, conversion(hf, in_blake3("run-dcp"), 50))


def in_order(lines: Iterable[str]) -> list[str]:
    """The dump with its indexes by name: SQLAlchemy makes them in any order."""
    dump = list(lines)
    made = ("CREATE INDEX", "CREATE UNIQUE INDEX")
    indexes = iter(sorted(line for line in dump if line.startswith(made)))
    return [next(indexes) if line.startswith(made) else line for line in dump]


def main(folder: Path) -> None:
    ticks = (f"2026-11-02T00:00:{second:02}.000+00:00" for second in itertools.count())
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        file = Path(scratch) / "ledger.db"
        for module in _CLOCKS:
            stack.enter_context(patch(f"wherry.ledger.{module}.utc_now", lambda: next(ticks)))
        stack.enter_context(
            patch("wherry.ledger.statements._storage_time", lambda _connection: _STORAGE_TIME)
        )
        with record.open_ledger(f"sqlite:///{file}") as opened:
            fill(opened)
        with closing(sqlite3.connect(file)) as connection:
            version = connection.execute("PRAGMA user_version").fetchone()[0]
            lines = [f"PRAGMA user_version = {version};", *in_order(connection.iterdump())]
    target = folder / f"ledger-{schema.SCHEMA}.sql"
    target.write_text("\n".join(lines) + "\n")
    print(f"{target}: {target.stat().st_size} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
