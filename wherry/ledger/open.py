"""Makes verbs accept a model URI wherever they take the URI of a checkpoint; `wherry.open` and `wherry.detect`."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from wherry.config.roots import root_of
from wherry.core.request import SourceRequest
from wherry.formats.checkpoint import open_source
from wherry.formats.detect import detect_source
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


def open_checkpoint(
    uri: str | os.PathLike[str],
    *,
    format: str | None = None,
    step: int | None = None,
    item: str | None = None,
    allow_opaque: Iterable[str] = (),
) -> Checkpoint:
    """Open a checkpoint; `wherry.open`.

    Args:
        uri: a checkpoint, a step folder, a run folder (the newest complete step is taken), or a model URI.
        format: the format, a name or alias, instead of detecting it.
        step: which step of a run.
        item: which item of a step.
        allow_opaque: dotted names of unknown pickle classes to read as opaque values instead of raising an error;
            nothing is ever imported or called.

    Raises:
        NotFoundError, NotACheckpointError, UnsupportedError, AmbiguousError: the URI does not name one checkpoint.
        DamagedError: metadata is missing or inconsistent. A checkpoint with missing chunks can be opened; `absent`
            of the reader and `verify` report them.
        HostileError: the checkpoint tries to reach outside its folder or to run code.
    """
    source = SourceRequest(os.fspath(uri), format, step, item, tuple(allow_opaque))
    return open_source(resolve_named(source))


def detect(
    uri: str | os.PathLike[str],
    *,
    format: str | None = None,
    step: int | None = None,
    item: str | None = None,
) -> Detection:
    """Identify the checkpoint at a URI.

    Args:
        uri: a checkpoint, a step folder, a run folder or a model URI.
        format: the format, instead of detecting it.
        step: which step of a run.
        item: which item of a step.

    Returns:
        The detection; a damaged, hostile or unknown checkpoint is a verdict here, not an error.

    Raises:
        UsageError: the URI or the format is invalid.
        NotFoundError: the file, folder or step was not found.
        MissingExtraError: the package for the protocol is not installed.
        StorageError: the storage failed.
    """
    return detect_source(resolve_named(SourceRequest(os.fspath(uri), format, step, item)))
