"""convert, as a task: carry out a conversion to one target or several, with its progress in the run's page."""

from __future__ import annotations

from typing import Any

from prefect import task

from wherry.converter.convert import Target
from wherry.converter.convert import convert_all as carry_out
from wherry.core.opaque import allowing
from wherry.core.request import Wish
from wherry.errors import NotRecordedError
from wherry.tasks.common import STEP, progress_artifact, run_logger


@task(name="convert", **STEP)
def convert(
    source: str, targets: list[dict[str, Any]], opaque: tuple[str, ...] = (), **common: Any
) -> list[dict[str, Any]]:
    """Convert a checkpoint, reading it once.

    A run that was killed is simply run again: a target appears whole or not at all, and where it is there already as
    the result of this same conversion, nothing is done.

    Args:
        source: the checkpoint or run folder.
        targets: for each target the fields of `wherry.converter.convert.Target`, with `wish` as the fields of a Wish.
        opaque: classes in pickles that may pass unread.
        common: further arguments of `wherry.converter.convert.convert_all`.

    Returns:
        The JSON form of the receipt of each target, in order. Where the ledger cannot be used their `lineage` says so,
        and the task `lineage`, which comes last, tries again.
    """
    wanted = [_target(**one) for one in targets]
    with allowing(opaque):
        try:
            group = carry_out(source, wanted, progress=progress_artifact("convert", source), **common)
        except NotRecordedError as error:
            group = error.result
    for receipt in group.receipts:
        outcome = "was there already" if receipt.already else f"written in {receipt.seconds:.1f} s"
        run_logger().info("%s %s; lineage: %s", receipt.target.uri, outcome, receipt.lineage)
    return [receipt.to_json() for receipt in group.receipts]


def _target(wish: dict[str, Any], **fields: Any) -> Target:
    return Target(**fields, wish=Wish(**wish))
