"""The command line: cheap to start, says what the library says, documented word for word."""

import json
import os
import re
import resource
import subprocess
import sys

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import save_file

import wherry as library
from tests.support.readme import EVERYTHING, PAGES, TEXTS
from wherry.cli import cli, results
from wherry.errors import WherryError
from wherry.store import device
from wherry.store.device import DeviceRates


def wherry(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "wherry.cli", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def model(tmp_path):
    """A Hugging Face folder."""
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"w": np.ones((3, 4), dtype="f4")}, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["convert", "--help"]])
def test_help_and_version_cost_little(arguments):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    for _ in range(3):
        assert wherry(*arguments).returncode == 0
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / 3
    assert spent < 0.3, f"{spent:.2f} s of CPU"


# What takes long to import, and none of these commands uses. Times depend on the machine, what is loaded does not.
HEAVY = (
    "prefect mlflow torch jax orbax flax transformers tensorstore sqlalchemy pydantic fsspec rich yaml asyncio ssl"
    " http.client email urllib.request importlib.metadata numpy"
)
UNUSED = {
    "--help": "sqlite3 ctypes hashlib tomllib difflib wherry.cli.commands wherry.core.request wherry.formats",
    "detect": "sqlite3 tomllib difflib wherry.cli.audit wherry.cli.models wherry.config.config wherry.converter"
    " wherry.ledger.database wherry.target.files wherry.workers",
    "convert": "tomllib difflib wherry.config.config wherry.workers.job wherry.store.hub wherry.store.remote_store"
    " wherry.target.object_staging wherry.target.clean wherry.layout.tree_reading wherry.families",
}
MOST = {"--help": 145, "detect": 265, "convert": 370}  # modules, of which Python itself has 30


@pytest.mark.parametrize("command", UNUSED)
def test_a_command_imports_what_it_uses(tmp_path, command):
    source = tmp_path / "a.safetensors"
    save_file({f"layer.{number}.w": np.eye(3, number + 1, dtype="f4") for number in range(4)}, source)
    words = {
        "--help": ["--help"],
        "detect": ["detect", source],
        "convert": ["convert", source, tmp_path / "out", "--to", "dcp"],
    }[command]
    code = """
import atexit, sys
atexit.register(lambda: print(*sys.modules, file=sys.stderr))
from wherry.__main__ import main
main()
"""
    command_line = [sys.executable, "-c", code, *words]
    environment = {**os.environ, "WHERRY_HOME": str(tmp_path / "home")}
    done = subprocess.run(command_line, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    loaded = done.stderr.splitlines()[-1].split()
    assert "click" in loaded, "the check itself must see what is loaded"
    assert sorted({*HEAVY.split(), *UNUSED[command].split()} & set(loaded)) == []
    assert len(loaded) <= MOST[command]


@pytest.mark.parametrize("command", ["import wherry", "import wherry.cli", "convert"])
def test_neither_prefect_nor_mlflow_nor_torch_nor_jax_is_imported(model, tmp_path, command):
    code = command
    if command == "convert":
        code = f"import wherry; wherry.convert({str(model)!r}, {str(tmp_path / 'out')!r}, to='orbax')"
    heavy = ("prefect", "mlflow", "torch", "jax", "orbax", "flax", "transformers", "sqlalchemy", "pydantic")
    check = f"{code}; import sys; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_verb_speaks_json(model, tmp_path):
    out = tmp_path / "out"
    plan = json.loads(wherry("convert", model, out, "--to", "orbax", "--dry-run", "--json").stdout)
    assert not out.exists()
    again = json.loads(wherry("plan", model, out, "--to", "orbax", "--json").stdout)
    assert plan["space"].pop("free") > 0
    assert again["space"].pop("free") > 0  # others write to the disk meanwhile
    assert again == plan
    receipt = json.loads(wherry("convert", model, out, "--to", "orbax", "--json").stdout)
    assert receipt["plan_digest"] == plan["digest"]
    assert receipt["lineage"] == "recorded"
    assert json.loads(wherry("convert", model, out, "--to", "orbax", "--json").stdout)["already"]
    detection = json.loads(wherry("detect", out, "--json").stdout)
    assert set(detection) == {
        "uri", "format", "also", "format_version", "writer", "step", "kind", "family", "verdict", "reason", "evidence",
        "cure",
    }  # fmt: skip
    assert {"file", "seen"} == set(detection["evidence"][0])
    verification = json.loads(wherry("verify", out, "--level", "digest", "--json").stdout)
    assert set(verification) == {
        "uri", "level", "verdict", "ok", "tensors", "seconds", "bytes", "ledger", "recorded", "checkpoint_digest",
        "weights_digest",
    }  # fmt: skip
    assert verification["tensors"] == {"checked": 1, "failed": []}
    inspection = json.loads(wherry("inspect", out, "--sha256", "--json").stdout)
    assert inspection["tensors"][0]["path"] == "w"
    assert len(inspection["tensors"][0]["sha256"]) == 64
    found = [json.loads(line) for line in wherry("discover", tmp_path, "--json").stdout.splitlines()]
    assert {one["uri"] for one in found} == {str(model), str(out)}
    lineage = json.loads(wherry("lineage", "show", out, "--json").stdout)
    assert receipt["source"]["checkpoint_digest"] in json.dumps(lineage)
    assert {row["name"] for row in json.loads(wherry("formats", "--json").stdout)} >= {"orbax", "huggingface"}
    assert json.loads(wherry("formats", "orbax", "--json").stdout)["options"]


def test_every_verb_speaks_to_people(model, tmp_path):
    out = tmp_path / "out"
    said = {
        ("plan", model, out, "--to", "orbax"): "peak memory",
        ("convert", model, out, "--to", "orbax"): "every byte read back",
        ("detect", out): "verdict:",
        ("inspect", out): "3 x 4",
        ("verify", out, "--level", "digest"): "ok: 1 tensor",
        ("discover", tmp_path): "orbax",
        ("lineage", "show", out): str(model),
        ("formats",): "huggingface",
        ("formats", "orbax"): "--set",
        ("clean", tmp_path): "",
    }
    for arguments, words in said.items():
        done = wherry(*arguments)
        assert done.returncode == 0, done.stderr
        assert words in done.stdout
        assert "Traceback" not in done.stderr


def commands(group, prefix=()):
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*prefix, name))
        else:
            yield (*prefix, name)


def shown(*words):
    runner = CliRunner()
    return runner.invoke(cli, [*words, "--help"], prog_name="wherry", terminal_width=100).output.strip()


def test_a_conversion_prints_its_distance_to_the_device(model, tmp_path, monkeypatch):
    """The bytes of its files by the rates that were measured; what is resumed or short is compared with nothing."""
    measured = []

    def device_rates(folder):
        measured.append(folder)
        return DeviceRates(write=1e3, read=2e3)

    monkeypatch.setattr(device, "device_rates", device_rates)

    def bytes_row(target, *options):
        done = CliRunner().invoke(
            cli, ["convert", str(model), str(target), "--to", "dcp", "--family", "none", *options]
        )
        assert done.exit_code == 0, done.output
        [row] = re.findall(r"^ *bytes:? +(.*)$", done.output, re.MULTILINE)
        return row

    assert bytes_row(tmp_path / "short").endswith("B/s")
    assert measured == []
    monkeypatch.setattr(results, "_LEAST_SECONDS", 0)
    for name, options, passes in [("read", [], 1 + 1 / 2), ("unread", ["--verify", "none"], 1)]:
        row = bytes_row(tmp_path / name, *options)
        nbytes = sum(file.stat().st_size for file in (tmp_path / name).iterdir())
        [seconds] = re.findall(r" in ([0-9.]+) m?s", row)
        assert measured.pop() == tmp_path
        found = float(re.search(r", ([0-9.]+)× the device's time$", row)[1])
        unit = 1e-3 if " ms" in row else 1
        assert found == pytest.approx(float(seconds) * unit / (passes * nbytes / 1e3), abs=0.06), row


def test_help_does_not_depend_on_earlier_calls():
    for words in commands(cli):
        command = cli
        for word in words:
            command = command.commands[word]
        assert "-h, --help" in CliRunner().invoke(command, ["--help"]).output, words
        assert "-h, --help" in shown(*words)


def test_the_docs_show_the_help_as_it_is():
    blocks = dict(re.findall(r"```console\n\$ wherry ([^\n]*?)--help\n(.*?)```", EVERYTHING, re.DOTALL))
    assert "" in blocks, "the docs must show `wherry --help`"
    assert {" ".join((*words, "")) for words in commands(cli)} <= set(blocks)
    for words, text in blocks.items():
        assert text.strip() == shown(*words.split())


def test_the_docs_name_every_command_and_exit_code():
    text = "\n".join(text for name, text in TEXTS.items() if name != "docs/reference/commands.md")
    for words in commands(cli):
        assert f"wherry {' '.join(words)}" in text, words
    codes = {cls.exit_code for cls in all_errors(WherryError)} - {1}
    for code in sorted({0, *codes}):
        assert re.search(rf"^\| {code} \|", text, re.MULTILINE), code


def all_errors(cls):
    return [cls, *(below for child in cls.__subclasses__() for below in all_errors(child))]


def test_the_docs_list_every_format_with_what_works():
    from wherry.formats.registry import formats

    text = PAGES["reference/formats"]
    for name, row in formats().items():
        works = f"{'yes' if row.readable else 'refused'} | {'yes' if row.is_written else 'no'}"
        assert re.search(rf"^\| `{re.escape(name)}` \|.*\| {re.escape(works)} \|", text, re.MULTILINE), name


def test_version_is_the_packages():
    from importlib.metadata import version

    assert wherry("--version").stdout.strip() == f"wherry, version {version('wherry')}"
    assert library.__version__ == version("wherry")
