"""The five tasks of a new contributor, carried out."""

from __future__ import annotations

import filecmp
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.support.families import llama
from tests.support.readme import CONTRIBUTING, ROOT, section
from tests.support.stranger import examples
from wherry.formats.registry import find_format
from wherry.store.local_store import locate
from wherry.testing import samples
from wherry.workers.records import job_records

pytest_plugins = ["tests.support.stranger", "tests.support.bucket_fixtures"]

GENERATED = {
    "docs/proof.md", "docs/systems/README.md", "wherry/formats/index.json",
    *(f"docs/reference/{name}" for name in ("formats.md", "errors.md")),
    *(f"docs/reference/schemas/{name}-spec.json" for name in ("convert", "export", "nightly")),
}  # fmt: skip
TENSORS = {"w": np.arange(12, dtype="f4").reshape(3, 4), "größe": np.ones(5, dtype="i4")}


def tasks():
    """Task → the files that CONTRIBUTING names for it."""
    rows = re.findall(
        r"^\| \[(.*?)\]\(.*?\) \| (.*?) \|", section("Architecture", CONTRIBUTING), re.MULTILINE
    )
    return {task: re.findall(r"`(.*?)`", files) for task, files in rows}


def test_a_task_needs_three_files_at_most():
    assert list(tasks()) == [
        "a container format", "a model family", "a training system", "a store", "an option of `convert`",
    ]  # fmt: skip
    assert all(1 <= len(files) <= 3 for files in tasks().values())


def changed(tree):
    """The files of the copy that are new or differ."""
    found = [path for path in tree.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    names = {path.relative_to(tree).as_posix() for path in found}
    return {
        name for name in names
        if not (ROOT / name).exists() or not filecmp.cmp(tree / name, ROOT / name, shallow=False)
    }  # fmt: skip


def allowed(task, name):
    return {file.replace("NAME", name) for file in tasks()[task]}


def python(tree, *arguments, cwd=None):
    """What Python printed, with the copy's wherry."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)], cwd=cwd or tree, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(tree)},
    )  # fmt: skip
    assert done.returncode == 0, f"{arguments}\n{done.stdout}{done.stderr}"
    return done.stdout


def wherry(tree, line, cwd):
    return python(tree, "-m", "wherry.cli", *line.split(), cwd=cwd)


def test_the_copy_is_what_runs(tree):
    assert python(tree, "-c", "import wherry; print(wherry.__file__)").strip() == str(
        tree / "wherry/__init__.py"
    )
    assert changed(tree) == set()


# ---- a container format


def test_a_container_format(tree, tmp_path):
    row, suites = examples("Add a format", "python")
    assert row.count("\n") <= 60, "two functions are a format"
    (tree / "integrations" / "formats" / "tray.py").write_text(row)
    page = tree / "docs" / "systems" / "tray.md"
    page.write_text("# Tray: `tray`\n\n- **Recognised by**: its first bytes.\n")
    python(tree, "infra/docs.py")
    assert changed(tree) - GENERATED == allowed("a container format", "tray")
    assert re.search(
        r"^\| `tray` \| Tray file \| yes \| yes \|",
        (tree / "docs/reference/formats.md").read_text(),
        re.MULTILINE,
    )

    (tmp_path / "made").mkdir()
    save_file(TENSORS, tmp_path / "model.safetensors")
    wherry(tree, "convert model.safetensors made/out.tray --to tray", tmp_path)
    assert "out.tray" in wherry(tree, "discover made", tmp_path)
    assert json.loads(wherry(tree, "detect made/out.tray --json", tmp_path))["format"] == "tray"
    assert wherry(tree, "verify made/out.tray --level digest", tmp_path).startswith("ok: 2 tensors")
    wherry(tree, "convert made/out.tray back.safetensors --to safetensors", tmp_path)
    back = load_file(tmp_path / "back.safetensors")
    assert {name: array.tobytes() for name, array in back.items()} == {
        name: array.tobytes() for name, array in TENSORS.items()
    }
    assert '"tray"' in wherry(tree, "formats --json", tmp_path)
    begun, _family, config = llama()  # a container holds the tree of any system
    (tmp_path / "hf").mkdir()
    arrays = {path[0]: array for path, array in begun.tensors.items()}
    save_file(arrays, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    wherry(tree, "convert hf llama.tray --to tray", tmp_path)
    python(tree, "-c", suites)


def test_a_damaged_file_of_the_new_format_is_refused(tree, tmp_path):
    row, _suites = examples("Add a format", "python")
    (tree / "integrations" / "formats" / "tray.py").write_text(row)
    header = b'[["w", "float32", [2]]]'
    whole = b"TRAY" + len(header).to_bytes(4, "little") + header + bytes(8)
    files = {
        "ok": whole, "incomplete": whole[:-1], "corrupt": whole.replace(b"[2]", b"-2 "), "malformed": whole[:20],
        "long": b"TRAY\xff\xff\xff\x7f", "empty": b"TRAY",
    }  # fmt: skip
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    script = "import sys, wherry; print(*(wherry.detect(name).verdict for name in sys.argv[1:]))"
    verdicts = python(tree, "-c", script, *files, cwd=tmp_path).split()
    assert verdicts == ["ok", "incomplete", "corrupt", "corrupt", "corrupt", "corrupt"]


@pytest.mark.parametrize(
    "dtypes", [{"bfloat16"}, {"float64", "int32"}, {"uint8"}, {"float6_e2m3fn", "int16"}]
)
def test_a_format_of_few_dtypes_has_samples(dtypes):
    """The contract suites ask no format for a dtype that it does not hold."""
    held = frozenset(dtypes)
    row = replace(find_format("npz"), holds=replace(find_format("npz").holds, dtypes=held))
    for made in (samples.sample(row), samples.source(row)):
        assert {spec.dtype for spec in made.manifest.tensors.values()} <= held
        assert made.manifest.nbytes > 1 << 20


# ---- a model family


@pytest.fixture
def granola(tmp_path):
    """A folder with a model of the family that docs/develop.md declares; its tensors."""
    begun, _family, config = llama()
    names = {"lm_head.weight": "output.weight"}
    tensors = {names.get(path[0], path[0]): array for path, array in begun.tensors.items()}
    (tmp_path / "own").mkdir()
    save_file(tensors, tmp_path / "own" / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "own" / "config.json").write_text(json.dumps({**config, "model_type": "granola"}))
    return tensors


def test_a_model_family(tree, tmp_path, granola):
    (declared,) = examples("Add a family", "toml")
    (tree / "wherry" / "families" / "granola.toml").write_text(declared)
    assert changed(tree) == allowed("a model family", "granola")
    assert "output.weight  [vocab embed]" in wherry(tree, "layouts granola", tmp_path)
    assert json.loads(wherry(tree, "detect own --json", tmp_path))["family"] == "granola"
    wherry(tree, "convert own there --to maxtext", tmp_path)
    assert wherry(tree, "verify there --level roundtrip --against own", tmp_path).startswith("ok")
    wherry(tree, "convert there again --to huggingface", tmp_path)
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert again.keys() == granola.keys()
    assert json.loads((tmp_path / "again" / "config.json").read_text())["model_type"] == "granola"


def test_the_same_file_works_without_being_installed(tmp_path, granola):
    (tmp_path / "granola.toml").write_text(examples("Add a family", "toml")[0])
    wherry(ROOT, "convert own there --to maxtext --family-file granola.toml", tmp_path)
    printed = wherry(
        ROOT, "verify there --level roundtrip --against own --family-file granola.toml", tmp_path
    )
    assert printed.startswith("ok")


# ---- a training system


def test_a_training_system(tree, tmp_path):
    """Its format, its column in a family, its page; then a conversion to it and back by the family's layouts."""
    row, _suites = examples("Add a format", "python")
    (column,) = examples("Add a system", "toml")
    named = row.replace("        single_file=True,\n", '        single_file=True,\n        system="tray",\n')
    (tree / "integrations" / "formats" / "tray.py").write_text(named)
    (tree / "wherry" / "families" / "tray.toml").write_text(column)
    (tree / "docs" / "systems" / "tray.md").write_text(
        "# Tray: `tray`\n\n- **Recognised by**: its first bytes.\n"
    )
    assert changed(tree) == allowed("a training system", "tray")

    begun, _family, config = llama()
    (tmp_path / "llama").mkdir()
    save_file({path[0]: one for path, one in begun.tensors.items()}, tmp_path / "llama" / "model.safetensors")
    (tmp_path / "llama" / "config.json").write_text(json.dumps(config))
    wherry(tree, "convert llama llama.tray --to tray --family tray", tmp_path)
    shown = json.loads(wherry(tree, "inspect llama.tray --json", tmp_path))["tensors"]
    assert {"tokens", "0.q", "head"} <= {one["path"] for one in shown}
    assert wherry(tree, "verify llama.tray --level roundtrip --against llama", tmp_path).startswith("ok")
    wherry(tree, "convert llama.tray again --to huggingface", tmp_path)
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert {name: one.tobytes() for name, one in again.items()} == {
        path[0]: one.tobytes() for path, one in begun.tensors.items()
    }


# ---- a store

TOY = """
from fsspec.implementations.memory import MemoryFileSystem


class ToyFileSystem(MemoryFileSystem):
    protocol, store, pseudo_dirs = "toy", {}, [""]
"""
USE_OF_A_STORE = """
import sys, fsspec, wherry
from wherry.errors import MissingExtraError, TargetExistsError

fsspec.register_implementation("toy", "toyfs.ToyFileSystem")
try:
    wherry.open("toy://bucket/out")
except MissingExtraError as error:
    assert error.cure.startswith("add the extra toy: `"), error
else:
    raise AssertionError("the package was not missed")
sys.path.insert(0, sys.argv[1])
for name, to in (("out", "huggingface"), ("out.npz", "npz"), ("out.pt", "torch-zip")):
    uri = f"toy://bucket/{name}"
    wherry.convert("model.safetensors", uri, to=to, family="none")
    assert wherry.detect(uri).format == to
    assert wherry.verify(uri, level="digest").ok
    wherry.convert(uri, f"{name}.back", to="safetensors", verify="digest")
found = {one.uri for one in wherry.discover("toy://bucket")}
assert found == {f"toy://bucket/{name}" for name in ("out", "out.npz", "out.pt")}, found
try:
    wherry.convert("other.safetensors", "toy://bucket/out", to="huggingface", family="none")
except TargetExistsError:
    print("all is well")
"""


def inserted(path, after, text):
    """Put a line behind the one line of a file that begins so."""
    lines = path.read_text().splitlines(keepends=True)
    (at,) = [number for number, line in enumerate(lines) if line.startswith(after)]
    path.write_text("".join([*lines[: at + 1], text, *lines[at + 1 :]]))


def test_a_store(tree, tmp_path):
    (row,) = examples("Add a store", "python")
    inserted(tree / "wherry" / "store" / "store.py", '    "hf": ', row)
    inserted(tree / "pyproject.toml", 'gcs = ["gcsfs', 'toy = ["toyfs>=1"]\n')
    readme = tree / "README.md"
    readme.write_text(readme.read_text().replace("`hub`,", "`hub`, `toy`,"))
    assert changed(tree) == allowed("a store", "toy")

    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "toyfs.py").write_text(TOY)
    save_file(TENSORS, tmp_path / "model.safetensors")
    save_file({"w": np.zeros(3, dtype="f4")}, tmp_path / "other.safetensors")
    script = ["-c", USE_OF_A_STORE, tmp_path / "packages"]
    assert python(tree, *script, cwd=tmp_path).strip() == "all is well"
    for name in ("out", "out.npz", "out.pt"):
        back = load_file(tmp_path / f"{name}.back")
        assert {key: array.tobytes() for key, array in back.items()} == {
            key: array.tobytes() for key, array in TENSORS.items()
        }


# The format of docs/develop.md is written everywhere: what it states of its bytes is all that the engine
# needs.


MB = 1 << 20


@pytest.fixture
def stranger(tree, tmp_path):
    """Runs Python in a folder with a model, where wherry has the format."""
    row, _suites = examples("Add a format", "python")
    (tree / "integrations" / "formats" / "tray.py").write_text(row)
    values = np.random.default_rng(0).standard_normal((12, 1 << 18), "f4")
    save_file({f"layer.{number}": row for number, row in enumerate(values)}, tmp_path / "model.safetensors")

    def start(*words):
        return subprocess.Popen(
            [sys.executable, *words], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": f"{tree}{os.pathsep}{ROOT}"},
        )  # fmt: skip

    return start


@pytest.fixture
def wherry_of_everywhere(stranger):
    """Runs a command to its end."""
    return lambda line: ended(stranger("-m", "wherry.cli", *line.split()))


def ended(process):
    """What a process printed that has succeeded."""
    output, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    return output


@pytest.fixture
def wanted(wherry_of_everywhere, tmp_path):
    """The bytes of the file, as one undisturbed process writes it."""
    wherry_of_everywhere("convert model.safetensors whole.tray --to tray --no-lineage")
    return (tmp_path / "whole.tray").read_bytes()


def test_it_is_written_after_kills(stranger, wherry_of_everywhere, wanted, tmp_path):
    def run(fatal_call):
        target = str(tmp_path / "killed.tray")
        process = stranger("-m", "tests.support.killed", "model.safetensors", target, "tray", str(fatal_call))
        process.communicate(timeout=240)
        return process.returncode

    assert [run(call) for call in (40, 25, 12)] == [-signal.SIGKILL] * 3
    assert not (tmp_path / "killed.tray").exists()
    receipt = json.loads(
        wherry_of_everywhere("convert model.safetensors killed.tray --to tray --no-lineage --json")
    )
    assert receipt["resumed_bytes"] > MB
    assert (tmp_path / "killed.tray").read_bytes() == wanted


def test_three_workers_write_it_of_which_one_is_killed(stranger, wherry_of_everywhere, wanted, tmp_path):
    target = str(tmp_path / "shared.tray")
    split = wherry_of_everywhere(
        "split model.safetensors shared.tray --to tray --no-lineage --unit 3MB --json"
    )
    units = json.loads(split)["units"]
    assert len(units) > 3
    workers = [stranger("-m", "wherry.cli", "work", target)]
    while not job_records(locate(target)).names()[0].startswith("claim"):
        time.sleep(0.005)
    workers[0].send_signal(signal.SIGSTOP)
    workers += [stranger("-m", "wherry.cli", "work", target, "--json") for _ in range(2)]
    time.sleep(1)
    workers[0].kill()
    workers[0].communicate()
    reports = [json.loads(ended(worker)) for worker in workers[1:]]
    assert sum(len(report["made"]) for report in reports) >= len(units) - 1
    wherry_of_everywhere(f"commit {target}")
    assert Path(target).read_bytes() == wanted


@pytest.mark.parametrize("bucket", ["s3"], indirect=True)
def test_it_is_written_to_a_bucket(bucket, wherry_of_everywhere, wanted):
    target = f"{bucket.uri}/out.tray"
    wherry_of_everywhere(f"convert model.safetensors {target} --to tray --no-lineage")
    assert bucket.at("out.tray").read_whole(2 * len(wanted)) == wanted
    assert wherry_of_everywhere(f"verify {target} --level digest").startswith("ok: 12 tensors")
