"""PEFT LoRA adapters: a base with an adapter in its weights, as PEFT computes with the adapter loaded.

`adapter_config.json` states the rank r, alpha, and what else was trained; `adapter_model.safetensors` (or `.bin`) has

    base_model.model.<module>.lora_A.weight           A, [r, in]
    base_model.model.<module>.lora_B.weight           B, [out, r]; and lora_B.bias, [out], with `lora_bias`
    base_model.model.<module>.lora_embedding_A, _B    of an embedding: [r, entries], [width, r]
    base_model.model.<module>.lora_magnitude_vector   m, [out], of DoRA
    base_model.model.<module>.token_adapter.trainable_tokens_delta    rows of an embedding that replace its own
    base_model.model.<module>.base_layer.weight, .bias                a tensor below the matrices
    base_model.model.<name>                           a tensor that was trained whole (`modules_to_save`, `bias`)

The merged weight is W + s·B·A with s = alpha / r, or alpha / sqrt(r) (`use_rslora`); transposed where the module stores
its inputs first (`wherry.merger.orientation`) and for an embedding. With `use_dora` every row of it, of an embedding
every column, is scaled to the length m. `rank_pattern` and `alpha_pattern` replace both numbers for modules whose names
end with one of their patterns. `target_parameters` names parameters that are no `weight` of a module, such as the
experts of a layer, for which A and B have r rows and columns of each expert (`wherry.merger.recipes.ExpertLowRank`).
What an adapter states beyond that is refused by name: initialisations that change the base, and every field that
`wherry.view.peft` does not know.

transformers 5 renamed modules, so that a base and an adapter of it may name one module by two names; either is found by
the name in memory (`wherry.tree.memory_names`), and the merged checkpoint has the base's names. Where the output layer
is tied to an embedding that the adapter changes, `wherry.merger.ties` decides what becomes of it.
"""

from __future__ import annotations

import re
from typing import Any

from wherry.core.keypath import KeyPath
from wherry.core.units import plural
from wherry.formats.checkpoint import Checkpoint
from wherry.merger.base import BaseWeights
from wherry.merger.join import JoinedCheckpoint, at
from wherry.merger.orientation import Orientations, orientations
from wherry.merger.parts import BIAS, EMBEDDING, MAGNITUDE, AdaptedModule, Adapter, plain, sorted_adapter
from wherry.merger.recipes import (
    ExpertLowRank,
    LowRank,
    Magnitudes,
    Recipe,
    ReplacedRows,
    UnchangedTensor,
    WeightedSum,
    is_summable,
)
from wherry.merger.ties import Ends, settle_ends
from wherry.merger.view import MergedView
from wherry.view.model import ADAPTER, config_of, json_companion
from wherry.view.peft import DORA, PARAMETERS, PATTERNS, SCALE, TOKENS, TRAINED, refusal

BASE, ADAPTED = 0, 1  # places in the joined checkpoint
_MATRIX = 2  # dimensions; the matrices of experts have one more
_SWAPPED = (
    0,
    19,
)  # the first PEFT that takes matrices of experts for [expert, out, in], as transformers does


def adapter_config(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """The config of an adapter; None if the checkpoint is not one.

    Raises:
        UsageError: it is not JSON.
    """
    return json_companion(checkpoint, ADAPTER)


def with_adapter(base: Checkpoint, adapter: Checkpoint, config: str | None = None) -> MergedView:
    """A base with a LoRA adapter in its weights.

    Args:
        base, adapter: the two.
        config: a file that names the model of the base, if the user states one.

    Raises:
        UnrepresentableError: the adapter is of a kind that is not supported, or does not fit the base.
    """
    stated = adapter_config(adapter) or {}
    reason = refusal(stated, {*SCALE, *PATTERNS, *TRAINED, DORA})
    if reason is not None:
        raise Adapter(adapter, stated).unfit(reason)
    found, model = sorted_adapter(adapter, stated), config_of(base, config) or {}
    weights = BaseWeights(base, model.get("model_type"), found.names)
    ends = settle_ends(base, model, weights, found)
    merge = AdapterMerge(found, weights, orientations(model), ends)
    for name, path in found.below.items():
        merge.replace_below(name, path)
    for name, path in found.whole.items():
        merge.replace_whole(name, path)
    for module, parts in found.modules.items():
        merge.add(module, parts)
    recipes = merge.finished()
    changed = sum(recipe != UnchangedTensor(at(BASE, path)) for path, recipe in recipes.items())
    note = f"merged: {base.uri} with the LoRA adapter {adapter.uri} in {plural(changed, 'tensor')}"
    notes = [note, *ends.notes]
    if found.copies:
        names = ", ".join(path[-1] for path in found.copies)
        notes.append(f"left out, as by PEFT, which reads the tensors under their plain names: {names}")
    sources = [{"uri": base.uri, "role": "base"}, {"uri": adapter.uri, "role": "adapter"}]
    return MergedView(
        JoinedCheckpoint([base, adapter]), recipes, {"kind": "lora", "sources": sources}, tuple(notes),
        added=[ends.added] if ends.added else (), files=ends.files,
    )  # fmt: skip


class AdapterMerge:
    """The recipes of a base's tensors, to which the tensors of an adapter are added one by one."""

    def __init__(self, adapter: Adapter, weights: BaseWeights, known: Orientations, ends: Ends) -> None:
        """Every tensor is that of the base.

        Args:
            adapter: the adapter.
            weights: the base.
            known: what is known of the modules of the base.
            ends: what becomes of an output layer that is tied.
        """
        self._adapter, self._weights, self._known, self._ends = adapter, weights, known, ends
        self._config = adapter.config
        self._parameters: list[str] = list(self._config.get(PARAMETERS) or ())
        self._recipes: dict[KeyPath, Recipe] = {
            path: UnchangedTensor(at(BASE, path)) for path in weights.tensors
        }
        if ends.added is not None and ends.embedding is not None:
            self._recipes[ends.added.path] = self._recipes[ends.embedding]

    def finished(self) -> dict[KeyPath, Recipe]:
        """Key path → recipe, of every tensor of the result."""
        ends = self._ends
        if ends.tied and ends.head is not None and ends.embedding is not None:
            self._recipes[ends.head] = self._recipes[ends.embedding]
        return self._recipes

    def replace_below(self, name: str, source: KeyPath) -> None:
        """Put a tensor in the place of the base's, also for the other end of a tie."""
        ends = self._ends
        both = {ends.embedding, ends.head} - {None}
        if self._is_dropped(name):
            return
        path = self._find(name)
        for one in both if path in both else {path}:
            assert one is not None
            self._put(one, source)

    def replace_whole(self, name: str, source: KeyPath) -> None:
        """Put a tensor in the place of the base's."""
        if not self._is_dropped(name):
            self._put(self._find(name), source)

    def add(self, module: str, parts: AdaptedModule) -> None:
        """Add what the adapter has of a module.

        Args:
            module: its name in the adapter.
            parts: its tensors.
        """
        name = plain(module)
        if self._is_dropped(f"{name}.weight"):
            return
        if parts.tokens is not None:
            self._add_rows(name, parts.tokens)
        if parts.lora and (self._weights.find(f"{name}.weight") is not None or not self._targets(name)):
            self._add_matrices(name, parts)
        elif parts.lora:
            self._add_experts(name, parts)
        if BIAS in parts.lora:
            # s times the bias of B is added to the module's own, which must exist.
            path, spec = self._find(f"{name}.bias"), self._adapter.spec(parts.lora[BIAS])
            self._adapter.require_shape(spec, self._weights.tensors[path].shape)
            _rank, scale = self._adapter.scale(name)
            terms = ((self._under(path, name), 1.0), (at(ADAPTED, parts.lora[BIAS]), scale))
            self._recipes[path] = WeightedSum(terms)

    def _is_dropped(self, name: str) -> bool:
        """Whether a tensor belongs to the output layer, and is that of the embedding."""
        return any(self._weights.is_name(name, one) for one in self._ends.dropped)

    def _find(self, name: str) -> KeyPath:
        found = self._weights.find(name)
        if found is None:
            raise self._adapter.unfit(f"the base {self._weights.uri} has no tensor {name}")
        return found

    def _put(self, path: KeyPath, source: KeyPath) -> None:
        spec, wanted = self._adapter.spec(source), self._weights.tensors[path]
        self._adapter.require_shape(spec, wanted.shape)
        if spec.dtype != wanted.dtype:
            raise self._adapter.unfit(f"{spec.name} is {spec.dtype}, but the base has {wanted.dtype}")
        self._recipes[path] = UnchangedTensor(at(ADAPTED, source))

    def _under(self, path: KeyPath, module: str) -> KeyPath:
        """The tensor to which something is added, once."""
        sources = self._recipes[path].sources
        if len(sources) != 1:
            raise self._adapter.unfit(f"{module} changes the base's tensor {path[-1]} a second time")
        return sources[0]

    def _add_rows(self, module: str, source: KeyPath) -> None:
        path, spec = self._find(f"{module}.weight"), self._adapter.spec(source)
        weight, stated = self._weights.tensors[path], self._config.get(TOKENS)
        table = stated if isinstance(stated, dict) else {module: stated}
        found = [row for name, row in table.items() if f".{module}".endswith(f".{name}")]
        if len(found) != 1 or not isinstance(found[0], list):
            raise self._adapter.unfit(f"{TOKENS} does not state which rows of {module} the adapter has")
        numbers = tuple(found[0])
        if len(weight.shape) != _MATRIX or not all(is_summable(one.dtype) for one in (weight, spec)):
            raise self._adapter.unfit(
                f"{module} is no matrix of floating point, in the base or in the adapter"
            )
        self._adapter.require_shape(spec, (len(numbers), weight.shape[1]))
        if not all(type(one) is int and 0 <= one < weight.shape[0] for one in numbers):
            raise self._adapter.unfit(f"{TOKENS} of {module} has a number that is no row of the base")
        if len(set(numbers)) != len(numbers):
            raise self._adapter.unfit(f"{TOKENS} of {module} has a number twice")
        self._recipes[path] = ReplacedRows(self._under(path, module), at(ADAPTED, source), numbers)

    def _add_matrices(self, module: str, parts: AdaptedModule) -> None:
        """Add the product of two matrices to the weight of a module."""
        name = f"{module}.weight"
        path = self._find(name)
        as_parameter = self._is_target(name)
        rank, scale = self._adapter.scale(name if as_parameter else module)
        down, up = (self._adapter.spec(parts.lora[one]) for one in parts.matrices)
        weight = self._weights.tensors[path]
        shapes = [len(one.shape) for one in (weight, down, up)]
        if shapes != [2, 2, 2] or not all(is_summable(one.dtype) for one in (weight, down, up)):
            raise self._adapter.unfit(
                f"{module} is no matrix of floating point, in the base or in the adapter"
            )
        if parts.matrices == EMBEDDING or as_parameter:
            transposed = parts.matrices == EMBEDDING
        else:
            transposed = self._is_transposed(module, weight.shape, (up.shape[0], down.shape[1]))
        outs, ins = reversed(weight.shape) if transposed else weight.shape
        self._adapter.require_shape(down, (rank, ins))
        self._adapter.require_shape(up, (outs, rank))
        under = self._under(path, module)
        matrix = LowRank(under, at(ADAPTED, down.path), at(ADAPTED, up.path), rank, scale, transposed)
        if MAGNITUDE not in parts.lora:
            self._recipes[path] = matrix
            return
        lengths = self._adapter.spec(parts.lora[MAGNITUDE])
        if not is_summable(lengths.dtype):
            raise self._adapter.unfit(f"{lengths.name} is {lengths.dtype}, not of floating point")
        self._adapter.require_shape(lengths, (outs,))
        self._recipes[path] = Magnitudes(matrix, at(ADAPTED, lengths.path), ins)

    def _is_transposed(self, module: str, stored: tuple[int, ...], product: tuple[int, int]) -> bool:
        """Whether a matrix is stored inputs first: by the class of the module, or by the only way that fits."""
        known = self._known.of(module)
        fits = [one for one in (False, True) if (product[::-1] if one else product) == stored]
        if known is None and len(fits) > 1:
            raise self._adapter.unfit(
                f"{module} is a square matrix of a module whose class is unknown, as the config of the base names no "
                "model type of transformers: whether its inputs are its rows or its columns is in no file"
            )
        return known if known is not None else fits == [True]

    def _is_target(self, name: str) -> bool:
        """Whether `target_parameters` names a parameter."""
        return any(f".{name}".endswith(f".{one}") for one in self._parameters)

    def _targets(self, module: str) -> list[str]:
        """The parameters of a module that `target_parameters` names."""
        ends = sorted({one.rpartition(".")[2] for one in self._parameters})
        return [name for name in (f"{module}.{end}" for end in ends) if self._is_target(name)]

    def _add_experts(self, module: str, parts: AdaptedModule) -> None:
        """Add the matrices of one parameter of experts; which of the stated ones it is, their shapes decide."""
        if parts.matrices == EMBEDDING or MAGNITUDE in parts.lora or BIAS in parts.lora:
            raise self._adapter.unfit(
                f"PEFT adds only two matrices to parameters of experts, and {module} has more"
            )
        down, up = (self._adapter.spec(parts.lora[one]) for one in parts.matrices)
        targets = [(name, *self._experts_of(name)) for name in self._targets(module)]
        fitting = [
            (name, rows, shape) for name, rows, shape in targets
            if shape is not None and self._fits(name, shape, down.shape, up.shape)
        ]  # fmt: skip
        if len(fitting) != 1:
            raise self._adapter.unfit(
                f"{module} has matrices of {list(down.shape)} and {list(up.shape)}, which fit "
                f"{len(fitting)} of the parameters that target_parameters names: "
                f"{', '.join(f'{name} {list(shape or ())}' for name, _rows, shape in targets)}"
            )
        name, rows, shape = fitting[0]
        rank, scale = self._adapter.scale(name)
        transposed = self._are_transposed(name, shape, (up.shape[0], down.shape[1]))
        for number, row in enumerate(rows):
            first = 0
            for path in row:
                spec = self._weights.tensors[path]
                if not all(is_summable(one.dtype) for one in (spec, down, up)):
                    raise self._adapter.unfit(
                        f"{name} is not of floating point, in the base or in the adapter"
                    )
                alone = None if len(spec.shape) > _MATRIX else number
                self._recipes[path] = ExpertLowRank(
                    self._under(path, name), at(ADAPTED, down.path), at(ADAPTED, up.path),
                    rank, shape[0], scale, transposed, alone, first,
                )  # fmt: skip
                first += spec.shape[0] if alone is not None else 0

    def _experts_of(self, name: str) -> tuple[list[list[KeyPath]], tuple[int, ...] | None]:
        """The base's tensors of a parameter of experts, and its shape; None if the base has none."""
        path = self._weights.find(name)
        if path is not None:
            return [[path]], self._weights.tensors[path].shape
        rows = self._weights.experts(name)
        if not rows:
            return [], None
        shapes = {tuple(self._weights.tensors[path].shape for path in row) for row in rows}
        first = next(iter(shapes))
        if len(shapes) > 1 or any(len(one) != _MATRIX or one[1] != first[0][1] for one in first):
            return rows, None
        return rows, (len(rows), sum(one[0] for one in first), first[0][1])

    def _fits(self, name: str, shape: tuple[int, ...], down: tuple[int, ...], up: tuple[int, ...]) -> bool:
        rank, _scale = self._adapter.scale(name)
        if len(shape) != _MATRIX + 1 or len(down) != _MATRIX or len(up) != _MATRIX:
            return False
        return down[0] == up[1] == rank * shape[0] and shape[1:] in ((up[0], down[1]), (down[1], up[0]))

    def _are_transposed(self, name: str, shape: tuple[int, ...], product: tuple[int, int]) -> bool:
        """Whether experts are stored inputs first, or PEFT before 0.19 took them for it."""
        if shape[1] != shape[2]:
            return product != shape[1:]
        known = self._known.of(name)
        if known is None or (not known and _version(self._config.get("peft_version")) < _SWAPPED):
            raise self._adapter.unfit(
                f"{name} has square matrices, which fit both ways: PEFT before 0.19 exchanged their sides, and "
                f"peft_version is {self._config.get('peft_version')!r}"
            )
        return known


def _version(text: object) -> tuple[int, ...]:
    """The first two numbers of a version; zeros if it is none."""
    found = re.match(r"(\d{1,6})\.(\d{1,6})", text) if isinstance(text, str) else None
    return (int(found[1]), int(found[2])) if found else (0, 0)
