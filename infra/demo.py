"""The demo itself; `infra/demo` starts it in an environment with prefect and mlflow, but without torch and jax.

Prefect reads its settings at import, so they are set first, and all imports of it come later.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import demo_site as site
import demo_telling as tell

from tests.support.webhook import webhook_server

if TYPE_CHECKING:
    from wherry.errors import WherryError

QUERIES = ("routes check", "audit --level digest", "lineage stale", "ledger check")
QUERIES_WITHOUT_STORAGE = ("lineage stale", "ledger check")
CHAMPION = f"models:/{site.JAX_MODEL}@champion"
POLICY = {"max_error": 0.0, "optimizer": "absent", "companions": ["config.json", "tokenizer.json"]}


def settle(folder: Path) -> None:
    """Keep everything in one folder, and silence other packages; otherwise the demo would use your own servers."""
    for name in [name for name in os.environ if name.startswith(("PREFECT_", "MLFLOW_", "WHERRY_"))]:
        del os.environ[name]
    folder.mkdir(parents=True, exist_ok=True)
    run = "%(asctime)s %(levelname)-7s %({}_run_name)s: %(message)s"
    os.environ |= {
        "WHERRY_HOME": str(folder / "wherry"),
        "WHERRY_CONFIG": str(folder / "wherry.toml"),
        "PREFECT_HOME": str(folder / "prefect"),
        # The first start creates the database, which takes longer than the default of 20 s on a small machine.
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "300",
        "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "true",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        # Show the steps, not the start and stop of the server.
        "PREFECT_LOGGING_SERVER_LEVEL": "ERROR",
        "PREFECT_LOGGING_LOGGERS_PREFECT_LEVEL": "WARNING",
        "PREFECT_LOGGING_LOGGERS_PREFECT_FLOW_RUNS_LEVEL": "INFO",
        "PREFECT_LOGGING_LOGGERS_PREFECT_TASK_RUNS_LEVEL": "INFO",
        "PREFECT_LOGGING_FORMATTERS_STANDARD_FLOW_RUN_FMT": "  " + run.format("flow"),
        "PREFECT_LOGGING_FORMATTERS_STANDARD_TASK_RUN_FMT": "  " + run.format("task"),
        "PREFECT_LOGGING_COLORS": "false",
        "MLFLOW_LOGGING_LEVEL": "ERROR",
        "DO_NOT_TRACK": "1",
    }
    warnings.filterwarnings("ignore", module=r"(prefect|mlflow|pydantic|alembic|sqlalchemy)\b")


def run_demo(folder: Path, models: str = "models") -> bool:
    """Run the whole demo.

    Args:
        folder: of the demo.
        models: where the targets are: a folder in that of the demo, or a URI.

    Returns:
        Whether every step that must succeed did, and every step that must be refused was.
    """
    systems(folder, models)
    good = nightly() and promote() and load() and use(models if "://" in models else str(folder / models))
    if not good:
        return False
    damage(folder)
    good = audit(folder) and refuse()
    ask(folder)
    return bad_night(folder) and good


def systems(folder: Path, models: str) -> None:
    import wherry

    tell.title("1. Two training systems save checkpoints")
    site.prepare(folder, models)
    tell.rows((one.format, one.uri) for one in wherry.discover(folder / "runs"))
    tell.title("2. The routes: wherry.toml")
    tell.block(site.routes_file(models))


def nightly() -> bool:
    from wherry.flows.nightly import nightly as flow

    tell.title(
        "3. The nightly flow converts, verifies and registers new checkpoints (embedded servers start)"
    )
    tell.versions(())  # creates MLflow's store, which would take most of the time of the nightly run
    state = flow(return_state=True)
    tell.print_final_state(state)
    if state.is_completed():
        tell.night(state.result())
        tell.title("   Registered in MLflow, by reference")
        tell.versions((site.JAX_MODEL, site.SERVING_MODEL))
    else:
        tell.print_failure(state.message)
    return state.is_completed()


def promote() -> bool:
    tell.title("4. Promotion reads every byte again, checks the policy, and moves candidate to champion")
    done = _promote(_standing(), "champion")
    if isinstance(done, dict):
        tell.promotion(done)
    else:
        tell.print_failure(str(done))
    return isinstance(done, dict)


def load() -> bool:
    tell.title("   MLflow loads the champion: it copies the checkpoint and proves its digest")
    done = _loaded()
    tell.loading(CHAMPION, done)
    return not isinstance(done, BaseException)


def use(models: str) -> bool:
    from wherry.flows.convert import ConvertSpec, TargetSpec, convert_checkpoint

    tell.title(f"5. Two more teams need {CHAMPION}, for PyTorch and for Flax: both converted in one read")
    flax = TargetSpec(target=f"{models}/{site.FLAX_MODEL}.msgpack", to="flax-msgpack", model=site.FLAX_MODEL)
    spec = ConvertSpec(
        source=CHAMPION, target=f"{models}/{site.TORCH_MODEL}", to="dcp", model=site.TORCH_MODEL, further=(flax,),
        level="digest", alias="candidate", ignore=("companions",),
    )  # fmt: skip
    state = convert_checkpoint(spec, return_state=True)
    tell.print_final_state(state)
    if state.is_completed():
        tell.versions((site.TORCH_MODEL, site.FLAX_MODEL))
    else:
        tell.print_failure(state.message)
    return state.is_completed()


def damage(folder: Path) -> None:
    from wherry.ledger.resolve import resolve_model

    tell.title("6. A bit of the champion flips in its storage")
    tell.print_flip(site.flip(folder, resolve_model(CHAMPION).uri), site.DAMAGED, site.LEAF)


def audit(folder: Path) -> bool:
    """Run the audit; return whether it failed, as it must."""
    from wherry.flows.audit import AuditSpec
    from wherry.flows.audit import audit as flow

    tell.title("7. The audit flow reads every byte of all checkpoints in the ledger, and fails")
    evidence = folder / "evidence" / f"audit-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}.zip"
    state = flow(AuditSpec(level="digest", deep=True, bundle=str(evidence)), return_state=True)
    tell.print_final_state(state)
    tell.findings(evidence)
    return state.is_failed()


def refuse() -> bool:
    """Try the promotion, and to load the champion; return whether both were refused, as they must be."""
    from wherry.errors import MismatchError

    tell.title("8. Promotion refuses the damaged checkpoint, and MLflow no longer loads it")
    done = _promote(CHAMPION, "production")
    if isinstance(done, MismatchError):
        tell.refusal(done)
    else:
        tell.print_failure("the checkpoint was promoted although its bytes differ from the registered digest")
    loaded = _loaded()
    tell.loading(CHAMPION, loaded)
    return isinstance(done, MismatchError) and isinstance(loaded, MismatchError)


def ask(folder: Path) -> None:
    from wherry.trace.answers import impact, render_impact, render_why, why
    from wherry.trace.lineage import show
    from wherry.trace.page import page

    product = f"models:/{site.TORCH_MODEL}@candidate"
    tell.title(f"9. Where did it come from? (wherry lineage why {product})")
    tell.block(render_why(why(product)))
    tell.title(f"10. What is affected by the damage? (wherry lineage impact {CHAMPION})")
    tell.block(render_impact(impact(CHAMPION)))
    (folder / "lineage.html").write_text(page(show(CHAMPION)), encoding="utf-8")


def bad_night(folder: Path) -> bool:
    """Run the flow with a damaged checkpoint; return whether its message reached the webhook, as it must."""
    from wherry.flows.nightly import nightly as flow

    tell.title("11. A copy of a checkpoint arrives cut off; the next night converts the others, and says so")
    cut = site.cut_off(folder)
    with webhook_server("/hooks/ml-platform") as hook:
        os.environ |= {"WHERRY_NOTIFY_WEBHOOK": hook.url, "no_proxy": "127.0.0.1"}
        try:
            state = flow(return_state=True)
        finally:
            del os.environ["WHERRY_NOTIFY_WEBHOOK"]
    messages = [body["text"] for _path, body in hook.got]
    tell.print_final_state(state)
    tell.bad_night(state.message, messages)
    return state.is_completed() and any("1 damaged" in text and str(cut) in text for text in messages)


def _standing() -> str:
    """The candidate; in a repeated demo it is the champion already."""
    from wherry.errors import NotFoundError
    from wherry.ledger.resolve import resolve_model

    candidate = f"models:/{site.JAX_MODEL}@candidate"
    try:
        resolve_model(candidate)
    except NotFoundError:
        return CHAMPION
    return candidate


def _promote(subject: str, alias: str) -> dict[str, Any] | BaseException:
    """The result of the promote flow, or its error."""
    from wherry.flows.promote import PromoteSpec
    from wherry.flows.promote import promote as flow
    from wherry.models.policy import Policy

    spec = PromoteSpec(subject=subject, alias=alias, policy=Policy.model_validate(POLICY))
    state = flow(spec, return_state=True)
    tell.print_final_state(state)
    return state.result(raise_on_failure=False)


def _loaded() -> list[str] | WherryError:
    """The first values of a tensor of the champion, as MLflow loads it, or the error that refuses it."""
    import mlflow

    from wherry.config.settings import mlflow_tracking_uri
    from wherry.errors import WherryError

    mlflow.set_tracking_uri(mlflow_tracking_uri())
    with tempfile.TemporaryDirectory() as copy:
        try:
            model = mlflow.pyfunc.load_model(CHAMPION, dst_path=copy)
        except WherryError as error:
            return error
        with model.get_raw_model() as checkpoint:
            [row] = checkpoint.read(site.DAMAGED, (slice(1), slice(4)))
            return [f"{value:.4f}" for value in row]


def time_queries(folder: Path, story: Callable[[Path], bool], queries: tuple[str, ...] = QUERIES) -> int:
    from wherry.errors import WherryError

    started = time.monotonic()
    try:
        good = story(folder)
    except WherryError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    tell.how_to_look(folder, queries)
    seconds = time.monotonic() - started
    absent = " and ".join(name for name in ("torch", "jax") if find_spec(name) is None)
    tell.title(
        f"The demo took {seconds:.0f} s; its files are in {folder}" + (f"; without {absent}" * bool(absent))
    )
    return 0 if good else 1


def main() -> int:
    folder, protocol = Path(sys.argv[1]).resolve(), next(iter(sys.argv[2:]), None)
    settle(folder)
    tell.quieten()
    if protocol is None:
        return time_queries(folder, run_demo)
    shutil.rmtree(
        folder / "wherry", ignore_errors=True
    )  # the store of an earlier demo has forgotten everything
    with site.emulated_bucket(protocol, folder) as models:
        return time_queries(folder, partial(run_demo, models=models), QUERIES_WITHOUT_STORAGE)


if __name__ == "__main__":
    raise SystemExit(main())
