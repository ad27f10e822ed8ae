"""What people type out of habit: options on either side of the command, and targets whose names say their format."""

from __future__ import annotations

import json
import re
import sys

import pytest

from tests.support.command import small, typed
from tests.support.tiny_models import save_tiny
from wherry.cli import say
from wherry.core.progress import Progress, UnitCounts
from wherry.store.local_store import locate


@pytest.fixture
def folder(tmp_path):
    small(tmp_path / "a.safetensors")
    return tmp_path


@pytest.mark.parametrize("line", ["--json ls", "ls --json", "--json ledger check"])
def test_json_is_accepted_on_either_side_of_the_command(line, folder, capfd):
    code, printed = typed(line, folder, capfd)
    assert code == 0
    json.loads(printed)


@pytest.mark.parametrize(
    "line", ["-q convert {}", "convert {} -q", "--quiet convert {}", "convert --quiet {}"]
)
def test_quiet_is_accepted_on_either_side_of_the_command(line, folder, capfd):
    code, printed = typed(line.format("HOME/a.safetensors HOME/b.npz --to npz"), folder, capfd)
    assert code == 0, printed


@pytest.mark.parametrize("line", ["-v ls", "ls -v", "ls --verbose"])
def test_verbose_is_accepted_on_either_side_of_the_command(line, folder, capfd):
    code, printed = typed(line, folder, capfd)
    assert (code, "model registry" in printed) == (0, True)


def test_what_follows_two_dashes_is_left_alone(folder, capfd):
    code, printed = typed("detect -- --json", folder, capfd)
    assert (code, "--json" in printed) == (3, True)


_NAMES = {"b.npz": "npz", "b.pt": "torch-zip", "b.pth": "torch-zip", "b.safetensors": "safetensors"}


@pytest.mark.parametrize(("name", "format"), _NAMES.items())
def test_the_format_follows_from_the_name_of_the_target(name, format, folder, capfd):
    for verb in ("plan", "convert"):
        code, printed = typed(f"{verb} HOME/a.safetensors HOME/{name} --json", folder, capfd)
        assert code == 0, printed
    code, printed = typed(f"detect HOME/{name} --json", folder, capfd)
    assert (code, json.loads(printed)["format"]) == (0, format)


def test_a_name_that_says_no_format_needs_one(folder, capfd):
    code, printed = typed("convert HOME/a.safetensors HOME/out", folder, capfd)
    assert (code, "missing option '--to'" in printed, "only names that end in" in printed) == (2, True, True)


def test_the_address_of_a_page_of_the_hub_is_its_model():
    pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")
    assert locate("https://huggingface.co/org/some.model-1").uri == locate("hf://org/some.model-1").uri
    for page, uri in (
        ("tree/v2/", "@v2"),
        ("tree/main/a/b%20c", "@main/a/b c"),
        ("blob/main/model.safetensors", "@main/model.safetensors"),
        ("?library=transformers#model", ""),
    ):
        assert locate(f"https://huggingface.co/org/m/{page}").uri == locate(f"hf://org/m{uri}").uri
    assert locate("https://hf.co/org/m").uri == locate("hf://org/m").uri
    assert locate("https://huggingface.co/org/m/resolve/main/model.safetensors").store.protocol == "https"


_REPLACING = [
    "convert HOME/a.safetensors HOME/b.npz --overwrite",
    "rewrite HOME/a.safetensors HOME/b --as x --force",
]


@pytest.mark.parametrize("line", _REPLACING)
def test_an_option_to_overwrite_says_what_wherry_does_instead(line, folder, capfd):
    code, printed = typed(line, folder, capfd)
    assert (code, "nothing is overwritten: remove the target" in printed) == (2, True), printed


def test_the_option_that_the_cure_names_accepts_what_is_there(folder, capfd):
    assert typed("convert HOME/a.safetensors HOME/b.npz", folder, capfd)[0] == 0
    changed = "convert HOME/a.safetensors HOME/b.npz --set join=_ "
    _code, printed = typed(f"{changed}--overwrite", folder, capfd)
    option = re.search("`(--if-exists [a-z]+)`", printed)[1]
    assert typed(changed, folder, capfd)[0] == 8
    assert typed(changed + option, folder, capfd)[0] == 0
    _code, words = typed("convert --help", folder, capfd)
    assert "Nothing is ever overwritten" in " ".join(words.split())


@pytest.mark.parametrize(
    ("now", "line"),
    [
        (Progress("convert", 1_500_000, 6_000_000, 500_000.0, 9.0, "layers/0/w"),
         "convert: 1.5 MB of 6.0 MB (25%), 500.0 kB/s, 9 s left; layers/0/w"),
        (Progress("verify", 0, 0, 0.0, None, "a\x1b[2Jb"), r"verify: 0 B of 0 B, 0 B/s; a\x1b[2Jb"),
        (Progress("convert", 1, 4, 1.0, 125.0, "a", UnitCounts(4, 1, 2)),
         "convert: 1 B of 4 B (25%), 1 B/s, 2:05 left; 1 of 4 units, 2 workers"),
    ],
)  # fmt: skip
def test_progress_in_a_log_is_one_plain_line(now, line, monkeypatch, capsys):
    monkeypatch.setattr(say, "LINE_SECONDS", 0.0)
    with say.bar(quiet=False) as report:
        report(now)
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", f"{line}\n")


def test_progress_in_a_log_has_a_line_every_so_often(monkeypatch, capsys):
    clock = iter([0.0, 1.0, 9.9, 10.0, 11.0, 19.0, 20.0, 20.5])
    monkeypatch.setattr(say.time, "monotonic", lambda: next(clock))
    with say.bar(quiet=False) as report:
        for done in range(7):
            report(Progress("convert", done, 7, 1.0, None, "a"))
    assert re.findall(r"^convert: (\d) B", capsys.readouterr().err, re.MULTILINE) == ["2", "5"]


def test_a_log_that_cannot_be_written_ends_no_work(monkeypatch):
    written = []

    class Full:
        def write(self, text):
            written.append(text)
            raise OSError(28, "No space left on device")

        def isatty(self):
            return False

        def flush(self):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(say, "LINE_SECONDS", 0.0)
    monkeypatch.setattr(sys, "stderr", Full())
    with say.bar(quiet=False) as report:
        report(Progress("convert", 1, 7, 1.0, None, "a"))
    assert written


@pytest.mark.parametrize("words", ["--quiet", "--json"])
def test_no_progress_where_none_is_wanted(words, folder, capfd, monkeypatch):
    monkeypatch.setattr(say, "LINE_SECONDS", 0.0)
    code, printed = typed(f"convert HOME/a.safetensors HOME/b.npz {words}", folder, capfd)
    assert (code, "left; " in printed, "convert: " in printed) == (0, False, False)


_DTYPES = {
    "bf16": "bfloat16",
    "torch.bfloat16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
}


def test_short_names_of_element_types_are_accepted(folder, capfd):
    save_tiny(folder / "llama", "llama")
    digests = {}
    for name in {*_DTYPES, *_DTYPES.values()}:
        code, printed = typed(f"plan HOME/llama HOME/b --to maxtext --dtype {name} --json", folder, capfd)
        assert code == 0, printed
        digests[name] = json.loads(printed)["digest"]
    assert all(digests[short] == digests[whole] for short, whole in _DTYPES.items())
    assert len({digests[whole] for whole in _DTYPES.values()}) == 3
