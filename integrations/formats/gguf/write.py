"""What a GGUF file that is written begins with: metadata, from the model's config and tokenizer, and places of tensors.

Only what comes back is written: the config that the metadata state must mean the sizes and facts of the model's own
config, so a model of which the metadata have no words is refused. `architectures.toml` has the rules, in `written`; a
family without them is not written.

The types in which a GGUF file stores a model: matrices as requested, all else as float32, as llama.cpp expects:
vectors, biases, and what routes tokens to experts.

Positions that are scaled by Llama 3.1's rule are stated by a tensor, which is added.

The Hugging Face config of the model in a GGUF file, from its metadata; `architectures.toml` has the rules.

What is stated and not understood becomes an attribute of its own name, so that a layout, which knows no such attribute,
refuses it by name. The config of an architecture without rules states the architecture only: no family is of it.
"""

from __future__ import annotations

import json
import math
import re
import struct
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from wherry.core import dtypes
from wherry.core.json_document import parse_json
from wherry.core.keypath import KeyPath
from wherry.core.manifest import Manifest
from wherry.core.tensorspec import TensorSpec
from wherry.cures import Argument, Cure
from wherry.errors import CorruptError, UnrepresentableError, UsageError
from wherry.formats.format import Options
from wherry.integrations.formats.gguf.header import MAGIC, TYPES, VERSIONS, type_name
from wherry.integrations.formats.gguf.tokenizer import (
    TOKENIZER,
    read_json,
    tokenizer_metadata,
    without_tokens,
)
from wherry.layout.expr import evaluate
from wherry.store.location import Location

if TYPE_CHECKING:
    from wherry.families.facts import ConfigFacts
    from wherry.formats.checkpoint import Checkpoint


FILE = "config.json"
FACTORS = "rope_freqs.weight"  # divisors of the frequencies of rotary positions, by Llama 3.1's rule
_ARCHITECTURE = "general.architecture"
EMBEDDING, _OUTPUT = "token_embd.weight", "output.weight"
_RULES = Path(__file__).with_name("architectures.toml")
_NAMES = re.compile(r"'[^']*'|[a-z_][\w.]*")
_OTHER_WORDS = {"if", "else", "or", "tokens", "head", "rotary"}
_SCALING, _TOKENS = "rope.scaling.", "tokenizer.ggml."
_LOW, _HIGH, _ORIGINAL = 1.0, 4.0, 8192  # of Llama 3.1, 3.2 and 3.3
_CLOSE = 1e-5


def model_config(
    metadata: Mapping[str, Any],
    left: Sequence[str],
    specs: Mapping[KeyPath, TensorSpec],
    factors: Sequence[float] | None,
) -> bytes:
    """The bytes of a config.json.

    Args:
        metadata: key → number, text or truth value.
        left: keys of other values.
        specs: the tensors.
        factors: the values of the tensor FACTORS; None if there is none.

    Raises:
        CorruptError: a size of the model is not a number, or is 0.
    """
    try:
        return (json.dumps(_config(metadata, left, specs, factors), indent=2) + "\n").encode()
    except UsageError as error:
        raise CorruptError(
            f"invalid GGUF: {error.what}", cure="download the file again, or restore it from a backup"
        ) from error


def _config(
    metadata: Mapping[str, Any],
    left: Sequence[str],
    specs: Mapping[KeyPath, TensorSpec],
    factors: Sequence[float] | None,
) -> dict[str, Any]:
    architecture = str(metadata.get(_ARCHITECTURE, "unnamed"))
    rules = _rules().get(architecture)
    if rules is None:
        return {"model_type": architecture}
    start = f"{architecture}."
    own = {
        key.removeprefix(start): _shortest(value) for key, value in metadata.items() if key.startswith(start)
    }
    lists = [key.removeprefix(start) for key in left if key.startswith(start)]
    tokens = {key: value for key, value in metadata.items() if key.startswith(_TOKENS)}
    rotary = _rotary(own, factors, mscale=rules.get("mscale", False))
    embedding = specs.get((EMBEDDING,))
    rows = embedding.shape[0] if embedding is not None and embedding.shape else None
    names = {**_tables({**own, **tokens}), "tokens": rows, "head": _head(own), "rotary": rotary}
    stated = {name: evaluate(text, names) for name, text in rules["attributes"].items()}
    read = {one for text in rules["attributes"].values() for one in _NAMES.findall(text)} - _OTHER_WORDS
    read |= {key for key in own if key.startswith(_SCALING)} if rotary is not None else set()
    read |= {key for key, text in rules["neutral"].items() if evaluate(text, names) is True} | rules[
        "ignored"
    ]
    unknown = {
        f"{start}{key}": own.get(key, "a list") for key in [*own, *lists] if key not in read or key in lists
    }
    if factors is not None and rotary is None:
        unknown[FACTORS] = "factors of rotary positions that are not those of Llama 3.1"
    return {
        "architectures": [evaluate(rules["class"], names)],
        "model_type": evaluate(rules["model_type"], names),
        **{
            name: value
            for name, value in stated.items()
            if value is not None or name in rules.get("nulls", ())
        },
        "tie_word_embeddings": (_OUTPUT,) not in specs,
        **unknown,
    }


@cache
def _rules() -> Mapping[str, Mapping[str, Any]]:
    """Architecture → its rules, with those of all."""
    tables = _read_rules()
    common = tables["common"]
    return {
        name: {
            **row,
            "attributes": {
                one: text
                for one, text in {**common["attributes"], **row.get("attributes", {})}.items()
                if text is not False
            },
            "neutral": {
                one: text
                for one, text in {**common["neutral"], **row.get("neutral", {})}.items()
                if text is not False
            },
            "ignored": {key for keys in common["ignored"].values() for key in keys},
            **({"written": _join(common["written"], row["written"])} if "written" in row else {}),
        }
        for name, row in tables.items()
        if name != "common"
    }


@cache
def _read_rules() -> Mapping[str, Any]:
    return tomllib.loads(_RULES.read_text(encoding="utf-8"))


def _join(common: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """What is written of an architecture: what is of all, and its own; a key that must be stated is not optional."""
    metadata = {**common["metadata"], **own.get("metadata", {})}
    optional = {**common["optional"], **own.get("optional", {})}
    return {
        **own,
        "metadata": {key: text for key, text in metadata.items() if text is not False},
        "optional": {
            key: text for key, text in optional.items() if text is not False and key not in metadata
        },
    }


def written_rules() -> Mapping[str, Mapping[str, Any]]:
    """Architecture → the model types of which it is written, and the metadata that are, of those that are written."""
    return {name: rules["written"] for name, rules in _rules().items() if "written" in rules}


def _tables(own: Mapping[str, Any]) -> dict[str, Any]:
    """Metadata as tables within tables, for expressions."""
    tables: dict[str, Any] = {}
    for key, value in own.items():
        *path, last = key.split(".")
        table = tables
        for part in path:
            inner = table.setdefault(part, {})
            table = inner if isinstance(inner, dict) else {}
        table[last] = value
    return tables


def _head(own: Mapping[str, Any]) -> int | None:
    """Elements of a head: stated, or a part of the width."""
    if "attention.key_length" in own:
        return own["attention.key_length"]
    width, heads = own.get("embedding_length"), own.get("attention.head_count")
    return width // heads if isinstance(width, int) and isinstance(heads, int) and heads else None


def _rotary(
    own: Mapping[str, Any], factors: Sequence[float] | None, *, mscale: bool
) -> dict[str, Any] | None:
    """The scaling of rotary positions as a config states it; None if there is none, or not one that is known."""
    scaling = {key.removeprefix(_SCALING): value for key, value in own.items() if key.startswith(_SCALING)}
    scaling.pop("finetuned", None)
    kind, factor = scaling.pop("type", "none"), scaling.pop("factor", None)
    if factors is not None:
        base = own.get("rope.freq_base", 10000.0)
        return _of_llama3(factors, base) if kind == "none" and not scaling else None
    if kind == "linear" and factor and not scaling and not mscale:
        return {"rope_type": "linear", "factor": factor}
    original = scaling.pop("original_context_length", None)
    if kind == "yarn" and factor and original:
        scaled, shape = (
            _yarn(factor, scaling, mscale=mscale),
            {"factor": factor, "original_max_position_embeddings": original},
        )
        return {"rope_type": "yarn", **shape, **scaled} if scaled is not None else None
    return None


def _yarn(factor: float, scaling: dict[str, Any], *, mscale: bool) -> dict[str, Any] | None:
    """The rest of yarn's attributes, of those that a config need not state; None if some are not known."""
    scores = {}
    if mscale:
        both = _shortest(_as_float32(scaling.pop("yarn_log_multiplier", 0.0) / 0.1))
        if not both > 0 or "attn_factor" in scaling:
            return None
        scores = {"mscale": both, "mscale_all_dim": both}
    names = {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}
    shape = {name: scaling.pop(key) for key, name in names.items() if key in scaling}
    if "attn_factor" in scaling:
        scaled = scaling.pop("attn_factor") * evaluate("yarn_mscale(factor)", {"factor": factor})
        shape["attention_factor"] = _shortest(_as_float32(scaled))
    return {**shape, **scores} if not scaling else None


def _of_llama3(factors: Sequence[float], base: Any) -> dict[str, Any] | None:
    """Llama 3.1's scaling if its rule gives these factors; they show the largest of them only."""
    if not isinstance(base, int | float) or not base > 0:
        return None
    factor = round(max(factors, default=0.0), 4)
    if factor <= 0:
        return None
    want = list(llama3_factors(len(factors), base, factor))
    if not all(math.isclose(one, other, rel_tol=_CLOSE) for one, other in zip(factors, want, strict=True)):
        return None
    return {
        "rope_type": "llama3", "factor": factor, "low_freq_factor": _LOW, "high_freq_factor": _HIGH,
        "original_max_position_embeddings": _ORIGINAL,
    }  # fmt: skip


def llama3_factors(count: int, base: float, factor: float) -> Iterator[float]:
    """The divisors of the frequencies: 1 for short waves, `factor` for long ones, and between them a mean."""
    for index in range(count):
        turns = _ORIGINAL / (2 * math.pi * base ** (index / count))
        share = min(max((turns - _LOW) / (_HIGH - _LOW), 0.0), 1.0)
        yield 1 / ((1 - share) / factor + share)


def _shortest(value: Any) -> Any:
    """A number of float32 in the fewest digits that are that number: 1e-05, not 9.99999974e-06."""
    if not isinstance(value, float) or not math.isfinite(value):
        return value
    for digits in range(1, 10):
        short = float(f"{value:.{digits}g}")
        if struct.pack("<f", short) == struct.pack("<f", value):
            return short
    return value


ALIGNMENT = 32
# Type of most elements of matrices → `general.file_type`, llama.cpp's number of it.
# llama.cpp has a number for files of MXFP4 only for those of experts.
_FILE_TYPES = {
    "float32": 0, "float16": 1, "bfloat16": 32, "ggml:Q4_0": 2, "ggml:Q4_1": 3, "ggml:Q8_0": 7, "ggml:Q5_0": 8,
    "ggml:Q5_1": 9, "ggml:Q4_K": 14, "ggml:Q6_K": 18, "ggml:MXFP4": 38,
}  # fmt: skip
_QUANTIZATION_VERSION = 2
_NUMBERS = {name: number for number, name in TYPES.items()}


class WrittenHeader(NamedTuple):
    """What a file begins with.

    Attributes:
        data: the bytes before the first tensor.
        notes: what llama.cpp does otherwise than the model's own tokenizer.
    """

    data: bytes
    notes: tuple[str, ...]


def header_of(
    manifest: Manifest, options: Options, companion: Callable[[str], Location | None]
) -> WrittenHeader:
    """What a file begins with.

    Args:
        manifest: the tensors, as they are stored.
        options: of the format, checked.
        companion: where the model's files are, by name.

    Raises:
        UnrepresentableError: the metadata cannot state the model or its tokenizer.
        UsageError: a file cannot be read.
    """
    specs = manifest.tensors.values()
    metadata, notes = _metadata(manifest.tensors, options, companion)
    head = MAGIC + struct.pack("<IQQ", VERSIONS[-1], len(specs), len(metadata))
    for key, value in metadata.items():
        try:
            head += _text(key) + _value(value)
        except (struct.error, OverflowError, UnicodeEncodeError) as error:
            raise UnrepresentableError(
                f"the metadata cannot state {key}: {error}",
                cure="correct the config or the tokenizer of the model",
            ) from error
    rows, offset = list[bytes](), 0
    for spec in specs:
        extents = struct.pack(f"<I{len(spec.shape)}Q", len(spec.shape), *reversed(spec.shape))
        rows.append(
            _text(spec.path[0]) + extents + struct.pack("<IQ", _NUMBERS[type_name(spec.dtype)], offset)
        )
        offset += spec.nbytes + -spec.nbytes % ALIGNMENT
    head += b"".join(rows)
    return WrittenHeader(head + bytes(-len(head) % ALIGNMENT), notes)


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Any) -> bytes:
    """A value with its type: truth values, whole numbers that are not negative, float32, texts, and lists of these."""
    match value:
        case bool():
            return struct.pack("<I?", 7, value)
        case int():
            return struct.pack("<II", 4, value)
        case float():
            return struct.pack("<If", 6, value)
        case str():
            return struct.pack("<I", 8) + _text(value)
        case _:
            first = value[0] if value else ""
            kind, form = (
                (5, "i") if isinstance(first, int) else (6, "f") if isinstance(first, float) else (8, "")
            )
            data = struct.pack(f"<{len(value)}{form}", *value) if form else b"".join(map(_text, value))
            return struct.pack("<IIQ", 9, kind, len(value)) + data


def _metadata(
    specs: Mapping[KeyPath, TensorSpec], options: Options, companion: Callable[[str], Location | None]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The metadata of the file that describe the model, by key, and notes on its tokenizer."""
    place = companion(FILE)
    assert place is not None, "a target without a config is refused before"
    config = read_json(place)
    architecture, own = _of_model(config, specs)
    counted: Counter[str] = Counter()
    for spec in specs.values():
        counted[spec.dtype] += spec.size if len(spec.shape) > 1 else 0
    kind = max(counted, key=lambda name: counted[name], default="float32")
    blocks = {"general.quantization_version": _QUANTIZATION_VERSION} if kind.startswith("ggml:") else {}
    embedding = specs.get((EMBEDDING,))
    rows = embedding.shape[0] if embedding is not None and embedding.shape else own["vocab_size"]
    with_tokens = options["tokenizer"] != "none"
    tokenizer = tokenizer_metadata(companion, config, rows) if with_tokens else without_tokens(config)
    metadata = {
        "general.architecture": architecture, "general.type": "model", "general.file_type": _FILE_TYPES.get(kind, 0),
        **blocks,
        **{f"{architecture}.{key}": value for key, value in own.items()},
        **tokenizer.metadata,
    }  # fmt: skip
    return metadata, tokenizer.notes


def _of_model(config: Mapping[str, Any], specs: Mapping[KeyPath, TensorSpec]) -> tuple[str, dict[str, Any]]:
    """The architecture, and its metadata."""
    from wherry.families import (
        family_of_config,
        load_family,
    )  # the families take longer than all of this file
    from wherry.families.facts import tell

    kind, name = config.get("model_type"), family_of_config(config)
    found = [(one, rows) for one, rows in written_rules().items() if kind in rows["model_types"]]
    if name is None or not found:
        known = ", ".join(sorted(one for rows in written_rules().values() for one in rows["model_types"]))
        raise UnrepresentableError(
            f"no rule writes the metadata of the model type {kind!r}",
            cure=f"choose another target; wherry writes GGUF of the model types {known}",
        )
    ((architecture, rules),) = found
    family = load_family(name)
    config_facts = tell(family.system("gguf"), config, FILE)
    names = {**family.constants, **config_facts.sizes, **config_facts.facts, "config": config_facts.config}
    own = {key: evaluate(text, names) for key, text in {**rules["metadata"], **rules["optional"]}.items()}
    own = {key: value for key, value in own.items() if value is not None or key in rules["metadata"]}
    missing = [key for key, value in own.items() if type(value) not in (bool, int, float, str)]
    if missing:
        raise UnrepresentableError(
            f"{FILE} does not state what {architecture}.{missing[0]} is made from",
            cure=Cure("pass the whole config of the model with {}", Argument("config")),
        )
    stated = {
        "general.architecture": architecture,
        **{f"{architecture}.{key}": _as_float32(own[key]) for key in own},
    }
    factors = rotary_factors(names) if (FACTORS,) in specs else None
    meant = parse_json(model_config(stated, (), specs, factors), FILE)
    system = family.system("gguf")
    assumed = {
        key: evaluate(text, {}) if isinstance(text, str) else text for key, text in system.assumes.items()
    }
    _require_same(config_facts, tell(system, meant, "the metadata"), assumed)
    return architecture, own


def _require_same(config_facts: ConfigFacts, metadata_facts: ConfigFacts, assumed: Mapping[str, Any]) -> None:
    """The metadata must mean what the config says; whether embeddings are tied, the tensors show."""
    expected = {**config_facts.sizes, **config_facts.facts}
    found = {**assumed, **metadata_facts.sizes, **metadata_facts.facts}
    for name, value in expected.items():
        if name != "tied" and found.get(name) != value:
            raise UnrepresentableError(
                f"the metadata cannot state {name} = {value!r}: they would mean {found.get(name)!r}",
                cure="choose another target",
            )


def _as_float32(value: Any) -> Any:
    """A number as the file holds it; one that is too large is infinite."""
    try:
        return struct.unpack("<f", struct.pack("<f", value))[0] if isinstance(value, float) else value
    except OverflowError:
        return math.inf


def rotary_factors(names: Mapping[str, Any]) -> Sequence[float] | None:
    """The divisors of the frequencies of rotary positions, as float32; None if no tensor states the scaling.

    Args:
        names: sizes and facts of the model.
    """
    scaling = names.get("rope_scaling") or {}
    if scaling.get("rope_type") != "llama3":
        return None
    found = llama3_factors(names["pair"], names["rope_theta"], scaling["factor"])
    return [_as_float32(one) for one in found]


def require_files(manifest: Manifest, options: Options) -> None:
    """Refuse a target of which the model is not known.

    Raises:
        UnrepresentableError: there is no config, or no tokenizer.
    """
    names = {one.name for one in manifest.companions}
    if FILE not in names:
        raise UnrepresentableError(
            f"missing {FILE}: the metadata of a GGUF file state the model",
            cure=Cure("pass the model's config with {}", Argument("config")),
        )
    if options["tokenizer"] != "none" and TOKENIZER not in names:
        raise UnrepresentableError(
            f"missing {TOKENIZER}: a GGUF file has the tokenizer of its model",
            cure=Cure(
                "pass the folder that has it with {}, or leave it out with {}",
                Argument("assets"),
                Argument("set", "tokenizer=none"),
            ),
        )


SOURCE = "source"
# `--set type=…` → the element type of matrices.
ELEMENT_TYPES = {
    "f32": "float32", "f16": "float16", "bf16": "bfloat16", "q8_0": "ggml:Q8_0", "q5_1": "ggml:Q5_1",
    "q5_0": "ggml:Q5_0", "q4_1": "ggml:Q4_1", "q4_0": "ggml:Q4_0", "q6_k": "ggml:Q6_K", "q4_k": "ggml:Q4_K",
    "mxfp4": "ggml:MXFP4",
}  # fmt: skip
_SPARSE, _EXPERTS = "ggml:MXFP4", "_exps.weight"
_PLAIN = ("float32", "float16", "bfloat16", "float64")


def as_stored(checkpoint: Checkpoint, options: Options) -> Checkpoint:
    """A checkpoint in the types of a GGUF file, with the tokenizer that it states in its own form.

    Raises:
        UnrepresentableError: rows of a matrix are not whole blocks, or the metadata cannot state the model.
        UsageError: its tensors are in blocks already.
    """
    from wherry.transform.ggml_view import typed_view  # with numpy
    from wherry.transform.view import View

    names = {one.name for one in checkpoint.manifest.companions}
    requested = ELEMENT_TYPES.get(str(options["type"]))
    # llama.cpp's number of files of MXFP4 is for experts of that type: other matrices keep the source's.
    sparse = requested == _SPARSE and any(_EXPERTS in path[0] for path in checkpoint.manifest.tensors)
    types: dict[KeyPath, str] = {}  # of the tensors that get another one
    if requested is not None or checkpoint.laid_out:  # else the names and the types are those of a GGUF file
        types = {
            path: kind
            for path, spec in checkpoint.manifest.tensors.items()
            if (kind := _type_of(spec, requested if _EXPERTS in path[0] or not sparse else None))
            != spec.dtype
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
        checkpoint = typed_view(checkpoint, types, constants, files, record)
    if FILE in names and (TOKENIZER in {*names, *files} or options["tokenizer"] == "none"):
        found = {one.name for one in checkpoint.manifest.companions}

        def companion(name: str) -> Location | None:
            return checkpoint.reader.companion(name) if name in found else None

        notes = header_of(
            checkpoint.manifest, options, companion
        ).notes  # or the reason why it cannot be written
        if notes:
            return View(checkpoint, None, checkpoint.manifest, notes=notes)
    return checkpoint


def _type_of(spec: TensorSpec, requested: str | None) -> str:
    if requested and dtypes.block_elements(spec.dtype) > 1:
        raise UsageError(
            f"{spec.name} is quantised already, as {spec.dtype.removeprefix('ggml:')}",
            path=spec.name, cure=Cure("add {}", Argument("set", "dequantize=float32")),
        )  # fmt: skip
    if spec.dtype not in _PLAIN:
        return spec.dtype
    name, _, end = spec.path[0].rpartition(".")
    precise = _read_rules()["common"]["written"]["float32"]
    if len(spec.shape) < 2 or end != "weight" or name.rpartition(".")[2] in precise:  # noqa: PLR2004
        return "float32"
    kind = requested or spec.dtype
    if spec.shape[-1] % dtypes.block_elements(kind):
        raise UnrepresentableError(
            f"the rows of {spec.name} have {spec.shape[-1]} elements, which are no whole blocks of "
            f"{dtypes.block_elements(kind)}",
            path=spec.name, cure=Cure("choose a type without blocks, such as {}", Argument("set", "type=f16")),
        )  # fmt: skip
    return kind


def _facts(checkpoint: Checkpoint) -> Mapping[str, object]:
    """The sizes and facts of a model that gets its names from a layout."""
    if not checkpoint.laid_out:
        return {}
    from wherry.families.fact_checks import known_names
    from wherry.transform.view import LayoutView

    return known_names(checkpoint.projected) if isinstance(checkpoint, LayoutView) else {}
