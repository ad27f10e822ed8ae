"""Report: infra/bench-against.json and .md."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

NAME = "bench-against"
MOST = 1.05  # times the processor time of the other checkout
NOISE_S = 30e-6  # a difference that is smaller is not judged
_ABOUT = """\
Processor time (user and kernel, all threads) of calls in two warm processes, one for each checkout, by turns on the
same files; the least of all rounds. *convert* reads the container and writes safetensors (safetensors: DCP), *write*
writes the container from safetensors; both with digests, read-back and a ledger entry. A ratio above {most} is **bold**
unless the difference is below {noise:.0f} µs.
"""


def write(results: Path, found: Mapping[str, Any]) -> int:
    """Write the files, and print what is not reached; 1 if something is not."""
    (results / f"{NAME}.json").write_text(json.dumps(found, indent=1) + "\n")
    text = markdown(found)
    (results / f"{NAME}.md").write_text(text)
    print("\n" + text)
    missed = [*problems(found)]
    for problem in missed:
        print(f"not reached: {problem}", file=sys.stderr)
    return int(bool(missed))


def problems(found: Mapping[str, Any]) -> Iterator[str]:
    """The rows that are slower than allowed, and those that were not measured."""
    for row in found["rows"]:
        if "failed" in row:
            yield f"{row['row']}: {row['failed']}"
        elif is_slower(row):
            yield f"{row['row']}: {row['ratio']:.2f}× of {MOST:g}×"


def is_slower(row: Mapping[str, Any]) -> bool:
    """Whether this checkout is slower than allowed."""
    return row["ratio"] > MOST and row["ours_s"] - row["other_s"] > NOISE_S


def markdown(found: Mapping[str, Any]) -> str:
    """The page."""
    described = found["machine"]
    about = (
        f"This: {found['ours']}; the other: {found['other']}. {found['rounds']} rounds, {described['date']}, "
        f"{described['cores']} cores ({described['processor'].split(' with ')[0]}), Python {described['python']}, "
        f"load {described['load_before']}."
    )
    lines = [
        "# This checkout against another",
        "",
        "Written by `infra/bench --against DIR`; do not edit.",
        "",
        about,
        "",
        _ABOUT.format(most=MOST, noise=NOISE_S * 1e6),
        "| operation | container | tensors | other, ms | this, ms | ratio |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
        *map(_row, found["rows"]),
        "",
    ]
    missed = [*problems(found)]
    if missed:
        lines += ["Not reached:", "", *(f"- {problem}" for problem in missed), ""]
    return "\n".join(lines)


def _row(row: Mapping[str, Any]) -> str:
    begin = f"| {row['operation']} | {row['container']} | {row['tensors']:,} |"
    if "failed" in row:
        return f"{begin} | | not measured |"
    ratio = f"{row['ratio']:.2f}×"
    return (
        f"{begin} {row['other_s'] * 1e3:.2f} | {row['ours_s'] * 1e3:.2f} | "
        f"{f'**{ratio}**' if is_slower(row) else ratio} |"
    )
