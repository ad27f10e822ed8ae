"""Reference pages that are read off the code: the Python API, the catalogue of errors, and JSON schemas.

`infra/docs.py` writes them.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import wherry
from tests.support.cure_texts import assigned, stated
from wherry import errors
from wherry.config.schema import ConfigFile
from wherry.cures import Blank
from wherry.errors import WherryError
from wherry.flows.audit import AuditSpec
from wherry.flows.convert_spec import ConvertSpec
from wherry.flows.export import ExportSpec
from wherry.flows.nightly import NightlySpec
from wherry.flows.promote import PromoteSpec
from wherry.models.policy import Policy

if TYPE_CHECKING:
    from pydantic import BaseModel

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("wherry", "integrations", "tasks", "flows")
# What the schemas are of, by the name of their file.
DOCUMENTS: dict[str, type[BaseModel]] = {
    "wherry-toml": ConfigFile, "policy": Policy, "convert-spec": ConvertSpec, "audit-spec": AuditSpec,
    "promote-spec": PromoteSpec, "nightly-spec": NightlySpec, "export-spec": ExportSpec,
}  # fmt: skip
# Class of errors → what usually leads to one.
CAUSES = {
    "WherryError": "a process of a job of several failed",
    "UsageError": "a typing error, an option of another format, or an error in a settings file",
    "NotFoundError": "a path that is one level too high or too low, another machine's disk, or a step that was deleted",
    "NotACheckpointError": "a folder above or below the checkpoint, or a file of another kind",
    "UnsupportedError": "a variant that is written on request or by old releases, or objects among the tensors",
    "AmbiguousError": "several checkpoints, items or families fit, or a fact that no file states",
    "IncompleteError": "an interrupted copy, a save that runs or was killed, or missing files of other hosts",
    "CorruptError": "a truncated or altered file: a failed copy, a full disk, a faulty device, or an edit by hand",
    "HostileError": "a file made to attack the software that loads it, or one that is damaged in a similar way",
    "CrowdedFolderError": "a folder of data next to a checkpoint, or a folder made to exhaust memory",
    "UnrepresentableError": "a target without a place for moments, values, a dtype or a setting of the model",
    "TargetExistsError": "an earlier result at the same place, made from another source or with other options",
    "TargetInUseError": "another run, or one that was killed less than a minute ago",
    "MismatchError": "a source that changed while it was read, or two states that are not of the same model",
    "StorageError": "a full disk, missing permissions, a server that does not answer, or too little memory",
    "MissingExtraError": "an installation without the extra",
    "NotRecordedError": "a ledger or registry that was locked, full or out of reach when the work was done",
    "InternalError": "a fault of wherry",
    "InterruptedRunError": "Ctrl-C, or the end of the machine",
}
LONGEST = 100  # characters of a signature in one line
_HEADS = ("Args", "Attributes", "Raises", "Returns", "Yields")


def schemas() -> dict[Path, str]:
    """Path → text of each JSON schema."""
    folder = ROOT / "docs" / "reference" / "schemas"
    return {folder / f"{name}.json": _schema(name, model) for name, model in DOCUMENTS.items()}


def _add_environments(schema: dict[str, Any]) -> None:
    """Add the tables [env.NAME], which state parts of the file: nothing in them is required."""
    parts: dict[str, Any] = json.loads(json.dumps(schema).replace("#/$defs/", "#/$defs/PartOf"))
    for one in (parts, *parts["$defs"].values()):
        one.pop("required", None)
    schema["$defs"] |= {f"PartOf{name}": one for name, one in parts.pop("$defs").items()}
    schema["$defs"]["Environment"] = {
        **parts,
        "title": "Environment",
        "description": "What an environment overrides.",
    }
    about = "Environments by name; WHERRY_ENV or --env chooses one."
    env = {
        "additionalProperties": {"$ref": "#/$defs/Environment"},
        "description": about,
        "title": "Env",
        "type": "object",
    }
    schema["properties"]["env"] = env


def _schema(name: str, model: type[BaseModel]) -> str:
    found = model.model_json_schema()
    if model is ConfigFile:  # the name of a route is the key of its table
        route = found["$defs"]["Route"]
        del route["properties"]["name"]
        route["required"].remove("name")
        _add_environments(found)
    stated = {"$schema": "https://json-schema.org/draft/2020-12/schema", **found, "title": name}
    return json.dumps(stated, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def schema_list() -> str:
    """The published schemas, each with what it is of."""
    rows = [
        f"- [{name}.json](schemas/{name}.json): {(inspect.getdoc(model) or '').partition('.')[0]}."
        for name, model in DOCUMENTS.items()
    ]
    return "\n" + "\n".join(rows) + "\n\n"


def api() -> str:
    """Every public name of `wherry`, with its signature and what its docstring says."""
    public = [name for name in sorted(dir(wherry), key=str.lower) if name in wherry._DOOR]  # noqa: SLF001
    return "\n" + "\n".join(f"## `{name}`\n\n{_describe(getattr(wherry, name), name)}" for name in public)


def _describe(found: Any, name: str) -> str:
    signature = "" if inspect.isclass(found) else _signature(found, name)
    return f"{signature}{_markdown(inspect.getdoc(found) or '')}\n"


def _signature(function: Any, name: str) -> str:
    """A code block with the signature, an argument a line where it is long."""
    stated = inspect.signature(function)
    line = f"wherry.{name}{stated}"
    if len(line) > LONGEST:
        kinds = [one.kind for one in stated.parameters.values()]
        words = [str(one) for one in stated.parameters.values()]
        if inspect.Parameter.KEYWORD_ONLY in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds:
            words.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
        lines = "".join(f"    {word},\n" for word in words)
        line = f"wherry.{name}(\n{lines}) -> {stated.return_annotation}"
    line = re.sub(r"(: |-> )'([^']*)'", r"\1\2", line)  # annotations are texts
    return f"```python\n{line}\n```\n\n"


def _markdown(docstring: str) -> str:
    """A docstring with its sections as lists."""
    parts = re.split(rf"^({'|'.join(_HEADS)}):\n", docstring, flags=re.MULTILINE)
    text = _escape(parts[0].strip()) + "\n"
    for head, body in zip(parts[1::2], parts[2::2], strict=True):
        section, _, after = body.partition("\n\n")
        rows = re.split(r"\n(?=\S)", textwrap.dedent(section).strip())
        items = [_escape(" ".join(row.split())) for row in rows]
        listed = "\n".join("- " + re.sub(r"^([*\w, ]+): ", r"`\1`: ", one) for one in items)
        text += f"\n**{head}**\n\n{listed}\n" + (
            f"\n{_escape(textwrap.dedent(after).strip())}\n" if after else ""
        )
    return text


def _escape(text: str) -> str:
    return text.replace("<", "&lt;")


def error_catalogue() -> str:
    """What can go wrong, as the code states it: for each class of errors, its messages with their cures."""
    found: dict[str, set[tuple[str, str]]] = {}
    for kind, what, cure in _find_errors():
        found.setdefault(kind, set()).add((what, cure))
    classes = sorted(found, key=lambda name: (getattr(errors, name).exit_code, name))
    return "\n" + "\n".join(_catalogue_of(name, sorted(found[name])) for name in classes)


def _catalogue_of(name: str, rows: list[tuple[str, str]]) -> str:
    cls = getattr(errors, name)
    lines = "\n".join(f"| {_cell(what)} | {_cell(cure or cls.usual_cure or '')} |" for what, cure in rows)
    meaning = _cell((inspect.getdoc(cls) or "").partition("Attributes:")[0])
    head = f"## {cls.exit_code}: `{name}`\n\n{meaning}\n\n**Usual causes**: {CAUSES[name]}.\n\n"
    return f"{head}| what | cure |\n| --- | --- |\n{lines}\n"


def _cell(text: str) -> str:
    return _escape(" ".join(text.split())).replace("|", "\\|") or "–"


def _find_errors() -> Iterator[tuple[str, str, str]]:
    """Class, message and cure of each error that is built in the code; `…` stands for what is filled in."""
    kinds = {
        name for name, cls in vars(errors).items() if inspect.isclass(cls) and issubclass(cls, WherryError)
    }
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            if room == "wherry" and path.relative_to(ROOT).parts[1] in ROOMS:
                continue  # the links by which a checkout is importable
            tree = ast.parse(path.read_text("utf-8"))
            known = assigned(tree)
            for node in ast.walk(tree):
                if (
                    isinstance(node, ast.Call)
                    and isinstance(node.func, ast.Name)
                    and node.func.id in kinds
                    and node.args
                ):
                    cures = [_text(one.value, known) for one in node.keywords if one.arg == "cure"]
                    what = _text(node.args[0], known)
                    if what.strip("… "):
                        yield node.func.id, what, "".join(cures)


def _text(node: ast.expr, known: Mapping[str, ast.expr]) -> str:
    """The text of an expression, as far as it stands in the code."""
    if isinstance(node, ast.Constant):
        return str(node.value) if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part, known) for part in node.values)
    named = node.value if isinstance(node, ast.FormattedValue) else node
    if isinstance(named, ast.Call) and isinstance(named.func, ast.Name) and named.func.id == "counted":
        return _describe_count(*(_text(one, known) for one in named.args[1:]))
    if isinstance(named, ast.Name):
        return (named.id in known and _text(known[named.id], {})) or "…"
    return str(stated(named, known, Blank("…"))) if isinstance(named, ast.Call) else "…"


def _describe_count(noun: str, verb: str = "") -> str:
    """What `counted` says of several."""
    many = verb.rpartition("/")[2]
    return f"… {noun}s {many}".rstrip()
