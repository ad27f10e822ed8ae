"""Configs that a person passes, as TOML, YAML or JSON: regular files, read within limits before they are parsed.

Parsers of TOML and YAML are written in Python and need ten times as long as that of JSON for as many values, so the
limits are lower: a file is refused that could take over two seconds. MaxText's whole config has 1,000 values.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Callable
from os import PathLike
from typing import Any

from wherry.core.json_document import parse_json, require_size
from wherry.core.limits import SMALL, JsonLimits, beyond, exceeds, scale_limit
from wherry.errors import NotFoundError, storage_error

TOML = JsonLimits(nbytes=8 << 20, nodes=1 << 17)
YAML = JsonLimits(nbytes=2 << 20, nodes=1 << 15)
_MOST_PARTS = 200  # of a dotted key
_NO_KEY = (
    re.compile(  # strings and comments; possessive, as a repeated group holds 100 bytes for each character
        rb"""\"\"\"(?s:.)*?\"\"\"|"""
        rb"""'''(?s:.)*?'''|\"[^\"\\\n]*+(?:\\.[^\"\\\n]*+)*+\"|'[^'\n]*'|#[^\n]*"""
    )
)
_BEFORE_TOML, _BEFORE_YAML = b"=,[{.", b":,-?[{\n"  # each value, key or part of a key follows one of them


def read_config(path: str | PathLike[str]) -> bytes:
    """The bytes of a file that a person names; devices and pipes are no configs.

    Raises:
        NotFoundError: it does not exist.
        StorageError: it cannot be read, or is no regular file.
        HostileError: it is too long.
    """
    try:
        return _read_regular(os.path.expanduser(path))  # noqa: PTH111  a path of any type
    except FileNotFoundError as error:
        raise NotFoundError("file not found", uri=os.fspath(path), cure="check the path") from error
    except OSError as error:
        raise storage_error(error, os.fspath(path)) from error


def _read_regular(path: str | PathLike[str]) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))
        require_size(status.st_size, "the file", SMALL, os.fspath(path))
        return file.read(scale_limit(SMALL.nbytes))


def parse_toml(data: bytes, what: str, *, uri: str | None = None) -> dict[str, Any]:
    """A TOML document.

    Args:
        data: UTF-8 text.
        what: its name, for errors.
        uri: the file, for errors.

    Raises:
        ValueError: it is not TOML, or not UTF-8.
        HostileError: it exceeds a limit.
    """
    require_size(len(data), what, TOML, uri)
    parts = max(part.count(b".") for part in re.split(rb"[,={}\[\]\n]", _NO_KEY.sub(b"", data)))
    if exceeds(parts, _MOST_PARTS):  # each part is a table, and tomllib copies the key for each
        raise beyond(what, scale_limit(_MOST_PARTS), "parts of a key", uri=uri)
    import tomllib

    return parse_config_text(data, tomllib.loads, what, TOML, _BEFORE_TOML, uri=uri)


def parse_yaml(data: bytes, load: Callable[[str], Any], what: str, *, uri: str | None = None) -> Any:
    """A YAML document.

    Args:
        data: UTF-8 text.
        load: parses it.
        what: its name, for errors.
        uri: the file, for errors.

    Raises:
        ValueError: it is not YAML, or not UTF-8.
        HostileError: it exceeds a limit.
    """
    return parse_config_text(data, load, what, YAML, _BEFORE_YAML, uri=uri)


def parse_config_text(
    data: bytes,
    load: Callable[[str], Any],
    what: str,
    limits: JsonLimits,
    before: bytes,
    *,
    uri: str | None = None,
) -> Any:
    """Parse a document whose values are bounded by how often certain characters occur.

    Args:
        data: UTF-8 text.
        load: parses it.
        what: its name, for errors.
        limits: what it may become.
        before: each value follows one of these.
        uri: the file, for errors.

    Raises:
        ValueError: `load` refuses it, or it is nested too deeply for the parser.
        HostileError: it exceeds a limit.
    """
    require_size(len(data), what, limits, uri)
    most = scale_limit(limits.nodes)
    if len(data) > most and sum(map(data.count, before)) > most:
        raise beyond(what, most, "values", uri=uri)
    try:
        return load(data.decode())
    except (RecursionError, MemoryError) as error:  # parsers of Python's own text end so
        raise ValueError("it is nested too deeply") from error
    except (
        LookupError,
        AttributeError,
        TypeError,
        OverflowError,
    ) as error:  # PyYAML, of a tag whose value is of another type, and of a float to the base of 60
        raise ValueError(f"a value does not fit its tag: {error}") from error


def parse_table(data: bytes, what: str, *, json: bool, uri: str | None = None) -> Any:
    """A document of JSON or TOML.

    Raises:
        ValueError: it is neither; a CorruptError is one.
        HostileError: it exceeds a limit.
    """
    return parse_json(data, what, uri=uri, limits=SMALL) if json else parse_toml(data, what, uri=uri)
