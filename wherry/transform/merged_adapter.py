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
its inputs first (`Orientations`) and for an embedding. With `use_dora` every row of it, of an embedding
every column, is scaled to the length m. `rank_pattern` and `alpha_pattern` replace both numbers for modules whose names
end with one of their patterns. `target_parameters` names parameters that are no `weight` of a module, such as the
experts of a layer, for which A and B have r rows and columns of each expert (`merge_view.ExpertLowRank`).
What an adapter states beyond that is refused by name: initialisations that change the base, and every field that
`wherry.transform.peft` does not know.

transformers 5 renamed modules, so that a base and an adapter of it may name one module by two names; either is found by
the name in memory (`wherry.layout.memory_names`), and the merged checkpoint has the base's names (`BaseWeights`).

PEFT decides by the class of each module whether its matrix is stored inputs first, as Conv1D does, or outputs first, as
Linear does (`Orientations`). `fan_in_fan_out` in `adapter_config.json` is that of the module that PEFT wrapped last, so
that it says nothing of the others.

For an output layer that is tied to the embedding, transformers stores one tensor for both. PEFT's model with the
adapter changes the ends apart from each other: LoRA and a whole module (`modules_to_save`) belong to one end. So the
result is untied, with a tensor of its own for the output layer (`settle_ends`), unless

    both ends get equal tensors        as `ensure_weight_tying` has it: one tensor is both
    only rows of the embedding change  `trainable_token_indices` of the embedding are those of the output layer too
    a tensor below the matrices        `base_layer.weight` of either end is that of both

PEFT's `merge_and_unload` adds the product of a LoRA of either end to the one tensor, and so to both, which its model
with the adapter does not compute; PEFT warns of it.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from wherry.core.keypath import KeyPath
from wherry.core.lazy_dataclass import dataclass
from wherry.core.tensorspec import TensorSpec, row_bands
from wherry.core.units import plural
from wherry.families import family_of_config, load_family
from wherry.families.facts import with_defaults
from wherry.formats.checkpoint import Checkpoint
from wherry.layout.memory_names import memory_name, memory_names
from wherry.layout.tree_reading import read_tree
from wherry.transform.merge_view import (
    ExpertLowRank,
    JoinedCheckpoint,
    LowRank,
    Magnitudes,
    Recipe,
    ReplacedRows,
    UnchangedTensor,
    WeightedSum,
    at,
    is_summable,
    merged_view,
)
from wherry.transform.model import ADAPTER, CONFIG, config_of, json_companion
from wherry.transform.peft import (
    B_BIAS,
    DORA,
    EMBEDDING,
    MAGNITUDE,
    MATRICES,
    PARAMETERS,
    PATTERNS,
    SCALE,
    TOKENS,
    TRAINED,
    AdaptedModule,
    Adapter,
    plain,
    refusal,
    sorted_adapter,
)
from wherry.transform.view import View

_TABLE = Path(__file__).parent / "orientations.toml"
_TIED = "tie_word_embeddings"
_EMBEDDINGS = frozenset({
    "embed_in", "embed_tokens", "embeddings", "shared", "tok_embeddings", "tokens_embed", "word_embedding",
    "word_embeddings", "wte",
})  # fmt: skip
_HEADS = {"gpt_neox": "embed_out"}  # of model types whose output layer is not `lm_head`
_WITH_HEAD = (
    "ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "ForMaskedLM", "WithLMHead", "ForPreTraining",
    "DoubleHeadsModel",
)  # fmt: skip
_UNTIED = (
    "ForCausalLM",
    "LMHeadModel",
)  # classes that have a tensor for the output layer if they are not tied
_KNOWN_TO_PEFT = frozenset({"embed_tokens", "lm_head"})  # EMBEDDING_LAYER_NAMES
_BAND = 8 << 20
BASE, ADAPTED = 0, 1  # places in the joined checkpoint
_MATRIX = 2  # dimensions; the matrices of experts have one more
# The first PEFT that takes matrices of experts for [expert, out, in], as transformers does.
_SWAPPED = (0, 19)


class BaseWeights:
    """The weights of a base, under their own names and under those in memory.

    Attributes:
        uri: of the base.
        tensors: key path → spec, of the base and of what was added to it.
        names: name → key path, of the tree that is merged.
    """

    def __init__(self, base: Checkpoint, kind: object, wanted: Collection[str]) -> None:
        """Nothing is read.

        Args:
            base: the base.
            kind: its model type.
            wanted: names of an adapter: of the trees that the base may be, the one that has most of them is taken.
        """
        self.uri = base.uri
        self.tensors: dict[KeyPath, TensorSpec] = dict(base.manifest.tensors)
        self._kind = kind
        trees = [
            {name[0]: path for path, name in tree.names.items() if len(name) == 1}
            for tree in read_tree(base.manifest).trees
        ]
        inside = [{memory_name(kind, name): path for name, path in names.items()} for names in trees]
        fits = [
            sum(name in names or memory_name(kind, name) in memory for name in wanted)
            for names, memory in zip(trees, inside, strict=True)
        ]
        chosen = max(range(len(trees)), key=fits.__getitem__)
        self.names, self._in_memory = trees[chosen], inside[chosen]
        self._first_words = {name.partition(".")[0] for name in self._in_memory}

    def find(self, name: str) -> KeyPath | None:
        """The key path of a tensor, of which an adapter may have a name that the base has not; None if there is none.

        A checkpoint of a bare model lacks the first word of the names, as that of `gpt2` does.
        """
        found = self.names.get(name) or self._in_memory.get(memory_name(self._kind, name))
        first, _dot, rest = memory_name(self._kind, name).partition(".")
        return found or (self._in_memory.get(rest) if first not in self._first_words else None)

    def is_name(self, name: str, wanted: str) -> bool:
        """Whether two names are those of one tensor, published and in memory."""
        return memory_name(self._kind, name) == memory_name(self._kind, wanted)

    def experts(self, name: str) -> list[list[KeyPath]]:
        """The tensors that a name in memory is made of: for each expert those that follow one another along its rows.

        Args:
            name: of a parameter of experts, `model.layers.0.mlp.experts.gate_up_proj`.

        Returns:
            Nothing if the base has no such tensors, or stores them as one.
        """
        own = memory_names().get(self._kind) if isinstance(self._kind, str) else None
        for merge in own.merged if own else ():
            if name.endswith(f".{merge.memory}"):
                start = name.removesuffix(merge.memory)
                rows: list[list[KeyPath]] = []
                while found := self._of_expert(start, merge.saved, len(rows)):
                    rows.append(found)
                return rows
        return []

    def _of_expert(self, start: str, saved: Collection[str], number: int) -> list[KeyPath]:
        paths = [self.find(start + end.replace("*", str(number))) for end in saved]
        return [path for path in paths if path is not None] if None not in paths else []

    def add(self, name: str, spec: TensorSpec) -> None:
        """Add a tensor that the base has not."""
        self.tensors[spec.path] = spec
        self.names[name] = spec.path
        self._in_memory[memory_name(self._kind, name)] = spec.path


@dataclass(frozen=True, slots=True)
class Orientations:
    """What is known of the modules of a base.

    Attributes:
        known: whether the classes of its modules are known.
        inputs_first: the last names of the modules and parameters that are stored inputs first.
    """

    known: bool
    inputs_first: frozenset[str] = frozenset()

    def of(self, module: str) -> bool | None:
        """Whether a module stores its inputs first; None if its class is unknown."""
        return module.rpartition(".")[2] in self.inputs_first if self.known else None


@cache
def _tables() -> tuple[frozenset[str], dict[str, frozenset[str]]]:
    table = tomllib.loads(_TABLE.read_text(encoding="utf-8"))
    return frozenset(table["known"]), {kind: frozenset(row) for kind, row in table["inputs_first"].items()}


def orientations(config: Mapping[str, Any] | None) -> Orientations:
    """What is known of the modules of a base with this config; nothing without one."""
    known, inputs_first = _tables()
    kind = (config or {}).get("model_type")
    if config is None or not (kind in known or family_of_config(config) is not None):
        return Orientations(known=False)
    return Orientations(known=True, inputs_first=inputs_first.get(str(kind), frozenset()))


@dataclass(frozen=True, slots=True)
class Ends:
    """The two ends of a tied model, and how a merge treats them; empty if the adapter changes neither.

    Attributes:
        embedding: the key path of the embedding.
        head: the key path of the output layer in the result, if it has one.
        added: the spec of the output layer, which the base has not.
        tied: whether the ends stay one tensor.
        dropped: names of the adapter's tensors of the output layer that equal those of the embedding.
        files: the config of the result.
        notes: messages for the plan.
    """

    embedding: KeyPath | None = None
    head: KeyPath | None = None
    added: TensorSpec | None = None
    tied: bool = True
    dropped: frozenset[str] = frozenset()
    files: Mapping[str, bytes] | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _End:
    """The tensors of an adapter for one end of the model: the embedding, or the output layer.

    Attributes:
        name: the name of the end's weight.
        parts: LoRA and rows.
        whole: the tensor that replaces the weight, if there is one.
    """

    name: str
    parts: AdaptedModule
    whole: KeyPath | None

    @property
    def is_changed(self) -> bool:
        return bool(self.parts.lora or self.parts.tokens or self.whole)


def settle_ends(base: Checkpoint, config: Mapping[str, Any], weights: BaseWeights, adapter: Adapter) -> Ends:
    """Decide how the tied ends of a model (embedding and output layer) are merged.

    Raises:
        UnrepresentableError: the ends differ in the result, and the base's class has no form with both; or the adapter
            states `ensure_weight_tying`, and they differ.
    """
    head = f"{_HEADS.get(str(config.get('model_type')), 'lm_head')}.weight"
    stored = weights.find(head)
    embeddings = [
        name
        for name, path in weights.names.items()
        if name.endswith(".weight") and name.split(".")[-2:-1] and name.split(".")[-2] in _EMBEDDINGS
        and path != stored
    ]  # fmt: skip
    touched = {weights.find(name) for name in adapter.names} - {None}
    of_embedding = [name for name in embeddings if weights.names[name] in touched]
    of_head = any(weights.is_name(name, head) for name in adapter.names)
    if not of_head and not of_embedding:
        return Ends()
    if not of_embedding and len(embeddings) != 1:
        return Ends()
    name = (of_embedding or embeddings)[0]
    path = weights.names[name]
    if not _is_tied(base, config, name, path, stored):
        return Ends()
    first = _end(name, adapter, lambda one: weights.find(one) == path)
    second = _end(head, adapter, lambda one: weights.is_name(one, head))
    plan = Ends(path, stored)
    if not second.is_changed and not first.whole and not first.parts.lora:
        return plan
    ends = (first, second)
    if first.is_changed and second.is_changed and _have_same_values(first, second, adapter):
        # Equal matrices make equal products of both ends, but the lengths of DoRA and some scales belong to one.
        scales = {adapter.scale(end.name.removesuffix(".weight"))[1] for end in ends if end.parts.lora}
        if len(scales) <= 1 and not any(MAGNITUDE in end.parts.lora for end in ends):
            return replace(plan, dropped=frozenset({head}))
    else:
        # PEFT tied what it added to the ends if it knows two names of them.
        words = {end.name.split(".")[-2] for end in ends if end.is_changed}
        if adapter.config.get("ensure_weight_tying") and not words.isdisjoint(_KNOWN_TO_PEFT):
            raise adapter.unfit(
                f"ensure_weight_tying is stated, but the adapter's tensors of {head} are not those of {name}"
            )
    return _untie(plan, first, second, config, weights, adapter)


def _is_tied(
    base: Checkpoint, config: Mapping[str, Any], name: str, path: KeyPath, stored: KeyPath | None
) -> bool:
    """Whether the output layer of the base is its embedding."""
    family = family_of_config(config)
    known = with_defaults(load_family(family).systems["huggingface"], config) if family else config
    text = config.get("text_config")
    stated = known.get(_TIED, text.get(_TIED) if isinstance(text, dict) else None)
    if stored is not None:
        return stated is True and _equal(base, path, stored)
    classes = config.get("architectures") or ()
    with_head = any(str(one).endswith(_WITH_HEAD) for one in classes) if classes else name.count(".") > 1
    return with_head and (config.get(_TIED) is not False)


def _end(name: str, adapter: Adapter, is_it: Callable[[str], bool]) -> _End:
    """The adapter's tensors for one end; a tensor below the matrices does not count as a replacement."""
    modules = [one for key, one in adapter.modules.items() if is_it(f"{plain(key)}.weight")]
    wholes = [path for key, path in adapter.whole.items() if is_it(key)]
    return _End(name, modules[0] if modules else AdaptedModule(), wholes[0] if wholes else None)


def _have_same_values(first: _End, second: _End, adapter: Adapter) -> bool:
    """Whether the adapter's tensors of both ends have the same values."""
    if first.parts.tokens or second.parts.tokens or bool(first.whole) != bool(second.whole):
        return False
    kinds = set(first.parts.lora) - {MAGNITUDE}, set(second.parts.lora) - {MAGNITUDE}
    if kinds not in ((set(), set()), (set(EMBEDDING), set(MATRICES))):
        return False
    checkpoint = adapter.checkpoint
    if first.whole and second.whole and not _equal(checkpoint, first.whole, second.whole):
        return False
    pairs = [(first.parts.lora["embedding_B"], second.parts.lora["A"]),
             (first.parts.lora["embedding_A"], second.parts.lora["B"])] if first.parts.lora else []  # fmt: skip
    return all((checkpoint.read(other) == checkpoint.read(one).T).all() for one, other in pairs)


def _equal(checkpoint: Checkpoint, first: KeyPath, second: KeyPath) -> bool:
    """Whether two matrices have the same bytes; they are read in pieces."""
    specs = [checkpoint.manifest.tensors[path] for path in (first, second)]
    if specs[0].shape != specs[1].shape or specs[0].dtype != specs[1].dtype:
        return False
    return all(
        checkpoint.read(first, region).tobytes() == checkpoint.read(second, region).tobytes()
        for region, _span in row_bands(specs[0], _BAND)
    )


def _untie(
    plan: Ends, first: _End, second: _End, config: Mapping[str, Any], weights: BaseWeights, adapter: Adapter
) -> Ends:
    """Two tensors for the two ends."""
    classes = [str(one) for one in config.get("architectures") or ()]
    fits = all(one.endswith(_UNTIED) for one in classes)
    if not fits or config.get("is_encoder_decoder") or isinstance(config.get("text_config"), dict):
        named = classes[0] if classes else "the base"
        raise adapter.unfit(
            f"the adapter changes {first.name} or the output layer that {named} ties to it, but not both alike, and "
            "untied models of this class are not supported"
        )
    assert plan.embedding is not None
    path, added = plan.head, None
    if path is None:
        last = plan.embedding[-1]
        inner = first.name if last.endswith(first.name) else ""
        path = (*plan.embedding[:-1], f"{last.removesuffix(inner)}{second.name}" if inner else second.name)
        added = replace(weights.tensors[plan.embedding], path=path)
        weights.add(second.name, added)
    changed = " and ".join(one.name for one in (first, second) if one.is_changed)
    what = f"the base ties {second.name} to {first.name}, but the adapter changes {changed} alone or apart"
    notes = [f"{what}: the result is untied, with both tensors and {_TIED} false"]
    if first.parts.lora or second.parts.lora:
        notes.append(
            "PEFT's merge_and_unload adds LoRA of a tied layer to both ends, which PEFT's model with the adapter does "
            "not compute; the result computes what the model with the adapter does"
        )
    files = {CONFIG: (json.dumps({**config, _TIED: False}, indent=2) + "\n").encode()} if config else None
    return replace(plan, head=path, added=added, tied=False, files=files, notes=tuple(notes))


def adapter_config(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """The config of an adapter; None if the checkpoint is not one.

    Raises:
        UsageError: it is not JSON.
    """
    return json_companion(checkpoint, ADAPTER)


def with_adapter(base: Checkpoint, adapter: Checkpoint, config: str | None = None) -> View:
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
    return merged_view(
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
        """Add the adapter's tensors of a module to the merge.

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
        if B_BIAS in parts.lora:
            # s times the bias of B is added to the module's own, which must exist.
            path, spec = self._find(f"{name}.bias"), self._adapter.spec(parts.lora[B_BIAS])
            self._adapter.require_shape(spec, self._weights.tensors[path].shape)
            _rank, scale = self._adapter.scale(name)
            terms = ((self._under(path, name), 1.0), (at(ADAPTED, parts.lora[B_BIAS]), scale))
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
        if parts.matrices == EMBEDDING or MAGNITUDE in parts.lora or B_BIAS in parts.lora:
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
