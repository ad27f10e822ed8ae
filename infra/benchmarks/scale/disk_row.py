"""The row on SeaweedFS: a store that keeps every byte, so that the result is read back and compared leaf by leaf."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.bucket_servers import BUCKET, amazon
from benchmarks.inputs import make_huggingface
from benchmarks.scale.carry import RowFailedError
from benchmarks.scale.place import INFRA

_UNITS = 16


def run_on_disk(size: int, workers: int, folder: Path) -> dict[str, Any]:
    """Convert with read-back through workers, and in one process.

    Args:
        size: bytes of the checkpoint.
        workers: number of `wherry work`.
        folder: an empty folder.

    Returns:
        Seconds of the units and of the commit, what it has proved, and whether the digest is that of one process.

    Raises:
        RowFailedError: a process failed.
    """
    make_huggingface(folder / "model", size)
    load = os.getloadavg()[0]
    unit = f"{-(-size // _UNITS)}B"
    with amazon(folder) as store:
        own = {
            "WHERRY_HOME": str(folder / "home"),
            "WHERRY_KEY": "the key of this bench",
            "TMPDIR": str(folder),
        }
        environment = {**os.environ, **store.environment, **own}
        _python(
            environment, "-m", "benchmarks.bucket_work", "copy", str(folder / "model"), f"s3://{BUCKET}/model"
        )
        words = [
            f"s3://{BUCKET}/model",
            f"s3://{BUCKET}/out",
            "--to",
            "dcp",
            "--set",
            f"shard_size={unit}",
            "--no-lineage",
        ]
        _wherry(environment, "split", *words, "--unit", unit)
        begun = time.monotonic()
        command = [sys.executable, "-m", "wherry.cli", "work", f"s3://{BUCKET}/out", "--json"]
        processes = [
            subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) for _ in range(workers)
        ]
        codes = [process.wait() for process in processes]
        if any(codes):
            raise RowFailedError("a worker failed on SeaweedFS")
        made = time.monotonic()
        receipt = _wherry(environment, "commit", f"s3://{BUCKET}/out")
        committed = time.monotonic()
        one = _wherry(environment, "convert", words[0], f"s3://{BUCKET}/one", *words[2:])
    return {
        "size": size,
        "workers": workers,
        "seconds": round(made - begun, 2),
        "commit": round(committed - made, 2),
        "verification": receipt["verification"],
        "digest": receipt["target"]["checkpoint_digest"],
        "same_digest": receipt["target"]["checkpoint_digest"] == one["target"]["checkpoint_digest"],
        "load": round(load, 1),
    }


def _wherry(environment: Mapping[str, str], *words: str) -> dict[str, Any]:
    return json.loads(_python(environment, "-m", "wherry.cli", *words, "--json"))


def _python(environment: Mapping[str, str], *words: str) -> str:
    done = subprocess.run(
        [sys.executable, *words],
        env=dict(environment),
        cwd=INFRA,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RowFailedError(done.stderr or done.stdout)
    return done.stdout
