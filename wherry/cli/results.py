"""What the command line prints: text, tables by rich, or one JSON document.

Each function prints one object of the engine, as text or as JSON by the object's `to_json`.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from wherry.cli.say import print_json, print_rows, print_table, say, say_lines
from wherry.core.units import plural, show_seconds, show_size
from wherry.errors import StorageError

if TYPE_CHECKING:
    from wherry.converter.plan import Plan
    from wherry.converter.prices import Cost
    from wherry.core.detection import Detection
    from wherry.core.receipt import GroupReceipt, Receipt
    from wherry.formats.discover import SkippedPath
    from wherry.models.register import Registration
    from wherry.nightly.doctor import Diagnosis
    from wherry.nightly.report import NightReport
    from wherry.prove.full_read import FullRead
    from wherry.prove.verify import Verification
    from wherry.target.leftovers import CleanReport
    from wherry.trace.lineage import LineageTree
    from wherry.workers.unit import WorkerPlan

_LEAST_SECONDS = 2  # a shorter conversion is mostly its start: no device is measured for it


def show_found(found: Iterable[Detection], skipped: list[SkippedPath], *, json_: bool) -> None:
    """Print the checkpoints below a root as they are found; JSON has one object per line."""
    for detection in found:
        if json_:
            click.echo(json.dumps(detection.to_json()))
        else:
            step = "" if detection.step is None else f"step {detection.step}"
            say(f"{detection.format:<14}{detection.format_version or '':<28}{step:<12}{detection.uri}")
    for row in skipped:
        if json_:
            click.echo(json.dumps({"skipped": row.uri, "reason": row.reason}))
        else:
            say(f"skipped       {row.uri}: {row.reason}")


def show_detection(found: Detection, *, json_: bool) -> None:
    """Print a detection with its evidence."""
    if json_:
        print_json(found.to_json())
        return
    print_rows(
        (name.replace("_", " "), value)
        for name, value in found.to_json().items()
        if name not in ("also", "evidence")
    )
    print_rows([("also", ", ".join(found.also))])
    for seen in found.evidence:
        say(f"  {seen.file}: {seen.seen}")


def require_room(plans: Sequence[Plan]) -> None:
    """End the command if a disk is too small for plans that were printed."""
    from wherry.converter.plan import require_room

    try:
        require_room(plans)
    except StorageError as error:
        say_lines(f"error: {error.for_shell()}", err=True)
        sys.exit(error.exit_code)


def _traffic_rows(plan: Plan, cost: Cost | None) -> list[tuple[str, str]]:
    """The rows about the stores, the disk and the money of a plan."""
    rows = [("store", f"{one.store}: {one.text}") for one in plan.traffic.stores]
    space = plan.traffic.space
    if space is not None:
        least = "at most " if space.compressed else ""
        rows.append(
            (
                "disk",
                f"{least}{show_size(space.needed)} of {show_size(space.free)} that are free in {space.folder}",
            )
        )
    if cost is not None:
        parts = [
            f"{store}: {'no price' if amount is None else f'{amount:.4f}'}"
            for store, amount in cost.stores.items()
        ]
        rows.append(("price", f"{cost.total:.4f} {cost.currency} ({', '.join(parts) or 'no store'})"))
    return rows


def show_plan(
    plan: Plan, *, json_: bool, cost: Cost | None = None, workers: WorkerPlan | None = None
) -> None:
    """Print what a conversion would do, and what it costs if there are prices; with workers also its units."""
    from wherry.core.account import fold_entries

    data = plan.to_json()
    if json_:
        shared = {"workers": workers.to_json()} if workers else {}
        print_json(data | ({"cost": cost.to_json()} if cost else {}) | shared)
        return
    parameters = data["parameters"]
    expected = parameters["expected"]
    says = "the config states no number" if expected is None else f"the config states {expected:,}"
    agrees = "as the config states" if parameters["agrees"] else says
    print_rows([
        ("source", f"{plan.source.uri} ({plan.source.format}, {plan.source.format_version})"),
        ("target", f"{plan.target} ({plan.to}, {plan.format_version})"),
        ("tensors", f"{plan.tensors:,} in {plural(data['moves'], 'move')}"),
        ("parameters", f"{parameters['found']:,} ({agrees})"),
        ("bytes", f"{show_size(plan.nbytes_in)} in, {show_size(plan.nbytes_out)} out"),
        ("peak memory", show_size(data["peak_memory"])),
        ("spill", show_size(plan.spill) if plan.spill else ""),
        ("companions", ", ".join(data["companions"])),
        ("renamed", plural(len(data["renamed"]), "tensor") if data["renamed"] else ""),
        ("layout", _layout_words(data["layout"])),
        ("lossy", plural(len(plan.lossy), "tensor") if plan.lossy else ""),
        ("verify", plan.verify),
        *_traffic_rows(plan, cost),
        *(workers.rows if workers else ()),
        ("plan digest", plan.digest),
    ])  # fmt: skip
    show_ignored(one.to_json() for one in fold_entries(plan.ignored))
    _show_notes(plan.notes, plan.snippet)


def show_ignored(rows: Iterable[Mapping[str, str]]) -> None:
    """Print what is left out, one entry a line with its rule and reason."""
    for row in rows:
        say(f"  ignored {row['path']} ({row['what']}) by rule {row['rule']}: {row['reason']}")


def _layout_words(layout: dict[str, Any] | None) -> str:
    """The family, and both systems with their forms and conventions."""
    if not layout:
        return ""
    sides = [dict(layout[side]) for side in ("from", "to")]
    words = [
        " ".join([side.pop("system"), *(f"{name}={text}" for name, text in side.items())]) for side in sides
    ]
    return f"{layout['family']}: {words[0]} → {words[1]}"


def _show_notes(warnings: Iterable[str], snippet: str) -> None:
    for warning in warnings:
        say(f"  warning: {warning}")
    if snippet:
        say_lines(snippet.rstrip())


def show_receipts(group: GroupReceipt, *, json_: bool) -> None:
    """Print what a conversion did; as JSON the receipt itself, or the group for several targets."""
    if json_:
        print_json(group.to_json())
        return
    for receipt in group.receipts:
        if receipt.already:
            say("already converted; nothing was written")
        rate = show_size(receipt.bytes_written / receipt.seconds if receipt.seconds else 0)
        size = f"{show_size(receipt.bytes_written)} in {show_seconds(receipt.seconds)}, {rate}/s{_distance(group)}"
        print_rows([
            ("source", f"{receipt.source.uri} ({receipt.source.format})"),
            ("target", f"{receipt.target.uri} ({receipt.target.format}, {receipt.target.format_version})"),
            ("tensors", f"{receipt.target.tensors:,}"),
            ("bytes", size),
            ("weights", receipt.target.weights_digest),
            ("checkpoint", receipt.target.checkpoint_digest),
            ("verified", _verified_how(receipt.verification)),
            ("lossy", _lossy_words(receipt)),
            ("lineage", receipt.lineage),
        ])  # fmt: skip
        show_ignored(receipt.ignored)
        _show_notes(receipt.warnings, receipt.snippet)


def _distance(group: GroupReceipt) -> str:
    """How far a conversion was from its device: `, 1.3× the device's time`, which is that of writing and reading back.

    Only for one new target on this machine that took long enough to be compared; what the source took is left out.
    """
    from wherry.store.open_file import local_path

    receipt = group.receipts[0]
    target = local_path(receipt.target.uri)
    if len(group.receipts) > 1 or target is None or receipt.already or receipt.resumed_bytes:
        return ""
    if receipt.seconds < _LEAST_SECONDS:
        return ""
    from wherry.store.device import device_rates

    rates = device_rates(Path(target).parent)
    if rates is None:
        return ""
    written = sum(file.lstat().st_size for file in [Path(target), *Path(target).rglob("*")] if file.is_file())
    read_back = written if (receipt.verification or {}).get("level") == "digest" else 0
    return (
        f", {receipt.seconds / rates.seconds(written, read_back):.1f}× the device's time" if written else ""
    )


def _verified_how(checked: Mapping[str, Any] | None) -> str:
    if checked is None:
        return "not read back"
    if checked["level"] == "store":
        return f"{checked['checksum']} of the store compared, {plural(checked['tensors'], 'tensor')}; not read back"
    by_workers = checked.get("bytes_by_workers")
    more = f"; {show_size(by_workers)} of it by workers that had not written it" if by_workers else ""
    return f"every byte read back, {plural(checked['tensors'], 'tensor')}{more}"


def _lossy_words(receipt: Receipt) -> str:
    """How far the values of cast and scaled tensors are from those of the source."""
    rows = [row for row in receipt.losses if row["error"]]
    if not rows:
        return ""
    worst = max(rows, key=lambda row: row["error"])
    return f"{plural(len(rows), 'tensor')}; largest error {worst['error']:.3g} in {worst['path']}"


def show_verification(verification: Verification, *, json_: bool) -> None:
    """Print the outcome of a verification."""
    if json_:
        print_json(verification.to_json())
        return
    say(
        f"{verification.verdict}: {plural(verification.checked, 'tensor')} at level {verification.level}, "
        f"{show_size(verification.nbytes)} read in {show_seconds(verification.seconds)}"
    )
    if (found := verification.measured) is not None:
        say(
            f"  {plural(found.tensors, 'tensor')} changed as planned: by at most {found.error:.2g}, "
            f"{found.share:.0%} of their bound"
        )
    if (seen := verification.native) is not None:
        sandbox = ", ".join(seen.sandbox) or "none"
        say(f"  method: {seen.evidence}; devices: {seen.devices}; sandbox: {sandbox}")
    if not verification.recorded and verification.full_read is None:
        say("  record: none, so names, shapes and files were not compared with any")
    for warning in verification.warnings:
        say(f"  warning: {warning}")
    for failure in verification.failed:
        say(f"  {failure.path}: {failure.reason}" if failure.path else f"  {failure.reason}")
    if verification.full_read is not None:
        _show_full_read(verification, verification.full_read)
    if verification.lineage:
        say(f"  lineage: {verification.lineage}")


def _show_full_read(verification: Verification, read: FullRead) -> None:
    """Print what the ledger has recorded about the checkpoint, and the digests that were not recorded before."""
    from wherry.core.keypath import render
    from wherry.prove.full_read import DIFFERENT

    where = shlex.quote(verification.uri)
    say(f"  ledger: {read.ledger}")
    if read.ledger == DIFFERENT:
        say(
            f"  if the change was intended: wherry inspect --digest --write {where}; wherry ledger record {where}"
        )
    if verification.failed or read.proved:
        return
    node = read.subject
    print_rows([("  checkpoint", node.checkpoint_digest), ("  weights", node.weights_digest)])
    for path, digest in sorted(read.digests.items()):
        say(f"  {digest}  {render(path)}")
    say("  unproved: nothing is recorded that these bytes could be compared with")
    if not verification.lineage:
        say(f"  to record these digests: wherry verify {where} --level digest --record")


def show_registration(registration: Registration, *, json_: bool) -> None:
    """Print a registered model version."""
    if json_:
        print_json(asdict(registration))
    else:
        print_rows(asdict(registration).items())


def show_lineage(tree: LineageTree, *, json_: bool) -> None:
    """Print the lineage tree of a checkpoint."""
    from wherry.trace.lineage_text import render

    if json_:
        print_json(tree.to_json())
    else:
        say_lines(render(tree))


def show_cleaned(rows: list[CleanReport], *, dry_run: bool, json_: bool) -> None:
    """Print what was removed, or would be."""
    if json_:
        print_json([row._asdict() for row in rows])
        return
    if not rows:
        say("nothing to clean")
    for row in rows:
        word = (
            "removed" if row.removed else ("would remove" if dry_run and row.reason == "dry run" else "kept")
        )
        say(f"{word} {row.uri} ({show_size(row.nbytes)}; {row.reason})")


def show_night(report: NightReport, *, json_: bool) -> None:
    """Print what a night did: a line for each outcome, then a table for each kind of result."""
    from wherry.nightly.report import MOST_ROWS, summary, tables

    if json_:
        print_json(report.to_json())
        return
    for line in summary(report):
        say(line)
    for table in tables(report):
        say(table.title)
        print_table(table.head, table.rows[:MOST_ROWS])
        if len(table.rows) > MOST_ROWS:
            say(f"and {len(table.rows) - MOST_ROWS} more; --json has all")


def show_findings(findings: list[Diagnosis], *, json_: bool) -> int:
    """Print the findings of `doctor`; return 1 where something is broken, else 0."""
    if json_:
        print_json([asdict(finding) for finding in findings])
    else:
        print_table(
            ["name", "state", "detail", "cure"], ([f.name, f.state, f.detail, f.cure or ""] for f in findings)
        )
    return int(any(finding.state == "broken" for finding in findings))
