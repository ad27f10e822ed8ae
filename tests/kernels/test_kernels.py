"""The kernels give what the `blake3` package and numpy give, bit by bit; without them wherry gives the same."""

import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.tags import platform_tags

import wherry
from tests.support import kernels as cases
from tests.support.fuzz_kernels import fuzz
from wherry import kernels
from wherry.core.digest import ALGORITHMS, BLAKE3, LeafHasher
from wherry.core.tensorspec import TensorSpec
from wherry.kernels.compile import FOLDER, compile_library, compiler, library_file, wheel_tag
from wherry.mover.move import cells

ROOT = Path(__file__).resolve().parents[2]
compiled = pytest.mark.skipif(compiler() is None, reason="no C compiler")


@compiled
def test_they_are_compiled_where_a_compiler_is():
    assert kernels.kernels() != "none"


@compiled
@pytest.mark.parametrize("lanes", [4, 8, 16])
def test_leaves_are_those_of_the_package_in_any_order(lanes):
    cases.check_lanes(lanes)


@compiled
@settings(deadline=None, max_examples=60)
@given(
    count=st.integers(1, 9 * cases.KIB) | st.integers(cases.LEAF - 2048, cases.LEAF + 2048),
    cuts=st.integers(0, 40),
    again=st.integers(0, 5),
    seed=st.integers(0, 1 << 30),
)
def test_pieces_may_come_in_any_order_and_again(count, cuts, again, seed):
    cases.check_pieces(count, cuts, again, seed)


@compiled
@settings(deadline=None, max_examples=60)
@given(
    count=st.integers(1, 5 * cases.KIB) | st.integers(cases.LEAF - cases.KIB, cases.LEAF + cases.KIB),
    cuts=st.integers(0, 60),
    again=st.integers(0, 9),
    workers=st.integers(1, 5),
    last=st.integers(0, 3),
    seed=st.integers(0, 1 << 30),
)
def test_workers_that_exchange_values_give_the_leaves_of_the_package(count, cuts, again, workers, last, seed):
    cases.check_shares(count, cuts, again, workers, last, seed)


@compiled
@settings(deadline=None, max_examples=30)
@given(
    count=st.integers(1, 5 * cases.KIB) | st.integers(cases.LEAF - cases.KIB, cases.LEAF + cases.KIB),
    cuts=st.integers(0, 60),
    seed=st.integers(0, 1 << 30),
)
def test_the_same_bytes_give_the_same_values(count, cuts, seed):
    cases.check_same_values(count, cuts, seed)


@compiled
@settings(deadline=None, max_examples=30)
@given(
    shape=st.lists(st.integers(1, 9), min_size=0, max_size=2),
    last=st.integers(1, 1500),
    parts=st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4)),
    word=st.sampled_from([1, 2, 4, 8]),
    workers=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_the_boxes_of_workers_give_the_leaves_of_the_package(shape, last, parts, word, workers, seed):
    whole = (*shape, last)
    grid = tuple(-(-extent // part) for extent, part in zip(whole, parts, strict=False))
    cases.check_grid(whole, grid, word, workers, seed)


@compiled
@pytest.mark.parametrize(("shape", "grid"), cases.GRIDS)
@pytest.mark.parametrize("word", [1, 2, 4, 8])
def test_the_boxes_of_grids_give_the_leaves_of_the_package(shape, grid, word):
    cases.check_grid(shape, grid, word, 3, seed=word)


@compiled
@pytest.mark.parametrize(
    "count", [1, 900, 1024, 1025, 5 * 1024 - 3, cases.LEAF - 1, cases.LEAF, cases.LEAF + 5]
)
def test_values_that_are_none_are_refused(count):
    cases.check_hostile(count, seed=count)


@compiled
def test_values_take_less_than_the_chunks_of_a_leaf():
    """Runs of whole aligned KiB are joined; where edges take more than 128 KiB, nothing is exchanged."""
    data, half = memoryview(bytes(cases.LEAF)), cases.LEAF // 2
    leaves = kernels.OpenLeaves(cases.LEAF)
    leaves.add(data[:half], 0)
    assert len(leaves.values(0)) == 35, "one subtree"
    leaves.add(data[: 7 * 1024 + 100], half)
    assert len(leaves.values(0)) == 4 * 35 + 7 + 100, "4 + 2 + 1 KiB, and an edge"
    rows = kernels.OpenLeaves(cases.LEAF)
    rows.add(data, 0, length=1024, count=2048, apart=2048, step=2048)
    assert len(rows.values(0)) == 2048 * 35
    odd = kernels.OpenLeaves(cases.LEAF)
    odd.add(data, 100, length=900, count=2048, apart=2048, step=2048)
    assert odd.values(0) is None


@compiled
def test_leaves_take_memory_for_what_has_come_of_them():
    """A few KiB each; 32 bytes for each KiB, or for 8 KiB that are whole; and nothing once they are complete."""
    before, leaf = kernels.open_bytes(), cases.LEAF
    leaves = kernels.OpenLeaves(64 * leaf)
    leaves.add(memoryview(bytes(2048)), 0, length=1024, count=128, apart=0, step=leaf // 2)
    assert 64 * 4096 < kernels.open_bytes() - before < 64 * 8192
    leaves.add(memoryview(bytes(leaf - 1024)), 1024)
    assert 63 * 4096 < kernels.open_bytes() - before < 63 * 8192
    leaves.add(memoryview(bytes(leaf - 8192)), leaf)
    assert kernels.open_bytes() - before < 63 * 8192 + leaf // 8192 * 32 + 8192
    leaves.add(memoryview(bytes(100)), 5 * leaf + 4000)
    del leaves
    assert kernels.open_bytes() == before


@compiled
@settings(deadline=None, max_examples=30)
@given(
    rows=st.integers(1, 40),
    layers=st.integers(1, 4),
    width=st.integers(1, 5000),
    share=st.integers(1, 5),
    seed=st.integers(0, 99),
)
def test_columns_of_layers_are_runs(rows, layers, width, share, seed):
    cases.check_runs(rows, layers, width, -(-width // share), seed)


@compiled
def test_a_byte_that_is_missing_completes_no_leaf():
    leaves = kernels.OpenLeaves(3 * cases.KIB)
    assert leaves.add(memoryview(bytes(1500)), 0) == []
    assert leaves.add(memoryview(bytes(1571)), 1501) == []
    assert leaves.add(memoryview(bytes(1499)), 0) == [], "what has come already does not count again"
    assert leaves.add(memoryview(bytes(1)), 1500) == [(0, cases.expected(bytes(3 * cases.KIB))[0])]


@compiled
def test_a_run_outside_of_the_tensor_is_refused():
    leaves = kernels.OpenLeaves(5000)
    for offset, count, step in ((4001, 1, 0), (0, 3, 2001), (1 << 63, 1, 0), (0, 2, 1 << 63)):
        with pytest.raises(AssertionError, match="outside"):
            leaves.add(memoryview(bytes(3000)), offset, length=1000, count=count, apart=1000, step=step)
    assert leaves.add(memoryview(bytes(5000)), 0) == [(0, cases.expected(bytes(5000))[0])]


@compiled
@pytest.mark.parametrize("word", cases.WORDS)
@pytest.mark.parametrize("shape", cases.SHAPES)
def test_axes_are_permuted_as_numpy_does(word, shape):
    cases.check_permute(word, shape, seed=1)


@compiled
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("word", ["u2", "u4"])
@pytest.mark.parametrize(("rows", "columns", "block", "first"), cases.CODES)
def test_codes_are_looked_up_in_the_tables_of_their_blocks(rows, columns, block, first, word, bits):
    cases.check_look_up(rows, columns, block, first, word, bits)


@compiled
def test_the_payload_of_nan_is_kept():
    words = np.array([[0x7F80_0001, 0xFFC0_1234], [0x7FFF_FFFF, 0x8000_0000]], "u4")
    out = np.empty((2, 2), "f4")
    assert kernels.permute(words.view("f4").T, out)
    assert (out.view("u4") == words.T).all()


def test_elements_that_no_kernel_has_are_left_to_numpy():
    assert not kernels.permute(np.zeros((2, 2), "c16"), np.zeros((2, 2), "c16"))


GRIDS = [
    ((512, 8, 1024), (512, 1, 1024)),
    ((300, 7, 2003), (100, 1, 777)),
    ((64, 16, 2048), (64, 4, 1024)),
    ((3000, 2048), (700, 1024)),
    ((6, 5, 4096), (4, 2, 2048)),
]


@compiled
@pytest.mark.parametrize(("shape", "grid"), GRIDS)
@pytest.mark.parametrize("dtype", ["uint8", "bfloat16", "float32", "float64"])
def test_the_boxes_of_a_grid_give_the_leaves_of_the_tensor(shape, grid, dtype):
    spec = TensorSpec(("t",), shape, dtype)
    array = np.frombuffer(cases.random_bytes(spec.nbytes, 5), f"u{spec.nbytes // spec.size}").reshape(shape)
    hasher = LeafHasher(spec, (BLAKE3,))
    boxes = (
        (cell, np.ascontiguousarray(array[cell]).reshape(-1).view("u1").data)
        for cell in cells(spec.whole, grid)
    )
    results = [hasher.update_box(cell, data) for cell, data in reversed([*boxes])]
    taken = all(results)
    assert taken == hasher.done(), "what is not hashed is said"
    if taken:
        assert list(hasher.hashes(BLAKE3)) == cases.expected(array.tobytes())
    else:
        assert grid[-1] * spec.nbytes // spec.size < cases.KIB or grid == (4, 2, 2048), "runs are long enough"


def test_boxes_are_not_hashed_where_leaves_need_their_order(monkeypatch):
    spec = TensorSpec(("t",), (4, 4096), "uint8")
    box, data = (slice(0, 4), slice(0, 2048)), memoryview(bytes(8192))
    assert not LeafHasher(spec, ALGORITHMS).update_box(box, data)
    monkeypatch.setattr("wherry.kernels.load", lambda: None)
    assert not LeafHasher(spec, (BLAKE3,)).update_box(box, data)


def test_without_kernels_a_conversion_gives_the_same_digests(tmp_path, monkeypatch):
    from tests.support.oracles import judge

    source = judge.source("llama")
    first = wherry.convert(source, tmp_path / "a", to="maxtext", lineage=False)
    monkeypatch.setattr("wherry.kernels.load", lambda: None)
    second = wherry.convert(source, tmp_path / "b", to="maxtext", lineage=False)
    assert first.target.weights_digest == second.target.weights_digest
    assert first.source.weights_digest == second.source.weights_digest


@compiled
def test_a_compiler_that_fails_leaves_numpy(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CC", "false")
    assert compile_library(target=tmp_path / "kernels-0.so") is None
    assert "numpy is used instead" in capsys.readouterr().err
    monkeypatch.setenv("CC", str(tmp_path / "absent"))
    assert compile_library(target=tmp_path / "kernels-0.so") is None
    assert not list(tmp_path.iterdir())


@compiled
@pytest.mark.full
@pytest.mark.parametrize("has_compiler", [True, False])
def test_a_wheel_has_the_library_where_a_compiler_is(tmp_path, has_compiler):
    source = tmp_path / "source"
    names = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    for name in filter(None, names.split("\0")):
        if not name.startswith(("tests/", "docs/")):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name, follow_symlinks=False)
    variables = dict(os.environ) if has_compiler else {**os.environ, "CC": "absent-compiler"}
    command = [
        sys.executable,
        "-m",
        "build",
        "--no-isolation",
        "--wheel",
        "--outdir",
        str(tmp_path),
        str(source),
    ]
    done = subprocess.run(command, env=variables, check=False, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    held = [name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("wherry/kernels/")]
    assert any(name.endswith("tree_hash.c") for name in held)
    assert (f"wherry/kernels/{library_file().name}" in held) == has_compiler
    assert wheel.name.endswith("-py3-none-any.whl") != has_compiler


@compiled
@pytest.mark.skipif(shutil.which("objdump") is None, reason="no objdump")
def test_the_tag_of_a_wheel_states_what_the_library_needs(tmp_path):
    """The judge is objdump, and pip's rules of what this Python installs."""
    printed = subprocess.run(
        ["objdump", "-p", library_file()], check=True, capture_output=True, text=True
    ).stdout
    assert set(re.findall(r"NEEDED +(\S+)", printed)) == {"libc.so.6"}
    needed = max(tuple(map(int, found)) for found in re.findall(r"GLIBC_(\d+)\.(\d+)", printed))
    here, machine = set(platform_tags()), platform.machine()
    tag = wheel_tag(library_file(), here)
    glibc = tuple(map(int, re.fullmatch(rf"py3-none-manylinux_(\d+)_(\d+)_{machine}", tag).groups()))
    assert glibc == max(needed, (2, 17))
    assert tag.removeprefix("py3-none-") in here
    assert wheel_tag(library_file()) == f"py3-none-linux_{machine}", "a Python that takes no manylinux wheels"
    newer = tmp_path / "newer.so"
    newer.write_bytes(library_file().read_bytes() + b"\0GLIBC_2.999\0")
    assert wheel_tag(newer, {*here, f"manylinux_2_999_{machine}"}) == f"py3-none-manylinux_2_999_{machine}"
    assert wheel_tag(newer, here) == f"py3-none-linux_{machine}"


@compiled
@pytest.mark.parametrize(("rows", "columns", "width", "room"), cases.GATHERED)
def test_rows_of_a_file_are_gathered(rows, columns, width, room):
    cases.check_gather(rows, columns, width, room, seed=rows)


@compiled
def test_random_calls_are_right_or_refused():
    fuzz(100, 1)


@compiled
@pytest.mark.full
@pytest.mark.timeout(600)
def test_address_and_undefined_behaviour_sanitizers_find_nothing(tmp_path):
    """In the cases of `tests.support.kernels`, and in random calls of a seed that is the day's."""
    runtime = subprocess.run(
        ["cc", "-print-file-name=libasan.so"], check=True, capture_output=True, text=True
    )
    if not Path(runtime.stdout.strip()).is_absolute():
        pytest.skip("no address sanitizer")
    shutil.copytree(FOLDER, tmp_path / "kernels", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    library = tmp_path / library_file().name
    flags = ("-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    assert compile_library(*flags, target=library) == library
    script = (
        "from pathlib import Path; import wherry.kernels as k; "
        f"k.library_file = lambda: Path({str(library)!r}); "
        "from tests.support.kernels import check_all; check_all(); "
        f"from tests.support.fuzz_kernels import fuzz; fuzz(3000, {datetime.now(UTC).toordinal()}); print('right')"
    )
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "ASAN_OPTIONS": "detect_leaks=0"}
    preload = f"LD_PRELOAD={runtime.stdout.strip()}"
    command = ["prlimit", "--data=unlimited", "--as=unlimited", "env", preload, sys.executable, "-c", script]
    done = subprocess.run(command, env=variables, check=False, capture_output=True, text=True)
    assert done.stdout == "right\n", done.stdout + done.stderr[-3000:]
