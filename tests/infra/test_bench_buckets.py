"""The rows of buckets: what is required of them is judged, and a missed number is bold."""

from __future__ import annotations

import time
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.infra import load

SIZE = 2_000_000_000


@pytest.fixture
def buckets(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load("benchmarks.buckets", monkeypatch)


def measured(buckets: ModuleType, seconds: float, peak: int, staged: int = 0, received: int = SIZE) -> object:
    value = {"requests": 300, "sent": SIZE, "received": received, "processor": 3.0}
    cost = buckets.measure.__globals__["Cost"](seconds + 1, seconds, 4.0, peak, peak, value)
    return buckets.Measured(cost, staged, 5.0)


@pytest.mark.parametrize(("seconds", "peak", "missed"), [(13, 250, 0), (14, 250, 1), (14, 251, 2)])
def test_a_number_that_misses_what_is_required_is_bold(
    buckets: ModuleType, seconds: float, peak: int, missed: int
) -> None:
    pair = (measured(buckets, 10, 10**8), measured(buckets, seconds, peak * 10**6, staged=5_000_000))
    row = buckets._cells("s3 → s3, dcp", SIZE, [pair])
    assert sum("**" in cell for cell in row) == missed
    assert row[1] == "2.00"
    assert row[7:] == ["5", "1.000×", "1.000×", "1.50", "1.50", "2.50", "2.50", "300"]
    assert len(row) == len(buckets._HEAD)


@pytest.mark.parametrize(
    ("name", "received", "missed"),
    [
        ("s3 → s3, dcp", 2.04, 0),
        ("s3 → s3, dcp", 2.05, 1),
        ("local → s3, dcp", 1.03, 1),
        ("s3 → local, dcp", 1.02, 0),
        ("s3 → s3, safetensors, verify store", 1.02, 0),
        ("s3 → s3, safetensors, verify store", 1.03, 1),
        ("local → s3, safetensors, verify store", 0.019, 0),
        ("local → s3, safetensors, verify store", 0.021, 1),
    ],
)
def test_bytes_are_judged_by_how_often_a_row_reads_from_a_bucket(
    buckets: ModuleType, name: str, received: float, missed: int
) -> None:
    one = measured(buckets, 10, 10**8, received=int(received * SIZE))
    assert sum("**" in cell for cell in buckets._cells(name, SIZE, [(one, one)])) == missed


def test_what_is_staged_on_a_disk_is_seen(buckets: ModuleType, tmp_path: Path) -> None:
    with buckets._watch_folder(tmp_path) as seen:
        (tmp_path / "file").write_bytes(bytes(1000))
        for _look in range(500):
            if max(seen) == 1000:
                break
            time.sleep(0.02)
        (tmp_path / "file").unlink()
    assert max(seen) == 1000


def test_every_row_has_an_emulator_and_a_work(buckets: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    works = load("benchmarks.bucket_work", monkeypatch).WORKS
    assert {row.scheme for row in buckets.ROWS} == set(buckets.SERVERS)
    assert {peer.work for peer in buckets.PEERS} | {
        "wherry",
        "client",
        "client-unread",
        "copy-proved",
        "remove",
    } == set(works)


def test_no_two_rows_do_the_same(
    buckets: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[tuple[str, ...]] = []
    monkeypatch.setattr(buckets.Bench, "_run", lambda _self, *words: runs.append(words))
    for row in buckets.ROWS:
        one = buckets.Bench(row.scheme, tmp_path, {}, 0)
        one.row(row)
    made = [words for words in runs if words[0] == "wherry"]
    assert len(set(made)) == len(buckets.ROWS) == len({row.name for row in buckets.ROWS})
