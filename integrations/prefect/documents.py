"""The YAML files of a deployment, `prefect.yaml` and `automations.yaml`, read within limits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from wherry.core.config_text import parse_yaml, read_config
from wherry.errors import NotFoundError, UsageError


def read_yaml(file: Path, what: str, cure: str) -> dict[str, Any]:
    """The table of a YAML file.

    Args:
        file: its path.
        what: what it is, for errors.
        cure: for the error that it does not exist.

    Raises:
        NotFoundError: the file does not exist.
        UsageError: it is not a table in YAML.
        HostileError: it exceeds a limit.
        StorageError: it cannot be read.
    """
    try:
        found = parse_yaml(read_config(file), yaml.safe_load, what, uri=str(file))
    except NotFoundError as error:
        raise NotFoundError(error.what, uri=error.uri, cure=cure) from error
    except (yaml.YAMLError, ValueError) as error:
        raise UsageError(f"invalid {what}: {error}", uri=str(file)) from error
    if not isinstance(found, dict):
        raise UsageError(f"invalid {what}: expected a table, got a {type(found).__name__}", uri=str(file))
    return found
