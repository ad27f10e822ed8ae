"""Glimpse: a cheap look at a location; Signs: what it must show before a format's `detect` is called.

Signs decide nothing. They leave out the formats that cannot be meant, so that their code is not loaded. A format that
would recognise a location, or refuse it by name, has one of its signs there (`tests/formats/test_signs.py`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wherry.storage.location import Location
    from wherry.store.store import Entry

HEAD_BYTES = 4096


class Glimpse:
    """A cheap look at a location: what it is, its entries, its first bytes; each fetched at most once."""

    def __init__(self, location: Location) -> None:
        self.location = location

    @cached_property
    def is_dir(self) -> bool:
        """Whether it is a folder (an object-store prefix counts)."""
        entry = self.location.entry
        return entry is not None and entry.is_dir

    @cached_property
    def is_file(self) -> bool:
        """Whether it is a file."""
        entry = self.location.entry
        return entry is not None and not entry.is_dir

    @cached_property
    def entries(self) -> Mapping[str, Entry]:
        """Children by name; empty for a file."""
        return {entry.name: entry for entry in self.location.entries()} if self.is_dir else {}

    @cached_property
    def head(self) -> bytes:
        """The first 4 KiB of a file; empty for a folder."""
        return self.location.read(0, HEAD_BYTES) if self.is_file else b""

    @cached_property
    def size(self) -> int:
        """Bytes of a file."""
        return self.location.entry.size if self.location.entry else 0


@dataclass(frozen=True, slots=True)
class Signs:
    """The signs of a format; one of them is enough.

    Attributes:
        head: a regular expression that the first bytes of a file match; empty if they say nothing.
        files: how the names of its files end.
        entries: names of which one is in its folder.
        starts, ends: how a name in its folder starts, or ends.
        folders: whether any folder in a folder is a sign.
        named: a regular expression that the name of its folder matches; empty if it says nothing.
    """

    head: bytes = b""
    files: tuple[str, ...] = ()
    entries: frozenset[str] = frozenset()
    starts: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    folders: bool = False
    named: str = ""

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Signs:
        """The signs that `to_json` has made."""
        return cls(
            head=fields["head"].encode("latin-1"),
            files=tuple(fields["files"]),
            entries=frozenset(fields["entries"]),
            starts=tuple(fields["starts"]),
            ends=tuple(fields["ends"]),
            folders=fields["folders"],
            named=fields["named"],
        )

    def to_json(self) -> dict[str, Any]:
        """Every field by its name; bytes are those of Latin-1."""
        return {
            "head": self.head.decode("latin-1"),
            "files": list(self.files),
            "entries": sorted(self.entries),
            "starts": list(self.starts),
            "ends": list(self.ends),
            "folders": self.folders,
            "named": self.named,
        }

    def are_at(self, glimpse: Glimpse) -> bool:
        """Whether one of them is at a location; at one that does not exist, whatever its name, they may be."""
        if glimpse.is_dir:
            entries = glimpse.entries
            return (
                not self.entries.isdisjoint(entries)
                or bool(self.starts and any(name.startswith(self.starts) for name in entries))
                or bool(self.ends and any(name.endswith(self.ends) for name in entries))
                or (self.folders and any(entry.is_dir for entry in entries.values()))
                or bool(self.named and re.fullmatch(self.named, glimpse.location.name))
            )
        if glimpse.is_file:
            name = glimpse.location.name
            return name.endswith(self.files) or bool(
                self.head and re.compile(self.head, re.DOTALL).match(glimpse.head)
            )
        return True
