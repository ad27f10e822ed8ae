"""The types in which a GGUF file stores a model: matrices as requested, all else as float32, as llama.cpp expects.

Positions that are scaled by Llama 3.1's rule are stated by a tensor, which is added.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from wherry.core import dtypes
from wherry.core.tensorspec import TensorSpec
from wherry.errors import UnrepresentableError, UsageError
from wherry.integrations.formats.gguf.model_config import FACTORS, FILE
from wherry.integrations.formats.gguf.vocabulary import TOKENIZER
from wherry.integrations.formats.gguf.write import header_of, rotary_factors

if TYPE_CHECKING:
    from collections.abc import Mapping

    from wherry.core.keypath import KeyPath
    from wherry.formats.checkpoint import Checkpoint
    from wherry.formats.format import Options
    from wherry.storage.location import Location

SOURCE = "source"
# `--set type=…` → the element type of matrices.
ELEMENT_TYPES = {
    "f32": "float32", "f16": "float16", "bf16": "bfloat16", "q8_0": "ggml:Q8_0", "q4_0": "ggml:Q4_0",
}  # fmt: skip
_PLAIN = ("float32", "float16", "bfloat16", "float64")


def as_stored(checkpoint: Checkpoint, options: Options) -> Checkpoint:
    """A checkpoint in the types of a GGUF file, with the tokenizer that it states in its own form.

    Raises:
        UnrepresentableError: rows of a matrix are not whole blocks, or the metadata cannot state the model.
        UsageError: its tensors are in blocks already.
    """
    from wherry.quantized.ggml_types import TypedView  # with numpy

    names = {one.name for one in checkpoint.manifest.companions}
    requested = ELEMENT_TYPES.get(str(options["type"]))
    types: dict[KeyPath, str] = {}  # of the tensors that get another one
    if requested is not None or checkpoint.laid_out:  # else the names and the types are those of a GGUF file
        types = {
            path: kind
            for path, spec in checkpoint.manifest.tensors.items()
            if (kind := _type_of(spec, requested)) != spec.dtype
        }
    # The tensor that states how rotary positions are scaled, if the model's are.
    constants: list[tuple[TensorSpec, bytes]] = []
    factors = rotary_factors(_facts(checkpoint) if (FACTORS,) not in checkpoint.manifest.tensors else {})
    if factors is not None:
        data = struct.pack(f"<{len(factors)}f", *factors)
        constants.append((TensorSpec((FACTORS,), (len(factors),), "float32"), data))
    files: dict[str, bytes] = {}
    if FILE in names and TOKENIZER not in names and options["tokenizer"] != "none":
        files.update(checkpoint.original.reader.model_files().files)
    if types or constants or files:
        record = {name: str(options[name]) for name in ("type", "tokenizer")}
        checkpoint = TypedView(checkpoint, types, constants, files, record)
    if FILE in names and (TOKENIZER in {*names, *files} or options["tokenizer"] == "none"):
        found = {one.name for one in checkpoint.manifest.companions}

        def companion(name: str) -> Location | None:
            return checkpoint.reader.companion(name) if name in found else None

        header_of(checkpoint.manifest, options, companion)  # or the reason why it cannot be written
    return checkpoint


def _type_of(spec: TensorSpec, requested: str | None) -> str:
    if requested and dtypes.block_elements(spec.dtype) > 1:
        raise UsageError(
            f"{spec.name} is quantised already, as {spec.dtype.removeprefix('ggml:')}",
            path=spec.name, cure="add --set dequantize=float32",
        )  # fmt: skip
    if spec.dtype not in _PLAIN:
        return spec.dtype
    if len(spec.shape) < 2:  # noqa: PLR2004  a matrix has more
        return "float32"
    kind = requested or spec.dtype
    if spec.shape[-1] % dtypes.block_elements(kind):
        raise UnrepresentableError(
            f"the rows of {spec.name} have {spec.shape[-1]} elements, which are no whole blocks of "
            f"{dtypes.block_elements(kind)}",
            path=spec.name, cure="choose a type without blocks, such as --set type=f16",
        )  # fmt: skip
    return kind


def _facts(checkpoint: Checkpoint) -> Mapping[str, object]:
    """The sizes and facts of a model that gets its names from a layout."""
    if not checkpoint.laid_out:
        return {}
    from wherry.families.fact_checks import known_names
    from wherry.view.view import LayoutView

    return known_names(checkpoint.projected) if isinstance(checkpoint, LayoutView) else {}
