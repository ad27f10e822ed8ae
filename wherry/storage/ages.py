"""ages: when the files of a checkpoint were written."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from wherry.errors import NotFoundError, UnsupportedError, storage_error

if TYPE_CHECKING:
    from collections.abc import Iterable

    from wherry.storage.location import Location
    from wherry.store.store import Entry

_NANOSECONDS = 1e9


def age_of(location: Location) -> float | None:
    """Seconds since the newest file was written; for a folder, only its direct children count."""
    if not location.store.capabilities.local:
        return None
    entries = [one for one in location.entries() if not one.is_dir] or [location.entry]
    marks = [int(one.mark) for one in entries if one is not None and one.mark]
    return max(time.time() - max(marks) / _NANOSECONDS, 0.0) if marks else None


def modified_time(place: Location, members: Iterable[Entry]) -> datetime:
    """When the newest file of a checkpoint was written; UTC.

    Raises:
        NotFoundError: one of the files no longer exists.
        StorageError: the storage failed.
        UnsupportedError: it does not report modification times.
    """
    if place.store.capabilities.local:
        newest = max((int(member.mark) for member in members if member.mark), default=0)
        return datetime.fromtimestamp(newest / _NANOSECONDS, UTC)
    paths = [place.path if member.name == place.name else f"{place.path}/{member.name}" for member in members]
    try:
        return max(map(place.store.modified, paths)).astimezone(UTC)
    except FileNotFoundError as error:
        raise NotFoundError("file not found", uri=place.uri, cure="check the path") from error
    except OSError as error:
        raise storage_error(error, place.uri) from error
    except UnsupportedError as error:
        raise UnsupportedError(
            "the storage does not report modification times", uri=place.uri, cure="select by step instead"
        ) from error
