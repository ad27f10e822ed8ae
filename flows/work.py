"""The work flow: one worker of a job. As many runs as there are machines write the units of one conversion.

Load it as `flows/work.py:work_on_units` or `wherry.flows.work.work_on_units`. `wherry split` makes the job; machines
poll the work pool `wherry-units`. A run can be cancelled, and run again after a crash: another one writes its unit.
"""

from typing import Any, ClassVar

from prefect import flow
from pydantic import Field

from wherry.config.schema import Duration
from wherry.errors import WherryError
from wherry.flows.form import FormModel
from wherry.tasks.common import show_failure
from wherry.tasks.ending import ending
from wherry.tasks.steps import work


class WorkSpec(FormModel):
    """On which job to work; the only parameter of the flow, and its form in the Prefect UI."""

    FIRST: ClassVar[tuple[str, ...]] = ("job",)

    job: str = Field(description="Folder of the job that `wherry split` has made, or its target.")
    expiry: Duration = Field(
        default=60.0,
        description="Time without a heartbeat, in seconds or as 2m, after which the unit of another worker is written "
        "again.",
    )
    commit: bool = Field(
        default=True, description="Commit the target when all units are written; of several runs, one does."
    )


@flow(name="work", flow_run_name="work on {spec.job}", result_serializer="json")
def work_on_units(spec: WorkSpec) -> dict[str, Any]:
    """Write units of a job until none is left, and commit its target.

    Returns:
        JSON values: `job`, `made`, the names of the units that this run has written, `nbytes`, `units` and `ended`; and
        in `receipt` that of the target, if this run has committed it.
    """
    with ending("work", f"Work on {spec.job}", only_failures=True) as end:
        try:
            done = work(spec.job, spec.expiry, commit=spec.commit)
        except WherryError as error:
            show_failure(error, f"{spec.job} was not completed")
            raise
        end.counts = {"units": len(done["made"])}
    return done
