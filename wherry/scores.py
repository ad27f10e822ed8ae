"""Scores: what training recorded of a step beside it, by which a best one is chosen.

    metrics/metrics                 Orbax's CheckpointManager: a JSON object
    _CHECKPOINT_METADATA            Orbax ≥ 0.11: the same under `metrics`
    trainer_state.json              the Hugging Face trainer: `log_history`, of which the last entry counts
    metrics.json, eval_results.json a JSON object, as many loops write it

They lie in the step folder: in the checkpoint itself, or beside the item in it. Only numbers count, and a name that
two files state is taken from the first of this list.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from wherry.errors import CorruptError
from wherry.store import locate

if TYPE_CHECKING:
    from collections.abc import Iterator

    from wherry.location import Location

_FILES = (
    "metrics/metrics",
    "_CHECKPOINT_METADATA",
    "trainer_state.json",
    "metrics.json",
    "eval_results.json",
)
_LARGEST = 64 << 20  # bytes; a trainer's history of a long run is some MB


def score(uri: str, metric: str) -> float | None:
    """A metric of a checkpoint; None where nothing beside it states it.

    Raises:
        CorruptError: a file that states metrics is not JSON, or larger than any of them is.
        StorageError: the storage failed.
    """
    place = locate(uri)
    folder = place if place.entry is not None and place.entry.is_dir else place.parent
    for where in (folder, folder.parent):
        for found in _objects(where):
            value = _number(found, metric)
            if value is not None:
                return value
    return None


def _objects(folder: Location) -> Iterator[dict[str, Any]]:
    for name in _FILES:
        place = folder.join(name)
        entry = place.stat()
        if entry is None or entry.is_dir:
            continue  # most systems write only one of them
        if entry.size > _LARGEST:
            raise CorruptError(
                f"{name} has {entry.size} bytes", uri=place.uri, cure="it states no metrics; move it"
            )
        try:
            data = json.loads(place.read())
        except ValueError as error:
            raise CorruptError(f"{name} is not JSON: {error}", uri=place.uri, cure="restore it") from error
        if isinstance(data, dict):
            yield from _within(name, data)


def _within(name: str, data: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if name == "_CHECKPOINT_METADATA":
        found = data.get("metrics")
        yield found if isinstance(found, dict) else {}
    elif name == "trainer_state.json":
        history = data.get("log_history")
        yield from (
            row for row in reversed(history if isinstance(history, list) else []) if isinstance(row, dict)
        )
    else:
        yield data


def _number(data: dict[str, Any], metric: str) -> float | None:
    """A value by its name; a slash in the name may stand for a table in a table."""
    value: Any = data.get(metric)
    if value is None and "/" in metric:
        head, _slash, rest = metric.partition("/")
        below = data.get(head)
        return _number(below, rest) if isinstance(below, dict) else None
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return float(value) if math.isfinite(value) else None
