"""The registry of formats, each loaded when it is first used.

Every module of `integrations/formats/` has a tuple `FORMATS`; `index.json`, which `infra/docs.py` writes, has what must
be known of each before it is loaded. A module that is not in it yet is loaded at once, like plug-ins, which register
their `Format` through the entry point group `wherry.formats`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

from wherry.core.json_document import json_value
from wherry.core.lazy_dataclass import dataclass
from wherry.core.packages import has_entry_points
from wherry.cures import Command, Cure
from wherry.errors import UnsupportedError, UsageError, choose, similar
from wherry.formats.format import Signs

if TYPE_CHECKING:
    from wherry.formats.format import Format, Options, Rewrite

_GROUP = "wherry.formats"  # of entry points
FORMATS_PACKAGE = "wherry.integrations.formats"
_INDEX = Path(__file__).with_name("index.json")
# Names of libraries and file endings that are no names of formats, and the formats that they save.
LIBRARIES: Mapping[str, tuple[str, ...]] = {
    "pytorch": ("torch-zip", "dcp"),
    "torch": ("torch-zip", "dcp"),
    "pth": ("torch-zip",),
    "ckpt": ("torch-zip", "tf-bundle"),
    "jax": ("orbax",),
    "zarr": ("orbax",),
    "tensorstore": ("orbax",),
    "nnx": ("orbax",),
    "linen": ("flax-msgpack", "orbax"),
    "transformers": ("huggingface",),
    "tensorflow": ("tf-bundle",),
    "keras": ("tf-bundle",),
    "numpy": ("npz",),
    "npy": ("npz",),
    "pickle": ("torch-zip", "numpy-pickle"),
    "llama.cpp": ("gguf",),
    "ollama": ("gguf",),
}


@dataclass(frozen=True, slots=True)
class FormatFacts:
    """The facts about a format that are known before its code is loaded.

    Attributes:
        name, aliases, refines, system, is_written, signs: see Format.
        module: its module among the formats; None for a format of a plug-in.
    """

    name: str
    module: str | None
    aliases: tuple[str, ...]
    refines: tuple[str, ...]
    system: str
    is_written: bool
    signs: Signs | None

    @classmethod
    def of(cls, row: Format, module: str | None = None) -> FormatFacts:
        """The facts of a format that is loaded."""
        return cls(row.name, module, row.aliases, row.refines, row.system, row.is_written, row.signs)

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> FormatFacts:
        """The facts that `to_json` has made."""
        return cls(
            name=row["name"],
            module=row["module"],
            aliases=tuple(row["aliases"]),
            refines=tuple(row["refines"]),
            system=row["system"],
            is_written=row["is_written"],
            signs=row["signs"] and Signs.from_json(row["signs"]),
        )

    def to_json(self) -> dict[str, Any]:
        """Every field by its name."""
        fields = {name: getattr(self, name) for name in self.__slots__}
        return {**fields, "signs": self.signs and self.signs.to_json()}


class Formats(Mapping[str, "Format"]):
    """Every known format by name, most specific first; its code is loaded when it is looked up."""

    def __init__(self, facts: Iterable[FormatFacts], loaded: Iterable[Format] = ()) -> None:
        """Order them.

        Args:
            facts: of each format.
            loaded: those of plug-ins.

        Raises:
            UsageError: two formats have the same name.
        """
        rows = list(facts)
        self._rows = {row.name: row for row in loaded}
        counts = Counter(name for row in rows for name in (row.name, *row.aliases))
        twice = sorted(name for name, count in counts.items() if count > 1)
        if twice:
            raise UsageError(
                f"duplicate format name: {', '.join(twice)}", cure="uninstall one of the plug-ins"
            )
        by_name = {row.name: row for row in rows}
        self.facts = {name: by_name[name] for name in _most_specific_first(by_name)}
        self._names = {name: row.name for row in rows for name in (row.name, *row.aliases)}

    def __getitem__(self, name: str) -> Format:
        """A format, by its name."""
        found = self._rows.get(name)
        if found is None:
            self._rows |= {row.name: row for row in rows_of(self.facts[name].module or "")}
            found = self._rows[name]
        return found

    def __iter__(self) -> Iterator[str]:
        """The names."""
        return iter(self.facts)

    def __len__(self) -> int:
        """How many there are."""
        return len(self.facts)

    def named(self, name: str) -> FormatFacts | None:
        """The facts of the format with this name or alias."""
        return self.facts.get(self._names.get(name, ""))


def rows_of(module: str) -> tuple[Format, ...]:
    """The formats of a module."""
    return import_module(f"{FORMATS_PACKAGE}.{module}").FORMATS


@cache
def formats() -> Formats:
    """Every known format by name, most specific first.

    Raises:
        UsageError: two formats have the same name.
    """
    index = [FormatFacts.from_json(row) for row in json_value(_INDEX.read_bytes())]
    known = {row.module for row in index}
    loaded = [row for module in modules() if module not in known for row in rows_of(module)]
    loaded += plug_ins()
    return Formats([*index, *map(FormatFacts.of, loaded)], loaded)


def plug_ins() -> list[Format]:
    """The formats that other packages register."""
    if not has_entry_points(_GROUP):
        return []
    from importlib.metadata import entry_points

    return [entry.load() for entry in entry_points(group=_GROUP)]


def modules() -> list[str]:
    """The modules of the formats of wherry itself."""
    folder = Path(__file__).parents[1] / "integrations" / "formats"
    return sorted(found.name for found in iter_modules([str(folder)]))


def find_format(name: str) -> Format:
    """The format with this name or alias.

    Raises:
        UsageError: the name is unknown; the cure lists all formats.
    """
    return _find(name, formats().facts.values())


def find_target_format(name: str) -> Format:
    """The format with this name or alias, to be written.

    Raises:
        UsageError: the name is unknown; the cure lists the formats that can be written.
        UnsupportedError: the format cannot be written.
    """
    written = [row for row in formats().facts.values() if row.is_written]
    known = formats().named(name)
    if known is not None and not known.is_written:
        raise UnsupportedError(
            f"writing {known.name} is not supported",
            cure=f"choose one of: {', '.join(sorted(row.name for row in written))}",
        )
    return _find(name, written)


def find_system_format(name: str) -> Format:
    """The format with this name or alias, which belongs to a training or serving system.

    Raises:
        UsageError: the name is unknown, or is that of a container; the cure lists the formats of systems.
    """
    return _find(name, [row for row in formats().facts.values() if row.system], "system", {})


def _find(
    name: str,
    rows: Collection[FormatFacts],
    noun: str = "format",
    libraries: Mapping[str, Sequence[str]] = LIBRARIES,
) -> Format:
    known = formats().named(name)
    if known is not None and known in rows:
        return formats()[known.name]
    names = sorted(row.name for row in rows)
    means = {library: [one for one in some if one in names] for library, some in libraries.items()}
    means |= {alias: [row.name] for row in rows for alias in row.aliases} | {one: [one] for one in names}
    likely = dict.fromkeys(one for word in similar(name, means) for one in means[word])
    raise UsageError(
        f"unknown {noun} {name!r}", cure=choose(name, names, means.get(name.lower()) or [*likely])
    )


def system_of(format: str) -> str:
    """The name of the system to which a format belongs; empty for a container and for an unknown format."""
    row = formats().facts.get(format)
    return row.system if row is not None else ""


def is_container(format: str) -> bool:
    """Whether a format says nothing of a system, so that it holds any tree; a live state does, too."""
    return not system_of(format)


def rewrites(name: str) -> dict[str, Rewrite]:
    """The rewrites of a format by name, including those of the formats that it refines.

    Raises:
        UsageError: the format is unknown.
    """
    row = find_format(name)
    rows = [*(rewrites(base) for base in row.refines if base in formats()), row.rewrites]
    return {key: one for some in rows for key, one in some.items()}


def checked_options(row: Format, given: Options) -> dict[str, Any]:
    """The format's options with defaults filled in and values of the right type.

    Raises:
        UsageError: an option is unknown, or a value does not match its type or choices.
    """
    unknown = set(given) - set(row.options)
    if unknown:
        raise UsageError(
            f"unknown option {', '.join(map(repr, sorted(unknown)))} for format {row.name}",
            cure=Cure(
                "run {} to list its options: {}",
                Command("formats", row.name),
                ", ".join(row.options) or "none",
            ),
        )
    values: dict[str, Any] = {}
    for name, option in row.options.items():
        values[name] = _require_type(name, given.get(name, option.default), option.default)
        if option.choices and values[name] not in option.choices:
            raise UsageError(
                f"invalid value for option {name}: {values[name]!r}",
                cure=f"choose {' or '.join(option.choices)}",
            )
    return values


def _most_specific_first(rows: Mapping[str, FormatFacts]) -> list[str]:
    def depth(name: str) -> int:
        return 1 + max((depth(base) for base in rows[name].refines if base in rows), default=0)

    return sorted(rows, key=lambda name: (-depth(name), name))


def _require_type(name: str, value: Any, default: Any) -> Any:
    if isinstance(default, bool):
        words = {"true": True, "false": False, "1": True, "0": False, "yes": True, "no": False}
        if isinstance(value, bool) or str(value).lower() in words:
            return value if isinstance(value, bool) else words[str(value).lower()]
        raise UsageError(
            f"invalid value for option {name}: {value!r}; expected a boolean",
            cure=f"write {name}=true or {name}=false",
        )
    if isinstance(default, int):
        try:
            return int(value)
        except ValueError:
            raise UsageError(
                f"invalid value for option {name}: {value!r}; expected an integer",
                cure=f"write for example {name}=8",
            ) from None
    return None if value is None else str(value)
