"""discover: what counts and what is passed over, with the reason; few listings, whatever the number of steps."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Self

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import save_file

import wherry
from tests.support.formats import CORPUS, expected
from wherry.cli import cli
from wherry.console.formats import dtype_words
from wherry.core.steps import step_number, unfinished_reason
from wherry.formats.registry import formats

STEPS = 10_000


class Listings:
    """Counts the folders that are listed and the files that are opened while it is active."""

    def __init__(self) -> None:
        self.folders: Counter[str] = Counter()
        self.files: Counter[str] = Counter()
        self.active = False
        sys.addaudithook(self._hear)  # cannot be taken away again, hence `active`

    def _hear(self, event: str, arguments: tuple[object, ...]) -> None:
        if self.active and event == "os.scandir":
            self.folders[str(Path(f"/proc/self/fd/{arguments[0]}").readlink())] += 1
        if self.active and event == "open" and not arguments[2] & os.O_DIRECTORY:
            self.files[str(arguments[0])] += 1

    def __enter__(self) -> Self:
        self.active = True
        return self

    def __exit__(self, *_: object) -> None:
        self.active = False


def model(path, **arrays) -> None:
    path.mkdir(parents=True)
    save_file(arrays or {"w": np.ones((2, 3), "f4")}, path / "model.safetensors", metadata={"format": "pt"})


def walked(root, **options):
    skipped = []
    found = list(wherry.discover(root, on_skip=skipped.append, **options))
    inside = {Path(row.uri).relative_to(root).as_posix(): row.reason for row in skipped}
    return [Path(one.uri).relative_to(root).as_posix() for one in found], inside


def copies(step, run, numbers) -> None:
    """The same step many times, its files linked."""
    for number in numbers:
        for folder, _names, files in os.walk(step):
            target = run / str(number) / Path(folder).relative_to(step)
            target.mkdir(parents=True)
            for file in files:
                os.link(Path(folder) / file, target / file)


def test_ten_thousand_steps_are_listed_but_not_what_they_hold(tmp_path):
    step = tmp_path / "step"
    (step / "default" / "d").mkdir(parents=True)
    leaf = {"key_metadata": [{"key": "w", "key_type": 2}], "value_metadata": {"value_type": "jax.Array"}}
    (step / "default" / "_METADATA").write_text(
        json.dumps({"tree_metadata": {"('w',)": leaf}, "use_ocdbt": True})
    )
    (step / "default" / "manifest.ocdbt").write_bytes(b"\x0c\xdb\x3a\x2a")
    (step / "default" / "d" / "data").write_bytes(b"x")
    copies(step, tmp_path / "run", range(STEPS))
    listings = Listings()
    seen = 0
    with listings:
        for number, one in enumerate(wherry.discover(tmp_path / "run")):
            assert one.format == "orbax"
            seen += 1
            if number == 9:
                listed = len(listings.folders)
                assert listed <= 1 + 2 * 10, "the first are given before the others are looked at"
    assert seen == STEPS
    assert not [folder for folder in listings.folders if folder.endswith("/d")]
    assert max(listings.folders.values()) <= 3
    assert sum(listings.folders.values()) <= 1 + 4 * STEPS
    assert not [file for file in listings.files if file.endswith("/data")]


FAMILIES = [
    "orbax-0128-noocdbt-zarr2", "orbax-0128-sharded8", "orbax-017-default", "maxtext-llama31-l3-scan",
    "dcp-fsdp2-w2-fp32", "lingua-noshard-w2", "t5x-legacy-v3-f32-head", "t5x-orbax-ocdbt-head",
    "paxml-gpt3-l3-v11-gda-zarr", "penzai-llama-unroll-plain", "hf-llama-sharded-fp32",
]  # fmt: skip


@pytest.mark.parametrize("case", FAMILIES)
def test_no_family_is_entered_or_reported_twice(tmp_path, case):
    if not (CORPUS / case).exists():
        pytest.skip("the corpus is not here; set WHERRY_CORPUS to its folder")
    source = CORPUS / case / "checkpoint" / expected(case)["uri"]
    root = tmp_path / "root"
    target = root / source.name
    shutil.copytree(source, target)
    listings = Listings()
    with listings:
        found = list(wherry.discover(root))
    assert len(found) == 1, [(one.format, one.uri) for one in found]
    assert found[0].format in {expected(case)["format"], *expected(case).get("format_accepts", ())}
    assert max(listings.folders.values()) <= 4
    depth = max(len(Path(folder).relative_to(root).parts) for folder in listings.folders)
    assert depth <= 2, sorted(listings.folders)  # the step, and the item in it


def test_staging_and_unfinished_names_are_passed_over_with_the_reason(tmp_path):
    for name in (
        "1", ".wherry-2.0123abcd", "3.orbax-checkpoint-tmp-17", "4.orbax-checkpoint-tmp", "checkpoint_5.tmp-1700000000",
        "tmp-checkpoint-6", "checkpoint_tmp", ".git/lfs", "models--x/blobs", "models--x/snapshots/main",
    ):  # fmt: skip
        model(tmp_path / name)
    (tmp_path / "link").symlink_to(tmp_path / "1")
    found, skipped = walked(tmp_path)
    assert found == ["1", "models--x/snapshots/main"]
    words = {
        ".wherry-2.0123abcd": "staging", "3.orbax-checkpoint-tmp-17": "Orbax", "4.orbax-checkpoint-tmp": "Orbax",
        "checkpoint_5.tmp-1700000000": "T5X", "tmp-checkpoint-6": "trainer", "checkpoint_tmp": "Flax",
        ".git": "hidden", "models--x/blobs": "cache", "link": "link",
    }  # fmt: skip
    assert set(skipped) == set(words)
    assert all(word in skipped[name] for name, word in words.items())


def age(path, seconds) -> None:
    then = time.time() - seconds
    for file in [path, *path.rglob("*")]:
        os.utime(file, (then, then))


def test_what_changed_a_moment_ago_counts_only_with_its_commit_member(tmp_path):
    for name in ("old", "fresh", "proved", "torn"):
        model(tmp_path / name)
        age(tmp_path / name, 3600)
    (tmp_path / "fresh" / "model.safetensors").touch()
    index = json.dumps({"metadata": {}, "weight_map": {"w": "model.safetensors"}})
    for name in ("proved", "torn"):
        (tmp_path / name / "model.safetensors").touch()
        (tmp_path / name / "model.safetensors.index.json").write_text(index)
    newest = time.time()
    os.utime(tmp_path / "proved" / "model.safetensors.index.json", (newest, newest))
    os.utime(tmp_path / "torn" / "model.safetensors.index.json", (newest - 60, newest - 60))
    assert walked(tmp_path)[0] == ["fresh", "old", "proved", "torn"]
    found, skipped = walked(tmp_path, min_age=600)
    assert found == ["old", "proved"]
    assert all(
        re.search(r"not settled: changed .*; it is settled in .* with min_age = 0", skipped[name])
        for name in ("fresh", "torn")
    )


def test_a_converted_checkpoint_needs_no_rest(tmp_path):
    model(tmp_path / "source")
    wherry.convert(tmp_path / "source", tmp_path / "target", to="orbax", lineage=False)
    age(tmp_path / "source", 10)
    found, _ = walked(tmp_path, min_age=600)
    assert found == ["target"]


def test_the_newest_complete_step_of_each_run(tmp_path):
    for run, steps in {"a": (1, 2, 30), "b/checkpoints": (10,)}.items():
        for step in steps:
            model(tmp_path / run / f"checkpoint-{step}")
    (tmp_path / "a" / "checkpoint-30" / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{}")
    (tmp_path / "a" / "checkpoint-40").mkdir()
    model(tmp_path / "a" / "best")
    found, skipped = walked(tmp_path, newest=True)
    assert found == ["a/checkpoint-2", "a/best", "b/checkpoints/checkpoint-10"]
    assert "a newer step" in skipped["a/checkpoint-1"]
    assert skipped["a/checkpoint-30"]
    assert wherry.detect(tmp_path / "a").step == 2


def test_single_files_of_several_systems(tmp_path):
    torch = pytest.importorskip("torch")
    torch.save({"w": torch.ones(3)}, tmp_path / "model.pt")
    np.savez(tmp_path / "a.npz", w=np.ones(3))
    save_file({"w": np.ones(3, "f4")}, tmp_path / "b.safetensors")
    (tmp_path / "events.out.tfevents").write_bytes(b"log")
    (tmp_path / "notes.txt").write_text("hello")
    found = {one.uri.rsplit("/", 1)[-1]: one.format for one in wherry.discover(tmp_path)}
    assert found == {"a.npz": "npz", "b.safetensors": "safetensors", "model.pt": "torch-zip"}


def test_a_folder_that_cannot_be_read_does_not_end_the_walk(tmp_path, monkeypatch):
    from wherry.storage.stores import LocalStore

    model(tmp_path / "good")
    (tmp_path / "bad").mkdir()
    entries = LocalStore.entries

    def refused(store, path):
        if path.endswith("/bad"):
            raise PermissionError(13, "Permission denied", path)
        return entries(store, path)

    monkeypatch.setattr(LocalStore, "entries", refused)
    found, skipped = walked(tmp_path)
    assert found == ["good"]
    assert "Permission denied" in skipped["bad"]


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("12", 12),
        ("0000001000", 1000),
        ("checkpoint_5", 5),
        ("step-7", 7),
        ("llama-3", None),
        ("run_8", None),
    ],
)
def test_names_of_steps(name, number):
    assert step_number(name) == number


@pytest.mark.parametrize("name", ["checkpoint_5", "my_tmp", "particle", "step-7", "parts"])
def test_names_that_only_look_unfinished(name):
    assert unfinished_reason(name) is None


def test_the_command_line(tmp_path):
    for step in (1, 2):
        model(tmp_path / f"checkpoint-{step}")
    lines = CliRunner().invoke(cli, ["discover", str(tmp_path), "--newest", "--json"]).stdout.splitlines()
    first, second = map(json.loads, lines)
    assert (first["step"], second["skipped"].rsplit("-", 1)[-1]) == (2, "1")
    assert (
        "not settled: changed"
        in CliRunner().invoke(cli, ["discover", str(tmp_path), "--min-age", "600"]).stdout
    )


def test_the_table_of_formats_says_what_the_rows_say():
    text = CliRunner().invoke(cli, ["formats"]).stdout
    for row in formats().values():
        line = next(line for line in text.splitlines() if line.strip().split("  ")[0].strip() == row.name)
        assert row.title in line
        assert ("reads" in line, "writes" in line) == (row.readable, row.is_written)
        shown = CliRunner().invoke(cli, ["formats", row.name]).stdout
        assert all(alias in shown for alias in (*row.aliases, row.loaded_by))
        assert all(f"--set {name}=" in shown for name in row.options)
    assert dtype_words({"bool", "int4", "uint4", "float8_e5m2"}) == [
        "4-bit integers",
        "float8 (e5m2)",
        "bool",
    ]
