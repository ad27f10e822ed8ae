"""model: the model of a checkpoint as a config names it: its family, and its name in messages.

A Hugging Face config next to the source, or one that the user names, states `model_type` and `architectures`. They
decide the family: a model that no family declares may resemble one in every name and shape, and is still another model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from wherry.core.json_document import parse_json
from wherry.core.limits import SMALL
from wherry.cures import Argument, Blank, Cure
from wherry.errors import CorruptError, UsageError
from wherry.families.companions import config_file, model_folder
from wherry.store.location import MOST_CONFIG

if TYPE_CHECKING:
    from wherry.formats.checkpoint import Checkpoint

CONFIG = "config.json"
ADAPTER = "adapter_config.json"
_CLASS = "_class_name"  # diffusers writes this instead of a model type


def config_of(checkpoint: Checkpoint, given: str | None = None) -> dict[str, Any] | None:
    """The config that names the model: the user's file, or the one next to the source of any system.

    Raises:
        NotFoundError, UsageError: it cannot be read.
    """
    return config_file(given) if given else json_companion(checkpoint, CONFIG)


def model_named(config: Mapping[str, Any] | None) -> str | None:
    """The name that a config gives its model, for messages: `olmo2 (Olmo2ForCausalLM)`; None if it gives none."""
    if not config:
        return None
    kind, classes = config.get("model_type"), config.get("architectures") or config.get(_CLASS)
    first = classes[0] if isinstance(classes, list) and classes else classes
    words = [str(one) for one in (kind, first) if one]
    return f"{words[0]} ({words[1]})" if len(words) > 1 else words[0] if words else None


def model_words(checkpoint: Checkpoint, given: str | None = None) -> str | None:
    """The name of the model in its configs, for messages; None if none names it."""
    adapter = json_companion(checkpoint, ADAPTER)
    if adapter is not None:
        kind, base = adapter.get("peft_type", "PEFT"), adapter.get("base_model_name_or_path")
        return f"the {kind} adapter of {base or 'an unnamed model'}, which is not a whole model"
    return model_named(config_of(checkpoint, given))


def json_companion(checkpoint: Checkpoint, name: str) -> dict[str, Any] | None:
    """A companion that is a JSON table; None if there is none.

    Raises:
        UsageError: it is not JSON.
    """
    if name in {companion.name for companion in checkpoint.manifest.companions}:
        place = checkpoint.reader.companion(name)
    else:
        home = model_folder(checkpoint)
        if home is None or not home.join(name).exists():
            return None
        place = home.join(name)
    data = place.read_whole(MOST_CONFIG)
    try:
        found = parse_json(data, name, uri=checkpoint.uri, limits=SMALL)
    except CorruptError as error:
        raise UsageError(
            error.what, uri=checkpoint.uri, cure=Cure("pass {}", Argument("config", Blank("FILE")))
        ) from error
    return found if isinstance(found, dict) else None
