"""PEFT: a LoRA adapter as PEFT stores it: what `adapter_config.json` says, what of it is supported, and its tensors.

Facts: PEFT 0.21 (tuners/lora/config.py). The scale of B · A is alpha / rank, with `use_rslora` alpha / sqrt(rank).

`rank_pattern` and `alpha_pattern` are tables of regular expressions for the ends of the names of modules. PEFT
(tuners/tuners_utils.py of 0.21) takes the first pattern that the end of a name matches, from a dot on. A regular
expression of somebody else can run for ever, so that only simple ones are compiled: names, classes of characters, and
one group and one repetition at most, which need at most the square of a name's length.

`sorted_adapter` sorts the tensors by what they are; `merged_adapter` lists their names.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import field
from typing import TYPE_CHECKING, Any

from wherry.core.lazy_dataclass import dataclass
from wherry.errors import UnrepresentableError

if TYPE_CHECKING:
    from wherry.core.keypath import KeyPath
    from wherry.core.tensorspec import TensorSpec
    from wherry.formats.checkpoint import Checkpoint

LORA = "LORA"
START = "base_model.model."  # of the names of an adapter's tensors
SCALE = frozenset({"peft_type", "r", "lora_alpha", "use_rslora", "fan_in_fan_out"})
PATTERNS = frozenset({"rank_pattern", "alpha_pattern"})
DORA = "use_dora"
BIAS, TOKENS, PARAMETERS = "bias", "trainable_token_indices", "target_parameters"
TRAINED = frozenset(
    {BIAS, "lora_bias", TOKENS, PARAMETERS}
)  # what is trained besides the matrices of modules
# Fields that change no value: what was trained, and how.
_IGNORED = frozenset({
    "auto_mapping", "base_model_name_or_path", "ensure_weight_tying", "exclude_modules", "inference_mode",
    "layers_pattern", "layers_to_transform", "lora_dropout", "megatron_core", "modules_to_save", "peft_version",
    "revision", "runtime_config", "target_modules", "task_type", "qalora_group_size",
    "corda_config", "eva_config", "loftq_config", "lora_ga_config",  # of initialisations, which init_lora_weights names
})  # fmt: skip
_MOST_RANK = 1 << 31
_INITIALISATIONS = (None, True, False, "gaussian", "eva", "orthogonal")  # those that leave the base as it is
_NO_BIAS = (None, "none")
_BIASES = (*_NO_BIAS, "all", "lora_only")
_LARGEST = 2**63  # of an alpha
_ATOM = r"[\w\-/ ]|\.|\\[.dw\-]|\[\^?[\w\-]+\]"
_SIMPLE = re.compile(rf"\^?(?:(?:{_ATOM})(?:[*+?]|\{{\d{{1,4}}\}})?|\||\((?:\?:)?|\))+\$?")
_REPEATS = re.compile(r"(?<!\()[*+?{]")
_LONGEST = 1000  # characters of a pattern, and of a name that is compared with one
_MOST_COMPARISONS = 1_000_000
MATRICES, EMBEDDING = ("A", "B"), ("embedding_A", "embedding_B")
B_BIAS, MAGNITUDE = "B.bias", "magnitude_vector"
_LORA = re.compile(r"(.+)\.lora_(?:(embedding_[AB]|B\.bias|magnitude_vector)|([AB])\.weight)")
_TOKENS = ".token_adapter.trainable_tokens_delta"
_BASE_LAYER = ".base_layer"
_COPY = re.compile(r"\.(?:modules_to_save|original_module)\.")


def refusal(config: Mapping[str, Any], read: Collection[str]) -> str | None:
    """The field of an adapter's config that is not supported, with its value; None if all are supported.

    Args:
        config: `adapter_config.json`.
        read: the fields that the caller reads.
    """
    if config.get("peft_type") != LORA:
        return f"adapters of type {config.get('peft_type')} are not supported, only those of type {LORA}"
    if config.get("init_lora_weights") not in _INITIALISATIONS:
        return (
            f"init_lora_weights is {config['init_lora_weights']!r}, which changes the base: save the adapter with "
            "path_initial_model_for_weight_conversion, which PEFT converts to plain LoRA"
        )
    if config.get("bias") not in _BIASES:
        return f"bias is {config['bias']!r}, not one of none, all and lora_only"
    known = {*read, *_IGNORED, "init_lora_weights", *(["bias"] if config.get("bias") in _NO_BIAS else [])}
    stated = sorted(name for name, value in config.items() if name not in known and value)
    if stated:
        return f"{', '.join(f'{name} is {config[name]!r}' for name in stated)}, which is not supported"
    return _number_refusal(config, read)


def _number_refusal(config: Mapping[str, Any], read: Collection[str]) -> str | None:
    """The first rank or alpha that is not a valid number; None if all are valid."""
    tables = {name: config.get(name) for name in PATTERNS.intersection(read)}
    for name in sorted(tables):
        if reason := pattern_refusal(name, tables[name]):
            return reason
    ranks, alphas = (
        {whole: config.get(whole)}
        | {f"{name} of {key}": one for key, one in (tables.get(name) or {}).items()}
        for whole, name in (("r", "rank_pattern"), ("lora_alpha", "alpha_pattern"))
    )
    for name, value in ranks.items():
        if type(value) is not int or not 0 < value <= _MOST_RANK:
            return f"{name} is {value!r}, not a positive integer"
    for name, value in alphas.items():
        if not is_number(value):
            return f"{name} is {value!r}, not a number"
    return None


def is_number(value: Any) -> bool:
    """Whether a value can be the alpha of an adapter: finite, and of a size that floats have."""
    return type(value) in (int, float) and abs(value) < _LARGEST


def scale_of(config: Mapping[str, Any], rank: float, alpha: float) -> float:
    """The factor of B · A for a rank and an alpha."""
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def pattern_refusal(name: str, table: Any) -> str | None:
    """Why a table of patterns is not supported; None if it is.

    Args:
        name: of the table, for the message.
        table: the table, of any type.
    """
    if table is None:
        return None
    if not isinstance(table, dict):
        return f"{name} is {table!r}, not a table"
    for pattern in table:
        if not is_simple(pattern):
            return f"{name} has the regular expression {pattern[:_LONGEST]!r}, which is not supported"
    return None


def is_simple(pattern: str) -> bool:
    """Whether a regular expression is one that can be matched in little time."""
    if len(pattern) > _LONGEST or not _SIMPLE.fullmatch(pattern):
        return False
    if pattern.count("(") > 1 or re.search(r"\)[*+?{]", pattern) or len(_REPEATS.findall(pattern)) > 1:
        return False
    try:
        re.compile(pattern)
    except re.error:
        return False
    return True


class ModulePatterns:
    """One table of patterns, compiled."""

    def __init__(self, table: Mapping[str, Any] | None) -> None:
        """Compile the patterns, of which `pattern_refusal` refused none."""
        self._rows = [
            (re.compile(rf"(.*\.)?({pattern})$"), value) for pattern, value in (table or {}).items()
        ]
        self._left = _MOST_COMPARISONS

    def value(self, module: str, default: Any) -> Any:
        """The value of the first pattern that a module's name ends with.

        Raises:
            UnrepresentableError: the name is too long for a regular expression, or there are too many.
        """
        self._left -= len(self._rows)
        if self._rows and (len(module) > _LONGEST or self._left < 0):
            raise UnrepresentableError(
                "too many or too long names of modules for the patterns of adapter_config.json",
                path=module[:_LONGEST], cure="merge it with PEFT (merge_and_unload)",
            )  # fmt: skip
        return next((value for pattern, value in self._rows if pattern.match(module)), default)


@dataclass(slots=True)
class AdaptedModule:
    """The tensors of one module in an adapter: key paths.

    Attributes:
        lora: those of LoRA by the ends of their names: `A`, `B`, `embedding_A`, `embedding_B`, `B.bias`,
            `magnitude_vector`.
        tokens: the rows that replace some of an embedding.
    """

    lora: dict[str, KeyPath] = field(default_factory=dict[str, "KeyPath"])
    tokens: KeyPath | None = None

    @property
    def matrices(self) -> tuple[str, str]:
        """The names of A and B."""
        return EMBEDDING if EMBEDDING[0] in self.lora else MATRICES


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter, sorted by what its tensors are.

    Attributes:
        checkpoint: the adapter.
        config: `adapter_config.json`.
        modules: module → its tensors; several parameters of one module have `.base_layer` after its name.
        whole: name → the tensor that replaces the base's tensor of this name.
        below: name → the tensor that replaces the base's below the matrices of its module.
        copies: the key paths of tensors of modules that were trained whole, which `bias="all"` saves with the names of
            PEFT's wrapper; PEFT reads the tensors under the plain names.
        patterns: the tables of ranks and alphas of single modules.
    """

    checkpoint: Checkpoint
    config: Mapping[str, Any]
    modules: dict[str, AdaptedModule] = field(default_factory=dict[str, AdaptedModule])
    whole: dict[str, KeyPath] = field(default_factory=dict[str, "KeyPath"])
    below: dict[str, KeyPath] = field(default_factory=dict[str, "KeyPath"])
    copies: list[KeyPath] = field(default_factory=list["KeyPath"])
    patterns: Mapping[str, ModulePatterns] = field(default_factory=dict[str, ModulePatterns])

    @property
    def names(self) -> list[str]:
        """The names of the tensors that it changes, if each module has a weight."""
        return [*self.whole, *self.below, *(f"{plain(module)}.weight" for module in self.modules)]

    def spec(self, path: KeyPath) -> TensorSpec:
        """The spec of one of its tensors."""
        return self.checkpoint.manifest.tensors[path]

    def scale(self, name: str) -> tuple[int, float]:
        """The rank of a module or parameter, and the factor of its product."""
        rank = self.patterns["rank_pattern"].value(name, self.config["r"])
        alpha = self.patterns["alpha_pattern"].value(name, self.config["lora_alpha"])
        return rank, scale_of(self.config, rank, alpha)

    def unfit(self, what: str) -> UnrepresentableError:
        """The error of an adapter that does not fit its base, or is not supported."""
        return UnrepresentableError(
            what,
            uri=self.checkpoint.uri,
            cure="merge it with PEFT (merge_and_unload), or pass the adapter's own base",
        )

    def require_shape(self, spec: TensorSpec, shape: tuple[int, ...]) -> None:
        """Compare the shape of one of its tensors.

        Raises:
            UnrepresentableError: it differs.
        """
        if spec.shape != shape:
            raise self.unfit(
                f"{spec.name} is {list(spec.shape)}, but the base and the config need {list(shape)}"
            )


def plain(module: str) -> str:
    """The name of a module without the words of the layers that PEFT puts around it."""
    return module.replace(_BASE_LAYER, "")


def sorted_adapter(checkpoint: Checkpoint, config: Mapping[str, Any]) -> Adapter:
    """Sort the tensors of an adapter.

    Args:
        checkpoint: the adapter.
        config: its config, of which `wherry.transform.peft.refusal` refused nothing.

    Raises:
        UnrepresentableError: one is none that an adapter has, or a module lacks one of its tensors.
    """
    patterns = {name: ModulePatterns(config.get(name)) for name in PATTERNS}
    found = Adapter(checkpoint, config, patterns=patterns)
    for path in checkpoint.manifest.tensors:
        name = path[-1].removeprefix(START)
        lora = _LORA.fullmatch(name)
        if len(path) != 1 or not path[-1].startswith(START):
            raise found.unfit(f"{path[-1]} is no tensor of a LoRA adapter")
        if lora:
            found.modules.setdefault(lora[1], AdaptedModule()).lora[lora[2] or lora[3]] = path
        elif name.endswith(_TOKENS):
            found.modules.setdefault(name.removesuffix(_TOKENS), AdaptedModule()).tokens = path
        elif _COPY.search(name):
            found.copies.append(path)
        elif ".lora_" in name or "." not in name:
            raise found.unfit(f"{path[-1]} is no tensor of a LoRA adapter")
        elif _BASE_LAYER in name:
            found.below[plain(name)] = path
        else:
            found.whole[name] = path
    _require_whole(found)
    return found


def _require_whole(adapter: Adapter) -> None:
    """Compare the tensors of each module with those that the config and the names imply."""
    for path in adapter.copies:
        if _COPY.sub(".", path[-1].removeprefix(START)) not in adapter.whole:
            raise adapter.unfit(
                f"{path[-1]} belongs to a module that was trained whole, which the adapter lacks"
            )
    dora = bool(adapter.config.get(DORA))
    for module, parts in adapter.modules.items():
        wanted = {*parts.matrices, *([MAGNITUDE] if dora else [])}
        if parts.lora and not wanted <= set(parts.lora):
            raise adapter.unfit(f"{module} lacks one of its {'three tensors' if dora else 'two matrices'}")
        allowed = {*wanted, *([B_BIAS] if parts.matrices == MATRICES else [])}
        for name in sorted(set(parts.lora) - allowed):
            raise adapter.unfit(f"{parts.lora[name][-1]} is no matrix of a LoRA adapter")
