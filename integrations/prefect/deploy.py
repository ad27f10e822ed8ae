"""Deploy: create or update on a Prefect server what the files of `infra` describe; running it again changes nothing.

The steps depend on each other and run in this order: preflight, work pools, global concurrency limits, deployments,
automations. Prefect's own `prefect deploy --all` creates the deployments, so that `prefect.yaml` means exactly what
Prefect's documentation says; missing deployments are detected afterwards, since the command skips invalid entries with
only a warning. It runs in a child process (see `wherry.core.child`) in an empty folder, so the entrypoints of
deployments must be installed modules.
"""

from __future__ import annotations

import asyncio
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from wherry.config.config import load_config
from wherry.config.file import config_file
from wherry.core import child
from wherry.core.lazy_dataclass import dataclass
from wherry.cures import Cure, program
from wherry.errors import StorageError, UsageError
from wherry.integrations.prefect.automations import (
    ensure_automations,
    notification_block,
    read_automations,
    with_runs,
)
from wherry.integrations.prefect.documents import read_yaml
from wherry.integrations.prefect.pools import Outcome, WorkPool, ensure_pools, read_pools
from wherry.nightly import preflight
from wherry.nightly.notify import channels

if TYPE_CHECKING:
    from prefect.client.orchestration import PrefectClient
    from prefect.events.schemas.automations import AutomationCore

# Passed on besides Prefect's settings: how its client connects to the server.
_NETWORK = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "SSL_CERT_FILE", "SSL_CERT_DIR")
_TEMPLATE = re.compile(r"\{\{\s*\$(\w+)\s*\}\}")  # how a prefect.yaml refers to an environment variable
_SECONDS, _MEMORY = 600, 4 << 30  # default limits of the command
# Entrypoint → role (docs/security.md): who states model versions, and who only reads. Other flows only convert.
ROLES = {
    "wherry.flows.nightly.nightly": "registrar",
    "wherry.flows.export.export": "registrar",
    "wherry.flows.convert.convert_checkpoint": "registrar",
    "wherry.flows.promote.promote": "registrar",
    "wherry.flows.audit.audit": "auditor",
    "wherry.flows.work.work_on_units": "worker",
}
_ROLE = "role"  # variable of a pool


@dataclass(frozen=True, slots=True)
class DeployPlan:
    """What to deploy.

    Attributes:
        file: a `prefect.yaml`.
        pools: folder of the work pools; `pools` next to the file by default.
        automations: file of the automations; `automations.yaml` next to the file by default.
        pool: one work pool for all deployments, in place of those in the file.
        notify: notification block for alerts, for example `slack-webhook/team`; `notify.block` by default.
        limits: further global concurrency limits, name → slots.
    """

    file: Path
    pools: Path
    automations: Path
    pool: str | None = None
    notify: str | None = None
    limits: Mapping[str, int] = field(default_factory=dict[str, int])


@dataclass(frozen=True, slots=True)
class DeployReport:
    """Outcome of each step, by name."""

    api: str
    pools: dict[str, Outcome]
    limits: dict[str, int]
    deployments: dict[str, str]
    automations: dict[str, Outcome]

    def to_json(self) -> dict[str, Any]:
        """The JSON form, which `--json` prints; deployments are name → id."""
        return {"schema": 1, **asdict(self)}


def deploy(plan: DeployPlan) -> DeployReport:
    """Carry out a plan against the server of `PREFECT_API_URL` (or of Prefect's profile).

    Raises:
        UsageError: a file is invalid, a deployment names an unknown pool, or preflight fails.
        NotFoundError: a file, pool or block does not exist.
        StorageError: the server does not answer, or rejected a deployment.
        NoAnswerError: `prefect deploy` exceeded its time or memory.
    """
    from httpx import HTTPError

    from wherry.integrations.prefect.server import CURE, required_server

    entries, pools = read_deployments(plan.file), read_pools(plan.pools)
    require_independent(plan.file)
    chosen = pools_of(entries, pools, plan.pool)
    check(entries, chosen)
    api = required_server()
    try:
        made, automations = asyncio.run(_prepare(plan, used_pools(pools, chosen)))
        _prefect_deploy(plan.file, next((one for one in pools if one.name == plan.pool), None))
        ids, outcomes = asyncio.run(_finish(entries, automations))
    except HTTPError as error:
        raise StorageError(
            f"request to the Prefect server failed: {error}", uri=api, cure=CURE, retryable=True
        ) from error
    return DeployReport(api, made, dict(plan.limits), ids, outcomes)


def read_deployments(file: Path) -> list[dict[str, Any]]:
    """The deployments of a `prefect.yaml`, each as a table.

    Raises:
        NotFoundError: the file does not exist.
        UsageError: the file is not YAML, or lists no deployments with name, entrypoint and pool.
        StorageError: the file cannot be read.
    """
    data = _read_table(file)
    try:
        rows: list[dict[str, Any]] = data["deployments"]
        for row in rows:
            _ = row["name"], row["entrypoint"], row["work_pool"]["name"]
    except (KeyError, TypeError) as error:
        what = f"missing key {error}" if isinstance(error, KeyError) else str(error)
        raise UsageError(f"invalid prefect.yaml: {what}", uri=str(file)) from error
    return rows


def _read_table(file: Path) -> dict[str, Any]:
    return read_yaml(file, "prefect.yaml", "pass the path of a prefect.yaml")


def require_independent(file: Path) -> None:
    """Require that deployments do not depend on the folder in which `prefect deploy` runs, since it is removed.

    If a file has no `pull`, Prefect makes that folder the working directory of the runs (docker build steps aside). An
    empty `pull` is accepted.

    Raises:
        UsageError: a deployment has no `pull`, or its entrypoint is a relative path.
    """
    data = _read_table(file)
    for entry in data["deployments"]:
        path, colon, _function = str(entry["entrypoint"]).rpartition(":")
        if colon and not path.startswith(("/", "{{")):
            raise UsageError(
                f"the entrypoint of deployment {entry['name']} is a relative path", uri=str(file), stage="deploy",
                cure="use an installed module such as wherry.flows.nightly.nightly, or an absolute path",
            )  # fmt: skip
        stated = [place.get("pull") for place in (entry, data)]
        if stated == [None, None] and not (entry.get("build") or data.get("build")):
            raise UsageError(
                f"deployment {entry['name']} sets no working directory for its runs", uri=str(file), stage="deploy",
                cure="add to the file: pull: [{prefect.deployments.steps.set_working_directory: {directory: /}}]",
            )  # fmt: skip


def pools_of(
    entries: list[dict[str, Any]], pools: tuple[WorkPool, ...], override: str | None
) -> dict[str, WorkPool]:
    """Map each deployment to its pool.

    Raises:
        UsageError: a pool has no file.
    """
    known = {pool.name: pool for pool in pools}
    named = {entry["name"]: override or str(entry["work_pool"]["name"]) for entry in entries}
    for name, pool in named.items():
        if pool not in known:
            raise UsageError(
                f"unknown work pool {pool!r} of deployment {name}", cure=f"choose one of: {', '.join(known)}"
            )
    return {name: known[pool] for name, pool in named.items()}


def used_pools(pools: tuple[WorkPool, ...], chosen: Mapping[str, WorkPool]) -> tuple[WorkPool, ...]:
    """The pools that deployments use; no other is made on the server."""
    names = {pool.name for pool in chosen.values()}
    return tuple(pool for pool in pools if pool.name in names)


def check(entries: list[dict[str, Any]], chosen: Mapping[str, WorkPool]) -> None:
    """Preflight: find data that would be lost in a container, and slices that no node can provide.

    This checks the environment of this process; each run checks the environment of its worker again.

    Raises:
        UsageError: a check failed; the error names it.
    """
    for entry in entries:
        pool = chosen[entry["name"]]
        variables = {name: schema.get("default") for name, schema in pool.variables.items()}
        variables |= entry["work_pool"].get("job_variables") or {}
        if "tpu_topology" in variables:
            preflight.refuse_slice(str(variables["tpu_topology"]), int(variables["tpu_chips"] or 0))
        spec = (entry.get("parameters") or {}).get("spec") or {}
        target = {f"target of {entry['name']}": spec["target"]} if "target" in spec else {}
        routed = {
            f"target {at} of route {route.name}": one.uri
            for route in (load_config().routes if config_file() else ())
            for at, one in enumerate(route.targets, 1)
        }
        preflight.refuse_unshared({**target, **routed, **preflight.stores()}, pool.type)


async def _prepare(
    plan: DeployPlan, pools: tuple[WorkPool, ...]
) -> tuple[dict[str, Outcome], Sequence[AutomationCore]]:
    """Create what the deployments need: pools and limits; and read the automations as Prefect reads them."""
    from prefect.client.orchestration import get_client

    async with get_client() as client:
        named = plan.notify or channels().block
        block = await notification_block(client, named) if named else None
        automations = read_automations(plan.automations, block)
        made = await ensure_pools(client, pools)
        for name, slots in plan.limits.items():
            await client.upsert_global_concurrency_limit_by_name(name, slots)
        return made, automations


async def _finish(
    entries: list[dict[str, Any]], automations: Sequence[AutomationCore]
) -> tuple[dict[str, str], dict[str, Outcome]]:
    """Look up the ids of the new deployments, and create the automations, which need them."""
    from prefect.client.orchestration import get_client

    async with get_client() as client:
        ids = {entry["name"]: await _deployment_id(client, entry["name"]) for entry in entries}
        return ids, await ensure_automations(client, with_runs(automations, ids))


def _prefect_deploy(file: Path, pool: WorkPool | None) -> None:
    with tempfile.TemporaryDirectory(prefix="wherry-deploy-") as folder:
        chosen = _with_pool(file, pool, Path(folder)) if pool else file
        done = child.run(
            "prefect",
            ["--no-prompt", "deploy", "--all", "--prefect-file", str(chosen.absolute())],
            purpose="prefect deploy",
            limits=child.limits(seconds=_SECONDS, memory=_MEMORY),
            variables=_variables(file.read_text("utf-8")),
        )
    if done.code:
        raise UsageError(
            f"prefect deploy failed: {(done.errors + done.output).strip()[-2000:]}",
            uri=str(file),
            stage="deploy",
        )


def _variables(text: str) -> dict[str, str]:
    """The environment of the command: Prefect's settings, network settings, and variables that the file refers to."""
    from prefect.settings import get_current_settings

    names = {*_NETWORK, *map(str.lower, _NETWORK), *_TEMPLATE.findall(text)}
    passed = {name: os.environ[name] for name in names if name in os.environ}
    settings = get_current_settings().to_environment_variables(exclude_unset=True)
    return {**passed, **settings, "NO_COLOR": "1"}


def _with_pool(file: Path, pool: WorkPool, folder: Path) -> Path:
    """Write a copy of the file in which all deployments use one pool, without the variables of other pools."""
    data = _read_table(file)
    for entry in data["deployments"]:
        # The role of the deployment, if the pool gives each role a secret of its own.
        role = {_ROLE: ROLES.get(entry["entrypoint"], "worker")} if _ROLE in pool.variables else {}
        entry["work_pool"] = {"name": pool.name, "job_variables": role}
    copy = folder / file.name
    copy.write_text(yaml.safe_dump(data, sort_keys=False), "utf-8")
    return copy


async def _deployment_id(client: PrefectClient, name: str) -> str:
    from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterName

    found = await client.read_deployments(
        deployment_filter=DeploymentFilter(name=DeploymentFilterName(any_=[name]))
    )
    if not found:
        raise UsageError(
            f"prefect deploy skipped the deployment {name}",
            cure=Cure("run {} and read its warnings", program("prefect", "deploy", "--all")),
        )
    return str(found[0].id)
