"""Work pools: Prefect's own base job templates, merged with wherry's additions.

A pool is a JSON file that has only the differences from the template that Prefect publishes for its type: further
variables, other defaults, further parts of the job. The template itself comes from the installed worker package, or
from the server if the package is not installed, so it always matches the release. Deploying a pool again updates its
template and keeps what an operator set on it: whether it is paused, and its concurrency limit.
"""

from __future__ import annotations

import copy
import shlex
from collections.abc import Sequence
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from wherry.core.json_document import json_value
from wherry.core.lazy_dataclass import dataclass
from wherry.cures import Argument, Cure
from wherry.errors import UsageError, storage_error
from wherry.installation import package_command
from wherry.nightly.preflight import POOL_TYPES

if TYPE_CHECKING:
    from prefect.client.orchestration import PrefectClient

Outcome: TypeAlias = Literal["created", "updated", "unchanged"]
SCHEMA = 1
_FIELDS = {"schema", "name", "type", "description", "concurrency_limit", "variables", "job_configuration"}


@dataclass(frozen=True, slots=True)
class WorkPool:
    """A work pool, as described by its file.

    Attributes:
        name: its name.
        type: `process`, `docker` or `kubernetes`.
        description: what it is for.
        concurrency_limit: runs at a time, set when the pool is created.
        variables: name → JSON schema, merged into the variable of that name or added.
        job_configuration: merged into the published one; named entries of lists (containers) by their name.
    """

    name: str
    type: str
    description: str
    concurrency_limit: int | None = None
    variables: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    job_configuration: dict[str, Any] = field(default_factory=dict[str, Any])


def read_pools(folder: Path) -> tuple[WorkPool, ...]:
    """The pools of a folder, sorted by name.

    Raises:
        UsageError: the folder has no pools, or a file is not a pool.
        StorageError: a file cannot be read.
    """
    pools = tuple(read_pool(path) for path in sorted(folder.glob("*.json")))
    if not pools:
        raise UsageError(
            "no work pool files found",
            uri=str(folder),
            cure=Cure("pass the folder of the pools with {}", Argument("pools")),
        )
    return pools


def read_pool(path: Path) -> WorkPool:
    """One pool.

    Raises:
        UsageError: the file is not JSON, has an unknown field or type, or a schema of another version.
        StorageError: the file cannot be read.
    """
    try:
        data: dict[str, Any] = json_value(path.read_text("utf-8"))
    except OSError as error:
        raise storage_error(error, str(path)) from error
    except ValueError as error:
        raise UsageError(f"invalid JSON: {error}", uri=str(path)) from error
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UsageError(f"invalid work pool: expected a table with schema {SCHEMA}", uri=str(path))
    unknown = sorted(set(data) - _FIELDS)
    if unknown or data.get("type") not in POOL_TYPES or not data.get("name"):
        what = f"unknown field {', '.join(unknown)}" if unknown else "missing name, or unknown type"
        raise UsageError(
            f"invalid work pool: {what}", uri=str(path), cure=f"use the fields {', '.join(sorted(_FIELDS))}"
        )
    fields: dict[str, Any] = {"description": "", **data}
    del fields["schema"]
    return WorkPool(**fields)


def template(pool: WorkPool, published: dict[str, Any]) -> dict[str, Any]:
    """The base job template of a pool.

    Args:
        pool: the pool with the additions.
        published: the template of its type; it is not modified.
    """
    merged = copy.deepcopy(published)
    merged["job_configuration"] = _laid_over(merged["job_configuration"], pool.job_configuration)
    properties = merged["variables"].setdefault("properties", {})
    for name, schema in pool.variables.items():
        properties[name] = {**properties.get(name, {}), **schema}
    return merged


async def published_template(client: PrefectClient, pool_type: str) -> dict[str, Any]:
    """The base job template that Prefect publishes for a type of pool.

    Raises:
        UsageError: neither an installed worker package nor the server has the type.
    """
    from prefect.workers.base import BaseWorker

    worker = BaseWorker.get_worker_class_from_type(pool_type)
    if worker is not None:
        return worker.get_default_base_job_template()
    for collection in (await client.read_worker_metadata()).values():
        if pool_type in collection:
            return collection[pool_type]["default_base_job_configuration"]
    raise UsageError(
        f"unknown work pool type {pool_type!r}",
        cure=f"run `{package_command(f'prefect-{pool_type}')}` on the machine that deploys",
    )


async def ensure_pools(client: PrefectClient, pools: Sequence[WorkPool]) -> dict[str, Outcome]:
    """Create or update pools.

    Raises:
        UsageError: a pool of that name has another type.
    """
    return {pool.name: await _ensure(client, pool) for pool in pools}


async def _ensure(client: PrefectClient, pool: WorkPool) -> Outcome:
    from prefect.client.schemas.actions import WorkPoolCreate, WorkPoolUpdate
    from prefect.exceptions import ObjectNotFound

    wanted = template(pool, await published_template(client, pool.type))
    try:
        found = await client.read_work_pool(pool.name)
    except ObjectNotFound:
        await client.create_work_pool(
            WorkPoolCreate(
                name=pool.name,
                type=pool.type,
                description=pool.description,
                base_job_template=wanted,
                concurrency_limit=pool.concurrency_limit,
            )
        )
        return "created"
    if found.type != pool.type:
        raise UsageError(
            f"work pool {pool.name} already exists with type {found.type}; expected {pool.type}",
            cure=f"delete it with `prefect work-pool delete {shlex.quote(pool.name)}`, or rename the pool in its file",
        )
    if (found.base_job_template, found.description) == (wanted, pool.description):
        return "unchanged"
    update = WorkPoolUpdate(base_job_template=wanted, description=pool.description)
    await client.update_work_pool(pool.name, update)
    return "updated"


def _laid_over(base: Any, over: Any) -> Any:
    """Merge tables into tables, and named list entries into those of the same name; replace anything else."""
    if isinstance(base, dict) and isinstance(over, dict):
        return {**base, **{key: _laid_over(base.get(key), value) for key, value in over.items()}}
    if isinstance(base, list) and isinstance(over, list) and all(_name(one) for one in (*base, *over)):
        later = {_name(one): one for one in over}
        kept = [_laid_over(one, later.pop(_name(one), {})) for one in base]
        return [*kept, *later.values()]
    return copy.deepcopy(over)


def _name(entry: Any) -> str | None:
    return entry.get("name") if isinstance(entry, dict) else None
