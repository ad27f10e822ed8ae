"""rewrite_plan: what a rewrite would do, and what it did."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from wherry.core.receipt import Receipt


@dataclass(frozen=True, slots=True)
class RewritePlan:
    """What a rewrite would do.

    Attributes:
        source: URI of the checkpoint.
        format: its format.
        target: URI of exactly what is committed; the source's own in place.
        name, value: which rewrite, as in `--as NAME=VALUE`.
        in_place: whether files of the source itself are replaced.
        files: small files that are written anew.
        carried: how many files go over as they are, and their bytes.
        left: files of the source that the target does not have.
        renamed: key path → new key path, printed, of those that change.
        tensors: how many there are.
        digest: names the request.
    """

    source: str
    format: str
    target: str
    name: str
    value: str | None
    in_place: bool
    files: tuple[str, ...]
    carried: tuple[int, int]
    left: tuple[str, ...]
    renamed: Mapping[str, str]
    tensors: int
    digest: str

    def to_json(self) -> dict[str, Any]:
        """As `rewrite --dry-run --json` prints it."""
        files, nbytes = self.carried
        return {
            "source": {"uri": self.source, "format": self.format},
            "target": self.target,
            "as": self.name,
            "value": self.value,
            "in_place": self.in_place,
            "files": list(self.files),
            "carried": {"files": 0 if self.in_place else files, "bytes": 0 if self.in_place else nbytes},
            "left": list(self.left),
            "renamed": dict(self.renamed),
            "tensors": self.tensors,
            "plan_digest": self.digest,
        }


@dataclass(frozen=True, slots=True)
class Rewritten:
    """What a rewrite did.

    Attributes:
        rewriting: what was asked for.
        receipt: the lineage edge; None where no digests are known (`verify="none"`).
        ways: `reflink` and `copy` → bytes that went over so.
    """

    rewriting: RewritePlan
    receipt: Receipt | None
    ways: Mapping[str, int] = field(default_factory=dict[str, int])

    def to_json(self) -> dict[str, Any]:
        """As `rewrite --json` prints it."""
        receipt = self.receipt.to_json() if self.receipt else None
        return {**self.rewriting.to_json(), "carried_by": dict(self.ways), "receipt": receipt}
