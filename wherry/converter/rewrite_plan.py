"""The plan of a rewrite, and its result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import TYPE_CHECKING, Any

from wherry.core.account import IgnoredEntry, fold_entries
from wherry.core.lazy_dataclass import dataclass

if TYPE_CHECKING:
    from wherry.core.receipt import Receipt


@dataclass(frozen=True, slots=True)
class RewritePlan:
    """What a rewrite would do.

    Attributes:
        source: URI of the checkpoint.
        format: its format.
        target: URI of the committed checkpoint; that of the source if it is rewritten in place.
        name, value: which rewrite, as in `--as NAME=VALUE`.
        in_place: whether files of the source itself are replaced.
        files: small files that are written.
        carried: number and total bytes of the files that are copied unchanged.
        ignored: what of the source is not copied, each with its rule; nothing in place.
        renamed: printed key path → new key path, of the tensors that are renamed.
        tensors: number of tensors.
        digest: identity of the request.
    """

    source: str
    format: str
    target: str
    name: str
    value: str | None
    in_place: bool
    files: tuple[str, ...]
    carried: tuple[int, int]
    ignored: tuple[IgnoredEntry, ...]
    renamed: Mapping[str, str]
    tensors: int
    digest: str

    def to_json(self) -> dict[str, Any]:
        """The output of `rewrite --dry-run --json`."""
        files, nbytes = self.carried
        return {
            "source": {"uri": self.source, "format": self.format},
            "target": self.target,
            "as": self.name,
            "value": self.value,
            "in_place": self.in_place,
            "files": list(self.files),
            "carried": {"files": 0 if self.in_place else files, "bytes": 0 if self.in_place else nbytes},
            "ignored": [one.to_json() for one in fold_entries(self.ignored)],
            "renamed": dict(self.renamed),
            "tensors": self.tensors,
            "plan_digest": self.digest,
        }


@dataclass(frozen=True, slots=True)
class Rewritten:
    """What a rewrite did.

    Attributes:
        rewriting: the plan.
        receipt: the lineage edge; None if no digests are known (`verify="none"`).
        ways: `reflink`, `copy` or `store` → number of bytes that were copied that way.
    """

    rewriting: RewritePlan
    receipt: Receipt | None
    ways: Mapping[str, int] = field(default_factory=dict[str, int])

    def to_json(self) -> dict[str, Any]:
        """The output of `rewrite --json`."""
        receipt = self.receipt.to_json() if self.receipt else None
        return {**self.rewriting.to_json(), "carried_by": dict(self.ways), "receipt": receipt}
