"""The single parsers that are attacked: each takes bytes and a folder of its own, and starts from sound inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from attacks import prepare

LONGEST = 1 << 16  # bytes of an input


def _file(name: str) -> Callable[[bytes, Path], Any]:
    def write_input(data: bytes, folder: Path) -> Any:
        from wherry.storage.stores import locate

        (folder / name).write_bytes(data)
        return locate(folder / name)

    return write_input


def _parse_file(name: str, module: str, function: str) -> Callable[[bytes, Path], object]:
    written = _file(name)

    def parse(data: bytes, folder: Path) -> object:
        found = getattr(__import__(module, fromlist=[function]), function)(written(data, folder))
        return list(found) if hasattr(found, "__next__") else found

    return parse


def _detect_file(name: str) -> Callable[[bytes, Path], object]:
    """`detect` of a folder with the input as one of its files; its verdict must be one of an error."""
    written = _file(name)

    def parse(data: bytes, folder: Path) -> object:
        import wherry

        place = written(data, folder)
        found = wherry.detect(place.path if name.startswith("any") else str(folder))
        if "bug in wherry" in (found.reason or ""):
            raise RuntimeError(found.reason)
        return found

    return parse


def _config(name: str) -> Callable[[bytes, Path], object]:
    def parse(data: bytes, _folder: Path) -> object:
        from wherry.families.config_files import parse_config

        return parse_config(name, data)

    return parse


def _json(data: bytes, _folder: Path) -> object:
    from wherry.text.json_document import parse_json

    return parse_json(data, "it", unique=True, constants=False)


def _json_rows(data: bytes, _folder: Path) -> object:
    from wherry.text.json_scan import scan_json

    pieces = (data[at : at + 100] for at in range(0, len(data), 100))
    return scan_json(
        pieces,
        "it",
        {"tree_metadata": {"*": lambda _key, value: value}, "weight_map": {"*": lambda _key, value: value}},
    )


def _toml(data: bytes, _folder: Path) -> object:
    from wherry.text.config_text import parse_toml

    return parse_toml(data, "it")


def _msgpack(data: bytes, _folder: Path) -> object:
    from wherry.integrations.containers.msgpack.index import index_bytes

    return index_bytes(data)


def _zarr(version: int) -> Callable[[bytes, Path], object]:
    def parse(data: bytes, _folder: Path) -> object:
        from wherry.integrations.containers.zarr.metadata import parse as parsed

        return parsed(data, version, "it")

    return parse


def _node(data: bytes, folder: Path) -> object:
    """The body of a node of OCDBT, sealed so that its checksum is right."""
    from attacks import arrays
    from wherry.integrations.containers.ocdbt.read import read_database
    from wherry.storage.stores import locate

    for name in ("item/d/0", "item/_METADATA", "item/manifest.ocdbt"):
        (folder / name).unlink(missing_ok=True)
    for name in ("item/d", "item"):
        with suppress(OSError):
            (folder / name).rmdir()
    item = arrays.database(data, height=data[0] if data else 0)(folder)
    return list(read_database(locate(item), lambda _reference: None))


def _sidecar(data: bytes, folder: Path) -> object:
    from wherry.storage.sidecar import read_sidecar
    from wherry.storage.stores import locate

    (folder / "m.npz").touch()
    (folder / "m.npz.wherry.json").write_bytes(data)
    return read_sidecar(locate(folder / "m.npz"))


def _receipt(data: bytes, _folder: Path) -> object:
    from wherry.core.receipt import from_json
    from wherry.text.json_document import parse_json

    return from_json(parse_json(data, "it"))


def _journal(data: bytes, _folder: Path) -> object:
    """The text of lines that are signed with the right key."""
    from wherry.target.journal import past_in
    from wherry.target.signed_log import Line

    return past_in([Line(line, b"", len(line)) for line in data.splitlines() if line], {"plan": "x"})


def _lease(data: bytes, _folder: Path) -> object:
    from wherry.target.lease_watch import owner_in

    return owner_in(data)


def _key_path(data: bytes, _folder: Path) -> object:
    from wherry.core.keypath import parse

    return parse(data.decode("utf-8", "surrogateescape"))


def _treedef(data: bytes, _folder: Path) -> object:
    from wherry.integrations.formats.paxml.flax import parse_structure

    return parse_structure(data.decode("utf-8", "replace"))


def _pickles(data: bytes, folder: Path) -> object:
    from wherry.integrations.containers.pickle.survey import survey

    (folder / "m.pkl").write_bytes(data)
    return survey(folder / "m.pkl")


def _bundle(data: bytes, folder: Path) -> object:
    from wherry.auditor.check import check

    (folder / "evidence.zip").write_bytes(data)
    return check(str(folder / "evidence.zip"))


_CONTAINERS, _FORMATS = "wherry.integrations.containers", "wherry.integrations.formats"
# Name → parser, and patterns of the files whose bytes it starts from.
PARSERS: dict[str, tuple[Callable[[bytes, Path], object], tuple[str, ...]]] = {
    "json": (_json, ("**/*.json", "**/_METADATA")),
    "json rows": (_json_rows, ("**/*.index.json", "**/_METADATA")),
    "toml": (_toml, ("*.toml",)),
    "yaml config": (_config("config.yml"), ("*.yml",)),
    "gin config": (_config("config.gin"), ("*.gin",)),
    "json config": (_config("config.json"), ("**/config.json", "**/params.json")),
    "safetensors": (
        _parse_file("m.safetensors", f"{_CONTAINERS}.safetensors.header", "parse"),
        ("**/*.safetensors",),
    ),
    "gguf": (_parse_file("m.gguf", f"{_FORMATS}.gguf.header", "read_header"), ("*.gguf",)),
    "msgpack": (_msgpack, ("**/checkpoint_7", "**/checkpoint")),
    "zip": (_parse_file("m.zip", f"{_CONTAINERS}.zip.read", "read_directory"), ("**/*.pt", "**/*.npz")),
    "npz": (_parse_file("m.npz", f"{_CONTAINERS}.npz.reader", "read_contents"), ("**/*.npz",)),
    "torch zip": (
        _parse_file("m.pt", f"{_CONTAINERS}.torch.archive", "read_archive"),
        ("torch_zip/**/*.pt", "**/*.pth"),
    ),
    "torch legacy": (
        _parse_file("m.pt", f"{_CONTAINERS}.torch.archive", "read_legacy"),
        ("torch_legacy/**/*.pt",),
    ),
    "pickles": (_pickles, ("**/*.pkl", "**/.metadata", "torch_legacy/**/*.pt")),
    "dcp metadata": (_detect_file(".metadata"), ("**/.metadata",)),
    "orbax metadata": (_detect_file("_METADATA"), ("**/_METADATA",)),
    "hf index": (_detect_file("model.safetensors.index.json"), ("**/*.index.json",)),
    "tensor bundle": (
        _parse_file("m.index", f"{_FORMATS}.tf_bundle", "read_table"),
        ("bundle/*.index",),
    ),
    "zarr 2": (_zarr(2), ("**/.zarray",)),
    "zarr 3": (_zarr(3), ("**/zarr.json", "*.zarr3")),
    "ocdbt node": (_node, ("*.node",)),
    "sidecar": (_sidecar, ("wherry.json",)),
    "receipt": (_receipt, ("*.receipt",)),
    "journal": (_journal, ("*.journal",)),
    "lease": (_lease, ("*.lease",)),
    "key path": (_key_path, ("*.path",)),
    "treedef": (_treedef, ("*.treedef", "**/tree*")),
    "bundle": (_bundle, ("*.zip",)),
    "any file": (
        _detect_file("any"),
        ("**/*.pt", "**/*.npz", "**/*.safetensors", "**/*.pkl", "**/checkpoint*"),
    ),
}


# What callers expect of a parser besides errors of wherry.
ALLOWED: dict[str, tuple[type[Exception], ...]] = {"toml": (ValueError,), "key path": (ValueError,)}


def seeds(place: Path, patterns: Sequence[str]) -> list[bytes]:
    """Sound inputs: files of the sound checkpoints, of what wherry writes, and small ones by hand."""
    folders = [place / prepare.SOUND, place / prepare.WRITTEN, place / prepare.SEEDS]
    files = [
        file
        for folder in folders
        for pattern in patterns
        for file in sorted(folder.glob(pattern))
        if file.is_file()
    ]
    found = [file.read_bytes()[:LONGEST] for file in files[:40] if file.stat().st_size <= 4 * LONGEST]
    return found or [b""]
