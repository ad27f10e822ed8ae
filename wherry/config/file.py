"""file: find the `wherry.toml` to use."""

from __future__ import annotations

import os
from pathlib import Path

from wherry.store.home import home

CONFIG_NAME = "wherry.toml"
CONFIG_ENV = "WHERRY_CONFIG"
ENVIRONMENT_ENV = "WHERRY_ENV"


def config_file() -> Path | None:
    """The configuration: the file that `WHERRY_CONFIG` names, else `wherry.toml` in the working directory or the home.

    A file in either folder is ignored where `wherry.config.trust` does not trust it.
    """
    given = os.environ.get(CONFIG_ENV)
    if given:
        return Path(given).expanduser().absolute()
    here, own = Path(CONFIG_NAME).absolute(), home() / CONFIG_NAME
    if here != own and os.path.lexists(here):
        from wherry.config.trust import counts

        if counts(here):
            return here
    if own.is_file():
        from wherry.config.trust import counts_in_home

        return own if counts_in_home(own) else None
    return None
