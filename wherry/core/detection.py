"""Detection: what a path holds, and why we say so.

Format, format version, writer generation, step, kind, family and verdict; always with the evidence, never
a bare guess. A specialisation is not an ambiguity: the most specific format wins, `also` lists the rest.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Literal, TypeAlias

Verdict: TypeAlias = Literal["ok", "incomplete", "corrupt", "malicious", "not-a-checkpoint", "unsupported"]
Kind: TypeAlias = Literal["params", "train-state", "other"]


def verdict_of_damage(verdict: str) -> Verdict:
    """The verdict of a checkpoint whose metadata could not be read, by that of the error; `corrupt` by default."""
    return "incomplete" if verdict == "incomplete" else "malicious" if verdict == "malicious" else "corrupt"


@dataclass(frozen=True, slots=True)
class Evidence:
    """One thing that was seen: in which file (relative to the detection's URI), and what."""

    file: str
    seen: str


@dataclass(frozen=True, slots=True)
class Detection:
    """The answer of `detect`.

    Attributes:
        uri: the checkpoint itself; when a run or step folder was asked for, the item that was chosen in it.
        format: name of the most specific format, `none` if there is none.
        also: further formats that describe it rightly, most specific first.
        format_version: the format's own name of the layout, for example `ocdbt zarr2`.
        writer: software and generation, as far as the files tell.
        step: training step, where a name or a file tells it.
        kind: parameters only, a train state, or neither.
        family: model family, where a config names it.
        verdict: from metadata only; no tensor byte was read for it.
        reason: why the verdict is not `ok`.
        evidence: what was seen, in the order in which it was looked at.
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

    def to_json(self) -> dict[str, object]:
        """The fields by name, as `detect --json` prints them."""
        return asdict(self)

    def seen(self, *evidence: Evidence) -> Detection:
        """The same detection with more evidence."""
        return replace(self, evidence=(*self.evidence, *evidence))
