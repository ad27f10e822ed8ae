"""MLflow: model versions that point at checkpoints. Re-exports the public names of the modules in this package.

A version is registered by reference: its source has the checkpoint's digest, its tags the place, and a small run
holds receipt and manifest as JSON. Tensor bytes are never uploaded to MLflow; its loaders read the checkpoint through
`model`, and the tag `wherry.fetch` has the command that copies it without MLflow.

- `client`: the stores, and their errors as wherry's errors.
- `versions`: one version per model and checkpoint, with any number of concurrent callers.
- `model`: a version as an MLflow model: the artifact repository of `wherry://`, the MLmodel file, the loader.
- `runs`: what MLflow's pages show: the run with its artifacts, source → converted; `figures`: its numbers and words.
- `marks`: what an audit writes on a version.
- `aliases`: moving aliases that other callers move too; `promote`: candidate → champion → previous, and back.
- `project`: restores from the ledger what a registry has lost.
- `read`: resolving model URIs, listing registered versions, identifying the caller, and deleting versions.
"""

from __future__ import annotations

from wherry.integrations.mlflow.client import ATTEMPT_TAG, EXPERIMENT, page
from wherry.integrations.mlflow.marks import mark_version
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
    find_digest,
    identity,
    look_up,
    mark_deleted,
    registered_versions,
    unmark_deleted,
    unregister,
)
from wherry.integrations.mlflow.runs import end_abandoned
from wherry.integrations.mlflow.versions import Version, registering
from wherry.integrations.mlflow_version import RegisteredVersion

__all__ = [
    "ATTEMPT_TAG", "CANDIDATE", "CHAMPION", "EXPERIMENT", "AliasMove", "RegisteredVersion",
    "Version", "end_abandoned", "find_digest", "identity", "look_up", "mark_deleted",
    "mark_version", "page", "previous_of", "projection", "promoting", "registered_versions",
    "registering", "rollback_target", "rolling_back", "unmark_deleted", "unregister",
]  # fmt: skip
