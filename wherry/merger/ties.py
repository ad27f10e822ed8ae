"""Ends: what becomes of an output layer that is tied to the embedding, if an adapter changes one of them.

transformers stores one tensor for both. PEFT's model with the adapter changes the ends apart from each other: LoRA and
a whole module (`modules_to_save`) belong to one end. So the result is untied, with a tensor of its own for the output
layer, unless

    both ends get equal tensors        as `ensure_weight_tying` has it: one tensor is both
    only rows of the embedding change  `trainable_token_indices` of the embedding are those of the output layer too
    a tensor below the matrices        `base_layer.weight` of either end is that of both

PEFT's `merge_and_unload` adds the product of a LoRA of either end to the one tensor, and so to both, which its model
with the adapter does not compute; PEFT warns of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from wherry.core.keypath import KeyPath
from wherry.core.tensorspec import TensorSpec
from wherry.families import family_of_config, load_family
from wherry.families.facts import with_defaults
from wherry.merger.parts import EMBEDDING, MAGNITUDE, MATRICES, AdaptedModule, Adapter, plain
from wherry.view.model import CONFIG

if TYPE_CHECKING:
    from wherry.formats.checkpoint import Checkpoint
    from wherry.merger.base import BaseWeights

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
    """What an adapter has for one end.

    Attributes:
        name: of its weight.
        parts: LoRA and rows.
        whole: a tensor of its own.
    """

    name: str
    parts: AdaptedModule
    whole: KeyPath | None

    @property
    def is_changed(self) -> bool:
        return bool(self.parts.lora or self.parts.tokens or self.whole)


def settle_ends(base: Checkpoint, config: Mapping[str, Any], weights: BaseWeights, adapter: Adapter) -> Ends:
    """Decide what becomes of tied ends.

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
    """What the adapter has for one end; a tensor below the matrices is none of its own."""
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
    rows, width = specs[0].shape[0], max(specs[0].nbytes // max(specs[0].shape[0], 1), 1)
    step, rest = max(_BAND // width, 1), tuple(slice(0, extent) for extent in specs[0].shape[1:])
    regions = [(slice(start, min(start + step, rows)), *rest) for start in range(0, rows, step)]
    return all(
        checkpoint.read(first, region).tobytes() == checkpoint.read(second, region).tobytes()
        for region in regions
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
