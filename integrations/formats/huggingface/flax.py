"""A Hugging Face folder with weights of the Flax classes of transformers 4: `flax_model.msgpack`.

One file, or `flax_model-00001-of-0000N.msgpack` with the index `flax_model.msgpack.index.json`, whose names are key
paths joined by `/`; `save_pretrained` shards above 10 GB. Key paths are those of the modules: `kernel` is [in, out],
`embedding`, `scale` and `bias`, and a layer's number is a part of its own. There is no root `params`, except next to
`batch_stats`. The config is that of the PyTorch class. transformers 5 has no Flax classes, and reads no such folder.
"""

from __future__ import annotations

from dataclasses import replace

from wherry.core import dtypes
from wherry.core.detection import Detection
from wherry.core.manifest import Manifest, without_chunks
from wherry.core.units import parse_size
from wherry.formats.format import Format, Glimpse, Holds, Opened, Option, Options, Signs
from wherry.formats.systems import TreeForm
from wherry.integrations.formats.huggingface.shards import detect_weights, open_weights
from wherry.integrations.formats.huggingface.weights import ShardPlan, flax_weights, spread_tensors
from wherry.store.location import Location
from wherry.target.file_map import FileMap, Scene

NAME, STEM = "huggingface-flax", "flax_model"
_WHY = "the weights that the Flax classes load"
_LEAVES = frozenset({"kernel", "embedding"})  # one of which every model has
_WITH_STATISTICS = frozenset({"params", "batch_stats"})
_OTHERS = frozenset(
    {"params", "target", "state", "mdl_vars", "opt_state", "token_embedder"}
)  # of other systems


def _is_own(manifest: Manifest) -> bool:
    roots = {path[0] for path in manifest.tensors if path}
    modules = all(len(path) > 1 and "." not in path[-1] for path in manifest.tensors)
    known = roots >= _WITH_STATISTICS or not (roots & _OTHERS or roots == {"decoder"})
    return modules and known and any(path[-1] in _LEAVES for path in manifest.tensors)


def _detect(glimpse: Glimpse) -> Detection | None:
    weights = flax_weights(glimpse.entries)
    return weights and detect_weights(glimpse, weights, NAME, "Hugging Face Flax")


def _open(location: Location, detection: Detection) -> Opened:
    weights = flax_weights({entry.name: entry for entry in location.entries()})
    return open_weights(location, detection, weights, _WHY)


def _prepare(manifest: Manifest, _options: Options) -> Manifest:
    """The manifest without chunks; refuses key paths that flax cannot hold before any bytes move."""
    from wherry.integrations.containers.msgpack.layout import lay_out

    flat = without_chunks(manifest)
    lay_out({".": flat})
    return flat


def _shards(manifest: Manifest, options: Options) -> ShardPlan:
    return spread_tensors(manifest.tensors.values(), parse_size(options["max_shard_size"]), STEM, "msgpack")


def _layout(manifest: Manifest, options: Options, _scene: Scene) -> FileMap:
    from wherry.integrations.containers.msgpack.layout import lay_out

    shards = _shards(manifest, options)
    files = {
        name: replace(manifest, tensors={spec.path: spec for spec in specs})
        for name, specs in shards.files.items()
    }
    return lay_out(files, shards.index)


FLAX = Format(
    name=NAME,
    title="Hugging Face Flax folder",
    detect=_detect,
    signs=Signs(ends=(".msgpack", ".json")),
    open=_open,
    layout=_layout,
    holds=Holds(dtypes=dtypes.NUMPY, companions=True),
    system=NAME,
    form=TreeForm(
        _is_own,
        "the parameters of a Flax class of transformers, such as `bert/pooler/dense/kernel`",
        flax=False,
    ),
    aliases=("hf-flax",),
    commit_members=(f"{STEM}.msgpack.index.json", f"{STEM}.msgpack"),
    options={"max_shard_size": Option("10GB", "maximum size of a file, for example 200MB")},
    loaded_by="transformers 4.46: the Flax classes of Llama, Mistral, Gemma, T5, BERT and GPT-2",
    version=lambda manifest, options: _shards(manifest, options).version,
    step_folder=lambda step: f"checkpoint-{step}",
    prepare=_prepare,
)
