"""Scores: metrics that training recorded in the folder of a step, by which the best step is selected.

    metrics/metrics                 Orbax's CheckpointManager: a JSON object
    _CHECKPOINT_METADATA            Orbax ≥ 0.11: the same under `metrics`
    trainer_state.json              the Hugging Face trainer: `log_history`, of which the last entry counts
    metrics.json, eval_results.json a JSON object, as many loops write it

The files are in the step folder: in the checkpoint itself, or next to the item in it. A file in the folder of a run
describes the run and none of its steps. Only numbers count, and a name that two files state is taken from the first
file of this list.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from wherry.core.json_document import parse_json
from wherry.core.steps import step_number
from wherry.errors import WherryError

if TYPE_CHECKING:
    from wherry.store.location import Location

_FILES = (
    "metrics/metrics",
    "_CHECKPOINT_METADATA",
    "trainer_state.json",
    "metrics.json",
    "eval_results.json",
)
_LARGEST = 64 << 20  # bytes; the history of a long run takes a few MB


def score(place: Location, metric: str) -> float | None:
    """A metric of a checkpoint; None if no file with metrics states it.

    Args:
        place: the checkpoint, below the root of its route.
        metric: the name.

    Raises:
        CorruptError: a file with metrics is not valid JSON, or too large.
        StorageError: the storage failed.
    """
    for where in _folders(place):
        for found in _objects(where):
            value = _number(found, metric)
            if value is not None:
                return value
    return None


def known_score(place: Location, metric: str | None, log: Any) -> float | None:
    """The metric that the retention rules compare; None if it is missing or unreadable, and the checkpoint is kept.

    Args:
        place: the checkpoint.
        metric: the name.
        log: receives why it cannot be read.
    """
    try:
        return score(place, metric) if metric else None
    except WherryError as error:
        log.warning("metric %s of %s cannot be read: %s", metric, place.uri, error)
        return None


def _folders(place: Location) -> Iterator[Location]:
    """The checkpoint itself and the step folder around it; for a file without a step, the folder that holds it."""
    folder = place.entry is not None and place.entry.is_dir
    if folder:
        yield place
    around = [place.parent] if folder else [place.parent, place.parent.parent]
    steps = [one for one in around if _step(one.name) is not None]
    yield from steps
    if not folder and not steps and _step(PurePosixPath(place.name).stem) is None:
        yield place.parent


def _step(name: str) -> int | None:
    return step_number(name, any_prefix=True)


def _objects(folder: Location) -> Iterator[dict[str, Any]]:
    for name in _FILES:
        place = folder.join(name)
        entry = place.stat()
        if entry is None or entry.is_dir:
            continue  # most systems write only one of them
        data = parse_json(
            place.read_whole(_LARGEST), name, uri=place.uri, cure="restore the file from a backup"
        )
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
    """A number by its name; a slash in the name may stand for a nested table."""
    value: Any = data.get(metric)
    if value is None and "/" in metric:
        head, _slash, rest = metric.partition("/")
        below = data.get(head)
        return _number(below, rest) if isinstance(below, dict) else None
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) else None
