"""pages: checkpoints with search, runs with their timelines, storage by run, and open findings; and one lineage."""

from __future__ import annotations

import re
from html import escape
from typing import TYPE_CHECKING

from wherry.core.units import plural, short, show_size
from wherry.errors import NotFoundError
from wherry.site.pictures import bar, timeline
from wherry.site.shell import Page, link, shell, text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from wherry.catalog.entries import CatalogEntry
    from wherry.site.contents import OpenFinding, SiteContents

MOST_ROWS = 200  # of one page; a search finds the others
_POLICY = re.compile(r'http-equiv="Content-Security-Policy" content="([^"]*)"')


def page_at(path: str, query: Mapping[str, str], contents: SiteContents) -> Page:
    """The page at a path.

    Args:
        path: of the URL, unquoted.
        query: its parameters.
        contents: the ledger.

    Raises:
        NotFoundError: there is none.
        AmbiguousError: the digest in the path is that of several checkpoints.
    """
    start, _, rest = path.removeprefix("/").partition("/")
    if start == "lineage" and rest:
        return _lineage(rest)
    draw = _PAGES.get(path)
    if draw is None:
        raise NotFoundError("page not found", uri=path, cure="choose a page above")
    return draw(contents, query)


def _checkpoints(contents: SiteContents, query: Mapping[str, str]) -> Page:
    words = query.get("q", "")
    found = contents.found(words)
    form = (
        '<form role="search" action="/"><input name="q" type="search" aria-label="Search checkpoints" '
        f'placeholder="Path, digest, format, family or model" value="{text(words)}"><button>Search</button></form>'
    )
    number = plural(len(found), "checkpoint")
    of_all = f"{number} of {len(contents.entries):,}" if words else number
    body = f"{form}<p>{text(of_all)}</p>{_rows(_entries(found), len(found), 'no checkpoint')}"
    return shell("Checkpoints", body, ledger=contents.ledger, here="/")


def _runs(contents: SiteContents, query: Mapping[str, str]) -> Page:
    run = query.get("run")
    if run is None:
        rows = (
            f"<li>{link('/runs', name, run=name)}<p class=facts>{text(plural(len(entries), 'checkpoint'))}</p>"
            f"{timeline(entries)}</li>"
            for name, entries in contents.runs.items()
        )
        body = _rows(rows, len(contents.runs), "no run")
        return shell("Runs", body, ledger=contents.ledger, here="/runs")
    if run not in contents.runs:
        raise NotFoundError("run not found in the ledger", uri=run, cure="choose one on the page of runs")
    entries = contents.runs[run]
    body = f"{timeline(entries)}{_rows(_entries(entries), len(entries), 'no checkpoint')}"
    return shell(f"Run {run}", body, ledger=contents.ledger, here="/runs")


def _storage(contents: SiteContents, _query: Mapping[str, str]) -> Page:
    sizes = {
        run: sum(entry.nbytes for entry in entries if entry.gone is None)
        for run, entries in contents.runs.items()
    }
    kept = sorted(
        ((nbytes, run) for run, nbytes in sizes.items() if nbytes), key=lambda row: (-row[0], row[1])
    )
    total = sum(nbytes for nbytes, _run in kept)
    rows = (
        f"<li>{link('/runs', run, run=run)}<p>{text(show_size(nbytes))}, {nbytes / total:.0%}</p>"
        f"{bar(nbytes / total)}</li>"
        for nbytes, run in kept
    )
    lead = f"{show_size(total)} of tensors in {plural(len(kept), 'run')}"
    body = f"<p>{text(lead)}</p>{_rows(rows, len(kept), 'no run')}"
    return shell("Storage", body, ledger=contents.ledger, here="/storage")


def _findings(contents: SiteContents, _query: Mapping[str, str]) -> Page:
    found = contents.findings
    body = (
        "<p class=facts>Of the last audit of each scope, and of verifications that none has passed since.</p>"
        f"{_rows(map(_finding, found), len(found), 'no open finding')}"
    )
    return shell("Open findings", body, ledger=contents.ledger, here="/findings")


_PAGES: Mapping[str, Callable[[SiteContents, Mapping[str, str]], Page]] = {
    "/": _checkpoints,
    "/runs": _runs,
    "/storage": _storage,
    "/findings": _findings,
}


def _lineage(digest: str) -> Page:
    """The lineage page of one checkpoint, with the policy that it states itself."""
    from wherry.ledger.record import open_ledger
    from wherry.ledger.resolve import digest_starting
    from wherry.lineage.lineage import tree_of
    from wherry.lineage.page import page

    with open_ledger() as ledger:
        known = digest_starting(ledger, digest)
        if known is None:
            raise NotFoundError(
                "no checkpoint with this digest in the ledger", uri=digest, cure="search for it"
            )
        html = page(tree_of(ledger, known, None))
    policy = _POLICY.search(html)
    assert policy is not None, "the page states its policy"
    return Page(html, policy[1])


def _rows(rows: Iterable[str], number: int, none: str) -> str:
    """A list of at most `MOST_ROWS` items, and how many there are besides."""
    if not number:
        return f'<p class="none">{text(none)}</p>'
    shown = "".join(row for row, _ in zip(rows, range(MOST_ROWS), strict=False))
    more = (
        f'<p class="none">and {number - MOST_ROWS:,} more; search for them</p>' if number > MOST_ROWS else ""
    )
    return f'<ul class="rows">{shown}</ul>{more}'


def _entries(entries: Iterable[CatalogEntry]) -> Iterator[str]:
    """An item for each checkpoint at each place; the first one of a digest has it as its id."""
    seen: set[str] = set()
    for entry in entries:
        digest = entry.checkpoint_digest
        attribute = "" if digest in seen else f' id="{escape(digest)}"'
        gone = f' <span class="warn">deleted {text(entry.gone[:10])}</span>' if entry.gone else ""
        facts = [
            entry.format, entry.family, "" if entry.step is None else f"step {entry.step:,}", show_size(entry.nbytes),
            f"seen {entry.seen[:10]}", *entry.versions,
        ]  # fmt: skip
        yield (
            f"<li{attribute}>{link(f'/lineage/{digest}', entry.uri, fragment=digest)}{gone}"
            f'<p class="facts">{text(" · ".join(filter(None, facts)))} {_verification_text(entry.verified)}</p>'
            f'<p class="facts"><code>{link("/", short(digest), fragment=digest, q=digest)}</code></p></li>'
        )
        seen.add(digest)


def _verification_text(verified: str) -> str:
    if not verified:
        return ""
    verdict = verified.rpartition(": ")[2]
    state = "good" if verdict == "ok" else "warn" if verdict == "read" else "bad"
    return f'· <span class="{state}">{text(verified)}</span>'


def _finding(one: OpenFinding) -> str:
    where = link(f"/lineage/{one.checkpoint_digest}", one.uri) if one.checkpoint_digest else text(one.uri)
    return (
        f'<li><span class="{text(one.severity)}">{text(one.severity)}</span>: {text(one.kind)}'
        f'<p>{text(one.what)}</p><p class="facts">{where} · found {text(one.time[:16].replace("T", " "))} UTC</p></li>'
    )
