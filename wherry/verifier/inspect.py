"""inspect: what one checkpoint holds, with hashes on request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from wherry.converter.plan import DEFAULT_MEMORY
from wherry.core.keypath import KeyPath, render
from wherry.core.units import parse_size
from wherry.formats.checkpoint import Checkpoint, open_checkpoint
from wherry.formats.pin import settled_checkpoint, take_pin
from wherry.ledger.resolve import checkpoint_uri
from wherry.mover.hashing import Hashes, flat_hashes, hash_checkpoint

if TYPE_CHECKING:
    import os

    from wherry.core.detection import Detection
    from wherry.core.manifest import Manifest
    from wherry.core.progress import OnProgress


@dataclass(frozen=True, slots=True)
class Inspection:
    """What a checkpoint holds.

    Attributes:
        detection: what it is.
        manifest: its contents, with tensor digests where they were asked for.
        sha256: key path → flat SHA-256 of canonical bytes, where it was asked for.
    """

    detection: Detection
    manifest: Manifest
    sha256: dict[KeyPath, str] = field(default_factory=dict[KeyPath, str])

    def to_json(self) -> dict[str, Any]:
        """As `inspect --json` prints it."""
        data = self.manifest.to_json()
        flat = {render(path): value for path, value in self.sha256.items()}
        tensors = [{**row, "sha256": flat.get(row["path"])} for row in data["tensors"]]
        return {"detection": self.detection.to_json(), **data, "tensors": tensors}


def inspect(
    uri: str | os.PathLike[str],
    *,
    sha256: bool = False,
    digest: bool = False,
    write: bool = False,
    memory: str | int = DEFAULT_MEMORY,
    progress: OnProgress | None = None,
    format: str | None = None,
    step: int | None = None,
    item: str | None = None,
) -> Inspection:
    """List a checkpoint's contents.

    Args:
        uri: a checkpoint, step or run.
        sha256: also hash each tensor's canonical bytes as a whole.
        digest: also compute the tensor digests.
        write: also leave them in a sidecar beside it, so that it can be registered; implies `digest`.
        memory: budget for the hashing.
        progress: called a few times a second while hashing.
        format, step, item: which checkpoint.

    Raises:
        TargetExistsError: `write`, and it has a sidecar that says something else.
        WherryError: it cannot be opened, or its bytes cannot be read.
    """

    def open_it() -> Checkpoint:
        return open_checkpoint(checkpoint_uri(uri), format=format, step=step, item=item)

    with settled_checkpoint(open_it) if write else open_it() as checkpoint:
        budget, pin = parse_size(memory), take_pin(checkpoint) if write else None
        wanted = digest or write
        hashes = hash_checkpoint(checkpoint, memory=budget, progress=progress) if wanted else Hashes({})
        flat = flat_hashes(checkpoint, memory=budget, progress=progress) if sha256 else {}
        manifest = checkpoint.manifest.with_digests(hashes.digests)
        if pin is not None:
            from wherry.verifier.stock import take_stock

            manifest = take_stock(checkpoint, hashes, pin)
        return Inspection(checkpoint.detection, manifest, flat)
