"""Adapter: the tensors of a PEFT LoRA adapter, sorted by what they are; `wherry.merger.adapter` lists their names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from wherry.errors import UnrepresentableError
from wherry.view.peft import DORA, PATTERNS, START, scale_of
from wherry.view.peft_patterns import ModulePatterns

if TYPE_CHECKING:
    from wherry.core.keypath import KeyPath
    from wherry.core.tensorspec import TensorSpec
    from wherry.formats.checkpoint import Checkpoint

MATRICES, EMBEDDING, BIAS, MAGNITUDE = (
    ("A", "B"),
    ("embedding_A", "embedding_B"),
    "B.bias",
    "magnitude_vector",
)
_LORA = re.compile(r"(.+)\.lora_(?:(embedding_[AB]|B\.bias|magnitude_vector)|([AB])\.weight)")
_TOKENS = ".token_adapter.trainable_tokens_delta"
_BASE_LAYER = ".base_layer"
_COPY = re.compile(r"\.(?:modules_to_save|original_module)\.")


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
        """What A and B are named."""
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
        config: its config, of which `wherry.view.peft.refusal` refused nothing.

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
        allowed = {*wanted, *([BIAS] if parts.matrices == MATRICES else [])}
        for name in sorted(set(parts.lora) - allowed):
            raise adapter.unfit(f"{parts.lora[name][-1]} is no matrix of a LoRA adapter")
