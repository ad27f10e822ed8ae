"""emit: one file of the standard library that posts one event, and says plainly when that was not taken."""

from __future__ import annotations

import base64
import json
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import wherry
from wherry import emit as door
from wherry.cli import cli

FILE = Path(__file__).parents[2] / "wherry" / "core" / "emit.py"


@pytest.fixture
def server(monkeypatch):
    """A stand-in for a Prefect server: keeps what was posted."""
    posted = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            posted.append((self.path, dict(self.headers), body))
            self.send_response(getattr(self.server, "answer", 204))
            if hasattr(self.server, "elsewhere"):
                self.send_header("Location", self.server.elsewhere)
            self.end_headers()

        def do_GET(self):
            posted.append((self.path, dict(self.headers), None))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            """Quiet."""

    found = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=found.serve_forever, daemon=True).start()
    monkeypatch.setenv("PREFECT_API_URL", f"http://127.0.0.1:{found.server_port}/api")
    found.posted = posted
    yield found
    found.shutdown()
    found.server_close()


def test_one_event_is_posted(server):
    number = door("/runs/llama/checkpoint_12", step=12, payload={"run": "llama"})
    path, headers, (event,) = server.posted[0]
    assert path == "/api/events"
    assert "Authorization" not in headers
    assert event["id"] == number
    assert event["event"] == "wherry.checkpoint.committed"
    assert event["resource"]["uri"] == "/runs/llama/checkpoint_12"
    assert event["resource"]["prefect.resource.id"].startswith("wherry.checkpoint.")
    assert event["resource"]["step"] == "12"
    assert event["payload"] == {"schema": 1, "run": "llama"}
    assert event["occurred"].endswith("+00:00")


def test_prefect_takes_the_event_as_it_is():
    events = pytest.importorskip("prefect.events.schemas.events")
    from wherry.core.emit import event_body

    event = events.Event.model_validate(event_body("gs://bucket/run/checkpoint_1", step=1))
    assert event.resource.id.startswith("wherry.checkpoint.")
    assert event.resource["uri"] == "gs://bucket/run/checkpoint_1"


def test_a_redirect_is_a_refusal_and_gets_no_credentials(server, monkeypatch):
    monkeypatch.setenv("PREFECT_API_KEY", "pnu_1")
    server.answer, server.elsewhere = 302, f"http://127.0.0.1:{server.server_port}/elsewhere"
    with pytest.raises(OSError, match="302"):
        door("/a")
    assert [path for path, _headers, _body in server.posted] == ["/api/events"]


@pytest.mark.parametrize(("name", "value", "expected"), [
    ("PREFECT_API_KEY", "pnu_1", "Bearer pnu_1"),
    ("PREFECT_API_AUTH_STRING", "me:secret", f"Basic {base64.b64encode(b'me:secret').decode()}"),
])  # fmt: skip
def test_credentials_go_into_the_header_alone(server, monkeypatch, name, value, expected):
    monkeypatch.setenv(name, value)
    door("/a")
    _, headers, body = server.posted[0]
    assert headers["Authorization"] == expected
    assert value not in json.dumps(body)


def test_the_file_works_alone(server, tmp_path):
    copied = tmp_path / "emit.py"
    copied.write_text(FILE.read_text())
    script = (
        "import sys, emit; emit.emit('/a'); print(sorted(n for n in sys.modules if n.startswith('wherry')))"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", script], cwd=tmp_path, check=True, capture_output=True, text=True
    )
    assert done.stdout.strip() == "[]"
    subprocess.run([sys.executable, "-S", str(copied), "/b"], check=True, capture_output=True)
    assert [body[0]["resource"]["uri"] for _, _, body in server.posted] == ["/a", "/b"]


def test_the_command(server, monkeypatch):
    done = CliRunner().invoke(cli, ["emit", "/a", "--step", "3", "--json"], standalone_mode=False)
    assert json.loads(done.stdout)["uri"] == "/a"
    assert "warning: file or folder not found: /a" in done.stderr
    server.answer = 500
    failed = CliRunner().invoke(cli, ["emit", "/a"], standalone_mode=False)
    assert failed.exception.exit_code == 10
    monkeypatch.delenv("PREFECT_API_URL")
    assert CliRunner().invoke(cli, ["emit", "/a"], standalone_mode=False).exception.exit_code == 2


def test_an_event_whose_answer_is_lost_is_sent_again_as_the_same_one(server, monkeypatch):
    taken, real = [], server.RequestHandlerClass.do_POST

    def lose_the_first_answer(handler):
        taken.append(handler)
        if len(taken) > 1:
            real(handler)
            return
        server.posted.append(("", {}, json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))))
        handler.close_connection = True

    monkeypatch.setattr(server.RequestHandlerClass, "do_POST", lose_the_first_answer)
    done = CliRunner().invoke(cli, ["emit", "gs://b/c", "--json"])
    assert done.exit_code == 0, done.output
    first, second = (event["id"] for _path, _headers, (event,) in server.posted)
    assert first == second == json.loads(done.output.splitlines()[-1])["id"]


def test_an_export_tells_how_it_ended(server, tmp_path, caplog):
    state = {"w": np.ones(3, np.float32)}
    wherry.export(state, tmp_path / "a.safetensors", to="safetensors", step=5).result(60)
    wherry.export(state, tmp_path / "a.safetensors", to="safetensors", step=5).wait(60)
    wherry.export(state, tmp_path / "b.safetensors", to="safetensors", emit=False).result(60)
    events = [body[0] for _, _, body in server.posted]
    assert [event["event"] for event in events] == ["wherry.checkpoint.committed", "wherry.export.failed"]
    assert events[0]["resource"]["uri"] == str(tmp_path / "a.safetensors")
    assert events[1]["payload"]["error"]["error"] == "TargetExistsError"
    server.answer = 503
    assert wherry.export(state, tmp_path / "c.safetensors", to="safetensors").result(60)
    assert "could not post the end of the export to" in caplog.text


def test_training_goes_on_where_nobody_listens(monkeypatch, caplog):
    """The hooks call it so: neither a server that is not named nor one that does not answer reaches the loop."""
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    assert wherry.emit("/ckpt/1", strict=False) == ""
    assert wherry.emit("/ckpt/1", api="http://127.0.0.1:9/api", timeout=1, strict=False) == ""
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
    with pytest.raises(ValueError, match="PREFECT_API_URL"):
        wherry.emit("/ckpt/1")


def test_training_goes_on_where_no_web_server_answers(caplog):
    """A port that speaks another protocol is an error like a server that is away."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer():
            for _ in range(2):
                connection, _ = listening.accept()
                with connection:
                    connection.recv(4096)
                    connection.sendall(b"-ERR unknown command\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        api = f"http://127.0.0.1:{listening.getsockname()[1]}/api"
        assert wherry.emit("/ckpt/1", api=api, timeout=5, strict=False) == ""
        with pytest.raises(OSError, match="invalid HTTP response"):
            wherry.emit("/ckpt/1", api=api, timeout=5)
        thread.join()
    assert "could not send the event for" in caplog.text


def test_a_relative_path_is_sent_as_an_absolute_one(tmp_path, monkeypatch):
    from wherry.core.emit import whole_uri

    monkeypatch.chdir(tmp_path)
    assert whole_uri("run/1") == str(tmp_path / "run" / "1")
    assert whole_uri("../x") == str(tmp_path.parent / "x")
    for uri in ("gs://bucket/run", "/a/b", "models:/m@champion", "file:///a"):
        assert whole_uri(uri) == uri


def test_a_name_is_one_line_of_the_output(server):
    """A folder whose name has a line break or a control character says nothing on a terminal of its own."""
    place = "/a\nemitted forged \x1b]0;title\x07"
    done = CliRunner().invoke(cli, ["emit", place], standalone_mode=False)
    lines = done.output.splitlines()
    assert done.output.count("\n") == len(lines) == 2  # the warning that it is not there, and this
    assert not {"\x1b", "\x07"} & set(done.output)
    shown = CliRunner().invoke(cli, ["emit", "/\x9b31m", "--json"], standalone_mode=False)
    assert "\x9b" not in shown.output
