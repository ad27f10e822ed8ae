"""What the target computes from what wherry wrote: by a forward pass of its definition, or by its own classes."""

from __future__ import annotations

import json
import re
from ast import literal_eval
from typing import TYPE_CHECKING, Any

import yaml

from tests.support.oracles import files, lingua, maxtext, penzai, t5x
from tests.support.oracles.cases import MODEL_NAMES, leaves_of
from tests.support.oracles.judge import ALLOWED, ALLOWED_DELTA
from tests.support.oracles.leaves import Leaves
from tests.support.oracles.maxtext_itself import round_factor
from tests.support.walk.models import BASES, SEQUENCE, logits, meta_params, tokens
from tests.support.walk.walk import SAME

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import numpy as np

    from tests.support.walk.draw import Draw

    Array = np.ndarray[Any, np.dtype[Any]]

_SINGLE = 2e-4  # Penzai computes in float32
# Labels of the walk whose block MaxText knows by the name of a model.
_NAMES = {"gemma3_text": "gemma3", "deepseek_v3": "deepseek-v3", "deepseek_v32": "deepseek-v3.2"}
_ROOTS = {"lingua": "model.", "lingua-consolidated": "model/"}


class NotJudgedError(Exception):
    """Nothing computes what this target computes."""


def wanted(source: Path, draw: Draw) -> Array:
    """What transformers computes from the source, rounded where the target is rounded."""
    change = round_factor if draw.system == "maxtext" else None
    found = logits(source, draw.label, change=change)
    if draw.system == "t5x" and BASES[draw.label].config == "UMT5":
        # transformers scales the output of UMT5's decoder, T5X only if logits go through the embedding.
        return found * draw.settings["d_model"] ** 0.5
    return found


def computed(target: Path, source: Path, draw: Draw) -> Array:
    """What the target computes.

    Raises:
        NotJudgedError: nothing computes it.
    """
    if draw.system not in _JUDGES:
        raise NotJudgedError(draw.system)
    return _JUDGES[draw.system](target, source, draw)


def allowed(draw: Draw) -> float:
    """What roundings may change, as a share of the largest logit."""
    if draw.system == "penzai":
        return _SINGLE
    if draw.label == "qwen3_next":
        return ALLOWED_DELTA
    return SAME if draw.system == "huggingface" else ALLOWED


def _huggingface(target: Path, _source: Path, draw: Draw) -> Array:
    return logits(target, draw.label, own=False)


def _maxtext(target: Path, _source: Path, draw: Draw) -> Array:
    config = yaml.safe_load((target / "items" / "assets" / "maxtext_config.yml").read_text())
    arrays = files.arrays("maxtext", target)
    if draw.options.get("router_bias") == "params":  # stacked as all parameters already
        leaves = Leaves(files.below(arrays, "params/params/"))
    else:
        leaves = leaves_of(arrays, config)
    name = MODEL_NAMES.get(_NAMES.get(draw.label, ""), {})
    found = maxtext.logits(leaves, {"max_target_length": SEQUENCE, **name, **config}, tokens().numpy())
    leaves.require_all_taken()
    return found


def _lingua(target: Path, _source: Path, draw: Draw) -> Array:
    args = json.loads((target / "params.json").read_text())["model"]
    root = next(root for name, root in _ROOTS.items() if name == draw.to)
    return _llama(files.below(files.arrays(draw.to, target), root), args)


def _meta(target: Path, source: Path, _draw: Draw) -> Array:
    return _llama(files.arrays("torch-zip", target), meta_params(source))


def _llama(arrays: dict[str, Array], args: dict[str, Any]) -> Array:
    leaves = Leaves(arrays)
    found = lingua.logits(leaves, args, tokens().numpy())
    leaves.require_all_taken()
    return found


def _penzai(target: Path, source: Path, draw: Draw) -> Array:
    import orbax.checkpoint as ocp

    from wherry.integrations.penzai.rebuild import named_arrays

    arrays = named_arrays(ocp.StandardCheckpointer().restore(target), target)
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(source).to_dict()
    stack = draw.options["layer_stack"] == "true"
    return penzai.logits(penzai.bound(penzai.build(config, stack=stack), arrays), tokens().numpy())


def _t5x(target: Path, _source: Path, draw: Draw) -> Array:
    rows = re.findall(
        r"^[\w./]*T5Config\.(\w+) *= *(.+)$", (target / "architecture.gin").read_text(), re.MULTILINE
    )
    config = {name: literal_eval(value) for name, value in rows}
    leaves = Leaves(files.below(files.arrays(draw.to, target), "target/"))
    own = "encoder/relpos_bias/rel_embedding" not in leaves
    network = t5x.Network({**t5x.DEFAULTS, **config}, apart=draw.options["heads"] == "apart", own_bias=own)
    given = tokens().numpy()
    found = (
        t5x.encode(leaves, network, given)
        if draw.label == "t5_encoder"
        else t5x.logits(leaves, network, given, given[:, ::-1])
    )
    leaves.require_all_taken()
    return found


_JUDGES: dict[str, Callable[[Path, Path, Draw], Array]] = {
    "huggingface": _huggingface, "maxtext": _maxtext, "lingua": _lingua, "meta": _meta, "penzai": _penzai, "t5x": _t5x,
}  # fmt: skip
