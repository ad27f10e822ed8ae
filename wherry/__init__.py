"""Carries model checkpoints from one training system to another and proves that nothing was lost.

This module is the door: every verb of the library is reachable from here by one name, and nothing is
imported before it is used, so that `import wherry` costs a few milliseconds and never touches prefect,
mlflow, torch or jax.

    import wherry
    wherry.discover(root)                                  # iterator of found checkpoints, streamed
    wherry.detect(uri)                                     # Detection, from metadata only
    with wherry.open(uri) as checkpoint:                   # Checkpoint: manifest, read(path, region)
        ...
    wherry.inspect(uri)                                    # Manifest, with digests on request
    wherry.plan(source, target, to="orbax")                # Plan; writes nothing
    wherry.convert(source, target, to="orbax")             # Receipt
    wherry.rewrite(source, target, as_="merge")            # Rewritten: small files anew, tensor bytes as they are
    wherry.verify(uri, level="digest")                     # Verification
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from wherry.checkpoint import Checkpoint as Checkpoint
    from wherry.checkpoint import open_checkpoint
    from wherry.convert import convert as convert
    from wherry.detect import detect as detect
    from wherry.detection import Detection as Detection
    from wherry.discover import discover as discover
    from wherry.errors import WherryError as WherryError
    from wherry.inspect import inspect as inspect
    from wherry.manifest import Manifest as Manifest
    from wherry.plan import Plan as Plan
    from wherry.plan import plan as plan
    from wherry.receipt import Receipt as Receipt
    from wherry.register import register as register
    from wherry.rewrite import rewrite as rewrite
    from wherry.tensorspec import TensorSpec as TensorSpec
    from wherry.verify import Verification as Verification
    from wherry.verify import verify as verify

    open = open_checkpoint  # noqa: A001  the door's word, as in DESIGN

__version__ = "0.1.0"

_DOOR = {
    "Checkpoint": "wherry.checkpoint:Checkpoint",
    "Detection": "wherry.detection:Detection",
    "Manifest": "wherry.manifest:Manifest",
    "Plan": "wherry.plan:Plan",
    "Receipt": "wherry.receipt:Receipt",
    "TensorSpec": "wherry.tensorspec:TensorSpec",
    "Verification": "wherry.verify:Verification",
    "WherryError": "wherry.errors:WherryError",
    "convert": "wherry.convert:convert",
    "detect": "wherry.detect:detect",
    "discover": "wherry.discover:discover",
    "inspect": "wherry.inspect:inspect",
    "open": "wherry.checkpoint:open_checkpoint",
    "plan": "wherry.plan:plan",
    "register": "wherry.register:register",
    "rewrite": "wherry.rewrite:rewrite",
    "verify": "wherry.verify:verify",
}


class _Door(ModuleType):
    """A module whose verbs stay functions although each verb's module has the verb's name."""

    def __setattr__(self, name: str, value: object) -> None:
        """Ignore the import system where it binds the module `wherry.convert` over the verb `convert`."""
        if not (name in _DOOR and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Door


def __getattr__(name: str) -> object:
    """Fetch a verb or noun of the door on first use (PEP 562)."""
    if name not in _DOOR:
        raise AttributeError(f"module 'wherry' has no attribute {name!r}")
    module, attribute = _DOOR[name].split(":")
    value = getattr(import_module(module), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_DOOR})
