"""Completing a MaxText config that names a model: what it leaves out is what the model's own file states.

MaxText reads base.yml, over it `configs/models/NAME.yml`, and over that the command line. So the values of base.yml do
not hold for an attribute that the model's file sets. `tables/maxtext_models.toml` has these files' values; of a model
that it does not have, a config must state everything.
"""

from __future__ import annotations

import json
import tomllib
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wherry.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

_FILE = Path(__file__).parent / "tables" / "maxtext_models.toml"
_BLOCK, _NAME, _OVERRIDE, _PARENT = "decoder_block", "model_name", "override_model_config", "base_config"
_NONE = "default"
_INSTRUCT = "-Instruct"  # MaxText takes the file of the model without it
_WHOLE = "MaxText's whole config, as it logs it"


def completed(config: dict[str, Any], file: str) -> dict[str, Any]:
    """A config with the attributes that MaxText takes from the file of the model that it names.

    A file of `configs/models` itself has the name of its model, at which MaxText looks: it is part of the config.

    Args:
        config: the attributes of any config; only MaxText's are changed.
        file: the name of the config's file.

    Raises:
        UsageError: the model is unknown and the config is not whole, or the config contradicts the model's file.
    """
    if _BLOCK in config and not {_PARENT, _NAME} & config.keys():
        return {**config, _NAME: file.rpartition(".")[0]}
    name = config.get(_NAME)
    if not isinstance(name, str) or name == _NONE or not {_PARENT, _BLOCK, "base_emb_dim"} & config.keys():
        return config
    values = _models().get(name.replace(_INSTRUCT, ""))
    if values is None:
        _require_whole(config, name, file)
        return config
    if values.keys() <= config.keys():
        return config
    _require_agreement(config, values, name, file)
    return {**values, **config}


@cache
def _models() -> Mapping[str, Mapping[str, Any]]:
    """Model → the attributes that its file sets."""
    blocks = tomllib.loads(_FILE.read_text(encoding="utf-8"))
    return {
        name: {_BLOCK: block, **values} for block, models in blocks.items() for name, values in models.items()
    }


def _require_whole(config: Mapping[str, Any], name: str, file: str) -> None:
    """A model of another release, or a user's: its file may state whatever the file of any such model states."""
    alike = [values for values in _models().values() if config.get(_BLOCK) in (None, values[_BLOCK])]
    missing = {attribute for values in alike for attribute in values} - config.keys()
    if missing:
        raise UsageError(
            f"{file}: unknown model {name!r}: its own file in MaxText's configs/models may state "
            f"{', '.join(sorted(missing))}",
            cure=f"pass that file with --config configs/models/{name}.yml, or {_WHOLE}",
        )


def _require_agreement(config: Mapping[str, Any], values: Mapping[str, Any], name: str, file: str) -> None:
    """MaxText replaces what a config states by what its model's file states, unless the command line states it too."""
    wrong = [one for one in values if one in config and config[one] != values[one]]
    if wrong and not config.get(_OVERRIDE):
        first = wrong[0]
        raise UsageError(
            f"{file} states {first}: {json.dumps(config[first])}, but the file of its model {name} states "
            f"{json.dumps(values[first])}, which MaxText takes unless its command line overrides it",
            cure=f"add {_OVERRIDE}: true to the config if the run was started with these values, else remove "
            f"{', '.join(wrong)}; or pass {_WHOLE}",
        )
