"""Output of the demo: titles, rows, the results of each flow, and logs without tracebacks.

Flows return data; this module prints it as a few lines that can be read while the next flow runs.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import shlex
import sys
import textwrap
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from demo_site import Flip
    from prefect import State

    from wherry.errors import WherryError

PREFECT_PORT, MLFLOW_PORT = 4200, 5000
_WIDTH = 22
_NO_TRACES = "none: size and modification time are unchanged"


class Plain(logging.Formatter):
    """A formatter like another one, but without tracebacks: an expected refusal is not a crash."""

    def __init__(self, inner: logging.Formatter) -> None:
        super().__init__()
        self.inner = inner

    def format(self, record: logging.LogRecord) -> str:
        """The record's text only, on one line."""
        short = copy.copy(record)
        short.exc_info = short.exc_text = None
        return self.inner.format(short).partition("\n")[0]


def quieten() -> None:
    """Show only the steps' messages of the flows' logs, without tracebacks; Prefect's server stores the full logs."""
    import prefect.main  # noqa: F401  # pyright: ignore[reportUnusedImport]  sets up logging, which is changed below

    for handler in logging.getLogger().handlers:
        handler.addFilter(_says_something)
        if handler.formatter is not None:
            handler.setFormatter(Plain(handler.formatter))


def _says_something(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(("Beginning flow run", "Finished in", "Encountered exception"))


def title(text: str) -> None:
    print(f"\n\033[1m{text}\033[0m" if sys.stdout.isatty() else f"\n{text}", flush=True)


def rows(pairs: Iterable[tuple[str, object]]) -> None:
    for name, value in pairs:
        print(f"  {name:{_WIDTH}}{value}", flush=True)


def block(text: str) -> None:
    print(textwrap.indent(text.rstrip("\n"), "  "), flush=True)


def night(done: dict[str, Any]) -> None:
    """Print the results of the nightly flow."""
    counts = ", ".join(f"{number} {name}" for name, number in done["counts"].items())
    rows([("counts", counts)])
    for one in done["outcomes"]:
        rows([(one["came"], one["source"]), *(("  to", target) for target in one["targets"])])
    for plan in done["plans"]:
        rows((one["why"], one["uri"]) for one in plan["passed"] if one["why"] == "done")


def bad_night(state: str | None, messages: Iterable[str]) -> None:
    """What the run's state says in the UI, and what the webhook received."""
    rows([("in the UI", state or "")])
    for text in messages:
        rows([("at the webhook", "")])
        block(textwrap.indent(text, "  "))


def versions(names: Iterable[str]) -> None:
    """Print the registered versions of these models."""
    from wherry.config.settings import mlflow_registry_uri, mlflow_tracking_uri
    from wherry.core.services import service

    wanted = set(names)
    for one in service("mlflow").registered_versions(mlflow_tracking_uri(), mlflow_registry_uri()):
        if one.name in wanted:
            aliases = f" ({', '.join(one.aliases)})" if one.aliases else ""
            digest = one.tags["wherry.checkpoint_digest"][:12]
            rows([(one.name, f"version {one.version}{aliases}, checkpoint {digest}")])
            rows([("  location", one.tags["wherry.uri"])])


def promotion(done: dict[str, Any]) -> None:
    outcome = "it was set already" if done["already"] else f"it replaces version {done['replaced'] or 'none'}"
    rows([
        ("promoted", f"{done['name']} version {done['version']} is {done['alias']}; {outcome}"),
        ("verified", f"at level {done['level']}: all bytes were read again"),
        ("by", done["by"]),
        *((f"gate {gate['gate']}", f"required {gate['requested']}, found {gate['found']}") for gate in done["gates"]),
    ])  # fmt: skip


def loading(model: str, done: list[str] | WherryError) -> None:
    """What MLflow loaded: the first values of a tensor; or why it did not."""
    rows([("loading", f'mlflow.pyfunc.load_model("{model}")')])
    if isinstance(done, list):
        rows([("a tensor begins with", ", ".join(done))])
    else:
        refusal(done)


def print_flip(done: Flip, tensor: str, leaf: int) -> None:
    bucket = "://" in done.file
    traces = "its size is unchanged, its generation or ETag is new" if bucket else _NO_TRACES
    rows([
        ("file", done.file),
        ("offset", f"{done.offset:,}, in leaf {leaf} of {tensor}"),
        ("byte", f"{done.before:08b} → {done.after:08b}"),
        ("traces", traces),
    ])  # fmt: skip


def print_final_state(state: State[Any]) -> None:
    """Print the final state of a flow run, as Prefect shows it."""
    rows([("flow run", state.name)])


def findings(evidence: Path) -> None:
    """Print the errors of an audit, from its evidence, and whether the evidence can be checked offline."""
    from wherry.prove.bundle import check_bundle

    with zipfile.ZipFile(evidence) as bundle:
        report = json.loads(bundle.read("report.json"))
    counts = report["counts"]
    rows([("audited", f"{counts['checkpoints']} checkpoints, {counts['read']} read byte by byte")])
    for one in report["findings"]:
        if one["severity"] != "error":
            continue
        rows([
            (one["kind"], one["what"]),
            ("  checkpoint", one["uri"]),
            ("  tensor", f"{one['path']}, leaf {one['leaf']}"),
            ("  models", ", ".join(one["models"])),
            ("  cure", one["cure"]),
            *(("  affected", _describe_affected(child)) for child in one["affected"]),
        ])  # fmt: skip
    checked = check_bundle(str(evidence))
    rows([("evidence", evidence), ("", "valid offline" if checked.ok else "; ".join(checked.problems))])


def _describe_affected(child: dict[str, Any]) -> str:
    models = f" ({', '.join(child['models'])})" if child["models"] else ""
    return f"{child['format']} at {', '.join(child['uris'])}{models}"


def print_failure(message: str | None) -> None:
    """Print the error of a flow that should have succeeded."""
    rows([("FAILED", (message or "without a message").partition("\n")[0])])


def refusal(error: WherryError) -> None:
    rows(
        (name, value)
        for name, value in (
            ("refused", error.what), ("checkpoint", error.uri), ("tensor", error.path), ("cure", error.cure)
        )
        if value
    )  # fmt: skip


def how_to_look(folder: Path, words: Iterable[str]) -> None:
    """Print the commands that open both UIs and query further, ready to paste.

    Args:
        folder: of the demo.
        words: commands of wherry that query further.
    """
    tools = Path(sys.executable).parent
    title(f"To see the flow runs, start the Prefect UI at http://127.0.0.1:{PREFECT_PORT}")
    print("  " + command(prefect_settings(PREFECT_PORT), prefect_server(tools, PREFECT_PORT)))
    title(f"To see the model versions, start the MLflow UI at http://127.0.0.1:{MLFLOW_PORT}")
    print("  " + command({}, mlflow_server(tools, MLFLOW_PORT)))
    title("Further queries")
    home = {"WHERRY_HOME": os.environ["WHERRY_HOME"], "WHERRY_CONFIG": os.environ["WHERRY_CONFIG"]}
    for query in words:
        print("  " + command(home, [str(tools / "wherry"), *query.split()]))
    title("The lineage page")
    print(f"  {folder / 'lineage.html'}")


def prefect_settings(port: int) -> dict[str, str]:
    """Environment variables for Prefect's server."""
    return {
        "PREFECT_HOME": os.environ["PREFECT_HOME"],
        "PREFECT_UI_API_URL": f"http://127.0.0.1:{port}/api",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
    }


def prefect_server(tools: Path, port: int) -> list[str]:
    """The command that starts Prefect's server on the demo's store."""
    return [str(tools / "prefect"), "server", "start", "--host", "127.0.0.1", "--port", str(port)]


def mlflow_server(tools: Path, port: int) -> list[str]:
    """The command that starts MLflow's server on the demo's store."""
    home = os.environ["WHERRY_HOME"]
    return [
        str(tools / "mlflow"), "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1",
        "--backend-store-uri", f"sqlite:///{home}/mlflow.db",
    ]  # fmt: skip


def command(settings: dict[str, str], words: list[str]) -> str:
    """A shell command line."""
    return " ".join(
        [*(f"{name}={shlex.quote(value)}" for name, value in settings.items()), shlex.join(words)]
    )
