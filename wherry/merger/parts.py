"""Adapter: the tensors of a PEFT LoRA adapter, sorted by what they are; `wherry.merger.adapter` lists their names."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from wherry.errors import UnrepresentableError
from wherry.view.peft import DORA, START

if TYPE_CHECKING:
    from collections.abc import Mapping

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
    """

    checkpoint: Checkpoint
    config: Mapping[str, Any]
    modules: dict[str, AdaptedModule] = field(default_factory=dict[str, AdaptedModule])
    whole: dict[str, KeyPath] = field(default_factory=dict[str, "KeyPath"])
    below: dict[str, KeyPath] = field(default_factory=dict[str, "KeyPath"])

    @property
    def names(self) -> list[str]:
        """The names of the tensors that it changes, if each module has a weight."""
        return [*self.whole, *self.below, *(f"{plain(module)}.weight" for module in self.modules)]

    def spec(self, path: KeyPath) -> TensorSpec:
        """The spec of one of its tensors."""
        return self.checkpoint.manifest.tensors[path]

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

    Raises:
        UnrepresentableError: one is none that an adapter has, or a module lacks one of its tensors.
    """
    found = Adapter(checkpoint, config)
    for path in checkpoint.manifest.tensors:
        name = path[-1].removeprefix(START)
        lora = _LORA.fullmatch(name)
        if len(path) != 1 or not path[-1].startswith(START):
            raise found.unfit(f"{path[-1]} is no tensor of a LoRA adapter")
        if lora:
            found.modules.setdefault(lora[1], AdaptedModule()).lora[lora[2] or lora[3]] = path
        elif name.endswith(_TOKENS):
            found.modules.setdefault(name.removesuffix(_TOKENS), AdaptedModule()).tokens = path
        elif ".lora_" in name or "." not in name:
            raise found.unfit(f"{path[-1]} is no tensor of a LoRA adapter")
        elif _BASE_LAYER in name:
            found.below[plain(name)] = path
        else:
            found.whole[name] = path
    for module, parts in found.modules.items():
        if parts.lora:
            _require_whole(module, parts, found)
    return found


def _require_whole(module: str, parts: AdaptedModule, adapter: Adapter) -> None:
    """Compare the tensors of a module with those that the config implies."""
    dora = bool(adapter.config.get(DORA))
    wanted = {*parts.matrices, *([MAGNITUDE] if dora else [])}
    if not wanted <= set(parts.lora):
        raise adapter.unfit(f"{module} lacks one of its {'three tensors' if dora else 'two matrices'}")
    for name in sorted(set(parts.lora) - wanted - ({BIAS} if parts.matrices == MATRICES else set())):
        raise adapter.unfit(f"{parts.lora[name][-1]} is no matrix of a LoRA adapter")
