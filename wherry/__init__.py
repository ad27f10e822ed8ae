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
    wherry.audit("registered", level="digest")             # AuditReport: what the ledger knows, against storage
    wherry.restore(uri, into=template).state               # a live Flax, NNX, Penzai, JAX or torch state, filled
    wherry.register(uri, "model", alias="candidate")       # Registration: a version in MLflow, by reference
    wherry.promote("models:/model@candidate")              # Promotion: bytes read again, gates judged, alias moved
    wherry.rollback("model")                               # Promotion: the alias goes back
    wherry.resolve("models:/model@champion").uri           # where it lies; every verb takes models:/… too
    wherry.fetch("models:/model@champion", target)         # Fetched: copied, and proved by the digests
    wherry.export(state, target, to="orbax")               # Export; from a live training state, in the background
    wherry.emit(uri)                                       # tells Prefect that a checkpoint was committed
    wherry.Store(root)                                     # save, restore, latest, best of one training run
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from wherry.audit import audit as audit
    from wherry.audit_report import AuditReport as AuditReport
    from wherry.checkpoint import Checkpoint as Checkpoint
    from wherry.checkpoint import open_checkpoint
    from wherry.convert import convert as convert
    from wherry.detect import detect as detect
    from wherry.detection import Detection as Detection
    from wherry.discover import discover as discover
    from wherry.emit import emit as emit
    from wherry.errors import WherryError as WherryError
    from wherry.export import export as export
    from wherry.export_handle import Export as Export
    from wherry.fetch import fetch as fetch
    from wherry.inspect import inspect as inspect
    from wherry.lineage_answers import impact as impact
    from wherry.lineage_answers import why as why
    from wherry.lineage_stale import stale as stale
    from wherry.live_store import Store as Store
    from wherry.manifest import Manifest as Manifest
    from wherry.plan import Plan as Plan
    from wherry.plan import plan as plan
    from wherry.promote import promote as promote
    from wherry.promote import rollback as rollback
    from wherry.prune import prune as prune
    from wherry.receipt import Receipt as Receipt
    from wherry.register import register as register
    from wherry.resolve import resolve_model
    from wherry.restore import Restored as Restored
    from wherry.restore import restore as restore
    from wherry.rewrite import rewrite as rewrite
    from wherry.tensorspec import TensorSpec as TensorSpec
    from wherry.verify import Verification as Verification
    from wherry.verify import verify as verify

    resolve = resolve_model
    open = open_checkpoint  # noqa: A001  the door's word, as in DESIGN

__version__ = "0.1.0"

_DOOR = {
    "AuditReport": "wherry.audit_report:AuditReport",
    "Checkpoint": "wherry.checkpoint:Checkpoint",
    "Detection": "wherry.detection:Detection",
    "Export": "wherry.export_handle:Export",
    "Manifest": "wherry.manifest:Manifest",
    "Plan": "wherry.plan:Plan",
    "Receipt": "wherry.receipt:Receipt",
    "Restored": "wherry.restore:Restored",
    "Store": "wherry.live_store:Store",
    "TensorSpec": "wherry.tensorspec:TensorSpec",
    "Verification": "wherry.verify:Verification",
    "WherryError": "wherry.errors:WherryError",
    "audit": "wherry.audit:audit",
    "convert": "wherry.convert:convert",
    "detect": "wherry.detect:detect",
    "discover": "wherry.discover:discover",
    "emit": "wherry.emit:emit",
    "export": "wherry.export:export",
    "fetch": "wherry.fetch:fetch",
    "impact": "wherry.lineage_answers:impact",
    "inspect": "wherry.inspect:inspect",
    "open": "wherry.checkpoint:open_checkpoint",
    "plan": "wherry.plan:plan",
    "promote": "wherry.promote:promote",
    "prune": "wherry.prune:prune",
    "register": "wherry.register:register",
    "resolve": "wherry.resolve:resolve_model",
    "restore": "wherry.restore:restore",
    "rewrite": "wherry.rewrite:rewrite",
    "rollback": "wherry.promote:rollback",
    "stale": "wherry.lineage_stale:stale",
    "verify": "wherry.verify:verify",
    "why": "wherry.lineage_answers:why",
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
