"""The corpus of checkpoints that the real systems wrote; tests that need it say so where it is absent.

Cases whose names begin with `made-` are no part of it: `imitations` makes them, and what is known of them is
found here too.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support.skips import CORPUS, NO_CORPUS

PREFIX = "made-"  # of the cases that `imitations` makes, which is imported where one is needed
PRESENT = (CORPUS / "INDEX.json").is_file()
needs_corpus = pytest.mark.skipif(not PRESENT, reason=NO_CORPUS)


@cache
def expected(case: str) -> dict[str, Any]:
    """What is known of a case, read once: not to be changed."""
    if case.startswith(PREFIX):
        return _made(case)[1]
    needs()
    return json.loads((CORPUS / case / "expected.json").read_text())


@cache
def every_case() -> tuple[str, ...]:
    """Names of all cases, none without a corpus."""
    return tuple(sorted(path.parent.name for path in CORPUS.glob("*/expected.json"))) if PRESENT else ()


def cases(*formats: str, verdicts: tuple[str, ...] | None = ("ok", "ok-but-altered")) -> list[str]:
    """Names of the cases of these formats with one of these verdicts, or with any."""
    rows = [(name, expected(name)) for name in every_case()]
    return [
        name
        for name, row in rows
        if row.get("format") in formats and (verdicts is None or row["verdict"] in verdicts)
    ]


def home(case: str) -> Path:
    """The folder that the URIs of a case are relative to."""
    if case.startswith(PREFIX):
        return _made(case)[0]
    return CORPUS / case / "checkpoint"


def _made(case: str) -> tuple[Path, dict[str, Any]]:
    from tests.support.imitations import made

    return made(case)


def place(case: str) -> Path:
    """Where the checkpoint of a case lies."""
    return home(case) / expected(case)["uri"]


def either(*rows: Any) -> list[Any]:
    """Parameters of a test, of which those that name a case of the corpus need it."""
    names = [str(row[0] if isinstance(row, tuple) else row) for row in rows]
    return [
        pytest.param(
            *(row if isinstance(row, tuple) else (row,)),
            marks=() if name.startswith(PREFIX) else needs_corpus,
        )
        for name, row in zip(names, rows, strict=True)
    ]


def needs(*names: str) -> None:
    """Skip where the corpus is absent; an absent case of one that is here is an error."""
    if not PRESENT:
        pytest.skip(NO_CORPUS)
    for name in names:
        assert (CORPUS / name).exists(), f"the corpus lacks {name}"
