"""Makes verbs accept a model URI wherever they take the URI of a checkpoint; `wherry.open` and `wherry.detect`."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import wraps
from typing import TYPE_CHECKING

from wherry.config.roots import root_of
from wherry.core.request import SourceRequest
from wherry.formats.checkpoint import open_checkpoint, open_source
from wherry.formats.detect import detect, detect_source
from wherry.ledger.resolve import checkpoint_uri

if TYPE_CHECKING:
    from collections.abc import Iterable

    from wherry.core.detection import Detection
    from wherry.formats.checkpoint import Checkpoint


def resolve_named(source: SourceRequest) -> SourceRequest:
    """A source with the URI of the checkpoint itself in place of a model URI, below the root that holds that place.

    Raises:
        HostileError: the registry or the ledger names a place that no route reads or writes.
        NotFoundError, MismatchError, AmbiguousError: as `checkpoint_uri`.
    """
    uri = os.fspath(checkpoint_uri(source.uri))
    return source if uri == source.uri else replace(source, uri=uri, below=source.below or root_of(uri))


@wraps(open_checkpoint)
def open_named(
    uri: str | os.PathLike[str],
    *,
    format: str | None = None,
    step: int | None = None,
    item: str | None = None,
    allow_opaque: Iterable[str] = (),
) -> Checkpoint:
    """As `open_checkpoint`, for a model URI such as `models:/name@alias` too."""
    source = SourceRequest(os.fspath(uri), format, step, item, tuple(allow_opaque))
    return open_source(resolve_named(source))


@wraps(detect)
def detect_named(
    uri: str | os.PathLike[str],
    *,
    format: str | None = None,
    step: int | None = None,
    item: str | None = None,
) -> Detection:
    """As `detect`, for a model URI too."""
    return detect_source(resolve_named(SourceRequest(os.fspath(uri), format, step, item)))
