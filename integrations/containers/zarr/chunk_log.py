"""The log of a database that is being written: where its durable chunks lie. It is removed when the tree is there."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

from wherry.integrations.containers.ocdbt.write import Reference
from wherry.staging.area import LOG_SUFFIX
from wherry.storage.folders import sync_folder
from wherry.text.json_values import json_value

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

LOG = f"chunks{LOG_SUFFIX}"


def append_to_log(log: Path, fresh: Mapping[str, Reference]) -> None:
    """Note where durable chunks lie, durably.

    Raises:
        OSError: the storage failed.
    """
    with log.open("ab") as file:
        file.write(json.dumps(fresh).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())
    sync_folder(log.parent)


def read_log(log: Path) -> dict[str, Reference]:
    """Where the chunks of an interrupted run lie; an incomplete last line is removed.

    Raises:
        OSError: the storage failed.
    """
    data = log.read_bytes()
    os.truncate(log, data.rfind(b"\n") + 1)
    rows = [json_value(line) for line in data.split(b"\n")[:-1]]
    return {key: Reference(*place) for row in rows for key, place in row.items()}
