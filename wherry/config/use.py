"""What a workflow asks of the configuration: to be in force while it runs, and for a policy by its name."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from wherry.config.config import Config, load_config
from wherry.config.file import CONFIG_ENV, ENVIRONMENT_ENV
from wherry.errors import NotFoundError

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping


@contextmanager
def in_force(path: str | os.PathLike[str] | None, env: str | None = None) -> Generator[Config]:
    """Make a configuration the one that every verb and every child process asks while the context is open.

    It is set for the whole process; workers run each flow in a process of its own.

    Args:
        path: the file; what is in force already by default.
        env: the environment; likewise.

    Raises:
        NotFoundError, UsageError, StorageError: as `load_config`.
    """
    loaded = load_config(path, env)
    wanted = {CONFIG_ENV: loaded.file if path is not None else None, ENVIRONMENT_ENV: env}
    before = {name: os.environ.get(name) for name, value in wanted.items() if value}
    os.environ.update({name: value for name, value in wanted.items() if value})
    try:
        yield loaded
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def named_policy(name: str) -> Mapping[str, Any]:
    """The gates of `[policy.NAME]`, as `wherry.models.policy.policy_of` takes them.

    Raises:
        NotFoundError: there is no such policy.
        UsageError, StorageError: as `load_config`.
    """
    loaded = load_config()
    policies = loaded.settings.policy
    if name not in policies:
        cure = f"choose {' or '.join(policies)}" if policies else "state it in wherry.toml, or name a file"
        raise NotFoundError(f"there is no [policy.{name}]", uri=loaded.file, cure=cure)
    return policies[name]
