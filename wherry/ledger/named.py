"""named: a checkpoint opened or detected by its own URI or a model URI: `wherry.open` and `wherry.detect`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wherry.formats.checkpoint import open_checkpoint
from wherry.formats.detect import detect
from wherry.ledger.resolve import checkpoint_uri

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable

    from wherry.core.detection import Detection
    from wherry.formats.checkpoint import Checkpoint


def open_named(
    uri: str | os.PathLike[str],
    *,
    format: str | None = None,
    step: int | None = None,
    item: str | None = None,
    allow_opaque: Iterable[str] = (),
) -> Checkpoint:
    """Open a checkpoint; `wherry.open`.

    Args:
        uri: a checkpoint, a step folder, a run folder (the newest complete step is taken) or a model URI.
        format, step, item, allow_opaque: see `wherry.formats.checkpoint.open_checkpoint`.

    Raises:
        WherryError: as for `open_checkpoint` and, for a model URI, `resolve_model`.
    """
    place = checkpoint_uri(uri)
    return open_checkpoint(place, format=format, step=step, item=item, allow_opaque=allow_opaque)


def detect_named(
    uri: str | os.PathLike[str],
    *,
    format: str | None = None,
    step: int | None = None,
    item: str | None = None,
) -> Detection:
    """Say what lies at a URI; `wherry.detect`.

    Args:
        uri: a checkpoint, a step folder, a run folder or a model URI (`models:/name@alias`).
        format, step, item: see `wherry.formats.detect.detect`.

    Raises:
        WherryError: as for `wherry.formats.detect.detect` and, for a model URI, `resolve_model`.
    """
    return detect(checkpoint_uri(uri), format=format, step=step, item=item)
