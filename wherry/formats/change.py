"""Rewrite: a change of a checkpoint's small files that leaves its tensor bytes as they are.

A format lists its rewrites by name in `Format.rewrites`; `wherry.rewrite` carries them out. A rewrite only says what
it would do, as a `Change`, after it has looked at the whole source; it writes nothing itself but what `finish`
completes in a folder that it is given. So every rewrite is staged, verified, committed, undone and recorded alike.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from wherry.core.detection import Detection
    from wherry.core.keypath import KeyPath
    from wherry.core.receipt import Receipt
    from wherry.formats.format import Opened
    from wherry.storage.location import Location


def _nothing(_folder: Location) -> None:
    """What completes a folder that is complete."""


@dataclass(frozen=True, slots=True)
class Change:
    """What a rewrite makes of one checkpoint.

    Attributes:
        opened: the source, opened; who takes the change closes its reader.
        carried: file of the source → its name in the target, both relative; carried over byte by byte.
        files: small files that the target has anew or with other contents; put last, in this order.
        finish: completes the folder once these are there, durably.
        made: files and folders that `finish` makes at the top of the folder.
        renamed: key path → new key path, of those that change.
        left: files of the source that the target does not have.
        staged_only: why it cannot be done in the folder itself; empty where it can.
    """

    opened: Opened
    carried: Mapping[str, str]
    files: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    finish: Callable[[Location], None] = _nothing
    made: tuple[str, ...] = ()
    renamed: Mapping[KeyPath, KeyPath] = field(default_factory=dict["KeyPath", "KeyPath"])
    left: tuple[str, ...] = ()
    staged_only: str = ""

    def name(self, path: KeyPath) -> KeyPath:
        """The key path that one of the source has in the target."""
        return self.renamed.get(path, path)


PlanFunction: TypeAlias = "Callable[[Location, Detection, str | None], Change]"


@dataclass(frozen=True, slots=True)
class Rewrite:
    """One rewrite of a format.

    Attributes:
        help: one sentence, as `wherry formats NAME` prints it.
        plan: looks at a checkpoint and says what it would do; takes the location, its detection and what stands
            after the `=` of `--as NAME=VALUE` (None where nothing does). Raises where it cannot be done, or where
            something that the result needs is not there.
        value: what VALUE is, for the help; empty where none is taken.
    """

    help: str
    plan: PlanFunction
    value: str = ""


@dataclass(frozen=True, slots=True)
class Rewriting:
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

    rewriting: Rewriting
    receipt: Receipt | None
    ways: Mapping[str, int] = field(default_factory=dict[str, int])

    def to_json(self) -> dict[str, Any]:
        """As `rewrite --json` prints it."""
        receipt = self.receipt.to_json() if self.receipt else None
        return {**self.rewriting.to_json(), "carried_by": dict(self.ways), "receipt": receipt}
