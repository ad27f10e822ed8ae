"""The schema of `wherry.toml`: every setting and every field of a route, with its type, default and meaning.

A route states everything that an unattended run needs: where to look for checkpoints, which of them to convert, to
what, and how to verify, name and keep the results. It holds no credentials: each storage library finds its own, and a
Prefect block keeps the address of a webhook.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from wherry.config.options import described, given_by, target_of, with_options
from wherry.config.values import Select, require_template, select
from wherry.core.request import ConvertRequest, SourceRequest, TargetRequest
from wherry.core.units import duration, parse_size
from wherry.storage.stores import locate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from wherry.core.detection import Detection
    from wherry.storage.location import Location

VerifyLevel: TypeAlias = Literal["none", "structure", "present", "digest", "roundtrip", "native", "logits"]
Option: TypeAlias = str | int | float | bool


def _sized(text: str | int) -> str:
    parse_size(text)
    return str(text)


def _chosen(text: str) -> str:
    select(text)
    return text


def _absolute(text: str) -> str:
    if not os.path.isabs(os.path.expanduser(text)):  # noqa: PTH111, PTH117  text alone
        raise ValueError("expected an absolute path")
    return text


Folder = Annotated[str, AfterValidator(_absolute)]
Duration = Annotated[float, BeforeValidator(duration), Field(ge=0)]
Size = Annotated[str, BeforeValidator(_sized)]
Template = Annotated[str, Field(min_length=1), AfterValidator(require_template)]
Selection = Annotated[str, AfterValidator(_chosen)]


class Section(BaseModel):
    """A table of the file; an unknown field is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


@with_options("route", TargetRequest)
class _Target(Section):
    format: str = Field(description="Target format, a name or alias; `wherry formats` lists them.")
    uri: Template = Field(
        description="What is written, with the fields {run} {step} {format} {name} {route} {family} {kind}; "
        "{step|final} states what stands for an unknown one. A relative path counts from the file's folder."
    )
    into: bool = described("route", TargetRequest, "into")
    options: dict[str, Option] = described("route", TargetRequest, "options")


class TargetRule(_Target):
    """One target that a route makes of each checkpoint."""

    model: Template | None = Field(
        default=None, description="Registered model of this target; the route's by default."
    )

    def at(self, uri: str) -> TargetRequest:
        """The target of a request, with the template filled in."""
        return target_of("route", self, uri, self.format)


class Retention(Section):
    """Which of the checkpoints that a route made are kept; one that any rule keeps is kept. No rule keeps all."""

    keep_last: int | None = Field(default=None, ge=1, description="The newest steps of each run.")
    keep_best: int | None = Field(default=None, ge=1, description="The best steps of each run by `metric`.")
    metric: str | None = Field(default=None, description="For `keep_best`, as in `best(METRIC)`.")
    highest: bool = Field(default=False, description="For `keep_best`: more is better.")
    keep_days: float | None = Field(default=None, gt=0, description="What was made within so many days.")

    @model_validator(mode="after")
    def _stated(self) -> Retention:
        if self.keep_best is not None and not self.metric:
            raise ValueError("keep_best needs `metric`: add the name of the metric")
        return self

    @property
    def states_nothing(self) -> bool:
        """Whether no rule is set, so that nothing is removed."""
        return self.keep_last is None and self.keep_best is None and self.keep_days is None


@with_options("route", SourceRequest, ConvertRequest)
class Route(Section):
    """What goes where, as what."""

    name: str = Field(
        pattern=r"^[\w.-]+$", description="The name of its table: letters, digits, `_`, `-` and `.`."
    )
    root: str = Field(min_length=1, description="Folder or URI below which checkpoints are looked for.")
    runs: tuple[str, ...] = Field(
        default=(), description="Patterns of the runs that count, as t5x-*; all by default."
    )
    formats: tuple[str, ...] = Field(
        default=(), description="Formats of the sources that count; all by default."
    )
    source_format: str | None = Field(
        default=None, description="Format of the sources, where none is detected."
    )
    select: Selection = Field(
        default="latest", description="latest, best(METRIC[, min|max]), every N, all or since DATE."
    )
    min_age: Duration = Field(
        default=900.0,
        description="Seconds (or 15m) of rest before a checkpoint without commit marker counts.",
    )
    max_items: int | None = Field(default=None, ge=1, description="Checkpoints in one run of the flow.")
    max_bytes: Size | None = Field(default=None, description="Bytes of sources in one run of the flow.")
    first_night: Literal["estimate", "convert"] = Field(
        default="estimate",
        description="Where more than `first_night_items` wait and none was ever converted: say count, bytes and "
        "hours and stop, or convert.",
    )
    first_night_items: int = Field(default=20, ge=0, description="See `first_night`.")
    opaque: tuple[str, ...] = described("route", SourceRequest, "opaque")
    ignore: tuple[Literal["values", "empties", "companions"], ...] = described(
        "route", ConvertRequest, "ignore"
    )
    targets: tuple[TargetRule, ...] = Field(min_length=1, description="What is made of each, from one read.")
    memory: Size | None = Field(
        default=None, description="Budget of what is in flight; the setting by default."
    )
    read_back: bool = Field(default=True, description="Read every byte of a target back before the commit.")
    verify: VerifyLevel = Field(default="present", description="Level of the verification after the commit.")
    model: Template | None = Field(
        default=None, description="Registered model in MLflow, as {run}; none by default."
    )
    alias: str | None = Field(default=None, description="Alias to set on the model version.")
    tags: dict[str, str] = Field(default={}, description="Tags of the model version.")
    meta: dict[str, str] = described("route", ConvertRequest, "meta")
    sign: str | None = described("route", ConvertRequest, "sign")
    concurrency: int = Field(default=2, ge=1, description="Checkpoints of this route at a time.")
    retention: Retention = Field(default=Retention(), description="What `wherry prune` keeps.")

    @property
    def selection(self) -> Select:
        """`select`, parsed."""
        return select(self.select)

    def source(self, found: Detection) -> SourceRequest:
        """The source of a request for a checkpoint below the root."""
        return SourceRequest(found.uri, self.source_format or found.format, opaque=self.opaque)

    def place(self, uri: str) -> Location:
        """A location below the root, where the classes in `opaque` may be read as opaque values."""
        return locate(uri, frozenset(SourceRequest(uri, opaque=self.opaque).opaque))

    def request(self, source: SourceRequest, targets: Sequence[TargetRequest], memory: str) -> ConvertRequest:
        """The request for a conversion.

        Args:
            source: as `source` returns it.
            targets: as the rules' `at` returns them.
            memory: the setting, used where the route states none.
        """
        given: dict[str, Any] = {**given_by("route", self, ConvertRequest), "memory": self.memory or memory}
        verify = "digest" if self.read_back else "none"
        return ConvertRequest(source=source, targets=tuple(targets), verify=verify, **given)


class MlflowSettings(Section):
    """Where model versions go."""

    tracking_uri: str | None = Field(default=None, description="Store of the runs.")
    registry_uri: str | None = Field(default=None, description="Registry; where the runs go by default.")


class NotifySettings(Section):
    """Who is told of what the flows did."""

    webhook: str | None = Field(default=None, description="URL that takes a JSON POST; a secret.")
    block: str | None = Field(default=None, description="Prefect notification block, as slack-webhook/team.")
    on: Literal["failure", "always", "never"] = Field(default="failure", description="When to tell.")


class OpenlineageSettings(Section):
    """Where OpenLineage events go."""

    target: str | None = Field(default=None, description="File (JSON lines) or http URL; none by default.")
    namespace: str = Field(default="wherry", description="Namespace of the jobs.")


class MetricsSettings(Section):
    """Where Prometheus finds the counters."""

    file: str | None = Field(default=None, description="Text file for the node exporter's collector.")


class AuditSettings(Section):
    """What an audit asks for besides the ledger."""

    key: str | None = Field(
        default=None, description="Public key (PEM file) that the signatures of checkpoints must fit."
    )


class ChildSettings(Section):
    """Limits of the processes that wherry starts: native and logits checks, and `prefect deploy`."""

    timeout: Duration | None = Field(
        default=None, description="Wall time, as 2h; 15 min and more for large checkpoints by default."
    )
    memory: Size | None = Field(
        default=None, description="Resident memory; 4 GiB and 6 times the checkpoint by default."
    )


class Settings(Section):
    """Everything that holds for all routes."""

    ledger: str | None = Field(
        default=None, description="SQLAlchemy URL; a SQLite file in the home by default."
    )
    memory: Size = Field(default="128MiB", description="Budget of what is in flight.")
    shared_paths: tuple[str, ...] = Field(
        default=(), description="Folders that all workers see at the same path."
    )
    links: tuple[Folder, ...] = Field(
        default=(), description="Folders into which links of checkpoints may lead; absolute."
    )
    mlflow: MlflowSettings = MlflowSettings()
    notify: NotifySettings = NotifySettings()
    openlineage: OpenlineageSettings = OpenlineageSettings()
    metrics: MetricsSettings = MetricsSettings()
    child: ChildSettings = ChildSettings()
    audit: AuditSettings = AuditSettings()
    concurrency: dict[str, Annotated[int, Field(ge=1)]] = Field(
        default={}, description="Store → conversions at a time over all flows: file, gs-BUCKET, s3-BUCKET."
    )
    policy: dict[str, dict[str, Any]] = Field(default={}, description="Policies of promotion by name.")


class Contents(Settings):
    """The whole file for one environment: the settings and the routes."""

    routes: dict[str, Route] = Field(default={}, description="The routes by name.")
