"""in_use: which checkpoints are being read at this moment, so that nothing removes the input of a running job.

wherry removes only what it wrote itself, and that has a sidecar. So a conversion that reads such a checkpoint marks it
while it runs, and any other source is read without leaving a trace anywhere. The mark is a lease beside the checkpoint,
`.wherry-<name>.<8 hex>.reading`, as that of who writes it is: whoever could remove the checkpoint sees it, whichever
machine or home they have. It is void when its process has ended, or has given no sign of life for half a minute of
watching (see `lease_watch`); several may read one source. Where nothing can be written beside the source, and
on object stores, which have no leases, the mark lies in `WHERRY_HOME/in-use` and is seen by whoever shares the home;
where that cannot be written either the conversion goes on without a mark.
"""

from __future__ import annotations

import logging
import secrets
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING

from wherry.core.digest import sha256_of
from wherry.errors import WherryError
from wherry.staging.lease import Lease
from wherry.staging.lease_watch import Verdict, judge
from wherry.storage.folders import PREFIX
from wherry.storage.home import ensure_home, home
from wherry.storage.sidecar import sidecar_location
from wherry.storage.stores import locate

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator

    from wherry.storage.location import Location

_FOLDER = "in-use"
_SUFFIX = ".reading"
_HEX = "[0-9a-f]" * 8
_log = logging.getLogger(__name__)


@contextmanager
def in_use(uri: str) -> Generator[None]:
    """Say that a checkpoint is being read while the context is open.

    Args:
        uri: the checkpoint itself, as its detection names it.
    """
    location = locate(uri)
    mark = _marked(location) if sidecar_location(location).exists() else None
    try:
        yield
    finally:
        if mark is not None:
            mark.__exit__(None, None, None)


def is_in_use(uri: str) -> bool:
    """Whether a living job reads the checkpoint."""
    return bool(used([uri]))


def used(uris: Iterable[str]) -> set[str]:
    """Those checkpoints that living jobs read; all marks are watched at the same time, and void ones removed."""
    marks = {mark: uri for uri in uris for mark in _marks(locate(uri))}
    found = judge(marks)
    for mark, judgement in found.items():
        if judgement.verdict in (Verdict.DEAD, Verdict.EXPIRED):
            with suppress(WherryError, OSError), Lease(mark, marks[mark], judgement):
                pass  # who takes a mark over frees it
    return {marks[mark] for mark, judgement in found.items() if judgement.verdict is Verdict.ALIVE}


def _marked(location: Location) -> Lease | None:
    """A mark that is held; None where none could be made."""
    error: BaseException | None = None
    for made in (_beside, _at_home):
        try:
            place = made(location)
            if place is not None:
                lease = Lease(place.with_name(f"{place.name}.{secrets.token_hex(4)}{_SUFFIX}"), location.uri)
                return lease.__enter__()
        except (WherryError, OSError) as caught:
            error = caught
    _log.warning("%s could not be marked as in use: %s", location.uri, error)
    return None


def _beside(location: Location) -> Path | None:
    local = location.store.capabilities.local
    return Path(location.path).parent / f"{PREFIX}{location.name}" if local else None


def _at_home(location: Location) -> Path:
    folder = ensure_home() / _FOLDER
    folder.mkdir(exist_ok=True)
    return folder / _key(location)


def _marks(location: Location) -> Iterator[Path]:
    for place in (_beside(location), home() / _FOLDER / _key(location)):
        if place is not None:
            yield from place.parent.glob(f"{escape(place.name)}.{_HEX}{_SUFFIX}")


def _key(location: Location) -> str:
    return sha256_of("in-use", location.uri)[:16]
