"""A rebuilt ledger and the golden one give the same answers."""

from __future__ import annotations

import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support import make_golden_ledger as golden
from tests.support.lineage import answers, run
from tests.support.object_stores import Killed, watched
from wherry.cli.ledger import ledger as ledger_commands
from wherry.converter.convert import convert
from wherry.errors import StorageError, TargetExistsError, UsageError
from wherry.ledger import schema as tables
from wherry.ledger.nodes import digest_at, nodes, present
from wherry.ledger.rebuild import LOST, rebuild
from wherry.ledger.record import (
    ancestors,
    check_chain,
    head,
    open_ledger,
    record_conversion,
    record_event,
    record_registration,
    statements,
)
from wherry.models.register import register
from wherry.store.home import home
from wherry.trace.answers import impact, why

pytest_plugins = ["tests.support.lineage"]

KNOWN_BY_TAGS = f"blake3:{'f' * 64}"


def test_a_rebuilt_ledger_gives_the_same_answers(chain, safetensors_source, tmp_path, monkeypatch):
    subjects = (chain.second.target.uri, safetensors_source, chain.first.target.checkpoint_digest)
    registered = [
        SimpleNamespace(
            name="model",
            version="1",
            tags={"wherry.checkpoint_digest": chain.second.target.checkpoint_digest},
            aliases=(),
        )
    ]
    service = SimpleNamespace(registered_versions=lambda *_uris: iter(registered))
    monkeypatch.setattr("wherry.ledger.rebuild.service", lambda name: service)
    with open_ledger() as ledger:
        record_registration(ledger, chain.second.target, "https://models.example", "model", "1")
    before = [(answers(why(one)), answers(impact(one))) for one in subjects]
    shutil.rmtree(home())
    done = rebuild([tmp_path / "out"], registry_uri="https://models.example")
    assert (done.checkpoints, done.conversions, done.edges, done.registrations) == (3, 3, 2, 1)
    assert done.unreadable == ()
    assert [(answers(why(one)), answers(impact(one))) for one in subjects] == before
    with open_ledger() as ledger:
        checked = check_chain(ledger)
        assert (checked.altered, checked.head) == (None, done.head)
        first = next(iter(statements(ledger)))
        assert first.kind == "rebuild"
        assert first.body["lost"] == list(LOST)
        assert first.body["recovered"] == {
            "checkpoints": 3,
            "conversions": 3,
            "places": 3,
            "registrations": 1,
        }


@pytest.mark.parametrize("to", ["orbax", "huggingface"])
def test_a_target_that_a_killed_run_has_not_committed_is_not_recorded(safetensors_source, tmp_path, to):
    """Killed at each of the last calls of a store; before them the sidecar is not even there."""
    root = f"memory://rebuilt{tmp_path}"
    with watched() as calls:
        convert(safetensors_source, f"{root}/whole", to=to, family="none")
    last = max(n for n, (name, _) in enumerate(calls, 1) if name == "copy_object")
    for point in range(last - 5, last + 1):
        with watched(fatal=point), pytest.raises(Killed):
            convert(safetensors_source, f"{root}/killed-{point}", to=to, family="none")
    shutil.rmtree(home())
    done = rebuild([root], registry=False)
    assert (done.conversions, done.places) == (1, 1)
    assert {row["reason"] for row in done.unreadable} <= {"its commit member is missing"}


def test_what_was_moved_copied_damaged_or_is_known_by_tags_alone(chain, tmp_path, monkeypatch):
    shutil.rmtree(home())
    (tmp_path / "out").rename(tmp_path / "archive")
    shutil.copytree(tmp_path / "archive" / "orbax", tmp_path / "archive" / "copy")
    (tmp_path / "archive" / "last.npz.wherry.json").write_text("no sidecar any more")
    tags = {
        "wherry.checkpoint_digest": KNOWN_BY_TAGS,
        "wherry.uri": "gs://bucket/model",
        "wherry.format": "orbax",
    }
    row = SimpleNamespace(name="model", version="2", tags=tags, aliases=())

    def registered(*_uris):
        yield row
        raise StorageError("the registry went away")

    monkeypatch.setattr(
        "wherry.ledger.rebuild.service", lambda name: SimpleNamespace(registered_versions=registered)
    )
    done = rebuild([tmp_path / "archive"], tracking_uri="https://user:secret@models.example")
    assert (done.conversions, done.places, done.partial) == (2, 3, (KNOWN_BY_TAGS,))
    assert {row["reason"].split(":")[0] for row in done.unreadable} == {
        "invalid JSON in the sidecar",
        "the registry went away",
    }
    places = {place.uri for place in wherry_places(chain.first.target.checkpoint_digest)}
    assert places == {
        chain.first.target.uri,
        *(str(tmp_path / "archive" / name) for name in ("orbax", "copy")),
    }
    assert impact(KNOWN_BY_TAGS).versions == ("model version 2 in https://models.example",)
    with open_ledger() as ledger:
        assert "secret" not in "".join(one.text for one in statements(ledger))
        assert check_chain(ledger).altered is None


def test_what_prune_emptied_is_gone_in_the_rebuilt_ledger_too(chain, tmp_path, monkeypatch):
    """The first is deleted and registered, its child lives; the third is marked, and lies there again."""
    shutil.rmtree(home())
    shutil.rmtree(chain.first.target.uri)
    said = "2026-11-01T00:00:00.000+00:00 by eve: keep_last: 2"
    rows = [
        SimpleNamespace(
            name=f"model{number}",
            version="1",
            tags={"wherry.checkpoint_digest": receipt.target.checkpoint_digest, "wherry.deleted": said},
            aliases=(),
        )
        for number, receipt in enumerate((chain.first, chain.third))
    ]
    service = SimpleNamespace(registered_versions=lambda *_uris: iter(rows))
    monkeypatch.setattr("wherry.ledger.rebuild.service", lambda name: service)
    done = rebuild([tmp_path / "out"])
    assert (done.partial, done.registrations) == ((), 2), "its child's sidecar knows it"
    gone = {
        place.uri
        for digest in why(chain.second.target.uri).nodes
        for place in wherry_places(digest)
        if place.gone
    }
    assert chain.first.target.uri in gone
    assert chain.third.target.uri not in gone
    assert done.deletions == len(gone)
    with open_ledger() as ledger:
        assert check_chain(ledger).altered is None
        body = next(one.body for one in statements(ledger, kinds={"deletion"}))
        assert (body["by"], body["reason"], body["deleted"][:10]) == ("eve", "keep_last: 2", "2026-11-01")


def wherry_places(digest):
    return why(digest).nodes[digest].places


def test_a_ledger_with_statements_is_never_rebuilt(chain, tmp_path):
    with open_ledger() as ledger:
        before = head(ledger)
    with pytest.raises(TargetExistsError, match="the ledger is not empty") as refusal:
        rebuild([tmp_path / "out"], registry=False)
    assert refusal.value.cure
    with open_ledger() as ledger:
        assert head(ledger) == before


def test_rebuild_with_the_real_registry(chain, tmp_path, monkeypatch):
    pytest.importorskip("mlflow")
    kept = tmp_path / "registry"
    kept.mkdir()
    uri = f"sqlite:///{kept / 'mlflow.db'}"
    register(chain.second.target.uri, "rebuilt", tracking_uri=uri)
    before = answers(impact(chain.first.source.uri))
    for file in home().glob("ledger.db*"):
        file.unlink()
    code, output = run(ledger_commands, "rebuild", tmp_path / "out", "--tracking-uri", uri, "--json")
    assert code == 0
    assert json.loads(output)["registrations"] == 1
    assert answers(impact(chain.first.source.uri)) == before


def test_the_ledger_on_the_command_line(chain, tmp_path):
    code, output = run(ledger_commands, "check")
    assert (code, "intact; every row matches its statement" in output) == (0, True)
    code, output = run(ledger_commands, "anchor")
    kept = json.loads(output)
    assert kept["seq"] == 3
    (tmp_path / "anchor.json").write_text(output)
    with open_ledger() as ledger:
        record_event(ledger, "note", None, {})
    for anchor in (tmp_path / "anchor.json", kept["hash"]):
        code, output = run(ledger_commands, "check", "--anchor", anchor, "--json")
        assert (code, json.loads(output)["anchored"]) == (0, 3)
    code, output = run(ledger_commands, "check", "--anchor", "0123456789abcdef" * 4)
    assert (code, "NOT in this chain" in output) == (9, True)
    for text in ("{}", '{"hash": "a", "seq": 1e999}', '{"hash": "a", "seq": "%s"}' % ("9" * 5000)):
        (tmp_path / "anchor.json").write_text(text)
        with pytest.raises(UsageError, match="invalid anchor"):
            run(ledger_commands, "check", "--anchor", tmp_path / "anchor.json")
    with pytest.raises(UsageError, match="invalid anchor"):
        run(ledger_commands, "check", "--anchor", tmp_path / "none.json")
    import sqlite3
    from contextlib import closing

    with closing(sqlite3.connect(home() / "ledger.db")) as connection:
        connection.execute("UPDATE location SET fingerprint = 'another'")
        connection.commit()
    code, output = run(ledger_commands, "check")
    assert (code, "ALTERED: location" in output) == (5, True)


# The golden ledger, as this schema is written: a change of the code that reads it otherwise is a change
# of schema.


FILE = Path(__file__).parents[1] / "golden" / f"ledger-{tables.SCHEMA}.sql"


def restored(file, database):
    with closing(sqlite3.connect(database)) as connection:
        connection.executescript(file.read_text())
        return connection.execute("SELECT * FROM statement ORDER BY seq").fetchall()


@pytest.fixture
def url(tmp_path):
    restored(FILE, tmp_path / "ledger.db")
    return f"sqlite:///{tmp_path / 'ledger.db'}"


def test_it_opens_and_is_whole(url):
    with open_ledger(url) as ledger:
        chain = check_chain(ledger)
        assert (chain.altered, chain.statements) == (None, head(ledger).seq)


def test_the_code_states_the_same(tmp_path):
    golden.main(tmp_path)
    again = restored(tmp_path / FILE.name, tmp_path / "again.db")
    assert again == restored(FILE, tmp_path / "kept.db")
    assert len(again) > 10


def test_it_gives_the_answers_that_it_gave(url):
    run, orbax, hf = (golden.digest(name) for name in ("run/100", "run-orbax", "run-hf"))
    with open_ledger(url) as ledger:
        assert [(edge.source, edge.target, edge.lossless) for edge in ancestors(ledger, hf)] == [
            (run, orbax, True),
            (orbax, hf, False),
        ]
        found = nodes(ledger, [orbax, hf, golden.digest("only-verified")])
        assert {place.uri for place in found[orbax].places} == {
            "/checkpoints/run-orbax",
            "/archive/run-orbax",
        }
        assert found[orbax].registrations[0].state == "pending"
        assert found[hf].registrations[0].version == "1"
        assert found[hf].verified is not None
        assert found[hf].verified.verdict == "altered"
        assert found[golden.digest("only-verified")].registrations == ()
        assert found[golden.digest("only-verified")].places[0].uri == "/checkpoints/only-verified"
        assert digest_at(ledger, "/checkpoints/run/100") == run, "the first run was seen there last"
        made = present(ledger).by_source["/checkpoints/run/100"].values()
        assert [row.format for rows in made for row in rows] == ["orbax", "huggingface"]


def test_it_goes_on(url):
    with open_ledger(url) as ledger:
        count = head(ledger).seq
        made = golden.conversion(golden.node("new", "t5x"), golden.node("newer", "orbax"), 50)
        assert record_conversion(ledger, made) == count + 1
        assert check_chain(ledger).altered is None


def test_a_recorded_conversion_is_not_recorded_again(url):
    again = golden.conversion(golden.node("run/100", "t5x", step=100), golden.node("run-orbax", "orbax"), 10)
    with open_ledger(url) as ledger:
        before = len(list(statements(ledger, kinds=["conversion"])))
        assert record_conversion(ledger, again) == 1
        assert len(list(statements(ledger, kinds=["conversion"]))) == before
