"""Families of LoRA adapters, derived from the families of the models that they adapt: `llama-lora` from `llama`.

An adapter adds scale · B · A to a projection W, so its two matrices lie as the axes of W do: A has the axes that W
multiplies and the rank, B has the rank and the axes that W makes. The layout of W holds for A and B too: the stack of
layers, the order of rotary positions, and a factor in W, which becomes a factor in B. So no family file repeats them.

    PEFT      base_model.model.<module>.lora_A.weight          rank (inputs)
              base_model.model.<module>.lora_B.weight          (outputs) rank
    MaxText   decoder/…/query/kernel_lora_a                    (inputs) rank, with the layers along `param_scan_axis`
              decoder/…/query/kernel_lora_b                    rank (outputs), all heads in one dimension

Facts: PEFT 0.21 (tuners/lora/layer.py, utils/save_and_load.py). MaxText 0.2.5 (utils/lora_utils.py) and Qwix 0.1.8
(providers/lora.py), which makes such a pair for every `dot_general` with a kernel, and multiplies it by alpha / rank.
`restore_lora_from_path` takes a tree with `decoder` at the root; trainers and `to_maxtext` put `params` above it.
Left out are experts and routers, which MaxText computes otherwise, embeddings, and the output layer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from wherry.families.schema import ConfigRules, Fact, Family, Parameter, Row, System, Write
from wherry.families.templates import DIMENSION
from wherry.layout.expr import names_in

SUFFIX = "-lora"
RANK = "rank"
ALPHA = "lora_alpha"
PEFT, MAXTEXT = "huggingface", "maxtext"
_STARTS = ("base_model.model.@",)
_ROOTS = ("@/value", "@", "params/@/value", "params/params/@/value", "params/params/@")
_WEIGHT, _KERNEL = ".weight", "/kernel"
_LEFT_OUT = frozenset({"expert", "vocab"})
_NAME = re.compile(r"<\w+>|[a-z_]\w*")
_PARTS = "which other parameters the base has"
_ALPHA = Fact(
    "alpha of the adapter, which the product of its matrices is multiplied with, divided by the rank"
)
_SNIPPETS = {
    PEFT: 'from peft import PeftModel\nmodel = PeftModel.from_pretrained(base, "{uri}")\n',
    MAXTEXT: "python3 -m maxtext.trainers.post_train.sft.train_sft BASE.yml load_parameters_path=BASE/0/items "
    "lora.enable_lora=true lora.lora_rank={rank} lora.lora_alpha={alpha} lora.lora_restore_path={uri}/items\n",
}


class _Sides(NamedTuple):
    """The dimensions of a projection in one system: those that it multiplies, and those that it makes."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def is_of_adapters(family: Family) -> bool:
    """Whether a family's checkpoints are adapters."""
    return RANK in family.axes


def adapter_family(base: Family) -> Family | None:
    """The family of the adapters of a family's models; None if MaxText has no layouts for these models."""
    pairs = dict(_projections(base))
    if not pairs:
        return None
    parameters = {name: one for row in pairs for name, one in _matrices(base, row, pairs[row][PEFT]).items()}
    return replace(
        base,
        name=f"{base.name}{SUFFIX}",
        about=f"LoRA adapters of {base.about}",
        model_types=(),
        distinction=None,
        yields_to=None,
        axes={**base.axes, RANK: "rank of the adapter"},
        parameters=parameters,
        facts={**base.facts, ALPHA: _ALPHA},
        systems={
            PEFT: _of_peft(base.systems[PEFT], pairs),
            MAXTEXT: _of_maxtext(base.systems[MAXTEXT], pairs),
        },
    )


def _projections(base: Family) -> Iterator[tuple[str, dict[str, _Sides]]]:
    """Parameter → system → its sides, of every matrix that both systems have as a tensor of its own."""
    if not {PEFT, MAXTEXT} <= set(base.systems):
        return
    peft, maxtext = (_own_rows(base.systems[name]) for name in (PEFT, MAXTEXT))
    for name, row in peft.items():
        dimensions = DIMENSION.findall(row.axes[0])
        other = maxtext.get(name)
        plain = len(dimensions) == 2 and not _LEFT_OUT & set(base.parameters[name].axes)  # noqa: PLR2004
        if not plain or other is None or row.words:
            continue
        if row.key.endswith(_WEIGHT) and other.key.endswith(_KERNEL):
            sides = _Sides((dimensions[1],), (dimensions[0],))
            inputs = set(_NAME.findall(dimensions[1]))
            others, system = DIMENSION.findall(other.axes[0]), base.systems[MAXTEXT]
            of_maxtext = _Sides(
                tuple(one for one in others if _axes(one, system) <= inputs),
                tuple(one for one in others if not _axes(one, system) & inputs),
            )
            assert len(of_maxtext.inputs) + len(of_maxtext.outputs) == len(others), others
            yield name, {PEFT: sides, MAXTEXT: of_maxtext}


def _own_rows(system: System) -> Mapping[str, Row]:
    """The rows of tensors that hold one parameter."""
    return {row.parameters[0]: row for row in system.layouts if len(row.parameters) == 1}


def _axes(dimension: str, system: System) -> set[str]:
    """The axes of a dimension, in whichever order a macro puts them."""
    found: set[str] = set()
    for name in _NAME.findall(dimension):
        macro = system.macros.get(name.strip("<>"), {}) if name.startswith("<") else {}
        texts = [text for choice, text in macro.items() if choice != "by"] or [name]
        found |= {axis for text in texts for axis in _NAME.findall(text)}
    return found


def _matrices(base: Family, name: str, sides: _Sides) -> dict[str, Parameter]:
    """The two matrices of a projection, which exist together."""
    inputs = {axis for one in sides.inputs for axis in _NAME.findall(one)}
    outputs = {axis for one in sides.outputs for axis in _NAME.findall(one)}
    axes = base.parameters[name].axes
    return {
        f"{name}_in": Parameter(
            (*(one for one in axes if one not in outputs), RANK), optional=True, part=name
        ),
        f"{name}_out": Parameter(
            (*(one for one in axes if one not in inputs), RANK), optional=True, part=name
        ),
    }


def _flat(dimensions: tuple[str, ...]) -> str:
    """Several dimensions as one."""
    names = [name for one in dimensions for name in _NAME.findall(one)]
    return f"({' '.join(names)})"


def _of_peft(system: System, pairs: Mapping[str, Mapping[str, _Sides]]) -> System:
    layouts: list[Row] = []
    for name, row in _own_rows(system).items():
        if name in pairs:
            module, sides = row.key.removesuffix(_WEIGHT), pairs[name][PEFT]
            layouts += [
                Row((f"{name}_in",), f"{module}.lora_A.weight", (f"{RANK} {_flat(sides.inputs)}",)),
                Row((f"{name}_out",), f"{module}.lora_B.weight", (f"{_flat(sides.outputs)} {RANK}",)),
            ]
    return _bare(system, "PEFT, LoRA", layouts, _STARTS)


def _of_maxtext(system: System, pairs: Mapping[str, Mapping[str, _Sides]]) -> System:
    layouts: list[Row] = []
    for name, row in _own_rows(system).items():
        if name in pairs:
            sides = pairs[name][MAXTEXT]
            layouts += [
                Row((f"{name}_in",), f"{row.key}_lora_a", (f"{_flat(sides.inputs)} {RANK}",)),
                Row(
                    (f"{name}_out",),
                    f"{row.key}_lora_b",
                    (f"{RANK} {_flat(sides.outputs)}",),
                    words=row.words,
                ),
            ]
    return _bare(system, "MaxText's LoRA, by Qwix", layouts, _ROOTS)


def _bare(system: System, about: str, layouts: list[Row], roots: tuple[str, ...]) -> System:
    """A system of adapters: its config is that of the base, and none is written."""
    rules = system.config
    parts = {name: _PARTS for text in rules.implied.values() for name in names_in(text)}
    config: ConfigRules = replace(rules, implied={}, ignored={**parts, **rules.ignored}, run=())
    words = {"rank": RANK, "alpha": ALPHA}
    return replace(
        system, about=about, layouts=tuple(layouts), slots={"params": roots}, config=config,
        write=Write(snippet=_SNIPPETS[system.name], words=words), tied={}, copies={}, untied={}, empties={},
        zeros={}, towers=(), apart=(), like=None, yields_to=None,
    )  # fmt: skip
