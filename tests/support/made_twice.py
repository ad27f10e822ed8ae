"""Makes the units of a job twice, in processes of their own, and says what each has made."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

from tests.support.jobs import row_of
from wherry.store.local_store import locate
from wherry.workers.job import opened_job
from wherry.workers.records import TaskKind, job_records, records_by_unit


def made_by_processes(target, seed):
    """Make all units of a job by two processes at once, with their own order of hashes and memory."""
    line = [sys.executable, "-m", "wherry.cli", "work", target, "--quiet"]
    env = {**os.environ, "PYTHONHASHSEED": seed}
    for one in [subprocess.Popen(line, env=env, stderr=subprocess.PIPE) for _ in range(2)]:
        _out, errors = one.communicate(timeout=120)
        assert one.returncode == 0, errors.decode()


def contents(target):
    """Unit → the hash of each file, or of its region of one, and the hashes of leaves, as its worker left them."""
    records = job_records(locate(target))
    found = {}
    with opened_job(target) as job:
        regions = {unit.number: unit.region for unit in job.units}
    for number, names in records_by_unit(TaskKind.MAKE, records.names()).items():
        row, region = row_of(records, names[0]), regions[number]
        folder = Path(records.folder.path) / f"made-{row['files'][0][2] if region else row['token']}"
        files = {
            str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()[slice(*region or (None,))])
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }
        hashes = {name: one.hexdigest() for name, one in files.items()}
        found[row["digest"]] = hashes, sorted(map(json.dumps, row["moves"])), row["hashed"]
    return found


def twice(make, tmp_path):
    """What two runs of a job have made, each in processes of its own; `make` may return another target than it got."""
    folders, found = [tmp_path / name for name in ("one", "two")], []
    for number, folder in enumerate(folders):
        folder.mkdir()
        made = make(folder / "out")
        target = str(made if isinstance(made, Path) else folder / "out")
        made_by_processes(target, str(number))
        found.append(contents(target))
    return found
