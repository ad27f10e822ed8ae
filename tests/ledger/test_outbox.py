"""The outbox: at least once, in order, kept where it failed, rebuilt on request, and never in the way."""

from __future__ import annotations

import json
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from safetensors.numpy import save_file

import wherry
from tests.support.ledger import conversion, digest, filled, node, watched_queries
from wherry.cli import cli
from wherry.errors import StorageError, UsageError
from wherry.ledger import deliver
from wherry.ledger.deliver import cursors, pending, record_delivery, record_failure, rewind
from wherry.ledger.nodes import conversions, digest_at, digests_starting, nodes, present, verifications
from wherry.ledger.record import (
    ancestors,
    check_chain,
    claim_registration,
    descendants,
    head,
    open_ledger,
    record_conversion,
    record_event,
    record_registration,
    record_verification,
    statements,
)


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "source.safetensors"
    save_file({"a": np.ones((3, 4), np.float32)}, path)
    return path


@pytest.fixture
def events(tmp_path, monkeypatch):
    """The file that events go to, as a function that reads them."""
    path = tmp_path / "events.jsonl"
    monkeypatch.setenv("WHERRY_OPENLINEAGE", str(path))
    return lambda: [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def server():
    """A server that answers with `status` and keeps what it was sent."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            found.seen.append((self.path, dict(self.headers), json.loads(body)))
            self.send_response(found.status)
            if found.status in (301, 302, 307):
                self.send_header("Location", found.elsewhere)
            self.end_headers()

        def log_message(self, *_):
            pass

    found = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found.seen, found.status, found.elsewhere = [], 201, ""
    found.url = f"http://127.0.0.1:{found.server_port}"
    thread = threading.Thread(target=found.serve_forever, daemon=True)
    thread.start()
    yield found
    found.shutdown()
    found.server_close()
    thread.join()


def test_a_conversion_is_reported_at_once(source, tmp_path, events):
    wherry.convert(source, tmp_path / "orbax", to="orbax")
    assert [event["eventType"] for event in events()] == ["START", "COMPLETE"]
    [done] = deliver.deliver()
    assert (done.statements, done.failed) == (0, None)
    assert len(events()) == 2, "what was delivered is not delivered again"


def test_nothing_is_done_where_nothing_is_configured(source, tmp_path):
    wherry.convert(source, tmp_path / "orbax", to="orbax")
    assert deliver.deliver() == []
    with open_ledger() as ledger:
        assert cursors(ledger) == []
    with pytest.raises(UsageError, match="no destination is configured for"):
        deliver.deliver("openlineage")
    with pytest.raises(UsageError, match="unknown projection"):
        deliver.deliver("nobody")


def test_the_configuration_names_the_destination(source, tmp_path, monkeypatch):
    pytest.importorskip("pydantic", reason="pydantic is not installed")
    file, events = tmp_path / "wherry.toml", tmp_path / "events.jsonl"
    file.write_text(f"[openlineage]\nnamespace = 'team'\ntarget = {json.dumps(str(events))}\n")
    monkeypatch.setenv("WHERRY_CONFIG", str(file))
    wherry.convert(source, tmp_path / "orbax", to="orbax")
    delivered = [json.loads(line) for line in events.read_text().splitlines()]
    assert [event["job"]["namespace"] for event in delivered] == ["team", "team"]


def test_a_destination_that_fails_does_not_fail_the_conversion(source, tmp_path, monkeypatch, caplog):
    target = tmp_path / "folder"
    target.mkdir()
    monkeypatch.setenv("WHERRY_OPENLINEAGE", str(target))
    with caplog.at_level(logging.WARNING, "wherry.ledger.deliver"):
        assert wherry.convert(source, tmp_path / "orbax", to="orbax").lineage == "recorded"
    why = "it is tried again with the next statement: storage failed: "
    assert f"delivery to openlineage failed; {why}" in caplog.text
    with open_ledger() as ledger:
        [row] = cursors(ledger)
    assert (row.delivered, row.behind) == (0, 1)
    assert row.failed.startswith("statement 1: storage failed")
    target.rmdir()
    wherry.convert(source, tmp_path / "again", to="huggingface", family="none")
    names = [json.loads(line)["outputs"][0]["name"] for line in target.read_text().splitlines()]
    assert names == [str(tmp_path / "orbax")] * 2 + [str(tmp_path / "again")] * 2, "in order, none lost"
    with open_ledger() as ledger:
        assert cursors(ledger)[0].failed is None


def test_delivery_stops_at_what_failed_and_goes_on_there(events, monkeypatch):
    with open_ledger() as ledger:
        for number in range(120):
            record_event(ledger, "note", None, {"number": number})
    taken, broken = [], {60}

    def take(statement):
        if statement.seq in broken:
            raise StorageError("the destination is away", retryable=True)
        taken.append(statement.seq)
        return True

    monkeypatch.setattr("wherry.integrations.openlineage.projection", lambda _destination: take)
    [first] = deliver.deliver("openlineage")
    assert (first.statements, first.cursor, first.failed) == (59, 59, "the destination is away")
    broken.clear()
    [second] = deliver.deliver("openlineage")
    assert (second.statements, second.cursor, second.failed) == (61, 120, None)
    assert taken == list(range(1, 121))
    [third] = deliver.deliver("openlineage", again=True)
    assert third.statements == 120
    assert taken == [*range(1, 121), *range(1, 121)]


def test_a_crash_delivers_again_and_loses_nothing(events, monkeypatch):
    with open_ledger() as ledger:
        for number in range(70):
            record_event(ledger, "note", None, {"number": number})
    taken, crash = [], {65}

    def take(statement):
        if statement.seq in crash:
            raise KeyboardInterrupt
        taken.append(statement.seq)
        return True

    monkeypatch.setattr("wherry.integrations.openlineage.projection", lambda _destination: take)
    with pytest.raises(KeyboardInterrupt):
        deliver.deliver()
    crash.clear()
    deliver.deliver()
    assert sorted(set(taken)) == list(range(1, 71))
    assert taken.count(10) == 1
    assert taken.count(60) == 2, "at least once"


def test_a_server_gets_events_with_the_key(source, tmp_path, server, monkeypatch):
    monkeypatch.setenv("WHERRY_OPENLINEAGE", server.url)
    monkeypatch.setenv("OPENLINEAGE_API_KEY", "secret-key")
    wherry.convert(source, tmp_path / "orbax", to="orbax")
    assert [path for path, _, _ in server.seen] == ["/api/v1/lineage"] * 2
    assert server.seen[0][1]["Authorization"] == "Bearer secret-key"
    assert server.seen[1][2]["eventType"] == "COMPLETE"
    assert "secret-key" not in json.dumps([body for _, _, body in server.seen])


def test_a_server_that_refuses_or_sends_elsewhere_is_an_error(source, tmp_path, server, monkeypatch, caplog):
    monkeypatch.setenv("WHERRY_OPENLINEAGE", f"{server.url}/own/path?token=t")
    monkeypatch.setenv("OPENLINEAGE_API_KEY", "secret-key")
    server.status, server.elsewhere = 307, f"{server.url}/elsewhere"
    assert wherry.convert(source, tmp_path / "orbax", to="orbax").lineage == "recorded"
    for status in (400, 503):
        server.status = status
        [done] = deliver.deliver()
        assert done.failed == f"the OpenLineage server returned HTTP status {status}"
        assert done.destination == f"{server.url}/own/path"
    assert {path for path, _, _ in server.seen} <= {"/own/path?token=t"}
    assert not any(word in caplog.text for word in ("secret-key", "token=t"))


def test_a_server_that_is_not_there_is_an_error(source, tmp_path, monkeypatch):
    monkeypatch.setenv("WHERRY_OPENLINEAGE", "http://127.0.0.1:9")
    assert wherry.convert(source, tmp_path / "orbax", to="orbax").lineage == "recorded"
    assert "cannot connect to the OpenLineage server: " in deliver.deliver()[0].failed


def test_the_command_says_what_was_delivered(source, tmp_path, events, capsys, monkeypatch):
    monkeypatch.delenv("WHERRY_OPENLINEAGE")
    wherry.convert(source, tmp_path / "orbax", to="orbax")
    monkeypatch.setenv("WHERRY_OPENLINEAGE", str(tmp_path / "events.jsonl"))
    for words, delivered in ((["--json"], 1), (["--json", "--again", "openlineage"], 1)):
        with pytest.raises(SystemExit) as done:
            cli.main(["ledger", "deliver", *words], standalone_mode=False)
        assert done.value.code == 0
        assert json.loads(capsys.readouterr().out)["delivered"][0]["statements"] == delivered
    assert len(events()) == 4
    assert events()[:2] == events()[2:]


def test_a_projection_with_a_fault_never_fails_the_conversion(source, events, tmp_path, monkeypatch, caplog):
    from wherry.integrations import openlineage

    def faulty(_statement):
        raise KeyError("software")

    monkeypatch.setattr(openlineage, "events", faulty)
    with caplog.at_level(logging.WARNING):
        receipt = wherry.convert(source, tmp_path / "o", to="orbax")
    assert receipt.lineage == "recorded"
    with open_ledger() as ledger:
        [row] = cursors(ledger)
    assert "KeyError" in row.failed


# The outbox: a projection takes statements in order, at least once, from where it stood.


@pytest.fixture
def ledger(tmp_path):
    with open_ledger(f"sqlite:///{tmp_path / 'ledger.db'}") as opened:
        yield opened


def numbers(ledger, name, **which):
    return [one.seq for one in pending(ledger, name, **which)]


def test_a_cursor_moves_forward_and_keeps_its_failure(ledger):
    for number in range(4):
        record_event(ledger, "note" if number else "audit", None, {"number": number})
    assert cursors(ledger) == []
    assert numbers(ledger, "events") == [1, 2, 3, 4]
    record_delivery(ledger, "events", 2)
    record_failure(ledger, "events", 3, "nobody listens " + "x" * 5000)
    assert numbers(ledger, "events") == [3, 4]
    [cursor] = cursors(ledger)
    assert (cursor.name, cursor.delivered, cursor.behind) == ("events", 2, 2)
    assert (cursor.failed or "").startswith("statement 3: nobody listens")
    assert len(cursor.failed or "") < 2500
    record_delivery(ledger, "events", 1)  # somebody slower
    assert numbers(ledger, "events") == [3, 4]
    record_delivery(ledger, "events", 4)
    assert cursors(ledger)[0].failed is None
    assert numbers(ledger, "events") == []
    rewind(ledger, "events")
    assert numbers(ledger, "events", kinds={"note"}) == [2, 3, 4]
    assert numbers(ledger, "another") == [1, 2, 3, 4]
    assert check_chain(ledger).altered is None


def test_a_failure_before_the_first_delivery(ledger):
    record_event(ledger, "note", None, {})
    record_failure(ledger, "events", 1, "down")
    assert numbers(ledger, "events") == [1]
    assert check_chain(ledger).altered is None


def test_no_statement_is_skipped_while_others_append(ledger):
    """What a bare counter in a database would get wrong: a number that becomes visible after a higher one."""

    def add(number):
        record_event(ledger, "note", None, {"number": number})

    met: list[int] = []
    with ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(add, number) for number in range(60)]
        while len(met) < 60:
            for one in pending(ledger, "events"):
                met.append(one.seq)
                record_delivery(ledger, "events", one.seq)
        for one in waiting:
            one.result()
    assert met == list(range(1, 61))


def test_what_a_source_became_is_found_by_place_and_mark(ledger):
    made = conversion(
        "a", "b", options={"scan_layers": True, "chunk": None}, software={"wherry": "9"}, finished="2026"
    )
    record_conversion(ledger, made)
    record_conversion(ledger, conversion("a", "c", lossless=False))
    record_conversion(ledger, conversion("x", "y"))
    state = present(ledger)
    first, second = state.by_source["/checkpoints/a"]["mark of a"]
    assert (first.target_uri, first.target_digest, first.format) == ("/checkpoints/b", digest("b"), "orbax")
    assert first.options == {"scan_layers": True, "chunk": None}
    assert (first.time, first.software, first.lossless, second.lossless) == ("2026", "9", True, False)
    assert [row.target_uri for row in state.conversions if row.source_digest == digest("x")] == [
        "/checkpoints/y"
    ]
    assert {uri: {*marks} for uri, marks in state.by_source.items()} == {
        "/checkpoints/a": {"mark of a"},
        "/checkpoints/x": {"mark of x"},
    }


def test_a_deleted_target_is_known_as_such(tmp_path):
    url = f"sqlite:///{tmp_path / 'filled.db'}"
    filled(url)
    with open_ledger(url) as ledger:
        gone = {row.target_uri: row.gone is not None for row in present(ledger).by_target.values()}
        assert gone == {
            "/checkpoints/b": False,
            "/checkpoints/c": False,
            "/checkpoints/d": True,
            "/elsewhere": False,
        }
        record_conversion(ledger, conversion("c", "d", started="again"))
        assert present(ledger).by_target["/checkpoints/d"].gone is None


QUESTIONS = {
    "append": lambda ledger: record_conversion(ledger, conversion("new", "newer")),
    "append again": lambda ledger: record_conversion(ledger, conversion("a", "b")),
    "verify": lambda ledger: record_verification(ledger, node("a"), {"level": "digest", "ok": True}),
    "claim": lambda ledger: claim_registration(ledger, node("a"), "registry", "model"),
    "register": lambda ledger: record_registration(ledger, node("a"), "registry", "model", "1"),
    "up": lambda ledger: ancestors(ledger, digest("b")),
    "down": lambda ledger: descendants(ledger, digest("a")),
    "nodes": lambda ledger: nodes(ledger, [digest("a"), digest("b")]),
    "place": lambda ledger: digest_at(ledger, "/checkpoints/a"),
    "prefix": lambda ledger: digests_starting(ledger, digest("a")[:8]),
    "verified": lambda ledger: verifications(ledger, digest("a")),
    "statements": lambda ledger: list(statements(ledger, after=1)),
    "some statements": lambda ledger: list(statements(ledger, after=1, kinds=["note", "audit"])),
    "pending": lambda ledger: list(pending(ledger, "events")),
    "delivered": lambda ledger: record_delivery(ledger, "events", 1),
    "head": head,
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_no_question_reads_a_whole_table(ledger, question):
    """Every SELECT and UPDATE that a function sends is explained; only ledgers of a few rows may be scanned."""
    record_conversion(ledger, conversion("a", "b"))
    record_event(ledger, "note", node("a"), {})
    sent: list[tuple[str, object]] = []

    with watched_queries(lambda sql, values: sent.append((sql, values))):
        QUESTIONS[question](ledger)
    queries = [(sql, values) for sql, values in sent if sql.startswith(("SELECT", "WITH", "UPDATE"))]
    assert queries
    with ledger.read() as connection:
        for sql, values in queries:
            plan = connection.rows(f"EXPLAIN QUERY PLAN {sql}", **values)
            steps = [row[3] for row in plan]
            scans = [step for step in steps if step.startswith("SCAN") and not step.startswith("SCAN walk")]
            wide = [
                step for step in scans if "VIRTUAL TABLE" not in step
            ]  # the digests of the question itself
            # The head is the end of the primary key: such a scan stops at its first row.
            assert not wide or (wide == ["SCAN statement"] and sql.endswith("DESC LIMIT 1")), (sql, steps)
            kinds = [step for step in steps if "statement_kind (kind=?)" in step]
            assert not kinds, "an index on the kind alone finds a third of all statements"


def test_asking_for_a_whole_night_is_one_query(ledger):
    for number in range(5):
        record_conversion(ledger, conversion(f"s{number}", f"t{number}"))
    sent: list[str] = []
    with watched_queries(lambda sql, _values: sent.append(sql)):
        assert len(conversions(ledger)) == 5
    assert len([sql for sql in sent if sql.startswith("SELECT")]) == 1
    assert not [sql for sql in sent if "statement.body" in sql]
