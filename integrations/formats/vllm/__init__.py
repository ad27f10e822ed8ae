"""vLLM's `sharded_state`: the files of each tensor-parallel rank, which hold what its module holds.

    model-rank-0-part-0.safetensors     the parameters and buffers of rank 0, by the names of vLLM's modules
    model-rank-1-part-0.safetensors     those of rank 1
    config.json, tokenizer.json, …      as in a Hugging Face folder

A tensor's key path is the rank and the name, `0`, `model.layers.0.self_attn.qkv_proj.weight`; of one rank alone it is
the name. Every rank has the same names. `modules.py` says which tensors of Hugging Face a rank's tensor is made of; a
target of another system gets these. With `--family none` a tree whose names are those of vLLM's modules is kept.

Embeddings that the head is tied to are written under both names, and the config says that they are not tied: vLLM 0.33
unties a model that has a head in its files, and earlier releases want one of the names alone if the config ties them.
Source: vllm 0.33, model_executor/model_loader/sharded_state_loader.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import starmap
from typing import TYPE_CHECKING, Any

from wherry.core.detection import Detection, Evidence
from wherry.core.keypath import KeyPath, render
from wherry.core.limits import MOST_CHUNKS, beyond, exceeds, scale_limit
from wherry.core.manifest import Manifest, without_chunks
from wherry.core.numbers import decimal_number
from wherry.core.tensorspec import TensorSpec
from wherry.core.units import parse_size
from wherry.cures import Argument, Cure
from wherry.errors import CorruptError, IncompleteError, UnrepresentableError, UsageError
from wherry.formats.file_names import VLLM_SHARD
from wherry.formats.format import Extent, Format, Glimpse, Holds, Opened, Option, Options, Signs
from wherry.integrations.containers.flat.reader import FlatReader
from wherry.integrations.containers.safetensors import header as safetensors
from wherry.integrations.containers.safetensors.header import DTYPES, placed_tensors, stored_bytes
from wherry.integrations.formats.huggingface.folder import FolderFacts, read_facts, surroundings
from wherry.integrations.formats.huggingface.weights import CONFIG, natural_key
from wherry.store.location import Location
from wherry.target.file_map import FileMap, Scene

if TYPE_CHECKING:
    from wherry.formats.checkpoint import Checkpoint

NAME = "vllm-sharded"
_VERSION = "sharded_state"
SOURCE = "source"
_MOST_RANKS = 4096


def _rank_files(names: Iterable[str]) -> dict[int, dict[int, str]]:
    """The files of each rank by their parts."""
    found: dict[int, dict[int, str]] = {}
    for name in names:
        if (parts := VLLM_SHARD.fullmatch(name)) is not None:
            found.setdefault(int(parts["rank"]), {})[int(parts["part"])] = name
    return found


def _file_name(rank: int, part: int) -> str:
    return f"model-rank-{rank}-part-{part}.safetensors"


def _detect(glimpse: Glimpse) -> Detection | None:
    files = _rank_files(glimpse.entries)
    if not files:
        return None
    first = min(name for parts in files.values() for name in parts.values())
    try:
        facts = read_facts(glimpse.location, glimpse.entries)
    except CorruptError as error:
        facts = FolderFacts(evidence=(Evidence(".", error.what),))
    seen = Evidence(first, f"files of {len(files)} ranks, named by vLLM's ShardedStateLoader")
    found = glimpse.detected(NAME, _VERSION, "vllm", seen, *facts.evidence, step=facts.step, kind="params")
    return replace(found, family=facts.family)


def _open(location: Location, detection: Detection) -> Opened:
    entries = {entry.name: entry for entry in location.entries()}
    files = _rank_files(entries)
    wanted = [(rank, part) for rank in range(len(files)) for part in range(len(files.get(rank, "0")))]
    missing = next((name for name in starmap(_file_name, wanted) if name not in entries), None)
    if missing is not None:
        raise IncompleteError(
            f"file not found: {missing}", uri=location.uri, cure="restore the files of all ranks"
        )
    specs: dict[KeyPath, TensorSpec] = {}
    places: dict[KeyPath, tuple[Extent, ...]] = {}
    own = [name for rank in sorted(files) for _part, name in sorted(files[rank].items())]
    for rank, parts in sorted(files.items()):
        for _part, name in sorted(parts.items()):
            place = location.join(name)
            for spec, start, nbytes in placed_tensors(safetensors.parse(place)):
                path = (str(rank), *spec.path) if len(files) > 1 else spec.path
                if path in specs:
                    raise CorruptError(
                        f"the tensor is in {name} and in another file of rank {rank}",
                        uri=location.uri, path=render(path),
                        cure="remove the files of an earlier save",
                    )  # fmt: skip
                specs[path], places[path] = replace(spec, path=path), (Extent(place, start, nbytes),)
                if exceeds(len(specs), MOST_CHUNKS):
                    raise beyond(location.name, scale_limit(MOST_CHUNKS), "tensors", uri=location.uri)
    _require_same_names(specs, len(files), location.uri)
    neighbours = surroundings(location, own, f"{own[0]} and the files of the other ranks")
    facts = read_facts(location, entries)
    manifest = Manifest(
        specs, step=detection.step, kind="params", companions=neighbours.listed, origin=facts.origin
    )
    reader = FlatReader(
        location, places, (*(entries[name] for name in own), *neighbours.companions), neighbours.names
    )
    seen = Evidence(own[0], f"{len(specs)} tensors of {len(files)} ranks")
    return Opened(detection.seen(seen), manifest, reader, tuple(neighbours.ignored))


def _require_same_names(specs: Mapping[KeyPath, TensorSpec], ranks: int, uri: str) -> None:
    names = [{path[-1] for path in specs if ranks == 1 or path[0] == str(rank)} for rank in range(ranks)]
    for rank, held in enumerate(names):
        lacking = sorted(names[0] ^ held)
        if lacking:
            without = rank if lacking[0] in names[0] else 0
            raise IncompleteError(
                f"rank {without} has no tensor {lacking[0]}, which rank {rank if without == 0 else 0} has", uri=uri,
                path=lacking[0], cure="restore the files of all ranks",
            )  # fmt: skip


def _ranks(manifest: Manifest) -> dict[str, list[TensorSpec]]:
    """The tensors of each rank; of one rank, their key paths have one part."""
    found: dict[str, list[TensorSpec]] = {}
    for path, spec in manifest.tensors.items():
        found.setdefault(path[0] if len(path) > 1 else "", []).append(spec)
    return found


def _prepare(manifest: Manifest, options: Options) -> Manifest:
    ranks = _ranks(manifest)
    known = {""} if "" in ranks else {str(rank) for rank in range(len(ranks))}
    for rank, specs in ranks.items():
        if rank not in known:
            raise UnrepresentableError(
                "a key path in rank files is a name, or the number of a rank and a name", path=specs[0].name,
                cure="choose a target that holds any tree, or leave out what is not of the model",
            )  # fmt: skip
    if options["tp"] not in (SOURCE, str(max(len(ranks), 1))):
        raise UsageError(
            f"tp={options['tp']} divides a model, but the names are kept",
            cure="leave tp out, or let the model's family give it the names of Hugging Face",
        )
    return replace(without_chunks(manifest), custom={})


def _files(manifest: Manifest, options: Options) -> dict[str, list[TensorSpec]]:
    """The files, each with its tensors."""
    most, found = parse_size(options["max_file_size"]), dict[str, list[TensorSpec]]()
    for number, held in sorted(_ranks(manifest).items()):
        rank = int(number or 0)
        part, filled, group = 0, 0, list[TensorSpec]()
        for spec in sorted(held, key=lambda spec: natural_key(spec.path[-1])):
            size = stored_bytes(replace(spec, path=spec.path[-1:]))
            if group and filled + size > most:
                found[_file_name(rank, part)] = group
                part, filled, group = part + 1, 0, []
            group.append(spec)
            filled += size
        found[_file_name(rank, part)] = group
    return found


def _layout(manifest: Manifest, options: Options, _scene: Scene) -> FileMap:
    from wherry.integrations.containers.safetensors.layout import lay_out

    files = _files(manifest, options)
    return lay_out(files or {_file_name(0, 0): []}, {}, skipped=0 if "" in _ranks(manifest) else 1)


def _config(checkpoint: Checkpoint) -> dict[str, Any]:
    from wherry.transform.dequantize import companion_config

    config = companion_config(checkpoint)
    if not config:
        raise UnrepresentableError(
            f"missing {CONFIG}: it states how ranks divide the model", uri=checkpoint.uri,
            cure=f"put the model's {CONFIG} next to its weights",
        )  # fmt: skip
    return config


def _whole(checkpoint: Checkpoint) -> Checkpoint:
    """Rank files as a Hugging Face folder."""
    from wherry.integrations.formats.vllm.modules import read_model, unite
    from wherry.transform.regroup import regrouped_view

    config, tensors = _config(checkpoint), checkpoint.manifest.tensors
    model, vocabulary = read_model(config, checkpoint.uri), config.get("vocab_size")
    ranks = len(_ranks(checkpoint.manifest))
    united = unite(tensors, model, vocabulary if type(vocabulary) is int else 0, ranks, checkpoint.uri)
    note = f"the files of {ranks} ranks are joined"
    return regrouped_view(checkpoint, united.grouped, {}, left=united.left, note=note)


def _divided_view(checkpoint: Checkpoint, options: Options) -> Checkpoint:
    """A checkpoint of Hugging Face's names as the modules of vLLM's ranks hold it."""
    from wherry.transform.ggml_view import RECORD
    from wherry.transform.regroup import regrouped_view

    stated = str(options["tp"])
    if not checkpoint.is_view and checkpoint.detection.format == NAME:
        held = len(_ranks(checkpoint.manifest))
        if stated in (SOURCE, str(held)):
            return checkpoint
        checkpoint = _whole(checkpoint)
    ranks = decimal_number("1" if stated == SOURCE else stated)
    if ranks is None or not 0 < ranks <= _MOST_RANKS:
        raise UsageError(
            f"invalid value for option tp: {stated!r}",
            cure=Cure("state a number of ranks: {}", Argument("set", "tp=4")),
        )
    from wherry.integrations.formats.vllm.modules import divide, read_model

    config = _config(checkpoint)
    model = read_model(config, checkpoint.uri)
    divided = divide(checkpoint.manifest.tensors, model, ranks, checkpoint.uri)
    files: dict[str, bytes] = {}
    if model.tied or not config.get("architectures"):
        changed = {**config, "architectures": [model.architecture], "tie_word_embeddings": False}
        files[CONFIG] = (json.dumps(changed, indent=2) + "\n").encode()
    note = f"the model is divided among {ranks} ranks of vLLM"
    return regrouped_view(
        checkpoint, divided.grouped, divided.constants, files=files, left=divided.left, note=note,
        record={RECORD: {"tp": str(ranks)}},
    )  # fmt: skip


FORMATS = (
    Format(
        name=NAME,
        title="vLLM sharded_state, files of each rank",
        detect=_detect,
        signs=Signs(starts=("model-rank-",)),
        open=_open,
        layout=_layout,
        prepare=_prepare,
        divided=_divided_view,
        whole=_whole,
        holds=Holds(dtypes=DTYPES, depth=2, ranks=True, companions=True),
        refines=("safetensors",),
        system="huggingface",
        names_needed=True,
        served=True,
        aliases=("vllm",),
        commit_members=("model-rank-0-part-0.safetensors",),
        options={
            "tp": Option(
                SOURCE, "number of tensor-parallel ranks; `source` keeps that of rank files, else it is 1"
            ),
            "max_file_size": Option("5GB", "maximum size of a file, for example 200MB"),
        },
        loaded_by="vLLM 0.33",
        version=lambda _manifest, _options: _VERSION,
    ),
)
