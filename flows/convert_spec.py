"""The parameters of a conversion flow, as the form in the Prefect UI shows them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from wherry.config.schema import VerifyLevel  # noqa: TC001  pydantic reads it
from wherry.config.values import settings_of

_FORMATS = ["safetensors", "huggingface", "orbax", "dcp", "maxtext", "t5x", "flax-msgpack"]


class TargetSpec(BaseModel):
    """One target: where it is written, as what, and everything that the files do not tell."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    target: str = Field(
        description="URI or path of exactly what shall be written; with `into`, the run folder."
    )
    to: str = Field(
        description="Target format, a name or alias; `wherry formats` lists them.", examples=_FORMATS
    )
    options: dict[str, Any] = Field(
        default={}, description="Options of the target format and its layout, as `--set` takes them."
    )
    only: Literal["params"] | None = Field(default=None, description="Carry the parameters alone.")
    into: bool = Field(default=False, description="The target is a run; make the step folder inside it.")
    family: str | None = Field(
        default=None,
        description="Model family, where detection would not decide so; `none` keeps the tree.",
    )
    family_file: str | None = Field(
        default=None, description="TOML file that declares or changes a model family."
    )
    config: str | None = Field(
        default=None, description="The source's config (JSON), where none lies beside it."
    )
    dtype: str | None = Field(default=None, description="Element type of the target's parameters.")
    assets: str | None = Field(
        default=None, description="Folder or URI with tokenizer and the like for the target."
    )
    rename: tuple[str, ...] = Field(
        default=(), description="Rules that rename key paths: 'layers.{n}.w -> blocks/{n}/kernel'."
    )
    model_name: str | None = Field(
        default=None, description="Registered model in MLflow; not registered by default."
    )

    @property
    def settings(self) -> dict[str, Any]:
        """What `--set` would be given, the renames included."""
        return settings_of(self.options, self.rename)

    @property
    def wish(self) -> dict[str, Any]:
        """The fields of a Wish."""
        return {name: getattr(self, name) for name in ("family", "family_file", "config", "dtype", "assets")}

    def engine(self) -> dict[str, Any]:
        """The fields of the engine's Target."""
        return {
            "uri": self.target,
            "to": self.to,
            "options": self.settings,
            "wish": self.wish,
            "only": self.only,
            "into": self.into,
        }


class ConvertSpec(TargetSpec):
    """What to convert; the one parameter of the flow, and its form in the Prefect UI."""

    source: str = Field(
        description="URI or path of a checkpoint, a step folder or a run folder (its newest step)."
    )
    further: tuple[TargetSpec, ...] = Field(
        default=(), description="Further targets, made from the same read of the source."
    )
    format: str | None = Field(
        default=None, description="Format of the source, where detection would not decide."
    )
    step: int | None = Field(default=None, description="Step of a run; its newest complete step by default.")
    item: str | None = Field(default=None, description="Item of a step.")
    opaque: tuple[str, ...] = Field(
        default=(), description="Classes in pickles that may pass unread, as package.module.Class."
    )
    ignore: tuple[Literal["values", "empties", "companions"], ...] = Field(
        default=(), description="Leave behind what the target cannot hold."
    )
    memory: str = Field(default="128MiB", description="Budget of what is in flight.")
    as_step: int | None = Field(default=None, description="Step to write, where the source states none.")
    if_exists: Literal["fail", "skip", "resume"] = Field(
        default="resume",
        description="Accept nothing at the target, anything that wherry wrote, or the result of this conversion.",
    )
    read_back: bool = Field(default=True, description="Read every byte of the target back before the commit.")
    verify: VerifyLevel = Field(
        default="present",
        description="Level of the verification of the committed target; `digest` reads it again.",
    )
    meta: dict[str, str] = Field(default={}, description="Kept with the checkpoint, in its manifest.")
    alias: str | None = Field(default=None, description="Alias to set on the model version.")
    tags: dict[str, str] = Field(default={}, description="Tags of the model version.")
    tracking_uri: str | None = Field(
        default=None, description="MLflow tracking store; an embedded one by default."
    )
    registry_uri: str | None = Field(
        default=None, description="MLflow registry; the tracking store by default."
    )
    sign: str | None = Field(default=None, description="File with the private key that signs the target.")

    @property
    def targets(self) -> tuple[TargetSpec, ...]:
        """All targets, the first one included."""
        return self, *self.further
