"""The benchmark measures the machine by itself: rates, the bound that follows from them, and the floor."""

from __future__ import annotations

import base64
import ctypes
import errno
import json
import mmap
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from tests.support.infra import INFRA, load

MODULES = "import sys, benchmarks.rates, benchmarks.floor; print([name for name in sys.modules if 'wherry' in name])"


def test_rates_of_the_machine_are_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rates, bound = load("benchmarks.rates", monkeypatch), load("benchmarks.bound", monkeypatch)
    command = [sys.executable, "-m", "benchmarks.rates", str(tmp_path), "3000000"]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, cwd=INFRA).stdout)
    assert [*found["core"]] == [one.name for one in rates.OPERATIONS]
    assert all(one["alone"] > 0 and one["per_core"] > 0 for one in found["core"].values())
    assert all(one["implementation"] for one in found["core"].values())
    assert {"write", "read", "write and read back"} == set(found["device"]["rates"])
    assert all(one["best"] >= one["least"] > 0 for one in found["device"]["rates"].values())
    assert [*tmp_path.iterdir()] == []
    assert bound.rates_of(found).cores == len(os.sched_getaffinity(0))


def test_rates_and_floor_share_no_code_with_wherry() -> None:
    done = subprocess.run(
        [sys.executable, "-c", MODULES], check=True, capture_output=True, text=True, cwd=INFRA
    )
    assert [name for name in json.loads(done.stdout.replace("'", '"')) if not name.startswith("_")] == []


def test_codecs_decode_what_they_say(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rates = load("benchmarks.rates", monkeypatch)
    (tmp_path / "cached").write_bytes(bytes(5000))
    samples = rates.Samples(bytes(range(256)) * 16, os.urandom(4096), tmp_path / "cached")
    done = {one.name: one.prepare(samples)() for one in rates.OPERATIONS}
    assert done.pop("page cache read") == 5000
    assert done.pop("memcpy") == 16 * 4096
    assert set(done.values()) == {4096}


@pytest.mark.parametrize("direct", [True, False])
def test_the_floor_copies_every_byte_and_hashes_it(
    direct: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    floor = load("benchmarks.floor", monkeypatch)
    if not direct:
        monkeypatch.setattr(os, "open", refuses_direct(os.open))
    (tmp_path / "source" / "below").mkdir(parents=True)
    contents = {
        "a": os.urandom(2 * floor.BLOCK + 4097), "b": os.urandom(floor.BLOCK), "empty": b"", "below/c": b"short",
    }  # fmt: skip
    for name, content in contents.items():
        (tmp_path / "source" / name).write_bytes(content)
    digests = floor.copy_folder(tmp_path / "source", tmp_path / "copy")
    copied = {
        str(path.relative_to(tmp_path / "copy")): path.read_bytes()
        for path in (tmp_path / "copy").rglob("*")
        if path.is_file()
    }
    assert copied == contents
    assert digests == {name: digest_of_blocks(content, floor.BLOCK) for name, content in contents.items()}
    with pytest.raises(FileExistsError):
        floor.copy_folder(tmp_path / "source", tmp_path / "copy")


def refuses_direct(opened: Any) -> Any:
    def fails(path: str, flags: int, *mode: int, **more: Any) -> int:
        if flags & os.O_DIRECT:
            os.close(opened(path, flags & ~os.O_DIRECT, *mode))  # Linux creates the file before it refuses
            raise OSError(errno.EINVAL, "no direct I/O")
        return opened(path, flags, *mode, **more)

    return fails


def digest_of_blocks(content: bytes, size: int) -> str:
    blocks = (content[start : start + size] for start in range(0, len(content), size))
    return blake3(b"".join(blake3(block).digest() for block in blocks)).hexdigest()


def test_the_bound_is_the_longer_of_device_and_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    bound = load("benchmarks.bound", monkeypatch)
    core = {"BLAKE3": 1.0, "page cache read": 2.0, "zstd": 0.1}
    rates = bound.Rates(2, core, write=10.0, read=20.0, write_and_read=8.0)
    assert bound.find_bound(bound.Job(80, 80), rates) == (8.0, (80 / 1 + 80 / 2) / 2)
    assert bound.find_bound(bound.Job(80, 80), rates).seconds == 60.0
    # With read-back: the device writes and reads meanwhile; what is read back is hashed too.
    assert bound.find_bound(bound.Job(80, 80, read_back=True), rates) == (10.0, (80 + 40 + 80) / 2)
    slow = rates._replace(write_and_read=5.0)
    assert bound.find_bound(bound.Job(80, 80, read_back=True), slow).device == 8.0 + 4.0
    # A codec and the hash of the source count uncompressed bytes, whichever side is compressed.
    for job in (bound.Job(80, 60, ("zstd",)), bound.Job(60, 80, ("zstd",))):
        assert bound.find_bound(job, rates) == (
            job.written / 10, pytest.approx((80 / 1 + 80 / 0.1 + job.source / 2) / 2),
        )  # fmt: skip
    # A cold source comes from the device, and is not copied from the page cache.
    assert bound.find_bound(bound.Job(80, 0, cold=True), rates) == (4.0, 40.0)


def test_files_are_dropped_from_the_page_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    files, machine = load("benchmarks.files", monkeypatch), load("benchmarks.machine", monkeypatch)
    if machine.describe(tmp_path)["disk"].split()[0] not in {"ext4", "xfs"}:
        pytest.skip("other file systems may keep files in memory, or not say what is in the page cache")
    (tmp_path / "file").write_bytes(bytes(1 << 20))
    files.read_all(tmp_path)
    assert is_cached(tmp_path / "file")
    files.drop_from_cache(tmp_path)
    assert not is_cached(tmp_path / "file")


def is_cached(path: Path) -> bool:
    """Whether any page of a file is in the page cache; reading it without waiting would start to read it ahead."""
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        place = ctypes.c_char.from_buffer(mapped)
        pages = (ctypes.c_ubyte * -(-len(mapped) // mmap.PAGESIZE))()
        failed = ctypes.CDLL(None).mincore(
            ctypes.c_void_p(ctypes.addressof(place)), ctypes.c_size_t(len(mapped)), pages
        )
        del place  # the map cannot be closed before
        assert not failed
        return any(page & 1 for page in pages)


def test_a_cold_run_finds_its_source_on_storage_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bench, calls = load("bench", monkeypatch), list[tuple[str, Path]]()

    def note(call: str, path: Path) -> None:
        calls.append((call, path))

    for call in ("drop_from_cache", "read_all"):
        monkeypatch.setattr(bench, call, partial(note, call))
    runs = {run.name: run for case in bench.CASES for run in bench.runs_of(case)}
    for name in ("verify: wherry", "model-signing BLAKE3", "dcp.save", "plan: 1000 tensors"):
        bench.prepare(runs[name], tmp_path)
    assert calls == [("drop_from_cache", tmp_path), ("drop_from_cache", tmp_path), ("read_all", tmp_path)]


@pytest.mark.parametrize(
    ("text", "flag"),
    [
        ("flags\t\t: fpu sha_ni avx2\n", "sha_ni"),
        ("Features\t: fp asimd sha1 sha2 crc32\n", "sha2"),
        ("flags\t\t: fpu avx2\nbugs\t\t: sha_ni\n", ""),
    ],
)
def test_sha_instructions_are_found(text: str, flag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = load("benchmarks.machine", monkeypatch)
    assert machine.sha_instructions(text) == flag
    assert "sha_instructions" in machine.describe(INFRA)


def test_model_signing_signs_and_verifies_with_blake3(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    peers, inputs = load("benchmarks.peers", monkeypatch), load("benchmarks.inputs", monkeypatch)
    inputs.make_huggingface(tmp_path / "model", 1_000_000)
    peers.sign(str(tmp_path / "model"), str(tmp_path / "signed"))()
    peers.verify_signature(str(tmp_path / "signed"))()
    envelope = json.loads((tmp_path / "signed" / "model.sig").read_text())["dsseEnvelope"]
    signed = json.loads(base64.b64decode(envelope["payload"]))
    assert signed["predicate"]["serialization"]["hash_type"] == "blake3"
    (weights, *_others) = sorted((tmp_path / "signed" / "model").glob("*.safetensors"))
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(ValueError, match="Hash mismatch"):
        peers.verify_signature(str(tmp_path / "signed"))()
