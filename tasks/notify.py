"""notify, as Prefect knows it: its notification blocks as a channel; see `wherry.watch.notify`."""

from __future__ import annotations

import inspect
from typing import Any

from prefect.blocks.abstract import NotificationBlock
from prefect.blocks.core import Block
from prefect.utilities.asyncutils import run_coro_as_sync

from wherry.errors import UsageError


def tell(name: str, title: str, text: str) -> None:
    """Send a message to a notification block.

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
