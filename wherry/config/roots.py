"""roots: the folders in which the routes of `wherry.toml` read and write.

A tag of the model registry, a statement of the ledger and a parameter of a flow can be written by others than the
user who opens what they name. So it is opened only below one of these folders, as is what a route finds. Without
routes there are no roots, and only the links in a checkpoint are limited. What a person types is opened, also where
the records of the same command state it again.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from wherry.config.config import Config, load_config
from wherry.errors import HostileError
from wherry.store.local_store import is_at_or_below, is_live, locate, locate_below, locate_recorded
from wherry.store.location import Location
from wherry.store.open_file import allowed_roots

_typed: ContextVar[str] = ContextVar("typed", default="")


@contextmanager
def typed_by_a_person(uri: str) -> Generator[None]:
    """Around a command on a checkpoint whose place a person has typed.

    Args:
        uri: the place.
    """
    before = _typed.set(locate(uri).uri)
    try:
        yield
    finally:
        _typed.reset(before)


def root_of(uri: str | os.PathLike[str]) -> str | None:
    """The folder of the routes below which a URI that nobody named at the command line may be opened.

    Its text is compared; nothing is opened.

    Args:
        uri: a place that a registry, the ledger or a parameter states.

    Returns:
        The innermost root, part of a target's template before its first field, or folder in `links` that holds it; None
        where no routes are configured, for a training state in memory, and for what a person has typed.

    Raises:
        HostileError: routes are configured, and none of these folders holds it.
        UsageError: the configuration or the URI is invalid.
    """
    config, text = load_config(), os.fspath(uri)
    if not config.routes or is_live(text):
        return None
    place = locate(text)
    if place.uri == _typed.get():
        return None
    parts = place.path.split("/")
    holding = [root for root in _roots(config) if is_at_or_below(locate(root), place)]
    if holding and ".." not in parts:
        return max(holding, key=len)
    raise HostileError(
        "a record or parameter names a place that no route reads or writes",
        uri=place.uri,
        cure=f'allow its folder in wherry.toml: links = ["{place.parent.uri}"]'
        if place.store.capabilities.local
        else f'add it to wherry.toml as the root of a route: root = "{place.parent.uri}"',
    )


def locate_stated(uri: str | os.PathLike[str]) -> Location:
    """The location of a place that a registry, the ledger or a parameter states; see `root_of`.

    Raises:
        HostileError, UsageError: as `root_of`.
    """
    root = root_of(uri)
    return locate_recorded(os.fspath(uri)) if root is None else locate_below(root, uri)


def _roots(config: Config) -> Iterator[str]:
    for route in config.routes:
        yield route.root
        for target in route.targets:
            fixed, field, _rest = target.uri.partition("{")
            yield (fixed[: fixed.rfind("/") + 1] or ".") if field else fixed
    yield from allowed_roots()
