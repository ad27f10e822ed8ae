"""notify: tell people what a flow did, through a webhook or a Prefect notification block.

A message says what happened, counts, the first error, its cure and where to look. Telling never fails the caller: what
could not be told is logged and returned in words. The address of a webhook is a secret (its path often holds the
token), so it is never logged, printed or part of an error; what is told is cleaned of credentials, too. Redirects are
not followed: the message goes to the address that was configured or nowhere.
"""

from __future__ import annotations

import json
import logging
import os
import time
import urllib.error
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from wherry.config.settings import configured
from wherry.core.emit import post
from wherry.core.services import service
from wherry.errors import WherryError, redact

if TYPE_CHECKING:
    from collections.abc import Mapping

SCHEMA = 1
_TIMEOUT = 10.0  # seconds for one attempt
_PAUSES = (0.0, 1.0, 4.0)  # seconds before each attempt
_LONGEST = 2000  # characters of one field; a message is read, not searched
_AGAIN = frozenset({429, 500, 502, 503, 504})  # statuses after which the same message may be taken
_log = logging.getLogger(__name__)

When = Literal["failure", "always", "never"]


@dataclass(frozen=True, slots=True)
class Channels:
    """Where to tell, and when.

    Attributes:
        webhook: URL that takes a JSON POST, as Slack's and Mattermost's do; a secret, so it is not shown.
        block: Prefect notification block, as `slack-webhook/team`.
        on: `failure`, `always` or `never`.
    """

    webhook: str | None = field(default=None, repr=False)
    block: str | None = None
    on: When = "failure"


@dataclass(frozen=True, slots=True)
class Notice:
    """What to tell.

    Attributes:
        title: one line.
        counts: what was done, by outcome.
        first_error: the first thing that went wrong; None where nothing did.
        cure: what to do about it.
        link: where to look.
    """

    title: str
    counts: Mapping[str, int] = field(default_factory=dict[str, int])
    first_error: str | None = None
    cure: str | None = None
    link: str | None = None

    def cleaned(self) -> Notice:
        """The same without credentials, and short enough to be read."""
        return Notice(
            title=_clean(self.title) or "wherry",
            counts=dict(self.counts),
            first_error=_clean(self.first_error),
            cure=_clean(self.cure),
            link=_clean(self.link),
        )


def channels() -> Channels:
    """What the environment or the configuration says: `WHERRY_NOTIFY_WEBHOOK`, `WHERRY_NOTIFY_BLOCK`, `[notify]`.

    Raises:
        UsageError: the configuration is faulty.
    """
    webhook = os.environ.get("WHERRY_NOTIFY_WEBHOOK") or configured("notify.webhook")
    block = os.environ.get("WHERRY_NOTIFY_BLOCK") or configured("notify.block")
    return Channels(webhook, block, configured("notify.on") or "failure")


def send(settings: Channels | None, notice: Notice, *, page: str | None = None) -> str:
    """Tell it to every channel; never fails.

    Args:
        settings: where and when; what is configured by default.
        notice: what. One with a `first_error` is a failure.
        page: where to look, where the notice does not say.

    Returns:
        `sent`, `not sent: …` with the reason, or why nothing was to be sent.
    """
    try:
        chosen = settings or channels()
        if chosen.on == "never" or (chosen.on == "failure" and notice.first_error is None):
            return f"not sent: notify.on is {chosen.on}"
        if not (chosen.webhook or chosen.block):
            return "not sent: no channel is configured"
        told = replace(notice, link=notice.link or page).cleaned()
        failures = [*_by_webhook(chosen.webhook, told), *_by_block(chosen.block, told)]
    except Exception as error:  # noqa: BLE001  nothing about telling may fail what is told of
        failures = [type(error).__name__]
    for failure in failures:
        _log.warning("the notification was not sent: %s", failure)
    return f"not sent: {'; '.join(failures)}" if failures else "sent"


def message(notice: Notice) -> str:
    """The notice as plain text."""
    counts = ", ".join(f"{number} {name}" for name, number in notice.counts.items())
    lines = [notice.title, counts, notice.first_error and f"first error: {notice.first_error}"]
    lines += [notice.cure and f"cure: {notice.cure}", notice.link]
    return "\n".join(line for line in lines if line)


def payload(notice: Notice) -> dict[str, Any]:
    """The JSON of a webhook: `text` as chat systems take it, and the fields for programs."""
    escaped = message(notice).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return {"text": escaped, "wherry": {"schema": SCHEMA, **asdict(notice)}}


def _by_webhook(url: str | None, notice: Notice) -> list[str]:
    if not url:
        return []
    if urlsplit(url).scheme not in ("http", "https"):
        return ["the webhook is no http or https URL"]
    text, failure = json.dumps(payload(notice), default=str), ""
    for pause in _PAUSES:
        time.sleep(pause)
        failure, again = _post(url, text)
        if not failure or not again:
            break
    return [f"webhook at {urlsplit(url).hostname}: {failure}"] if failure else []


def _post(url: str, text: str) -> tuple[str, bool]:
    """One attempt: why it failed, in words without the address, and whether another one can help."""
    try:
        post(url, text, {"User-Agent": "wherry"}, timeout=_TIMEOUT)
    except urllib.error.HTTPError as error:
        return f"it answered {error.code}", error.code in _AGAIN
    except (OSError, ValueError) as error:
        return f"it cannot be reached ({type(error).__name__})", True
    return "", False


def _by_block(name: str | None, notice: Notice) -> list[str]:
    if not name:
        return []
    try:
        service("prefect-notify").tell(name, notice.title, message(notice))
    except WherryError as error:
        return [f"block {name}: {error.what}"]
    except Exception as error:  # noqa: BLE001  a block is somebody else's code, and its errors can hold its secrets
        return [f"block {name}: {type(error).__name__}"]
    return []


def _clean(text: str | None) -> str | None:
    if text is None:
        return None
    without = redact(text)
    return without if len(without) <= _LONGEST else f"{without[:_LONGEST]} …"
