"""What README and `docs/` show is run word for word, in order, and the result is read by libraries that are not ours.

What they say of formats, options and commands is compared with the code; what they say of errors is in
test_troubleshooting.py, of pairs of formats in test_pairs.py.
"""

import json
import os
import pkgutil
import re
import shlex
import shutil
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.support.families import llama
from tests.support.formats import CORPUS, place
from tests.support.infra import load
from tests.support.readme import EVERYTHING, PAGES, README, blocks, code, section
from wherry.core.request import SourceRequest
from wherry.formats.registry import formats
from wherry.layout.mapping import TREE_OPTIONS
from wherry.transform.settings import layout_options

TENSORS = {
    "model.embed_tokens.weight": np.arange(320, dtype="f4").reshape(20, 16),
    "model.norm.weight": np.ones(16, dtype="f4"),
}


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """A folder with the model that README talks of, as the working directory."""
    (tmp_path / "llama").mkdir()
    save_file(TENSORS, tmp_path / "llama" / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "llama" / "config.json").write_text("{}")
    (tmp_path / "checkpoints" / "run").mkdir(parents=True)
    save_file(TENSORS, tmp_path / "checkpoints" / "run" / "model.safetensors", metadata={"format": "pt"})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    return tmp_path


def test_the_commands_and_the_library_example(workplace):
    ten, also = code(section("Use"), "sh")[0], blocks("README", "sh")[0]
    assert len({line.split()[1] for line in ten.splitlines()}) == len(ten.splitlines()) == 10
    for line in (*ten.splitlines(), *also.splitlines()):
        words = shlex.split(line.partition("#")[0].replace("/checkpoints", "checkpoints"))
        done = subprocess.run(
            [sys.executable, "-m", "wherry.cli", *words[1:]], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        assert done.stdout or words[1] == "clean", line
    done = subprocess.run(
        [sys.executable, "-c", code(section("Use"), "python")[0]], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert sorted(os.listdir(workplace)) == ["a", "again", "b", "checkpoints", "llama", "mlflow.db", "out"]
    import orbax.checkpoint as ocp

    for folder in ("out", "a", "again"):
        restored = ocp.StandardCheckpointer().restore(workplace / folder)
        for name, array in TENSORS.items():
            assert np.asarray(restored[name]).tobytes() == array.tobytes()
    for name, array in load_file(workplace / "b" / "model.safetensors").items():
        assert array.tobytes() == TENSORS[name].tobytes()


def test_the_first_screen_of_the_readme():
    assert README[: README.index("\n|")].count("\n") < 60


def test_the_round_trip_that_is_shown(tmp_path, monkeypatch):
    """Every line that is shown is printed, in this order; `…` stands for others."""
    load("released", monkeypatch).make_llama(tmp_path / "llama")
    (tmp_path / "llama" / "tokenizer.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    [session] = code(section("A round trip"), "console")
    for part in session.removeprefix("$ ").split("\n$ "):
        command, *lines = part.splitlines()
        done = wherry(*shlex.split(command)[1:])
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        pattern = "\n".join(re.escape(line).replace("…", "[^\0]*?") for line in lines)
        assert re.fullmatch(pattern + "\n", done.stdout.replace(str(tmp_path), "/data")), done.stdout
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("llama", "again"))
    assert before.keys() == after.keys()
    assert all(before[name].tobytes() == after[name].tobytes() for name in before)


def shown(language, number):
    return blocks("between-systems", language)[number]


def carried_out(commands):
    """What the commands printed."""
    printed = []
    for line in commands.splitlines():
        done = wherry(*shlex.split(line, comments=True)[1:])
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        printed.append(done.stdout)
    return printed


def model(folder, **renamed):
    """A Hugging Face Llama, with some of its tensors under other names."""
    begun, _family, config = llama()
    folder.mkdir()
    tensors = {renamed.get(path[0].split(".")[0], path[0]): array for path, array in begun.tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return tensors


def test_the_examples_between_systems(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tensors = model(tmp_path / "hf")
    printed = carried_out(shown("sh", 0))
    assert "maxtext scan_layers=false" in printed[1]
    assert "from_pretrained" in printed[5]
    assert re.search(r"changed as planned: by at most .* of their bound", printed[-2])
    again = load_file(tmp_path / "again" / "model.safetensors")
    for name, array in tensors.items():
        np.testing.assert_allclose(again[name], array, rtol=1e-6)
    command, *lines = shown("console", 0).splitlines()
    assert set(lines) <= set(wherry(*command.split()[2:]).stdout.splitlines())


def test_the_window_that_maxtext_has_not(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model(tmp_path / "mistral")
    said = json.loads((tmp_path / "mistral/config.json").read_text())
    said |= {"model_type": "mistral", "sliding_window": 16}
    (tmp_path / "mistral/config.json").write_text(json.dumps(said))
    command, line = shown("console", 1).splitlines()
    refused = wherry(*command.split()[2:])
    assert (refused.returncode, refused.stderr.splitlines()[0]) == (7, line)
    carried_out(shown("sh", 1))


def test_the_family_file_that_is_shown(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model(tmp_path / "own", lm_head="output.weight")
    commands = shown("sh", 2)
    file = re.search(r"--family-file (\S+)", commands)[1]
    (tmp_path / file).write_text(shown("toml", 0))
    assert "output.weight  [vocab embed]" in carried_out(commands)[0]


@pytest.mark.skipif(not CORPUS.is_dir(), reason="the corpus is not here; set WHERRY_CORPUS to its folder")
def test_the_examples_of_flax_trees(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(place("flax-linen-boxed-scan"), tmp_path / "boxed")
    shutil.copytree(place("flax-nnx-state"), tmp_path / "nnx")
    (tmp_path / "axes.toml").write_text(shown("toml", 1))
    carried_out(shown("sh", 3))
    from wherry.ledger.resolve import open_checkpoint

    with open_checkpoint(tmp_path / "boxes") as boxes, open_checkpoint(tmp_path / "boxed") as boxed:
        assert boxes.manifest.tensors.keys() == boxed.manifest.tensors.keys()
    with open_checkpoint(tmp_path / "renamed") as renamed, open_checkpoint(tmp_path / "boxed") as boxed:
        one = renamed.read(("model", "layers_1", "wi", "kernel"))
        np.testing.assert_array_equal(one, boxed.read(("params", "layers", "wi", "kernel", "value"))[1])
    with open_checkpoint(tmp_path / "linen") as linen:
        assert ("params", "lin", "kernel") in linen.manifest.tensors


def test_what_the_code_says_of_itself_is_as_it_is_now(monkeypatch):
    docs = load("docs", monkeypatch)
    stale = [str(path) for path, text in docs.pages().items() if docs.rewritten(text) != text]
    assert not stale, "run infra/docs.py"


def test_every_generated_part_stands_in_one_page(monkeypatch):
    marked = re.findall(r"<!-- (\w+):start -->", EVERYTHING)
    by_others = ["attack", "devices", "giants", "pairs", "scale", "scale"]  # one is in README
    assert sorted(marked) == sorted([*load("docs", monkeypatch).GENERATED, *by_others])


def table(marker):
    """Rows of a generated table, each a list of cells."""
    block = EVERYTHING.partition(f"<!-- {marker}:start -->\n")[2].partition(f"<!-- {marker}:end -->")[0]
    lines = [line for line in block.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def wherry(*words):
    return subprocess.run(
        [sys.executable, "-m", "wherry.cli", *words], capture_output=True, text=True, check=False
    )


def test_the_table_of_formats_is_what_wherry_formats_and_the_registry_say():
    listed = {row["name"]: row for row in json.loads(wherry("formats", "--json").stdout)}
    rows = {cells[0].strip("`"): cells[1:] for cells in table("formats")}
    assert list(rows) == list(listed) == list(formats())
    for name, (title, read, written, holds, loaded_by) in rows.items():
        row = listed[name]
        assert (title, read == "yes", written == "yes") == (row["title"], row["read"], row["written"])
        assert loaded_by == (row["loaded_by"] or "–")
        assert (holds == "–") == (not row["written"])


def test_each_format_is_described_once():
    named = [
        name
        for page, text in PAGES.items()
        if page.startswith("systems/")
        for heading in re.findall(r"^# .*?: (`.*)$", text, re.MULTILINE)
        for name in heading.split(", ")
    ]
    assert sorted(named) == sorted(f"`{name}`" for name in formats())


def test_options_that_are_mentioned_exist():
    known = (
        {name for row in formats().values() for name in row.options} | set(TREE_OPTIONS) | layout_options()
    )
    mentioned = set(re.findall(r"--set ([a-z_]+)=", EVERYTHING))
    assert {"split", "join", "for_torch", "resume", "max_shard_size", "zarr"} <= mentioned <= known


def test_names_of_ours_that_are_mentioned_exist():
    dotted = set(re.findall(r"`(wherry\.integrations[\w.]+)", EVERYTHING))
    assert dotted
    for name in dotted:
        pkgutil.resolve_name(name)


@pytest.mark.skipif(not CORPUS.is_dir(), reason="the corpus is not here; set WHERRY_CORPUS to its folder")
def test_the_detection_that_is_shown(tmp_path):
    shown = re.search(r"```console\n\$ wherry detect run\n(.*?)```", PAGES["systems/README"], re.DOTALL)[1]
    shutil.copytree(place("maxtext-gpt3-l3-converted-by-maxtext").parent, tmp_path / "run" / "4000")
    printed = wherry("detect", str(tmp_path / "run")).stdout
    assert printed.replace(str(tmp_path), "/data") == shown


def test_a_format_of_another_package(monkeypatch, tmp_path):
    """The entry point that docs/develop.md names: such a format is detected and listed like ours."""
    from wherry.core.detection import Detection, Evidence
    from wherry.formats import registry
    from wherry.formats.detect import resolve_source
    from wherry.formats.format import Format, Holds

    def detect(glimpse):
        seen = Evidence(glimpse.location.name, "its first bytes")
        return Detection(glimpse.location.uri, "acme", evidence=(seen,)) if glimpse.head == b"ACME" else None

    def open_acme(location, detection):
        raise NotImplementedError

    acme = Format("acme", "Acme", detect, open_acme, holds=Holds(frozenset()))
    monkeypatch.setattr(registry, "plug_ins", lambda: [acme])
    registry.formats.cache_clear()
    try:
        (tmp_path / "a").write_bytes(b"ACME")
        assert resolve_source(SourceRequest(str(tmp_path / "a")))[1].format == "acme"
        assert registry.find_format("acme") is acme
        assert set(formats()) == {"acme", *(cells[0].strip("`") for cells in table("formats"))}
    finally:
        monkeypatch.undo()
        registry.formats.cache_clear()
