"""view: a checkpoint with quantised tensors as if it had been saved dequantised.

Codes and scales appear as one tensor of a plain element type, under the name that the model's class gives it, and
`config.json` states no quantisation. Everything else is as stored. So families, formats and checks are the same for
quantised and plain checkpoints.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from wherry.core import dtypes
from wherry.core.keypath import KeyPath
from wherry.core.manifest import Companion, Manifest
from wherry.core.units import plural
from wherry.errors import UsageError
from wherry.formats.checkpoint import Checkpoint
from wherry.formats.contents import Contents
from wherry.formats.format import Opened
from wherry.layout.words import rounding
from wherry.mover.decode import DecodedReader
from wherry.quantized.codes import exact
from wherry.quantized.ggml_view import without_blocks
from wherry.quantized.reader import DequantizedReader
from wherry.quantized.schemes import (
    CONFIG_KEYS,
    method_of,
    quantization_of,
    require_weights_unchanged,
    scheme_of,
    stated_scheme,
    without_quantization,
)
from wherry.quantized.tensors import QuantizedTensors, is_plain, quantized_tensors
from wherry.storage.location import MOST_CONFIG
from wherry.text.json_document import parse_json
from wherry.text.limits import SMALL

HELP = "element type to which quantised weights are dequantised: bfloat16, float32 or float16"
RECORD = "dequantized"  # in a manifest's origin
CHOICES = ("bfloat16", "float32", "float16")
_CONFIG = "config.json"
_TYPES = ("dtype", "torch_dtype")


class DequantizedView(Checkpoint):
    """A checkpoint whose quantised tensors are dequantised; the source must stay open while the view is used."""

    is_view = True

    def __init__(
        self, source: Checkpoint, contents: QuantizedTensors, manifest: Manifest, files: Mapping[str, bytes]
    ) -> None:
        """Create a view; nothing is read yet.

        Args:
            source: the stored checkpoint.
            contents: its tensors, paired.
            manifest: of the view.
            files: companion files that differ from the stored ones.
        """
        self._source = source
        self._contents = contents
        self._new_files = files
        reader = self.reader_over(DecodedReader(source.reader))
        super().__init__(Opened(source.detection, manifest, reader, (*source.ignored, *contents.ignored)))

    @property
    def original(self) -> Checkpoint:
        """The stored checkpoint."""
        return self._source

    def made_of(self, path: KeyPath) -> Collection[KeyPath]:
        """The stored tensors that a tensor is made of: codes and scales, or itself."""
        found = self._contents.quantized.get(path)
        return found.made_of if found else (path,)

    def reader_over(self, reader: Contents) -> Contents:
        """A reader of the view over one of the stored checkpoint."""
        stored = self._source.manifest.tensors
        return DequantizedReader(reader, stored, self._contents.quantized, self._new_files)


def dequantized_view(
    checkpoint: Checkpoint, config: Mapping[str, Any] | None, dtype: str | None = None
) -> DequantizedView | None:
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
    if any(one.name == _CONFIG for one in source.companions):
        plain = without_quantization(config)
        name = next((one for one in _TYPES if one in plain), _TYPES[1])
        files[_CONFIG] = (json.dumps({**plain, name: kind}, indent=2) + "\n").encode()
    companions = tuple(
        Companion(one.name, len(files[one.name])) if one.name in files else one for one in source.companions
    )
    origin = {**source.origin, RECORD: {"dtype": kind, "quantization_config": quantization}}
    manifest = replace(source, tensors=dict(contents.specs), companions=companions, origin=origin)
    view = DequantizedView(checkpoint, contents, manifest, files)
    # Where the product of code and scale is rounded: half a unit in the last place of the target's type.
    view.bounds = {
        path: rounding(one.plain.dtype)
        for path, one in contents.quantized.items()
        if not exact(one.code, one.scales.dtype, one.plain.dtype, zeros=one.zeros is not None)
    }
    view.notes = (*checkpoint.notes, _note(contents, quantization, kind))
    return view


def as_recorded(source: Checkpoint, converted: Manifest | None) -> Checkpoint:
    """The source as a conversion saw it: dequantised, if the manifest of its target records that."""
    record = converted.origin.get(RECORD) if converted else None
    if record is None:
        return source
    kind = _dtype({}, record[_TYPES[0]])
    if quantization_of(record) is None:
        return without_blocks(source, kind) or source
    config = {**companion_config(source), **{name: record[name] for name in record if name in CONFIG_KEYS}}
    return dequantized_view(source, config, kind) or source


def companion_config(source: Checkpoint) -> dict[str, Any]:
    """The config next to a checkpoint; empty if there is none."""
    if _CONFIG not in {one.name for one in source.manifest.companions}:
        return {}
    data = source.reader.companion(_CONFIG).read_whole(MOST_CONFIG)
    found = parse_json(data, _CONFIG, uri=source.uri, limits=SMALL)
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
