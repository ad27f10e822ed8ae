"""coded_view: a plain Hugging Face checkpoint as if it had been saved quantised; `wherry.quantized.view` inverts it.

`--set quantize=fp8` writes codes and scales by a closed rule, and the `quantization_config` that their owners write.
What is lost is bounded by the plan and measured when the target is verified against its source. With `--set
scales=CHECKPOINT` the scales are those of a quantised checkpoint that this one was dequantised from: then the codes
come back bit by bit.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from wherry.core.account import Bound
from wherry.core.keypath import KeyPath
from wherry.core.manifest import Companion
from wherry.core.request import QUANTIZE, SCALES, SourceRequest
from wherry.core.units import plural
from wherry.errors import UsageError
from wherry.formats.checkpoint import Checkpoint, open_source
from wherry.formats.contents import Contents
from wherry.quantized.coded_reader import CodedReader, Role
from wherry.quantized.encode import largest_error
from wherry.quantized.measured_view import MeasuredView
from wherry.quantized.rules import (
    config_of_codes,
    quantised_by,
    quantised_like,
    quantized_specs,
    written_scheme,
)
from wherry.quantized.schemes import quantization_of, stated_scheme
from wherry.quantized.tensors import QuantizedTensor, QuantizedTensors, quantized_tensors
from wherry.quantized.view import companion_config

RECORD = "quantized"  # in a manifest's origin
_CONFIG = "config.json"


class CodedView(MeasuredView):
    """A checkpoint whose weights are quantised; its source must stay open while the view is used."""

    def __init__(
        self,
        source: Checkpoint,
        found: Mapping[KeyPath, QuantizedTensor],
        quantization: Mapping[str, Any],
        record: Mapping[str, Any],
        kept: Checkpoint | None = None,
    ) -> None:
        """Create a view; nothing is read yet.

        Args:
            source: the plain checkpoint, in the layout of Hugging Face.
            found: its tensors that are quantised, by key path.
            quantization: the `quantization_config` of the quantised checkpoint.
            record: what the manifest records.
            kept: the checkpoint that has the scales.
        """
        self._kept = kept
        self._roles = {
            spec.path: Role(name, one)
            for one in found.values()
            for name, spec in (("codes", one.codes), ("scales", one.scales), ("shape", one.shape_tensor))
            if spec is not None
        }
        config = {**companion_config(source), "quantization_config": quantization}
        self._new_files = {_CONFIG: (json.dumps(config, indent=2) + "\n").encode()}
        specs = {spec.path: spec for spec in quantized_specs(source.manifest.tensors, found)}
        companions = tuple(
            Companion(one.name, len(self._new_files[one.name])) if one.name in self._new_files else one
            for one in source.manifest.companions
        )
        origin = {**source.manifest.origin, RECORD: dict(record)}
        manifest = replace(source.manifest, tensors=specs, companions=companions, origin=origin)
        super().__init__(source, manifest)
        self.uses = source.uses | {QUANTIZE, SCALES}
        self.bounds = source.bounds
        if not kept:
            # Codes have a share of the largest magnitude of a block as their bound.
            plain = {path: bound for path, bound in source.bounds.items() if path not in found}
            self.bounds = plain | {
                one.codes.path: Bound(block=largest_error(one.code)) for one in found.values()
            }
        scales = f"the scales of {record['scales']}" if "scales" in record else "a new scale for each block"
        note = f"{plural(len(found), 'tensor')} are quantised to {record['scheme']} codes, with {scales}"
        self.notes = (*source.notes, note)

    def made_of(self, path: KeyPath) -> Collection[KeyPath]:
        """The stored tensors that a tensor is made of; codes and scales are made of the same."""
        role = self._roles.get(path)
        return self._source.made_of(role.tensor.plain.path if role else path)

    def _over(self, reader: Contents) -> CodedReader:
        return CodedReader(reader, self._source.manifest.tensors, self._roles, self._new_files, self._kept)


def quantised_view(
    source: Checkpoint, scheme: str, scales: str | None = None, *, files: bool = True
) -> CodedView:
    """The view of a plain checkpoint as if it had been saved quantised.

    Args:
        source: the checkpoint, in the layout of Hugging Face with its config.
        scheme: a scheme that is written.
        scales: URI of the quantised checkpoint that it was dequantised from; None computes new scales.
        files: whether the target gets a config, which must state the quantisation.

    Raises:
        UsageError: the scheme is unknown, there is no config, or the source is quantised already.
        UnrepresentableError: no tensor can be quantised with the scheme.
        MismatchError: kept scales are of other tensors.
    """
    row, config = written_scheme(scheme), companion_config(source)
    if files and not config:
        raise UsageError(
            "the target would have no config.json, which states the quantisation",
            uri=source.uri, cure="pass the model's config.json with --config",
        )  # fmt: skip
    if quantization_of(config) is not None:
        raise UsageError(
            "the checkpoint is quantised already", uri=source.uri, cure="add --set dequantize=bfloat16"
        )
    record = {"scheme": row.name, **({"scales": scales} if scales else {})}
    tensors = source.manifest.tensors
    if scales is None:
        found = quantised_by(tensors, row, source.uri)
        return CodedView(source, found, config_of_codes(row, tensors, found), record)
    kept = open_source(SourceRequest(scales))
    try:
        contents, quantization = _kept_scales(kept, row.name)
        found = quantised_like(tensors, contents, source.uri)
        return CodedView(source, found, quantization, record, kept)
    except BaseException:
        kept.close()
        raise


def as_quantised(source: Checkpoint, origin: Mapping[str, Any]) -> CodedView:
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
                "the record of the target names scales in another bucket than that of the source", uri=scales,
                cure="verify with `--level digest`, or with a source in the bucket of the scales",
            )  # fmt: skip
    return quantised_view(source, origin[RECORD]["scheme"], scales, files=False)


def _kept_scales(checkpoint: Checkpoint, scheme: str) -> tuple[QuantizedTensors, Mapping[str, Any]]:
    """The quantised tensors of the checkpoint that keeps the scales, and its `quantization_config`."""
    quantization = quantization_of(companion_config(checkpoint))
    stated = stated_scheme(quantization, checkpoint.uri) if quantization else None
    if quantization is None or stated is None or stated.scheme.name != scheme:
        raise UsageError(
            f"the checkpoint of the kept scales is not quantised in {scheme}", uri=checkpoint.uri,
            cure="name the quantised checkpoint that this one was dequantised from",
        )  # fmt: skip
    return quantized_tensors(checkpoint.manifest, stated, "bfloat16", checkpoint.uri), quantization
