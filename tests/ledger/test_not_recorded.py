"""What is not recorded is not done: exit code 12, a complete result, and a cure that works when it is pasted."""

from __future__ import annotations

import json
import pickle
import shlex
import shutil
from importlib import import_module
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import save_file

import wherry
from tests.support.command import command, cure_of, small
from tests.support.signing import key_pair
from wherry.converter.convert import convert_all
from wherry.core.request import TargetRequest, convert_request
from wherry.errors import CorruptError, MismatchError, NotRecordedError, StorageError, UsageError
from wherry.formats.checkpoint import present_fingerprint
from wherry.ledger import record as ledgers
from wherry.ledger.record import has_conversion, open_ledger
from wherry.ledger.statements import statements
from wherry.live import handle as export_handle
from wherry.nightly import night as nights
from wherry.nightly.report import NightReport, WorkOutcome, failure, markdown
from wherry.nightly.routes import load_config
from wherry.prove.verify import verify_and_record
from wherry.trace.lineage import show

LATE = "recorded now; the ledger did not have it"


@pytest.fixture
def source(tmp_path):
    return small(tmp_path / "source.safetensors")


@pytest.fixture
def broken(tmp_path, monkeypatch):
    """A ledger that cannot be opened, until it is mended."""
    monkeypatch.setenv("WHERRY_LEDGER", f"sqlite:///{tmp_path}")
    return SimpleNamespace(mend=lambda: monkeypatch.delenv("WHERRY_LEDGER"))


def pasted(text):
    """Run the command of a cure."""
    words = shlex.split(cure_of(text))
    assert words[0] == "wherry"
    return command(*words[1:])


def edges(uri):
    return [edge.statement for edge in show(uri).edges]


# The command line.


def test_the_command_ends_with_12_and_its_cure_records(source, tmp_path, broken):
    done = command("convert", source, tmp_path / "out", "--to", "orbax")
    assert done.returncode == 12, done.stderr
    assert "verified:       every byte read back, 2 tensors" in done.stdout
    assert "lineage:        not recorded: the ledger cannot be used" in done.stdout
    assert done.stderr.startswith("error: done, but not recorded: the ledger cannot be used")
    assert wherry.verify(tmp_path / "out", level="digest").verdict == "uncompared"
    broken.mend()
    assert wherry.verify(tmp_path / "out", level="digest").ok
    assert edges(tmp_path / "out") == [None], "the sidecar alone tells of it"
    cured = pasted(done.stderr)
    assert (cured.returncode, cured.stdout) == (0, f"{tmp_path / 'out'}: recorded\n"), cured.stderr
    assert edges(tmp_path / "out") == [1]
    assert pasted(done.stderr).stdout == f"{tmp_path / 'out'}: already recorded\n"


def test_json_has_the_whole_receipt_and_the_error(source, tmp_path, broken):
    line = ["convert", source, tmp_path / "out", "--to", "orbax", "--json"]
    done = command(*line)
    assert done.returncode == 12
    data = json.loads(done.stdout)
    error = data.pop("error")
    assert (error["error"], error["exit_code"], error["uri"]) == (
        "NotRecordedError",
        12,
        str(tmp_path / "out"),
    )
    assert cure_of(error["cure"]) == f"wherry ledger record {tmp_path / 'out'}"
    broken.mend()
    whole = json.loads(command(*line).stdout)
    assert whole["lineage"] == LATE
    assert {**data, "lineage": LATE, "already": True} == whole


def test_the_json_of_several_targets_is_the_group(source, tmp_path, broken):
    done = command(
        "convert", source, "--to", "orbax", tmp_path / "a", "--to", "npz", tmp_path / "b.npz", "--json"
    )
    assert done.returncode == 12
    data = json.loads(done.stdout)
    assert len(data["receipts"]) == 2
    broken.mend()
    cured = pasted(data["error"]["cure"])
    assert cured.returncode == 0, cured.stderr
    assert [edges(tmp_path / "a"), edges(tmp_path / "b.npz")] == [[1], [2]]


def test_the_same_command_again_says_what_the_ledger_holds(source, tmp_path, broken):
    line = ["convert", source, tmp_path / "out", "--to", "orbax"]
    assert command(*line).returncode == 12
    again = command(*line)
    assert again.returncode == 12
    assert "already converted; nothing was written" in again.stdout
    assert "lineage:        not recorded: the ledger" in again.stdout
    broken.mend()
    without = command(*line, "--no-lineage")
    assert (without.returncode, "lineage:        left out by request" in without.stdout) == (0, True)
    late = command(*line)
    assert (late.returncode, f"lineage:        {LATE}" in late.stdout) == (0, True)
    last = command(*line)
    assert (last.returncode, "lineage:        recorded\n" in last.stdout) == (0, True)
    assert edges(tmp_path / "out") == [1]


def test_a_fetch_and_its_cure(source, tmp_path, broken, monkeypatch):
    broken.mend()
    made = wherry.convert(source, tmp_path / "out", to="orbax").target.uri
    monkeypatch.setenv("WHERRY_LEDGER", f"sqlite:///{tmp_path}")
    done = command("fetch", made, tmp_path / "copy")
    assert done.returncode == 12
    assert "lineage:        not recorded" in done.stdout
    data = json.loads(command("fetch", made, tmp_path / "other", "--json").stdout)
    assert (data["uri"], data["error"]["exit_code"]) == (str(tmp_path / "other"), 12)
    broken.mend()
    assert pasted(done.stderr).returncode == 0
    root = show(made)
    assert str(tmp_path / "copy") in {place.uri for place in root.nodes[root.root].places}


def test_the_cure_records_the_fingerprint_of_the_copy(source, tmp_path, monkeypatch):
    """A copy from an object store has other marks than the original."""
    made = wherry.convert(source, tmp_path / "out", to="orbax").target.uri
    shutil.copytree(made, tmp_path / "copy", copy_function=shutil.copyfile)
    seen = []
    monkeypatch.setattr(ledgers, "record_sighting", lambda _ledger, subject: seen.append(subject))
    ledgers.record_sidecar(made)
    ledgers.record_sidecar(tmp_path / "copy")
    marks = []
    for place in (made, tmp_path / "copy"):
        with wherry.open(place) as opened:
            marks.append((str(place), present_fingerprint(opened)))
    assert [(one.uri, one.fingerprint) for one in seen] == marks
    assert marks[0][1] != marks[1][1]


# Python.


def test_the_error_carries_what_was_done(source, tmp_path, broken):
    with pytest.raises(NotRecordedError) as caught:
        wherry.convert(source, tmp_path / "out", to="orbax")
    error = caught.value
    assert error.result.target.uri == str(tmp_path / "out")
    assert error.result.verification["ok"]
    assert not error.retryable
    assert isinstance(error.__cause__, StorageError)
    again = pickle.loads(pickle.dumps(error))
    assert (again.result, str(again)) == (error.result, str(error))
    with pytest.raises(NotRecordedError) as caught:
        convert_all(convert_request(source, [TargetRequest(str(tmp_path / "b.npz"), "npz")]))
    assert [one.target.uri for one in caught.value.result.receipts] == [str(tmp_path / "b.npz")]


def test_what_fails_in_the_middle_names_only_what_is_missing(source, tmp_path, monkeypatch):
    real = ledgers.record_conversion

    def second_fails(ledger, receipt):
        if receipt.target.uri.endswith("b.npz"):
            raise RuntimeError("a bug in the\nledger")
        return real(ledger, receipt)

    monkeypatch.setattr(ledgers, "record_conversion", second_fails)
    targets = [TargetRequest(str(tmp_path / "a"), "orbax"), TargetRequest(str(tmp_path / "b.npz"), "npz")]
    with pytest.raises(NotRecordedError, match="RuntimeError: a bug in the ledger") as caught:
        convert_all(convert_request(source, targets))
    assert [one.lineage[:12] for one in caught.value.result.receipts] == ["recorded", "not recorded"]
    assert cure_of(caught.value.cure) == f"wherry ledger record {tmp_path / 'b.npz'}"


def test_what_is_not_recorded_is_signed_and_not_reported_as_a_failure(source, tmp_path, broken, monkeypatch):
    reports = []
    monkeypatch.setattr(
        import_module("wherry.converter.convert"), "report_failure", lambda *words: reports.append(words)
    )
    key, _public = key_pair(tmp_path)
    with pytest.raises(NotRecordedError):
        wherry.convert(source, tmp_path / "out", to="orbax", sign=key)
    assert (tmp_path / "out" / "wherry.sig").exists()
    assert reports == []


def test_a_copy_of_a_sidecar_that_was_altered_is_not_recorded(source, tmp_path):
    wherry.convert(source, tmp_path / "out", to="orbax", lineage=False)
    file = tmp_path / "out" / "wherry.json"
    data = json.loads(file.read_text())
    data["manifest"]["step"] = 7
    data["checkpoint"]["checkpoint_digest"] = f"blake3:{'0' * 64}"
    file.write_text(json.dumps(data))
    assert command("ledger", "record", tmp_path / "out").returncode == 9
    assert command("ledger", "record", source).returncode == 3


def test_a_verification_that_passed_and_was_not_recorded(source, tmp_path, broken):
    made = tmp_path / "out.safetensors"
    wherry.convert(source, made, to="safetensors", lineage=False)
    with pytest.raises(NotRecordedError, match="not recorded") as caught:
        verify_and_record(str(made), level="digest")
    assert caught.value.result.verdict == "uncompared"
    data = bytearray(made.read_bytes())
    data[-1] ^= 1
    made.write_bytes(data)
    with pytest.raises(MismatchError):  # damage counts before the record
        verify_and_record(str(made), level="digest")


def test_an_address_that_is_none_costs_no_receipt(source, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("WHERRY_OPENLINEAGE", "http://[bad")
    assert wherry.convert(source, tmp_path / "out", to="orbax").lineage == "recorded"
    assert "were not delivered: ValueError" in caplog.text


def test_a_bug_of_the_ledger_keeps_what_was_fetched_and_verified(source, tmp_path, monkeypatch):
    def broken(*_):
        raise RuntimeError("a bug")

    made = wherry.convert(source, tmp_path / "out", to="orbax").target.uri
    for name in ("record_sighting", "record_verification"):
        monkeypatch.setattr(ledgers, name, broken)
    with pytest.raises(NotRecordedError, match="a bug") as caught:
        wherry.fetch(made, tmp_path / "copy")
    assert caught.value.result.uri == str(tmp_path / "copy")
    with pytest.raises(NotRecordedError, match="a bug") as caught:
        verify_and_record(made, level="digest")
    assert caught.value.result.ok


# Export.


def test_an_export_keeps_the_receipt_and_raises_with_it(tmp_path, broken, monkeypatch, caplog):
    emit = import_module("wherry.core.emit")
    posted = []
    monkeypatch.setattr(emit, "emit", lambda uri, **how: posted.append((uri, how["event"], how["payload"])))
    handle = wherry.export({"w": np.ones((4, 4), np.float32)}, tmp_path / "out.npz", to="npz", emit=True)
    with pytest.raises(NotRecordedError) as caught:
        handle.result(60)
    assert handle.receipt is caught.value.result
    assert wherry.verify(tmp_path / "out.npz", level="digest").verdict == "uncompared"
    assert f"export to {tmp_path / 'out.npz'} is committed: done, but not recorded" in caplog.text
    [(uri, event, payload)] = posted
    assert (uri, event) == (str(tmp_path / "out.npz"), emit.COMMITTED)
    assert payload["error"]["exit_code"] == 12
    broken.mend()
    again = wherry.export({"w": np.ones((4, 4), np.float32)}, tmp_path / "other.npz", to="npz")
    assert again.result(60).lineage == "recorded"
    assert pasted(str(caught.value)).returncode == 0
    with open_ledger() as ledger:
        assert has_conversion(ledger, handle.receipt)


def test_the_other_processes_of_an_export_learn_that_it_is_not_recorded(source, tmp_path, broken):
    with pytest.raises(NotRecordedError) as caught:
        wherry.convert(source, tmp_path / "out", to="orbax")
    with pytest.raises(NotRecordedError, match="the ledger cannot be used") as repeated:
        ledgers.require_recorded(caught.value.result)
    assert repeated.value.result == caught.value.result
    broken.mend()
    receipt = ledgers.record(caught.value.result)
    assert ledgers.require_recorded(receipt) is receipt


def test_an_unexpected_failure_of_an_export_is_a_bug():
    handle = export_handle.Export("somewhere")
    handle.failed(TypeError("no\nsuch thing"))
    assert (handle.error.exit_code, handle.error.what.endswith("TypeError: no such thing")) == (70, True)


# A night.

CONFIG = """
[routes.r]
root = "runs"
min_age = 0
concurrency = 1
level = "{level}"
{more}
[[routes.r.targets]]
format = "npz"
uri = "out/{{run}}-{{step}}.npz"
"""


@pytest.fixture
def night(tmp_path):
    def loaded(level="none", more="", runs=("a", "b")):
        for run in runs:
            place = tmp_path / "runs" / run / "checkpoint-1"
            place.mkdir(parents=True)
            save_file({"w": np.ones(3, np.float32)}, place / "model.safetensors")
        (tmp_path / "wherry.toml").write_text(CONFIG.format(level=level, more=more))
        return load_config(tmp_path / "wherry.toml")

    return loaded


def refuse_first(monkeypatch, name):
    """A ledger that breaks while the first checkpoint of a night is recorded, and is there again for the second."""
    real, seen = getattr(ledgers, name), []

    def refused(ledger, *words):
        if not seen:
            seen.append(words)
            raise StorageError("the ledger cannot be used: disk full", cure="free some space")
        return real(ledger, *words)

    monkeypatch.setattr(ledgers, name, refused)


@pytest.mark.parametrize("name", ["record_conversion", "record_event", "record_verification"])
def test_a_night_counts_what_is_not_recorded_and_the_next_one_records_it(night, tmp_path, monkeypatch, name):
    config = night(level="digest")
    with monkeypatch.context() as patch:
        refuse_first(patch, name)
        report = nights.run_night(config, config.routes)
    assert dict(report.counts) == {"converted": 1, "not recorded": 1}
    [row] = [one for one in report.outcomes if one.came == "not recorded"]
    assert [(tmp_path / "out" / "a-1.npz").exists(), row.targets] == [
        True,
        (str(tmp_path / "out" / "a-1.npz"),),
    ]
    error = failure(report)
    assert error.exit_code == 12
    assert (
        error.what
        == "1 of 2 not recorded; the first: done, but not recorded: the ledger cannot be used: disk full"
    )
    assert "## Converted, but not recorded" in markdown(report)
    again = nights.run_night(config, config.routes)
    assert dict(again.counts) == {"converted": 1, "done": 1}
    assert edges(tmp_path / "out" / "a-1.npz")[0] is not None


def test_a_night_that_cannot_register_says_how(night, tmp_path, monkeypatch):
    config = night(more='model = "m"\nalias = "candidate"\n[routes.r.tags]\nteam = "a b"\n', runs=("a",))

    def gone(*_, **__):
        raise StorageError("MLflow cannot be reached", cure="start it")

    monkeypatch.setattr(nights, "register", gone)
    report = nights.run_night(config, config.routes)
    error = failure(report)
    assert (dict(report.counts), error.exit_code) == ({"not recorded": 1}, 12)
    assert "not registered: MLflow cannot be reached" in error.what
    made = tmp_path / "out" / "a-1.npz"
    line = f"wherry register {made} --model m --alias candidate --tag 'team=a b'"
    assert error.cure == f"start it; then run `{line}`"
    with open_ledger() as ledger:
        assert [one.kind for one in statements(ledger)][:1] == ["conversion"]


def test_what_failed_counts_before_what_is_not_recorded():
    refused = WorkOutcome("r", "a", "not recorded", ("x",), error=NotRecordedError("no ledger"))
    failed = WorkOutcome("r", "b", "failed", error=CorruptError("cut"))
    assert failure(NightReport((), (refused, failed))).exit_code == 5
    assert failure(NightReport((), (refused,))).exit_code == 12
    assert failure(NightReport((), ())) is None


def test_only_the_registry_and_the_ledger_are_excused():
    with pytest.raises(MismatchError), ledgers.registration_of("u", "m"):
        raise MismatchError("other bytes")
    with pytest.raises(NotRecordedError) as caught, ledgers.registration_of("u", "m"):
        raise UsageError("MLflow does not take this")
    assert cure_of(caught.value.cure) == "wherry register u --model m"
