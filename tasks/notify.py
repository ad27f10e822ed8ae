"""notify, for Prefect: notification blocks as a channel; see `wherry.nightly.notify`."""

from __future__ import annotations

import inspect
from typing import Any

from prefect.blocks.abstract import NotificationBlock
from prefect.blocks.core import Block
from prefect.utilities.asyncutils import run_coro_as_sync

from wherry.errors import UsageError


def tell(name: str, title: str, text: str) -> None:
    """Send a message through a notification block.

    Args:
        name: name of the block, for example `slack-webhook/team`.
        title: one line.
        text: the whole message.

    Raises:
        UsageError: the block is of another kind.
    """
    block: Any = Block.load(name)
    if not isinstance(block, NotificationBlock):
        raise UsageError(f"{name} is not a notification block", cure="use a block such as slack-webhook/team")
    result: Any = block.notify(text, title)
    if inspect.iscoroutine(result):  # a block's method may be sync or async
        run_coro_as_sync(result)
