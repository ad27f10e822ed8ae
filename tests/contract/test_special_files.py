"""Files of checkpoints of every format, replaced by a FIFO, a device, a socket, a folder, a link or 64 GiB of nothing.

Each verb must end within seconds with an error of ours and its code, in bounded memory, leave nothing at the target and
carry nothing of the user's. The slow form replaces every file, the other one of each kind.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from tests.support import ocdbt, rank_files, universal, zero
from tests.support.crash import own_container
from tests.support.formats import cases, place
from tests.support.warm import Warm
from wherry.formats.registry import find_format, formats
from wherry.testing import samples, writers

# Corpus cases of few and small files, where the smallest one of a format would not show all of its forms.
FORMS = {
    "orbax": (
        "orbax-017-aggregate", "orbax-0128-standard", "orbax-0128-noocdbt-zarr2", "orbax-0128-v1", "orbax-0110-manager"
    ),
    "paxml": ("paxml-gpt3-l3-v12-gda-ocdbt", "paxml-gpt3-l3-v11-gda-zarr"),
    "t5x-legacy": ("t5x-upstream-tiny-t5", "t5x-derived-no-zarray"),
    "t5x-orbax": ("t5x-orbax-ocdbt-head", "t5x-orbax-zarr-2023"),
    "huggingface": ("hf-gpt2-conv1d-fp32", "hf-llama-bin-single-fp32"),
    "tf-bundle": (),
}  # fmt: skip
CORPUS_CASES = {
    case: number == 0 and own_container(name)  # the quick ones: one of each container
    for name in formats()
    for number, case in enumerate(FORMS.get(name, cases(name)[:1]))
    if case in cases(name)
}
OURS = ("huggingface", "safetensors")  # with companions, in a folder and as one file
WRITTEN = [name for name, row in formats().items() if row.is_written and (name in OURS or not cases(name))]


def two_ranks_of_fsdp(folder):
    """What torch's own DTensors are in the files of two ranks."""
    rows = {"a.weight": [[10, 3], "float32", ["S0"]], "b.norm": [[5], "float32", ["R"]]}
    return rank_files.save_all(folder, {"2": rank_files.Save([2], rows)})["2"][0]


IMITATED = {
    "deepspeed": lambda folder: zero.save(folder, stage=2, ranks=2) / "global_step10",
    "deepspeed-universal": lambda folder: universal.save(folder) / universal.STEP,
    "fsdp": two_ranks_of_fsdp,
    "ocdbt": lambda folder: ocdbt.write(folder, {"model/w": np.ones((3, 4), np.float32)}),
}
ROOT = Path(__file__).parents[2]
MODULES = (
    *("wherry.converter.convert", "wherry.prove.verify", "wherry.ledger.resolve", "tests.support.warm_formats"),
    *("tensorstore", "zstandard"),
)  # fmt: skip
SECONDS = 20
MEMORY = 400 << 20
HOW_MANY = pytest.mark.parametrize("every", ["kinds", pytest.param("every", marks=pytest.mark.slow)])
BARRED = ("fifo", "zeros", "unix_socket", "outside")
ENDS = {3, 4, 5, 6}


@pytest.fixture(scope="module")
def warm():
    """The program that tries the verbs is a process of each test, forked from one that has imported wherry."""
    made = Warm([sys.executable, "-m", "tests.support.warm"], os.environ, MODULES, os.fspath(ROOT))
    yield made
    made.close()


@HOW_MANY
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[] if quick else [pytest.mark.slow]) for case, quick in CORPUS_CASES.items()],
)
def test_special_files_in_what_the_systems_wrote(case, tmp_path, every, warm):
    source = place(case)
    whole = tmp_path / "copy"
    top = (
        next(one for one in source.parents if one.name == "checkpoint")
        if source.name != "checkpoint"
        else source
    )
    shutil.copytree(top, whole)
    check(whole / source.relative_to(top), tmp_path, every, warm)


@HOW_MANY
@pytest.mark.parametrize("name", WRITTEN)
def test_special_files_in_what_we_write(name, tmp_path, every, warm):
    spot = writers.staging_place(tmp_path)
    writers.make(samples.sample(find_format(name), large=False), spot)
    check(Path(spot.path).rename(tmp_path / "copy"), tmp_path, every, warm)


@HOW_MANY
@pytest.mark.parametrize("name", IMITATED)
def test_special_files_in_what_is_imitated(name, tmp_path, every, warm):
    check(IMITATED[name](tmp_path / "copy"), tmp_path, every, warm)


def check(checkpoint: Path, tmp_path: Path, every: str, warm: Warm) -> None:
    rows = report(checkpoint, tmp_path, every, warm)
    without = {(row["file"], row["verb"]): row["code"] for row in rows if row["kind"] == "absent"}
    assert without
    first = max(row["memory"] for row in rows if row["kind"] == "whole")
    for row in rows:
        assert not row["left"], row
        assert not row["leaked"], row
        assert row["seconds"] < SECONDS, row
        assert row["memory"] < first + MEMORY, row
        if row["kind"] not in ("whole", "absent"):
            assert row["code"] in allowed(
                row, without[row["file"], row["verb"]], alone=checkpoint.is_file()
            ), row


def allowed(row: dict, without: int, *, alone: bool) -> set[int]:
    """A file that a verb does not need may be anything; one that it needs is refused by name."""
    if row["kind"] in BARRED:
        # A link in place of the one file that the user named is the user's choice; it leads to no checkpoint.
        return {without, 6} | ({4, 5} if alone and row["kind"] == "outside" else set())
    return {without, *ENDS} | ({0, 7} if row["kind"] == "sparse" else set())


def report(checkpoint: Path, tmp_path: Path, every: str, warm: Warm) -> list[dict]:
    work = tmp_path / "work"
    work.mkdir()
    words = [str(checkpoint), str(work), every]
    code, output, errors = warm.run(
        "tests.support.special_files", words, cwd=os.fspath(ROOT), env=dict(os.environ), seconds=580
    )
    assert code == 0, errors.decode()[-4000:]
    return [json.loads(line) for line in output.splitlines()]


def test_the_lists_hold_every_format_that_is_read():
    seen = defaultdict(list)
    for case in CORPUS_CASES:
        seen[next(name for name in formats() if case in cases(name))].append(case)
    missing = {name for name, row in formats().items() if row.readable} - {*seen, *WRITTEN, *IMITATED}
    if not CORPUS_CASES:
        pytest.skip("the corpus is not here; set WHERRY_CORPUS to its folder")
    assert missing <= {"dcp-safetensors", "meta-consolidated", "tf-bundle", "torchscript"}, missing
