"""command: the stated request of a conversion, and the command line that repeats it.

A receipt's `options` are the resolved options, with defaults filled in; under `requested` it keeps only what the user
stated:

    to, only, ignore, family, dtype, assets, as_step, verify, meta    as `wherry convert` takes them
    options                              the words of `--set`, renames and layout options among them
    into                                 the run in which the step was made
    family_file, config                  {name, sha256} of the file
    as, in_place                         as `wherry rewrite` takes them
    format, step, item, allow_opaque     which checkpoint of the source, and its opaque classes
    merge                                {kind, sources} of `wherry merge`: URI, format, fingerprint and weight of each

Fields that do not affect the result (memory, progress) and the key of a signature are left out. `to` or `as` is always
present.
"""

from __future__ import annotations

import hashlib
import os
import shlex
from collections.abc import Collection, Iterator, Mapping
from itertools import count
from typing import Any, get_args

from wherry.core.receipt import Receipt
from wherry.core.request import (
    ConvertRequest,
    Kind,
    RewriteRequest,
    SourceRequest,
    TargetRequest,
    convert_request,
    in_order,
    options_of,
    values_of,
)
from wherry.core.units import short
from wherry.credentials import redact_values
from wherry.errors import UsageError, WherryError
from wherry.formats.registry import find_format
from wherry.store.home import without_secrets
from wherry.store.local_store import LocalStore, is_live, locate
from wherry.store.location import MOST_CONFIG
from wherry.store.sidecar import sidecar_location

_OPTIONS = {one.name: one for one in options_of(TargetRequest, SourceRequest, ConvertRequest)}
_CHOSEN = ("step", "item")  # not repeated, as the source URI already names what they chose
_FILES = tuple(name for name, one in _OPTIONS.items() if one.stated == "file")
_ORDER = ("options", "only", "ignore", "into", "as_step", "meta", "verify", "format", "step", "item")
# Fields that affect the result; and those that the plan's digest does not cover, as it sees sizes but no contents.
UNPLANNED = tuple(name for name, one in _OPTIONS.items() if one.decides and one.stated in ("file", "place"))
DECIDING = tuple(
    sorted(
        (one.name for one in in_order(_OPTIONS.values(), _ORDER) if one.decides), key=UNPLANNED.__contains__
    )
)
_REWRITE = "rewrite"  # in the options of a receipt: the name of the rewrite


def stated_options(
    request: ConvertRequest | RewriteRequest, target: TargetRequest | None = None
) -> dict[str, Any]:
    """The `requested` field of a receipt: all fields that differ from their defaults.

    Args:
        request: the request.
        target: one of the targets of a conversion.

    Raises:
        NotFoundError, StorageError: a named file cannot be read.
    """
    if isinstance(request, RewriteRequest):
        said: dict[str, Any] = {"as": request.as_, "in_place": request.in_place}
    else:
        said = {"to": target and target.to}
    values = {one.name: value for one, value in values_of(target, request.source, request)}
    for one in in_order((_OPTIONS[name] for name in values), (*_ORDER[1:], "options")):
        value = values[one.name]
        if one.stated and (value != one.default or one.stated == "settings"):
            if one.stated == "run":
                value = target and locate(target.uri).uri
            elif one.stated == "settings":
                settings = target.settings if target else {}
                value = {name: _spell_value(word) for name, word in settings.items() if word is not None}
            elif one.stated == "file":
                value = _file(value)
            elif one.stated == "place":
                value = _place(value)
            said[one.name] = value
    if said.get("meta"):
        said["meta"] = redact_values(said["meta"])
    return {name: _plain(value) for name, value in said.items() if _is_said(value)}


def planned_again(stated: Mapping[str, Any], source: SourceRequest, target: TargetRequest) -> ConvertRequest:
    """A request with the same stated fields, for this source and this target; see `stated_options`."""
    given: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value["name"] if name in _FILES else value
        for name, value in stated.items()
        if name in _OPTIONS and name not in (*_CHOSEN, "into")
    }
    given |= {"format": source.format, "allow_opaque": (*source.allow_opaque, *given.get("allow_opaque", ()))}
    return convert_request(source.uri, [target], **given)


def command(receipt: Receipt, *, source: str | None = None, target: str | None = None) -> str:
    """The command line that repeats a conversion, quoted for a shell.

    The target must not exist: move an existing one away first. For a receipt that states no request, as a program may
    make it, the command states the options that differ from the format's defaults.

    Args:
        receipt: of the conversion.
        source: URI of the source, or of a checkpoint with the same tensors; the receipt's source by default.
        target: URI of the target; the receipt's target by default.

    Raises:
        UsageError: the source was a live training state, and no other source is given.
    """
    if source is None and is_live(receipt.source.uri):
        raise UsageError(
            "the source was a live training state, which no longer exists", uri=receipt.target.uri,
            cure="export it again from the training run",
        )  # fmt: skip
    stated = receipt.requested or restore_request(receipt.target.format, receipt.options)
    if target is not None and target != receipt.target.uri:
        stated = {name: value for name, value in stated.items() if name != "into"}
    moved = source is not None and source != receipt.source.uri
    return command_line(stated, source or receipt.source.uri, target or receipt.target.uri, moved=moved)


def in_place_of(target: str, line: str, words: str = "convert again") -> str:
    """A cure that replaces the file or folder at a place: a sentence, then the commands for a shell.

    Args:
        target: the place; its file or folder is moved away first, a file with its sidecar.
        line: the command line that makes the new checkpoint there.
        words: the sentence that says what the commands do.
    """
    place = locate(target)
    try:
        files = [one for one in dict.fromkeys((place, sidecar_location(place))) if one.entry is not None]
    except WherryError:  # the storage does not say what is there, for example because the bucket is gone
        files = []
    if not files:
        return f"{words}: {line}"
    if not isinstance(place.store, LocalStore):
        return f"remove {shlex.quote(target)} and {words}: {line}"
    moves = [
        shlex.join(["mv", one.path, _free_name(one.path)])
        for one in files
        if one is place or not one.path.startswith(f"{place.path}/")
    ]
    return f"move it away and {words}: {' && '.join([*moves, line])}"


def _free_name(path: str) -> str:
    names = (f"{path}.damaged{f'-{number}' if number else ''}" for number in count())
    return next(name for name in names if not os.path.lexists(name))


def command_line(stated: Mapping[str, Any], source: str, target: str, *, moved: bool = False) -> str:
    """The command line for a request, an exact source, and a target.

    Args:
        stated: see `stated_options`; `step` and `item` are not repeated, as the source URI names what they chose.
        source: URI of the checkpoint.
        target: URI of the target.
        moved: whether the source differs from the stated one; then its format is detected.
    """
    rewritten = "as" in stated
    head = ["wherry", "rewrite" if rewritten else "convert", source]
    if "merge" in stated:
        head = ["wherry", "merge", *map(term, stated["merge"]["sources"])]
    head += [] if stated.get("in_place") else [stated.get("into", target)]
    head += ["--as", stated["as"]] if rewritten else ["--to", stated["to"]]
    rest = {name: value for name, value in stated.items() if not (moved and name == "format")}
    return shlex.join([*head, *_options(rest)])


def term(source: Mapping[str, Any]) -> str:
    """A source of a merge as the command line names it: with its weight, if it has one."""
    return f"{source['uri']}*{source['weight']}" if "weight" in source else source["uri"]


def restore_request(format: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """A request with the options of a receipt that differ from the format's defaults, and with nothing else."""
    if _REWRITE in options:
        value = f"={options['value']}" if options.get("value") is not None else ""
        found = {"as": f"{options[_REWRITE]}{value}", "in_place": options.get("in_place", False)}
        return {name: word for name, word in found.items() if _is_said(word)}
    defaults = {name: option.default for name, option in find_format(format).options.items()}
    return {
        "to": format,
        "options": {
            name: value
            for name, value in options.items()
            if value is not None and value != defaults.get(name)
        },
    }


def present(stated: Mapping[str, Any]) -> dict[str, Any]:
    """The same request with the present contents of the files that it names.

    Raises:
        NotFoundError, StorageError: a file cannot be read.
    """
    return {**stated, **{name: _file(stated[name]["name"]) for name in _FILES if name in stated}}


def differences(
    before: Mapping[str, Any], now: Mapping[str, Any], among: Collection[str] = DECIDING
) -> Iterator[str]:
    """The fields in which two requests differ, as text; files are compared by their contents."""
    for name in among:
        old, new = before.get(name), now.get(name)
        if _comparable(old) != _comparable(new):
            yield f"{name} was {_show_value(old)}, is {_show_value(new)}"


def _comparable(value: Any) -> Any:
    return value.get("sha256", value) if isinstance(value, dict) else value


def _show_value(value: Any) -> str:
    if not value:
        return "not set"
    if isinstance(value, dict) and "sha256" in value:
        return f"{value['name']} ({short(value['sha256'])})"
    if isinstance(value, dict):
        return ", ".join(f"{name}={_spell_value(one)}" for name, one in sorted(value.items()))
    return ", ".join(value) if isinstance(value, list) else str(value)


def _options(stated: Mapping[str, Any]) -> Iterator[str]:
    for name, value in sorted(stated.get("options", {}).items()):
        yield from ("--set", f"{name}={_spell_value(value)}")
    for one in sorted(_OPTIONS.values(), key=lambda one: get_args(Kind).index(one.kind)):
        value = stated.get(one.name)
        if _is_said(value) and one.name not in (*_CHOSEN, "options"):
            yield from _words(one.flag, one.kind, value)
    if stated.get("in_place"):
        yield "--in-place"


def _words(flag: str, kind: str, value: Any) -> Iterator[str]:
    """An option in command line form."""
    if kind == "flag":
        yield flag
    elif kind == "rules":
        yield from (flag, ",".join(value))
    elif kind == "word":
        yield from (flag, str(value["name"] if isinstance(value, dict) else value))
    else:
        rows = [f"{name}={one}" for name, one in sorted(value.items())] if kind == "table" else value
        yield from (word for row in rows for word in (flag, row))


def _spell_value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "; ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _is_said(value: Any) -> bool:
    return value is not None and value is not False and value not in ("", (), [], {})


def _plain(value: Any) -> Any:
    """A value as it is after a JSON round trip."""
    if isinstance(value, Mapping):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value if isinstance(value, bool | int | float | str) else str(value)


def _file(path: str) -> dict[str, str]:
    return {"name": _place(path), "sha256": hashlib.sha256(locate(path).read_whole(MOST_CONFIG)).hexdigest()}


def _place(text: str) -> str:
    if "://" in text:
        return without_secrets(text)
    from wherry.core.emit import whole_uri

    return whole_uri(text)
