"""shell: the frame of every page. Names are escaped, nothing is loaded, and no script or style but ours can run."""

from __future__ import annotations

from base64 import b64encode
from dataclasses import dataclass
from hashlib import sha256
from html import escape
from pathlib import Path
from urllib.parse import quote

from wherry.credentials import redact
from wherry.errors import printable
from wherry.version import __version__

_STYLE = Path(__file__).with_name("site.css")
_PAGES = (("/", "Checkpoints"), ("/runs", "Runs"), ("/storage", "Storage"), ("/findings", "Findings"))


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
        f'<a href="{path}"{" aria-current=page" if path == here else ""}>{name}</a>' for path, name in _PAGES
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
