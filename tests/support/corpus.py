"""The corpus of checkpoints that the real systems wrote; tests that need it say so where it is absent."""

from __future__ import annotations

import json
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.skips import CORPUS, NO_CORPUS

if TYPE_CHECKING:
    from pathlib import Path

PRESENT = (CORPUS / "INDEX.json").is_file()
needs_corpus = pytest.mark.skipif(not PRESENT, reason=NO_CORPUS)


@cache
def expected(case: str) -> dict[str, Any]:
    """What is known of a case, read once: not to be changed."""
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


def place(case: str) -> Path:
    """Where the checkpoint of a case lies."""
    return CORPUS / case / "checkpoint" / expected(case)["uri"]


def needs(*names: str) -> None:
    """Skip where the corpus is absent; an absent case of one that is here is an error."""
    if not PRESENT:
        pytest.skip(NO_CORPUS)
    for name in names:
        assert (CORPUS / name).exists(), f"the corpus lacks {name}"
