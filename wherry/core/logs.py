"""The loggers of wherry: a record is one line, its names cannot steer a terminal, and it has no credentials."""

from __future__ import annotations

import logging
from typing import Any

from wherry.errors import printable, redact


class LineLogger(logging.LoggerAdapter[Any]):
    """Logs like the logger within it, after the text has been made safe for people, terminals and files."""

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Log the text as one line; see `logging.Logger.log`."""
        if self.isEnabledFor(level):
            shown = tuple(_one_line(value) if isinstance(value, BaseException) else value for value in args)
            text = str(msg) % shown if shown else str(msg)
            kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1  # the caller, not this file
            self.logger.log(level, printable(redact(text)), **kwargs)


def _one_line(error: BaseException) -> str:
    """An error and its cure, whose names are printable already."""
    return " ".join(str(error).splitlines())


def logger(name: str) -> LineLogger:
    """The logger of a module.

    Args:
        name: its `__name__`.
    """
    return LineLogger(logging.getLogger(name), {})
