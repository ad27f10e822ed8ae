"""opaque: which unknown classes of a pickle the user lets pass as values that nobody looks into.

Readers refuse a pickle that names a class which they do not know. `--allow-opaque pkg.Class` (or
`wherry.open(uri, allow_opaque=("pkg.Class",))`) makes an object of that class an inert value instead: its name and
what was stored for it, in the manifest; still nothing is imported or called. The names hold for all that is opened
within `allowing`, whichever format opens it, so that no reader has to hand them on.
"""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

from wherry.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable

_ALLOWED: ContextVar[frozenset[str]] = ContextVar("wherry_allow_opaque", default=frozenset())


def allowed_opaque() -> frozenset[str]:
    """Dotted names of the classes that pass here."""
    return _ALLOWED.get()


@contextmanager
def allowing(names: Iterable[str]) -> Generator[None]:
    """Let further classes pass while the context is open.

    Args:
        names: exact dotted names, `package.module.Class`; no patterns.

    Raises:
        UsageError: a name without a dot, or with a `*`.
    """
    wanted = frozenset(names)
    for name in wanted:
        if "." not in name.strip(".") or "*" in name:
            raise UsageError(f"not the dotted name of a class: {name!r}", cure="write package.module.Class")
    token = _ALLOWED.set(_ALLOWED.get() | wanted)
    try:
        yield
    finally:
        _ALLOWED.reset(token)
