"""Reading and writing the config files of a model without the parsers of its systems.

JSON (Hugging Face, Lingua, Meta), YAML (MaxText) and gin (T5X). From gin only the bindings of the network's config are
read: T5X binds a run's whole program in one file. MaxText's config may also be the log of a run, from which the lines
`Config param NAME: VALUE` are read; the last one of a name counts.

A MaxText config may name a model. MaxText reads base.yml, over it `configs/models/NAME.yml`, and over that the command
line, so base.yml's values do not hold for an attribute that the model's file sets. `tables/maxtext_models.toml` has the
values of these files; of a model that it does not have, a config must state everything.
"""

from __future__ import annotations

import ast
import json
import re
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, cast

from wherry.core.config_text import YAML, parse_config_text, parse_yaml
from wherry.core.json_document import json_value, parse_json
from wherry.core.limits import SMALL, beyond, scale_limit
from wherry.cures import Argument, Blank, Cure
from wherry.errors import CorruptError, UsageError

_WORDS = {"true": True, "false": False, "null": None, "none": None, "~": None, "": None}
_NETWORK = "T5Config"
_BEFORE_GIN = b"=,[{(\n"  # each binding or value follows one of them
_FLOAT = re.compile(r"[-+]?(\d[\d_]*)(\.[\d_]*)?[eE][-+]?\d+")  # YAML 1.1 wants a point and a sign
_BINDING = re.compile(
    r"(?:[\w./]+/)?(?:[\w.]+\.)?(?P<configurable>\w+)\.(?P<name>\w+)\s*=\s*(?P<value>.+)", re.DOTALL
)
_MODELS = Path(__file__).parent / "tables" / "maxtext_models.toml"
_BLOCK, _NAME, _OVERRIDE, _PARENT = "decoder_block", "model_name", "override_model_config", "base_config"
_NONE = "default"
_ROTARY, _NEIGHBOURS = (
    "rope_type",
    "llama3.1",
)  # models of such names turn neighbours, whatever their file states
_INSTRUCT = "-Instruct"  # MaxText takes the file of the model without it
_WHOLE = "MaxText's whole config, as it logs it"
_LOGGED = re.compile(r"\bConfig param (?P<name>\w+): ?(?P<value>.*)")
_CHOICE = re.compile(
    r"[A-Z]\w*\.(?P<name>[A-Z][A-Z0-9_]*)"
)  # how Python prints one of the choices of an Enum
# The others are their names in lower case.
_CHOICES = {"RopeType.LLAMA3_1": "llama3.1", "TEGroupedGemmQuantizationType.EMPTY": ""}
_MACRO = re.compile(r"(?P<name>\w+)\s*=\s*(?P<value>.+)", re.DOTALL)


def parse_config(name: str, data: bytes) -> dict[str, Any]:
    """The attributes of a config file, parsed by its file name extension.

    Raises:
        UsageError: the file is invalid; the line is named.
        HostileError: it exceeds a limit.
    """
    try:
        found = _parse(name, data)
    except ValueError as error:
        reason = error.what if isinstance(error, CorruptError) else error
        raise UsageError(
            f"invalid config file {name}: {reason}",
            cure=Cure("correct it, or pass another with {}", Argument("config", Blank("FILE"))),
        ) from error
    if not isinstance(found, dict):
        raise UsageError(
            f"invalid config file {name}: expected a table of attributes, got a {type(found).__name__}",
            cure=Cure("correct it, or pass another with {}", Argument("config", Blank("FILE"))),
        )
    return found


def _parse(name: str, data: bytes) -> Any:
    what = f"the config file {name}"
    if b"Config param " in data and not name.endswith((".json", ".gin")):
        return parse_config_text(data, _log, what, YAML, _BEFORE_GIN)
    if name.endswith((".yml", ".yaml")):
        return parse_yaml(data, _yaml, what)
    if name.endswith(".gin"):
        return parse_config_text(data, _gin, what, YAML, _BEFORE_GIN)
    return parse_json(data, what, limits=SMALL)


def render_config(name: str, attributes: Mapping[str, Any]) -> bytes:
    """A config file with these attributes, in the format of its file name extension."""
    if name.endswith((".yml", ".yaml")):
        return "".join(f"{key}: {_yaml_value(value)}\n" for key, value in attributes.items()).encode()
    if name.endswith(".gin"):
        return "".join(
            f"network.{_NETWORK}.{key} = {_gin_value(value)}\n" for key, value in attributes.items()
        ).encode()
    return (json.dumps(attributes, indent=2) + "\n").encode()


def _yaml_value(value: object) -> str:
    """A value as YAML: as JSON, except that YAML 1.1 reads 1e-05 as text and 1.0e-05 as a number."""
    text = json.dumps(value)
    return re.sub(r"^(-?\d+)e", r"\1.0e", text) if isinstance(value, float) else text


def _gin_value(value: object) -> str:
    """A value as gin: as Python prints it, with lists as the tuples that T5X's networks expect."""
    return repr(tuple(cast("list[object]", value)) if isinstance(value, list) else value)


def _yaml(text: str) -> Any:
    """YAML as MaxText reads it: 1e-5 is a number, and None is null.

    Raises:
        ValueError: the text is not YAML, or has an alias, which could expand without limit.
    """
    import yaml

    class ConfigYaml(yaml.SafeLoader):
        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.events.AliasEvent):  # pyright: ignore[reportUnknownMemberType]
                raise ValueError("aliases are not supported")
            return super().compose_node(parent, index)

    ConfigYaml.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))
    ConfigYaml.add_implicit_resolver("tag:yaml.org,2002:null", re.compile("None|none"), ["N", "n"])
    try:
        return yaml.load(text, Loader=ConfigYaml) or {}  # noqa: S506  a SafeLoader
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


def _scalar(text: str) -> Any:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError):
        pass  # text without quotes, or a number as YAML spells it
    try:
        return json_value(text)
    except ValueError:
        return text


def _log(text: str) -> dict[str, Any]:
    """The attributes in a log of MaxText, where values stand as Python prints them."""
    return {line["name"]: _log_value(line["value"].strip()) for line in _LOGGED.finditer(text)}


def _log_value(text: str) -> Any:
    """A value as Python prints it; of a choice its value, and None for the choice NONE."""
    choice = _CHOICE.fullmatch(text)
    return _CHOICES[text] if text in _CHOICES else _scalar(choice["name"].lower() if choice else text)


def _gin(text: str) -> dict[str, Any]:
    """The bindings of `T5Config` with macros replaced; references to functions (`@gelu`) stay text."""
    joined = text.replace("\\\n", " ")
    macros: dict[str, str] = {}
    bound: dict[str, str] = {}
    block: str | None = None
    for line in joined.splitlines():
        bare = line.split("#")[0].rstrip()
        heading = re.fullmatch(r"(?:[\w./]+[./])?(\w+):", bare)
        if heading:
            block = heading[1]
        elif bare[:1].isspace() and block == _NETWORK and (one := _MACRO.fullmatch(bare.strip())):
            bound[one["name"]] = one["value"]
        elif one := _BINDING.fullmatch(bare):
            block = None
            bound.update({one["name"]: one["value"]} if one["configurable"] == _NETWORK else {})
        elif one := _MACRO.fullmatch(bare):
            block = None
            macros[one["name"]] = one["value"]
    values = {name: macros.get(value.lstrip("%"), value) for name, value in bound.items()}
    most = scale_limit(YAML.nbytes)
    if sum(map(len, values.values())) > most:
        raise beyond("the config with its macros", most, "characters")
    return {name: _scalar(value) for name, value in values.items()}


def complete_config(config: dict[str, Any], file: str) -> dict[str, Any]:
    """A config with the attributes that MaxText takes from the file of the model that it names.

    A file of `configs/models` itself has the name of its model, at which MaxText looks: it is part of the config.

    Args:
        config: the attributes of any config; only MaxText's are changed.
        file: the name of the config's file.

    Raises:
        UsageError: the model is unknown and the config is not whole, or the config contradicts the model's file.
    """
    if _BLOCK in config and not {_PARENT, _NAME} & config.keys():
        stem = file.rpartition(".")[0]
        # by the name MaxText decides about rotary positions: a block may have models of both kinds
        alike = {name for name, values in _models().items() if config.get(_BLOCK) == values[_BLOCK]}
        decides = any(name.startswith(_NEIGHBOURS) for name in alike)
        named = stem in alike or stem.startswith(_NEIGHBOURS)
        if decides and not named and _ROTARY not in config:
            raise UsageError(
                f"{file} does not state {_NAME}: MaxText turns and scales rotary positions of {_NEIGHBOURS} otherwise "
                "than those of other models, by the name alone",
                cure=f"add the name to the file ({_NAME}: llama3.1-8b, {_NAME}: llama2-7b), or {_NAME}: {_NONE} if the "
                "run has none",
            )
        return {**config, _NAME: stem}
    name = config.get(_NAME)
    if not isinstance(name, str) or name == _NONE or not {_PARENT, _BLOCK, "base_emb_dim"} & config.keys():
        return config
    values = _models().get(name.replace(_INSTRUCT, ""))
    if values is None:
        # of another release, or a user's: its file may state whatever the file of any such model states
        alike = [one for one in _models().values() if config.get(_BLOCK) in (None, one[_BLOCK])]
        missing = {attribute for one in alike for attribute in one} - config.keys()
        if missing:
            raise UsageError(
                f"{file}: unknown model {name!r}: its own file in MaxText's configs/models may state "
                f"{', '.join(sorted(missing))}",
                cure=Cure(
                    "pass that file with {}, or {}", Argument("config", f"configs/models/{name}.yml"), _WHOLE
                ),
            )
        return config
    if values.keys() <= config.keys():
        return config
    wrong = [one for one in values if one in config and config[one] != values[one]]
    if wrong and not config.get(_OVERRIDE):
        first = wrong[0]
        raise UsageError(
            f"{file} states {first}: {json.dumps(config[first])}, but the file of its model {name} states "
            f"{json.dumps(values[first])}, which MaxText takes unless its command line overrides it",
            cure=f"add {_OVERRIDE}: true to the config if the run was started with these values, else remove "
            f"{', '.join(wrong)}; or pass {_WHOLE}",
        )
    return {**values, **config}


@cache
def _models() -> Mapping[str, Mapping[str, Any]]:
    """Model → the attributes that its file sets."""
    blocks = tomllib.loads(_MODELS.read_text(encoding="utf-8"))
    return {
        name: {_BLOCK: block, **values} for block, models in blocks.items() for name, values in models.items()
    }
