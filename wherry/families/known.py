"""The names that expressions of a target can use: what is known of the model, and how the target stores it."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wherry.families.project import Projection


def known_names(projected: Projection) -> dict[str, Any]:
    """Sizes and facts of the model, forms and conventions of the target, `there.P`, `source.C`, `dtype`, `moments`."""
    bound = projected.source
    there = bound.present["params"]
    ties = [name for name, one in bound.family.parameters.items() if one.tie]
    facts = dict(bound.told.facts)
    if ties:
        facts["tied"] = not any(name in there for name in ties)
    slots = {piece.parameter[0] for one in projected.targets.values() for piece in one.pieces}
    return {
        **bound.solved.sizes,
        **facts,
        **{name: _choice(text) for name, text in projected.chosen.items()},
        "there": dict.fromkeys(there, True),
        "source": dict(bound.chosen),
        "dtype": _dtype(projected),
        "moments": bool(slots - {"params", "scalars"}),
    }


def _choice(text: str) -> str | int | bool:
    """A form as a config value: scanned or not, along which axis."""
    if text in ("true", "false"):
        return text == "true"
    return int(text) if text.isdecimal() else text


def _dtype(projected: Projection) -> str:
    """The element type of most of the parameters."""
    counted: Counter[str] = Counter()
    for one in projected.targets.values():
        if one.pieces and one.pieces[0].parameter[0] == "params":
            counted[one.spec.dtype] += one.spec.size
    return counted.most_common(1)[0][0]
