"""Measures the spike: `python -m infra.spikes.filemap.measure FOLDER [--times 3] [--only today,orders,ways]`.

It prints tables: one process beside today's `wherry convert` (processor seconds, memory, digests, bytes), every way to
write (three workers, one killed, folder and bucket), both orders of a pack. Processor seconds are of the conversion
itself, without imports and planning; old and new alternate.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
from contextlib import redirect_stderr
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infra.spikes.filemap.program import JobFile
from wherry.storage.stores import locate

if TYPE_CHECKING:
    from collections.abc import Mapping

MIB = 1 << 20
FORMATS: dict[str, tuple[str, dict[str, str], dict[str, str]]] = {
    "npz": ("model.npz", {}, {"family": "none"}),
    "maxtext": ("0", {"compression": "zstd", "chunks": "2x1x4"}, {}),
}
WAYS = (("one", 1, False), ("one, killed", 1, True), ("three", 3, False), ("three, one killed", 3, True))


def run(
    job: JobFile, role: str, moment: int = 0, environment: Mapping[str, str] | None = None
) -> dict[str, Any] | None:
    """One process; None if it was killed."""
    file = Path(os.environ["SPIKE_FOLDER"]) / "job.json"
    file.write_text(json.dumps(asdict(job)))
    words = [sys.executable, "-m", "infra.spikes.filemap.program", str(file), role, str(moment)]
    done = subprocess.run(words, check=False, stdout=subprocess.PIPE, text=True, env=environment)
    if moment and done.returncode < 0:
        return None
    done.check_returncode()
    return json.loads(done.stdout)


def row(*cells: object) -> None:
    """Print a row of a table."""
    print("|", " | ".join(map(str, cells)), "|", flush=True)


def files_of(uri: str) -> dict[str, str]:
    """Name → hash of each file of a target."""
    place = locate(uri)
    if not place.store.capabilities.local:
        entries = [entry.name for entry in place.walk()] if place.name == "0" else []
        places = {name: place.join(name) for name in entries} or {".": place}
        return {name: hashlib.sha256(one.read_whole(1 << 31)).hexdigest() for name, one in places.items()}
    root = Path(place.path)
    found = [root] if root.is_file() else sorted(one for one in root.rglob("*") if one.is_file())
    return {str(one.relative_to(root)): hashlib.sha256(one.read_bytes()).hexdigest() for one in found}


def job_for(to: str, source: Path, base: str, way: str, pack: str = "128MiB", **how: Any) -> JobFile:
    name, options, common = FORMATS[to]
    options = {**options, "data_file_size": pack} if to == "maxtext" else options
    return JobFile(str(source), f"{base}/{to}-{way}/{name}", to, options, common, **how)


def beside_today(source: Path, folder: Path, times: int) -> None:
    """One process of each, in turn."""
    row("to", "run", "CPU s", "ratio", "peak MiB", "peak - base MiB")
    row(*6 * ["---"])
    for to in FORMATS:
        seconds: dict[str, list[float]] = {"today": [], "spike": []}
        digests: set[tuple[str, str]] = set()
        for turn in range(times):
            for way, role in (("today", "today"), ("spike", "commit")):
                job = job_for(to, source, str(folder), f"{way}{turn}")
                found = run(job, role)
                assert found is not None
                seconds[way].append(found["cpu"])
                digests.add((found["source"], found["target"]))
                ratio = seconds["spike"][-1] / seconds["today"][-1] if way == "spike" else 1
                more = (found["peak"] - found["base"]) / MIB
                row(
                    to,
                    way,
                    f"{found['cpu']:.2f}",
                    f"{ratio:.2f}",
                    f"{found['peak'] / MIB:.0f}",
                    f"{more:.0f}",
                )
                if to == "maxtext":
                    shutil.rmtree(Path(job.target).parent)
        middle = {way: statistics.median(rows) for way, rows in seconds.items()}
        same = len(digests) == 1
        print(
            f"{to}: median ratio {middle['spike'] / middle['today']:.2f}, digests of source and target equal: {same}"
        )
        if to == "npz":
            pair = [
                files_of(job_for(to, source, str(folder), f"{way}0").target) for way in ("today", "spike")
            ]
            print(f"npz: the same bytes as today's: {pair[0] == pair[1]}")
            for way in seconds:
                for turn in range(times):
                    shutil.rmtree(folder / f"npz-{way}{turn}")


def every_way(source: Path, base: str, environment: Mapping[str, str] | None) -> dict[str, Any]:
    """One worker, one that is killed, three workers, one of three killed; files by format."""
    row("to", "way", "CPU s of all", "largest peak - base MiB", "pieces that the commit wrote", "logs KiB")
    row(*6 * ["---"])
    found: dict[str, Any] = {}
    for to in FORMATS:
        rows: dict[str, Any] = {}
        for way, workers, kill in WAYS:
            name = way.replace(", ", "-").replace(" ", "-")
            job = job_for(to, source, base, name, "8MiB", workers=workers, group=8 * MIB)
            done: list[dict[str, Any]] = []
            if environment and workers > 1:
                begun = run(job, "begin", environment=environment)
                job = replace(job, uploads=(begun or {})["uploads"])
            for worker in range(workers if workers > 1 else 0):
                if kill and worker == 1:
                    assert run(job, "1", 2, environment) is None, "it was not killed"
                done.append(run(job, str(worker), 0, environment) or {})
            if kill and workers == 1:
                assert run(job, "commit", 5, environment) is None, "it was not killed"
            last = run(job, "commit", 0, environment) or {}
            done.append(last)
            rows[way] = (files_of(job.target), last["source"], last["target"])
            cpu, log = sum(one["cpu"] for one in done), sum(one["log"] for one in done)
            more = max(one["peak"] - one["base"] for one in done)
            row(to, way, f"{cpu:.2f}", f"{more / MIB:.0f}", last["swept"], f"{log / 1024:.0f}")
        same = all(one == rows["one"] for one in rows.values())
        print(f"{to}: equal bytes and digests in all ways: {same}", flush=True)
        found[to] = rows["one"]
    return found


def both_orders(source: Path, folder: Path) -> None:
    """A pack in the order of the source, and in C order."""
    print(
        "| order of a pack | batch MiB | CPU s | read of the source MiB | runs | mean run | hashed again MiB |"
    )
    print("|---|---|---|---|---|---|---|")
    for ordered in (True, False):
        for size in (16, 32):
            way = f"order{int(ordered)}-{size}"
            job = job_for("maxtext", source, str(folder), way, ordered=ordered, box_bytes=size * MIB)
            found = run(job, "commit") or {}
            taken, runs = found["taken"], found["runs"]
            order, cpu, again = "source's" if ordered else "C", f"{found['cpu']:.2f}", found["again"] // MIB
            row(order, size, cpu, taken // MIB, f"{runs:,}", taken // runs, again)
            shutil.rmtree(Path(job.target).parent)


def model(folder: Path, hidden: int, ffn: int) -> Path:
    """A Hugging Face folder of a Llama of 22 layers; extents are multiples of 512, as those of real models are."""
    target = folder / f"source-{hidden}-{ffn}"
    if not target.exists():
        text = (
            "import pathlib, benchmarks.inputs as i; "
            f"i._write_model(pathlib.Path({str(target)!r}), i._tensors({hidden}, {ffn}), 1 << 29)"
        )
        path = os.pathsep.join((str(Path("infra").resolve()), os.environ.get("PYTHONPATH", "")))
        subprocess.run([sys.executable, "-c", text], check=True, env={**os.environ, "PYTHONPATH": path})
    return target


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--large", default="2048,2048", help="hidden and feed-forward extents: 1.1 GB")
    parser.add_argument("--small", default="512,512", help="of what goes to the emulator: 80 MB")
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--only", default="today,orders,ways")
    chosen = parser.parse_args()
    chosen.folder.mkdir(parents=True, exist_ok=True)
    os.environ["SPIKE_FOLDER"] = str(chosen.folder)
    only = chosen.only.split(",")
    if "today" in only:
        beside_today(model(chosen.folder, *map(int, chosen.large.split(","))), chosen.folder, chosen.times)
    if "orders" in only:
        both_orders(model(chosen.folder, *map(int, chosen.large.split(","))), chosen.folder)
    if "ways" in only:
        from tests.support import buckets

        small = model(chosen.folder, *map(int, chosen.small.split(",")))
        print("\nOn a disk:")
        local = every_way(small, str(chosen.folder), None)
        with Path(os.devnull).open("w") as nowhere, redirect_stderr(nowhere), buckets.s3() as proxy:
            buckets.create_bucket("s3", proxy, "bucket")
            variables = buckets.variables("s3", proxy.url)
            os.environ.update(variables)
            print("\nIn a bucket (the emulator of tests/support):")
            remote = every_way(small, "s3://bucket", {**os.environ})
        print(f"the same bytes and digests on a disk and in a bucket: {local == remote}")


if __name__ == "__main__":
    main()
