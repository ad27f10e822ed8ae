"""MLflow: model versions that point at checkpoints. The door to the modules beside this one.

A version is registered by reference: its source is the checkpoint's URI, its tags carry the digests, and a small
run holds receipt and manifest as JSON. No tensor byte goes to MLflow, and its own loader does not apply: the tag
`wherry.fetch` has the command that does.

- `client`: the stores, and their errors as ours.
- `versions`: one version per model and checkpoint, under any number of callers.
- `runs`: what MLflow's pages show: the run with its artifacts, source → converted.
- `aliases`: aliases that others move too; `promote`: candidate → champion → previous, and back.
- `project`: what a registry has lost, made again from the ledger.
- `read`: what a model URI means, everything that is registered, who asks, and taking versions away.
"""

from __future__ import annotations

from wherry.integrations.mlflow.client import ATTEMPT_TAG, EXPERIMENT, page
from wherry.integrations.mlflow.project import projection
from wherry.integrations.mlflow.promote import (
    CANDIDATE,
    CHAMPION,
    AliasMove,
    previous_of,
    promoting,
    rollback_target,
    rolling_back,
)
from wherry.integrations.mlflow.read import (
    RegisteredVersion,
    find_digest,
    identity,
    look_up,
    mark_deleted,
    registered,
    unmark_deleted,
    unregister,
)
from wherry.integrations.mlflow.versions import Version, registering

__all__ = [
    "ATTEMPT_TAG", "CANDIDATE", "CHAMPION", "EXPERIMENT", "AliasMove", "RegisteredVersion", "Version",
    "find_digest", "identity", "look_up", "mark_deleted", "page", "previous_of", "projection", "promoting",
    "registered", "registering", "rollback_target", "rolling_back", "unmark_deleted", "unregister",
]  # fmt: skip
