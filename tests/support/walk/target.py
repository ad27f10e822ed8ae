"""What the target of a draw computes: by the judges of `tests.support.judges`, and MaxText by its forward pass.

Four systems are judged by libraries in environments of their own. They are used only where a walk says so: an
environment takes minutes to make, and MaxText itself half a minute for a model.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import yaml

from tests.support.judges.judge import Here, Judge, judge_for
from tests.support.oracles import files, maxtext
from tests.support.oracles.cases import MODEL_NAMES, leaves_of
from tests.support.oracles.judge import ALLOWED, ALLOWED_DELTA
from tests.support.oracles.leaves import Leaves
from tests.support.oracles.maxtext_itself import round_factor
from tests.support.walk.models import SEQUENCE, logits, tokens

if TYPE_CHECKING:
    import numpy as np

    from tests.support.walk.draw import Draw


Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

LIBRARIES = ("huggingface-flax", "maxtext", "megatron", "torchtitan")  # in environments of their own
# Labels of the walk whose block MaxText knows by the name of a model.
_NAMES = {"gemma3_text": "gemma3", "deepseek_v3": "deepseek-v3", "deepseek_v32": "deepseek-v3.2"}


# The forms that the judges load; Megatron reads the others with other options of its own, torchtitan 0.2 is not here.
_FORMS = {"megatron": {"stacked_layers": "true", "stacked_experts": "true"}, "torchtitan": {"release": "0.3"}}


class Judges:
    """The judges of a walk, each started when it is first used.

    Args:
        libraries: which of `LIBRARIES` are used.
    """

    def __init__(self, libraries: Collection[str] = ()) -> None:
        self._libraries, self._started, self._open = frozenset(libraries), dict[str, "Judge"](), ExitStack()

    def of(self, draw: Draw) -> Judge | None:
        """The judge of the target of a draw; None if nothing loads it and computes what it computes."""
        system = draw.system
        if system in LIBRARIES and system not in self._libraries:
            return _FORWARD.get(system)
        if any(draw.options.get(name, choice) != choice for name, choice in _FORMS.get(system, {}).items()):
            return None
        if system == "huggingface-flax" and draw.settings.get("max_position_embeddings", SEQUENCE) < SEQUENCE:
            return None  # the Flax classes compute no longer sequence than that
        if system not in self._started:
            self._started[system] = self._open.enter_context(judge_for(system))
        return self._started[system]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._open.close()


def wanted(source: Path, draw: Draw, judge: Judge | None) -> Array:
    """What transformers computes from the source, by each of its attentions, rounded where the judge rounds."""
    return logits(source, draw.label, change=judge.rounds if judge else None)


def computed(target: Path, source: Path, draw: Draw, judge: Judge) -> Array:
    """What the target computes."""
    if draw.options.get("router_bias") == "params" and isinstance(judge, Here):
        return _forward(target, tokens().numpy(), draw.label, stacked=True)
    return judge.logits(target, tokens().numpy(), draw.label, source)


def allowed(draw: Draw, judge: Judge | None) -> float:
    """What roundings may change, as a share of the largest logit."""
    most = judge.allowed if judge else ALLOWED
    return max(most, ALLOWED_DELTA) if draw.label == "qwen3_next" and draw.system == "maxtext" else most


def _maxtext(target: Path, given: Array, label: str, _source: Path | None) -> Array:
    return _forward(target, given, label, stacked=False)


def _forward(target: Path, given: Array, label: str, *, stacked: bool) -> Array:
    """MaxText's forward pass; `stacked` says that the router's bias is stacked as all parameters."""
    config = yaml.safe_load((target / "items" / "assets" / "maxtext_config.yml").read_text())
    arrays = files.arrays("maxtext", target)
    leaves = Leaves(files.below(arrays, "params/params/")) if stacked else leaves_of(arrays, config)
    name = MODEL_NAMES.get(_NAMES.get(label, ""), {})
    found = maxtext.logits(leaves, {"max_target_length": SEQUENCE, **name, **config}, given)
    leaves.require_all_taken()
    return found


_FORWARD = {
    "maxtext": Here("a forward pass written from MaxText's source", ALLOWED, _maxtext, rounds=round_factor)
}
