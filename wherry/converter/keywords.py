"""keywords: the keyword arguments of `export` and `Store`, and signatures that name each keyword.

Those of `convert` are declared next to its options, in `wherry.core.request`.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

from wherry.core.request import LayoutRequest, RequestOption, WritingKeywords

if TYPE_CHECKING:
    from wherry.core.progress import OnProgress

Verb = TypeVar("Verb", bound="Callable[..., Any]")


class ExportKeywords(WritingKeywords, total=False):
    """The keyword arguments of `wherry.export` and of a Store: how a live state is written."""

    name: str | None
    system: str | None
    spool: str | os.PathLike[str] | None
    patience: float
    alone: bool
    options: Mapping[str, Any]


class RestoreKeywords(TypedDict, total=False):
    """The keyword arguments of `Store.restore`: those of `wherry.restore` that do not choose the step."""

    only: str | None
    strict: bool
    rename: str | Sequence[str] | None
    cast: bool
    to: str | None
    options: Mapping[str, Any] | None
    layout: LayoutRequest | None
    memory: str | int
    progress: OnProgress | None
    format: str | None
    item: str | None
    allow_opaque: Iterable[str]


# Options of a conversion that concern files, which a live state has not.
OF_FILES = ("family_file", "as_step", "sign", "lineage", "rename")


def spelled_out(
    keywords: type, options: Iterable[RequestOption] = (), *, without: Collection[str] = ()
) -> Callable[[Verb], Verb]:
    """Give a function with `**keywords` a signature that names each of them, for `help` and notebooks.

    Args:
        keywords: the TypedDict of its keyword arguments.
        options: arguments too, unless they are in `without`. Their defaults are shown; None is shown for the others.
        without: names of options that the function does not take.
    """
    declared = {one.name: one for one in options if one.name not in without}
    stated = {name: getattr(kind, "__forward_arg__", kind) for name, kind in keywords.__annotations__.items()}
    annotations = stated | {name: one.type for name, one in declared.items() if name not in stated}
    rows = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=declared[name].default if name in declared else None,
            annotation=annotation,
        )
        for name, annotation in annotations.items()
    ]

    def with_signature(verb: Verb) -> Verb:
        signature = inspect.signature(verb)
        own = [one for one in signature.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
        names = {one.name for one in own}
        verb.__dict__["__signature__"] = signature.replace(
            parameters=[*own, *(row for row in rows if row.name not in names)]
        )
        return verb

    return with_signature
