"""KeyPath: the path of a leaf in a checkpoint's tree.

A key path is a tuple of str, exactly as stored: sequence indices are decimal strings, and whether a node
is a list is kept in the Manifest. It is printed with `/` between the parts, each part escaped as in a JSON
pointer (RFC 6901: `~` is `~0`, `/` is `~1`) with one addition (an empty part is `~2`), so that two different
paths never print alike. The joined names of the formats are not unique (Orbax joins with `.` and silently loses a
tensor when `a.b` and `a/b` are both present), so they do not serve as identity here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import TypeAlias

from wherry.errors import UnrepresentableError, UsageError

KeyPath: TypeAlias = tuple[str, ...]


def render(path: KeyPath) -> str:
    """Print a key path; the inverse of `parse`. The path of a bare leaf prints as the empty string."""
    text = "/".join(path)
    if "~" not in text and all(path) and text.count("/") + 1 == len(path):
        return text  # nothing to escape, as almost always
    return "/".join([part.replace("~", "~0").replace("/", "~1") if part else "~2" for part in path])


def parse(text: str) -> KeyPath:
    """Read a printed key path; the inverse of `render`.

    Raises:
        UsageError: a `~` is not followed by 0, 1 or 2.
    """
    return tuple(_unescape(part) for part in text.split("/")) if text else ()


def _unescape(text: str) -> str:
    if text == "~2":
        return ""
    head, *escapes = text.split("~")
    if any(escape[:1] not in ("0", "1") or not escape for escape in escapes):
        raise UsageError(f"invalid key path {text!r}", cure="write ~ as ~0, / as ~1, an empty part as ~2")
    return head + "".join({"0": "~", "1": "/"}[escape[0]] + escape[1:] for escape in escapes)


def joined_names(paths: Iterable[KeyPath], join: Callable[[KeyPath], str], uri: str) -> dict[str, KeyPath]:
    """Map the names under which a system stores tensors to their key paths; two paths with one name are an error.

    Args:
        paths: the key paths of a checkpoint.
        join: how the system forms a name, for example `".".join`.
        uri: the target, for the error.

    Raises:
        UnrepresentableError: two paths have the same name.
    """
    owners: defaultdict[str, list[KeyPath]] = defaultdict(list)
    for path in paths:
        owners[join(path)].append(path)
    for name, claims in owners.items():
        if len(claims) > 1:
            raise UnrepresentableError(
                f"key collision: {' and '.join(render(path) for path in claims)} would both be stored as {name!r}",
                uri=uri,
                cure="rename one of them in the source, or choose a target that keeps key paths apart",
            )
    return {name: claims[0] for name, claims in owners.items()}
