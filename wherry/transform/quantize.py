"""quantize: a plain Hugging Face checkpoint as if it had been saved quantised; `dequantize` inverts it.

`--set quantize=fp8` writes codes and scales by a closed rule, and the `quantization_config` that their owners write. A
rule in a scheme's `written` table decides by names and ranks alone which tensors these are. What is lost is bounded by
the plan, and measured for the receipt and when the target is verified against its source. With `--set
scales=CHECKPOINT` the codes, scales and config are those of a quantised checkpoint that this one was dequantised from:
then the codes come back bit by bit.

A region is made in bands of whole blocks, so the memory that it takes does not depend on the tensor. How far the codes
are from the values is measured on the way; codes for scales that were kept must mean the values exactly. Where a tensor
has a global scale too, the tensors that share it are read once more before, in the same bands.
"""

from __future__ import annotations

import copy
import json
import math
import re
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from wherry.core import dtypes
from wherry.core.account import Bound
from wherry.core.keypath import KeyPath
from wherry.core.request import GROUP_SIZE, QUANTIZE, SCALES, SourceRequest
from wherry.core.tensorspec import Region, TensorSpec, region_shape
from wherry.core.units import plural
from wherry.cures import Argument, Cure
from wherry.errors import MismatchError, UnrepresentableError, UsageError
from wherry.formats.checkpoint import Checkpoint, open_source
from wherry.layout.copies import Read
from wherry.layout.losses import note_error
from wherry.mover.decode import Parts
from wherry.mover.read import memory_for, read_array
from wherry.transform.codes import (
    block_scales,
    code_bits,
    code_table,
    encode,
    global_scale,
    largest_error,
    least_largest,
    lost_to_scale,
    observed_scales,
    pack_codes,
    scale_values,
)
from wherry.transform.dequantize import companion_config
from wherry.transform.model import CONFIG
from wherry.transform.quantized_tensors import (
    QuantizedTensor,
    QuantizedTensors,
    bands,
    part_of,
    quantized_tensors,
)
from wherry.transform.schemes import Scheme, WriteRule, quantization_of, schemes, stated_scheme
from wherry.transform.view import Transform, TransformReader, View, with_files

if TYPE_CHECKING:
    import numpy as np

_FLOATS = ("bfloat16", "float16", "float32")
_WORDS = {"int32": 32, "uint8": 8}
_BAND = 1 << 18  # elements that are encoded at a time, or one block
_WORKING = 32  # bytes of memory for each of them
_OF_SMALL_BLOCKS = "the bound of blocks below 1/28672 of their tensor's largest magnitude is a share of that"
RECORD = "quantized"  # in a manifest's origin


def written_scheme(name: str) -> tuple[Scheme, WriteRule]:
    """The scheme that a value of `quantize` writes, and how.

    Raises:
        UsageError: it is no value of `quantize`.
    """
    known = written_schemes()
    if name not in known:
        raise UsageError(f"cannot quantise to {name!r}", cure=f"choose one of {', '.join(known)}")
    return known[name]


def written_schemes() -> dict[str, tuple[Scheme, WriteRule]]:
    """The values of `quantize`, each with the scheme that it writes, and how."""
    return {rule.name: (scheme, rule) for scheme in schemes() for rule in scheme.written}


def in_groups(rule: WriteRule, size: object) -> WriteRule:
    """A rule with another number of columns of a block, as `group_size` states it.

    Raises:
        UsageError: the rule has no such blocks.
    """
    sizes = {str(one): one for one in rule.group_sizes}
    if not sizes:
        raise UsageError(f"{GROUP_SIZE} is fixed for {rule.name}", cure=f"leave {GROUP_SIZE} out")
    if str(size) not in sizes:
        raise UsageError(
            f"cannot quantise to {rule.name} in groups of {size!r}", cure=f"choose one of {', '.join(sizes)}"
        )
    config = copy.deepcopy(dict(rule.config))
    config["config_groups"]["group_0"]["weights"][GROUP_SIZE] = sizes[str(size)]
    return replace(rule, block=(rule.block[0], sizes[str(size)]), config=config)


def quantised_by(
    tensors: Mapping[KeyPath, TensorSpec], scheme: Scheme, rule: WriteRule, uri: str
) -> dict[KeyPath, QuantizedTensor]:
    """The tensors that a rule quantises, by their plain key path.

    Raises:
        UnrepresentableError: no tensor can be quantised with the rule.
    """
    found = {
        path: _make_tensor(spec, scheme, rule) for path, spec in tensors.items() if _is_chosen(spec, rule)
    }
    if not found:
        whole = rule.whole_blocks
        blocks = "" if whole == 1 else f", whose inputs are a multiple of {whole}"
        raise UnrepresentableError(
            f"no tensor can be quantised with {rule.name}: it is for {rule.about}{blocks}",
            uri=uri,
            cure=f"choose one of {', '.join(one for one in written_schemes() if one != rule.name)}",
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
    rule: WriteRule, tensors: Mapping[KeyPath, TensorSpec], found: Mapping[KeyPath, QuantizedTensor]
) -> dict[str, Any]:
    """The `quantization_config` of a checkpoint, with the modules that stay plain."""
    plain = sorted(
        path[-1].removesuffix(".weight")
        for path, spec in tensors.items()
        if path not in found and len(spec.shape) > 1 and path[-1].endswith(".weight")
    )
    return {**rule.config, rule.modules: plain}


def _is_chosen(spec: TensorSpec, rule: WriteRule) -> bool:
    name = spec.path[-1]
    return (
        len(spec.path) == 1
        and len(spec.shape) == rule.rank
        and spec.dtype in _FLOATS
        and re.search(rule.tensors, name) is not None
        and not any(part in name for part in rule.plain)
        and spec.shape[-2 if rule.rank > 2 else -1] % rule.whole_blocks == 0  # noqa: PLR2004
    )


def _make_tensor(spec: TensorSpec, scheme: Scheme, rule: WriteRule) -> QuantizedTensor:
    stem = spec.path[0] if "{name}" in scheme.plain else spec.path[0].removesuffix(".weight")

    def named(template: str) -> KeyPath:
        return (template.replace("{name}", stem).replace("{module}", stem),)

    shape = (*spec.shape[:-2], spec.shape[-1], spec.shape[-2]) if scheme.transposed else spec.shape
    block = (*(1,) * (len(shape) - 2), rule.block[0], rule.block[1] or max(shape[-1], 1))
    grid = tuple(-(-extent // size) for extent, size in zip(shape, block, strict=True))
    unit = _WORDS.get(rule.dtype, 8) // code_bits(rule.code)
    codes, width = (*shape[:-1], shape[-1] // unit), unit
    if scheme.blocked:
        codes, width = (*shape[:-1], grid[-1], rule.block[1] // unit), rule.block[1]
    stated = TensorSpec(named(scheme.shape), (len(shape),), "int64") if scheme.shape else None
    whole = TensorSpec(named(scheme.global_scale), (1,), "float32") if scheme.global_scale else None
    name = rule.scale_name or scheme.scales[0]
    return QuantizedTensor(
        spec, TensorSpec(named(scheme.values), codes, rule.dtype),
        TensorSpec(named(name), grid, rule.scales or spec.dtype),
        rule.code, shape, grid, block, width, scheme.transposed, stated, global_scale=whole,
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
            yield from filter(None, (one.codes, one.scales, one.global_scale, one.shape_tensor))


class Role(NamedTuple):
    """What a tensor of the quantised checkpoint is: `codes`, `scales`, `global` scale or `shape` of a tensor."""

    name: str
    tensor: QuantizedTensor


class Quantise(Transform):
    """Codes and scales from plain tensors."""

    def __init__(
        self,
        stored: Mapping[KeyPath, TensorSpec],
        found: Mapping[KeyPath, QuantizedTensor],
        rule: WriteRule,
        kept: Checkpoint | None = None,
    ) -> None:
        """Read nothing yet.

        Args:
            stored: the plain tensors.
            found: those that are quantised, by their key path.
            rule: how.
            kept: a checkpoint that has the scales; closed together with the view.
        """
        super().__init__(stored)
        self._found, self._rule, self._kept = found, rule, kept
        self._roles = {
            spec.path: Role(name, one)
            for one in found.values()
            for name, spec in (
                ("codes", one.codes), ("scales", one.scales), ("global", one.global_scale), ("shape", one.shape_tensor),
            )
            if spec is not None
        }  # fmt: skip
        self._scales = Parts(kept.reader, kept.manifest.tensors) if kept else None
        self._sharing = _sharing(found, rule.shared)
        self._wholes = {members: _Whole() for members in self._sharing.values()}

    def sources(self, path: KeyPath) -> Collection[KeyPath]:
        """Codes and scales are made of the plain tensor, and of those that share its global scale."""
        role = self._roles.get(path)
        if role is None:
            return (path,)
        own = role.tensor.plain.path
        shares = role.tensor.global_scale is not None and role.name != "shape" and self._kept is None
        return tuple(dict.fromkeys((own, *self._sharing[own]))) if shares else (own,)

    def unchanged(self, spec: TensorSpec) -> KeyPath | None:
        """The tensor itself, if it has no codes, scales or shape."""
        return None if spec.path in self._roles else spec.path

    def bounds(self, source: Mapping[KeyPath, Bound], paths: Iterable[KeyPath]) -> dict[KeyPath, Bound]:  # noqa: ARG002
        """Codes have a share of the largest magnitude of a block as their bound; with kept scales they are exact."""
        if self._kept is not None:
            return dict(source)
        plain = {path: bound for path, bound in source.items() if path not in self._found}
        return plain | {one.codes.path: self._bound(one) for one in self._found.values()}

    def compute(self, spec: TensorSpec, region: Region, out: np.ndarray, source: TransformReader) -> None:
        """Make a region of codes, scales or a shape.

        Raises:
            MismatchError: scales were kept, and a value is none that a code means.
            UnrepresentableError: a value is not finite.
        """
        role = self._roles[spec.path]
        if role.name == "shape":
            out[...] = role.tensor.shape[region[0]]
        elif role.name == "codes":
            try:
                self._make_codes(role, region, out, source.read)
            finally:
                if self._scales is not None:
                    self._scales.release()
        elif self._kept is not None:
            out[...] = read_array(self._kept.reader, spec, region)
        elif role.name == "global":
            out[...] = self._global_scale(role.tensor, source.read)
        else:
            self._make_scales(role, region, out, source.read)

    def memory(self, spec: TensorSpec, region: Region, source: TransformReader) -> int:
        """Memory for one band of whole blocks, and for what reading the plain tensor takes."""
        role = self._roles[spec.path]
        if role.name == "shape":
            return 0
        if role.name != "codes" and self._kept is not None:
            return memory_for(self._kept.reader.access(spec), spec, region) + spec.nbytes
        tensor = role.tensor
        if tensor.global_scale is not None and self._kept is None:
            members = [self._found[path] for path in self._sharing[tensor.plain.path]]
            return max(
                _memory(one, tuple(slice(0, extent) for extent in one.shape), source) for one in members
            )
        return _memory(tensor, _wide(tensor, _elements(role, region)), source)

    def close(self) -> None:
        """Close the checkpoint that has the scales."""
        if self._kept is not None:
            self._kept.close()

    def _bound(self, tensor: QuantizedTensor) -> Bound:
        kind = tensor.scales.dtype
        least = lost_to_scale(tensor.code, kind, tensor.plain.dtype) if self._rule.observer else 0.0
        return Bound(absolute=least, block=largest_error(tensor.code, kind))

    def _make_codes(self, role: Role, region: Region, out: np.ndarray, read: Read) -> None:
        tensor, elements = role.tensor, _elements(role, region)
        flat = out.view("u1").reshape(*region_shape(elements)[:-1], -1)
        # The bytes of each block that are wanted, and how many it has; None for codes without a dimension of their own.
        inside = (region[-1], tensor.codes.shape[-1]) if len(region) > len(tensor.shape) else None
        factor = self._global_scale(tensor, read)
        for band in _block_rows(tensor, _wide(tensor, elements)):
            made = pack_codes(self._codes(tensor, band, factor, read), tensor.code)
            rows = slice(max(band[-2].start, elements[-2].start), min(band[-2].stop, elements[-2].stop))
            per = made.shape[1] / (band[-1].stop - band[-1].start)  # bytes of a code
            columns = slice(
                int((elements[-1].start - band[-1].start) * per),
                int((elements[-1].stop - band[-1].start) * per),
            )
            part = made[rows.start - band[-2].start : rows.stop - band[-2].start, columns]
            if inside is not None:  # a part of each block's bytes
                part = part.reshape(part.shape[0], -1, inside[1])[:, :, inside[0]].reshape(part.shape[0], -1)
            lead = tuple(one.start - first.start for one, first in zip(band[:-2], elements[:-2], strict=True))
            flat[(*lead, slice(rows.start - elements[-2].start, rows.stop - elements[-2].start))] = part

    def _codes(
        self, tensor: QuantizedTensor, band: Region, factor: np.float32 | None, read: Read
    ) -> np.ndarray:
        """The codes of a band of whole blocks, a byte each."""
        import numpy as np

        values = _values(tensor, band, read)
        if self._scales is not None:
            return self._kept_codes(tensor, band, values, factor)
        largest = _largest(tensor, values)
        stored = scale_values(self._new_scales(tensor, largest, factor), tensor.code, factor)
        wide, tops = (_block_numbers(one, tensor.block, values.shape) for one in (stored, largest))
        codes = encode(values, wide, tensor.code, largest=None if self._rule.observer else tops)
        error = np.abs(code_table(tensor.code)[codes] * wide - values)
        worst, bound = float(np.max(error, initial=0)), self._bound(tensor)
        if factor is not None:
            tops = np.maximum(tops, least_largest(self._whole(tensor, read)))
        with np.errstate(divide="ignore", invalid="ignore"):
            shares = np.where(error > 0, error / (bound.block * tops + bound.absolute), 0)
        self.measured.add(worst, float(np.max(shares, initial=0)))
        note_error(worst)
        return codes

    def _kept_codes(
        self, tensor: QuantizedTensor, band: Region, values: np.ndarray, factor: np.float32 | None
    ) -> np.ndarray:
        """The codes whose products with the kept scales are the values."""
        import numpy as np

        assert self._scales is not None
        grid, scales = tensor.grid_of(band), tensor.scales
        stored = self._scales.read(scales.path, part_of(scales, grid)).reshape(region_shape(grid)[-2:])
        wide = _block_numbers(scale_values(stored, tensor.code, factor), tensor.block, values.shape)
        codes = encode(values, wide, tensor.code, kept=True)
        kind = dtypes.numpy_dtype(self.stored[tensor.plain.path].dtype)
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            meant = (code_table(tensor.code)[codes] * wide).astype(kind)
        if not np.array_equal(meant.astype(np.float32), values, equal_nan=True):
            raise MismatchError(
                f"a value of {tensor.plain.name} is not the product of a {tensor.code} code and its kept scale",
                path=tensor.plain.name,
                cure="the weights changed since they were dequantised: leave scales out, and new ones are computed",
            )
        return codes

    def _make_scales(self, role: Role, region: Region, out: np.ndarray, read: Read) -> None:
        tensor = role.tensor
        factor = self._global_scale(tensor, read)
        for band in _block_rows(tensor, _wide(tensor, _elements(role, region))):
            largest = _largest(tensor, _values(tensor, band, read))
            at = tuple(
                slice(part.start // size - start.start, -(-part.stop // size) - start.start)
                for part, size, start in zip(band, tensor.block, region, strict=True)
            )
            out[at] = self._new_scales(tensor, largest, factor).reshape(out[at].shape)

    def _new_scales(
        self, tensor: QuantizedTensor, largest: np.ndarray, factor: np.float32 | None
    ) -> np.ndarray:
        """The stored scales of blocks, from their largest magnitudes."""
        if self._rule.observer:
            return observed_scales(largest, tensor.code, tensor.scales.dtype, tensor.plain.dtype, factor)
        return block_scales(largest, tensor.code, tensor.scales.dtype)

    def _global_scale(self, tensor: QuantizedTensor, read: Read) -> np.float32 | None:
        """The number by which the scales of a tensor are divided; None if there is none."""
        import numpy as np

        if tensor.global_scale is None:
            return None
        if self._scales is not None:
            return np.float32(
                self._scales.read(tensor.global_scale.path, tensor.global_scale.whole).reshape(-1)[0]
            )
        first = self._found[self._sharing[tensor.plain.path][0]]
        return global_scale(self._whole(tensor, read), first.plain.dtype)

    def _whole(self, tensor: QuantizedTensor, read: Read) -> float:
        """The largest magnitude of the tensors that share a global scale; they are read once."""
        members = self._sharing[tensor.plain.path]
        whole = self._wholes[members]
        with whole.lock:
            if whole.largest is None:
                found = (self._found[path] for path in members)
                whole.largest = max(
                    float(_largest(one, _values(one, band, read)).max(initial=0))
                    for one in found
                    for band in _block_rows(one, tuple(slice(0, extent) for extent in one.shape))
                )
            return whole.largest


class _Whole:
    """The largest magnitude of the tensors that share a global scale; None until they were read."""

    def __init__(self) -> None:
        self.largest: float | None = None
        self.lock = threading.Lock()


def _sharing(
    found: Mapping[KeyPath, QuantizedTensor], patterns: Iterable[str]
) -> dict[KeyPath, tuple[KeyPath, ...]]:
    """The tensors that share a global scale with each tensor, itself included."""
    groups = dict[tuple[str, ...], list[KeyPath]]()
    for path in found:
        name = path[-1]
        ends = ((pattern, re.search(pattern, name)) for pattern in patterns)
        key = next(((name[: end.start()], pattern) for pattern, end in ends if end), (name,))
        groups.setdefault(key, []).append(path)
    return {path: tuple(members) for members in groups.values() for path in members}


def _memory(tensor: QuantizedTensor, elements: Region, source: TransformReader) -> int:
    """Memory for one band of elements in whole blocks."""
    columns = elements[-1].stop - elements[-1].start
    band = min(max(_BAND, tensor.block[-2] * columns), math.prod(region_shape(elements)))
    first = next(_block_rows(tensor, elements), elements)
    return _WORKING * band + source.memory_for(tensor.plain.path, tensor.exchanged(first))


def _values(tensor: QuantizedTensor, band: Region, read: Read) -> np.ndarray:
    """The plain values of a band of one matrix: float32 [rows, columns]."""
    import numpy as np

    shape = region_shape(tensor.exchanged(band))[-2:]
    stored = read(tensor.plain.path, tensor.exchanged(band)).reshape(shape)
    return np.ascontiguousarray((stored.T if tensor.transposed else stored).astype(np.float32))


def _elements(role: Role, region: Region) -> Region:
    """The elements, in the order of the codes, that a region of codes or scales is made of."""
    tensor = role.tensor
    if role.name == "scales":
        return tuple(
            slice(part.start * size, min(part.stop * size, extent))
            for part, size, extent in zip(region, tensor.block, tensor.shape, strict=True)
        )
    counted = region[: len(tensor.shape)]
    last = slice(counted[-1].start * tensor.unit, counted[-1].stop * tensor.unit)
    return (*counted[:-1], last)


def _wide(tensor: QuantizedTensor, elements: Region) -> Region:
    """The whole blocks of which elements are a part."""
    return tuple(
        slice(part.start // size * size, min(-(-part.stop // size) * size, extent))
        for part, size, extent in zip(elements, tensor.block, tensor.shape, strict=True)
    )


def _block_rows(tensor: QuantizedTensor, elements: Region) -> Iterator[Region]:
    """Bands of whole rows of blocks of one matrix each."""
    rows = tensor.block[-2]
    return bands(elements, max(_BAND, rows * region_shape(elements)[-1]), rows)


def _largest(tensor: QuantizedTensor, values: np.ndarray) -> np.ndarray:
    """The largest magnitude of each block of a band: float32 [block rows, block columns].

    Raises:
        UnrepresentableError: a value is not finite, so that its block has no scale.
    """
    import numpy as np

    sizes = np.abs(values)
    rows, columns = (
        np.arange(0, extent, size) for extent, size in zip(values.shape, tensor.block[-2:], strict=True)
    )
    found = np.maximum.reduceat(np.maximum.reduceat(sizes, columns, axis=1), rows, axis=0)
    if not np.isfinite(found).all():
        raise UnrepresentableError(
            f"a value of {tensor.plain.name} is not finite, and would leave its block without a scale",
            path=tensor.plain.name,
            cure=f"leave {QUANTIZE} out, or repair the tensor where the source was made",
        )
    return found


def _block_numbers(blocks: np.ndarray, block: tuple[int, ...], shape: tuple[int, ...]) -> np.ndarray:
    """The number of each block for each of its values: [rows, columns]."""
    import numpy as np

    wide = np.repeat(blocks, block[-1], axis=1)[:, : shape[1]] if blocks.shape[1] > 1 else blocks
    return np.repeat(wide, block[-2], axis=0)[: shape[0]] if blocks.shape[0] > 1 else wide


def quantised_view(
    source: Checkpoint,
    name: str,
    scales: str | None = None,
    group_size: object = None,
    *,
    files: bool = True,
) -> View:
    """The view of a plain checkpoint as if it had been saved quantised.

    Args:
        source: the checkpoint, in the layout of Hugging Face with its config.
        name: a value of `quantize`.
        scales: URI of the quantised checkpoint that it was dequantised from; None computes new scales.
        group_size: columns of a block; None for those of the rule.
        files: whether the target gets a config, which must state the quantisation.

    Raises:
        UsageError: scheme or group size are unknown, there is no config, or the source is quantised already.
        UnrepresentableError: no tensor can be quantised with the scheme.
        MismatchError: kept scales are of other tensors.
    """
    (scheme, rule), config = written_scheme(name), companion_config(source)
    if files and not config:
        raise UsageError(
            "the target would have no config.json, which states the quantisation",
            uri=source.uri, cure=Cure("pass the model's config.json with {}", Argument("config")),
        )  # fmt: skip
    if quantization_of(config) is not None:
        raise UsageError(
            "the checkpoint is quantised already",
            uri=source.uri,
            cure=Cure("add {}", Argument("set", "dequantize=bfloat16")),
        )
    record: dict[str, Any] = {"scheme": rule.name}
    tensors = source.manifest.tensors
    if scales is None:
        if group_size is not None:
            rule = in_groups(rule, group_size)
            record[GROUP_SIZE] = rule.block[1]
        found = quantised_by(tensors, scheme, rule, source.uri)
        view = _with_codes(source, found, rule, config_of_codes(rule, tensors, found), record)
        view.uses |= {QUANTIZE, GROUP_SIZE}
        return view
    kept = open_source(SourceRequest(scales))
    try:
        contents, quantization = _kept_scales(kept, scheme, rule)
        found = quantised_like(tensors, contents, source.uri)
        view = _with_codes(source, found, rule, quantization, {**record, SCALES: scales}, kept)
    except BaseException:
        kept.close()
        raise
    view.uses |= {QUANTIZE, SCALES}
    return view


def _with_codes(
    source: Checkpoint,
    found: Mapping[KeyPath, QuantizedTensor],
    rule: WriteRule,
    quantization: Mapping[str, Any],
    record: Mapping[str, Any],
    kept: Checkpoint | None = None,
) -> View:
    """The view in which some tensors are quantised.

    Args:
        source: the plain checkpoint, in the layout of Hugging Face.
        found: its tensors that are quantised, by key path.
        rule: how.
        quantization: the `quantization_config` of the quantised checkpoint.
        record: what the manifest records.
        kept: the checkpoint that has the scales.
    """
    files = dict[str, bytes]()
    if any(one.name == CONFIG for one in source.manifest.companions):
        config = {**companion_config(source), "quantization_config": quantization}
        files[CONFIG] = (json.dumps(config, indent=2) + "\n").encode()
    specs = {spec.path: spec for spec in quantized_specs(source.manifest.tensors, found)}
    origin = {**source.manifest.origin, RECORD: dict(record)}
    manifest = replace(with_files(source.manifest, files), tensors=specs, origin=origin)
    scales = f"the scales of {record[SCALES]}" if kept else "a new scale for each block"
    notes = [f"{plural(len(found), 'tensor')} are quantised to {record['scheme']} codes, with {scales}"]
    if kept is None and any(one.global_scale for one in found.values()):
        notes.append(_OF_SMALL_BLOCKS)
    return View(source, Quantise(source.manifest.tensors, found, rule, kept), manifest, files, tuple(notes))


def as_quantised(source: Checkpoint, origin: Mapping[str, Any]) -> View:
    """The view that a target was written from, by what its manifest's origin records.

    Raises:
        UsageError: the record names scales in another bucket or on a server.
    """
    scales = origin[RECORD].get("scales")
    if scales is not None:
        # A record must not choose what is contacted: no other bucket and no other server.
        is_remote = "://" in scales and not scales.startswith("file://")
        if is_remote and scales.split("/")[:3] != source.uri.split("/")[:3]:
            raise UsageError(
                "the record of the target names scales in another bucket than that of the source",
                uri=scales,
                cure=Cure(
                    "verify with `{}`, or with a source in the bucket of the scales",
                    Argument("level", "digest"),
                ),
            )
    record = origin[RECORD]
    return quantised_view(source, record["scheme"], scales, record.get(GROUP_SIZE), files=False)


def _kept_scales(
    checkpoint: Checkpoint, scheme: Scheme, rule: WriteRule
) -> tuple[QuantizedTensors, Mapping[str, Any]]:
    """The quantised tensors of the checkpoint that keeps the scales, and its `quantization_config`."""
    quantization = quantization_of(companion_config(checkpoint))
    stated = stated_scheme(quantization, checkpoint.uri) if quantization else None
    if (
        quantization is None
        or stated is None
        or stated.scheme.name != scheme.name
        or stated.code not in ("", rule.code)
    ):
        raise UsageError(
            f"the checkpoint of the kept scales is not quantised in {rule.name}", uri=checkpoint.uri,
            cure="name the quantised checkpoint that this one was dequantised from",
        )  # fmt: skip
    return quantized_tensors(checkpoint.manifest, stated, "bfloat16", checkpoint.uri), quantization
