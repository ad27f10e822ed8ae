"""Scheme: one way in which checkpoints store quantised weights, as a row of `schemes.toml`.

    when         expression over a config's `quantization_config`, whether the checkpoint is of this scheme. As in all
                 expressions here, `group` is the one row of `config_groups`, and `form` is `format`, or that of the
                 row if `format` is mixed-precision
    code         what one code means: a float type; int{bits}, an integer stored with half of its range added; signed8,
                 an integer as it is; by default the element type of the tensor itself
    bits         expression: the bits of an integer code
    dtypes       element types of the tensors that hold codes
    values       the name of such a tensor; {name} is any name, {module} one without `.weight`
    plain        the name of the tensor once it is dequantised
    scales       names that the scales of a tensor may have; one of them must exist
    scale_types  element types that they may have; by default those of `wherry.transform.codes.SCALE_TYPES`
    global_scale the name of one number for the whole tensor, by which all its scales are divided
    zeros        the name of the zero points of asymmetric integers: stored as the codes are, packed ones along rows
    shape        the name of a small tensor that states the shape
    dropped      names of tensors that only computing with codes needs: the scales of activations
    block        expression: rows and columns that share a scale; None: one scale for each row or tensor
    blocked      whether the codes of a block are a dimension of their own
    transposed   whether the dequantised tensor has rows and columns exchanged
    attributes   what `quantization_config` may state: read here, or of no influence on what the weights mean
    neutral      attributes that may only state that nothing changes: attribute → expression that is true then; null
                 and an empty table always state that
    groups       what every row of `config_groups` may state of its weights: attribute → values; null is always one,
                 and an empty list stands for all
    oracle       the software that our arithmetic equals bit by bit, in tests
    written      value of `quantize` → how it writes the scheme, with the fields of `WriteRule`; none if wherry only
                 reads it

A row that `extends` another has all that it does not state from that, except `written`. `selections` are fields of
rules that several of them share, by name. A checkpoint whose config states another way is refused by name; nothing is
guessed from names.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import field
from functools import cache
from pathlib import Path
from typing import Any, cast

from wherry.core.lazy_dataclass import dataclass
from wherry.cures import Argument, Cure
from wherry.errors import UnrepresentableError
from wherry.layout.expr import evaluate
from wherry.transform.codes import SCALE_TYPES, is_code

CONFIG_KEYS = ("quantization_config", "compression_config")
_MLX = "quantization"
_SYMMETRIC = "group.weights.symmetric"  # true by default, as in compressed-tensors
_MIXED = "mixed-precision"
_TEXT = "text_config"  # of a model with other modalities: it may state the quantisation instead
# Activations are quantised while the model computes; dequantised weights do not use it.
_OF_GROUPS = frozenset({"targets", "weights", "format", "input_activations", "output_activations"})
_FILE = Path(__file__).parent / "schemes.toml"


@dataclass(frozen=True, slots=True)
class WriteRule:
    """How `quantize` writes a scheme.

    Attributes:
        name: the value of `quantize`.
        form: codes and scales, for people.
        about: which tensors become codes, for people.
        tensors: pattern of their names.
        rank: number of their dimensions.
        code: the name of the code.
        dtype: element type of the tensors of codes.
        scales: element type of the scales; empty for that of the weights.
        scale_name: the name of the scales; empty for the first that the scheme has.
        block: rows and columns of the codes that share a scale; 0 columns are a whole row.
        modules: the attribute of `quantization_config` that lists the modules that stay plain.
        config: the rest of `quantization_config`.
        plain: parts of names that stay plain.
        ragged: whether the last block may be smaller; tensors with one stay plain otherwise.
        observer: the observer of compressed-tensors whose scales and codes these are; empty for the rule of the oracle.
        group_sizes: columns of a block that `group_size` may state.
        shared: patterns of the ends of names; tensors of one module that match the same share a global scale, since
            servers join them in one matrix.
    """

    name: str
    form: str
    about: str
    tensors: str
    rank: int
    code: str
    dtype: str
    scales: str
    block: tuple[int, int]
    modules: str
    config: Mapping[str, Any]
    plain: tuple[str, ...] = ()
    ragged: bool = False
    scale_name: str = ""
    observer: str = ""
    group_sizes: tuple[int, ...] = ()
    shared: tuple[str, ...] = ()

    @property
    def whole_blocks(self) -> int:
        """The number of columns of which a row must be a multiple; 1 for any row."""
        return 1 if self.ragged else self.block[1] or 1


@dataclass(frozen=True, slots=True)
class Scheme:
    """A way of storing quantised weights; the module docstring describes the fields."""

    name: str
    about: str
    when: str
    dtypes: tuple[str, ...]
    values: str
    plain: str
    scales: tuple[str, ...]
    oracle: str
    code: str = ""
    bits: str = ""
    zeros: str = ""
    shape: str = ""
    scale_types: tuple[str, ...] = SCALE_TYPES
    global_scale: str = ""
    dropped: tuple[str, ...] = ()
    block: str = "None"
    blocked: bool = False
    transposed: bool = False
    attributes: tuple[str, ...] = ()
    neutral: Mapping[str, str] = field(default_factory=dict[str, str])
    groups: Mapping[str, tuple[Any, ...]] = field(default_factory=dict[str, tuple[Any, ...]])
    written: tuple[WriteRule, ...] = ()


@cache
def schemes() -> tuple[Scheme, ...]:
    """All schemes."""
    rows = tomllib.loads(_FILE.read_text(encoding="utf-8"))
    selections = rows.pop("selections")
    return tuple(_scheme(name, row, rows, selections) for name, row in rows.items())


def _scheme(
    name: str, row: Mapping[str, Any], rows: Mapping[str, Any], selections: Mapping[str, Any]
) -> Scheme:
    fields = {**_fields_of_base(row, rows), **row}
    stated = {key: _frozen(value) for key, value in fields.items() if key not in ("extends", "written")}
    written = tuple(_write_rule(rule, table, selections) for rule, table in row.get("written", {}).items())
    return Scheme(name=name, **stated, written=written)


def _fields_of_base(row: Mapping[str, Any], rows: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the row that a row extends, with those that this one has from its own."""
    base = rows.get(row.get("extends", ""), {})
    return {**_fields_of_base(base, rows), **base} if base else {}


def _write_rule(name: str, table: Mapping[str, Any], selections: Mapping[str, Any]) -> WriteRule:
    fields = {**selections.get(table.get("selection", ""), {}), **table}
    stated = {key: value if key == "config" else _frozen(value) for key, value in fields.items()}
    stated.pop("selection", None)
    return WriteRule(name=name, **stated)


def _frozen(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(cast("list[Any]", value))
    if isinstance(value, dict):
        return {name: _frozen(one) for name, one in cast("dict[str, Any]", value).items()}
    return value


@dataclass(frozen=True, slots=True)
class StatedScheme:
    """The scheme that a config states, with its numbers.

    Attributes:
        scheme: the scheme.
        method: what the config calls it, for messages.
        code: the name of the code; empty for the tensor's own element type.
        block: rows and columns that share a scale; None for one scale for each row or tensor.
        symmetric: whether blocks have no zero points.
        plain_modules: names of modules that the config states as not quantised.
    """

    scheme: Scheme
    method: str
    code: str
    block: tuple[int, int] | None
    symmetric: bool = True
    plain_modules: frozenset[str] = frozenset()


def quantization_of(config: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """What a Hugging Face config states about its quantisation; None if it states nothing.

    MLX writes the table `quantization`, and repeats it as `quantization_config` without a method: both are its own.
    """
    for table in (config or {}, (config or {}).get(_TEXT)):
        if not isinstance(table, dict):
            continue
        stated = cast("dict[str, Any]", table)
        if isinstance(stated.get(_MLX), dict):
            return {"quant_method": "mlx", **stated[_MLX]}
        for key in CONFIG_KEYS:
            if isinstance(stated.get(key), dict):
                return cast("dict[str, Any]", stated[key])
    return None


def without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config that states no quantisation."""
    kept = {
        name: value
        for name, value in config.items()
        if name not in CONFIG_KEYS and not (name == _MLX and isinstance(value, dict))
    }
    inner = kept.get(_TEXT)
    if isinstance(inner, dict):
        kept[_TEXT] = without_quantization(cast("dict[str, Any]", inner))
    return kept


def method_of(quantization: Mapping[str, Any]) -> str:
    """What a `quantization_config` calls its method, for messages."""
    words = [str(quantization[name]) for name in ("quant_method", "format") if quantization.get(name)]
    return " ".join(words) or "an unnamed method"


def scheme_of(quantization: Mapping[str, Any]) -> Scheme | None:
    """The scheme of a `quantization_config`; None if no scheme is of this kind."""
    names = _with_group(quantization)
    return next((one for one in schemes() if evaluate(one.when, names) is True), None)


def stated_scheme(quantization: Mapping[str, Any], uri: str | None = None) -> StatedScheme:
    """The scheme that a config's `quantization_config` states.

    Raises:
        UnrepresentableError: no scheme is of this kind, or it states something that is not supported; it is named.
    """
    method, names = method_of(quantization), _with_group(quantization)
    scheme = scheme_of(quantization)
    if scheme is None:
        known = ", ".join(one.name for one in schemes())
        raise _refusal(f"unsupported quantisation {method}: known are {known}", uri)
    # Every attribute is read, has no influence on what the weights mean, or states that nothing changes.
    rest = {name: value for name, value in quantization.items() if name not in scheme.attributes}
    _require_neutral(rest, scheme, uri)
    _require_groups(scheme, quantization, method, uri)
    bits = evaluate(scheme.bits, names) if scheme.bits else None
    code = scheme.code.format(bits=bits)  # empty for the tensor's own element type
    if code and not is_code(code):
        raise _refusal(f"unsupported quantisation {method} with codes of {bits!r} bits", uri)
    block = _block(scheme, names, method, uri)
    symmetric = evaluate(_SYMMETRIC, names) in (None, True)
    rows = [quantization.get(name) for name in ("modules_to_not_convert", "ignored_layers", "ignore")]
    plain = frozenset(
        one for row in rows if isinstance(row, list) for one in cast("list[Any]", row) if isinstance(one, str)
    )
    return StatedScheme(scheme, method, code, block, symmetric, plain)


def require_weights_unchanged(quantization: Mapping[str, Any], uri: str | None = None) -> None:
    """Refuse a config that states a change of plain weights, such as a rotation.

    Raises:
        UnrepresentableError: it does; the attribute is named.
    """
    for scheme in schemes():
        _require_neutral({name: quantization.get(name) for name in scheme.neutral}, scheme, uri)


def _rows(quantization: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows of `config_groups`."""
    groups = quantization.get("config_groups")
    rows = list(cast("dict[str, Any]", groups).values()) if isinstance(groups, dict) else []
    return [cast("dict[str, Any]", row) for row in rows if isinstance(row, dict)]


def _with_group(quantization: Mapping[str, Any]) -> dict[str, Any]:
    """The names of expressions: the attributes, the first of the groups, and the format of its tensors."""
    group = next(iter(_rows(quantization)), {})
    stated = quantization.get("format")
    return {**quantization, "group": group, "form": group.get("format") if stated == _MIXED else stated}


def _require_neutral(attributes: Mapping[str, Any], scheme: Scheme, uri: str | None) -> None:
    for name, value in attributes.items():
        if value in (None, {}) or evaluate(scheme.neutral.get(name, "False"), {name: value}) is True:
            continue
        raise UnrepresentableError(
            f"unsupported attribute in quantization_config: {name}",
            uri=uri,
            cure=Cure(
                "keep the codes as they are with {} or a container such as {}; if the attribute does "
                "not change what the weights mean, pass a config.json without it with {}",
                Argument("to", "huggingface"),
                Argument("to", "orbax"),
                Argument("config"),
            ),
        )


def _block(scheme: Scheme, names: Mapping[str, Any], method: str, uri: str | None) -> tuple[int, int] | None:
    found = evaluate(scheme.block, names)
    if found is None:
        return None
    sizes = cast("list[Any]", list(found)) if isinstance(found, list | tuple) else []
    if len(sizes) != 2 or not all(type(one) is int and one > 0 for one in sizes):  # noqa: PLR2004  rows, columns
        raise _refusal(
            f"quantisation {method} has blocks of {found!r}, which are not two positive sizes", uri
        )
    return (sizes[0], sizes[1])


def _require_groups(scheme: Scheme, quantization: Mapping[str, Any], method: str, uri: str | None) -> None:
    """Every group of modules is stored alike, in a way that the scheme has."""
    rows = _rows(quantization)
    weights = [row.get("weights") for row in rows]
    for row in weights:
        stated = cast("dict[str, Any]", row) if isinstance(row, dict) else {}
        for name, value in stated.items():
            if value is None:
                continue
            if name not in scheme.groups or (scheme.groups[name] and value not in scheme.groups[name]):
                raise _refusal(f"unsupported quantisation {method} with {name} = {value!r}", uri)
        if row != weights[0]:
            raise _refusal(f"unsupported quantisation {method} with several groups of weights", uri)
    if len({row.get("format") for row in rows}) > 1:
        raise _refusal(f"unsupported quantisation {method} with groups of several formats", uri)
    unknown = {name for row in rows for name in row if row[name] is not None} - _OF_GROUPS
    if unknown:
        raise _refusal(f"unsupported quantisation {method} with {min(unknown)} in config_groups", uri)
    if scheme.groups and quantization.get("quant_method") == "compressed-tensors" and not rows:
        raise _refusal(f"quantisation {method} states no config_groups", uri)


def _refusal(what: str, uri: str | None) -> UnrepresentableError:
    return UnrepresentableError(
        what,
        uri=uri,
        cure=Cure(
            "keep the codes as they are with {} or a container such as {}",
            Argument("to", "huggingface"),
            Argument("to", "orbax"),
        ),
    )
