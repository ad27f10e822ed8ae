"""notify, as Prefect knows it: its notification blocks as a channel, and the page of the running flow as the link."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from prefect.blocks.abstract import NotificationBlock
from prefect.blocks.core import Block
from prefect.runtime import flow_run
from prefect.utilities.asyncutils import run_coro_as_sync

from wherry.errors import UsageError
from wherry.notify import send
from wherry.tasks.common import run_logger

if TYPE_CHECKING:
    from wherry.notify import Channels, Notice


def tell(name: str, title: str, text: str) -> None:
    """Hand a message to a notification block.

    Args:
        name: of the block, as `slack-webhook/team`.
        title: one line.
        text: the whole message.

    Raises:
        UsageError: the block is of another kind.
    """
    block: Any = Block.load(name)
    if not isinstance(block, NotificationBlock):
        raise UsageError(f"{name} is no notification block", cure="name one such as slack-webhook/team")
    told: Any = block.notify(text, title)
    if inspect.iscoroutine(told):  # blocks may be written either way
        run_coro_as_sync(told)


def notify(notice: Notice, settings: Channels | None = None) -> str:
    """Tell what a flow did, with a link to its page; in a flow, after everything else. It never fails the flow.

    It is no task: where the server itself is the trouble, that must not keep the message from going out.

    Args:
        notice: what to tell.
        settings: where; what is configured by default.

    Returns:
        What came of it, in words.
    """
    outcome = send(settings, notice, page=flow_run.ui_url)
    run_logger().info("notification: %s", outcome)
    return outcome
