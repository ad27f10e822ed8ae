"""Detection: which checkpoint a path holds, with the evidence.

A detection states format, format version, writer generation, step, kind, family and verdict. Where one format
specialises another, the result is not ambiguous: the most specific format is chosen and `also` lists the others.
"""

from __future__ import annotations

from dataclasses import asdict, field, replace
from typing import Literal, TypeAlias

from wherry.core.lazy_dataclass import dataclass
from wherry.core.steps import require_step

Verdict: TypeAlias = Literal["ok", "incomplete", "corrupt", "malicious", "not-a-checkpoint", "unsupported"]
Kind: TypeAlias = Literal["params", "train-state", "other"]


def verdict_of_damage(verdict: str) -> Verdict:
    """The verdict of a checkpoint whose metadata cannot be read: that of the error, `corrupt` by default."""
    return "incomplete" if verdict == "incomplete" else "malicious" if verdict == "malicious" else "corrupt"


@dataclass(frozen=True, slots=True)
class Evidence:
    """One observation: the file (relative to the detection's URI), and what was found in it."""

    file: str
    seen: str


@dataclass(frozen=True, slots=True)
class Detection:
    """The answer of `detect`.

    Attributes:
        uri: the checkpoint itself; if the request named a run or step folder, the item that was chosen in it.
        format: name of the most specific format, `none` if there is none.
        also: further formats that match, most specific first.
        format_version: the format's own name of the layout, for example `ocdbt zarr2`.
        writer: software and generation, where the files state it.
        step: training step, where a name or a file states it.
        kind: parameters only, a train state, or neither.
        family: model family, where a config names it.
        verdict: from metadata only; no tensor byte is read for it.
        reason: why the verdict is not `ok`.
        evidence: the observations, in the order in which they were made.
        cure: what to do, where there is no checkpoint, or one whose weights were not gathered.
    """

    uri: str
    format: str
    also: tuple[str, ...] = ()
    format_version: str | None = None
    writer: str | None = None
    step: int | None = None
    kind: Kind | None = None
    family: str | None = None
    verdict: Verdict = "ok"
    reason: str | None = None
    evidence: tuple[Evidence, ...] = field(default=())
    cure: str | None = None

    def __post_init__(self) -> None:
        """Check that the step can be printed and recorded."""
        require_step(self.step)

    def to_json(self) -> dict[str, object]:
        """The fields by name, as `detect --json` prints them."""
        return asdict(self)

    def seen(self, *evidence: Evidence) -> Detection:
        """The same detection with more evidence."""
        return replace(self, evidence=(*self.evidence, *evidence))
