"""Configs with huge numbers: a model of two thousand million layers in ten digits, in each attribute of each family."""

from __future__ import annotations

import json
import random
import re
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from attacks import lies, prepare
from attacks.case import Case
from attacks.folders import copy_and_change, document, files_of
from attacks.heads import safetensors

_FAMILIES = Path(__file__).resolve().parents[2] / "wherry" / "families"
HUGE = (2_000_000_000, 250_001, 2**63, 10**400, -(2**31), 1e300)
_SMALL = 2
_EACH = 8  # numbers that are replaced in each config
_NAME = re.compile(r"\b[a-z][a-z0-9_]{2,}\b(?!\s*\()")  # of an attribute in an expression; not of a function
_NUMBER = re.compile(rb"(?<=[=:\s])\d+(?=\s)")  # in YAML and gin
_WORDS = frozenset(("and", "or", "not", "none", "true", "false", "else", "for", "there"))
_TENSORS = {
    name: {"dtype": "F32", "shape": [2, 2], "data_offsets": [at, at + 16]}
    for name, at in (("model.embed_tokens.weight", 0), ("model.layers.0.mlp.up_proj.weight", 16))
}


def attributes(family: dict[str, Any]) -> list[str]:
    """The attributes of a Hugging Face config that a family's declaration uses for sizes and facts."""
    rules = family.get("systems", {}).get("huggingface", {}).get("config", {})
    texts = [str(text) for part in ("sizes", "facts") for text in rules.get(part, {}).values()]
    return sorted({name for text in texts for name in _NAME.findall(re.sub(r"'[^']*'", "", text))} - _WORDS)


def _families() -> Iterator[Case]:
    for file in sorted(_FAMILIES.glob("*.toml")):
        family = tomllib.loads(file.read_text("utf-8"))
        generator = random.Random(file.stem)
        small = dict.fromkeys(attributes(family), _SMALL)
        for model_type in family.get("model_types", []):
            sound = {"model_type": model_type, "torch_dtype": "float32", **small}
            yield Case(
                f"count-family/{file.stem}-{model_type}-all",
                _folder({**sound, **dict.fromkeys(small, HUGE[0])}),
            )
            for name in generator.sample(sorted(small), min(_EACH, len(small))):
                value = generator.choice(HUGE)
                yield Case(f"count-family/{file.stem}-{model_type}-{name}", _folder({**sound, name: value}))


def _folder(config: dict[str, Any]) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        place = folder / "model"
        place.mkdir()
        (place / "config.json").write_text(json.dumps(config))
        (place / "model.safetensors").write_bytes(safetensors(json.dumps(_TENSORS).encode()))
        return place

    return make


def _sound(place: Path) -> Iterator[Case]:
    """The configs in and next to sound checkpoints, in JSON, YAML and gin."""
    for name, home, path in prepare.sound(place):
        for file in [*files_of(path), *path.parent.glob("*.yml"), *path.parent.glob("*.gin")]:
            for number, text in enumerate(texts_with_a_huge_number(file)):
                change = _write(path, file, text)
                yield Case(
                    f"count-{name}/{file.relative_to(home)}-{number}", copy_and_change(home, path, change)
                )


def texts_with_a_huge_number(file: Path) -> Iterator[bytes]:
    """A config with one number that is huge; nothing if it has no numbers, or is no config."""
    generator = random.Random(file.name)
    if file.suffix in (".yml", ".yaml", ".gin"):
        text = file.read_bytes()
        spans = [found.span() for found in _NUMBER.finditer(text)]
        for begin, end in generator.sample(spans, min(_EACH, len(spans))):
            yield text[:begin] + str(generator.choice(HUGE)).encode() + text[end:]
        return
    sound = document(file)
    numbers = [place for place in lies.places(sound) if type(lies.value_at(sound, place)) is int]
    for where in generator.sample(numbers, min(_EACH, len(numbers))):
        yield json.dumps(lies.replace_at(sound, where, generator.choice(HUGE))).encode()


def _write(path: Path, file: Path, text: bytes) -> Callable[[Path], object]:
    """A change of one file in the copy of a checkpoint, or next to it."""
    if path == file:
        return lambda found: found.write_bytes(text)
    inside = file.relative_to(path) if file.is_relative_to(path) else Path("..") / file.name
    return lambda found: (found / inside).write_bytes(text)


def cases(place: Path) -> Iterator[Case]:
    """Every one; `place` has what `prepare` made."""
    yield from _families()
    yield from _sound(place)
