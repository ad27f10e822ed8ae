"""pages: checkpoints with search, runs with their timelines, storage by run, and open findings; and one lineage.

Names are escaped, nothing is loaded, and no script or style but ours can run: the pictures, the timeline of a run and a
bar for a share, are SVG without a script.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from wherry.core.lazy_dataclass import dataclass
from wherry.core.units import plural, short, show_size
from wherry.credentials import redact
from wherry.errors import NotFoundError, printable
from wherry.version import __version__

if TYPE_CHECKING:
    from wherry.trace.catalog import CatalogEntry
    from wherry.trace.site_contents import OpenFinding, SiteContents


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
    from wherry.trace.lineage import tree_of
    from wherry.trace.page import page

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
    """A list of at most `MOST_ROWS` items, and how many more there are."""
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


# ---- pictures --------------------------------------------------------------------------------------------------------


_WIDTH, _HEIGHT, _MARGIN = 1000, 44, 12


def timeline(entries: Sequence[CatalogEntry]) -> str:
    """The steps of a run along a line; a hollow mark is a checkpoint that was deleted.

    Args:
        entries: its checkpoints; those without a step are not drawn.
    """
    steps = [entry.step for entry in entries if entry.step is not None]
    if not steps:
        return ""
    first, last = min(steps), max(steps)
    marks = "".join(_mark(entry, first, last) for entry in entries if entry.step is not None)
    between = "step" if first == last else "steps"
    label = f"{between} {first:,}" if first == last else f"{between} {first:,} to {last:,}"
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{text(label)}">'
        f'<line x1="{_MARGIN}" x2="{_WIDTH - _MARGIN}" y1="22" y2="22" stroke-width="3"/>{marks}</svg>'
        f'<p class="facts">{text(label)}</p>'
    )


def _mark(entry: CatalogEntry, first: int, last: int) -> str:
    share = ((entry.step or 0) - first) / (last - first) if last > first else 0.5
    at = _MARGIN + share * (_WIDTH - 2 * _MARGIN)
    state = ' class="gone"' if entry.gone else ""
    title = f"step {entry.step}, {entry.format}"
    return f'<circle cx="{at:.1f}" cy="22" r="9"{state}><title>{text(title)}</title></circle>'


def bar(share: float) -> str:
    """A bar that is filled to a share of its width, from 0 to 1; its number is in the text next to it."""
    return (
        f'<svg viewBox="0 0 {_WIDTH} 12" preserveAspectRatio="none" height="8" aria-hidden="true">'
        f'<rect class="track" width="{_WIDTH}" height="12"/>'
        f'<rect class="bar" width="{share * _WIDTH:.0f}" height="12"/></svg>'
    )


# ---- the frame of every page -----------------------------------------------------------------------------------------


_STYLE = Path(__file__).with_name("site.css")
_NAVIGATION = (("/", "Checkpoints"), ("/runs", "Runs"), ("/storage", "Storage"), ("/findings", "Findings"))


@dataclass(frozen=True, slots=True)
class Page:
    """An HTML page and the content security policy that it needs."""

    html: str
    policy: str


def shell(title: str, body: str, *, ledger: str, here: str) -> Page:
    """A page with navigation.

    Args:
        title: its heading, as plain text.
        body: its contents, as HTML.
        ledger: what the pages show, as plain text.
        here: path of the page in the navigation.
    """
    style = _STYLE.read_text("utf-8")
    links = "".join(
        f'<a href="{path}"{" aria-current=page" if path == here else ""}>{name}</a>'
        for path, name in _NAVIGATION
    )
    html = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{text(title)} · wherry</title><style>{style}</style></head><body>"
        f'<header><b>wherry</b><nav aria-label="Pages">{links}</nav></header>'
        f"<main><h1>{text(title)}</h1>{body}</main>"
        f"<footer>wherry {text(__version__)} · {text(ledger)} · read only</footer></body></html>"
    )
    digest = b64encode(sha256(style.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'self'"
    return Page(html, policy)


def text(value: object) -> str:
    """Any value as escaped text, without secrets and without characters that change what is around them."""
    return escape(printable(redact(str(value))))


def link(path: str, label: object, *, fragment: str = "", **query: str) -> str:
    """A link within the site; the label is plain text.

    Args:
        path: the path, unquoted.
        label: what is shown.
        fragment: id on the page that it leads to; none by default.
        query: parameters.
    """
    parameters = "&".join(
        f"{name}={quote(value, safe='', errors='replace')}" for name, value in query.items()
    )
    target = quote(path, safe="/:", errors="replace") + (f"?{parameters}" if parameters else "")
    target += f"#{quote(fragment, safe=':')}" if fragment else ""
    return f'<a href="{escape(target)}">{text(label)}</a>'
