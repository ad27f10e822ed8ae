"""request: what a user asks of a conversion."""

from __future__ import annotations

from dataclasses import dataclass

# Formats that say nothing of a system: they hold any tree.
CONTAINERS = frozenset(
    {
        "safetensors",
        "dcp",
        "torch-zip",
        "torch-legacy",
        "orbax",
        "npz",
        "flax-msgpack",
        "flax-gda",
        "numpy-pickle",
    }
)


NONE = "none"


SCAN = "scan"


@dataclass(frozen=True, slots=True)
class Wish:
    """What the user says of layouts.

    Attributes:
        family: name of a model family, `none` for the same tree whatever the systems are; None lets wherry look.
        family_file: a TOML file that declares one, or changes one of ours.
        config: a JSON file with the source's config, where the source has none beside it.
        dtype: element type of the target's parameters.
        assets: a folder or URI with tokenizer and the like for the target.
    """

    family: str | None = None
    family_file: str | None = None
    config: str | None = None
    dtype: str | None = None
    assets: str | None = None

    @property
    def explicit(self) -> bool:
        """Whether a layout was asked for by more than the formats."""
        return bool(self.family_file or self.dtype or (self.family and self.family != NONE))


PLAIN = Wish()
