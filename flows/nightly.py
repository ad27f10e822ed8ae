"""The nightly flow: convert the checkpoints of all routes that the ledger does not have yet.

discover → subtract → fan out → one summary. Each checkpoint is a separate task that runs the steps of the convert flow;
a checkpoint that fails or disappears is a row of the summary and does not stop the others. If a conversion to several
targets fails, each target is tried alone, so that one failing target does not hold up the others. The run ends as
Failed if any conversion failed, or was converted but not recorded, with the first error and its cure.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, ClassVar

from prefect import flow, task
from prefect.cache_policies import NO_CACHE
from prefect.futures import PrefectConcurrentFuture
from prefect.states import Completed
from prefect.task_runners import ThreadPoolTaskRunner
from pydantic import Field

from wherry.config.config import in_force
from wherry.config.schema import Route
from wherry.core.lazy_dataclass import dataclass
from wherry.flows.convert import chain
from wherry.flows.form import FormModel
from wherry.nightly.conversion import Conversion
from wherry.nightly.night import run_night, to_wherry_error
from wherry.nightly.report import failure, markdown, warning
from wherry.nightly.routes import chosen_routes
from wherry.tasks.common import run_logger, show_markdown
from wherry.tasks.ending import ending


class NightlySpec(FormModel):
    """What a nightly run converts; the only parameter of the flow, and its form in the Prefect UI."""

    FIRST: ClassVar[tuple[str, ...]] = ("routes", "dry_run", "go", "retry_failed")

    config: str | None = Field(
        default=None,
        description="Path of wherry.toml; WHERRY_CONFIG, ./wherry.toml or the one in WHERRY_HOME by default.",
    )
    env: str | None = Field(
        default=None, description="Environment [env.NAME] of wherry.toml; WHERRY_ENV by default."
    )
    routes: tuple[str, ...] = Field(default=(), description="Names of the routes to apply; all by default.")
    dry_run: bool = Field(
        default=False, description="Only report what would be converted: count, bytes, hours."
    )
    go: bool = Field(
        default=False,
        description="Convert even on the first night of a route, however many checkpoints are waiting.",
    )
    retry_failed: bool = Field(
        default=False,
        description="Retry conversions that failed permanently, although their files are the same.",
    )


_ALL = NightlySpec()


def _run_name() -> str:
    """The name of a nightly run: the day on which it began, in UTC like all stored times."""
    return datetime.now(UTC).strftime("night of %Y-%m-%d")


@flow(name="nightly-convert", flow_run_name=_run_name, result_serializer="json", validate_parameters=True)
def nightly(spec: NightlySpec = _ALL) -> Any:
    """Convert what the routes require and the ledger does not have.

    Returns:
        JSON values: `counts`, `plans` for each route, `outcomes` for each checkpoint and `skipped` routes.
    """
    with in_force(spec.config, spec.env) as config, ending("nightly-convert", "Nightly conversion") as end:
        report = run_night(
            config,
            chosen_routes(config, spec.routes),
            dry_run=spec.dry_run,
            go=spec.go,
            retry_failed=spec.retry_failed,
            runner=_as_tasks,
            on_plan=lambda plan: run_logger().info(
                "route %s: %d wait, %d tonight", plan.route.name, plan.todo.count, len(plan.works)
            ),
        )
        show_markdown(markdown(report), "wherry-nightly", "Summary of the nightly run")
        end.counts = dict(report.counts)
        end.silent = spec.dry_run or report.left_to_another
        end.warning = warning(report)
        error = failure(report)
        if error is not None:
            raise error
    if end.warning is not None:
        return Completed(message=end.warning, data=report.to_json())
    if report.left_to_another:
        return Completed(name="Skipped", message="another nightly run is in progress", data=report.to_json())
    return report.to_json()


@task(
    name="checkpoint",
    result_serializer="json",
    cache_policy=NO_CACHE,
    task_run_name="{conversion[request][source][uri]}",
)
def checkpoint(conversion: dict[str, Any]) -> int:
    """Convert one checkpoint as its route specifies, and record the product notes in the ledger.

    Args:
        conversion: the JSON form of a Conversion.

    Returns:
        Bytes written.
    """
    done = chain(Conversion.from_json(conversion))
    return sum(
        one["receipt"]["bytes_written"] for one in (done, *done["further"]) if not one["receipt"]["already"]
    )


@contextmanager
def _as_tasks(route: Route) -> Generator[Any]:
    """Run each checkpoint as a task; the runner limits how many run at a time."""
    with ThreadPoolTaskRunner(max_workers=route.concurrency) as runner:

        def start(conversion: Conversion) -> _TaskAttempt:
            future = runner.submit(checkpoint, parameters={"conversion": conversion.to_json()})
            return _TaskAttempt(future, conversion.request.source.uri)

        yield start


@dataclass(frozen=True, slots=True)
class _TaskAttempt:
    """The task of a checkpoint, in the form in which the nightly run waits for it."""

    future: PrefectConcurrentFuture[int]
    uri: str

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        """Call `callback` when the task has ended."""
        self.future.add_done_callback(callback)

    def result(self) -> int:
        """The bytes written; raises an error of the task as one of wherry's errors."""
        self.future.wait()
        if not self.future.state.is_completed():
            raise to_wherry_error(self.future.state.result(raise_on_failure=False), self.uri)
        return self.future.state.result()
