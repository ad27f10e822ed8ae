"""Opens the weights of a Hugging Face folder and compares its index with its shards.

`*.index.json` is {metadata: {total_size, ...}, weight_map: {tensor: file}}, the same for safetensors, `.bin` and flax
msgpack, where a tensor's name is its key path joined by `/`.
Every tensor must be in exactly the file that the map names and in no other. A difference in `total_size` is only
reported, since writers disagree on whether tied tensors count twice. torch's HuggingFaceStorageWriter describes split
tensors in `DCP_SHARDING_INFO` of `__metadata__`, without their full shapes; only torch can assemble such pieces, and
consolidated files drop all metadata.

Opens a Hugging Face folder whose weights are chosen, and says what was seen of them; the same for all containers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import field, replace
from itertools import islice
from typing import Any

from wherry.core.detection import Detection, Evidence
from wherry.core.json_document import parse_json
from wherry.core.keypath import KeyPath, render
from wherry.core.lazy_dataclass import dataclass
from wherry.core.limits import LARGE
from wherry.core.manifest import Manifest, Value
from wherry.core.tensorspec import TensorSpec
from wherry.core.threads import without_collection
from wherry.core.units import plural
from wherry.errors import CorruptError, IncompleteError, UnsupportedError
from wherry.formats.format import Glimpse, Opened
from wherry.integrations.containers.flat.reader import FlatReader, Place, Places, Surroundings
from wherry.integrations.containers.flat.strides import PlacedTensor, StridedReader
from wherry.integrations.containers.msgpack.contents import gather
from wherry.integrations.containers.msgpack.index import index_file
from wherry.integrations.containers.safetensors import header as safetensors
from wherry.integrations.containers.safetensors.header import placed_tensors
from wherry.integrations.containers.torch.archive import read_archive
from wherry.integrations.formats.huggingface.folder import FolderFacts, read_facts, read_json, surroundings
from wherry.integrations.formats.huggingface.parameters import expected_elements, least_elements
from wherry.integrations.formats.huggingface.weights import ADAPTER, Container, Weights
from wherry.store.location import Location
from wherry.store.store import Entry

_SHARDING = "DCP_SHARDING_INFO"
_SHARD = re.compile(r"(?P<stem>.+)-\d{5}(?P<rest>-of-\d{5}\..+)")
_LEGACY = b"\x80\x02\x8a\x0a"
_ZIP = b"PK\x03\x04"
_HEAD = 16
_BY_CONTENT = {"safetensors": "a safetensors file", "bin": "an archive of torch.save"}


@dataclass(slots=True)
class WeightContents:
    """Contents of all weight files of a folder.

    Attributes:
        specs: tensors, file by file in the order of their bytes.
        files: the weight files and the index.
        places: locations of raw tensors (safetensors).
        placed: locations of tensors in torch archives (bin).
        flax: locations of tensors in flax files (msgpack).
        values, empties, lists: non-tensor leaves of torch archives and flax files.
        custom: `metadata` of the index and `__metadata__` of the files.
        bare: whether no safetensors file has any `__metadata__`.
        evidence: evidence about the files.
    """

    specs: dict[KeyPath, TensorSpec] = field(default_factory=dict["KeyPath", "TensorSpec"])
    files: list[Entry] = field(default_factory=list[Entry])
    places: Places = field(default_factory=Places)
    placed: dict[KeyPath, PlacedTensor] = field(default_factory=dict["KeyPath", PlacedTensor])
    flax: dict[KeyPath, Place] = field(default_factory=dict["KeyPath", "Place"])
    values: dict[KeyPath, Value] = field(default_factory=dict["KeyPath", "Value"])
    empties: dict[KeyPath, str] = field(default_factory=dict["KeyPath", str])
    lists: set[KeyPath] = field(default_factory=set["KeyPath"])
    custom: dict[str, Any] = field(default_factory=dict[str, Any])
    bare: bool = True
    evidence: list[Evidence] = field(default_factory=list[Evidence])


@without_collection()
def read_weights(location: Location, weights: Weights) -> WeightContents:
    """Read the metadata of all weight files of a folder.

    Raises:
        HostileError: the index names a file outside the folder, or a pickle refers to a global that is not allowed.
        IncompleteError: a file that the index names is missing, the index is missing, or it lacks a file of the save.
        CorruptError: index and files do not match, or one of them is invalid.
        UnsupportedError: distributed pieces of torch, or the legacy form of torch.save.
    """
    contents = WeightContents()
    if weights.form == "single":
        _read(location, weights.file, weights, contents)
    elif weights.form == "no index":
        header = safetensors.parse(location.join(weights.file))
        if _SHARDING in (header.metadata or {}):
            raise _pieces(location)
        raise IncompleteError(
            f"missing index: {weights.file} is one of several files",
            uri=location.uri,
            cure="download the *.safetensors.index.json, or open the files one by one",
        )
    else:
        _read_sharded(location, weights, contents)
    count = len(contents.files) - (weights.form == "sharded")
    contents.evidence.append(Evidence(weights.file, f"{len(contents.specs)} tensors in {count} files"))
    return contents


def _read_sharded(location: Location, weights: Weights, contents: WeightContents) -> None:
    index = location.join(weights.file)
    weight_map, contents.custom = _index(index)
    shards = sorted(set(weight_map.values()))
    missing = [name for name in shards if location.member(name).stat() is None]
    if missing:
        # The index may be that of another save, whose files are there.
        others = sorted(
            one.name for one in location.entries() if _save_of(one.name) and one.name not in shards
        )
        cure = "download the missing files again"
        if others:
            cure += f", or the index of {_first_of(others)}, which it does not name"
        raise IncompleteError(
            f"file not found: {_first_of(missing)}, named in {weights.file}", uri=location.uri, cure=cure
        )
    _require_named(location, weights.file, shards)
    _add_file(index, weights.file, contents)
    for name in shards:
        before = len(contents.specs)
        _read(location, name, weights, contents)
        for path in islice(reversed(contents.specs), len(contents.specs) - before):
            said = weight_map.get("/".join(path))
            if said != name:
                other = f"the index names {said}" if said else "missing from the index"
                raise CorruptError(
                    f"the tensor is in {name}, but {other}",
                    uri=location.uri,
                    path=render(path),
                    cure="restore the index or the file",
                )
    _require_present(weight_map, contents, location)
    _compare_total(weights.file, contents)


def _require_named(location: Location, index: str, shards: list[str]) -> None:
    """Refuse a file of the same save that the index does not name: its tensors would be lost without a word."""
    saves = {_save_of(name) for name in shards} - {None}
    others = [entry.name for entry in location.entries() if not entry.is_dir and entry.name not in shards]
    left = sorted(name for name in others if _save_of(name) in saves)
    if left:
        raise IncompleteError(
            f"incomplete index: {index} does not name {_first_of(left)}; it belongs to the same save",
            uri=location.uri,
            cure="restore the index, or remove the file if its tensors do not belong to the model",
        )


def _first_of(names: list[str]) -> str:
    """The first name, and how many follow it."""
    return names[0] if len(names) == 1 else f"{names[0]} and {plural(len(names) - 1, 'more file')}"


def _save_of(name: str) -> tuple[str, str] | None:
    """The parts of a shard's name that the files of one save share; None for another name."""
    found = _SHARD.fullmatch(name)
    return (found["stem"], found["rest"]) if found else None


def _index(place: Location) -> tuple[dict[str, str], dict[str, Any]]:
    names: dict[Any, str] = {}  # one object for each file

    def keep(_tensor: Any, name: Any) -> str | None:
        return names.setdefault(name, name) if type(name) is str else None

    found = read_json(place, {"weight_map": keep}, LARGE)
    weight_map, metadata = found.get("weight_map"), found.get("metadata")
    if not isinstance(weight_map, dict) or None in weight_map.values():
        raise CorruptError(
            f"invalid index {place.name}: missing weight_map from tensor to file name",
            uri=place.uri,
            cure="restore the index",
        )
    return weight_map, metadata if isinstance(metadata, dict) else {}


def _read(location: Location, name: str, weights: Weights, contents: WeightContents) -> None:
    place = location.member(name)
    container = _container_of(place, weights.container)
    if container != weights.container:
        contents.evidence.append(Evidence(name, f"{_BY_CONTENT[container]} by its contents"))
    if container == "safetensors":
        _read_safetensors(place, name, contents)
    elif container == "bin":
        _read_bin(place, contents)
    else:
        _read_msgpack(place, contents)
    if len([one for one in (contents.places, contents.placed, contents.flax) if one]) > 1:
        raise UnsupportedError(
            f"{name} is {_BY_CONTENT.get(container, container)}, and other files of the same weights are not",
            uri=place.uri,
            cure="convert the files one by one",
        )
    _add_file(place, name, contents)


def _container_of(place: Location, named: Container) -> Container:
    """The container of a file by its first bytes, where these show another one than its name does."""
    entry = place.stat()
    if entry is None or entry.is_dir or named == "msgpack":
        return named
    head = place.read(0, _HEAD)
    if named == "bin":
        return "safetensors" if safetensors.plausible(head, entry.size) else named
    return "bin" if head.startswith(_ZIP) else named


def _read_safetensors(place: Location, name: str, contents: WeightContents) -> None:
    header = safetensors.parse(place)
    cut = any(map(any, saved_offsets(header.metadata or {}, place).values()))
    if cut or (_SHARDING in (header.metadata or {}) and place.name.startswith("shard-")):
        raise _pieces(place)
    contents.bare = contents.bare and header.metadata is None
    for key, value in (header.metadata or {}).items():
        if contents.custom.setdefault(key, value) != value:
            contents.evidence.append(Evidence(name, f"metadata {key!r} differs from that of other files"))
    contents.places.begin(place)
    for spec, start, length in placed_tensors(header):
        _require_new(spec.path, name, contents, place)
        contents.specs[spec.path] = spec
        contents.places.add(spec.path, start, length)


def _read_bin(place: Location, contents: WeightContents) -> None:
    if place.read(0, len(_LEGACY)) == _LEGACY:
        raise UnsupportedError(
            "unsupported legacy torch.save file (torch before 1.6) in a Hugging Face folder",
            uri=place.uri,
            cure="load it with torch and save it again",
        )
    archive = read_archive(place)
    for path, spec in archive.specs.items():
        _require_new(path, place.name, contents, place)
        contents.specs[path], contents.placed[path] = spec, archive.placed[path]
    contents.values |= archive.tree.values
    contents.empties |= archive.tree.empties
    contents.lists |= archive.tree.lists


def _read_msgpack(place: Location, contents: WeightContents) -> None:
    tree = gather(index_file(place), place)
    for path, spec in tree.specs.items():
        _require_new(path, place.name, contents, place)
        contents.specs[path], contents.flax[path] = spec, tree.places[path]
    contents.values |= tree.values
    contents.empties |= tree.empties
    contents.lists |= tree.lists


def _add_file(place: Location, name: str, contents: WeightContents) -> None:
    contents.files.append(replace(place.present(), name=name))


def _require_new(path: KeyPath, name: str, contents: WeightContents, place: Location) -> None:
    if path in contents.specs:
        raise CorruptError(
            f"duplicate tensor: {name} and {_file_of(path, contents)} both contain it",
            uri=place.uri,
            path=render(path),
            cure="remove the file that does not belong to the save, and restore the index if it names that file",
        )


def _file_of(path: KeyPath, contents: WeightContents) -> str:
    """The name of the file that a tensor was read from."""
    place = contents.places.get(path)
    return next((extent.location.name for extent in place or ()), "another file")


def _require_present(weight_map: Mapping[str, str], contents: WeightContents, location: Location) -> None:
    held = {"/".join(path) for path in contents.specs}
    for tensor, name in weight_map.items():
        if tensor not in held:
            what = f"the index names {name} for the tensor, which does not contain it"
            raise CorruptError(
                what, uri=location.uri, path=render((tensor,)), cure="restore the index or the file"
            )


def _compare_total(index: str, contents: WeightContents) -> None:
    said = contents.custom.get("total_size")
    twice = sum(spec.nbytes for spec in contents.specs.values())
    once = twice - sum(spec.nbytes for spec in contents.specs.values() if spec.tags)
    if type(said) in (int, float) and said not in (once, twice):
        contents.evidence.append(
            Evidence(index, f"total_size states {said} bytes, but the tensors have {twice}")
        )


def saved_offsets(metadata: Mapping[str, str], place: Location) -> dict[str, tuple[int, ...]]:
    """Offsets of the pieces of a safetensors file in their tensors, by name; empty if the file does not state them.

    Args:
        metadata: of the file.
        place: the file, for errors.

    Raises:
        CorruptError: they are not offsets.
    """
    if _SHARDING not in metadata:
        return {}
    try:
        stated: dict[str, Any] = parse_json(metadata[_SHARDING].encode(), _SHARDING, uri=place.uri)
        offsets = {name: tuple(info["saved_offsets"]) for name, info in stated.items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CorruptError(f"invalid {_SHARDING} in {place.name}: unexpected form", uri=place.uri) from error
    if any(type(one) is not int or one < 0 for offset in offsets.values() for one in offset):
        raise CorruptError(
            f"invalid {_SHARDING} in {place.name}: offsets must be non-negative integers", uri=place.uri
        )
    return offsets


def _pieces(place: Location) -> UnsupportedError:
    return UnsupportedError(
        "unsupported distributed pieces of torch's HuggingFaceStorageWriter: full shapes are not stored",
        uri=place.uri,
        cure="consolidate them with torch.distributed.checkpoint first",
    )


_CONSOLIDATED = "consolidated safetensors"
_CONSOLIDATOR = "torch HuggingFaceStorageWriter"


def detect_weights(glimpse: Glimpse, weights: Weights, format_name: str, what: str = "") -> Detection:
    """The detection of a folder with these weights.

    Args:
        glimpse: the folder.
        weights: its weights.
        format_name: the format.
        what: the name of the format in the evidence; the class of the model is added to it, if the config states it.
    """
    try:
        facts = read_facts(glimpse.location, glimpse.entries)
    except CorruptError as error:
        facts = FolderFacts(evidence=(Evidence(".", error.what),))
    classes = facts.origin.get("architectures")
    named = f"{what} ({classes[0]})" if what and isinstance(classes, list) and classes else what
    forms = {"single": "weights in one file", "sharded": "index of weights in several files"}
    seen = forms.get(weights.form, "one of several files of weights, without an index")
    seen += f", variant {weights.variant}" if weights.variant else ""
    return Detection(
        uri=glimpse.location.uri,
        format=format_name,
        format_version=weights.version,
        writer=facts.writer,
        step=facts.step,
        kind="params",
        family=facts.family,
        evidence=(Evidence(weights.file, f"{named}: {seen}" if named else seen), *facts.evidence),
    )


def open_weights(location: Location, detection: Detection, weights: Weights | None, why: str) -> Opened:
    """Open a folder.

    Args:
        location: the folder.
        detection: its detection.
        weights: its weights.
        why: the reason why these weights are read, and not others in the folder.

    Raises:
        IncompleteError: there are none, or see `read_weights`.
        CorruptError, HostileError, UnsupportedError: see `read_weights`.
    """
    if weights is None:
        raise IncompleteError("weights not found", uri=location.uri)
    facts = read_facts(location, {entry.name for entry in location.entries()})
    contents = read_weights(location, weights)
    neighbours = surroundings(location, {entry.name for entry in contents.files}, f"{weights.file} ({why})")
    origin = dict(facts.origin)
    # The counts were compared with what torch saves. The config next to an adapter is that of its base.
    if weights.container != "msgpack" and weights.stem != ADAPTER:
        stored = list(contents.specs.values())
        counts = {
            "expected_parameters": expected_elements(facts.config, stored),
            "least_parameters": least_elements(facts.config, stored),
        }
        origin |= {name: count for name, count in counts.items() if count is not None}
    manifest = Manifest(
        tensors=contents.specs,
        values=contents.values,
        empties=contents.empties,
        lists=frozenset(contents.lists),
        step=facts.step,
        kind="params",
        companions=neighbours.listed,
        custom=contents.custom,
        origin=origin,
    )
    reader = _reader(location, weights, contents, neighbours)
    found = detection.seen(*contents.evidence)
    # Consolidation by torch drops all metadata, and writes an index even for one file.
    if weights.container == "safetensors" and weights.form == "sharded" and contents.bare:
        evidence = Evidence(weights.file, "an index and no metadata in any file: consolidated by torch")
        found = replace(
            found.seen(evidence), format_version=_CONSOLIDATED, writer=detection.writer or _CONSOLIDATOR
        )
    return Opened(found, manifest, reader, tuple(neighbours.ignored))


def _reader(
    location: Location, weights: Weights, contents: WeightContents, neighbours: Surroundings
) -> FlatReader | StridedReader:
    files, names = (*contents.files, *neighbours.companions), neighbours.names
    if contents.placed:
        return StridedReader(location, contents.placed, files, names)
    if weights.container == "msgpack":
        return FlatReader(location, contents.flax, files, names, packs=False)
    return FlatReader(location, contents.places, files, names)
