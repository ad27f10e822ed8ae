"""Selects the weight files of a Hugging Face folder.

Names, in the lookup order of transformers (5.23, `modeling_utils.py`): `model.safetensors`, then
`model.safetensors.index.json` with `model-00001-of-0000N.safetensors`, each also with a variant
(`model.fp16.safetensors`, `model.safetensors.index.fp16.json`); safetensors before `pytorch_model.bin` and its
index; transformers 4 then looked for `flax_model.msgpack` and its index, whose names are key paths joined by `/`;
transformers 5 has dropped it. accelerate saves the full state of an FSDP model as
`pytorch_model_fsdp.bin`. PEFT adapters are `adapter_model.safetensors` or `.bin` next to `adapter_config.json`,
diffusers writes `diffusion_pytorch_model.safetensors`. torch's HuggingFaceStorageWriter writes an index for every
consolidated save, even of one file, and none for distributed saves. A diffusers pipeline is a folder of such folders,
which `model_index.json` lists.

Distributes tensors over the files of a new Hugging Face folder, and builds its index.

A tensor's name in the index is its key path joined by `/`. As in transformers, files are filled in order up to
`max_shard_size`; a larger tensor gets a separate file. Names are sorted with digits compared as numbers, so that layer
2 comes before layer 10. File names and index are those of `save_pretrained`, the index with sorted keys.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache, partial
from typing import Literal, TypeAlias, cast

from wherry.core.lazy_dataclass import dataclass
from wherry.core.tensorspec import TensorSpec
from wherry.integrations.containers.flat.reader import stored_size

Container: TypeAlias = Literal["safetensors", "bin", "msgpack"]
CONFIG = "config.json"
ADAPTER_CONFIG = "adapter_config.json"
PIPELINE = "model_index.json"
ADAPTER = "adapter_model"
PRECEDENCE = (
    "safetensors take precedence over .bin over msgpack, files without a variant over those with one, "
    "and an index whose files are there over one file"
)

_ORDER: tuple[Container, ...] = ("safetensors", "bin", "msgpack")
# Stem and ending of the weights, in order of precedence.
_STEMS: tuple[tuple[str, Container], ...] = (
    ("model", "safetensors"),
    ("diffusion_pytorch_model", "safetensors"),
    ("adapter_model", "safetensors"),
    ("pytorch_model", "bin"),
    ("diffusion_pytorch_model", "bin"),
    ("adapter_model", "bin"),
    ("pytorch_model_fsdp", "bin"),
    ("flax_model", "msgpack"),
    ("diffusion_flax_model", "msgpack"),
)
CONTAINER_WORDS = {"safetensors": "safetensors", "bin": "pytorch_model.bin", "msgpack": "flax_model.msgpack"}
_VARIANT = r"(?:\.(?P<variant>[A-Za-z0-9_]+))?"
_BEFORE, _BETWEEN = (rf"(?:\.(?P<{place}>[A-Za-z0-9_]+))?" for place in ("before", "between"))
_KNOWN = rf"(?P<stem>{'|'.join(dict(_STEMS))})"
_ENDING = rf"\.(?P<container>{'|'.join(_ORDER)})"
_NAMES: dict[Literal["single", "sharded"], re.Pattern[str]] = {
    "single": re.compile(rf"{_KNOWN}{_VARIANT}{_ENDING}"),
    # diffusers has put the variant before the container, after it, and after `index`.
    "sharded": re.compile(rf"{_KNOWN}{_BEFORE}{_ENDING}{_BETWEEN}\.index{_VARIANT}\.json"),
}
_ANY_INDEX = re.compile(rf".+\.safetensors\.index{_VARIANT}\.json")
_SHARD = re.compile(r".+-\d{5}-of-\d{5}\.safetensors")
_ONE_OF_ONE = re.compile(r"(?P<stem>.+)-0*1-of-0*1\.(?P<container>safetensors|bin)")
_ANY_SHARD = re.compile(r"(?P<stem>.+?)(?:\.\w+)?-\d{5}-of-(?P<count>\d{5})(?:\.\w+)?\.(?P<container>\w+)")


@dataclass(frozen=True, slots=True)
class Weights:
    """The names of the weights of a folder.

    Attributes:
        container: `safetensors`, `bin` or `msgpack`.
        file: the one file, or the index, or the first of several shards without an index.
        form: one file, several files with an index, or several files without one.
        stem: for example `model` or `adapter_model`.
        variant: for example `fp16`.
    """

    container: Container
    file: str
    form: Literal["single", "sharded", "no index"]
    stem: str
    variant: str | None = None

    @property
    def version(self) -> str:
        """The format version, as far as the names determine it."""
        word = "single" if self.form == "single" else "sharded"
        return f"{word} {CONTAINER_WORDS[self.container]}"


def find_weights(names: Mapping[str, object]) -> Weights | None:
    """The weights that transformers would load from a folder with these files, or None."""
    sets = weight_sets(names)
    if sets and sets[0].container == _ORDER[0]:
        return sets[0]
    return _without_a_known_stem(names) or (sets[0] if sets else None)


def flax_weights(names: Mapping[str, object]) -> Weights | None:
    """The weights that the Flax classes of transformers would load from a folder with these files, or None."""
    return next((weights for weights in weight_sets(names) if weights.container == "msgpack"), None)


def weight_sets(names: Mapping[str, object]) -> list[Weights]:
    """Every set of weights with a known stem, in order of precedence."""
    found = [weights for name in names if (weights := _parse_name(name)) is not None]
    counts = Counter(one.groups() for name in names if (one := _ANY_SHARD.fullmatch(name)))
    whole = {(stem, container) for (stem, count, container), files in counts.items() if files >= int(count)}
    return sorted(
        found,
        key=lambda weights: (
            _STEMS.index((weights.stem, weights.container)),
            weights.variant or "",
            # transformers looks for the one file first. Next to a whole set it is a remainder of another save.
            (weights.form == "single") == ((weights.stem, weights.container) in whole),
            weights.file,
        ),
    )


@lru_cache(1 << 10)
def _parse_name(name: str) -> Weights | None:
    """The facts in a file name with a known stem; cached, since several formats parse the same names."""
    for form, pattern in _NAMES.items():
        found = pattern.fullmatch(name)
        if found and (found["stem"], found["container"]) in _STEMS:
            groups = found.groupdict()
            variant = groups["variant"] or groups.get("before") or groups.get("between")
            return Weights(cast("Container", found["container"]), name, form, found["stem"], variant)
    return None


def _without_a_known_stem(names: Mapping[str, object]) -> Weights | None:
    index = next((name for name in sorted(names) if _ANY_INDEX.fullmatch(name)), None)
    if index is not None:
        return Weights("safetensors", index, "sharded", index.split(".safetensors")[0])
    only = [found for name in names if (found := _ONE_OF_ONE.fullmatch(name))]
    if len(only) == 1:
        (found,) = only
        return Weights(cast("Container", found["container"]), found.string, "single", found["stem"])
    shard = next((name for name in sorted(names) if _SHARD.fullmatch(name)), None)
    return None if shard is None else Weights("safetensors", shard, "no index", shard.split("-")[0])


def variant_of(name: str) -> str | None:
    """The variant that a file name states, for example `fp16`; None for every other name."""
    return next((one.variant for one in weight_sets({name: None}) if one.variant), None)


_DIGITS = re.compile(r"(\d+)")


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """The files of a checkpoint to write.

    Attributes:
        files: file name → its tensors.
        index_name: name of the index; None for a single file.
        container: of the files.
    """

    files: dict[str, list[TensorSpec]]
    index_name: str | None
    container: Container = "safetensors"

    @property
    def version(self) -> str:
        """The format version of the checkpoint to write."""
        return f"{'sharded' if self.index_name else 'single'} {CONTAINER_WORDS[self.container]}"

    @property
    def index(self) -> tuple[str, Callable[[], bytes]] | None:
        """Name of the index, and what computes its contents."""
        return (self.index_name, partial(_index_file, self.files)) if self.index_name else None


def spread_tensors(
    tensors: Iterable[TensorSpec], most: int, stem: str, container: Container = "safetensors"
) -> ShardPlan:
    """Distribute tensors over files.

    Args:
        tensors: the tensors.
        most: bytes of tensors in one file, unless a single tensor is larger.
        stem: first part of the file names.
        container: their ending.
    """
    groups: list[list[TensorSpec]] = [[]]
    filled = 0
    for spec in sorted(tensors, key=lambda spec: natural_key(_name(spec))):
        size = stored_size(spec)
        if groups[-1] and filled + size > most:
            groups.append([])
            filled = 0
        groups[-1].append(spec)
        filled += size
    if len(groups) == 1:
        return ShardPlan({f"{stem}.{container}": groups[0]}, None, container)
    count = len(groups)
    files = {
        f"{stem}-{number:05d}-of-{count:05d}.{container}": group for number, group in enumerate(groups, 1)
    }
    return ShardPlan(files, f"{stem}.{container}.index.json", container)


def _name(spec: TensorSpec) -> str:
    return "/".join(spec.path)


def natural_key(name: str) -> list[tuple[int, str]]:
    """A sort key in which runs of digits compare as numbers."""
    parts = _DIGITS.split(name)
    return [
        (len(part.lstrip("0")), part.lstrip("0")) if at % 2 else (0, part) for at, part in enumerate(parts)
    ]


def _index_file(files: dict[str, list[TensorSpec]]) -> bytes:
    specs = [spec for group in files.values() for spec in group]
    total = {
        "total_parameters": sum(spec.size for spec in specs),
        "total_size": sum(stored_size(spec) for spec in specs),
    }
    weight_map = {_name(spec): name for name, group in files.items() for spec in group}
    text = json.dumps(
        {"metadata": total, "weight_map": weight_map}, indent=2, sort_keys=True, ensure_ascii=False
    )
    return f"{text}\n".encode()
