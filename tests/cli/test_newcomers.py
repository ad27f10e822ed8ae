"""What people type who see wherry for the first time: each mistake ends with its exit code and a cure that leads on."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass

import pytest
from click.testing import CliRunner

from tests.support.command import small
from wherry.cli import cli, main
from wherry.formats.registry import LIBRARIES, formats


@dataclass(frozen=True)
class Mistake:
    """One command that does not work.

    Attributes:
        typed: the command; HOME stands for a folder with checkpoints.
        code: its exit code.
        says: a part of the error.
        cure: a part of the cure.
        leads: a command that follows the cure, and then works.
    """

    typed: str
    code: int
    says: str
    cure: str
    leads: str = ""


# HOME holds one.safetensors, run/a.safetensors and run/b.safetensors, and model/ in the form of Hugging Face.
MISTAKES = [
    Mistake("convrt a b", 2, "no such command 'convrt'", "wherry --help", "--help"),
    Mistake("help convrt", 2, "no such command: wherry convrt", "did you mean convert?", "help convert"),
    Mistake("help ledger recrd", 2, "no such command: wherry ledger recrd", "did you mean record?"),
    Mistake("convert HOME/one.safetensors", 2, "missing", "wherry convert --help", "convert --help"),
    Mistake("convert HOME/one.safetensors HOME/out", 2, "missing option '--to'", "wherry convert --help"),
    Mistake("convert HOME/one.safetensors HOME/out --to pytorch", 2, "unknown format 'pytorch'",
            "did you mean torch-zip or dcp?", "convert HOME/one.safetensors HOME/out --to torch-zip"),
    Mistake("convert HOME/one.safetensors HOME/out --to jax", 2, "unknown format 'jax'", "did you mean orbax?",
            "convert HOME/one.safetensors HOME/out --to orbax --dry-run"),
    Mistake("convert HOME/one.safetensors HOME/out --to Orbx", 2, "unknown format 'Orbx'", "did you mean orbax"),
    Mistake("convert HOME/one.safetensors HOME/out --to gguf", 4, "writing gguf is not supported",
            "choose one of: dcp"),
    Mistake("plan HOME/one.safetensors HOME/out --to tensorflow", 2, "unknown format", "choose one of: dcp"),
    Mistake("convert HOME/one.safetensors HOME/out --to dcp --set shard_sise=1GB", 2, "unknown option 'shard_sise'",
            "did you mean shard_size?", "convert HOME/one.safetensors HOME/out --to dcp --set shard_size=1GB"),
    Mistake("convert HOME/one.safetensors HOME/out --to dcp --memory 2", 2, "a memory budget of 2 bytes is too small",
            "write a unit, for example --memory 2GiB", "convert HOME/one.safetensors HOME/out --to dcp --memory 2GiB"),
    Mistake("verify HOME/one.safetensors --memory 5", 2, "budget of 5 bytes", "--memory 5GiB",
            "verify HOME/one.safetensors --memory 5GiB"),
    Mistake("verify HOME/one.safetensors --level digests", 2, "'digests' is not one of", "wherry verify --help"),
    Mistake("convert HOME/one.safetensors HOME/out --to dcp --ignore other", 2, "unknown rule other",
            "did you mean others?"),
    Mistake("detect HOME/one.safetensor", 3, "file or folder not found", "wherry discover", "discover HOME"),
    Mistake("detect google/t5-small", 3, "file or folder not found", "hf://google/t5-small"),
    Mistake("detect file://tmp/x", 2, "names the host 'tmp'", "file:///tmp/x"),
    Mistake("detect file://HOME/one.safetensors --from orbx", 2, "unknown format 'orbx'", "did you mean orbax",
            "detect file://HOME/one.safetensors --from safetensors"),
    Mistake("verify HOME/nested", 4, "not a checkpoint of any known format",
            "pass the checkpoint in it: HOME/nested/llama", "verify HOME/nested/llama"),
    Mistake("verify HOME/run", 4, "not a checkpoint", "wherry discover", "discover HOME/run"),
    Mistake("verify HOME/nested/llama/config.json", 4, "not a checkpoint", "pass its folder: HOME/nested/llama",
            "verify HOME/nested/llama"),
    Mistake("inspect HOME/several", 4, "not a checkpoint", "(one/, two/); `wherry discover HOME/several` lists all",
            "discover HOME/several"),
    Mistake("formats torch-dpc", 2, "unknown format 'torch-dpc'", "did you mean", "formats dcp"),
    Mistake("layouts lama", 2, "unknown family 'lama'", "did you mean llama?", "layouts llama"),
    Mistake("routes check", 3, "no configuration to check", "--config FILE", "routes check --config HOME/wherry.toml"),
    Mistake("nightly lama --config HOME/wherry.toml", 3, "unknown route 'lama'", "did you mean llama?"),
    Mistake("routes check --config HOME/misspelt.toml", 2, "routes.llama.retention.keep_lats: unknown field",
            "did you mean keep_last or keep_days?"),
    Mistake("routes check --config HOME/unrelated.toml", 2, "routes.llama.colour: unknown field",
            "remove 'colour', or move it; infra/wherry.toml lists all fields"),
    Mistake("detect s4://bucket/x", 2, "unknown storage protocol s4://", "gs, s3"),
]  # fmt: skip

CONFIG = """[routes.llama]
root = "HOME/nested"
targets = [{ format = "orbax", uri = "HOME/converted/{run}/{step|0}/{name}" }]
"""


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A folder of checkpoints, which is also the working directory of nobody."""
    small(tmp_path / "one.safetensors")
    for name in ("a", "b"):
        small(tmp_path / "run" / f"{name}.safetensors")
    for place in ("nested/llama", "several/one", "several/two"):
        small(tmp_path / place / "model.safetensors")
        (tmp_path / place / "config.json").write_text(json.dumps({"model_type": "strange"}))
    (tmp_path / "wherry.toml").write_text(CONFIG.replace("HOME", str(tmp_path)))
    for name, lines in (("misspelt", "retention.keep_lats = 2"), ("unrelated", 'colour = "red"')):
        (tmp_path / f"{name}.toml").write_text(f"{(tmp_path / 'wherry.toml').read_text()}{lines}\n")
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.chdir(empty)
    monkeypatch.delenv("WHERRY_CONFIG", raising=False)
    return tmp_path


def typed(line, home, capfd):
    """What a command prints, and its exit code."""
    capfd.readouterr()
    with pytest.raises(SystemExit) as ended:
        main(shlex.split(line.replace("HOME", str(home))))
    printed = capfd.readouterr()
    return ended.value.code or 0, (printed.out + printed.err).replace(str(home), "HOME")


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.typed)
def test_a_mistake_ends_with_a_cure_that_leads_on(mistake, home, capfd):
    before = sorted(path.name for path in home.iterdir())
    code, text = typed(mistake.typed, home, capfd)
    error, cure = re.search(r"^error: (.*)\ncure: (.*)$", text, re.MULTILINE).groups()
    assert (code, mistake.says in error, mistake.cure in cure) == (mistake.code, True, True), text
    assert sorted(path.name for path in home.iterdir()) == before
    if mistake.leads:
        code, text = typed(mistake.leads, home, capfd)
        assert code == 0, text


def test_the_names_of_libraries_lead_to_formats_that_exist():
    assert {name for names in LIBRARIES.values() for name in names} <= set(formats())
    aliases = {alias for row in formats().values() for alias in (row.name, *row.aliases)}
    assert not aliases & set(LIBRARIES), "an alias would never be looked up here"


def test_bare_wherry_and_bare_groups_print_their_help(home, capfd):
    for line in ("", "routes", "ledger"):
        code, text = typed(line, home, capfd)
        assert (code, text.startswith(f"Usage: wherry {line}".strip())) == (0, True)


def test_help_of_a_command_is_what_its_option_prints(home, capfd):
    assert typed("help ledger record", home, capfd) == typed("ledger record --help", home, capfd)


def test_the_version_has_a_short_option(home, capfd):
    assert typed("-V", home, capfd) == typed("--version", home, capfd)


def test_the_table_of_formats_fits_80_columns(home, capfd, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    _, text = typed("formats", home, capfd)
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 80
    listed = re.findall(r"^ ([a-z0-9-]+) +\S", text, re.MULTILINE)
    assert {*listed, "format"} == {*formats(), "format"}


def test_clean_says_that_nothing_was_left_behind(home, capfd):
    assert typed("clean HOME", home, capfd) == (0, "nothing to clean\n")


def test_detect_says_where_the_checkpoint_is(home, capfd):
    code, text = typed("detect HOME/nested", home, capfd)
    assert (code, "pass the checkpoint in it: HOME/nested/llama" in text) == (4, True)


@pytest.mark.parametrize(
    ("words", "expected"),
    [("convert a b --to orb", "orbax"), ("detect a --from safe", "safetensors"),
     ("plan a b --to d --family gem", "gemma2"), ("lin", "lineage")],
)  # fmt: skip
def test_a_shell_completes_commands_formats_and_families(words, expected):
    variables = {
        "_WHERRY_COMPLETE": "bash_complete",
        "COMP_WORDS": f"wherry {words}",
        "COMP_CWORD": str(len(words.split())),
    }
    found = CliRunner().invoke(cli, env=variables, prog_name="wherry").output.split()
    assert f"plain,{expected}" in found


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script_that_calls_wherry(shell, home, capfd):
    code, text = typed(f"completion {shell}", home, capfd)
    assert (code, "_WHERRY_COMPLETE" in text) == (0, True)
