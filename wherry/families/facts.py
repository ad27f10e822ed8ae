"""Facts: the sizes and facts that a config states. An attribute that is neither declared nor ignored is an error."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from wherry.errors import UnrepresentableError, UsageError
from wherry.layout.expr import Read, evaluate, names_in

if TYPE_CHECKING:
    from collections.abc import Mapping

    from wherry.families.schema import System

_HUGGINGFACE = "huggingface"
# What `to_dict()` of every transformers config states and a saved `config.json` leaves out. These serve generation,
# labels, tokenizers, tracing, and the form of what a call returns, so no value of theirs changes a logit.
_OF_EVERY_CONFIG = frozenset({
    "_attn_implementation", "_attn_implementation_autoset", "_commit_hash", "_name_or_path", "architectures",
    "attn_implementation", "bad_words_ids", "begin_suppress_tokens", "bos_token_id", "chunk_size_feed_forward",
    "decoder_start_token_id", "diversity_penalty", "do_sample", "dtype", "early_stopping",
    "encoder_no_repeat_ngram_size", "eos_token_id", "exponential_decay_length_penalty", "finetuning_task",
    "forced_bos_token_id", "forced_eos_token_id", "id2label", "is_decoder", "label2id", "length_penalty",
    "max_length", "min_length", "no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_return_sequences",
    "output_attentions", "output_hidden_states", "output_scores", "pad_token_id", "prefix", "problem_type",
    "remove_invalid_values", "repetition_penalty", "return_dict", "return_dict_in_generate", "sep_token_id",
    "suppress_tokens", "task_specific_params", "temperature", "tf_legacy_loss", "tokenizer_class", "top_k",
    "top_p", "torch_dtype", "torchscript", "transformers_version", "typical_p", "use_bfloat16", "use_cache",
})  # fmt: skip
# The same, where only the default leaves the model as it is.
_DEFAULTS: Mapping[str, Any] = {
    "add_cross_attention": False,
    "cross_attention_hidden_size": None,
    "is_encoder_decoder": False,
    "pruned_heads": {},
    "tie_encoder_decoder": False,
}


@dataclass(frozen=True, slots=True)
class ConfigFacts:
    """The sizes and facts that a config states.

    Attributes:
        config: its attributes; empty if there is no config.
        source: its name, for messages.
        sizes: axis → extent.
        facts: other properties of the model that both systems must know.
    """

    config: Mapping[str, Any] = field(default_factory=dict[str, Any])
    source: str = "no config"
    sizes: Mapping[str, int] = field(default_factory=dict[str, int])
    facts: Mapping[str, Any] = field(default_factory=dict[str, Any])


def tell(system: System, config: Mapping[str, Any] | None, source: str = "the config") -> ConfigFacts:
    """Read a system's config.

    Raises:
        UnrepresentableError: an attribute is unknown, or has a value that no layout of this family supports.
        UsageError: a size is not an integer.
    """
    if config is None:
        return ConfigFacts()
    table = config.get(system.config.table) if system.config.table is not None else None
    attributes: Mapping[str, Any] = config if table is None else table
    read = Read(attributes)
    sizes = {
        axis: value
        for axis, text in system.config.sizes.items()
        if (value := _size(read, axis, text, source)) is not None
    }
    facts = {name: value for name, text in system.config.facts.items() if (value := read(text)) is not None}
    for rule, reason in system.config.require:
        if read(rule) is False:
            raise UnrepresentableError(
                f"{source}: {reason}", cure=f"choose another family or model; these layouts require {rule}"
            )
    for text in system.config.implied.values():
        read.asked |= names_in(text)
    for one in (*system.conventions.values(), *system.forms.values()):
        if one.config:
            read(one.config)
    unknown = sorted(set(attributes) - read.asked - system.config.ignored - _common(system, attributes))
    if unknown:
        raise UnrepresentableError(
            f"unknown attributes in {source}: {', '.join(unknown)}",
            cure="declare them in a --family-file: as sizes or facts, or as ignored if they do not concern the weights",
        )
    return ConfigFacts(attributes, source, sizes, facts)


def _common(system: System, attributes: Mapping[str, Any]) -> set[str]:
    """The attributes of every transformers config that leave the model as it is."""
    if _HUGGINGFACE not in (system.name, system.like):
        return set()
    usual = {name for name, value in _DEFAULTS.items() if attributes.get(name, ...) in (value, None)}
    return {*_OF_EVERY_CONFIG, *usual}


def _size(read: Read, axis: str, text: str, source: str) -> int | None:
    value = read(text)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
        raise UsageError(
            f"{source}: invalid size of axis {axis}: {value!r} from {text}; expected an integer of at least 0",
            cure="correct the config",
        )
    return value


def forms_told(system: System, told: ConfigFacts) -> dict[str, str]:
    """The forms that the config states."""
    return {
        name: _word(value)
        for name, form in system.forms.items()
        if form.config and (value := evaluate(form.config, told.config)) is not None
    }


def conventions_of(
    system: System, given: Mapping[str, str], told: ConfigFacts, facts: Mapping[str, Any], *, alike: bool
) -> dict[str, str]:
    """A choice for each of a system's conventions.

    Args:
        system: the system.
        given: the choices of the user.
        told: sizes and facts from this system's config.
        facts: facts from the other system's config.
        alike: whether both sides are this system, so that the choices cancel.

    Raises:
        UsageError: a convention is not stated, or its value is not one of the choices.
    """
    chosen: dict[str, str] = {}
    for name, one in system.conventions.items():
        value = given.get(name)
        if value is None and one.config:
            value = evaluate(one.config, told.config)
        if value is None and one.facts:
            value = evaluate(one.facts, facts)
        value = _word(value) if value is not None else one.default or (one.choices[0] if alike else None)
        if value is None:
            raise UsageError(
                f"{system.name} does not store {one.why}, and neither the options nor a config state it",
                cure=f"state it with --set {name}={'|'.join(one.choices)}, or pass the model's config with --config",
            )
        if value not in one.choices:
            raise UsageError(
                f"invalid value for option {name}: {value!r}", cure=f"choose {' or '.join(one.choices)}"
            )
        chosen[name] = value
    return chosen


def require_both_accept(one: System, other: System, told: ConfigFacts) -> None:
    """Check that a target can hold the model of a source's config, and a source that has another system's config too.

    Raises:
        UnrepresentableError: one of them cannot; the system states the reason.
    """
    said = {**told.sizes, **told.facts}
    require_accepted(other, said)
    if one.like and one is not other:
        require_accepted(one, said, told.source)


def require_accepted(system: System, facts: Mapping[str, Any], source: str | None = None) -> None:
    """Check that a target system can hold a model with these facts.

    Args:
        system: the system.
        facts: of the source's config.
        source: the name of the config, if this is the source's own system: its software ignores what the config says
            beyond what the system holds, so it computed another model.

    Raises:
        UnrepresentableError: it cannot; the system states the reason.
    """
    for rule, reason in system.accepts:
        if evaluate(rule, facts) is False:
            words = reason.format_map({name: facts.get(name) for name in names_in(rule)})
            if source:
                raise UnrepresentableError(
                    f"{source} states another model than {system.name} computes: {words}",
                    cure="correct the config to the model that was trained, or pass that config with --config",
                )
            raise UnrepresentableError(
                f"{system.name} cannot hold this model: {words}",
                cure="choose another target, or keep the tree in a container with --to orbax",
            )


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
