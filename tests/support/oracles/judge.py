"""What the judgements of all systems share: the tolerance, the sources, and which pairs are judged.

`into` compares what a target computes from what wherry wrote with what transformers computes from the source, `out_of`
what transformers computes from what wherry wrote with what the system computes from random tensors of its own.

Tensors are float32, and everything is computed in float64; the words of values (scale, shift) round once, transformers
computes its norms and rotary positions in float32. That makes less than 2e-6 of the largest logit in most models, and
about 1e-5 in Gemma 4 E4B on some processors; 3e-5 is allowed, and a layout that is wrong in one place makes more than
1e-3. A gated delta net, whose memory adds up over positions, it computes in float32 altogether: 1e-4.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any, TypeAlias

from tests.support.oracles import huggingface
from tests.support.oracles.huggingface import TOKENS, apart

if TYPE_CHECKING:
    import numpy as np


Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

ALLOWED, ALLOWED_DELTA, WRONG = 3e-5, 1e-4, 1e-3


@cache
def source(label: str) -> Path:
    """The folder of a model, saved once for each process."""
    return huggingface.save(label, Path(mkdtemp(prefix=f"{label}-")))


@cache
def wanted(label: str) -> Array:
    """The logits of a model by transformers."""
    return huggingface.logits(source(label), TOKENS)


def allowed(label: str) -> float:
    """What roundings may change in the logits of a model."""
    return ALLOWED_DELTA if label.startswith("qwen3-next") else ALLOWED


def require_equal(found: Array, expected: Array, allowed: float = ALLOWED) -> None:
    """Logits are equal up to roundings, and say something: not all tokens have the same."""
    assert expected.std() > 0.05, "the model computes next to nothing"
    difference = apart(found, expected)
    assert difference <= allowed, f"the logits differ by {difference:.1e} of the largest"
