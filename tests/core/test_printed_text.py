"""What is printed, stored and shown in notebooks: nothing obeys, nothing leaks."""

from __future__ import annotations

import io
import json
import logging
import sys
import unicodedata
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import save_file

import wherry
from tests.support.command import small
from tests.support.signing import key_pair
from wherry.cli import cli, main
from wherry.cli.say import OneLine, bar, print_json, print_table
from wherry.core.html import MOST_ROWS, html_table
from wherry.core.progress import Progress, logger
from wherry.credentials import redact, redact_values
from wherry.errors import (
    MOST_PLACE,
    MOST_TEXT,
    CorruptError,
    UsageError,
    WherryError,
    json_escaped,
    printable,
)
from wherry.prove import markdown
from wherry.prove.check import visible
from wherry.store.home import home
from wherry.store.local_store import locate
from wherry.trace.page import json_text

TITLE = "\x1b]0;owned\x07"
FORGED = "a\nok: 9 tensors at level logits"
REVERSED = "safe\u202egnp.exe"
KEY = "AKIA" + "ABCDEFGHIJKLMNOP"


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        (TITLE, r"\x1b]0;owned\x07"),
        (FORGED, r"a\nok: 9 tensors at level logits"),
        (REVERSED, r"safe\u202egnp.exe"),
        ("\x9b31m", r"\x9b31m"),
        ("a\r\u2028b\u2066\x7f", r"a\r\u2028b\u2066\x7f"),
        ("\udcff", r"\udcff"),
        ("naïve 重み 🙂 a/b~c", "naïve 重み 🙂 a/b~c"),
    ],
)
def test_what_a_terminal_obeys_is_escaped(name, shown):
    assert printable(name) == shown
    assert printable(f"x\n\t{name}", lines=True).startswith("x\n\t")


@pytest.mark.parametrize("name", [TITLE, FORGED, REVERSED])
@pytest.mark.parametrize(
    "verb", [["inspect"], ["detect"], ["verify", "--level", "present"], ["discover"], ["audit"]]
)
def test_no_verb_prints_a_name_as_it_is(tmp_path, name, verb):
    place = tmp_path / name.replace("/", "_")
    place.mkdir()
    save_file({name: np.ones(2, np.float32)}, place / "model.safetensors")
    said = CliRunner().invoke(cli, [*verb, str(place)]).output
    assert not set(said) & set("\x1b\x07\u202e")
    assert not any(line.startswith("ok: 9") for line in said.splitlines())
    if verb == ["inspect"]:
        data = json.loads(CliRunner().invoke(cli, [*verb, "--json", str(place)]).stdout)
        assert name in {row["path"] for row in data["tensors"]}


@pytest.mark.parametrize("name", [TITLE, FORGED, REVERSED])
def test_no_verb_about_conversions_prints_a_name_as_it_is(tmp_path, name):
    place = tmp_path / name
    place.mkdir()
    save_file({name: np.ones(2, np.float32)}, place / "model.safetensors")
    (tmp_path / f"lost {name}.safetensors").write_bytes(bytes(64))
    source, target = str(place / "model.safetensors"), str(tmp_path / f"b {name}.npz")
    wherry.convert(source, target, to="npz")
    (place / "model.safetensors").touch()
    said = "".join(
        CliRunner().invoke(cli, words).output
        for words in (
            ["lineage", "show", target],
            ["lineage", "why", target],
            ["lineage", "impact", source],
            ["lineage", "stale"],
            ["ls"],
            ["du"],
            ["plan", source, f"{target}.2", "--to", "npz"],
            ["diff", source, target],
            ["clean", str(tmp_path)],
            ["convert", source, target, "--to", "npz"],
            ["convert", source, target, "--to", "hf"],
            ["audit", str(tmp_path)],
            ["convert", source, f"{target}3", "--to", "npz", "--meta", f"{name}={name}"],
            ["fetch", target, f"{target}4"],
            ["ledger", "record", source],
            ["ledger", "rebuild", str(tmp_path)],
            ["register", target, name],
            ["metrics", str(tmp_path)],
            ["rewrite", target, f"{target}5"],
            ["discover", str(tmp_path)],
            ["--debug", "inspect", f"{target}6"],
        )
    )
    assert not set(said) & set("\x1b\x07\u202e")
    assert [line for line in said.splitlines() if line.startswith("ok: 9")] == []


def test_errors_and_logs_are_one_line_of_printable_text():
    error = CorruptError(f"invalid {FORGED}", uri=TITLE, cure="restore it")
    assert str(error).splitlines() == [
        rf"invalid {printable(FORGED)} ({printable(TITLE)})",
        "cure: restore it",
    ]
    assert error.to_json()["uri"] == TITLE
    record = logging.LogRecord("x", logging.INFO, "", 0, "%s", (TITLE,), None)
    assert "\x1b" not in OneLine().format(record)


@pytest.mark.parametrize(
    "text",
    [
        "s3://user:hunter2@bucket/x",
        "https://b.s3.amazonaws.com/x?X-Amz-Signature=hunter2&X-Amz-Credential=hunter2",
        "https://storage.googleapis.com/x?X-Goog-Signature=hunter2",
        "az://c/x?sv=1&sig=hunter2",
        "key AKIAHUNTER2HUNTER23X of hunter2"[:24],
    ],
)
def test_credentials_are_cut_out_of_errors(text):
    error = UsageError(f"cannot read {text}", uri=text, cure=f"try {text}")
    for said in (redact(text), str(error), json.dumps(error.to_json())):
        assert "hunter2" not in said.lower().replace("akia***", "")


@pytest.mark.parametrize(
    "text", ["s3://b/x?X-Amz-Signature=hunter2", "az://c/x?sig=hunter2", f"s3://b/{KEY}/x"]
)
def test_a_uri_with_credentials_is_refused_before_it_is_stored(text):
    with pytest.raises(UsageError, match="must not carry credentials") as caught:
        locate(text)
    assert "hunter2" not in str(caught.value)


def test_metadata_of_the_user_is_stored_without_credentials(tmp_path):
    meta = {"api_token": "hunter2 and more", "from": "https://u:hunter2@x/y", "who": KEY, "team": "a=b"}
    assert redact_values(meta) == {"api_token": "***", "from": "https://***@x/y", "who": "***", "team": "a=b"}
    save_file({"w": np.ones(2, np.float32)}, tmp_path / "a.safetensors")
    receipt = wherry.convert(tmp_path / "a.safetensors", tmp_path / "b.npz", to="npz", meta=meta)
    stored = [*map(str, tmp_path.rglob("*.json")), *map(str, tmp_path.rglob("*.db*"))]
    texts = [Path(name).read_bytes() for name in stored]
    assert stored
    assert not any(
        b"hunter2" in text or KEY.encode() in text for text in [*texts, str(receipt.to_json()).encode()]
    )
    assert any(b"a=b" in text for text in texts)


SECRETS = {
    "auth": "Bearer hunter2", "credentials": "hunter2", "db_pass": "hunter2", "pwd": "hunter2", "passphrase": "hunter2",
    "AWS_SECRET_ACCESS_KEY": "hunter2", "private_key": "hunter2", "cookie": "hunter2", "sas": "hunter2",
    "run": "curl -u me:hunter2 https://h", "command": "train --password hunter2", "azure": "AccountKey=hunter2==;x",
    "header": "Authorization: Bearer hunter2", "url": "https://h/?X-Amz-Security-Token=hunter2", KEY: "1",
    "jwt_": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJodW50ZXIyIn0.hunter2", "hub": "hf_hunter2ABCDEFGHIJKLMNOP",
}  # fmt: skip


def test_no_record_of_a_conversion_has_credentials_of_the_metadata(tmp_path):
    """The records of a job that several workers share held them all."""
    save_file({"w": np.ones(2, np.float32)}, tmp_path / "a.safetensors")
    source, stated = str(tmp_path / "a.safetensors"), {**SECRETS, "team": "a=b"}
    words = [word for name, value in stated.items() for word in ("--meta", f"{name}={value}")]
    said = CliRunner().invoke(cli, ["split", source, str(tmp_path / "c"), "--to", "dcp", *words]).output
    said += (
        CliRunner()
        .invoke(cli, ["convert", source, str(tmp_path / "b.npz"), "--to", "npz", "--json", *words])
        .output
    )
    files = [file for folder in (tmp_path, home()) for file in folder.rglob("*") if file.is_file()]
    texts = {str(file): file.read_bytes() for file in files}
    assert any("job.json" in name for name in texts)
    assert any(b"a=b" in text for name, text in texts.items() if "job.json" in name)
    for text in ("hunter2", KEY):
        assert text not in said
        assert [name for name, data in texts.items() if text.encode() in data] == []


@pytest.mark.parametrize("verb", [["detect"], ["nightly", "--config"], ["audit", "--check"], ["ls"]])
@pytest.mark.parametrize("uri", ["file://u:hunter2@/tmp/x", "s3://u:hunter2@b/x", f"s3://b/{KEY}/x"])
def test_no_verb_prints_the_credentials_of_a_uri(verb, uri):
    said = CliRunner().invoke(cli, [*verb, uri])
    text = said.output + (str(said.exception) if isinstance(said.exception, WherryError) else "")
    assert "hunter2" not in text
    assert KEY not in text


@pytest.mark.parametrize(
    "stated",
    [
        {"author": "me"},
        {"pass": "2"},
        {"passes": "3"},
        {"public_key": "k"},
        {"cookies": "eaten"},
        {"team": "a=b"},
    ],
)
def test_ordinary_metadata_stays(stated):
    assert redact_values(stated) == stated


def test_numbers_are_no_credentials():
    meta = {
        "tokens": "2e12",
        "metric.token_accuracy": "0.71",
        "token": "0.5",
        "api_token": "x1",
        "password": "12",
    }
    kept = redact_values(meta)
    assert kept == {**meta, "api_token": "***", "password": "***"}


def test_json_on_a_terminal_has_nothing_that_it_obeys(tmp_path, capsys):
    name = "a\x9b31m" + REVERSED
    save_file({name: np.ones(2, np.float32)}, tmp_path / "model.safetensors")
    said = CliRunner().invoke(cli, ["inspect", "--json", str(tmp_path)]).stdout
    assert not set(said) & set("\x9b\u202e")
    assert {row["path"] for row in json.loads(said)["tensors"]} == {name}
    print_json({"path": "b\udcff\u2028", "naïve": 1})
    assert capsys.readouterr().out.replace(" ", "") == '{\n"path":"b\\udcff\\u2028",\n"naïve":1\n}\n'


def test_a_table_has_no_credentials(capsys):
    print_table(["a"], [[f"key {KEY}"], ["api_key=hunter2"]])
    said = capsys.readouterr().out
    assert KEY not in said
    assert "hunter2" not in said


@pytest.mark.parametrize("text", [TITLE, FORGED, REVERSED])
def test_what_the_library_logs_is_one_line_of_printable_text(text, caplog):
    log = logger("wherry.x")
    error = CorruptError(f"invalid {text}", uri="https://u:hunter2@h/x", cure="restore it")
    log.warning("could not read %s after %d tries: %s", text, 3, error, extra={"run": 7})
    log.debug("%s", text)
    [record] = caplog.records
    assert record.getMessage().startswith(f"could not read {printable(text)} after 3 tries: invalid")
    assert not set(record.getMessage()) & set("\x1b\x07\n\u202e")
    assert "hunter2" not in record.getMessage()
    assert (record.run, record.funcName) == (7, "test_what_the_library_logs_is_one_line_of_printable_text")


def test_no_module_logs_by_a_logger_of_its_own():
    root = Path(wherry.__file__).parent
    found = [file for file in root.rglob("*.py") if "logging.getLogger(" in file.read_text()]
    alone = "core/emit.py"  # works as a file of its own
    assert {str(file.relative_to(root)) for file in found} == {"core/progress.py", alone, "cli/say.py"}


class Terminal(io.StringIO):
    """A terminal that keeps what is written to it."""

    def isatty(self):
        """It is one."""
        return True


@pytest.mark.parametrize(
    "name", ["[/x]", "[link=https://evil.example]y[/link]", "[bold red]z", TITLE, FORGED]
)
def test_a_progress_bar_shows_a_name_as_text(name, monkeypatch):
    """A name such as `[/x]` is markup for rich: it ended the command, and `[link=…]` made a link of the text."""
    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "300")
    with bar(quiet=False) as report:
        report(Progress("convert", 1, 2, 1.0, None, name))
    said = shown.getvalue()
    assert printable(name) in said
    assert "\x1b]" not in said


def test_a_traceback_obeys_the_same_rules(monkeypatch, capsys):
    def fail(_words):
        raise ValueError(TITLE, "s3://user:hunter2@bucket/x", KEY)

    monkeypatch.setattr("wherry.cli._run", fail)
    with pytest.raises(SystemExit):
        main(["--debug", "ls"])
    said = capsys.readouterr().err
    assert "Traceback" in said
    assert not set(said) & set("\x1b\x07")
    assert "hunter2" not in said
    assert KEY not in said


def test_a_name_in_a_table_is_no_emoji(capsys):
    print_table(["name"], [["a:warning:b"]])
    assert "a:warning:b" in capsys.readouterr().out


def test_a_long_table_has_every_row_and_nothing_that_a_terminal_obeys(capsys):
    rows = [[f"name {at}", str(at)] for at in range(2_000)]
    print_table(["name", "number"], [*rows, ["\x1b]0;title\x07\nforged", f"key {KEY}"]])
    shown = capsys.readouterr().out
    lines = shown.splitlines()
    assert len(lines) == 2_003
    assert lines[2].split() == ["name", "0", "0"]
    assert lines[-1].startswith("\\x1b]0;title\\x07\\nforged")
    assert KEY not in shown
    starts = {line.rstrip().rindex("   ") for line in lines[:1] + lines[2:-1] if line}
    assert len(starts) == 1, "columns are aligned"


def test_characters_that_nobody_sees_are_escaped():
    """All of category Cf, selectors of variations and tags: with them two different names look the same."""
    unseen = [chr(code) for code in range(0x110000) if unicodedata.category(chr(code)) == "Cf"]
    for sign in (*unseen, "\ufe0f", "\U000e0100", "\u3164", "\u034f"):
        assert printable(f"a{sign}b").isascii(), f"{ord(sign):x}"
        assert visible(f"a{sign}b").isascii(), "in the report of a bundle's check"
        assert json_text(f"a{sign}b").count("\\\\u") == 1, "on the page of the lineage"
        assert sign not in markdown._plain(sign), "in the Markdown of an audit"
        assert json.loads(json_escaped(json.dumps(f"a{sign}b", ensure_ascii=False))) == f"a{sign}b"


# No text of an error is longer than a screen, whatever a file or a server puts into it.


def test_a_long_text_is_cut_in_its_middle_and_keeps_no_part_of_a_credential():
    error = CorruptError("begin " + "x" * 250 + " password=secret-word " + "y" * 100_000 + " end")
    assert len(error.what) <= MOST_TEXT
    assert error.what.startswith("begin ")
    assert "secret" not in str(error)


def test_bytes_that_are_no_text_are_not_printed(tmp_path):
    _private, public = key_pair(tmp_path)
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    small(folder / "model.safetensors")
    (folder / "wherry.sig").write_bytes(b"\xff" * 100_000)
    shown = CliRunner().invoke(cli, ["verify-signature", str(folder), "--key", str(public)])
    assert isinstance(shown.exception, CorruptError)
    assert len(str(shown.exception)) < 2 * MOST_TEXT


def test_a_place_of_any_length_is_cut_where_it_is_shown_and_whole_as_data():
    """An event states the URI of a checkpoint."""
    uri = "file:///" + "x" * 100_000
    error = CorruptError("it is damaged", uri=uri)
    assert len(error.for_shell().splitlines()[0]) < MOST_PLACE + MOST_TEXT
    assert error.to_json()["uri"] == uri


# What notebooks show: short texts and tables, in which no name of a checkpoint is markup.


class Tags(HTMLParser):
    """Collects tags and text."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.texts = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, attrs))

    def handle_data(self, data):
        self.texts.append(data)


def parsed(shown):
    """The texts of the HTML of an object, after a check that it has only tags of tables, without attributes."""
    found = Tags(shown._repr_html_())
    assert {tag for tag, _ in found.tags} <= {"div", "p", "table", "thead", "tbody", "tr", "th", "td"}
    assert not any(attributes for _, attributes in found.tags)
    return found.texts


@pytest.fixture
def source(tmp_path):
    save_file(
        {"<script>x</script>": np.ones((2, 3), "f4"), "b": np.ones(1, "i4")}, tmp_path / "a.safetensors"
    )
    return tmp_path / "a.safetensors"


def test_a_checkpoint_and_its_manifest(source):
    with wherry.open(source) as checkpoint:
        assert repr(checkpoint) == f"<Checkpoint {str(source)!r}: safetensors, 2 tensors, 7 parameters, 28 B>"
        assert repr(checkpoint.manifest) == "<Manifest: params, 2 tensors, 7 parameters, 28 B>"
        assert {"<script>x<~1script>", "2 x 3", "float32"} <= set(parsed(checkpoint))
        assert "<script>x<~1script>" in parsed(checkpoint.manifest)


def test_a_plan_a_receipt_a_verification_and_the_lineage(source, tmp_path):
    plan = wherry.plan(source, tmp_path / "out", to="npz")
    assert repr(plan) == f"<Plan: {source} (safetensors) → {tmp_path}/out (npz), 2 tensors, 28 B>"
    assert parsed(plan).count("<script>x<~1script>") == 2
    receipt = wherry.convert(source, tmp_path / "out", to="npz")
    assert repr(receipt).startswith(f"<Receipt: {source} (safetensors) → {tmp_path}/out (npz), 28 B in ")
    assert receipt.target.checkpoint_digest in parsed(receipt)
    verification = wherry.verify(tmp_path / "out", level="digest")
    assert repr(verification) == f"<Verification: ok at level digest, 2 tensors of {tmp_path}/out>"
    assert parsed(verification)
    why = wherry.why(tmp_path / "out")
    assert repr(why).endswith("result of 1 conversion>")
    assert "1" in parsed(why)


def test_a_store(tmp_path):
    store = wherry.Store(tmp_path / "run", to="safetensors")
    assert repr(store) == f"<Store '{tmp_path}/run': safetensors, no steps>"
    store.save({"w": np.ones(3)}, 5, metrics={"loss": 0.5}).result(60)
    assert repr(store).endswith("steps 5>")
    assert "{'loss': 0.5}" in parsed(store)


def test_of_many_rows_the_first_are_shown():
    text = html_table("t", ("n",), ([n] for n in range(1000)))
    assert text.count("<tr>") == MOST_ROWS + 1
    assert "and 950 more" in text


def test_secrets_and_control_characters_do_not_reach_a_page():
    text = html_table("https://user:hidden@host/x", ("a\x1b[2J",), [])
    assert "hidden" not in text
    assert "\x1b" not in text
