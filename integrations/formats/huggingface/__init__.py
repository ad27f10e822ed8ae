"""A Hugging Face model folder: weights with config, tokenizer and other companions.

Detected by the names of the weights (`weights.py`), so a folder without a config counts. Read:
safetensors, single or sharded by an index, with variants and adapters; `pytorch_model.bin` in the zip form.
Written: safetensors, always with `{"format": "pt"}` in `__metadata__`, which transformers requires. A tensor's
key path is one part, its name. Folders with weights of the Flax classes are a format of their own (`flax.py`).
"""

from __future__ import annotations

import sys

from wherry.core.detection import Detection
from wherry.core.manifest import Manifest
from wherry.core.units import parse_size
from wherry.cures import Argument, Cure
from wherry.errors import AmbiguousError, CorruptError, UnrepresentableError
from wherry.formats.format import Format, Glimpse, Holds, Opened, Option, Options, Signs
from wherry.integrations.containers.safetensors.header import DTYPES, METADATA_FORMAT
from wherry.integrations.formats.huggingface.flax import FLAX
from wherry.integrations.formats.huggingface.folder import pipeline_parts
from wherry.integrations.formats.huggingface.shards import detect_weights, open_weights
from wherry.integrations.formats.huggingface.weights import (
    ADAPTER,
    ADAPTER_CONFIG,
    CONFIG,
    PRECEDENCE,
    ShardPlan,
    find_weights,
    spread_tensors,
)
from wherry.store.location import Location
from wherry.target.file_map import FileMap, Scene

_OF_PEFT = "base_model.model."  # the start of the names of an adapter's tensors


def _detect(glimpse: Glimpse) -> Detection | None:
    """A folder with weights of PyTorch's classes.

    Raises:
        AmbiguousError: a diffusers pipeline of several models.
    """
    weights = find_weights(glimpse.entries)
    if weights is None:
        try:
            parts = pipeline_parts(glimpse.location, glimpse.entries)
        except CorruptError:
            return None  # a file that cannot be read lists no models
        if parts:
            raise AmbiguousError(
                f"ambiguous source: a diffusers pipeline of {len(parts)} models: {', '.join(parts)}",
                uri=glimpse.location.uri,
                cure=Cure("select one of them, for example {}", Argument("item", parts[0])),
            )
    if weights is None or weights.container == "msgpack":
        return None
    return detect_weights(glimpse, weights, "huggingface")


def _open(location: Location, detection: Detection) -> Opened:
    weights = find_weights({entry.name: entry for entry in location.entries()})
    return open_weights(location, detection, weights, PRECEDENCE)


def _shards(manifest: Manifest, options: Options) -> ShardPlan:
    names = {companion.name for companion in manifest.companions}
    if ADAPTER_CONFIG in names and CONFIG not in names:
        return spread_tensors(
            manifest.tensors.values(), sys.maxsize, ADAPTER
        )  # PEFT does not support an index
    if ADAPTER_CONFIG not in names and any(path[-1].startswith(_OF_PEFT) for path in manifest.tensors):
        raise UnrepresentableError(
            f"missing {ADAPTER_CONFIG}: no tensor of an adapter states its scale",
            cure=f"put PEFT's {ADAPTER_CONFIG}, with peft_type, r, lora_alpha and target_modules, next to the source",
        )
    return spread_tensors(manifest.tensors.values(), parse_size(options["max_shard_size"]), "model")


def _layout(manifest: Manifest, options: Options, _scene: Scene) -> FileMap:
    from wherry.integrations.containers.safetensors.layout import kept_metadata, lay_out

    shards = _shards(manifest, options)
    return lay_out(shards.files, kept_metadata(manifest.custom, options["metadata_format"]), shards.index)


FORMATS = (
    Format(
        name="huggingface",
        title="Hugging Face model folder",
        detect=_detect,
        signs=Signs(ends=(".safetensors", ".bin", ".msgpack", ".json")),
        open=_open,
        layout=_layout,
        holds=Holds(dtypes=DTYPES, depth=1, companions=True),
        refines=("safetensors", "torch-zip", "huggingface-flax"),
        system="huggingface",
        names_needed=True,
        served=True,
        aliases=("hf",),
        commit_members=("model.safetensors.index.json", "model.safetensors"),
        options={
            "max_shard_size": Option("5GB", "maximum size of a file, for example 200MB"),
            "metadata_format": METADATA_FORMAT,
        },
        loaded_by="transformers 5, safetensors 0.8",
        version=lambda manifest, options: _shards(manifest, options).version,
        step_folder=lambda step: f"checkpoint-{step}",
    ),
    FLAX,
)
