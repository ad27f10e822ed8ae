"""The parameters of the conversion flow, as the form in the Prefect UI shows them.

The options of the conversion come from `wherry.core.request`; the other fields control the further steps of the flow.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from wherry.config.schema import (
    ENGINE,
    UNIT,
    Engine,
    Size,
    VerifyLevel,
    given_by,
    option_field,
    target_of,
    with_options,
)
from wherry.core.request import ConvertRequest, SourceRequest, TargetRequest, convert_request
from wherry.core.units import DEFAULT_UNIT
from wherry.flows.form import FormModel
from wherry.formats.registry import formats
from wherry.nightly.conversion import Conversion

if TYPE_CHECKING:
    from wherry.formats.format import Format


def _choices(field: dict[str, Any]) -> None:
    """List the formats that can be written here, and then their aliases."""
    written: list[Format] = [row for row in formats().values() if row.is_written]
    aliases = [alias for row in written for alias in row.aliases]
    field["enum"] = [*sorted(row.name for row in written), *sorted(aliases)]


@with_options("form", TargetRequest)
class _TargetFields(FormModel):
    target: str = Field(description="URI or path of the checkpoint to write; with `into`, of the run folder.")
    to: str = Field(
        description="Target format, a name or alias; `wherry formats` lists them.", json_schema_extra=_choices
    )


class TargetSpec(_TargetFields):
    """One target: location, format, and all options that the files do not determine."""

    FIRST: ClassVar[tuple[str, ...]] = ("target", "to", "only", "family", "options", "model")

    model: str | None = Field(default=None, description="Registered model in MLflow; none by default.")

    @property
    def target_request(self) -> TargetRequest:
        """The request to the engine, as far as it concerns this target."""
        return target_of("form", self, self.target, self.to)


@with_options("form", SourceRequest)
class _Source(TargetSpec):
    source: str = Field(
        description="URI or path of a checkpoint, a step folder or a run folder (its newest step)."
    )
    further: tuple[TargetSpec, ...] = Field(
        default=(), description="Further targets; the source is read once for all of them on this machine."
    )


@with_options("form", ConvertRequest, leave=("meta", "sign"))
class _Conversion(_Source):
    pass


class ConvertSpec(_Conversion):
    """What to convert; the only parameter of the flow, and its form in the Prefect UI."""

    FIRST: ClassVar[tuple[str, ...]] = (
        "source", "target", "to", "only", "family", "options", "step", "level", "model", "alias", "further",
    )  # fmt: skip

    on: Engine = Field(default="threads", description=ENGINE)
    unit: Size = Field(default=DEFAULT_UNIT, description=UNIT)
    level: VerifyLevel = Field(
        default="present",
        description="Verification level of the committed target; `digest` reads it again.",
    )
    meta: dict[str, str] = option_field("form", ConvertRequest, "meta")
    alias: str | None = Field(default=None, description="Alias of the model version.")
    tags: dict[str, str] = Field(default={}, description="Tags of the model version.")
    tracking_uri: str | None = Field(
        default=None, description="MLflow tracking store; an embedded one by default."
    )
    registry_uri: str | None = Field(
        default=None, description="MLflow registry; the tracking store by default."
    )
    sign: str | None = option_field("form", ConvertRequest, "sign")
    below: str | None = Field(
        default=None,
        description="Folder that the source and its links must not leave; the root of its route.",
    )

    @property
    def targets(self) -> tuple[TargetSpec, ...]:
        """All targets, the first one included."""
        return self, *self.further

    @property
    def request(self) -> ConvertRequest:
        """The request to the engine."""
        given = given_by("form", self, SourceRequest, ConvertRequest)
        made = convert_request(self.source, [one.target_request for one in self.targets], **given)
        return replace(made, source=replace(made.source, below=self.below))

    @property
    def conversion(self) -> Conversion:
        """The request with the steps after the commit."""
        return Conversion(
            request=self.request, models=tuple(one.model for one in self.targets), on=self.on, unit=self.unit,
            level=self.level, alias=self.alias, tags=self.tags,
            tracking_uri=self.tracking_uri, registry_uri=self.registry_uri,
        )  # fmt: skip
