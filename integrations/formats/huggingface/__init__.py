"""A Hugging Face model folder: weights with config, tokenizer and other companions.

Detected by the names of the weights (`weights.py`), so a folder without a config counts. Read:
safetensors, single or sharded by an index, with variants and adapters; `pytorch_model.bin` in the zip form;
`flax_model.msgpack`.
Written: safetensors, always with `{"format": "pt"}` in `__metadata__`, which transformers requires. A tensor's
key path is one part, its name; in flax files it is the path in their tree.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from wherry.core.detection import Detection, Evidence
from wherry.core.manifest import Companion, Manifest
from wherry.core.units import parse_size
from wherry.errors import AmbiguousError, CorruptError, IncompleteError
from wherry.formats.format import Format, Glimpse, Holds, Opened, Option
from wherry.integrations.containers.flat.reader import FlatReader
from wherry.integrations.containers.flat.strides import StridedReader
from wherry.integrations.containers.msgpack.contents import PlacedReader
from wherry.integrations.containers.safetensors.header import DTYPES
from wherry.integrations.containers.safetensors.writer import (
    METADATA_FORMAT,
    SafetensorsWriter,
    kept_metadata,
)
from wherry.integrations.formats.huggingface.folder import (
    FolderFacts,
    pipeline_parts,
    read_facts,
)
from wherry.integrations.formats.huggingface.parameters import expected_elements
from wherry.integrations.formats.huggingface.sharding import ShardPlan, spread
from wherry.integrations.formats.huggingface.shards import WeightContents, read_weights
from wherry.integrations.formats.huggingface.surroundings import surroundings
from wherry.integrations.formats.huggingface.weights import (
    ADAPTER,
    ADAPTER_CONFIG,
    CONFIG,
    PRECEDENCE,
    Weights,
    find_weights,
)
from wherry.storage.stores import make_folder

if TYPE_CHECKING:
    from wherry.formats.format import Options
    from wherry.storage.location import Entry, Location

_CONSOLIDATED = "consolidated safetensors"
_CONSOLIDATOR = "torch HuggingFaceStorageWriter"


def _detect(glimpse: Glimpse) -> Detection | None:
    """A folder with weights.

    Raises:
        AmbiguousError: a diffusers pipeline of several models.
    """
    weights = find_weights(glimpse.entries)
    if weights is None:
        _require_no_pipeline(glimpse)
        return None
    try:
        facts = read_facts(glimpse.location, glimpse.entries)
    except CorruptError as error:
        facts = FolderFacts(evidence=(Evidence(".", error.what),))
    return Detection(
        uri=glimpse.location.uri,
        format="huggingface",
        format_version=weights.version,
        writer=facts.writer,
        step=facts.step,
        kind="params",
        family=facts.family,
        evidence=(Evidence(weights.file, _weights_seen(weights)), *facts.evidence),
    )


def _require_no_pipeline(glimpse: Glimpse) -> None:
    try:
        parts = pipeline_parts(glimpse.location, glimpse.entries)
    except CorruptError:
        return  # a file that cannot be read lists no models
    if parts:
        raise AmbiguousError(
            f"ambiguous source: a diffusers pipeline of {len(parts)} models: {', '.join(parts)}",
            uri=glimpse.location.uri,
            cure=f"select one of them, for example --item {parts[0]}",
        )


def _weights_seen(weights: Weights) -> str:
    what = {"single": "weights in one file", "sharded": "index of weights in several files"}
    variant = f", variant {weights.variant}" if weights.variant else ""
    return what.get(weights.form, "one of several files of weights, without an index") + variant


def _open(location: Location, detection: Detection) -> Opened:
    names = {entry.name: entry for entry in location.entries()}
    weights = find_weights(names)
    if weights is None:
        raise IncompleteError("weights not found", uri=location.uri)
    facts = read_facts(location, names)
    contents = read_weights(location, weights)
    beside = surroundings(
        location, {entry.name for entry in contents.files}, f"{weights.file} ({PRECEDENCE})"
    )
    # The counts were compared with what torch saves.
    counted = weights.container != "msgpack"
    expected = expected_elements(facts.config, contents.specs.values()) if counted else None
    manifest = Manifest(
        tensors=contents.specs,
        values=contents.values,
        empties=contents.empties,
        lists=frozenset(contents.lists),
        step=facts.step,
        kind="params",
        companions=tuple(Companion(entry.name, entry.size) for entry in beside.companions),
        custom=contents.custom,
        origin=facts.origin if expected is None else {**facts.origin, "expected_parameters": expected},
    )
    reader = _reader(location, weights, contents, beside.companions)
    return Opened(_precise(detection, weights, contents), manifest, reader, tuple(beside.ignored))


def _precise(detection: Detection, weights: Weights, contents: WeightContents) -> Detection:
    """Detect consolidation by torch, which drops all metadata and writes an index even for one file."""
    seen = detection.seen(*contents.evidence)
    if weights.container != "safetensors" or weights.form != "sharded" or not contents.bare:
        return seen
    evidence = Evidence(weights.file, "an index and no metadata in any file: consolidated by torch")
    return replace(
        seen.seen(evidence), format_version=_CONSOLIDATED, writer=detection.writer or _CONSOLIDATOR
    )


def _reader(
    location: Location, weights: Weights, contents: WeightContents, companions: list[Entry]
) -> FlatReader | StridedReader | PlacedReader:
    files = (*contents.files, *companions)
    names = frozenset(entry.name for entry in companions)
    if weights.container == "bin":
        return StridedReader(location, contents.placed, files, names)
    if weights.container == "msgpack":
        return PlacedReader(location, contents.flax, files, names)
    return FlatReader(location, contents.places, files, names)


def _shards(manifest: Manifest, options: Options) -> ShardPlan:
    names = {companion.name for companion in manifest.companions}
    if ADAPTER_CONFIG in names and CONFIG not in names:
        return spread(manifest.tensors.values(), sys.maxsize, ADAPTER)  # PEFT does not support an index
    return spread(manifest.tensors.values(), parse_size(options["max_shard_size"]), "model")


def _create(staging: Location, manifest: Manifest, options: Options) -> SafetensorsWriter:
    make_folder(staging)
    shards = _shards(manifest, options)
    metadata = kept_metadata(manifest.custom, options["metadata_format"])
    return SafetensorsWriter(staging, shards.files, metadata, shards.index)


FORMATS = (
    Format(
        name="huggingface",
        title="Hugging Face model folder",
        detect=_detect,
        open=_open,
        create=_create,
        holds=Holds(dtypes=DTYPES, depth=1, companions=True),
        refines=("safetensors", "torch-zip"),
        system="huggingface",
        aliases=("hf",),
        streams=True,
        commit_members=("model.safetensors.index.json", "model.safetensors"),
        options={
            "max_shard_size": Option("5GB", "maximum size of a file, for example 200MB"),
            "metadata_format": METADATA_FORMAT,
        },
        loaded_by="transformers 5, safetensors 0.8",
        version=lambda manifest, options: _shards(manifest, options).version,
        step_folder=lambda step: f"checkpoint-{step}",
    ),
)
