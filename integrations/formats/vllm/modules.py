"""How the modules of vLLM's tensor-parallel ranks hold a model, from its config; `modules.toml` has the rules.

Parameters of several tensors are one of each rank, so a rank holds the query, key and value rows of its heads in one.
What is not in the rules is refused: vLLM requires every name that a module has, and knows no other.
"""

from __future__ import annotations

import re
import struct
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from wherry.core.account import OTHERS, IgnoredEntry
from wherry.core.keypath import KeyPath, render
from wherry.core.lazy_dataclass import dataclass
from wherry.core.tensorspec import TensorSpec
from wherry.cures import Argument, Cure
from wherry.errors import IncompleteError, MismatchError, UnrepresentableError
from wherry.transform.regroup import RegroupedTensor, SourceRegion

_RULES = Path(__file__).with_name("modules.toml")
_LAYER = "model.layers.{}."
_PAD = 64  # rows, to a multiple of which vLLM pads the vocabulary
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_NUMBER = re.compile(r"\.\d+\.")
_OWN_CONFIG = "put the model's own config.json next to its weights"
_SIZES = ("num_hidden_layers", "num_attention_heads", "hidden_size")


@dataclass(frozen=True, slots=True)
class Model:
    """What a config says of the modules.

    Attributes:
        layers, heads, groups: numbers of decoder layers, query heads and key/value heads.
        head: elements of a head.
        tied: whether the config says that the head is the embedding.
        optional: the parameters that not all models have → whether this one has them.
        architecture: vLLM's class.
    """

    layers: int
    heads: int
    groups: int
    head: int
    tied: bool
    optional: Mapping[str, bool]
    architecture: str


@dataclass(frozen=True, slots=True)
class RankShare:
    """A tensor's rows or columns that a rank holds.

    Attributes:
        name: of the tensor.
        axis: the axis that is divided; None if the rank holds all of it.
        start, stop: what the rank holds of the axis.
        padded: rows of the rank's tensor, zeros included.
        copies: how many ranks hold the same.
    """

    name: str
    axis: int | None
    start: int
    stop: int
    padded: int
    copies: int


def read_model(config: Mapping[str, Any], uri: str) -> Model:
    """The model of a config.

    Args:
        config: of Hugging Face.
        uri: of the checkpoint, for errors.

    Raises:
        UnrepresentableError: no rule is known for the model, or it is quantised.
        MismatchError: the config does not state the sizes of the model.
    """
    rules, kind = _rules(), str(config.get("model_type"))
    row = rules["models"].get(kind, {"class": "", "refused": ()})
    stated = config.get("architectures") or row["class"]
    classes = stated if isinstance(stated, list) else [stated]
    changed = next((f"that has {name}" for name in row["refused"] if config.get(name)), None)
    if not row["class"] or classes != [row["class"]] or changed:
        named = f"of the class {' '.join(map(str, classes))}" if row["class"] else f"of the type {kind!r}"
        raise UnrepresentableError(
            f"no rule divides a model {changed or named} among vLLM's ranks", uri=uri,
            cure=Cure(
                "choose another target, such as {}; vllm-sharded is written for {}",
                Argument("to", "huggingface"),
                ", ".join(one["class"] for one in rules["models"].values()),
            ),
        )  # fmt: skip
    if config.get("quantization_config") is not None:
        raise UnrepresentableError(
            "the weights are quantised; vllm-sharded is written for plain weights", uri=uri,
            cure=Cure("add {}", Argument("set", "dequantize=bfloat16")),
        )  # fmt: skip
    sizes = [config.get(name) for name in _SIZES]
    layers, heads, width = (one if type(one) is int and one > 0 else 0 for one in sizes)
    groups = config.get("num_key_value_heads") or heads
    head = config.get("head_dim") or (width // heads if heads else 0)
    if not (layers and heads) or type(groups) is not int or type(head) is not int or min(groups, head) < 1:
        raise MismatchError(
            f"the config does not state {', '.join(_SIZES)} as whole numbers", uri=uri, cure=_OWN_CONFIG
        )
    optional = {
        name: bool(config.get(has)) if isinstance(has, str) else has for name, has in row["optional"].items()
    }
    return Model(layers, heads, groups, head, bool(config.get("tie_word_embeddings")), optional, row["class"])


def path_of(rank: int, ranks: int, name: str) -> KeyPath:
    """The key path of a tensor of a rank: its number and the name, or the name alone where there is one rank."""
    return (name,) if ranks == 1 else (str(rank), name)


@cache
def _rules() -> dict[str, Any]:
    return tomllib.loads(_RULES.read_text(encoding="utf-8"))


def constants(model: Model) -> dict[str, bytes]:
    """The buffers of a rank's modules that no tensor of the source holds: name → a float32."""
    return {
        name.format(layer): struct.pack("<f", value)
        for name, value in _rules()["constants"].items()
        for layer in range(model.layers)
    }


def _parameters(model: Model) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """The parameters of a rank's modules, each with the tensors that it is made of, and their rules."""
    for name, parts in _rules()["parameters"].items():
        if not model.optional.get(name.removeprefix(_LAYER), True):
            continue
        for layer in range(model.layers if "{}" in name else 1):
            yield name.format(layer), [(one.format(layer), rule) for one, rule in parts]


def _share(model: Model, spec: TensorSpec, rule: str, rank: int, ranks: int, uri: str) -> RankShare:
    """What a rank holds of a tensor."""
    name, rows = spec.path[-1], spec.shape[0] if spec.shape else 0
    if rule == "whole":
        return RankShare(name, None, 0, rows, rows, ranks)
    axis = 1 if rule == "columns" else 0
    if len(spec.shape) <= axis:
        raise MismatchError(
            f"expected {axis + 1} or more dimensions, got {len(spec.shape)}", uri=uri, path=spec.name,
            cure="restore the tensor from a backup",
        )  # fmt: skip
    size = spec.shape[axis]
    if rule == "vocab":
        padded = -(-size // _PAD) * _PAD
        share = _divide(padded, ranks, "rows of the padded vocabulary", uri)
        return RankShare(name, 0, min(rank * share, size), min((rank + 1) * share, size), share, 1)
    if rule in ("rows", "columns"):
        share = _divide(size, ranks, f"{rule} of {spec.name}", uri)
        return RankShare(name, axis, rank * share, (rank + 1) * share, share, 1)
    heads = model.heads if rule == "heads" else model.groups
    if size != heads * model.head:
        raise MismatchError(
            f"the config states {heads} heads of {model.head} elements, but the tensor has {size} rows", uri=uri,
            path=spec.name, cure=_OWN_CONFIG,
        )  # fmt: skip
    if rule == "groups" and heads < ranks:
        copies = _divide(ranks, heads, "ranks", uri, by="key/value heads")
        start = rank // copies * model.head
        return RankShare(name, 0, start, start + model.head, model.head, copies)
    share = _divide(heads, ranks, "query heads" if rule == "heads" else "key/value heads", uri) * model.head
    return RankShare(name, 0, rank * share, (rank + 1) * share, share, 1)


def _divide(number: int, ranks: int, what: str, uri: str, by: str = "ranks") -> int:
    if number % ranks:
        raise UnrepresentableError(
            f"{number} {what} cannot be divided among {ranks} {by}, as vLLM requires", uri=uri,
            cure=Cure("choose another number of ranks, for example {}", Argument("set", "tp=1")),
        )  # fmt: skip
    return number // ranks


@dataclass(frozen=True, slots=True)
class RankTensors:
    """Tensors that are put together of another checkpoint's.

    Attributes:
        grouped: by key path.
        constants: key path → a number, of tensors that only ranks have.
        left: tensors that have no place.
    """

    grouped: Mapping[KeyPath, RegroupedTensor]
    constants: Mapping[KeyPath, bytes]
    left: tuple[IgnoredEntry, ...] = ()


def divide(tensors: Mapping[KeyPath, TensorSpec], model: Model, ranks: int, uri: str) -> RankTensors:
    """The tensors of each rank's module, from those of a Hugging Face folder.

    Args:
        tensors: of the folder.
        model: of the config.
        ranks: their number.
        uri: of the folder, for errors.

    Raises:
        UnrepresentableError: a tensor cannot be divided among so many ranks.
        IncompleteError: a tensor is missing.
        MismatchError: a tensor has not the shape that the config states.
    """
    used, found = set[KeyPath](), dict[KeyPath, RegroupedTensor]()
    for name, parts in _parameters(model):
        sources = [_find(tensors, one, model, uri) for one, _rule in parts]
        used.update(spec.path for spec in sources)
        kinds = {spec.dtype for spec in sources}
        if len(kinds) > 1:
            raise UnrepresentableError(
                f"{name} is one tensor of vLLM, but its parts have the element types {', '.join(sorted(kinds))}",
                uri=uri, path=sources[0].name, cure=Cure("choose one with {}", Argument("dtype", "bfloat16")),
            )  # fmt: skip
        for rank in range(ranks):
            shares = [
                _share(model, spec, rule, rank, ranks, uri)
                for spec, (_name, rule) in zip(sources, parts, strict=True)
            ]
            path = path_of(rank, ranks, name)
            found[path] = _joined_tensor(path, sources, shares)
    scalars = {
        path_of(rank, ranks, name): data for rank in range(ranks) for name, data in constants(model).items()
    }
    no_place = f"vLLM's {model.architecture} of this config has no place for it"
    left = {
        path: _rules()["left"].get(_NUMBER.sub(".{}.", render(path))) for path in tensors if path not in used
    }
    entries = [IgnoredEntry(path, OTHERS, why or no_place, weights=why is None) for path, why in left.items()]
    return RankTensors(found, scalars, tuple(entries))


def _find(tensors: Mapping[KeyPath, TensorSpec], name: str, model: Model, uri: str) -> TensorSpec:
    """A tensor of the folder; the embedding, if the head is tied to it."""
    spec = tensors.get((name,))
    if spec is None and name == _HEAD and model.tied:
        spec = tensors.get((_EMBEDDING,))
    if spec is None:
        raise IncompleteError(
            f"missing tensor {name}, which vLLM's {model.architecture} of this config has", uri=uri, path=name,
            cure=f"restore it, or {_OWN_CONFIG}",
        )  # fmt: skip
    return spec


def _joined_tensor(path: KeyPath, sources: list[TensorSpec], shares: list[RankShare]) -> RegroupedTensor:
    """A rank's tensor, of its shares of the sources."""
    first, axis = sources[0], shares[0].axis or 0
    shape = list(first.shape)
    if shape:
        shape[axis] = sum(one.padded for one in shares)
    parts = tuple(
        SourceRegion((spec.path,), _region(spec.shape, one.axis, one.start, one.stop))
        for spec, one in zip(sources, shares, strict=True)
    )
    return RegroupedTensor(TensorSpec(path, tuple(shape), first.dtype), parts, axis)


def _region(shape: tuple[int, ...], axis: int | None, start: int, stop: int) -> tuple[slice, ...]:
    return tuple(slice(start, stop) if at == axis else slice(0, extent) for at, extent in enumerate(shape))


def unite(
    tensors: Mapping[KeyPath, TensorSpec], model: Model, vocabulary: int, ranks: int, uri: str
) -> RankTensors:
    """The tensors of a Hugging Face folder, from those of each rank's module.

    Args:
        tensors: of all ranks.
        model: of the config.
        vocabulary: rows of the embedding without padding.
        ranks: their number.
        uri: of the rank files, for errors.

    Raises:
        UnrepresentableError, IncompleteError, MismatchError: the tensors are not those of the model in so many ranks.
    """
    found, expected = dict[KeyPath, RegroupedTensor](), set[KeyPath]()
    for name, parts in _parameters(model):
        held = [tensors.get(path_of(rank, ranks, name)) for rank in range(ranks)]
        if model.tied and name in (_HEAD, _EMBEDDING) and not any(held):
            continue  # vLLM saves tied embeddings once
        first = held[0]
        if first is None or any(
            one is None or (one.shape, one.dtype) != (first.shape, first.dtype) for one in held
        ):
            raise IncompleteError(
                f"missing tensor {name} of a rank, or one of another shape than that of rank 0", uri=uri, path=name,
                cure="restore the files of all ranks",
            )  # fmt: skip
        expected.update(path_of(rank, ranks, name) for rank in range(ranks))
        whole = _whole_specs(model, first, parts, vocabulary, ranks, uri)
        taken = [
            [
                _share(model, spec, rule, rank, ranks, uri)
                for spec, (_name, rule) in zip(whole, parts, strict=True)
            ]
            for rank in range(ranks)
        ]
        before = 0
        for number, spec in enumerate(whole):
            shares = [row[number] for row in taken]
            found[spec.path] = _united_tensor(spec, name, shares, before, first)
            before += shares[0].padded
    if (_EMBEDDING,) not in found:  # of two names of one tensor vLLM keeps the first
        if (_HEAD,) not in found:
            raise IncompleteError(
                f"missing tensor {_HEAD} of every rank",
                uri=uri,
                path=_HEAD,
                cure="restore the files of all ranks",
            )
        whole = found.pop((_HEAD,))
        path = (_EMBEDDING,)
        found[path] = RegroupedTensor(
            TensorSpec(path, whole.spec.shape, whole.spec.dtype), whole.parts, whole.axis
        )
    scalars = {path_of(rank, ranks, name) for rank in range(ranks) for name in constants(model)}
    unknown = next(
        (spec for path, spec in tensors.items() if path not in expected and path not in scalars), None
    )
    if unknown is not None:
        raise UnrepresentableError(
            f"{unknown.name} is no parameter of vLLM's {model.architecture} of this config", uri=uri, path=unknown.name,
            cure="choose a target that holds any tree, such as orbax",
        )  # fmt: skip
    reason = "a scale of vLLM's cache, which is no weight of the model"
    entries = [IgnoredEntry(path, OTHERS, reason) for path in tensors if path in scalars]
    return RankTensors(found, {}, tuple(entries))


def _whole_specs(
    model: Model, first: TensorSpec, parts: list[tuple[str, str]], vocabulary: int, ranks: int, uri: str
) -> list[TensorSpec]:
    """The whole tensors of which a rank's tensor holds shares."""
    rules = [rule for _name, rule in parts]
    axis = 1 if rules[0] == "columns" else 0
    if rules[0] != "whole" and len(first.shape) <= axis:
        raise MismatchError(
            f"expected {axis + 1} or more dimensions, got {len(first.shape)}", uri=uri, path=first.name,
            cure="restore the files of all ranks",
        )  # fmt: skip
    sizes = {"heads": model.heads * model.head, "groups": model.groups * model.head, "vocab": vocabulary}
    found: list[TensorSpec] = []
    for name, rule in parts:
        shape = list(first.shape)
        if rule != "whole":
            shape[axis] = sizes.get(rule, first.shape[axis] // len(parts) * ranks)
        found.append(TensorSpec((name,), tuple(shape), first.dtype))
    shares = [_share(model, spec, rule, 0, ranks, uri) for spec, rule in zip(found, rules, strict=True)]
    held = sum(one.padded for one in shares)
    if rules[0] != "whole" and held != first.shape[axis]:
        raise MismatchError(
            f"the config means {held} elements of axis {axis} in each of {ranks} ranks, but there are "
            f"{first.shape[axis]}",
            uri=uri, path=first.name, cure="restore the config that vLLM saved next to the files",
        )  # fmt: skip
    return found


def _united_tensor(
    spec: TensorSpec, name: str, shares: list[RankShare], before: int, first: TensorSpec
) -> RegroupedTensor:
    """A whole tensor, of the ranks' shares of it; of copies that several ranks hold, all are compared."""
    copies, axis = shares[0].copies, shares[0].axis
    parts: list[SourceRegion] = []
    for rank in range(0, len(shares), copies):
        share = shares[rank]
        sources = tuple(path_of(one, len(shares), name) for one in range(rank, rank + copies))
        held = before + share.stop - share.start
        if share.start < share.stop or axis is None:
            parts.append(SourceRegion(sources, _region(first.shape, axis, before, held)))
    return RegroupedTensor(spec, tuple(parts), axis or 0)
