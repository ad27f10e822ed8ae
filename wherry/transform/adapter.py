"""adapter: a LoRA adapter between two systems: its family, its scale, and the files that state the scale.

The scale alpha / rank is in no tensor. PEFT states it in `adapter_config.json`, which goes along to other systems;
MaxText in the `custom_metadata` of the step (`lora`: rank and alpha). Both are read and written, so that either system
applies the adapter as the other did.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from wherry.cures import Argument, Blank, Command, Cure
from wherry.errors import MismatchError, UnrepresentableError
from wherry.families import load_family, source_tree, system_of_format
from wherry.families.adapters import ALPHA, MAXTEXT, PEFT, RANK, adapter_family, is_of_adapters
from wherry.families.bind import unknown_tensors
from wherry.families.companions import CompanionFiles
from wherry.families.project import Projection
from wherry.families.roots import named_manifest
from wherry.families.schema import Family
from wherry.layout.tree_reading import read_tree
from wherry.transform.model import ADAPTER, json_companion
from wherry.transform.peft import LORA, SCALE, START, is_number, refusal

if TYPE_CHECKING:
    from wherry.formats.checkpoint import Checkpoint
    from wherry.formats.format import Format

_DECLARED = ("lora", "lora-fused")  # families of adapters of Megatron-Bridge
_OF_MEGATRON = ".adapter."
_EXPERTS = ".experts."
_OF_MAXTEXT = frozenset({"kernel_lora_a", "kernel_lora_b"})
_NOTES, _TABLE, _RANK = "checkpoint", "lora", "lora_rank"  # in the custom metadata of a step of MaxText
_CURE = Cure(
    "merge the adapter into its base ({}) and convert the result",
    Command("merge", Blank("BASE"), Blank("ADAPTER"), Blank("DST"), Argument("to", Blank("FORMAT"))),
)


def is_adapter(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint has matrices of LoRA, under the names of PEFT, Megatron-Bridge or MaxText."""
    return any(
        (path[0].startswith(START) or _OF_MEGATRON in path[0])
        if len(path) == 1
        else not _OF_MAXTEXT.isdisjoint(path[-2:])
        for path in checkpoint.manifest.tensors
    )


def family_of_adapters(found: Family, checkpoint: Checkpoint, row: Format) -> Family:
    """The family of the adapters of a family's models: of those with both systems, one that knows the most tensors."""
    if is_of_adapters(found):
        return found
    candidates = [one for one in (adapter_family(found), *map(load_family, _DECLARED)) if one is not None]
    manifest = checkpoint.manifest
    reading = read_tree(manifest)
    unknown = {
        one.name: unknown_tensors(
            one, source.system, named_manifest(manifest, source.tree), source.tree.outside
        )
        for one in candidates
        if (source := source_tree(one, checkpoint.detection.format, manifest, reading)) is not None
        and system_of_format(one, row.name) is not None
    }
    known = [one for one in candidates if one.name in unknown]
    return min(known, key=lambda one: unknown[one.name], default=candidates[0])


def adapter_facts(checkpoint: Checkpoint, family: Family) -> dict[str, Any]:
    """The alpha of an adapter, for a family whose systems state it.

    Raises:
        UnrepresentableError: the adapter is of a kind that no layout has, or its alpha is no number; it is named.
        MismatchError: PEFT's file and MaxText's metadata contradict each other.
    """
    config, notes = json_companion(checkpoint, ADAPTER), _notes(checkpoint)
    reason = refusal(config, SCALE) if config is not None else None
    if reason is not None:
        raise UnrepresentableError(f"{ADAPTER}: {reason}", uri=checkpoint.uri, cure=_CURE)
    experts = [  # modules of their own, as transformers 4 has them
        path[0] for path in checkpoint.manifest.tensors if _EXPERTS in path[0] and path[0].startswith(START)
    ]
    if experts:
        raise UnrepresentableError(
            "adapters of experts have no layout: MaxText and Megatron compute experts otherwise",
            uri=checkpoint.uri, path=min(experts), cure=_CURE,
        )  # fmt: skip
    alpha: Any = None if config is None else config["lora_alpha"]
    if config is not None and config.get("use_rslora"):
        alpha *= math.sqrt(config["r"])  # PEFT divides it by the root of the rank, layouts by the rank
    found = (_require_number(one) for one in (alpha, notes.get(ALPHA)) if one is not None)
    stated = [one for one in found if one]
    if len(stated) > 1 and not math.isclose(*stated):
        raise MismatchError(
            f"{ADAPTER} states an alpha of {stated[0]}, but the metadata of the step {stated[1]}",
            uri=checkpoint.uri,
            cure=Cure("correct one of them, or state it with {}", Argument("set", Blank(f"{ALPHA}=VALUE"))),
        )
    return {ALPHA: stated[0]} if stated and ALPHA in family.facts else {}


def _require_number(alpha: Any) -> float:
    if not is_number(alpha):
        raise UnrepresentableError(
            f"the alpha of the adapter is {alpha!r}, not a number",
            cure=Cure("state it with {}", Argument("set", Blank(f"{ALPHA}=VALUE"))),
        )
    return alpha


def _projected_alpha(projected: Projection) -> float | None:
    """The alpha that the user, a file or a record of wherry's states; None if nothing does."""
    alpha = projected.source.config_facts.facts.get(ALPHA)
    return None if alpha is None else _require_number(alpha)


def _notes(checkpoint: Checkpoint) -> dict[str, Any]:
    """The facts about the adapter that MaxText recorded in the metadata of the step."""
    around = checkpoint.manifest.custom.get(_NOTES)
    table = around.get(_TABLE) if isinstance(around, dict) else None
    return table if isinstance(table, dict) else {}


def require_rank(checkpoint: Checkpoint, projected: Projection) -> None:
    """Compare the rank of the tensors with the stated ones.

    Raises:
        MismatchError: they differ.
    """
    rank = projected.source.solved.sizes[RANK]
    for source, stated in (
        (ADAPTER, (json_companion(checkpoint, ADAPTER) or {}).get("r")),
        ("the metadata of the step", _notes(checkpoint).get(_RANK) or None),
    ):
        if stated is not None and stated != rank:
            raise MismatchError(
                f"the rank is {rank} in the tensors, but {stated} in {source}",
                uri=checkpoint.uri,
                cure="correct it, or pass the adapter that it belongs to",
            )


def with_config(made: CompanionFiles, projected: Projection, checkpoint: Checkpoint) -> CompanionFiles:
    """The files of a target with PEFT's config, if PEFT is the target and there is none next to the source."""
    companions = {one.name for one in checkpoint.manifest.companions}
    alpha = _projected_alpha(projected)
    if projected.system.name != PEFT or ADAPTER in companions or alpha is None:
        return made
    config = {
        "base_model_name_or_path": None, "bias": "none", "fan_in_fan_out": False, "inference_mode": True,
        "init_lora_weights": True, "lora_alpha": int(alpha) if alpha == int(alpha) else alpha, "lora_dropout": 0.0,
        "peft_type": LORA, "r": projected.source.solved.sizes[RANK],
        "target_modules": _modules(path[-1] for path in projected.targets), "task_type": "CAUSAL_LM",
    }  # fmt: skip
    data = json.dumps(config, indent=2) + "\n"
    return replace(made, files={**made.files, ADAPTER: data.encode()})


def _modules(names: Iterable[str]) -> list[str]:
    """The modules of an adapter as PEFT finds them: the last part of a name, with the one above if several have it."""
    parents: defaultdict[str, set[str]] = defaultdict(set)
    for name in names:
        above, module = name.partition(".lora_")[0].split(".")[-2:]
        parents[module].add(above)
    rows = parents.items()
    return sorted(
        one
        for module, above in rows
        for one in ([module] if len(above) == 1 else [f"{up}.{module}" for up in above])
    )


def notes_of(projected: Projection, checkpoint: Checkpoint) -> dict[str, Any] | None:
    """The free metadata with which MaxText finds rank and alpha; None for another target."""
    alpha = _projected_alpha(projected)
    if projected.system.name != MAXTEXT or alpha is None:
        return None
    around = checkpoint.manifest.custom.get(_NOTES)
    rank = projected.source.solved.sizes[RANK]
    table = {**_notes(checkpoint), "enable_lora": True, _RANK: rank, ALPHA: float(alpha)}
    return {_NOTES: {**(around if isinstance(around, dict) else {}), _TABLE: table}}
