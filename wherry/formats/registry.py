"""The registry of formats, loaded when it is first used.

Every module of `integrations/formats/` has a tuple `FORMATS`. Plug-ins register theirs through the entry point group
`wherry.formats`, whose entries load a `Format`.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from pkgutil import iter_modules
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from wherry.errors import UnsupportedError, UsageError, choose, similar

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from wherry.formats.format import Format, Options, Rewrite

_FORMATS_PACKAGE = "wherry.integrations.formats"
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


@cache
def formats() -> Mapping[str, Format]:
    """Every known format by name, most specific first.

    Raises:
        UsageError: two formats have the same name.
    """
    rows: list[Format] = []
    folder = Path(__file__).parents[1] / "integrations" / "formats"
    for module in sorted(iter_modules([str(folder)]), key=lambda found: found.name):
        rows += import_module(f"{_FORMATS_PACKAGE}.{module.name}").FORMATS
    rows += [entry.load() for entry in entry_points(group="wherry.formats")]
    names = [name for row in rows for name in (row.name, *row.aliases)]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise UsageError(
            f"duplicate format name: {', '.join(sorted(twice))}", cure="uninstall one of the plug-ins"
        )
    by_name = {row.name: row for row in rows}
    return MappingProxyType({name: by_name[name] for name in _most_specific_first(by_name)})


def find_format(name: str) -> Format:
    """The format with this name or alias.

    Raises:
        UsageError: the name is unknown; the cure lists all formats.
    """
    return _find(name, formats().values())


def find_target_format(name: str) -> Format:
    """The format with this name or alias, to be written.

    Raises:
        UsageError: the name is unknown; the cure lists the formats that can be written.
        UnsupportedError: the format cannot be written.
    """
    named = formats().get(name)
    if named is not None and named.is_written:
        return named
    written = [row for row in formats().values() if row.is_written]
    known = [row for row in formats().values() if not row.is_written and name in (row.name, *row.aliases)]
    if known:
        raise UnsupportedError(
            f"writing {known[0].name} is not supported",
            cure=f"choose one of: {', '.join(sorted(row.name for row in written))}",
        )
    return _find(name, written)


def find_system_format(name: str) -> Format:
    """The format with this name or alias, which belongs to a training or serving system.

    Raises:
        UsageError: the name is unknown, or is that of a container; the cure lists the formats of systems.
    """
    return _find(name, [row for row in formats().values() if row.system], "system", {})


def _find(
    name: str,
    rows: Collection[Format],
    noun: str = "format",
    libraries: Mapping[str, Sequence[str]] = LIBRARIES,
) -> Format:
    for row in rows:
        if name in (row.name, *row.aliases):
            return row
    names = sorted(row.name for row in rows)
    means = {library: [one for one in some if one in names] for library, some in libraries.items()}
    means |= {alias: [row.name] for row in rows for alias in row.aliases} | {one: [one] for one in names}
    likely = dict.fromkeys(one for word in similar(name, means) for one in means[word])
    raise UsageError(
        f"unknown {noun} {name!r}", cure=choose(name, names, means.get(name.lower()) or [*likely])
    )


def system_of(format: str) -> str:
    """The name of the system to which a format belongs; empty for a container and for an unknown format."""
    row = formats().get(format)
    return row.system if row is not None else ""


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
            cure=f"run `wherry formats {row.name}` to list its options: {', '.join(row.options) or 'none'}",
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


def _most_specific_first(rows: Mapping[str, Format]) -> list[str]:
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
