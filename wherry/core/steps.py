"""Step folders: which names are steps, which are unfinished, and which steps a run folder has.

Orbax names steps `<int>`, zero padded, or `<prefix>_<int>`; T5X, PaxML and Flax `checkpoint_<int>`; the Hugging
Face trainer `checkpoint-<int>`, torchtitan `step-<int>`, Lingua ten digits. A model folder called `llama-3` is
not a step, so an unknown prefix counts only where the caller knows that the parent is a run.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from wherry.errors import CorruptError

LARGEST_STEP = (1 << 63) - 1  # that databases store; in names, 18 digits count
_KNOWN = re.compile(r"(?:(?:checkpoint|ckpt|global_step|step|iteration|iter|epoch|save)[-_]?)?(\d{1,18})")
_ANY_PREFIX = re.compile(r"(?:.+_)?(\d{1,18})")
# Names under which systems write unfinished checkpoints; all of them rename at the end.
_UNFINISHED: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r".+\.orbax-checkpoint-tmp(-\d+)?"), "Orbax did not finish this save"),
    (re.compile(r".+\.partial_save(\.pending_\w+)?"), "Orbax did not finalize this partial save"),
    (re.compile(r".+\.tmp-\d+"), "T5X did not finish this save"),
    (re.compile(r"tmp-checkpoint-\d+"), "the Hugging Face trainer did not finish this save"),
    (re.compile(r"checkpoint_tmp(_gda)?"), "Flax did not finish this save"),
    (re.compile(r".+\.(incomplete|partial|part)"), "a download or copy has not finished"),
)


class StepFolder(NamedTuple):
    """A step folder: its number and its name."""

    number: int
    name: str


def step_number(name: str, *, any_prefix: bool = False) -> int | None:
    """The step that a folder name states, or None.

    Args:
        name: last part of a path.
        any_prefix: whether `<anything>_<int>` counts too, as in an Orbax run with a custom prefix.
    """
    found = _KNOWN.fullmatch(name.lower()) or (_ANY_PREFIX.fullmatch(name) if any_prefix else None)
    return int(found.group(1)) if found else None


def require_step(step: int | None) -> None:
    """Refuse a step that no database stores.

    Raises:
        CorruptError: it is beyond 64 bits.
    """
    if step is not None and not -LARGEST_STEP <= step <= LARGEST_STEP:
        raise CorruptError("the stated training step is beyond 64 bits", cure="use another step")


def steps_among(names: list[str]) -> list[StepFolder]:
    """The step folders among the children of a run, newest first."""
    found = [(step_number(name, any_prefix=True), name) for name in names]
    return sorted((StepFolder(number, name) for number, name in found if number is not None), reverse=True)


def unfinished_reason(name: str) -> str | None:
    """Why a file or folder of this name is unfinished; None where the name does not say so."""
    return next((reason for pattern, reason in _UNFINISHED if pattern.fullmatch(name)), None)
