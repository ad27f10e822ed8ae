"""Converts model checkpoints from one training system to another and proves that nothing was lost.

This module is the public interface. Every function is imported when it is first used, so `import wherry` takes a few
milliseconds and imports neither prefect, mlflow, torch nor jax.

    import wherry
    wherry.discover(root)                                  # iterator over the checkpoints below a folder
    wherry.detect(uri)                                     # Detection, from metadata only
    with wherry.open(uri) as checkpoint:                   # Checkpoint: manifest, read(path, region)
        ...
    wherry.inspect(uri)                                    # Manifest, with digests or statistics on request
    wherry.diff(uri, other)                                # Comparison: trees, values with their error, config
    wherry.plan(source, target, to="orbax")                # Plan; writes nothing
    wherry.convert(source, target, to="orbax")             # Receipt
    wherry.rewrite(source, target, as_="merge")            # Rewritten: new metadata files, the same tensor bytes
    wherry.verify(uri, level="digest")                     # Verification
    wherry.audit("registered", level="digest")             # AuditReport: compares the ledger with storage
    wherry.restore(uri, into=template).state               # a live Flax, NNX, Penzai, JAX or torch state
    wherry.register(uri, "model", alias="candidate")       # Registration: a version in MLflow, by reference
    wherry.promote("models:/model@candidate")              # Promotion: verify, check the policy, move the alias
    wherry.rollback("model")                               # Promotion: the alias moves back
    wherry.resolve("models:/model@champion").uri           # URI of a version; every function accepts models:/… too
    wherry.fetch("models:/model@champion", target)         # FetchReport: copy and verify the digests
    wherry.export(state, target, to="orbax")               # Export; from a live training state, in the background
    wherry.emit(uri)                                       # announce a committed checkpoint to Prefect
    wherry.Store(root)                                     # save, restore, latest, best of one training run
"""

from __future__ import annotations

from importlib import import_module
from types import FunctionType
from typing import TYPE_CHECKING

from wherry.core import background as _background
from wherry.core import import_locks as _import_locks
from wherry.version import __version__ as __version__

assert _import_locks  # a program may fork while one of its threads imports what follows

if TYPE_CHECKING:
    from wherry.converter.convert import convert as convert
    from wherry.converter.merge import merge as merge
    from wherry.converter.plan import Plan as Plan
    from wherry.converter.plan import plan as plan
    from wherry.converter.rewrite import rewrite as rewrite
    from wherry.core.detection import Detection as Detection
    from wherry.core.emit import emit as emit
    from wherry.core.manifest import Manifest as Manifest
    from wherry.core.receipt import Receipt as Receipt
    from wherry.core.tensorspec import TensorSpec as TensorSpec
    from wherry.errors import WherryError as WherryError
    from wherry.formats.checkpoint import Checkpoint as Checkpoint
    from wherry.formats.discover import discover as discover
    from wherry.ledger.resolve import detect as detect
    from wherry.ledger.resolve import open_checkpoint, resolve_model
    from wherry.live.export import export as export
    from wherry.live.handle import Export as Export
    from wherry.live.restore import Restored as Restored
    from wherry.live.restore import restore as restore
    from wherry.live.store import RunStore
    from wherry.models.fetch import fetch as fetch
    from wherry.models.promote import promote as promote
    from wherry.models.promote import rollback as rollback
    from wherry.models.register import register as register
    from wherry.nightly.prune import prune as prune
    from wherry.prove.audit import audit as audit
    from wherry.prove.differences import Comparison as Comparison
    from wherry.prove.differences import diff as diff
    from wherry.prove.inspect import inspect as inspect
    from wherry.prove.report import AuditReport as AuditReport
    from wherry.prove.verify import Verification as Verification
    from wherry.prove.verify import verify as verify
    from wherry.trace.answers import impact as impact
    from wherry.trace.answers import why as why
    from wherry.trace.stale import stale as stale

    Store = RunStore
    resolve = resolve_model
    open = open_checkpoint  # noqa: A001  the public name


_DOOR = {
    "AuditReport": "wherry.prove.report:AuditReport",
    "Comparison": "wherry.prove.differences:Comparison",
    "Checkpoint": "wherry.formats.checkpoint:Checkpoint",
    "Detection": "wherry.core.detection:Detection",
    "Export": "wherry.live.handle:Export",
    "Manifest": "wherry.core.manifest:Manifest",
    "Plan": "wherry.converter.plan:Plan",
    "Receipt": "wherry.core.receipt:Receipt",
    "Restored": "wherry.live.restore:Restored",
    "Store": "wherry.live.store:RunStore",
    "TensorSpec": "wherry.core.tensorspec:TensorSpec",
    "Verification": "wherry.prove.verify:Verification",
    "WherryError": "wherry.errors:WherryError",
    "audit": "wherry.prove.audit:audit",
    "convert": "wherry.converter.convert:convert",
    "detect": "wherry.ledger.resolve:detect",
    "diff": "wherry.prove.differences:diff",
    "discover": "wherry.formats.discover:discover",
    "emit": "wherry.core.emit:emit",
    "export": "wherry.live.export:export",
    "fetch": "wherry.models.fetch:fetch",
    "impact": "wherry.trace.answers:impact",
    "merge": "wherry.converter.merge:merge",
    "inspect": "wherry.prove.inspect:inspect",
    "open": "wherry.ledger.resolve:open_checkpoint",
    "plan": "wherry.converter.plan:plan",
    "promote": "wherry.models.promote:promote",
    "prune": "wherry.nightly.prune:prune",
    "register": "wherry.models.register:register",
    "resolve": "wherry.ledger.resolve:resolve_model",
    "restore": "wherry.live.restore:restore",
    "rewrite": "wherry.converter.rewrite:rewrite",
    "rollback": "wherry.models.promote:rollback",
    "stale": "wherry.trace.stale:stale",
    "verify": "wherry.prove.verify:verify",
    "why": "wherry.trace.answers:why",
}


def __getattr__(name: str) -> object:
    """Import a public name on first use (PEP 562)."""
    if name not in _DOOR:
        raise AttributeError(f"module 'wherry' has no attribute {name!r}")
    module, attribute = _DOOR[name].split(":")
    with _background.waited_for(f"the import of wherry.{name}"):
        # First this: from now on, forks wait for the imports of this thread.
        from wherry.core.calls import usage_checked

        value = getattr(import_module(module), attribute)
    if isinstance(value, FunctionType):
        value = usage_checked(f"wherry.{name}")(value)
        value.__module__, value.__qualname__ = __name__, name  # by which pickle finds it
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_DOOR})
