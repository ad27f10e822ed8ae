"""Writes into README.md what the code says of itself: command-line help, tables, the hooks to paste, the benchmark.

    python infra/readme.py

`tests/infra/test_readme.py` compares README with the code, so run this after a change to either. It needs wherry
installed with the extra `prefect`. The table of pairs is measured, not said: `infra/pairs.py` writes it.
"""

from __future__ import annotations

import ast
import json
import re
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from click.testing import CliRunner

from wherry.cli import cli
from wherry.cli.console_formats import COLUMNS, format_cells
from wherry.config.config import VARIABLES
from wherry.config.schema import Settings
from wherry.families import families, load_family
from wherry.formats.registry import formats

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pydantic import BaseModel

ROOT = Path(__file__).resolve().parents[1]
HOOKS = ("orbax", "maxtext", "t5x", "lingua", "torch")


def help_block(words: str) -> str:
    """A console block with the help of one command as the terminal shows it."""
    result = CliRunner().invoke(cli, [*words.split(), "--help"], prog_name="wherry", terminal_width=100)
    return f"```console\n$ wherry {words}--help\n{result.output.strip()}\n```"


def format_table() -> str:
    """One row for each format of the registry, with the cells of `wherry formats`."""
    return table(COLUMNS, [[f"`{name}`", *format_cells(row)[1:]] for name, row in formats().items()])


def family_table() -> str:
    """One row for each model family, with the systems that it is declared for."""
    rows = [load_family(name) for name in families()]
    told = [(f"`{row.name}`", row.about, ", ".join(row.systems)) for row in rows]
    return table(("family", "models", "systems"), told)


def rewrite_table() -> str:
    """One row for each rewrite that a format offers."""
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


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n" + "".join(f"| {' | '.join(cells)} |\n" for cells in lines) + "\n"


def settings_list() -> str:
    """The settings of wherry.toml that hold for all routes, each with its variable."""
    told = [
        f"`{name}`" + (f" (`{VARIABLES[name]}`)" if name in VARIABLES else "") for name in described(Settings)
    ]
    return textwrap.fill(f"{', '.join(told)}.", 118, break_long_words=False, break_on_hyphens=False) + "\n"


def described(model: type[BaseModel], prefix: str = "") -> Iterable[str]:
    """The dotted name of each field that says something of itself, those of its sections included."""
    for name, field in model.model_fields.items():
        if field.description:
            yield f"{prefix}{name}"
        else:
            yield from described(type(field.get_default()), f"{prefix}{name}.")


def pools_table() -> str:
    """One row for each work pool in `infra/pools`."""
    files = sorted((ROOT / "infra" / "pools").glob("*.json"))
    pools = [json.loads(file.read_text()) for file in files]
    rows = [
        (f"`{pool['name']}`", pool["type"], str(pool["concurrency_limit"]), pool["description"])
        for pool in pools
    ]
    return table(("work pool", "type", "runs at a time", "what for"), rows)


def deployments_table() -> str:
    """One row for each deployment of `infra/prefect.yaml`."""
    entries = yaml.safe_load((ROOT / "infra" / "prefect.yaml").read_text())["deployments"]
    rows = [
        (f"`{flow_name(row)}/{row['name']}`", starts(row), limit(row), row["description"]) for row in entries
    ]
    return table(("deployment", "starts", "at a time", "what it does"), rows)


def flow_name(entry: dict[str, Any]) -> str:
    """The name of a deployment's flow, as its decorator says it; importing the flow would start Prefect."""
    module, _, function = entry["entrypoint"].rpartition(".")
    source = (ROOT / f"{module.removeprefix('wherry.').replace('.', '/')}.py").read_text()
    decorated = next(
        node for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and node.name == function
    )  # fmt: skip
    call = next(node for node in decorated.decorator_list if isinstance(node, ast.Call))
    return next(ast.literal_eval(word.value) for word in call.keywords if word.arg == "name")


def starts(entry: dict[str, Any]) -> str:
    """What starts a deployment, in words."""
    schedules = [f"`{row['cron']}` {row['timezone']}" for row in entry.get("schedules", [])]
    events = [f"event `{name}`" for row in entry.get("triggers", []) for name in row["expect"]]
    return ", ".join(schedules + events) or "by hand"


def limit(entry: dict[str, Any]) -> str:
    """How many runs of a deployment there are at a time, and what happens to one more."""
    stated = entry["concurrency_limit"]
    more = {"CANCEL_NEW": "others skip", "ENQUEUE": "others wait"}[stated["collision_strategy"]]
    return f"{stated['limit']}, {more}"


def hooks() -> str:
    """The text of `tests/support/hooks_*.py`, each folded behind the first line of its docstring."""
    return "".join(map(hook, HOOKS))


def hook(name: str) -> str:
    """One hook: what its docstring says as text, the rest as code."""
    source = (ROOT / "tests" / "support" / f"hooks_{name}.py").read_text()
    module = ast.parse(source)
    first, _, rest = (ast.get_docstring(module) or "").partition("\n")
    system, _, about = re.sub(r"`([^`]*)`", r"<code>\1</code>", first).partition(": ")
    code = "\n".join(source.splitlines()[module.body[0].end_lineno :]).strip()
    text = f"{rest.strip()}\n" if rest.strip() else ""
    head = f"<details><summary><b>{system}</b>: {about}</summary>"
    return f"{head}\n\n{text}```python\n{code}\n```\n</details>\n"


def benchmark() -> str:
    """What `infra/bench` wrote last; empty before its first run."""
    results = ROOT / "infra" / "bench-results.md"
    text = results.read_text() if results.exists() else ""
    table = text.partition("do not edit.\n\n")[2].split("## Every process")[0]
    shown = table.replace("(bench-results.svg)", "(infra/bench-results.svg)").rstrip()
    shown = re.sub(r"^## ", "### ", shown, flags=re.MULTILINE)
    shown = re.sub(r"^Not reached:\n\n((?:- .*\n)+)", in_one_line, shown, flags=re.MULTILINE)
    return f"\n{shown}\n\nEvery process by itself is in `infra/bench-results.md`.\n" if text else ""


def in_one_line(missed: re.Match[str]) -> str:
    """The list of what was not reached as one paragraph: the table above it has the numbers too."""
    rows = (line.removeprefix("- ") for line in missed[1].splitlines())
    return f"Not reached: {' · '.join(rows)}\n"


def between(name: str, content: str, text: str) -> str:
    """The text with new content between the two markers of a name."""
    block = f"<!-- {name}:start -->\n{content}<!-- {name}:end -->"
    marked = f"<!-- {name}:start -->.*?<!-- {name}:end -->"
    return re.sub(marked, lambda _found: block, text, flags=re.DOTALL)


def rewritten(text: str) -> str:
    """README with everything that the code says of itself as it is now."""
    text = re.sub(
        r"```console\n\$ wherry ([^\n]*?)--help\n.*?```",
        lambda found: help_block(found[1]),
        text,
        flags=re.DOTALL,
    )
    for name, content in GENERATED.items():
        text = between(name, content(), text)
    return text


GENERATED = {
    "formats": format_table,
    "families": family_table,
    "rewrites": rewrite_table,
    "settings": settings_list,
    "pools": pools_table,
    "deployments": deployments_table,
    "hooks": hooks,
    "bench": benchmark,
}


def main() -> None:
    """Rewrite README.md in place."""
    readme = ROOT / "README.md"
    readme.write_text(rewritten(readme.read_text()))


if __name__ == "__main__":
    main()
