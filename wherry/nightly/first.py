"""first: the commented wherry.toml of a new user, with one route; `wherry init` writes it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from urllib.parse import urlsplit

from wherry.core.lazy_dataclass import dataclass
from wherry.cures import Argument, Blank, Cure
from wherry.errors import TargetExistsError, UsageError, storage_errors
from wherry.formats.registry import find_target_format
from wherry.store.local_store import locate

EMBEDDED, NONE = "embedded", "none"
_TEMPLATE = Path(__file__).with_name("first.toml")
_REGISTRIES = ("http", "https", "sqlite", "postgresql", "mysql")


@dataclass(frozen=True, slots=True)
class FirstRoute:
    """The first route of a new user, from the answers of `wherry init`.

    Attributes:
        root: folder or URI with the checkpoints.
        target: folder or URI for the converted checkpoints.
        format: their format, a name or alias.
        registry: URI of an MLflow store; `embedded` for a file in WHERRY_HOME, `none` to register nothing.
        route: name of the route.
    """

    root: str
    target: str = "converted"
    format: str = "safetensors"
    registry: str = EMBEDDED
    route: str = "all"


def first_config(wanted: FirstRoute) -> str:
    """The text of a wherry.toml.

    Raises:
        UsageError: the format cannot be written, the registry is no URI of MLflow, or root and target are one folder.
    """
    registry = wanted.registry
    scheme = urlsplit(registry).scheme.partition("+")[0]
    if registry not in (EMBEDDED, NONE) and scheme not in _REGISTRIES:
        raise UsageError(
            f"invalid registry {registry!r}",
            cure=f"give the URL of an MLflow server, `{EMBEDDED}` for a file in WHERRY_HOME, or `{NONE}`",
        )
    if locate(wanted.root).uri.rstrip("/") == locate(wanted.target).uri.rstrip("/"):
        raise UsageError(
            "root and target are the same folder",
            uri=wanted.root,
            cure=Cure("give another {}", Argument("target")),
        )
    model = 'model = "{run}"  # registered model in MLflow\nalias = "candidate"\n'
    if registry == NONE:
        model = '# model = "{run}"  # registered model in MLflow; nothing is registered without it\n'
    mlflow = f"\n[mlflow]\ntracking_uri = {_quote(registry)}\n"
    if registry in (EMBEDDED, NONE):
        mlflow = '\n# [mlflow]\n# tracking_uri = "https://mlflow.example"  # a SQLite file in WHERRY_HOME by default\n'
    shown = {
        "route": wanted.route,
        "root": _quote(wanted.root),
        "format": _quote(find_target_format(wanted.format).name),
        "uri": _quote(f"{_literal(wanted.target).rstrip('/')}/{{name}}"),
        "model": model,
        "mlflow": mlflow,
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda found: shown[found[1]], _TEMPLATE.read_text("utf-8"))


def write_config(file: Path, text: str, *, force: bool = False) -> None:
    """Write the file; an existing one stays as it is unless `force` is given.

    Raises:
        TargetExistsError: the file exists.
        StorageError: it cannot be written.
    """
    try:
        with storage_errors(str(file)), file.open("w" if force else "x", encoding="utf-8") as out:
            out.write(text)
    except Exception as error:
        if isinstance(error.__cause__, FileExistsError):
            raise TargetExistsError(
                "the configuration exists already",
                uri=str(file),
                cure=Cure(
                    "give {} for another one, or {} to overwrite it",
                    Argument("config", Blank("FILE")),
                    Argument("force"),
                ),
            ) from error
        raise


def _quote(value: str) -> str:
    """A TOML string; its escapes are those of JSON."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _literal(template: str) -> str:
    """A path in which no brace is a placeholder of a route.

    Raises:
        UsageError: it has braces, which a template cannot contain.
    """
    if "{" in template or "}" in template:
        raise UsageError("the target contains braces", uri=template, cure="choose a folder without { and }")
    return template
