"""Makes verbs accept a model URI wherever they take the URI of a checkpoint; `wherry.open` and `wherry.detect`."""

from __future__ import annotations

from dataclasses import replace
from functools import wraps
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

from wherry.formats.checkpoint import open_checkpoint
from wherry.formats.detect import detect
from wherry.ledger.resolve import checkpoint_uri

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

    from wherry.core.request import SourceRequest

P = ParamSpec("P")
T = TypeVar("T")


def _with_model_uris(
    verb: Callable[Concatenate[str | os.PathLike[str], P], T],
) -> Callable[Concatenate[str | os.PathLike[str], P], T]:
    """A verb that accepts a model URI such as `models:/name@alias` in place of the checkpoint's own URI."""

    @wraps(verb)
    def with_checkpoint_uri(uri: str | os.PathLike[str], *positional: P.args, **options: P.kwargs) -> T:
        return verb(checkpoint_uri(uri), *positional, **options)

    return with_checkpoint_uri


def resolve_named(source: SourceRequest) -> SourceRequest:
    """A source with the URI of the checkpoint itself in place of a model URI."""
    return replace(source, uri=checkpoint_uri(source.uri))


open_named = _with_model_uris(open_checkpoint)
detect_named = _with_model_uris(detect)
