"""The judges notice a layout that is wrong in one place: two of equal shape exchanged, a word of values left out, a
square matrix transposed.

Each mutation is a family file that extends the family, as a user passes with `--family-file`. What is carried there
and back is equal with every one of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import pytest

import wherry
from tests.support.families import Made, carried
from tests.support.oracles import huggingface, judge, lingua, maxtext, paxml, t5x
from tests.support.oracles.cases import MODEL_NAMES, leaves_of
from tests.support.oracles.huggingface import MODELS, TOKENS
from tests.support.oracles.leaves import DisagreementError, Invented, Leaves
from wherry.core.request import LayoutRequest
from wherry.families import convert_layout, load_family, load_family_file
from wherry.families.config_files import parse_config, render_config
from wherry.families.config_written import written_config

pytest.importorskip("transformers")

CASES = [
    ("llama", "maxtext"), ("llama-3.1", "maxtext"), ("llama", "lingua"), ("llama-square", "maxtext"),
    ("llama-square", "lingua"), ("mistral", "maxtext"), ("mixtral", "maxtext"), ("gpt3", "maxtext"),
    ("qwen2", "maxtext"), ("qwen3", "maxtext"), ("qwen3-moe", "maxtext"), ("gemma", "maxtext"), ("gemma2", "maxtext"),
    ("granite-tied", "maxtext"), ("granite", "lingua"), ("gemma3", "maxtext"), ("deepseek-v2", "maxtext"),
    ("deepseek-v3-yarn", "maxtext"), ("t5-1.1", "t5x"), ("umt5", "t5x"),
]  # fmt: skip
GPT3 = paxml.Sizes(3, 32, 4, 8, 48, 60, 16, repeat=True)
OPTIONS = {"maxtext": {"scan_layers": "false"}, "t5x": {"scan_layers": "false"}}


class Mutation(NamedTuple):
    """A changed layout: parameter → key path, axes and words."""

    name: str
    layouts: dict[str, list[str]]


def mutations(label: str, system: str) -> Iterator[Mutation]:
    """All of one model and system: neighbours with the same axes exchanged, layouts with words without them.

    Of a model whose feed-forward layer is as wide as the model, square matrices are transposed instead.
    """
    family, projected = family_of(label), projection(label, family_of(label), system)
    there = projected.source.present["params"]
    rows = {row.parameters[0]: row for row in family.systems[system].layouts if row.parameters[0] in there}
    if label.endswith("-square"):
        yield from (
            Mutation(f"{name}-transposed", {name: [row.key, " ".join(reversed(_dimensions(row)))]})
            for name, row in rows.items()
            if len(_dimensions(row)) == 2
            and name not in ("embedding", "head", "key", "value")
            and not row.words
        )
        return
    by_axes: dict[tuple[str, ...], list[str]] = {}
    for name in rows:
        by_axes.setdefault(family.parameters[name].axes, []).append(name)
    for names in by_axes.values():
        for one, other in pairwise(names):
            yield Mutation(f"{one}-is-{other}", {one: _text(rows[other]), other: _text(rows[one])})
    for name, row in rows.items():
        if any(_resolved(family.systems[system], word, projected.chosen) for word in row.words):
            yield Mutation(f"{name}-without-words", {name: [row.key, row.axes[0]]})


def _text(row) -> list[str]:
    return [row.key, row.axes[0], *row.words]


def _dimensions(row) -> list[str]:
    return re.findall(r"\([^)]*\)|\S+", row.axes[0])


def _resolved(system, word, chosen) -> str:
    """A word of values; that of a macro may be empty."""
    if not word.startswith("<"):
        return word
    macro = system.macros[word.strip("<>")]
    return macro[" ".join(chosen[name] for name in macro["by"].split())]


def family_of(label):
    return load_family(MODELS[label].family if label in MODELS else label)


@cache
def checkpoint(label):
    """A source in memory and its config: a model of transformers, or PaxML's GPT-3."""
    if label == "gpt3":
        invented = Invented()
        paxml.logits(invented, GPT3, TOKENS)
        return Made(
            {("mdl_vars", "params", "lm", *name.split("/")): one for name, one in invented.arrays.items()}
        ), None
    folder = judge.source(label)
    with wherry.open(folder) as opened:
        tensors = {path: opened.read(path) for path in opened.manifest.tensors}
    return Made(tensors), json.loads((folder / "config.json").read_text())


@cache
def expected(label):
    """The source's logits."""
    return paxml.logits(Invented(), GPT3, TOKENS) if label == "gpt3" else judge.wanted(label)


def projection(label, family, system):
    made, config = checkpoint(label)
    source = "paxml" if label == "gpt3" else "huggingface"
    return convert_layout(
        made.manifest, family, source, system, config=config, options=OPTIONS.get(system, {})
    )


def logits(label, family, system):
    """What the target computes, all in memory."""
    projected, (made, _config) = projection(label, family, system), checkpoint(label)
    arrays = {"/".join(path): one for path, one in carried(projected, made.read).tensors.items()}
    write = projected.system.write
    config = parse_config(write.file, render_config(write.file, written_config(projected).config))
    return FORWARD[system](label, arrays, config)


def _maxtext(label, arrays, config):
    return maxtext.logits(leaves_of(arrays, config), {**MODEL_NAMES.get(label, {}), **config}, TOKENS)


def _lingua(_label, arrays, config):
    leaves = Leaves({name.removeprefix("model."): one for name, one in arrays.items()})
    return lingua.logits(leaves, config["model"], TOKENS)


def _t5x(label, arrays, config):
    own = label == "umt5"  # whose output transformers scales
    network = t5x.Network({**t5x.DEFAULTS, **config}, own_bias=own)
    leaves = Leaves({name.removeprefix("target/"): one for name, one in arrays.items()})
    return t5x.logits(leaves, network, TOKENS, TOKENS[:, ::-1]) / (32**0.5 if own else 1)


FORWARD = {"maxtext": _maxtext, "lingua": _lingua, "t5x": _t5x}


@pytest.mark.parametrize(("label", "system"), CASES)
def test_unchanged_layouts_are_right(label, system):
    judge.require_equal(logits(label, family_of(label), system), expected(label))


@pytest.mark.parametrize(("label", "system"), CASES)
def test_every_mutation_is_noticed(label, system, tmp_path):
    found = {one.name: noticed(label, system, one, tmp_path) for one in mutations(label, system)}
    assert len(found) > 1
    assert [name for name, seen in found.items() if not seen] == []


def noticed(label, system, mutation, folder) -> bool:
    """Whether the logits are others, or the forward pass does not find what it reads."""
    file = folder / f"{mutation.name}.toml"
    file.write_text(family_file(family_of(label).name, system, mutation))
    try:
        found = logits(label, load_family_file(str(file)), system)
    except DisagreementError:
        return True
    return huggingface.apart(found, expected(label)) > judge.WRONG


def family_file(family, system, mutation) -> str:
    rows = "".join(f"{name} = {json.dumps(row)}\n" for name, row in mutation.layouts.items())
    return f'extends = "{family}"\nname = "{family}"\n\n[systems.{system}.layouts]\n{rows}'


def test_the_whole_way_with_a_family_file(tmp_path):
    """Gate and up of MaxText's llama exchanged, from files to files: there and back equal, the judge notices."""
    mutation = next(one for one in mutations("llama", "maxtext") if one.name == "gate-is-up")
    (tmp_path / "wrong.toml").write_text(family_file("llama", "maxtext", mutation))
    layout, source = LayoutRequest(family_file=str(tmp_path / "wrong.toml")), judge.source("llama")
    wherry.convert(source, tmp_path / "there", to="maxtext", layout=layout, lineage=False)
    wherry.convert(tmp_path / "there", tmp_path / "back", to="huggingface", layout=layout, lineage=False)
    right = LayoutRequest(family="llama")
    wherry.convert(tmp_path / "there", tmp_path / "judged", to="huggingface", layout=right, lineage=False)
    assert huggingface.apart(huggingface.logits(tmp_path / "back"), judge.wanted("llama")) < judge.ALLOWED
    assert huggingface.apart(huggingface.logits(tmp_path / "judged"), judge.wanted("llama")) > judge.WRONG
