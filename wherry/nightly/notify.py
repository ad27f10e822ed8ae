"""notify: notify people of what a flow did, through a webhook or a Prefect notification block.

A notification has a title, counts, the first error, its cure and a link. It never fails the caller: a failure is logged
and returned as text. The address of a webhook is a secret (its path often holds the token), so it is never logged,
printed or part of an error; credentials are removed from the message, too. Redirects are not followed: the message goes
only to the configured address.
"""

from __future__ import annotations

import json
import os
import time
import urllib.error
from collections.abc import Mapping
from dataclasses import asdict, field, replace
from typing import Any, Literal
from urllib.parse import urlsplit

from wherry.config.settings import configured_value
from wherry.core.emit import post
from wherry.core.lazy_dataclass import dataclass
from wherry.core.progress import logger
from wherry.core.services import service
from wherry.credentials import redact
from wherry.errors import WherryError, printable
from wherry.store.waits import waiting

SCHEMA = 1
_TIMEOUT = 10.0  # seconds for one attempt
_PAUSES = (0.0, 1.0, 4.0)  # seconds before each attempt
_LONGEST = 2000  # maximum characters of one field
_AGAIN = frozenset({429, 500, 502, 503, 504})  # statuses after which a retry may succeed
_log = logger(__name__)

When = Literal["failure", "damaged", "always", "never"]


@dataclass(frozen=True, slots=True)
class Channels:
    """Where to send notifications, and when.

    Attributes:
        webhook: URL that accepts a JSON POST, as those of Slack and Mattermost; a secret, so it is not shown.
        block: Prefect notification block, for example `slack-webhook/team`.
        on: `failure`; `damaged`, also of checkpoints that a run left out though nobody excluded them;
            `always` or `never`.
    """

    webhook: str | None = field(default=None, repr=False)
    block: str | None = None
    on: When = "damaged"


@dataclass(frozen=True, slots=True)
class Notice:
    """A notification.

    Attributes:
        title: one line.
        counts: number of results by outcome.
        first_error: the first error; None for a success.
        warning: what a run that succeeded left out, for example a damaged checkpoint.
        cure: what to do about it.
        link: URL with details.
    """

    title: str
    counts: Mapping[str, int] = field(default_factory=dict[str, int])
    first_error: str | None = None
    cure: str | None = None
    link: str | None = None
    warning: str | None = None

    def cleaned(self) -> Notice:
        """The same without credentials, each field one printable line, long ones truncated."""
        return Notice(
            title=_clean(self.title) or "wherry",
            counts=dict(self.counts),
            first_error=_clean(self.first_error),
            cure=_clean(self.cure),
            link=_clean(self.link),
            warning=_clean(self.warning),
        )


def channels() -> Channels:
    """The configured channels: `WHERRY_NOTIFY_WEBHOOK`, `WHERRY_NOTIFY_BLOCK`, or `[notify]` of the configuration.

    Raises:
        UsageError: the configuration is invalid.
    """
    webhook = os.environ.get("WHERRY_NOTIFY_WEBHOOK") or configured_value("notify.webhook")
    block = os.environ.get("WHERRY_NOTIFY_BLOCK") or configured_value("notify.block")
    return Channels(webhook, block, configured_value("notify.on") or "damaged")


def send(settings: Channels | None, notice: Notice, *, page: str | None = None) -> str:
    """Send a notification to every channel; never raises.

    Args:
        settings: the channels; the configured ones by default.
        notice: the notification; one with a `first_error` is a failure.
        page: the link, where the notice has none.

    Returns:
        `sent`, or `not sent: …` with the reason.
    """
    try:
        chosen = settings or channels()
        if not _is_wanted(chosen.on, notice):
            return f"not sent: notify.on is {chosen.on}"
        if not (chosen.webhook or chosen.block):
            return "not sent: no channel is configured"
        cleaned = replace(notice, link=notice.link or page).cleaned()
        failures = [*_by_webhook(chosen.webhook, cleaned), *_by_block(chosen.block, cleaned)]
    except Exception as error:  # noqa: BLE001  a notification must not fail the run
        failures = [type(error).__name__]
    for failure in failures:
        _log.warning("the notification was not sent: %s", failure)
    return f"not sent: {'; '.join(failures)}" if failures else "sent"


def _is_wanted(when: When, notice: Notice) -> bool:
    """Whether a notification of this kind is sent."""
    if when in ("always", "never"):
        return when == "always"
    return notice.first_error is not None or (when == "damaged" and notice.warning is not None)


def message(notice: Notice) -> str:
    """The notice as plain text."""
    counts = ", ".join(f"{number} {name}" for name, number in notice.counts.items())
    lines = [notice.title, counts, notice.first_error and f"first error: {notice.first_error}"]
    lines += [notice.warning and f"warning: {notice.warning}"]
    lines += [notice.cure and f"cure: {notice.cure}", notice.link]
    return "\n".join(line for line in lines if line)


def payload(notice: Notice) -> dict[str, Any]:
    """The JSON for a webhook: `text` for chat systems, and the fields for programs."""
    escaped = message(notice).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return {"text": escaped, "wherry": {"schema": SCHEMA, **asdict(notice)}}


def _by_webhook(url: str | None, notice: Notice) -> list[str]:
    if not url:
        return []
    if urlsplit(url).scheme not in ("http", "https"):
        return ["invalid webhook: expected an http or https URL"]
    text, failure = json.dumps(payload(notice), default=str), ""
    shown = f"webhook at {urlsplit(url).hostname}"
    with waiting(shown, len(_PAUSES)) as wait:
        for wait.attempt, pause in enumerate(_PAUSES, 1):
            time.sleep(pause)
            failure, again = _post(url, text)
            if not failure or not again:
                break
    return [f"{shown}: {failure}"] if failure else []


def _post(url: str, text: str) -> tuple[str, bool]:
    """One attempt: the reason of a failure, without the address, and whether a retry can help."""
    try:
        post(url, text, {"User-Agent": "wherry"}, timeout=_TIMEOUT)
    except urllib.error.HTTPError as error:
        return f"HTTP status {error.code}", error.code in _AGAIN
    except (OSError, ValueError) as error:
        return f"not reachable ({type(error).__name__})", True
    return "", False


def _by_block(name: str | None, notice: Notice) -> list[str]:
    if not name:
        return []
    try:
        service("prefect-notify").tell(name, notice.title, message(notice))
    except WherryError as error:
        return [f"block {name}: {error.what}"]
    except Exception as error:  # noqa: BLE001  a block is third-party code, and its errors may contain its secrets
        return [f"block {name}: {type(error).__name__}"]
    return []


def _clean(text: str | None) -> str | None:
    if text is None:
        return None
    without = printable(redact(text))
    return without if len(without) <= _LONGEST else f"{without[:_LONGEST]} …"
