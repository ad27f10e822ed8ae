"""Orientation: whether a module stores its matrix inputs first, as Conv1D does, or outputs first, as Linear does.

PEFT decides it by the class of each module. `fan_in_fan_out` in `adapter_config.json` is that of the module that PEFT
wrapped last, so that it says nothing of the others.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from wherry.families import family_of_config

_TABLE = Path(__file__).parent / "orientations.toml"


@dataclass(frozen=True, slots=True)
class Orientations:
    """What is known of the modules of a base.

    Attributes:
        known: whether the classes of its modules are known.
        inputs_first: the last names of the modules and parameters that are stored inputs first.
    """

    known: bool
    inputs_first: frozenset[str] = frozenset()

    def of(self, module: str) -> bool | None:
        """Whether a module stores its inputs first; None if its class is unknown."""
        return module.rpartition(".")[2] in self.inputs_first if self.known else None


@cache
def _tables() -> tuple[frozenset[str], dict[str, frozenset[str]]]:
    table = tomllib.loads(_TABLE.read_text(encoding="utf-8"))
    return frozenset(table["known"]), {kind: frozenset(row) for kind, row in table["inputs_first"].items()}


def orientations(config: Mapping[str, Any] | None) -> Orientations:
    """What is known of the modules of a base with this config; nothing without one."""
    known, inputs_first = _tables()
    kind = (config or {}).get("model_type")
    if config is None or not (kind in known or family_of_config(config) is not None):
        return Orientations(known=False)
    return Orientations(known=True, inputs_first=inputs_first.get(str(kind), frozenset()))
