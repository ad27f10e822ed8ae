"""PEFT LoRA adapters: a base with an adapter in its weights, as PEFT's `merge_and_unload` makes it.

`adapter_config.json` states the rank r, alpha, and what else was trained; `adapter_model.safetensors` (or `.bin`) has

    base_model.model.<module>.lora_A.weight           A, [r, in]
    base_model.model.<module>.lora_B.weight           B, [out, r]
    base_model.model.<module>.lora_embedding_A, _B    of an embedding: [r, entries], [width, r]
    base_model.model.<module>.base_layer.weight       W itself, which PEFT saves with embeddings
    base_model.model.<module>.lora_magnitude_vector   m, [out], of DoRA
    base_model.model.<module>.weight                  a module that was trained whole (modules_to_save)

The merged weight is W + s·B·A with s = alpha / r, or alpha / sqrt(r) (`use_rslora`); transposed where the module stores
its inputs first (`fan_in_fan_out`) and for an embedding. With `use_dora` every row of it is scaled to the length m.
`rank_pattern` and `alpha_pattern` replace both numbers for modules whose names end with one of their patterns. What an
adapter states beyond that is refused by name: biases, initialisations that change the base, and every field that
`wherry.view.peft` does not know.

transformers 5 renamed modules, so that a base and an adapter of it may name one module by two names; either is found by
the name in memory (`wherry.tree.memory_names`), and the merged checkpoint has the base's names.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from wherry.core.units import plural
from wherry.errors import UnrepresentableError
from wherry.merger.join import JoinedCheckpoint, at
from wherry.merger.recipes import LowRank, Magnitudes, Recipe, UnchangedTensor, is_summable
from wherry.merger.view import MergedView
from wherry.tree.memory_names import memory_name
from wherry.tree.tree_reading import read_tree
from wherry.view.model import ADAPTER, config_of, json_beside
from wherry.view.peft import DORA, PATTERNS, SCALE, START, refusal, scale_of
from wherry.view.peft_patterns import ModulePatterns

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from wherry.core.keypath import KeyPath
    from wherry.core.tensorspec import TensorSpec
    from wherry.formats.checkpoint import Checkpoint

_BASE_LAYER, _MAGNITUDE = ".base_layer", ".lora_magnitude_vector"
_BASE, _ADAPTER = 0, 1


class LowRankPair(NamedTuple):
    """The matrices of a module: the key paths of A, B and DoRA's m in the adapter, and whether it is an embedding."""

    down: KeyPath
    up: KeyPath
    embedding: bool
    magnitude: KeyPath | None


class BaseWeights:
    """The weights of a base, by the names of their modules, without what is wrapped around them."""

    def __init__(self, base: Checkpoint, modules: Iterable[str]) -> None:
        """Nothing is read but the config beside the base.

        Args:
            base: the base.
            modules: the modules of an adapter: of the trees that the base may be, the first that has them all is taken.
        """
        self._base = base
        self._kind = (config_of(base) or {}).get("model_type")
        trees = [
            {name[0]: path for path, name in tree.names.items() if len(name) == 1}
            for tree in read_tree(base.manifest).trees
        ]
        wanted = [f"{module}.weight" for module in modules]
        found = [
            (names, {memory_name(self._kind, name): path for name, path in names.items()}) for names in trees
        ]
        whole = (
            (names, memory)
            for names, memory in found
            if all(name in names or memory_name(self._kind, name) in memory for name in wanted)
        )
        self._names, self._in_memory = next(whole, found[0])

    def of(self, module: str, adapter: Checkpoint) -> KeyPath:
        """The key path of a module's weight, of which the adapter may have the name that the base has not.

        Raises:
            UnrepresentableError: there is none.
        """
        name = f"{module}.weight"
        found = self._names.get(name) or self._in_memory.get(memory_name(self._kind, name))
        if found is None:
            raise _unfit(f"the base {self._base.uri} has no tensor {name}", adapter)
        return found


def adapter_config(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """The config of an adapter; None if the checkpoint is not one.

    Raises:
        UsageError: it is not JSON.
    """
    return json_beside(checkpoint, ADAPTER)


def with_adapter(base: Checkpoint, adapter: Checkpoint) -> MergedView:
    """A base with a LoRA adapter in its weights.

    Raises:
        UnrepresentableError: the adapter is of a kind that is not supported, or does not fit the base.
    """
    config = adapter_config(adapter) or {}
    _require_supported(config, adapter)
    recipes: dict[KeyPath, Recipe] = {
        path: UnchangedTensor(at(_BASE, path)) for path in base.manifest.tensors
    }
    patterns = {name: ModulePatterns(config.get(name)) for name in PATTERNS}
    pairs, whole = _modules(adapter, dora=bool(config.get(DORA)))
    weights = BaseWeights(base, [name.removesuffix(_BASE_LAYER) for name in (*whole, *pairs)])
    for name, source in whole.items():  # those of embeddings come before the matrices that are added to them
        path = weights.of(name.removesuffix(_BASE_LAYER), adapter)
        _require_alike(adapter.manifest.tensors[source], base.manifest.tensors[path], adapter)
        recipes[path] = UnchangedTensor(at(_ADAPTER, source))
    for module, pair in pairs.items():
        path = weights.of(module, adapter)
        (under,) = recipes[path].sources
        matrix = replace(_low_rank(path, pair, module, config, patterns, base, adapter), base=under)
        recipes[path] = matrix if pair.magnitude is None else _magnitudes(path, pair, matrix, base, adapter)
    sources = [{"uri": base.uri, "role": "base"}, {"uri": adapter.uri, "role": "adapter"}]
    return MergedView(
        JoinedCheckpoint([base, adapter]), recipes, {"kind": "lora", "sources": sources},
        f"merged: {base.uri} with the LoRA adapter {adapter.uri} in {plural(len(pairs), 'weight')}",
    )  # fmt: skip


def _require_supported(config: Mapping[str, Any], adapter: Checkpoint) -> None:
    reason = refusal(config, {*SCALE, *PATTERNS, DORA})
    if reason is not None:
        raise _unfit(reason, adapter)


def _modules(adapter: Checkpoint, *, dora: bool) -> tuple[dict[str, LowRankPair], dict[str, KeyPath]]:
    """Module → its matrices, and module → the whole weight that replaces it."""
    found: dict[str, dict[str, KeyPath]] = {}
    whole: dict[str, KeyPath] = {}
    for path in adapter.manifest.tensors:
        name = path[-1]
        lora = re.fullmatch(re.escape(START) + r"(.+)\.lora_(embedding_)?([AB])(\.weight)?", name)
        if lora and bool(lora[2]) != bool(lora[4]) and len(path) == 1:
            found.setdefault(lora[1], {})[f"{lora[2] or ''}{lora[3]}"] = path
        elif dora and name.startswith(START) and name.endswith(_MAGNITUDE) and len(path) == 1:
            found.setdefault(name.removeprefix(START).removesuffix(_MAGNITUDE), {})[_MAGNITUDE] = path
        elif name.startswith(START) and name.endswith(".weight") and ".lora_" not in name and len(path) == 1:
            whole[name.removeprefix(START).removesuffix(".weight")] = path
        else:
            raise _unfit(f"{name} is no matrix of a LoRA adapter", adapter)
    return {module: _pair(module, both, adapter, dora=dora) for module, both in found.items()}, whole


def _pair(module: str, found: Mapping[str, KeyPath], adapter: Checkpoint, *, dora: bool) -> LowRankPair:
    """The matrices of a module, which must all be there."""
    mark = "embedding_" if "embedding_A" in found else ""
    if dora and mark:
        raise _unfit(f"{module} is an embedding with DoRA, which is not supported", adapter)
    if not {f"{mark}A", f"{mark}B"} <= set(found) or len(found) != 2 + dora:
        raise _unfit(f"{module} lacks one of its {'three tensors' if dora else 'two matrices'}", adapter)
    return LowRankPair(found[f"{mark}A"], found[f"{mark}B"], bool(mark), found.get(_MAGNITUDE))


def _magnitudes(
    path: KeyPath, pair: LowRankPair, matrix: LowRank, base: Checkpoint, adapter: Checkpoint
) -> Magnitudes:
    """DoRA's scaling of the rows of a matrix."""
    assert pair.magnitude is not None
    weight, spec = base.manifest.tensors[path], adapter.manifest.tensors[pair.magnitude]
    outs, ins = reversed(weight.shape) if matrix.transposed else weight.shape
    if not is_summable(spec.dtype):
        raise _unfit(f"{spec.name} is {spec.dtype}, not of floating point", adapter)
    _require_shape(spec, (outs,), adapter)
    return Magnitudes(matrix, at(_ADAPTER, pair.magnitude), ins)


def _low_rank(
    path: KeyPath,
    pair: LowRankPair,
    module: str,
    config: Mapping[str, Any],
    patterns: Mapping[str, ModulePatterns],
    base: Checkpoint,
    adapter: Checkpoint,
) -> LowRank:
    weight, tensors = base.manifest.tensors[path], adapter.manifest.tensors
    down, up = tensors[pair.down], tensors[pair.up]
    transposed = bool(config.get("fan_in_fan_out")) != pair.embedding
    rank = patterns["rank_pattern"].value(module, config["r"])
    shapes = [len(one.shape) for one in (weight, down, up)]
    if shapes != [2, 2, 2] or not all(is_summable(one.dtype) for one in (weight, down, up)):
        raise _unfit(f"{module} is no matrix of floating point, in the base or in the adapter", adapter)
    outs, ins = reversed(weight.shape) if transposed else weight.shape
    _require_shape(down, (rank, ins), adapter)
    _require_shape(up, (outs, rank), adapter)
    alpha = patterns["alpha_pattern"].value(module, config["lora_alpha"])
    scale = scale_of(config, rank, alpha)
    return LowRank(at(_BASE, path), at(_ADAPTER, pair.down), at(_ADAPTER, pair.up), rank, scale, transposed)


def _require_alike(spec: TensorSpec, wanted: TensorSpec, adapter: Checkpoint) -> None:
    _require_shape(spec, wanted.shape, adapter)
    if spec.dtype != wanted.dtype:
        raise _unfit(f"{spec.name} is {spec.dtype}, but the base has {wanted.dtype}", adapter)


def _require_shape(spec: TensorSpec, shape: tuple[int, ...], adapter: Checkpoint) -> None:
    if spec.shape != shape:
        raise _unfit(
            f"{spec.name} is {list(spec.shape)}, but the base and the config need {list(shape)}", adapter
        )


def _unfit(what: str, adapter: Checkpoint) -> UnrepresentableError:
    return UnrepresentableError(
        what, uri=adapter.uri, cure="merge it with PEFT (merge_and_unload), or pass the adapter's own base"
    )
