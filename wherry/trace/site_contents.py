"""contents: what the pages show of the ledger; it is read again only when a statement has been added."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from wherry.core.lazy_dataclass import dataclass
from wherry.ledger.database import Ledger
from wherry.trace.catalog import CatalogEntry, entries, run_of

_GRAVITY = ("error", "warning", "note")


@dataclass(frozen=True, slots=True)
class OpenFinding:
    """Something that an audit or a verification found, and that none has found mended since.

    Attributes:
        kind: kind of the finding of an audit, or the verdict of a verification.
        severity: `error`, `warning` or `note`.
        what: one sentence.
        uri: the checkpoint, file or registry in question; empty if there is none.
        checkpoint_digest: identity of the checkpoint; empty if it is unknown.
        time: when it was found; UTC.
    """

    kind: str
    severity: str
    what: str
    uri: str
    checkpoint_digest: str
    time: str


@dataclass(frozen=True, slots=True)
class SiteContents:
    """The ledger as the pages show it.

    Attributes:
        ledger: its URI, without secrets.
        statements: number of its statements.
        entries: the checkpoints at their places, sorted by URI.
        runs: URI of a run → its checkpoints, by step.
        findings: the open findings, the gravest first.
    """

    ledger: str
    statements: int
    entries: tuple[CatalogEntry, ...]
    runs: Mapping[str, tuple[CatalogEntry, ...]]
    findings: tuple[OpenFinding, ...]

    def found(self, words: str) -> list[CatalogEntry]:
        """The checkpoints that have every word of a text in their URI, digest, format, family or models."""
        wanted = words.lower().split()
        return [entry for entry in self.entries if all(word in _text_of(entry) for word in wanted)]


class LedgerReader:
    """Reads the contents of the ledger, once for each of its states; safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: tuple[str, SiteContents] | None = None

    def read(self) -> SiteContents:
        """The present contents.

        Raises:
            StorageError: the ledger cannot be read.
        """
        from wherry.ledger.record import open_ledger
        from wherry.ledger.statements import head

        with self._lock, open_ledger() as ledger:
            at = head(ledger)
            if self._last is None or self._last[0] != at.hash:
                self._last = at.hash, _contents(ledger, at.seq)
            return self._last[1]


def _contents(ledger: Ledger, statements: int) -> SiteContents:
    every = tuple(sorted(entries(), key=lambda entry: (entry.uri, entry.seen)))
    runs: dict[str, list[CatalogEntry]] = defaultdict(list)
    for entry in every:
        runs[run_of(entry)].append(entry)
    by_step = {run: tuple(sorted(rows, key=_by_step)) for run, rows in sorted(runs.items())}
    found = [*_of_verifications(ledger), *_of_audits(ledger)]
    found.sort(key=lambda one: (_GRAVITY.index(one.severity), one.uri, one.what))
    return SiteContents(ledger.uri, statements, every, by_step, tuple(found))


def _by_step(entry: CatalogEntry) -> tuple[int, str]:
    return (-1 if entry.step is None else entry.step, entry.uri)


def _of_verifications(ledger: Ledger) -> Iterator[OpenFinding]:
    """Damage that a verification found, where no later one has passed."""
    from wherry.ledger.replay import replay

    for (digest, uri), damage in replay(ledger, kinds={"verification"}).damaged.items():
        what = f"{damage.path}: {damage.reason}" if damage.path else damage.reason
        yield OpenFinding(damage.verdict, "error", what, uri, digest, damage.time)


def _of_audits(ledger: Ledger) -> Iterator[OpenFinding]:
    """The findings of the last audit of each scope."""
    from wherry.ledger.statements import statements

    last: dict[tuple[str, ...], tuple[str, list[dict[str, Any]]]] = {}
    for one in statements(ledger, kinds={"audit"}):
        body = one.body
        last[tuple(body["scope"])] = one.time, body.get("findings", [])
    for time, findings in last.values():
        for row in findings:
            yield OpenFinding(
                row["kind"],
                row["severity"],
                row["what"],
                row["uri"] or "",
                row["checkpoint_digest"] or "",
                time,
            )


def _text_of(entry: CatalogEntry) -> str:
    parts = (
        entry.uri,
        entry.checkpoint_digest,
        entry.weights_digest,
        entry.format,
        entry.family,
        *entry.versions,
    )
    return " ".join(parts).lower()
