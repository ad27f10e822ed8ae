"""codes_without_scheme: refuses a layout for a checkpoint with codes whose quantisation no config.json states.

Codes without their scales are numbers of another size. So tensors of 8-bit floats, and integers next to which scales
are stored, are refused by the name of their method, which a file next to the tensors or the names of the scales show.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from wherry.errors import UnrepresentableError

if TYPE_CHECKING:
    from wherry.core.tensorspec import TensorSpec
    from wherry.formats.checkpoint import Checkpoint

_MODULE = ".weight"


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
        what, uri=checkpoint.uri, path=spec.name,
        cure="keep the codes as they are with --to safetensors or a container such as --to orbax; or dequantise the "
        "checkpoint with the software that wrote it; or pass the model's own config.json with --config if that states "
        "the quantisation",
    )  # fmt: skip
