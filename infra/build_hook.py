"""build_hook: has hatchling compile the kernels when wherry is installed or packed as a wheel."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from packaging.tags import platform_tags

# wherry itself cannot be imported yet: what it depends on need not be there.
_FILE = Path(__file__).resolve().parents[1] / "wherry" / "kernels" / "compile.py"
_SPEC = importlib.util.spec_from_file_location("compile", _FILE)
assert _SPEC is not None
assert _SPEC.loader is not None
_COMPILE = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(_COMPILE)


class KernelsHook(BuildHookInterface[Any]):
    """Adds the compiled library to a wheel, where a compiler is."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the library next to its C files; an editable installation finds it there."""
        library = _COMPILE.compile_library()
        if library is not None and version != "editable":
            build_data["force_include"][str(library)] = f"wherry/kernels/{library.name}"
            build_data["pure_python"] = False
            build_data["tag"] = _COMPILE.wheel_tag(library, set(platform_tags()))
