"""What people type who see wherry for the first time: each mistake ends with its exit code and a cure that leads on.

The commands in a cure are pasted, and must work. Where a cure is no command, the row has one that follows it.
"""

from __future__ import annotations

import json
import re
import shutil
import socket
from contextlib import closing, suppress
from dataclasses import dataclass, field
from itertools import chain

import pytest
from click.testing import CliRunner

import wherry
from tests.support.command import small, typed
from tests.support.tiny_models import save_tiny
from wherry.cli import cli
from wherry.cli.help import SECTIONS, first_sentence
from wherry.formats.registry import LIBRARIES, formats


@dataclass(frozen=True)
class Mistake:
    """One command that does not work.

    Attributes:
        typed: the command; HOME stands for a folder with checkpoints, DIGEST for the digest of one of them.
        code: its exit code.
        says: a part of the error.
        cure: a part of the cure.
        leads: a command that follows the cure, and then works; not needed where the cure has one.
        where: environment variables of the mistake; the cure is to unset them.
    """

    typed: str
    code: int
    says: str
    cure: str
    leads: str = ""
    where: dict[str, str] = field(default_factory=dict)


# HOME holds the checkpoints that `home` makes. Nothing listens on port 9 of this machine.
CONVERT = "convert HOME/one.safetensors HOME/out"
NO_CONFIG, INIT = "no configuration found", "or pass --config FILE; `wherry init` writes one"
MISTAKES = [
    # commands and options
    Mistake("convrt a b", 2, "no such command 'convrt'", "wherry --help"),
    Mistake("--verbos ls", 2, "no such option '--verbos'", "wherry --help"),
    Mistake("--deleted ls", 2, "no such option '--deleted'", "put it after the command: `wherry ls --deleted`", ""),
    Mistake("--level digest verify HOME/one.safetensors", 2, "no such option '--level'",
            "put it after the command: `wherry verify HOME/one.safetensors --level digest`", ""),
    Mistake("--level=digest verify HOME/one.safetensors", 2, "no such option '--level'",
            "put it after the command: `wherry verify HOME/one.safetensors --level digest`", ""),
    Mistake("help convrt", 2, "no such command: wherry convrt", "did you mean convert?", "help convert"),
    Mistake("help ledger recrd", 2, "no such command: wherry ledger recrd", "did you mean record?",
            "help ledger record"),
    Mistake("ledger recrd", 2, "no such command 'recrd'", "wherry ledger --help"),
    Mistake("convert HOME/one.safetensors", 2, "missing argument 'TARGET...'", "wherry convert --help"),
    Mistake("verify HOME/one.safetensors --level digests", 2, "'digests' is not one of", "wherry verify --help"),
    Mistake(f"{CONVERT} --to dcp --memry 1GiB", 2, "no such option '--memry'", "wherry convert --help"),
    Mistake("sign HOME/one.safetensors", 2, "missing option '--key'", "wherry sign --help"),
    Mistake("rewrite HOME/one.safetensors", 2, "missing option '--as'", "wherry rewrite --help"),
    Mistake("completion tcsh", 2, "'tcsh' is not one of", "wherry completion --help"),
    # formats, families, options
    Mistake(f"{CONVERT} --to pytorch", 2, "unknown format 'pytorch'", "did you mean torch-zip or dcp?",
            f"{CONVERT} --to torch-zip"),
    Mistake(f"{CONVERT} --to jax", 2, "unknown format 'jax'", "did you mean orbax?", f"{CONVERT} --to orbax"),
    Mistake(f"{CONVERT} --to Orbx", 2, "unknown format 'Orbx'", "did you mean orbax", f"{CONVERT} --to orbax"),
    Mistake("plan HOME/one.safetensors HOME/out --to tensorflow", 2, "unknown format", "choose one of: dcp",
            "plan HOME/one.safetensors HOME/out --to dcp"),
    Mistake("formats torch-dpc", 2, "unknown format 'torch-dpc'", "did you mean", "formats dcp"),
    Mistake("detect file://HOME/one.safetensors --format orbx", 2, "unknown format 'orbx'", "did you mean orbax",
            "detect file://HOME/one.safetensors --format safetensors"),
    Mistake("verify HOME/one.safetensors --format orbax", 4, "not a checkpoint of format orbax", "remove --format",
            "verify HOME/one.safetensors"),
    Mistake(f"{CONVERT} --to dcp --set shard_sise=1GB", 2, "unknown option 'shard_sise'", "did you mean shard_size?",
            f"{CONVERT} --to dcp --set shard_size=1GB"),
    Mistake("convert HOME/model HOME/out --to maxtext --set scan_layer=true", 2, "unknown option 'scan_layer'",
            "did you mean scan_layers or", "convert HOME/model HOME/out --to maxtext --set scan_layers=true"),
    Mistake(f"{CONVERT} --to orbax --only parms", 2, "'parms' is not 'params'", "wherry convert --help"),
    Mistake(f"{CONVERT} --to dcp --ignore other", 2, "unknown rule other", "did you mean others?",
            f"{CONVERT} --to dcp --ignore others"),
    Mistake("verify HOME/one.safetensors --memory 5", 2, "budget of 5 bytes", "--memory 5GiB",
            "verify HOME/one.safetensors --memory 5GiB"),
    # paths
    Mistake("detect HOME/one.safetensor", 3, "file or folder not found", "wherry discover HOME"),
    Mistake("inspect HOME/no/such/step", 3, "file or folder not found", "wherry discover HOME"),
    Mistake("detect google/t5-small", 3, "file or folder not found", "hf://google/t5-small", "detect --help"),
    Mistake("detect file://tmp/x", 2, "names the host 'tmp'", "file:///tmp/x", "detect file://HOME/one.safetensors"),
    Mistake("detect s4://bucket/x", 2, "unknown storage protocol s4://", "gs, s3", "detect HOME/one.safetensors"),
    Mistake("verify HOME/nested", 4, "not a checkpoint of any known format",
            "pass the checkpoint in it: HOME/nested/llama", "verify HOME/nested/llama"),
    Mistake("verify HOME/run", 4, "not a checkpoint", "wherry discover"),
    Mistake("verify HOME/nested/llama/config.json", 4, "not a checkpoint", "pass its folder: HOME/nested/llama",
            "verify HOME/nested/llama"),
    Mistake("inspect HOME/several", 4, "not a checkpoint", "(one/, two/); `wherry discover HOME/several` lists all"),
    Mistake("inspect HOME/wherry.toml", 4, "not a checkpoint", "wherry formats"),
    Mistake("convert HOME/model HOME/one.safetensors --to safetensors", 8, "target already exists",
            "choose another target", "convert HOME/model HOME/out --to safetensors"),
    Mistake("convert HOME/model HOME/one.safetensors/x --to orbax", 10, "Not a directory",
            "a part of it is a file, not a folder", "convert HOME/model HOME/out --to orbax"),
    Mistake("verify HOME/one.safetensors --against HOME/two", 3, "file or folder not found", "wherry discover HOME"),
    Mistake("audit HOME/nothing", 3, "file or folder not found", "check the path", "audit HOME/nested"),
    # the ledger and its digests
    Mistake("lineage show HOME/run/a.safetensors", 3, "no lineage is recorded", "convert it with wherry",
            "convert HOME/run/a.safetensors HOME/out --to dcp"),
    Mistake("verify DIGEST0", 3, "file or folder not found", "wherry discover", "verify DIGEST"),
    # models
    Mistake("resolve models:newcomers", 2, "invalid model URI", "models:/NAME", "resolve models:/newcomers"),
    Mistake("resolve models:/newcomer", 3, "name=newcomer not found", "did you mean newcomers?",
            "resolve models:/newcomers"),
    Mistake("verify models:/newcomers/7", 3, "version=7) not found", "choose one of: 1", "verify models:/newcomers/1"),
    Mistake("fetch models:/newcomers@champ HOME/out", 3, "unknown alias champ", "choose one of: champion → 1",
            "fetch models:/newcomers@champion HOME/out"),
    Mistake("register HOME/converted --model a/b", 2, "Names cannot contain '/'", "correct the value",
            "register HOME/converted --model newcomers"),
    Mistake("promote models:/newcomers/1 --policy releas --config x", 2, "no such option '--config'",
            "wherry promote --help"),
    # configuration
    Mistake("routes check", 3, NO_CONFIG, INIT, "routes check --config HOME/wherry.toml"),
    Mistake("prune", 3, NO_CONFIG, INIT, "prune --config HOME/wherry.toml"),
    Mistake("routes explain HOME/nested/llama", 3, NO_CONFIG, INIT,
            "routes explain HOME/nested/llama --config HOME/wherry.toml"),
    Mistake("routes explain HOME/nested/llama --config HOME/none.toml", 3, "the configuration has no routes",
            "`wherry config example` prints some", "routes explain HOME/nested/llama --config HOME/wherry.toml"),
    Mistake("nightly lama --config HOME/wherry.toml", 3, "unknown route 'lama'", "did you mean llama?",
            "nightly llama --dry-run --config HOME/wherry.toml"),
    Mistake("routes check --config HOME/misspelt.toml", 2, "routes.llama.retention.keep_lats: unknown field",
            "did you mean keep_last or keep_days?", "routes check --config HOME/wherry.toml"),
    Mistake("routes check --config HOME/unrelated.toml", 2, "routes.llama.colour: unknown field",
            "remove 'colour', or move it; `wherry config example` shows all fields",
            "routes check --config HOME/wherry.toml"),
    # servers that do not run
    Mistake("resolve models:/newcomers", 10, "MLflow does not answer: Connection refused (http://127.0.0.1:9)",
            "start the server, or check MLFLOW_TRACKING_URI", "resolve models:/newcomers",
            {"MLFLOW_TRACKING_URI": "http://127.0.0.1:9", "WHERRY_STORAGE_TIMEOUT": "0.1s"}),
    Mistake("ls", 10, "PostgreSQL does not answer: Connection refused (postgresql://127.0.0.1:9/wherry)",
            "start the database server, or check WHERRY_LEDGER", "ls",
            {"WHERRY_LEDGER": "postgresql://wherry@127.0.0.1:9/wherry", "WHERRY_STORAGE_TIMEOUT": "0.1s"}),
    Mistake("emit HOME/one.safetensors", 2, "PREFECT_API_URL", "set PREFECT_API_URL", "help emit"),
    Mistake("emit HOME/one.safetensors", 10, "Prefect does not answer: Connection refused (http://127.0.0.1:9/api)",
            "or check PREFECT_API_URL", "help emit",
            {"PREFECT_API_URL": "http://127.0.0.1:9/api", "WHERRY_STORAGE_TIMEOUT": "0.1s"}),
]  # fmt: skip

CONFIG = """[routes.llama]
root = "HOME/nested"
targets = [{ format = "orbax", uri = "HOME/converted/{run}/{step|0}/{name}" }]
"""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory, own_home):
    """A folder of checkpoints, one of them converted and registered, and the digest of that one."""
    folder = tmp_path_factory.mktemp("newcomers")
    small(folder / "one.safetensors")
    for name in ("a", "b"):
        small(folder / "run" / f"{name}.safetensors")
    for place in ("nested/llama", "several/one", "several/two"):
        small(folder / place / "model.safetensors")
        (folder / place / "config.json").write_text(json.dumps({"model_type": "strange"}))
    save_tiny(folder / "model", "llama")
    receipt = wherry.convert(folder / "model", folder / "converted", to="orbax")
    wherry.register(folder / "converted", "newcomers", alias="champion")
    (folder / "wherry.toml").write_text(CONFIG.replace("HOME", str(folder)))
    for name, lines in (("misspelt", "retention.keep_lats = 2"), ("unrelated", 'colour = "red"')):
        (folder / f"{name}.toml").write_text(f"{(folder / 'wherry.toml').read_text()}{lines}\n")
    (folder / "none.toml").write_text('memory = "1GiB"\n')
    (folder / "empty").mkdir()
    return folder, receipt.target.checkpoint_digest


@pytest.fixture
def home(checkpoints, monkeypatch):
    """The folder, from another working directory; what a test adds to it is removed again."""
    folder, _digest = checkpoints
    before = set(folder.rglob("*"))
    monkeypatch.chdir(folder / "empty")
    monkeypatch.delenv("WHERRY_CONFIG", raising=False)
    yield folder
    for path in set(folder.rglob("*")) - before:
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


@pytest.fixture
def digest(checkpoints):
    """The first 12 hex digits of the converted checkpoint."""
    return checkpoints[1].partition(":")[2][:12]


def pasted(cure):
    """The commands in a cure that need nothing to be filled in."""
    commands = re.findall(r"`wherry ([^`]+)`|(?<!`)wherry (inspect --digest --write \S+)", cure)
    words = [found or bare for found, bare in commands]
    complete = [line for line in words if not re.search(r"\b[A-Z]{3,}\b", line.replace("HOME", ""))]
    return [f"{line} --root HOME/nested --yes" if line == "init" else line for line in complete]  # it asks


def named(mistake):
    return " ".join([mistake.typed, *mistake.where.values()])


@pytest.mark.parametrize("mistake", MISTAKES, ids=named)
def test_a_mistake_ends_with_a_cure_that_leads_on(mistake, home, digest, capfd, monkeypatch):
    before = sorted(path.name for path in home.iterdir())
    with monkeypatch.context() as patch:
        for name, value in mistake.where.items():
            patch.setenv(name, value)
        code, text = typed(mistake.typed.replace("DIGEST0", f"{digest}0000"), home, capfd)
    error, cure = re.search(r"^error: (.*)\ncure: (.*)$", text, re.MULTILINE).groups()
    assert (code, mistake.says in error, mistake.cure in cure) == (mistake.code, True, True), text
    assert sorted(path.name for path in home.iterdir()) == before
    following = [*pasted(cure), *([mistake.leads] if mistake.leads else [])]
    assert following, f"the row needs a command that follows its cure: {cure}"
    for line in following:
        code, text = typed(line.replace("DIGEST", digest), home, capfd)
        assert code == 0, f"{line}: {text}"


def accepted(server):
    """The number of connections that wait at a socket."""
    server.setblocking(False)
    count = 0
    with suppress(BlockingIOError):
        while True:
            server.accept()[0].close()
            count += 1
    return count


@pytest.mark.parametrize(
    ("line", "variable", "uri"),
    [("resolve models:/m", "MLFLOW_TRACKING_URI", "http://127.0.0.1:{}"),
     ("promote models:/m --model m", "MLFLOW_TRACKING_URI", "http://127.0.0.1:{}"),
     ("emit HOME/one.safetensors", "PREFECT_API_URL", "http://127.0.0.1:{}/api"),
     ("ls", "WHERRY_LEDGER", "postgresql://w@127.0.0.1:{}/w"),
     ("nightly --config HOME/wherry.toml", "WHERRY_LEDGER", "postgresql://w@127.0.0.1:{}/w")],
)  # fmt: skip
def test_what_hangs_is_named_before_the_command_gives_up(
    line, variable, uri, home, capfd, caplog, monkeypatch
):
    with closing(socket.create_server(("127.0.0.1", 0), backlog=64)) as silent:
        address = uri.format(silent.getsockname()[1])
        monkeypatch.setenv(variable, address)
        monkeypatch.setenv("WHERRY_STORAGE_TIMEOUT", "2s")  # a ledger is tried for twice as long
        code, text = typed(line, home, capfd)
        connections = accepted(silent)
    shown = address.replace("w@", "")
    assert connections == 1, "it gives up once"
    assert (code, f"({shown})" in text, "cure: start the" in text) == (10, True, True)
    messages = [record.getMessage() for record in caplog.records]
    assert any(line.startswith(f"{shown} has not answered for 2 s") for line in messages)


def test_verbose_says_what_is_used(home, capfd):
    _, text = typed("-v ls", home, capfd)
    assert re.search(r"^wherry \S+, configuration none$", text, re.MULTILINE)
    assert re.search(r"^ledger sqlite:\S+ledger.db, model registry sqlite:\S+mlflow.db$", text, re.MULTILINE)
    _, text = typed("ls", home, capfd)
    assert "model registry" not in text


def test_the_names_of_libraries_lead_to_formats_that_exist():
    assert {name for names in LIBRARIES.values() for name in names} <= set(formats())
    aliases = {alias for row in formats().values() for alias in (row.name, *row.aliases)}
    assert not aliases & set(LIBRARIES), "an alias would never be looked up here"


def test_bare_wherry_and_bare_groups_print_their_help(home, capfd):
    for line in ("", "routes", "ledger"):
        code, text = typed(line, home, capfd)
        assert (code, text.startswith(f"Usage: wherry {line}".strip())) == (0, True)


def test_the_help_lists_every_command_in_a_section_with_its_whole_first_sentence(home, capfd, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    listed = [name for names in SECTIONS.values() for name in names]
    assert (sorted(listed), len(set(listed))) == (sorted(cli.commands), len(listed))
    for name, (_place, sentence) in chain.from_iterable(names.items() for names in SECTIONS.values()):
        assert (cli.commands[name].name, first_sentence(cli.commands[name])) == (name, sentence)
    for line in ("--help", "lineage --help", "ledger --help", "routes --help", "config --help"):
        _, text = typed(line, home, capfd)
        assert "..." not in text.split("Options:")[1], line
        assert max(map(len, text.splitlines())) <= 80


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


def test_inspect_says_which_file_it_wrote(home, capfd):
    code, text = typed("inspect --digest --write HOME/run/a.safetensors", home, capfd)
    (file,) = re.findall(r"^wrote HOME/(\S+): ", text, re.MULTILINE)
    assert (code, (home / file).is_file()) == (0, True)


def test_clean_says_that_nothing_was_left_behind(home, capfd):
    assert typed("clean HOME", home, capfd) == (0, "nothing to clean\n")


def test_detect_says_where_the_checkpoint_is(home, capfd):
    code, text = typed("detect HOME/nested", home, capfd)
    assert (code, "pass the checkpoint in it: HOME/nested/llama" in text) == (4, True)


@pytest.mark.parametrize(
    ("words", "expected"),
    [("convert a b --to orb", "orbax"), ("detect a --format safe", "safetensors"),
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
