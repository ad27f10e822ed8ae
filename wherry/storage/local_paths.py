"""Paths of this machine, from the texts and URIs in which people and files state them."""

from __future__ import annotations

import os
from urllib.parse import unquote_to_bytes, urlsplit

from wherry.errors import UsageError


def native_path(text: str) -> str:
    """A path in the encoding of this process's locale; the inverse of `path_uri` for a bare path."""
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        return os.fsdecode(text.encode("utf-8", "surrogateescape"))
    return text


def local_path(uri: str) -> str | None:
    """The path of this machine that a URI means, with the home folder for `~`; None for a URI of another store.

    Raises:
        UsageError: the URI names another machine.
    """
    protocol, separator, _ = uri.partition("://")
    if not separator:
        return native_path(os.path.expanduser(uri))  # noqa: PTH111  a string
    if protocol != "file":
        return None
    parts = urlsplit(uri)
    if "@" in parts.netloc:
        raise UsageError("a URI must not carry credentials", cure="write the path alone")
    if parts.netloc not in ("", "localhost"):
        raise UsageError(
            f"{uri} names the host {parts.netloc!r}; expected a path of this machine",
            cure=f"write file:///{parts.netloc}{parts.path}, or the path alone",
        )
    return os.fsdecode(unquote_to_bytes(parts.path.encode("utf-8", "surrogateescape")))
