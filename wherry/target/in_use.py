"""in_use: marks checkpoints that are being read, so that nothing removes the input of a running job.

wherry removes only checkpoints that it wrote itself, and these have a sidecar. So a conversion that reads such a
checkpoint marks it while it runs; other sources are read without any mark. The mark is a lease next to the checkpoint,
`.wherry-<name>.<8 hex>.reading`, so every process that could remove the checkpoint sees it, on any machine and with any
home. A mark is void when its process has ended, or has not renewed it for half a minute of watching (see
`lease_watch`). Several processes may read one source. If no file can be written next to the source, and on object
stores, which have no leases, the mark is in `WHERRY_HOME/in-use` and is seen by processes that share the home; if that
cannot be written either, the conversion continues without a mark.
"""

from __future__ import annotations

import secrets
from collections.abc import Generator, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from glob import escape
from pathlib import Path

from wherry.core.digest import sha256_of
from wherry.core.progress import logger
from wherry.errors import WherryError
from wherry.storage.folders import staging_stem
from wherry.storage.home import ensure_home, home
from wherry.storage.location import Location
from wherry.storage.sidecar import sidecar_location
from wherry.storage.stores import locate
from wherry.target.janitor import owning
from wherry.target.lease import Lease, LeaseFile
from wherry.target.lease_watch import Verdict, judge

_FOLDER = "in-use"
_SUFFIX = ".reading"
_HEX = "[0-9a-f]" * 8
_log = logger(__name__)


@contextmanager
def in_use(uri: str) -> Generator[None]:
    """Mark a checkpoint as being read while the context is open.

    Args:
        uri: the checkpoint itself, as its detection names it.
    """
    location = locate(uri)
    with ExitStack() as stack:
        if sidecar_location(location).exists():
            _hold_mark(location, stack)
        yield


def is_in_use(uri: str) -> bool:
    """Whether a running job reads the checkpoint."""
    return bool(uris_in_use([uri]))


def uris_in_use(uris: Iterable[str]) -> set[str]:
    """The checkpoints that running jobs read; all marks are watched at the same time, and void marks are removed."""
    marks = {mark: uri for uri in uris for mark in _marks(locate(uri))}
    found = judge(marks)
    for mark, judgement in found.items():
        if judgement.verdict in (Verdict.DEAD, Verdict.EXPIRED):
            with suppress(WherryError, OSError), Lease(LeaseFile(mark), marks[mark], judgement):
                pass  # taking a void mark over and leaving the block removes it
    return {marks[mark] for mark, judgement in found.items() if judgement.verdict is Verdict.ALIVE}


def _hold_mark(location: Location, stack: ExitStack) -> None:
    """Hold a mark in a stack, if one can be created."""
    error: BaseException | None = None
    for made in (_at_source, _at_home):
        try:
            place = made(location)
            if place is not None:
                mark = place.with_name(f"{place.name}.{secrets.token_hex(4)}{_SUFFIX}")
                with ExitStack() as held:
                    held.enter_context(owning(mark))
                    held.enter_context(Lease(LeaseFile(mark), location.uri))
                    stack.enter_context(held.pop_all())
                return
        except (WherryError, OSError) as caught:
            error = caught
    _log.warning("%s could not be marked as in use: %s", location.uri, error)


def _at_source(location: Location) -> Path | None:
    local = location.store.capabilities.local
    return Path(location.path).parent / staging_stem(location.name) if local else None


def _at_home(location: Location) -> Path:
    folder = ensure_home() / _FOLDER
    folder.mkdir(exist_ok=True)
    return folder / _key(location)


def _marks(location: Location) -> Iterator[Path]:
    for place in (_at_source(location), home() / _FOLDER / _key(location)):
        if place is not None:
            yield from place.parent.glob(f"{escape(place.name)}.{_HEX}{_SUFFIX}")


def _key(location: Location) -> str:
    return sha256_of("in-use", location.uri)[:16]
