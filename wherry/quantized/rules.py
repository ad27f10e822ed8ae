"""rules: which tensors of a plain Hugging Face checkpoint `quantize` turns into codes and scales, and their shapes.

A scheme's `written` table decides by names and ranks alone. A checkpoint whose scales were kept has the codes, scales
and config of the one that keeps them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from wherry.core.keypath import KeyPath
from wherry.core.tensorspec import TensorSpec
from wherry.errors import MismatchError, UnrepresentableError, UsageError
from wherry.quantized.codes import code_bits
from wherry.quantized.schemes import Scheme, WriteRule, schemes
from wherry.quantized.tensors import QuantizedTensor, QuantizedTensors

_FLOATS = ("bfloat16", "float16", "float32")
_WORDS = {"int32": 32, "uint8": 8}


def written_scheme(name: str) -> Scheme:
    """The scheme of a name that `quantize` accepts.

    Raises:
        UsageError: there is none, or wherry does not write it.
    """
    known = {one.name: one for one in schemes() if one.written}
    if name not in known:
        raise UsageError(f"cannot quantise to {name!r}", cure=f"choose one of {', '.join(known)}")
    return known[name]


def quantised_by(
    tensors: Mapping[KeyPath, TensorSpec], scheme: Scheme, uri: str
) -> dict[KeyPath, QuantizedTensor]:
    """The tensors that a scheme quantises, by their plain key path.

    Raises:
        UnrepresentableError: no tensor can be quantised with the scheme.
    """
    assert scheme.written is not None
    found = {
        path: _make_tensor(spec, scheme, scheme.written)
        for path, spec in tensors.items()
        if _is_chosen(spec, scheme.written)
    }
    if not found:
        raise UnrepresentableError(
            f"no tensor can be quantised with {scheme.name}: {scheme.written.about}", uri=uri
        )
    return found


def quantised_like(
    tensors: Mapping[KeyPath, TensorSpec], kept: QuantizedTensors, uri: str
) -> dict[KeyPath, QuantizedTensor]:
    """The tensors whose scales another checkpoint keeps, by their plain key path.

    Raises:
        MismatchError: a tensor is missing, or of another shape than the codes that its scales belong to.
        UnrepresentableError: the codes have zero points, which are not written.
    """
    for path, one in kept.quantized.items():
        if one.zeros is not None:
            raise UnrepresentableError(
                f"the kept scales have zero points, {one.zeros.name}: asymmetric codes are read, not written",
                uri=uri, path=one.plain.name, cure="leave scales out, and new ones are computed",
            )  # fmt: skip
        if path not in tensors or tensors[path].shape != one.plain.shape:
            found = tensors[path].shape if path in tensors else "missing"
            raise MismatchError(
                f"kept scales are of a tensor of shape {one.plain.shape}, which is {found} here",
                uri=uri, path=one.plain.name, cure="name the checkpoint that this one was dequantised from",
            )  # fmt: skip
    return {path: replace(one, plain=tensors[path]) for path, one in kept.quantized.items()}


def config_of_codes(
    scheme: Scheme, tensors: Mapping[KeyPath, TensorSpec], found: Mapping[KeyPath, QuantizedTensor]
) -> dict[str, Any]:
    """The `quantization_config` of a checkpoint, with the modules that stay plain."""
    assert scheme.written is not None
    plain = sorted(
        path[-1].removesuffix(".weight")
        for path, spec in tensors.items()
        if path not in found and len(spec.shape) > 1 and path[-1].endswith(".weight")
    )
    return {**scheme.written.config, scheme.written.modules: plain}


def _is_chosen(spec: TensorSpec, rule: WriteRule) -> bool:
    name = spec.path[-1]
    return (
        len(spec.path) == 1
        and len(spec.shape) == rule.rank
        and spec.dtype in _FLOATS
        and re.search(rule.tensors, name) is not None
        and not any(part in name for part in rule.plain)
        and (rule.ragged or spec.shape[-2 if rule.rank > 2 else -1] % rule.block[1] == 0)  # noqa: PLR2004
    )


def _make_tensor(spec: TensorSpec, scheme: Scheme, rule: WriteRule) -> QuantizedTensor:
    stem = spec.path[0] if "{name}" in scheme.plain else spec.path[0].removesuffix(".weight")

    def named(template: str) -> KeyPath:
        return (template.replace("{name}", stem).replace("{module}", stem),)

    shape = (*spec.shape[:-2], spec.shape[-1], spec.shape[-2]) if scheme.transposed else spec.shape
    block = (*(1,) * (len(shape) - 2), *rule.block)
    grid = tuple(-(-extent // size) for extent, size in zip(shape, block, strict=True))
    unit = _WORDS.get(rule.dtype, 8) // code_bits(rule.code)
    codes, width = (*shape[:-1], shape[-1] // unit), unit
    if scheme.blocked:
        codes, width = (*shape[:-1], grid[-1], rule.block[1] // unit), rule.block[1]
    stated = TensorSpec(named(scheme.shape), (len(shape),), "int64") if scheme.shape else None
    return QuantizedTensor(
        spec, TensorSpec(named(scheme.values), codes, rule.dtype),
        TensorSpec(named(scheme.scales[0]), grid, rule.scales),
        rule.code, shape, grid, block, width, scheme.transposed, stated,
    )  # fmt: skip


def quantized_specs(
    tensors: Mapping[KeyPath, TensorSpec], found: Mapping[KeyPath, QuantizedTensor]
) -> Iterator[TensorSpec]:
    """The tensors of the quantised checkpoint, in the order of the plain ones."""
    for path, spec in tensors.items():
        one = found.get(path)
        if one is None:
            yield spec
        else:
            yield from (one.codes, one.scales, *([one.shape_tensor] if one.shape_tensor else ()))
