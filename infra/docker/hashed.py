"""Divides what pip would install into requirements with the hashes of constraints-hashes.txt, and those without any.

    pip install --dry-run --ignore-installed --report report.json -c constraints.txt PACKAGE...
    python hashed.py report.json constraints-hashes.txt requirements.txt apart.txt

The image installs the first with `pip install --require-hashes --no-deps`. Without hashes are only torch and packages
of accelerators, whose builds have one version and different hashes; wherry itself, a local wheel, is in neither file.
Any other package without a hash is an error.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

BUILT_HERE = "wherry"
APART = re.compile(r"torch|triton|nvidia-.*|cuda-.*|jax-(cuda|rocm).*|libtpu.*")


def divide(report: dict[str, Any], locked: str) -> tuple[str, str]:
    """The text of both files.

    Args:
        report: of `pip install --report`.
        locked: text of constraints-hashes.txt.

    Raises:
        SystemExit: a package has no hash in this version, and must have one.
    """
    rows = {_name(row["metadata"]["name"]): row["metadata"]["version"] for row in report["install"]}
    rows.pop(BUILT_HERE, None)
    blocks = {_name(row.partition("==")[0]): row for row in re.split(r"\n(?=[\w.-]+==)", locked.strip())}
    hashed = [name for name, version in rows.items() if _states(blocks.get(name, ""), version)]
    apart = [name for name in rows if name not in hashed]
    wrong = [f"{name}=={rows[name]}" for name in apart if not APART.fullmatch(name)]
    if wrong:
        raise SystemExit(f"no hash in constraints-hashes.txt: {', '.join(wrong)}; run infra/lock")
    return _lines(blocks[name] for name in hashed), _lines(f"{name}=={rows[name]}" for name in apart)


def _name(text: str) -> str:
    return re.sub(r"[-_.]+", "-", text).lower()


def _states(block: str, version: str) -> bool:
    return block.partition("==")[2].partition(" ")[0] == version.partition("+")[0]


def _lines(rows: Iterable[str]) -> str:
    return "".join(f"{row}\n" for row in rows)


if __name__ == "__main__":
    report, locked, *targets = map(Path, sys.argv[1:])
    for target, text in zip(targets, divide(json.loads(report.read_text()), locked.read_text()), strict=True):
        target.write_text(text)
