"""Messages of MLflow's webhooks: signed by MLflow itself, refused when they are not, and what Prefect gets of them."""

from __future__ import annotations

import io
import json
import socket
import subprocess
import sys
import time
import uuid
from contextlib import suppress

import pytest
import yaml

from tests.support.readme import blocks, commands
from tests.support.registry import free_port, mlflow_server
from tests.support.webhook import webhook_server
from wherry.integrations import mlflow_webhook

pytest.importorskip("mlflow")

SECRET = "a secret of the webhook"
SET = {
    "entity": "model_version_alias", "action": "created", "timestamp": "2026-11-30T12:00:00+00:00",
    "data": {"name": "a model/é", "alias": "candidate", "version": "3"},
}  # fmt: skip


@pytest.fixture
def prefect(monkeypatch):
    """What Prefect's API gets."""
    monkeypatch.setenv("WHERRY_WEBHOOK_SECRET", SECRET)
    with webhook_server("/api") as server:
        monkeypatch.setenv("PREFECT_API_URL", server.url)
        yield server


def headers_of(text, *, secret=SECRET, at=0.0):
    from mlflow.webhooks.delivery import _generate_hmac_signature

    number, stated = str(uuid.uuid4()), str(int(time.time() + at))
    return {
        "HTTP_X_MLFLOW_DELIVERY_ID": number,
        "HTTP_X_MLFLOW_TIMESTAMP": stated,
        "HTTP_X_MLFLOW_SIGNATURE": _generate_hmac_signature(secret, number, stated, text),
    }


def receive(text, headers, method="POST"):
    """The status of the answer."""
    data, statuses = text.encode(), []
    environ = {
        "REQUEST_METHOD": method,
        "CONTENT_LENGTH": str(len(data)),
        "wsgi.input": io.BytesIO(data),
        **headers,
    }
    mlflow_webhook.application(environ, lambda status, _headers: statuses.append(int(status[:3])))
    return statuses[0]


def test_an_alias_becomes_one_event(prefect):
    text = json.dumps(SET)
    headers = headers_of(text)
    assert receive(text, headers) == 200
    [(path, [event])] = prefect.got
    assert (path, event["event"]) == ("/api/events", "wherry.alias.created")
    assert event["id"] == headers["HTTP_X_MLFLOW_DELIVERY_ID"]
    assert event["resource"].items() >= {
        "uri": "models:/a%20model%2F%C3%A9/3", "model": "a model/é", "alias": "candidate",
    }.items()  # fmt: skip
    assert receive(text, headers) == 409
    assert len(prefect.got) == 1


def test_what_is_not_signed_now_by_the_secret_is_refused(prefect):
    text = json.dumps(SET)
    headers = headers_of(text)
    refused = [
        {},
        headers_of(text, secret="another"),
        headers_of(text, at=-300),
        headers_of(text, at=300),
        headers | {"HTTP_X_MLFLOW_TIMESTAMP": str(int(time.time()) + 1)},
        headers | {"HTTP_X_MLFLOW_TIMESTAMP": "now"},
        headers | {"HTTP_X_MLFLOW_DELIVERY_ID": str(uuid.uuid4())},
        headers_of(text.replace("candidate", "champion")),
    ]
    assert [receive(text, one) for one in refused] == [401] * len(refused)
    assert receive(text, headers, method="GET") == 405
    assert receive("x" * (1 << 17), headers) == 413
    assert prefect.got == []


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"entity": "model_version_alias", "action": "created"}', "[" * 9999]
)
def test_a_signed_message_of_another_form_is_refused(prefect, text):
    assert receive(text, headers_of(text)) == 400
    assert prefect.got == []


def test_other_messages_are_ignored(prefect):
    text = json.dumps({**SET, "action": "deleted"})
    assert receive(text, headers_of(text)) == 200
    assert prefect.got == []


def test_without_a_secret_nothing_is_received(prefect, monkeypatch):
    monkeypatch.delenv("WHERRY_WEBHOOK_SECRET")
    text = json.dumps(SET)
    assert receive(text, headers_of(text, secret="")) == 500
    assert prefect.got == []


def test_a_message_that_prefect_did_not_take_may_come_again(prefect):
    text = json.dumps(SET)
    headers = headers_of(text)
    prefect.statuses.append(503)
    assert [receive(text, headers), receive(text, headers)] == [502, 200]


def test_the_trigger_of_the_page_is_started_by_its_alias_alone():
    pytest.importorskip("prefect")
    from prefect.events import DeploymentTriggerTypes
    from prefect.server.events.schemas.automations import EventTrigger
    from prefect.server.events.schemas.events import ReceivedEvent
    from pydantic import TypeAdapter

    [text] = blocks("promotion", "yaml")
    [stated] = yaml.safe_load(text)["triggers"]
    TypeAdapter(DeploymentTriggerTypes).validate_python(stated)
    fields = {name: stated[name] for name in ("type", "expect", "match")}
    trigger = EventTrigger.model_validate({**fields, "posture": "Reactive", "threshold": 1, "within": 0})
    for alias, starts in (("candidate", True), ("champion", False)):
        message = {**SET, "data": {**SET["data"], "alias": alias}}
        event = mlflow_webhook._event(message, str(uuid.uuid4()))
        assert trigger.covers(ReceivedEvent.model_validate(event)) == starts
    from wherry.flows.promote import PromoteSpec

    promote = PromoteSpec(
        subject=event["resource"]["uri"], policy_name=stated["parameters"]["spec"]["policy_name"]
    )
    assert promote.known_model == SET["data"]["name"]


def await_port(port, process):
    for _ in range(600):
        assert process.poll() is None, "the receiver ended"
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5):
            return
        time.sleep(0.1)
    pytest.fail("the receiver did not start in a minute")


@pytest.mark.server
def test_a_real_server_delivers(prefect, tmp_path, own_home):
    """MLflow itself signs and sends to the command of the page; http and addresses of this machine are allowed here."""
    import mlflow
    from mlflow.entities.webhook import WebhookAction, WebhookEntity, WebhookEvent

    [[program, *words]] = commands(blocks("promotion", "sh")[-1])
    port = free_port()
    words = [f"127.0.0.1:{port}" if word.startswith("127.0.0.1:") else word for word in words]
    with (tmp_path / "receiver.log").open("wb") as log:
        receiver = subprocess.Popen([sys.executable, "-m", program, *words], stdout=log, stderr=log)
    allowed = {"MLFLOW_WEBHOOK_ALLOWED_SCHEMES": "http", "MLFLOW_WEBHOOK_ALLOW_PRIVATE_IPS": "true"}
    try:
        with mlflow_server(tmp_path, environment=allowed) as url:
            client = mlflow.MlflowClient(url, url)
            await_port(port, receiver)
            event = WebhookEvent(WebhookEntity.MODEL_VERSION_ALIAS, WebhookAction.CREATED)
            client.create_webhook("wherry", f"http://127.0.0.1:{port}/", [event], secret=SECRET)
            client.create_registered_model("small")
            client.create_model_version("small", "wherry://blake3/00")
            client.set_registered_model_alias("small", "candidate", "1")
            for _ in range(600):
                if prefect.got:
                    break
                time.sleep(0.1)
    finally:
        receiver.terminate()
        receiver.wait(timeout=60)
    [(_, [sent])] = prefect.got
    assert (sent["resource"]["uri"], sent["resource"]["alias"]) == ("models:/small/1", "candidate")
