"""The schema of `wherry.toml`: every setting and every field of a route, with its type, default and meaning.

A route states everything that an unattended run needs: where to search for checkpoints, which of them to convert, to
what, and how the results are verified, named and kept. Credentials are not settings: each storage library finds its
own, and a Prefect block keeps the address of a webhook. The options of requests are fields of models for routes and
forms (`with_options`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, TypeVar, get_type_hints

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    create_model,
    model_validator,
)

from wherry.config.values import Select, require_template, required_origin, select
from wherry.core.request import (
    ConvertRequest,
    LayoutRequest,
    RequestOption,
    SourceRequest,
    TargetRequest,
    options_of,
)
from wherry.core.units import DEFAULT_UNIT, duration, parse_size
from wherry.store.local_store import locate_below
from wherry.store.location import Location
from wherry.store.open_file import local_path

if TYPE_CHECKING:
    from wherry.core.detection import Detection

VerifyLevel: TypeAlias = Literal[
    "none", "structure", "present", "digest", "roundtrip", "native", "logits", "serve"
]
Option: TypeAlias = str | int | float | bool
Place = Literal["form", "route"]
M = TypeVar("M", bound=BaseModel)


def _check_size(text: str | int) -> str:
    parse_size(text)
    return str(text)


def _check_choice(text: str) -> str:
    select(text)
    return text


def _absolute(text: str) -> str:
    if not os.path.isabs(local_path(text) or ""):  # noqa: PTH117  text alone
        raise ValueError("expected an absolute path")
    return text


Origin = Annotated[str, AfterValidator(required_origin)]
Folder = Annotated[str, AfterValidator(_absolute)]
Duration = Annotated[float, Field(ge=0), BeforeValidator(duration, json_schema_input_type=float | str)]
Size = Annotated[str, BeforeValidator(_check_size, json_schema_input_type=int | str)]
Engine = Annotated[
    str, Field(pattern=r"^(threads|(processes|dask|ray)(:[1-9][0-9]*)?|(dask|ray)://[^\s/].*)$")
]
ENGINE = "Engine that runs the conversion: threads, processes:N, dask:N, dask://HOST:PORT, ray:N or ray://HOST:PORT."
UNIT = "Size of a unit: files of the target that one worker of the engine writes."
Template = Annotated[str, Field(min_length=1), AfterValidator(require_template)]
Selection = Annotated[str, AfterValidator(_check_choice)]


def with_options(
    place: Place, *records: type[Any], leave: tuple[str, ...] = ()
) -> Callable[[type[M]], type[M]]:
    """Add the options of these records to a model as fields.

    Args:
        place: where the model is used; it selects the descriptions.
        records: records of `wherry.core.request`.
        leave: options that the model, or a subclass of it, declares itself.
    """

    def decorate(model: type[M]) -> type[M]:
        hints: dict[str, Any] = {}
        for record in (*records, LayoutRequest):
            hints |= get_type_hints(record)
        missing: dict[str, Any] = {
            one.name: (_kind(hints[one.name], one), _field(place, one))
            for one in options_of(*records)
            if getattr(one, place) is not None and one.name not in (*leave, *model.model_fields)
        }
        return create_model(
            model.__name__, __base__=model, __module__=model.__module__, __doc__=model.__doc__, **missing
        )

    return decorate


def option_field(place: Place, record: type[Any], name: str) -> Any:
    """The pydantic field of an option: its default and its description for this place."""
    return _field(place, next(one for one in options_of(record) if one.name == name))


def _field(place: Place, one: RequestOption) -> Any:
    return Field(default=one.default, description=getattr(one, place) or one.help)


def _kind(hint: Any, one: RequestOption) -> Any:
    """The type of the field: text where the engine accepts more types, and a Literal where there are choices."""
    word: Any = Literal[one.choices] if one.choices else str
    return {str: word, str | None: word | None, tuple[str, ...]: tuple[word, ...], str | int: str}.get(
        hint, hint
    )


def given_by(place: Place, model: BaseModel, *records: type[Any]) -> dict[str, Any]:
    """The options of these records as a model for this place states them."""
    return {
        one.name: getattr(model, one.name) for one in options_of(*records) if getattr(one, place) is not None
    }


def target_of(place: Place, model: BaseModel, uri: str, to: str) -> TargetRequest:
    """A target as a model states it; booleans among its options become the words of `--set`."""
    given = given_by(place, model, TargetRequest)
    layout = LayoutRequest(**{one.name: given.pop(one.name) for one in options_of(LayoutRequest)})
    options = {
        name: str(value).lower() if isinstance(value, bool) else value
        for name, value in given.pop("options").items()
    }
    return TargetRequest(uri, to, options, layout=layout, **given)


class Section(BaseModel):
    """A part of the file; an unknown field is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


@with_options("route", TargetRequest)
class _Target(Section):
    format: str = Field(description="Target format, a name or alias; `wherry formats` lists them.")
    uri: Template = Field(
        description="URI to write, with the fields {run} {step} {format} {name} {route} {family} {kind}; "
        "{step|final} gives a default for an unknown field. A relative path is relative to the folder of wherry.toml."
    )
    into: bool = option_field("route", TargetRequest, "into")
    options: dict[str, Option] = option_field("route", TargetRequest, "options")


class TargetRule(_Target):
    """One target of a route."""

    model: Template | None = Field(
        default=None, description="Registered model of this target; that of the route by default."
    )

    def at(self, uri: str) -> TargetRequest:
        """The target of a request, with the template filled in."""
        return target_of("route", self, uri, self.format)


class Retention(Section):
    """Which converted checkpoints of a route are kept. One that any rule keeps is kept; without rules, all are."""

    keep_last: int | None = Field(
        default=None, ge=1, description="Number of newest steps to keep of each run."
    )
    keep_best: int | None = Field(
        default=None, ge=1, description="Number of best steps to keep of each run, by `metric`."
    )
    metric: str | None = Field(default=None, description="Metric for `keep_best`, as in `best(METRIC)`.")
    highest: bool = Field(default=False, description="For `keep_best`: whether higher values are better.")
    keep_days: float | None = Field(
        default=None, gt=0, description="Keep what was converted within this many days."
    )

    @model_validator(mode="after")
    def _require_rule(self) -> Retention:
        if self.keep_best is not None and not self.metric:
            raise ValueError("keep_best needs `metric`: add the name of the metric")
        return self

    @property
    def states_nothing(self) -> bool:
        """Whether no rule is set, so that nothing is removed."""
        return self.keep_last is None and self.keep_best is None and self.keep_days is None


@with_options("route", SourceRequest, ConvertRequest)
class Route(Section):
    """A rule: which checkpoints are converted, to what, and where the results are written."""

    name: str = Field(
        pattern=r"^[\w.-]+$",
        description="Name of the route and its table: letters, digits, `_`, `-` and `.`.",
    )
    root: str = Field(min_length=1, description="Folder or URI to search for checkpoints.")
    runs: tuple[str, ...] = Field(
        default=(), description="Patterns of runs to include, for example t5x-*; all by default."
    )
    formats: tuple[str, ...] = Field(default=(), description="Source formats to include; all by default.")
    format: str | None = Field(default=None, description="Format of the checkpoints, if none is detected.")
    select: Selection = Field(
        default="latest",
        description="Steps to convert: latest, best(METRIC[, min|max]), every N, all or since DATE.",
    )
    min_age: Duration = Field(
        default=900.0,
        description="Minimum age, in seconds or as 15m, of a checkpoint that has no commit member.",
    )
    max_items: int | None = Field(
        default=None, ge=1, description="Maximum number of checkpoints in one flow run."
    )
    max_bytes: Size | None = Field(default=None, description="Maximum size of the sources in one flow run.")
    first_night: Literal["estimate", "convert"] = Field(
        default="estimate",
        description="If more than `first_night_items` checkpoints wait and none was ever converted: only report count, "
        "bytes and hours (estimate), or convert.",
    )
    first_night_items: int = Field(default=20, ge=0, description="Threshold for `first_night`.")
    allow_opaque: tuple[str, ...] = option_field("route", SourceRequest, "allow_opaque")
    ignore: tuple[Literal["values", "empties", "companions", "others"], ...] = option_field(
        "route", ConvertRequest, "ignore"
    )
    targets: tuple[TargetRule, ...] = Field(
        min_length=1,
        description="Targets of each checkpoint; the source is read once for all of them on this machine.",
    )
    memory: Size | None = Field(
        default=None, description="Memory budget for data in flight; the setting `memory` by default."
    )
    on: Engine = Field(default="threads", description=ENGINE)
    unit: Size = Field(default=DEFAULT_UNIT, description=UNIT)
    level: VerifyLevel = Field(default="present", description="Verification level after the commit.")
    model: Template | None = Field(
        default=None, description="Registered model in MLflow, for example {run}; none by default."
    )
    alias: str | None = Field(default=None, description="Alias of the model version.")
    tags: dict[str, str] = Field(default={}, description="Tags of the model version.")
    meta: dict[str, str] = option_field("route", ConvertRequest, "meta")
    sign: str | None = option_field("route", ConvertRequest, "sign")
    concurrency: int = Field(
        default=2,
        ge=1,
        description="Maximum number of checkpoints of this route that are converted at the same time.",
    )
    retention: Retention = Field(default=Retention(), description="Checkpoints that `wherry prune` keeps.")

    @model_validator(mode="after")
    def _one_target(self) -> Route:
        if self.on != "threads" and len(self.targets) != 1:
            raise ValueError("an engine writes only one target at a time: make a route for each target")
        return self

    @property
    def selection(self) -> Select:
        """`select`, parsed."""
        return select(self.select)

    def source(self, found: Detection) -> SourceRequest:
        """The source of a request for a checkpoint below the root."""
        return SourceRequest(
            found.uri, self.format or found.format, allow_opaque=self.allow_opaque, below=self.root
        )

    def place(self, uri: str) -> Location:
        """The root or a location below it, where the classes in `allow_opaque` may be read as opaque values."""
        request = SourceRequest(uri, allow_opaque=self.allow_opaque)
        return locate_below(self.root, uri, frozenset(request.allow_opaque))

    def request(self, source: SourceRequest, targets: Sequence[TargetRequest], memory: str) -> ConvertRequest:
        """The request for a conversion.

        Args:
            source: as `source` returns it.
            targets: as the rules' `at` returns them.
            memory: the setting, used where the route states none.
        """
        given: dict[str, Any] = {**given_by("route", self, ConvertRequest), "memory": self.memory or memory}
        return ConvertRequest(source=source, targets=tuple(targets), **given)


class MlflowSettings(Section):
    """Where model versions are registered."""

    tracking_uri: str | None = Field(default=None, description="MLflow tracking store.")
    registry_uri: str | None = Field(
        default=None, description="MLflow registry; the tracking store by default."
    )


class NotifySettings(Section):
    """Who is notified of how flows ended."""

    webhook: str | None = Field(default=None, description="URL that receives a JSON POST request; a secret.")
    block: str | None = Field(
        default=None, description="Prefect notification block, for example slack-webhook/team."
    )
    on: Literal["failure", "damaged", "always", "never"] = Field(
        default="damaged",
        description="When to notify: `damaged` is every failure, and every run that left out a damaged checkpoint or "
        "one that no route takes.",
    )


class OpenlineageSettings(Section):
    """Where OpenLineage events are sent."""

    target: str | None = Field(default=None, description="File (JSON lines) or HTTP URL; none by default.")
    namespace: str = Field(default="wherry", description="Namespace of the jobs.")


class LineageSettings(Section):
    """Where others reach the pages of `wherry lineage serve`."""

    url: Origin | None = Field(
        default=None,
        description="Address at which a proxy shows the pages, such as https://wherry.example, without a path; model "
        "versions link to it. None by default: then only the machine that serves them shows them, and nothing links.",
    )


class MetricsSettings(Section):
    """Where metrics for Prometheus are written."""

    file: str | None = Field(
        default=None, description="File for the textfile collector of the node exporter."
    )


class AuditSettings(Section):
    """What an audit uses besides the ledger."""

    key: str | None = Field(
        default=None, description="Public key (PEM file) to verify the signatures of checkpoints with."
    )
    record: bool = Field(
        default=True,
        description="Whether audits are recorded in the ledger; false where their login may only read it.",
    )


class ChildSettings(Section):
    """Limits of the processes that wherry starts: native, logits and serve checks, and `prefect deploy`."""

    timeout: Duration | None = Field(
        default=None,
        description="Wall-time limit, for example 2h; by default 15 min, more for large checkpoints.",
    )
    memory: Size | None = Field(
        default=None,
        description="Limit of resident memory; by default 4 GiB plus 6 times the size of the checkpoint.",
    )
    disk: Size | None = Field(
        default=None,
        description="Largest checkpoint of a store that is copied to a temporary folder for a library that reads only "
        "local files; by default 32GiB.",
    )


class Settings(Section):
    """Settings for all routes."""

    ledger: str | None = Field(
        default=None, description="URL of the ledger; a SQLite file in WHERRY_HOME by default."
    )
    digest: Literal["blake3", "sha256"] | None = Field(
        default=None,
        description="Algorithm of new digests; by default that of the last conversion in the ledger. BLAKE3 in a new "
        "ledger, SHA-256 on a host in FIPS mode.",
    )
    memory: Size = Field(default="128MiB", description="Memory budget for data in flight.")
    storage_timeout: Annotated[
        float, Field(gt=0), BeforeValidator(duration, json_schema_input_type=float | str)
    ] = Field(
        default=60.0,
        description="Time without progress, in seconds or as 5m, after which a request to a remote store fails. It is "
        "repeated until twice this time has passed, at most 12 times.",
    )
    worker_wait: Duration = Field(
        default=600.0,
        description="Time without a worker that can make units, in seconds or as 10m, after which a conversion on an "
        "engine (Dask, Ray) gives up; spot machines take minutes to be replaced. What is written is kept for the next "
        "run.",
    )
    shared_paths: tuple[str, ...] = Field(
        default=(), description="Folders that all workers mount at the same path."
    )
    links: tuple[Folder, ...] = Field(
        default=(), description="Folders that links in checkpoints may point to; absolute paths."
    )
    mlflow: MlflowSettings = MlflowSettings()
    notify: NotifySettings = NotifySettings()
    openlineage: OpenlineageSettings = OpenlineageSettings()
    lineage: LineageSettings = LineageSettings()
    metrics: MetricsSettings = MetricsSettings()
    child: ChildSettings = ChildSettings()
    audit: AuditSettings = AuditSettings()
    concurrency: dict[str, Annotated[int, Field(ge=1)]] = Field(
        default={},
        description="Store (file, gs-BUCKET, s3-BUCKET) → maximum number of concurrent conversions over all flows.",
    )
    policy: dict[str, dict[str, Any]] = Field(default={}, description="Promotion policies by name.")


class ConfigFile(Settings):
    """The whole file for one environment: the settings and the routes."""

    routes: dict[str, Route] = Field(default={}, description="Routes by name.")
