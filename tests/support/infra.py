"""How tests reach the scripts of `infra/`, which is no package."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

ROOT = Path(__file__).resolve().parents[2]
INFRA = ROOT / "infra"


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module of `infra/`, which is no package, loaded as its scripts load it."""
    monkeypatch.syspath_prepend(str(INFRA))
    spec = importlib.util.spec_from_file_location(
        f"infra_{name.replace('.', '_')}", INFRA / f"{name.replace('.', '/')}.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module
