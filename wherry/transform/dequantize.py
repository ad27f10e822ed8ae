"""dequantize: a checkpoint with quantised tensors as if it had been saved dequantised.

Codes and scales appear as one tensor of a plain element type, under the name that the model's class gives it, and
`config.json` states no quantisation. Everything else is as stored. So families, formats and checks are the same for
quantised and plain checkpoints.

Any region is made from the codes and scales of that region only, in bands of rows that fit in the cache, so the memory
that it takes does not depend on the tensor.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from wherry import kernels
from wherry.core import dtypes
from wherry.core.json_document import parse_json
from wherry.core.keypath import KeyPath
from wherry.core.limits import SMALL
from wherry.core.manifest import Manifest
from wherry.core.tensorspec import Region, TensorSpec, region_shape
from wherry.core.units import plural
from wherry.errors import CorruptError, UsageError
from wherry.formats.checkpoint import Checkpoint
from wherry.formats.format import Absent
from wherry.layout.copies import Read, permute
from wherry.layout.losses import errors_of, note, note_error
from wherry.layout.words import rounding
from wherry.store.location import MOST_CONFIG
from wherry.transform.codes import (
    code_bits,
    code_table,
    decode,
    exact,
    in_blocks,
    scale_values,
    unpack_rows,
)
from wherry.transform.ggml_view import DEQUANTIZED, without_blocks
from wherry.transform.model import CONFIG
from wherry.transform.quantized_tensors import (
    QuantizedTensor,
    QuantizedTensors,
    bands,
    is_plain,
    part_of,
    quantized_tensors,
)
from wherry.transform.schemes import (
    CONFIG_KEYS,
    method_of,
    quantization_of,
    require_weights_unchanged,
    scheme_of,
    stated_scheme,
    without_quantization,
)
from wherry.transform.view import Transform, TransformReader, View, with_files

if TYPE_CHECKING:
    import numpy as np


_BAND = 1 << 18  # elements that are made at a time; with their scales they fit in the second-level cache
_LOOKED_UP = 4 * _BAND  # elements that are looked up at a time, each in three bytes
_WORKING = 20  # bytes of memory for each of them: code, value, scale, rounded value
# Bits of a code → elements of a block for which a table of all products costs less than it saves.
_LEAST_BLOCK = {8: 2048, 4: 32}
_CODES = 256  # of 8 bits
_WORDS = {1: "u1", 2: "u2", 4: "u4", 8: "u8"}
HELP = "element type to which quantised weights are dequantised: bfloat16, float32 or float16"
CHOICES = ("bfloat16", "float32", "float16")
_TYPES = ("dtype", "torch_dtype")


class Dequantise(Transform):
    """Plain tensors from codes and their scales."""

    strided = True

    def __init__(self, stored: Mapping[KeyPath, TensorSpec], contents: QuantizedTensors) -> None:
        """Read nothing yet.

        Args:
            stored: the stored tensors.
            contents: the same, paired.
        """
        super().__init__(stored)
        self._quantized = contents.quantized
        self.losses = {  # where the product of code and scale is rounded
            path: rounding(one.plain.dtype)
            for path, one in contents.quantized.items()
            if not exact(
                one.code,
                (one.global_scale or one.scales).dtype,
                one.plain.dtype,
                zeros=one.zeros is not None,
            )
        }
        self._checked: set[KeyPath] = set()
        self._lock = threading.Lock()

    def sources(self, path: KeyPath) -> Collection[KeyPath]:
        """Codes and scales, or the tensor itself."""
        found = self._quantized.get(path)
        return found.made_of if found else (path,)

    def unchanged(self, spec: TensorSpec) -> KeyPath | None:
        """The tensor itself, if it is not dequantised."""
        return None if spec.path in self._quantized else spec.path

    def parameters(self, source: Checkpoint, manifest: Manifest) -> int:  # noqa: ARG002
        """The number of parameters of the plain tensors, since codes may be packed."""
        return manifest.parameters

    def compute(self, spec: TensorSpec, region: Region, out: np.ndarray, source: TransformReader) -> None:
        """Dequantise a region.

        Raises:
            CorruptError: the checkpoint states another shape for the codes.
        """
        import numpy as np

        tensor, read = self._quantized[spec.path], source.read
        self._require_shape(tensor, read)
        of_codes = tensor.exchanged(region)
        grid, stored = tensor.grid_of(of_codes), tensor.scales
        factor = None  # read first: what is read is valid until the next
        if tensor.global_scale is not None:
            factor = read(tensor.global_scale.path, tensor.global_scale.whole).reshape(-1)[0].copy()
        scales = scale_values(read(stored.path, part_of(stored, grid)), tensor.code, factor)
        scales = scales.reshape(region_shape(grid))
        # The element at which the first of the scales begins.
        corner = tuple(one.start * size for one, size in zip(grid, tensor.block, strict=True))
        zeros = _zeros(tensor, of_codes, read) if tensor.zeros is not None else None
        words = out.view(_WORDS[out.dtype.itemsize])
        words = words.swapaxes(-1, -2) if tensor.transposed else words
        wanted = _RegionToMake(tensor, of_codes, scales, zeros, corner, words, out.dtype, read)
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            for wide in bands(of_codes, _LOOKED_UP if wanted.has_tables else _BAND, tensor.block[-2]):
                if wanted.has_tables and _look_up(wanted, wide):
                    continue
                for band in bands(wide, _BAND):
                    _multiply(wanted, band)

    def memory(self, spec: TensorSpec, region: Region, source: TransformReader) -> int:  # noqa: ARG002
        """Memory for one band, and for the scales of the region."""
        found = self._quantized[spec.path]
        scales = math.prod(region_shape(found.grid_of(found.exchanged(region))))
        columns = region_shape(found.exchanged(region))[-1]
        elements = min(max(_BAND, columns), math.prod(region_shape(region)))
        return _WORKING * elements + (8 if found.zeros is None else 32) * scales

    def absent(self, missing: Iterable[Absent]) -> Iterable[Absent]:
        """Missing chunks, of a tensor that is dequantised under its own key path."""
        owners = {path: one.plain.path for one in self._quantized.values() for path in one.made_of}
        return (replace(one, path=owners.get(one.path, one.path)) for one in missing)

    def _require_shape(self, tensor: QuantizedTensor, read: Read) -> None:
        """Compare the shape that the checkpoint states for packed codes with the shape of the codes."""
        stated = tensor.shape_tensor
        if stated is None or tensor.plain.path in self._checked:
            return
        found = tuple(read(stated.path, stated.whole).reshape(-1).tolist())
        if found != tensor.shape:
            raise CorruptError(
                f"{stated.name} states the shape {found}, but the codes have the shape {tensor.shape}",
                path=tensor.codes.name,
                cure="unsupported padding of packed rows, or a damaged file: compare it with the original",
            )
        with self._lock:
            self._checked.add(tensor.plain.path)


class _RegionToMake(NamedTuple):
    """A region of a tensor that is being made.

    Attributes:
        tensor: the tensor.
        region: of its codes.
        scales: of the region, with the rank of the codes.
        zeros: its zero points, of the shape of the scales; None without.
        corner: the element at which the first scale begins.
        words: receives the elements of the region, as plain words.
        dtype: of the elements.
        read: reads a region of a stored tensor.
    """

    tensor: QuantizedTensor
    region: Region
    scales: np.ndarray
    zeros: np.ndarray | None
    corner: tuple[int, ...]
    words: np.ndarray
    dtype: np.dtype
    read: Read

    @property
    def block(self) -> tuple[int, int]:
        """Rows and columns of a block."""
        return self.tensor.block[-2], self.tensor.block[-1]

    @property
    def has_tables(self) -> bool:
        """Whether the products of a block are looked up: not where that is no faster."""
        is_large = math.prod(self.block) >= _LEAST_BLOCK[code_bits(self.tensor.code)]
        return is_large and self.dtype.itemsize in (2, 4) and kernels.load() is not None

    def place(self, band: Region) -> tuple[tuple[int, ...], tuple[int, int], np.ndarray]:
        """The matrix of a band of rows, its first code counted from the matrix's first scale, and its words."""
        at = tuple(part.start - first.start for part, first in zip(band, self.region, strict=True))
        places = tuple(part.start - start for part, start in zip(band, self.corner, strict=True))
        matrix = tuple(place // size for place, size in zip(places, self.tensor.block, strict=True))[:-2]
        rows = slice(at[-2], at[-2] + band[-2].stop - band[-2].start)
        return matrix, (places[-2], places[-1]), self.words[(*at[:-2], rows)]


def _multiply(wanted: _RegionToMake, band: Region) -> None:
    """Make a band: each code, less its zero point, times the scale of its block."""
    import numpy as np

    matrix, first, into = wanted.place(band)
    values = _values(wanted.tensor, band, wanted.read)
    if wanted.zeros is not None:
        in_blocks(np.subtract, values, wanted.zeros[matrix], first, wanted.block)
    in_blocks(np.multiply, values, wanted.scales[matrix], first, wanted.block)
    made = np.ascontiguousarray(values.astype(wanted.dtype))
    note(values, made)
    _put(made.view(into.dtype), into)


def _look_up(wanted: _RegionToMake, band: Region) -> bool:
    """Make a band whose blocks have one table of products each.

    A product of a code of one byte and the scale of its block is computed once for each code, not for each element.

    Returns:
        Whether that was done: not where values are lost, each of which is counted.
    """
    import numpy as np

    matrix, first, into = wanted.place(band)
    rows = len(into)
    top = first[0] // wanted.block[0]
    taken = wanted.scales[matrix][top : -(-(first[0] + rows) // wanted.block[0])]
    table = code_table(wanted.tensor.code)
    if wanted.zeros is not None:
        table = table - wanted.zeros[matrix][top : top + len(taken)][..., None]
    values = table * taken[..., None]
    made = values.astype(wanted.dtype)
    corner = (first[0] - top * wanted.block[0], first[1])
    stored, skip = _codes(wanted.tensor, band, wanted.read)
    errors = errors_of(values, made)
    plain = into if into.itemsize in into.strides else np.empty(into.shape, into.dtype)
    orders = None if errors is None or errors.shape[-1] < _CODES else _orders(errors)
    seen = kernels.look_up(stored, made.view(into.dtype), orders, corner, wanted.block, plain, skip)
    if errors is not None and not note_error(float(errors.max(where=seen, initial=0))):
        return False
    if plain is not into:
        _put(plain, into)
    return True


def _values(tensor: QuantizedTensor, band: Region, read: Read) -> np.ndarray:
    """The codes of a band of one matrix as float32 [rows, columns], without zero points and scales."""
    stored, skip = _codes(tensor, band, read)
    return decode(stored, tensor.code)[:, skip : skip + region_shape(band)[-1]]


def _codes(tensor: QuantizedTensor, band: Region, read: Read) -> tuple[np.ndarray, int]:
    """The bytes of a band's codes, uint8 [rows, bytes], and how many codes come before them in each row."""
    unit = tensor.unit
    steps = slice(band[-1].start // unit, -(-band[-1].stop // unit))
    inner = tensor.codes.whole[len(tensor.shape) :]
    stored = read(tensor.codes.path, (*band[:-1], steps, *inner))
    rows = region_shape(band)[-2]
    return stored.reshape(rows, -1).view("u1"), band[-1].start - steps.start * unit


def _zeros(tensor: QuantizedTensor, region: Region, read: Read) -> np.ndarray:
    """The zero points of a region as float32, of the shape of its scales."""
    import numpy as np

    stored, grid, unit = tensor.zeros, tensor.grid_of(region), tensor.unit
    assert stored is not None
    if unit == 1:
        return read(stored.path, part_of(stored, grid)).astype(np.float32).reshape(region_shape(grid))
    rows = grid[-2]
    words = slice(rows.start // unit, -(-rows.stop // unit))
    packed = read(stored.path, (*grid[:-2], words, grid[-1]))
    first = words.start * unit
    return unpack_rows(packed, tensor.code, slice(rows.start - first, rows.stop - first))


def _put(words: np.ndarray, into: np.ndarray) -> None:
    """Copy a band to its place, row by row or column by column."""
    if into.strides[0] < into.strides[1]:
        words, into = words.T, into.T
    permute(words, into)


def _orders(errors: np.ndarray) -> np.ndarray:
    """The codes of each block, uint8, in the order of their errors."""
    import numpy as np

    # Errors are not negative, so that they have the order of their bits.
    keys = errors.view(np.uint32).astype(np.uint64) << np.uint64(8) | np.arange(_CODES, dtype=np.uint64)
    keys.sort(axis=-1)
    return keys.astype(np.uint8)


def dequantized_view(
    checkpoint: Checkpoint, config: Mapping[str, Any] | None, dtype: str | None = None
) -> View | None:
    """The view of a checkpoint as if it had been saved dequantised; None if its config states no quantisation.

    Args:
        checkpoint: the stored checkpoint.
        config: its Hugging Face config.
        dtype: element type of the dequantised tensors; by default the one that the config states, else bfloat16.

    Raises:
        UsageError: the element type is none of the choices.
        UnrepresentableError: the config states a quantisation that is not supported, and not all tensors are plain.
        IncompleteError, MismatchError: codes and scales do not fit each other; see `quantized_tensors`.
    """
    quantization = quantization_of(config)
    if config is None or quantization is None:
        return None
    kind = _dtype(config, dtype)
    if scheme_of(quantization) is None and is_plain(
        checkpoint.manifest
    ):  # what the config states is of another copy of the model
        require_weights_unchanged(quantization, checkpoint.uri)
        contents = QuantizedTensors(checkpoint.manifest.tensors, {})
    else:
        stated = stated_scheme(quantization, checkpoint.uri)
        contents = quantized_tensors(checkpoint.manifest, stated, kind, checkpoint.uri)
    source, files = checkpoint.manifest, dict[str, bytes]()
    if any(one.name == CONFIG for one in source.companions):
        plain = without_quantization(config)
        name = next((one for one in _TYPES if one in plain), _TYPES[1])
        files[CONFIG] = (json.dumps({**plain, name: kind}, indent=2) + "\n").encode()
    origin = {**source.origin, DEQUANTIZED: {"dtype": kind, "quantization_config": quantization}}
    manifest = replace(with_files(source, files), tensors=dict(contents.specs), origin=origin)
    notes = (_note(contents, quantization, kind),)
    view = View(checkpoint, Dequantise(source.tensors, contents), manifest, files, notes)
    view.ignored = (*checkpoint.ignored, *contents.ignored)
    return view


def as_recorded(source: Checkpoint, converted: Manifest | None) -> Checkpoint:
    """The source as a conversion saw it: dequantised, if the manifest of its target records that."""
    record = converted.origin.get(DEQUANTIZED) if converted else None
    if record is None:
        return source
    kind = _dtype({}, record[_TYPES[0]])
    if quantization_of(record) is None:
        return without_blocks(source, kind) or source
    config = {**companion_config(source), **{name: record[name] for name in record if name in CONFIG_KEYS}}
    return dequantized_view(source, config, kind) or source


def companion_config(source: Checkpoint) -> dict[str, Any]:
    """The config next to a checkpoint; empty if there is none."""
    if CONFIG not in {one.name for one in source.manifest.companions}:
        return {}
    data = source.reader.companion(CONFIG).read_whole(MOST_CONFIG)
    found = parse_json(data, CONFIG, uri=source.uri, limits=SMALL)
    return found if isinstance(found, dict) else {}


def _dtype(config: Mapping[str, Any], wanted: str | None) -> str:
    if wanted is not None:
        if wanted not in CHOICES:
            raise UsageError(f"cannot dequantise to {wanted!r}", cure=f"choose one of {', '.join(CHOICES)}")
        return wanted
    stated = next((config[name] for name in _TYPES if config.get(name)), None)
    return stated if stated in CHOICES else CHOICES[0]


def _note(contents: QuantizedTensors, quantization: Mapping[str, Any], dtype: str) -> str:
    number = len(contents.quantized)
    if not number:
        return f"config.json states the quantisation {method_of(quantization)}, but no tensor is quantised"
    size = sum(
        dtypes.canonical_bytes(one.codes.dtype, one.codes.shape) for one in contents.quantized.values()
    )
    name = stated_scheme(quantization).scheme.name
    return (
        f"{plural(number, 'tensor')} with {size} bytes of {name} codes are dequantised to {dtype}; "
        "the target does not keep their scales"
    )
