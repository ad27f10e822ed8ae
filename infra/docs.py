"""Writes the generated parts of the documentation: command-line help, reference tables, hooks, the benchmark.

    python infra/docs.py

A generated part is between two markers, `<!-- NAME:start -->` and `<!-- NAME:end -->`, in README.md or in a page of
`docs/`. `tests/infra/test_readme.py` compares the pages with the code, so run this script after a change to either. It
needs wherry installed with the extra `prefect`. The table of container pairs is measured; `infra/pairs.py` writes it.
The tables of attributes and of planted damage are made of golden files, which `python -m tests.support.walk.record`,
`python -m tests.support.walk.judged` and `python -m tests.support.damage` measure.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import yaml
from attributes import attribute_tables, judged_attributes
from click.testing import CliRunner
from names import names_table
from reference import api, error_catalogue, schema_list, schemas

from wherry import errors
from wherry.cli import cli
from wherry.cli.format_list import COLUMNS, format_cells
from wherry.config.config import VARIABLES
from wherry.config.schema import Retention, Route, Settings, TargetRule
from wherry.errors import WherryError
from wherry.families import adapter_families, families, load_family
from wherry.formats.registry import FormatFacts, formats, modules, rows_of
from wherry.integrations.native import LOADERS
from wherry.ledger.replay import READ_ONLY
from wherry.prove.verify import LEVELS
from wherry.store.store import PROTOCOLS
from wherry.transform.codes import largest_error
from wherry.transform.overview import (
    WAYS,
    blocks_without_layouts,
    facts_side_by_side,
    judges,
    matrix,
    models_without_layouts,
    read_judges,
    without_layouts,
)
from wherry.transform.quantize import written_schemes
from wherry.transform.schemes import schemes

if TYPE_CHECKING:
    from pydantic import BaseModel
    from pydantic.fields import FieldInfo

    from wherry.families.schema import Family
    from wherry.store.store import Capabilities, StorageProtocol

ROOT = Path(__file__).resolve().parents[1]
HOOKS = ("orbax", "maxtext", "t5x", "lingua", "torch")
RESULTS = ROOT / "infra" / "bench-results.json"
RATES = ("BLAKE3", "SHA-256", "zstd encode bfloat16", "gzip decode float32", "memcpy")  # shown in README
DAMAGE = ROOT / "tests" / "golden" / "damage.json"
SOUND = ("ok", READ_ONLY)
RATIOS = ("faster", "faster_read_back")


def pages() -> dict[Path, str]:
    """Path → text of README.md and of every page of `docs/`."""
    return {path: path.read_text() for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))}


def help_blocks() -> str:
    """The help of wherry and of each of its commands, in the form of the terminal."""
    words = [(), *commands(cli)]
    return (
        "\n" + "\n".join(f"## `{' '.join(('wherry', *one))}`\n\n{help_block(one)}\n" for one in words) + "\n"
    )


def commands(group: click.Group, above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The words of every command of a group, groups within it included."""
    for name, command in sorted(group.commands.items()):
        yield (*above, name)
        if isinstance(command, click.Group):
            yield from commands(command, (*above, name))


def help_block(words: Sequence[str]) -> str:
    """A console block with the help of one command."""
    arguments = [*words, "--help"]
    result = CliRunner().invoke(cli, arguments, prog_name="wherry", terminal_width=100)
    return f"```console\n$ wherry {' '.join(arguments)}\n{result.output.strip()}\n```"


DOCTOR = "`wherry doctor` found something that is installed or configured, but does not work."


def exit_code_table() -> str:
    """One row for each error with which a command can end, ordered by exit code."""
    rows = [
        (str(cls.exit_code), f"`{cls.__name__}`", meaning(cls))
        for cls in sorted(error_classes(), key=lambda cls: cls.exit_code)
    ]
    return table(("code", "error", "meaning"), [("0", "–", "Success."), ("1", "–", DOCTOR), *rows])


def error_classes() -> list[type[WherryError]]:
    """The classes of `wherry.errors` that are raised; the others only group them."""
    groups = (WherryError, errors.DamagedError)
    return [
        cls
        for cls in vars(errors).values()
        if inspect.isclass(cls) and issubclass(cls, WherryError) and cls not in groups
    ]


def meaning(cls: type[WherryError]) -> str:
    """The description of an error class in one line."""
    return " ".join((inspect.getdoc(cls) or "").partition("Attributes:")[0].split())


def format_table() -> str:
    """One row for each format of the registry, with the cells of `wherry formats`."""
    return table(COLUMNS, [[f"`{name}`", *format_cells(row)[1:]] for name, row in formats().items()])


def system_table() -> str:
    """One row for each page of `docs/systems/`, with the formats that it describes."""
    found = [page for page in sorted((ROOT / "docs" / "systems").glob("*.md")) if page.name != "README.md"]
    headings = {page.name: page.read_text().partition("\n")[0].strip("# ").partition(": ") for page in found}
    return table(
        ("system", "formats"), [(f"[{title}]({name})", named) for name, (title, _, named) in headings.items()]
    )


def scheme_table() -> str:
    """The ways of storing quantised weights that wherry dequantises."""
    return table(
        ("scheme", "weights", "equal to"), [(f"`{one.name}`", one.about, one.oracle) for one in schemes()]
    )


def written_table() -> str:
    """The values of `quantize`, with the bound of the error of bfloat16 weights as a share of a block's largest."""
    rows = [
        (
            f"`{name}`",
            rule.form,
            rule.config.get("format", scheme.name),
            rule.about,
            f"{100 * largest_error(rule.code, rule.scales or 'bfloat16'):.2g} %",
            "compressed-tensors" if rule.observer else scheme.oracle,
        )
        for name, (scheme, rule) in written_schemes().items()
    ]
    return table(("`quantize=`", "codes and scales", "format", "tensors", "error at most", "bits of"), rows)


def family_table() -> str:
    """One row for each model family, with its systems."""
    known = [load_family(name) for name in families()]
    rows = [(f"`{family.name}`", family.about, ", ".join(family.systems)) for family in known]
    return table(("family", "models", "systems"), rows)


def matrix_table() -> str:
    """Family × system: the forms of layers; the schemes of quantised weights. Families that are alike share a row."""
    columns, *rows = matrix()
    alike: dict[tuple[str, ...], list[str]] = {}
    for name, *cells in rows:
        alike.setdefault(tuple(cells), []).append(f"`{name}`")
    return table(columns, [(", ".join(names), *cells) for cells, names in alike.items()])


def blocks_table() -> str:
    """One row for each decoder block of MaxText that no family declares, and why."""
    return table(
        ("decoder block", "why"), [(f"`{name}`", why) for name, why in blocks_without_layouts().items()]
    )


def models_table() -> str:
    """One row for each model of MaxText's own list that no family holds though its block has one, and why."""
    return table(("model", "why"), [(f"`{name}`", why) for name, why in models_without_layouts().items()])


def without_table() -> str:
    """One row for each model type that no family declares, and why."""
    return table(("model type", "why"), [(f"`{kind}`", why) for kind, why in without_layouts().items()])


def fact_tables() -> str:
    """A table for each model family: its facts, and where each system has them."""
    return "\n\n".join(fact_table(load_family(name)) for name in families())


def fact_table(family: Family) -> str:
    """One row for each fact of a family."""
    systems = list(family.systems)
    rows = [
        (f"`{name}`", row["about"], *(row["systems"][system] for system in systems))
        for name, row in facts_side_by_side(family).items()
    ]
    return f"### Facts of `{family.name}`\n\n{table(('fact', 'meaning', *systems), rows).strip()}"


def judged_table() -> str:
    """One row for each family and system: what judges the conversions to it, and those from it."""
    rows = [
        (f"`{name}`", system, *(judges(read_judges().get(name, {}).get(system, {}), way) for way in WAYS))
        for name in (*families(), *adapter_families())
        for system in load_family(name).systems
        if system != "huggingface"
    ]
    return table(("family", "system", *WAYS.values()), rows)


def rewrite_table() -> str:
    """One row for each rewrite of a format."""
    found = {(name, how): row.name for row in formats().values() for name, how in row.rewrites.items()}
    rows = [
        (
            f"`{name}{how.value and '[=VALUE]'}`",
            f"`{where}`",
            how.help + (how.value and f"; VALUE: {how.value}"),
        )
        for (name, how), where in found.items()
    ]
    return table(("NAME", "of", "what it does"), sorted(rows))


def native_list() -> str:
    """The formats without a loader at the level `native`."""
    names = ", ".join(f"`{name}`" for name in formats() if name not in LOADERS)
    return textwrap.fill(f"`native` has no loader for {names}.", 118, break_on_hyphens=False) + "\n"


def damage_table() -> str:
    """Which level of `verify` finds which planted damage in which targets, as measured."""
    measured = json.loads(DAMAGE.read_text())
    sound = measured.pop("nothing")
    levels = [level for level in LEVELS if any(level in found for found in sound.values())]
    rows = [
        (damage, *(damage_cell(level, found, sound) for level in levels))
        for damage, found in measured.items()
    ]
    return table(("planted", *levels), rows)


def damage_cell(
    level: str, found: Mapping[str, Mapping[str, str]], sound: Mapping[str, Mapping[str, str]]
) -> str:
    """The targets in which a level finds a damage, of those that have it and are sound at this level."""
    able = [name for name in found if sound[name][level] == "ok"]
    seen = [name for name in able if found[name][level] not in SOUND]
    if len(seen) in (0, len(able)):
        return "all" if seen else "–"
    most = len(seen) > len(able) / 2
    named = ", ".join(name for name in able if (name in seen) != most)
    return f"all but {named}" if most else named


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n" + "".join(f"| {' | '.join(cells)} |\n" for cells in lines) + "\n"


def store_table() -> str:
    """A table of the stores, with what each is declared to guarantee."""
    found: dict[StorageProtocol, list[str]] = {}
    for name, protocol in PROTOCOLS.items():
        found.setdefault(protocol, []).append(f"`{name}://`")
    columns = (
        "store", "extra", "as a target", "created, never replaced", "copied by the store", "checksums",
        "a read is of",
    )  # fmt: skip
    rows = [(", ".join(names), *store_cells(one)) for one, names in found.items()]
    return table(columns, rows)


def store_cells(protocol: StorageProtocol) -> tuple[str, ...]:
    """The cells of one store, without those of its names."""
    can = protocol.capabilities
    sizes = {"small files": can.create_only_put, "large files": can.parts or can.local}
    states = {"": "what is there", "time": "one time of change", "blob": "one blob", "etag": "one ETag"}
    return (
        f"`{protocol.extra}`" if protocol.extra else "–",
        target_way(can),
        ", ".join(what for what, holds in sizes.items() if holds) or "–",
        "objects" if can.object_copy else "–",
        ", ".join(can.checksums) or "–",
        states.get(can.version, f"one {can.version}"),
    )


def target_way(can: Capabilities) -> str:
    """How a target is made in a store."""
    if can.local:
        return "staged next to it, then renamed"
    if can.one_commit:
        return "staged on a disk, one commit"
    if can.parts:
        return "uploaded in parts"
    return "each file put whole" if can.create_only_put else "–"


def settings_table() -> str:
    """One row for each setting that applies to all routes, with its variable."""
    rows = [
        (
            f"`{name}`",
            f"`{VARIABLES[name]}`" if name in VARIABLES else "–",
            default(field),
            describe_field(field),
        )
        for name, field in fields(Settings)
    ]
    return table(("setting", "variable", "default", "meaning"), rows)


def route_table(model: type[BaseModel]) -> str:
    """One row for each field of a route or of a part of one."""
    rows = [(f"`{name}`", default(field), describe_field(field)) for name, field in fields(model)]
    return table(("field", "default", "meaning"), rows)


def fields(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """The dotted name of each field with a description, including fields of sections."""
    for name, field in model.model_fields.items():
        if field.description:
            yield f"{prefix}{name}", field
        else:
            yield from fields(type(field.get_default()), f"{prefix}{name}.")


def default(field: FieldInfo) -> str:
    """The default of a field in TOML syntax; a dash if it has none or an empty one."""
    value = "required" if field.is_required() else field.get_default()
    if isinstance(value, str | bool | int | float) and value != "required":
        return f"`{json.dumps(value)}`"
    return "required" if value == "required" else "–"


def describe_field(field: FieldInfo) -> str:
    """The description of a field, with the cell separator escaped."""
    return (field.description or "").replace("|", "\\|")


def pools_table() -> str:
    """One row for each work pool in `infra/pools`."""
    files = sorted((ROOT / "infra" / "pools").glob("*.json"))
    pools = [json.loads(file.read_text()) for file in files]
    rows = [
        (f"`{pool['name']}`", pool["type"], str(pool["concurrency_limit"]), pool["description"])
        for pool in pools
    ]
    return table(("work pool", "type", "concurrent runs", "description"), rows)


def deployments_table() -> str:
    """One row for each deployment of `infra/prefect.yaml`."""
    entries = yaml.safe_load((ROOT / "infra" / "prefect.yaml").read_text())["deployments"]
    rows = [
        (f"`{flow_name(row)}/{row['name']}`", starts(row), limit(row), row["description"]) for row in entries
    ]
    return table(("deployment", "starts", "concurrent runs", "description"), rows)


def flow_name(entry: dict[str, Any]) -> str:
    """The name of a deployment's flow, from its decorator; importing the flow would start Prefect."""
    module, _, function = entry["entrypoint"].rpartition(".")
    source = (ROOT / f"{module.removeprefix('wherry.').replace('.', '/')}.py").read_text()
    decorated = next(
        node for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and node.name == function
    )  # fmt: skip
    call = next(node for node in decorated.decorator_list if isinstance(node, ast.Call))
    return next(ast.literal_eval(word.value) for word in call.keywords if word.arg == "name")


def starts(entry: dict[str, Any]) -> str:
    """Text about what starts a deployment."""
    schedules = [f"`{row['cron']}` {row['timezone']}" for row in entry.get("schedules", [])]
    events = [f"event `{name}`" for row in entry.get("triggers", []) for name in row["expect"]]
    return ", ".join(schedules + events) or "manually"


def limit(entry: dict[str, Any]) -> str:
    """The limit of concurrent runs of a deployment, and what happens to further runs."""
    stated = entry.get("concurrency_limit")
    if stated is None:
        return "any number"
    more = {"CANCEL_NEW": "further runs are skipped", "ENQUEUE": "further runs wait"}[
        stated["collision_strategy"]
    ]
    return f"{stated['limit']}, {more}"


def hooks() -> str:
    """The text of `tests/support/hooks_*.py`, each folded below the first line of its docstring."""
    return "".join(map(hook, HOOKS))


def hook(name: str) -> str:
    """One hook: its docstring as text, the rest as code."""
    source = (ROOT / "tests" / "support" / f"hooks_{name}.py").read_text()
    module = ast.parse(source)
    first, _, rest = (ast.get_docstring(module) or "").partition("\n")
    system, _, about = re.sub(r"`([^`]*)`", r"<code>\1</code>", first).partition(": ")
    code = "\n".join(source.splitlines()[module.body[0].end_lineno :]).strip()
    text = f"{rest.strip()}\n" if rest.strip() else ""
    head = f"<details><summary><b>{system}</b>: {about}</summary>"
    return f"{head}\n\n{text}```python\n{code}\n```\n</details>\n"


def benchmark() -> str:
    """The last results of `infra/bench`; empty before its first run."""
    results = ROOT / "infra" / "bench-results.md"
    text = results.read_text() if results.exists() else ""
    table = text.partition("do not edit.\n\n")[2].split("## Every process")[0]
    shown = table.replace("(bench-results.svg)", "(../infra/bench-results.svg)").rstrip()
    shown = re.sub(r"^Not reached:\n\n((?:- .*\n)+)", in_one_line, shown, flags=re.MULTILINE)
    return f"\n{shown}\n\n`infra/bench-results.md` lists every process.\n" if text else ""


def in_one_line(missed: re.Match[str]) -> str:
    """The list of requirements that were not reached as one paragraph: the table above has the numbers too."""
    rows = (line.removeprefix("- ") for line in missed[1].splitlines())
    return f"Not reached: {' · '.join(rows)}\n"


def speed() -> str:
    """The ratios of the last results of `infra/bench`, and the rates of its machine; empty before its first run."""
    if not RESULTS.exists():
        return ""
    found = json.loads(RESULTS.read_text())
    rows = [
        (row["row"], row["peer"], *(f"{row['measures'][name]:.1f}×" for name in RATIOS))
        for row in found["rows"]
        if row["measures"].keys() >= set(RATIOS)
    ]
    columns = ("job", "compared with", "faster, without read-back", "faster, with read-back")
    return f"{table(columns, rows)}{machine(found['machine'])}\n\n"


def machine(facts: Mapping[str, Any]) -> str:
    """The machine of a run of the benchmark, with its rates."""
    sha = facts["sha_instructions"]
    words = f"{facts['cores']} cores ({facts['processor']}, {'with' if sha else 'without'} SHA instructions)"
    rates = facts["rates"]
    shown = [f"{name} {rates['core'][name]['per_core'] / 1e9:.1f}" for name in RATES]
    shown += [f"device {name} {one['best'] / 1e9:.1f}" for name, one in rates["device"]["rates"].items()]
    text = f"Measured on {words}; rates in GB/s, of a core or of the device: {', '.join(shown)}."
    return textwrap.fill(text, 118, break_on_hyphens=False)


def between(name: str, content: str, text: str) -> str:
    """The text with new content between the two markers of a name."""
    block = f"<!-- {name}:start -->\n{content}<!-- {name}:end -->"
    marked = f"<!-- {name}:start -->.*?<!-- {name}:end -->"
    return re.sub(marked, lambda _found: block, text, flags=re.DOTALL)


def rewritten(text: str) -> str:
    """A page with each of its generated parts updated."""
    for name in re.findall(r"<!-- (\w+):start -->", text):
        if name in GENERATED:
            text = between(name, GENERATED[name](), text)
    return text


GENERATED: Mapping[str, Callable[[], str]] = {
    "api": api, "attributes": attribute_tables, "judged_attributes": judged_attributes, "bench": benchmark,
    "commands": help_blocks, "damage": damage_table, "deployments": deployments_table,
    "errors": error_catalogue, "exit_codes": exit_code_table, "facts": fact_tables, "blocks": blocks_table,
    "names": models_table, "stated_names": names_table, "families": family_table, "matrix": matrix_table,
    "schemes": scheme_table, "written": written_table, "formats": format_table, "hooks": hooks, "judged": judged_table,
    "native": native_list, "pools": pools_table, "retention": lambda: route_table(Retention),
    "rewrites": rewrite_table, "routes": lambda: route_table(Route), "schemas": schema_list,
    "settings": settings_table, "speed": speed, "systems": system_table, "stores": store_table,
    "targets": lambda: route_table(TargetRule), "without_layouts": without_table,
}  # fmt: skip


INDEX = ROOT / "wherry" / "formats" / "index.json"


def format_index() -> str:
    """What must be known of a format before its code is loaded; a line for each."""
    facts = [FormatFacts.of(row, module) for module in modules() for row in rows_of(module)]
    return "[\n" + ",\n".join(json.dumps(row.to_json()) for row in facts) + "\n]\n"


def main() -> None:
    """Rewrite README.md, the pages of `docs/` and the schemas in place."""
    for path, text in schemas().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    INDEX.write_text(format_index())
    for path, text in pages().items():
        if (now := rewritten(text)) != text:
            path.write_text(now)


if __name__ == "__main__":
    main()
