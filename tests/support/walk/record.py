"""Walks every case of every class, and writes down how each ended:

    python -m tests.support.walk.record [--only CLASS ...] [--workers N] [--details FILE]

rewrites tests/golden/attributes.json, or with --only its rows of these classes. `infra/docs.py` makes
docs/reference/attributes.md of it, and tests/families/test_config_walk.py compares it with the code. A failure is
printed with what happened, and the golden file with one fails that test.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from tests.support.memory_files import temporary_folder
from tests.support.walk.change import ABSENT
from tests.support.walk.models import BASES
from tests.support.walk.walk import LITTLE, Case, Walked

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "attributes.json"
BASE = "(base)"  # the row of the model that nothing was changed of
_PART = 8  # cases that a worker takes at a time


def golden(label: str) -> dict[str, Any]:
    """Attribute → value → what it changes, and the end in each system, of one class."""
    return json.loads(GOLDEN.read_text())[BASES[label].family][label]


def row(walked: Walked) -> dict[str, str]:
    """One case as it stands in the golden file."""
    ends = {system: "/".join(sorted({end.word for end in by.values()})) for system, by in walked.ends.items()}
    return {"changes": walked.changes, **ends}


def rows(found: Iterable[Walked]) -> dict[str, dict[str, dict[str, str]]]:
    """Attribute → value → row, of one class."""
    table: dict[str, dict[str, dict[str, str]]] = {}
    for walked in found:
        if walked.is_model:
            table.setdefault(walked.case.attribute or BASE, {})[walked.case.text] = row(walked)
    return table


def failures(walked: Walked) -> list[str]:
    """What went wrong, one line a route. Absent and null are tried of everything; any other value must be a model."""
    case = walked.case
    if not walked.is_model and (case.change is None or case.change.value not in (ABSENT, None)):
        return [f"{case.label} {case.attribute} = {case.text}: {walked.changes}"]
    if walked.changes == LITTLE:
        return [
            f"{case.label} {case.attribute} = {case.text}: changes the outputs by less than rounding does"
        ]
    return [
        f"{case.label} {case.attribute} = {case.text}: {route}: {end.word} {end.detail}"
        f" [changes outputs: {walked.changes}]"
        for by in walked.ends.values()
        for route, end in by.items()
        if not end.passed
    ]


def _walk(part: list[tuple[Case, int]]) -> list[Walked]:
    from tests.support.walk.walk import walk

    return [walk(case, number) for case, number in part]


def prepare(home: str) -> None:
    """A worker sees no ledger of the developer, and uses one processor."""
    os.environ |= {
        "WHERRY_HOME": home,
        "WHERRY_SETTLE_SECONDS": "0",
        "HF_HUB_OFFLINE": "1",
        "JAX_PLATFORMS": "cpu",
    }
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def walk_all(labels: list[str], workers: int) -> Iterator[Walked]:
    """Every case of some classes, in order."""
    import transformers

    from tests.support.walk.walk import all_cases

    transformers.logging.disable_progress_bar()
    numbered = [(case, number) for label in labels for number, case in enumerate(all_cases(label))]
    parts = [numbered[at : at + _PART] for at in range(0, len(numbered), _PART)]
    spawn = multiprocessing.get_context("spawn")
    with temporary_folder("walk") as home, ProcessPoolExecutor(workers, spawn, prepare, (home,)) as pool:
        for part in pool.map(_walk, parts):
            yield from part


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=BASES, nargs="+", help="walk these classes")
    parser.add_argument(
        "--workers", type=int, default=min(2, os.cpu_count() or 1), help="number of processes"
    )
    parser.add_argument(
        "--details", type=Path, help="write each case and each refusal into this file, a line of JSON"
    )
    arguments = parser.parse_args()
    labels = arguments.only or list(BASES)
    found: list[Walked] = []
    failed = 0
    with (arguments.details or Path(os.devnull)).open("w", buffering=1) as stream:
        for walked in walk_all(labels, arguments.workers):
            found.append(walked)
            print(json.dumps(walked.details), file=stream)
            for line in failures(walked):
                failed += 1
                print(line, flush=True)
    print(f"{failed} failures among {len(found)} cases")
    table = json.loads(GOLDEN.read_text()) if arguments.only and GOLDEN.exists() else {}
    for label in labels:
        made = rows(one for one in found if one.case.label == label)
        table.setdefault(BASES[label].family, {})[label] = made
    GOLDEN.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
