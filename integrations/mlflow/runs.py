"""Runs and logged models: what MLflow's pages show next to a version.

One finished run per version holds manifest and receipt as small JSON artifacts, and parameters and metrics (`figures`).
The source checkpoint is a logged model, a dataset and an input of the run, the registered checkpoint a logged model and
an output of the run, so its page shows source → converted. None holds tensor bytes: models are marked as external.

Facts (MLflow 3.17):
- The default artifact folder of a SQLite store is in the working directory; wherry sets one on its experiment.
- `create_model_version(model_id=)` stores nothing in SQL stores: the link is the version's tag `wherry.logged_model`.
- Names of logged models must not contain `/ : . % " '`; tags of runs are silently truncated to 8,000 characters.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from mlflow.entities import LoggedModelInput, LoggedModelOutput
from mlflow.exceptions import MlflowException
from mlflow.utils.mlflow_tags import MLFLOW_RUN_NOTE

from wherry.config.settings import mlflow_tracking_uri
from wherry.core.lazy_dataclass import dataclass
from wherry.core.progress import logger
from wherry.core.receipt import CheckpointRef
from wherry.integrations.mlflow.client import (
    ATTEMPT_TAG,
    EXISTS,
    EXPERIMENT,
    Stores,
    absent_is_fine,
    colliding,
    open_client,
    quote_value,
)
from wherry.integrations.mlflow.figures import description, metrics_of, params_of, source_dataset
from wherry.ledger.resolve import DIGEST_TAG, URI_TAG, WEIGHTS_TAG
from wherry.models.register import VersionFacts
from wherry.store.home import ensure_home, mlflow_artifacts, sqlite_file, without_secrets
from wherry.store.sidecar import Sidecar
from wherry.target.janitor import forget_runs, left_runs, noting_run, owner_text, text_has_ended

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import LoggedModel


LOGGED_MODEL_TAG = "wherry.logged_model"
SOURCE_MODEL_TAG = "wherry.source_model"
_EXTERNAL = {"mlflow.model.isExternal": "true"}
_NOT_IN_NAMES = re.compile(r"[/:.%\"']+")
_LONGEST_NAME = 200
OWNER_TAG = "wherry.owner"
_log = logger(__name__)
_MOST_ABANDONED = 100  # that are ended at once


@dataclass(frozen=True, slots=True)
class RunRecord:
    """The records of one attempt to register, and how to delete them.

    Attributes:
        run_id: the run.
        tags: tags of the version that name the logged models.
        undo: one function for each record of this attempt; the last one is called first.
    """

    run_id: str
    tags: Mapping[str, str]
    undo: list[Callable[[], object]]

    def take_back(self) -> None:
        """Delete the records of this attempt."""
        while self.undo:
            self.undo.pop()()


def record_run(
    client: MlflowClient, name: str, tags: Mapping[str, str], sidecar: Sidecar, facts: VersionFacts
) -> RunRecord:
    """Create a finished run with manifest and receipt, from the source's logged model to a new one.

    Args:
        client: client of the tracking store.
        name: the registered model.
        tags: tags of the version that will be created.
        sidecar: sidecar of the checkpoint.
        facts: what else is known about it.
    """
    experiment = _experiment(client)
    store = without_secrets(client.tracking_uri)
    left = [one for one in left_runs() if one.store == store]
    try:
        end_abandoned_runs(client, experiment)
        forget_runs(left)
    except MlflowException as error:
        _log.warning("runs of processes that have ended could not be closed: %s", error)
    with noting_run(store):
        noted = {**tags, MLFLOW_RUN_NOTE: description(tags), OWNER_TAG: owner_text()}
        run = client.create_run(experiment, run_name=f"register {name}", tags=noted)
        run_id: str = run.info.run_id
        recorded = RunRecord(run_id, {}, [lambda: client.delete_run(run_id)])
        try:
            client.log_dict(run_id, sidecar.manifest.to_json(), "manifest.json")
            if sidecar.receipt is not None:
                client.log_dict(run_id, sidecar.receipt.to_json(), "receipt.json")
            links = _link(client, experiment, name, tags, sidecar, recorded)
            metrics = metrics_of(sidecar, facts, links[LOGGED_MODEL_TAG])
            client.log_batch(run_id, metrics, params_of(sidecar))
            client.set_terminated(run_id)
        except BaseException:
            recorded.take_back()
            raise
        return RunRecord(run_id, links, recorded.undo)


def end_abandoned(store: str) -> None:
    """End the runs in a tracking store whose processes have ended in the middle of a registration.

    Args:
        store: the URI of the store, without secrets; those of the store that is configured are used with it.

    Raises:
        StorageError: the store does not answer, or cannot be written.
    """
    configured = mlflow_tracking_uri()
    uri = configured if without_secrets(configured) == store else store
    with open_client(Stores(uri, uri)) as client:
        found = client.get_experiment_by_name(EXPERIMENT)
        if found is not None:
            end_abandoned_runs(client, str(found.experiment_id))


def end_abandoned_runs(client: MlflowClient, experiment: str) -> list[str]:
    """End the runs of processes of this machine that have ended in the middle of a registration.

    Args:
        client: client of the tracking store.
        experiment: id of wherry's experiment.

    Returns:
        The ids of these runs, whose status is KILLED now.
    """
    running = client.search_runs(
        [experiment],
        f"attributes.status = 'RUNNING' and tags.`{OWNER_TAG}` LIKE '%'",
        max_results=_MOST_ABANDONED,
    )
    ended = [run.info.run_id for run in running if text_has_ended(run.data.tags[OWNER_TAG])]
    for run_id in ended:
        absent_is_fine(lambda run_id=run_id: client.set_terminated(run_id, "KILLED"))
    return ended


def forget_run(client: MlflowClient, run_id: str | None, tags: Mapping[str, str]) -> None:
    """Delete the run of a deleted version, and its logged model; other versions may share that of the source."""
    model = tags.get(LOGGED_MODEL_TAG)
    if model:
        absent_is_fine(lambda: client.delete_logged_model(model))
    if run_id:
        absent_is_fine(lambda: client.delete_run(run_id))


def _link(
    client: MlflowClient,
    experiment: str,
    name: str,
    tags: Mapping[str, str],
    sidecar: Sidecar,
    recorded: RunRecord,
) -> dict[str, str]:
    """Create the run's input and output; return the tags that name them."""
    subject, receipt = sidecar.checkpoint, sidecar.receipt
    links: dict[str, str] = {}
    if receipt is not None and receipt.source.checkpoint_digest != subject.checkpoint_digest:
        source = _source_model(client, experiment, receipt.source, tags[ATTEMPT_TAG], recorded)
        inputs = [source_dataset(one) for one in receipt.sources]
        colliding(lambda: client.log_inputs(recorded.run_id, inputs))  # other runs insert the same dataset
        client.log_inputs(recorded.run_id, models=[LoggedModelInput(source)])
        links[SOURCE_MODEL_TAG] = source
    made = _logged_model(client, experiment, name, subject, tags, recorded, run_id=recorded.run_id)
    client.log_outputs(recorded.run_id, [LoggedModelOutput(made, subject.step or 0)])
    return {**links, LOGGED_MODEL_TAG: made}


def _source_model(
    client: MlflowClient, experiment: str, source: CheckpointRef, attempt: str, recorded: RunRecord
) -> str:
    """The logged model of a source; an existing one is reused, so that all its derived versions share it."""
    wanted = f"tags.`{DIGEST_TAG}` = {quote_value(source.checkpoint_digest)}"
    found: list[LoggedModel] = list(client.search_logged_models([experiment], filter_string=wanted))
    if found:
        return str(min(found, key=lambda model: model.creation_timestamp).model_id)
    tags = {
        DIGEST_TAG: source.checkpoint_digest,
        WEIGHTS_TAG: source.weights_digest,
        URI_TAG: source.uri,
        ATTEMPT_TAG: attempt,
    }
    label = source.uri.rstrip("/").rsplit("/", 1)[-1]
    return _logged_model(client, experiment, label, source, tags, recorded, run_id=None)


def _logged_model(
    client: MlflowClient,
    experiment: str,
    name: str,
    subject: CheckpointRef,
    tags: Mapping[str, str],
    recorded: RunRecord,
    *,
    run_id: str | None,
) -> str:
    params = {
        "format": subject.format,
        "format_version": subject.format_version or "",
        "kind": subject.kind,
        "step": "" if subject.step is None else str(subject.step),
        "tensors": str(subject.tensors),
        "parameters": str(subject.parameters),
        "bytes": str(subject.nbytes),
    }
    made = client.create_logged_model(
        experiment,
        name=_NOT_IN_NAMES.sub("-", name)[:_LONGEST_NAME] or subject.format,
        source_run_id=run_id,
        tags={**tags, **_EXTERNAL},
        params={key: value for key, value in params.items() if value},
        model_type=subject.format,
    )
    model_id = str(made.model_id)
    recorded.undo.append(lambda: client.delete_logged_model(model_id))
    client.finalize_logged_model(model_id, "READY")
    return model_id


def _experiment(client: MlflowClient) -> str:
    found = client.get_experiment_by_name(EXPERIMENT)
    if found is not None:
        return str(found.experiment_id)
    embedded = sqlite_file(client.tracking_uri) is not None
    folder = (ensure_home() and mlflow_artifacts().as_uri()) if embedded else None
    try:
        return str(client.create_experiment(EXPERIMENT, artifact_location=folder))
    except MlflowException as error:
        if error.error_code != EXISTS:
            raise
    return _experiment(client)
