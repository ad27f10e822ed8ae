"""removals: many objects that are removed, each in the state in which it was seen, some at the same time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wherry.runtime import threads

if TYPE_CHECKING:
    from collections.abc import Mapping

    from wherry.objects.uploads import ObjectStore

_AT_ONCE = 16


def remove_each(store: ObjectStore, marks: Mapping[str, str]) -> None:
    """Remove objects, with a request for each or two.

    Args:
        store: the store.
        marks: path → the state of the object; one in another state is left.

    Raises:
        StorageError: the storage failed.
    """
    with threads.executor(_AT_ONCE, "wherry-removals", numbers=False) as pool:
        for _done in pool.map(store.remove_object, marks, marks.values()):
            pass  # raises what the removal raised
