"""quantized_tensors: pairs the codes of a checkpoint with their scales, from metadata alone.

Codes, scales and what else describes them become one tensor of the dequantised checkpoint. A scale without codes, codes
without a scale, what else is named as part of their weight, and shapes that do not fit each other are errors that name
the tensor. A tensor without a scale and without a type of codes is plain.

Codes without their scales are numbers of another size. So where no config.json states a quantisation, tensors of 8-bit
floats, and integers next to which scales are stored, are refused by the name of their method, which a file next to the
tensors or the names of the scales show (`require_stated`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import field, replace
from itertools import product
from typing import TYPE_CHECKING

from wherry.core import dtypes
from wherry.core.account import IgnoredEntry
from wherry.core.keypath import KeyPath
from wherry.core.lazy_dataclass import dataclass
from wherry.core.tensorspec import Region, region_shape
from wherry.cures import Argument, Cure
from wherry.errors import IncompleteError, MismatchError, UnrepresentableError
from wherry.transform.codes import code_bits

if TYPE_CHECKING:
    from wherry.core.manifest import Manifest
    from wherry.core.tensorspec import TensorSpec
    from wherry.formats.checkpoint import Checkpoint
    from wherry.transform.schemes import Scheme, StatedScheme

_MODULE = ".weight"
_ACTIVATIONS = "scale of activations"
_PLAIN = frozenset({"bfloat16", "float16", "float32", "float64", "int64", "bool"})
_EXTENTS = ("int64", "int32")  # element types of a tensor that states a shape
_UNUSED = "it scales activations in arithmetic with codes; dequantised weights do not use it"


@dataclass(frozen=True, slots=True)
class QuantizedTensor:
    """Codes and scales that are one dequantised tensor.

    Attributes:
        plain: the dequantised tensor.
        codes: the tensor of codes.
        scales: the tensor of scales.
        code: the name of the code.
        shape: the extents of the codes; those of `plain`, unless that has rows and columns exchanged.
        grid: the extents of the scales, of the same rank.
        block: elements along each axis that share a scale.
        unit: codes that one step along the last axis of `codes` that counts them holds.
        transposed: whether `plain` has rows and columns exchanged.
        shape_tensor: a tensor that states the shape, if there is one.
        zeros: the zero points of the blocks, if they have some: as `scales`, or packed along rows.
        global_scale: a tensor of one number by which the scales are divided, if there is one.
    """

    plain: TensorSpec
    codes: TensorSpec
    scales: TensorSpec
    code: str
    shape: tuple[int, ...]
    grid: tuple[int, ...]
    block: tuple[int, ...]
    unit: int
    transposed: bool = False
    shape_tensor: TensorSpec | None = None
    zeros: TensorSpec | None = None
    global_scale: TensorSpec | None = None

    @property
    def made_of(self) -> tuple[KeyPath, ...]:
        """The stored tensors that it is made of."""
        more = tuple(one.path for one in (self.shape_tensor, self.zeros, self.global_scale) if one)
        return (self.codes.path, self.scales.path, *more)

    def exchanged(self, region: Region) -> Region:
        """A region of `plain` as one of the codes, and the reverse."""
        return (*region[:-2], region[-1], region[-2]) if self.transposed else region

    def grid_of(self, region: Region) -> Region:
        """The scales of a region of the codes."""
        return tuple(
            slice(part.start // size, -(-part.stop // size))
            for part, size in zip(region, self.block, strict=True)
        )


@dataclass(frozen=True, slots=True)
class QuantizedTensors:
    """The tensors of a checkpoint once it is dequantised.

    Attributes:
        specs: all its tensors, in the order of the stored ones.
        quantized: those that are dequantised, by their key path.
        ignored: stored tensors that are not needed, each with its rule.
    """

    specs: Mapping[KeyPath, TensorSpec]
    quantized: Mapping[KeyPath, QuantizedTensor]
    ignored: tuple[IgnoredEntry, ...] = ()


@dataclass(slots=True)
class _Names:
    """The tensors of a checkpoint by name, and those that were used."""

    specs: Mapping[str, TensorSpec]
    used: set[str] = field(default_factory=set[str])

    def take(self, templates: tuple[str, ...], name: str) -> TensorSpec | None:
        """The first tensor that one of the templates names."""
        for one in _spell_names(templates, name):
            if one in self.specs and one not in self.used:
                self.used.add(one)
                return self.specs[one]
        return None


def quantized_tensors(manifest: Manifest, stated: StatedScheme, dtype: str, uri: str) -> QuantizedTensors:
    """Pair codes and scales.

    Args:
        manifest: of the checkpoint; key paths of one part, as in Hugging Face folders, are paired.
        stated: the scheme that its config states.
        dtype: element type of the dequantised tensors.
        uri: the checkpoint, for messages.

    Raises:
        IncompleteError: a scale, or the codes of one, are missing.
        MismatchError: the shapes of codes and scales do not fit each other.
        UnrepresentableError: codes of a rank or with a companion that is not supported.
    """
    names = _Names({path[0]: spec for path, spec in manifest.tensors.items() if len(path) == 1})
    found: dict[str, QuantizedTensor] = {}
    ignored: list[IgnoredEntry] = []
    end = stated.scheme.values.partition("}")[2]
    for name, spec in names.specs.items():
        if not name.endswith(end) or name == end or spec.dtype not in stated.scheme.dtypes:
            continue
        stem = name[: len(name) - len(end)]  # what {name} or {module} stands for
        pair = _pair_codes(spec, stem, stated, names, dtype, uri)
        if pair is None:
            continue
        names.used.add(name)
        found[name] = pair
        dropped = [names.take((one,), stem) for one in stated.scheme.dropped]
        ignored += [IgnoredEntry(one.path, _ACTIVATIONS, _UNUSED) for one in dropped if one is not None]
    _require_no_part(found, stated, names)
    _require_no_rest(stated.scheme, names, uri)
    specs = dict(_replace_specs(manifest, names, found))
    return QuantizedTensors(specs, {one.plain.path: one for one in found.values()}, tuple(ignored))


def part_of(stored: TensorSpec, grid: Region) -> Region:
    """The part of a tensor of scales or zero points that blocks have; a single number is that of all blocks."""
    return stored.whole if stored.size == 1 else grid[: len(stored.shape)]


def bands(region: Region, most: int, multiple: int = 1) -> Iterator[Region]:
    """Bands of rows of one matrix each, with at most this many elements unless a single row has more.

    They end at multiples of a number of rows where they can.
    """
    step = max(most // max(region_shape(region)[-1], 1), 1)
    for place in product(*(range(part.start, part.stop) for part in region[:-2])):
        outer = tuple(slice(index, index + 1) for index in place)
        start, end = region[-2].start, region[-2].stop
        while start < end:
            stop = min(start + step, end)
            whole = stop // multiple * multiple
            stop = whole if start < whole and stop < end else stop
            yield (*outer, slice(start, stop), region[-1])
            start = stop


def is_plain(manifest: Manifest) -> bool:
    """Whether no tensor can hold codes: all are of wide floats, or of types that only count."""
    return all(spec.dtype in _PLAIN for spec in manifest.tensors.values())


def _replace_specs(
    manifest: Manifest, names: _Names, found: Mapping[str, QuantizedTensor]
) -> Iterator[tuple[KeyPath, TensorSpec]]:
    for path, spec in manifest.tensors.items():
        if len(path) == 1 and path[0] in found:
            plain = found[path[0]].plain
            if plain.path != path and plain.path in manifest.tensors:
                raise MismatchError(f"{spec.name} would become a tensor that exists", path=plain.name)
            yield plain.path, plain
        elif len(path) != 1 or path[0] not in names.used:
            yield path, spec


def _spell_names(templates: tuple[str, ...], stem: str) -> Iterator[str]:
    for one in templates:
        if "{name}" in one:
            yield one.replace("{name}", stem)
        else:
            yield one.replace("{module}", stem.removesuffix(_MODULE))


def _pair_codes(
    codes: TensorSpec, stem: str, stated: StatedScheme, names: _Names, dtype: str, uri: str
) -> QuantizedTensor | None:
    """The tensor that codes are; None if the config states that their module is plain."""
    scheme = stated.scheme
    scales = names.take(scheme.scales, stem)
    if scales is None:
        if stem.removesuffix(_MODULE) in stated.plain_modules:
            return None
        wanted = next(_spell_names(scheme.scales, stem))
        raise IncompleteError(
            f"missing scale {wanted} of the {scheme.name} codes {codes.name}", uri=uri, path=codes.name,
            cure="restore the missing tensor, or name the module in modules_to_not_convert if it is plain",
        )  # fmt: skip
    code = stated.code or codes.dtype
    _require_matrices(codes, scales, scheme)
    unit = dtypes.canonical_size(codes.dtype, 1) * 8 // code_bits(code)
    if scheme.blocked:
        unit *= codes.shape[-1]
        shape = (*codes.shape[:-2], codes.shape[-2] * unit)
    else:
        shape = (*codes.shape[:-1], codes.shape[-1] * unit)
    grid = _grid(shape, scales)
    block = _blocks(shape, grid, codes, scales, stated)
    turned = (*shape[:-2], shape[-1], shape[-2]) if scheme.transposed else shape
    path = (next(_spell_names((scheme.plain,), stem)),)
    plain = replace(codes, path=path, shape=turned, dtype=dtype, chunks=None)
    stated_shape = names.take((scheme.shape,), stem) if scheme.shape else None
    if stated_shape is not None and (stated_shape.size != len(shape) or stated_shape.dtype not in _EXTENTS):
        raise MismatchError(
            f"expected {len(shape)} integers in {stated_shape.name}, got {stated_shape.dtype} of shape "
            f"{stated_shape.shape}",
            path=stated_shape.name,
            cure="restore the tensor, which states the shape of the codes",
        )
    whole = _global_scale(codes, stem, scheme, names, uri) if scheme.global_scale else None
    pair = QuantizedTensor(
        plain,
        codes,
        scales,
        code,
        shape,
        grid,
        block,
        unit,
        scheme.transposed,
        stated_shape,
        global_scale=whole,
    )
    return pair if stated.symmetric else replace(pair, zeros=_zeros(pair, stem, scheme, names, uri))


def _zeros(pair: QuantizedTensor, stem: str, scheme: Scheme, names: _Names, uri: str) -> TensorSpec:
    """The zero points of the blocks: integers like the scales, or packed along rows into words like the codes."""
    wanted = next(_spell_names((scheme.zeros,), stem))
    zeros = names.take((scheme.zeros,), stem)
    if zeros is None:
        raise IncompleteError(
            f"missing zero points {wanted} of the asymmetric {scheme.name} codes {pair.codes.name}", uri=uri,
            path=pair.codes.name,
            cure="restore the missing tensor, or correct symmetric in quantization_config of config.json",
        )  # fmt: skip
    if zeros.dtype != pair.codes.dtype:
        raise UnrepresentableError(
            f"unsupported element type {zeros.dtype} of the zero points {zeros.name}: {scheme.name} has them in "
            f"{pair.codes.dtype}",
            path=pair.codes.name,
            cure="dequantise the checkpoint with the software that wrote it",
        )
    shape = pair.scales.shape
    if pair.unit > 1:
        shape = (*pair.grid[:-2], -(-pair.grid[-2] // pair.unit), pair.grid[-1])
    if zeros.shape != shape:
        raise MismatchError(
            f"the zero points {zeros.name} of shape {zeros.shape} do not fit scales of shape {pair.scales.shape}: "
            f"expected {shape}",
            path=pair.codes.name,
            cure="restore the tensor of zero points",
        )
    return zeros


def _global_scale(codes: TensorSpec, stem: str, scheme: Scheme, names: _Names, uri: str) -> TensorSpec:
    """The one number by which the scales of a tensor are divided."""
    wanted = next(_spell_names((scheme.global_scale,), stem))
    found = names.take((scheme.global_scale,), stem)
    if found is None:
        raise IncompleteError(
            f"missing global scale {wanted} of the {scheme.name} codes {codes.name}", uri=uri, path=codes.name,
            cure="restore the missing tensor",
        )  # fmt: skip
    if found.size != 1 or found.dtype != "float32":
        raise MismatchError(
            f"expected one float32 in {found.name}, got {found.dtype} of shape {found.shape}",
            path=found.name,
            cure="restore the tensor, by which the scales are divided",
        )
    return found


def _require_matrices(codes: TensorSpec, scales: TensorSpec, scheme: Scheme) -> None:
    """Codes have rows and columns, and perhaps a dimension for those of a block; scales are of a type that scales."""
    if len(codes.shape) < 2 + scheme.blocked:
        raise UnrepresentableError(f"unsupported {scheme.name} codes of shape {codes.shape}", path=codes.name)
    if scales.dtype not in scheme.scale_types:
        raise UnrepresentableError(
            f"unsupported element type {scales.dtype} of the scales {scales.name} of {scheme.name} codes",
            path=codes.name,
            cure=f"restore the scales, whose type is one of {', '.join(scheme.scale_types)}",
        )


def _grid(shape: tuple[int, ...], scales: TensorSpec) -> tuple[int, ...]:
    """The extents of the scales with the rank of the codes."""
    if scales.size == 1:
        return (1,) * len(shape)
    if scales.shape == shape[:-1]:
        return (*scales.shape, 1)
    return scales.shape


def _blocks(
    shape: tuple[int, ...], grid: tuple[int, ...], codes: TensorSpec, scales: TensorSpec, stated: StatedScheme
) -> tuple[int, ...]:
    """The elements along each axis that share a scale: the stated block, a row, or all."""
    leading = tuple(
        1 if grid[axis : axis + 1] == (extent,) else extent for axis, extent in enumerate(shape[:-2])
    )
    if stated.block and stated.block[0] == 1 and shape[-1] % stated.block[1]:
        raise UnrepresentableError(
            f"unsupported quantisation {stated.method}: rows of {shape[-1]} {stated.scheme.name} codes are not whole "
            f"groups of {stated.block[1]}",
            path=codes.name,
            cure="correct group_size in quantization_config of config.json",
        )
    for block in (stated.block, (1, shape[-1]), shape[-2:]):
        if block is None:
            continue
        sizes = (*leading, *block)
        if grid == tuple(-(-extent // max(size, 1)) for extent, size in zip(shape, sizes, strict=True)):
            # Nowhere longer than the codes, and nowhere empty.
            return tuple(max(min(size, extent), 1) for extent, size in zip(shape, sizes, strict=True))
    blocks = "×".join(map(str, stated.block)) if stated.block else "rows or a whole tensor"
    raise MismatchError(
        f"the scales {scales.name} of shape {scales.shape} do not fit codes of shape {shape} in blocks of {blocks}",
        path=codes.name,
        cure="correct quantization_config in config.json, or restore the scales",
    )


def _require_no_part(found: Mapping[str, QuantizedTensor], stated: StatedScheme, names: _Names) -> None:
    """Nothing else is a part of a weight by its name, such as zero points of which the config states nothing."""
    modules = {one.plain.name.removesuffix(_MODULE) for one in found.values()}
    for name in names.specs:
        module, dot, _end = name.rpartition(f"{_MODULE}_")
        if dot and module in modules and name not in names.used:
            raise UnrepresentableError(
                f"unsupported quantisation {stated.method} with a tensor {name}, of which quantization_config states "
                "nothing",
                path=f"{module}{_MODULE}",
                cure="dequantise the checkpoint with the software that wrote it",
            )


def _require_no_rest(scheme: Scheme, names: _Names, uri: str) -> None:
    """No scale is left over: the codes that it belongs to are missing, or stored in another way."""
    pairs = {*scheme.scales, *filter(None, (scheme.shape, scheme.zeros, scheme.global_scale))} - {
        "{module}.scale"
    }
    ends = tuple(re.sub(r"\{\w+\}", "", one) for one in pairs)
    rest = next((one for one in names.specs if one.endswith(ends) and one not in names.used), None)
    if rest is not None:
        raise IncompleteError(
            f"{rest} scales no tensor: its {scheme.name} codes are missing", uri=uri, path=rest,
            cure="restore the tensor of codes, or remove the scale",
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Method:
    """A method of quantisation that states itself elsewhere than in config.json.

    Attributes:
        name: of the method.
        file: the file that states it, if there is one.
        scales: names of tensors next to the codes: {name} is the name of the codes, {module} that without `.weight`.
        codes: the end of the names of codes, if they are not named `.weight`.
    """

    name: str
    file: str | None = None
    scales: tuple[str, ...] = ()
    codes: str = _MODULE


# Sources: ModelOpt's export_hf_checkpoint; AutoGPTQ and GPTQModel; AutoAWQ; bitsandbytes' QuantState; mlx-lm's convert.
_METHODS = (
    _Method("ModelOpt", "hf_quant_config.json", ("{name}_scale_2", "{name}_scale")),
    _Method("GPTQ", "quantize_config.json", ("{module}.scales", "{module}.qzeros"), ".qweight"),
    _Method("GPTQ or AWQ", None, ("{module}.qzeros", "{module}.scales"), ".qweight"),
    _Method("AWQ", "quant_config.json", ("{module}.qzeros", "{module}.scales"), ".qweight"),
    _Method("bitsandbytes", None, ("{name}.absmax", "{name}.quant_map", "{module}.SCB")),
    _Method("MLX", None, ("{module}.biases", "{module}.scales")),
)
_SCALES = ("{name}_scale", "{name}_scale_inv", "{module}.scale", "{module}.scales", "{module}.weight_scale")
_NARROW = frozenset({"int4", "uint4", "int8", "uint8", "int16", "uint16", "int32", "uint32"})
_FLOATS = ("float4", "float8")
_EXPONENTS = "float8_e8m0fnu"


def require_stated(checkpoint: Checkpoint) -> None:
    """Refuse codes of a checkpoint whose config states no quantisation.

    Args:
        checkpoint: the stored checkpoint. Key paths of one part are judged, as names of PyTorch's modules are.

    Raises:
        UnrepresentableError: a tensor holds codes; its method, or where its scales are, is named.
    """
    files = {one.name for one in checkpoint.manifest.companions}
    names = {path[0]: spec for path, spec in checkpoint.manifest.tensors.items() if len(path) == 1}
    scales = {name: _scale_of(name, names) for name in names}
    scaled = [
        name
        for name, spec in names.items()
        if scales[name] and (_is_narrow_float(spec) or (spec.dtype in _NARROW and len(spec.shape) > 1))
    ]
    bare = [name for name, spec in names.items() if _is_narrow_float(spec)]
    for name in (*scaled, *bare):
        raise _refusal(checkpoint, names[name], _method_of(name, names, files), scales[name])


def _is_narrow_float(spec: TensorSpec) -> bool:
    return spec.dtype.startswith(_FLOATS) and spec.dtype != _EXPONENTS


def _spell(template: str, name: str, codes: str = _MODULE) -> str:
    return template.replace("{name}", name).replace("{module}", name.removesuffix(codes))


def _scale_of(name: str, names: Collection[str]) -> str | None:
    """The first tensor that scales the codes of a name."""
    rows = [(one, method.codes) for method in _METHODS for one in method.scales]
    spelled = (_spell(one, name, codes) for one, codes in (*rows, *((one, _MODULE) for one in _SCALES)))
    return next((one for one in spelled if one in names), None)


def _method_of(name: str, names: Collection[str], files: Collection[str]) -> _Method | None:
    """The method of which the files or the names of tensors are."""
    for method in _METHODS:
        of_names = name.endswith(method.codes) and _spell(method.scales[0], name, method.codes) in names
        if method.file in files or (method.file is None and of_names):
            return method
    return None


def _refusal(
    checkpoint: Checkpoint, spec: TensorSpec, method: _Method | None, scale: str | None
) -> UnrepresentableError:
    scales = f"their scales are in {scale}" if scale else "there are no scales for them"
    if method is None:
        what = f"{spec.dtype} codes without a quantization_config in config.json; {scales}"
    elif method.file:
        what = f"unsupported quantisation {method.name}, which {method.file} states; {scales}"
    else:
        what = f"unsupported quantisation {method.name}, which the names of tensors show; {scales}"
    return UnrepresentableError(
        what,
        uri=checkpoint.uri,
        path=spec.name,
        cure=Cure(
            "keep the codes as they are with {} or a container such as {}; or dequantise the "
            "checkpoint with the software that wrote it; or pass the model's own config.json with "
            "{} if that states the quantisation",
            Argument("to", "safetensors"),
            Argument("to", "orbax"),
            Argument("config"),
        ),
    )
