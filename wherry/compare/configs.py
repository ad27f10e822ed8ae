"""configs: which attributes differ between the companion files of two checkpoints."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from wherry.errors import CorruptError, HostileError
from wherry.formats.companions import file_digest
from wherry.text.json_document import parse_json

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from wherry.formats.checkpoint import Checkpoint

_MOST_BYTES = 4 << 20  # larger files, such as a tokenizer, are compared as a whole


@dataclass(frozen=True, slots=True)
class AttributeDifference:
    """An attribute of a companion file, or a value of the tree, that differs.

    Attributes:
        file: name of the companion file; empty for a value of the checkpoint's own tree.
        name: of the attribute, nested ones joined by `.`; empty for the file as a whole.
        a, b: the two values as text; None where there is none.
    """

    file: str
    name: str
    a: str | None
    b: str | None


def config_differences(a: Checkpoint, b: Checkpoint) -> Iterator[AttributeDifference]:
    """The attributes of JSON companions, and the other companions, that differ.

    Raises:
        NotFoundError, StorageError: a companion cannot be read.
    """
    a_sizes = {one.name: one.size for one in a.manifest.companions}
    b_sizes = {one.name: one.size for one in b.manifest.companions}
    for name in sorted(a_sizes.keys() | b_sizes.keys()):
        if name not in a_sizes or name not in b_sizes:
            yield AttributeDifference(name, "", _size(a_sizes.get(name)), _size(b_sizes.get(name)))
            continue
        a_digest, b_digest = (file_digest(side.reader.companion(name)) for side in (a, b))
        if a_digest == b_digest:
            continue
        is_small = max(a_sizes[name], b_sizes[name]) <= _MOST_BYTES
        parsed = [_attributes(side, name) for side in (a, b)] if is_small else [None]
        a_attributes, b_attributes = parsed[0], parsed[-1]
        if a_attributes is None or b_attributes is None:
            yield AttributeDifference(name, "", f"sha256 {a_digest}", f"sha256 {b_digest}")
        else:
            yield from value_differences(a_attributes, b_attributes, name)


def value_differences(
    a: Mapping[str, Any], b: Mapping[str, Any], file: str = ""
) -> Iterator[AttributeDifference]:
    """The names whose values differ between two mappings."""
    for name in sorted(a.keys() | b.keys()):
        a_text, b_text = (repr(side[name]) if name in side else None for side in (a, b))
        if a_text != b_text:
            yield AttributeDifference(file, name, a_text, b_text)


def _attributes(checkpoint: Checkpoint, name: str) -> dict[str, Any] | None:
    """The attributes of a JSON companion by their joined names; None if it is no JSON object."""
    if not name.endswith(".json"):
        return None
    place = checkpoint.reader.companion(name)
    try:
        found = parse_json(b"".join(place.pieces()), name, uri=place.uri)
    except (CorruptError, HostileError):
        return None
    if not isinstance(found, dict):
        return None
    # Under the names that transformers 5 writes: `torch_dtype` of transformers 4 is its `dtype`.
    attributes = dict(_flat(found, ""))
    names = {name: re.sub(r"(^|\.)torch_dtype$", r"\1dtype", name) for name in attributes}
    return {name if names[name] in attributes else names[name]: value for name, value in attributes.items()}


def _flat(found: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    if not isinstance(found, dict) or not found:
        yield prefix, found
        return
    for name, value in found.items():
        yield from _flat(value, f"{prefix}.{name}" if prefix else str(name))


def _size(nbytes: int | None) -> str | None:
    return None if nbytes is None else f"{nbytes} bytes"
