"""Promotion and rollback in an embedded MLflow store: what is refused, what moves, and what a failure leaves."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

import wherry
from tests.support.registry import converted, flip_a_bit
from tests.support.waits import waits_reported_at_once
from wherry.cli import cli
from wherry.errors import MismatchError, NotFoundError, StorageError, TargetInUseError, UsageError
from wherry.ledger.record import check_chain, open_ledger, statements
from wherry.models import promote as promotion
from wherry.store.local_store import locate
from wherry.store.sidecar import encode, read_sidecar

mlflow = pytest.importorskip("mlflow")
from wherry.integrations.mlflow import aliases  # noqa: E402  needs mlflow

pytestmark = pytest.mark.usefixtures("own_home")


@pytest.fixture(autouse=True)
def settled_soon(monkeypatch):
    monkeypatch.setattr(aliases, "_SETTLE_SECONDS", 0.15)


def held(client, name):
    return {alias: str(version) for alias, version in client.get_registered_model(name).aliases.items()}


def events(kind, name):
    with open_ledger() as ledger:
        return [one.body for one in statements(ledger, kinds=(kind,)) if one.body["name"] == name]


def rewrite_sidecar(folder):
    """Make the sidecar tell of what lies there now, as somebody would who hides an alteration."""
    location = locate(folder)
    old = read_sidecar(location)
    (Path(folder) / "wherry.json").unlink()
    seen = wherry.inspect(folder, digest=True).manifest
    companions = tuple(replace(one, sha256=one.sha256 or "0" * 64) for one in old.manifest.companions)
    manifest = replace(old.manifest, digests=seen.digests, companions=companions)
    (Path(folder) / "wherry.json").write_bytes(encode(replace(old, manifest=manifest, leaves={})))


def test_candidate_becomes_champion_and_champion_previous(candidate, client, name, tmp_path):
    first = wherry.promote(f"models:/{name}@candidate")
    assert (first.version, first.replaced, first.already, first.alias) == ("1", None, False, "champion")
    assert held(client, name) == {"champion": "1"}
    second = converted(tmp_path / "two")
    wherry.register(second, name, alias="candidate")
    done = wherry.promote(f"models:/{name}@candidate", policy={"companions": ["tokenizer*", "config.json"]})
    assert (done.version, done.replaced) == ("2", "1")
    assert held(client, name) == {"champion": "2", "previous": "1"}
    again = wherry.promote(f"models:/{name}/2")
    assert again.already
    assert again.statement is None
    bodies = events("promotion", name)
    assert [(body["version"], body["replaced"]) for body in bodies] == [("1", None), ("2", "1")]
    assert bodies[1]["checkpoint_digest"] == second.target.checkpoint_digest
    assert all(gate["passed"] for gate in bodies[1]["gates"])
    tags = client.get_model_version(name, "2").tags
    assert tags["wherry.promoted_by"] == done.by
    assert "not authenticated" in done.by
    assert "wherry.lock" not in client.get_registered_model(name).tags
    with open_ledger() as ledger:
        assert check_chain(ledger).altered is None


def test_a_plain_uri_is_registered_first(tmp_path, client, name):
    receipt = converted(tmp_path)
    with pytest.raises(UsageError, match="missing name of the registered model"):
        wherry.promote(receipt.target.uri)
    assert wherry.promote(receipt.target.uri, model=name).version == "1"
    assert held(client, name) == {"champion": "1"}


def test_an_altered_checkpoint_is_refused(candidate, client, name):
    flip_a_bit(Path(candidate.target.uri))
    with pytest.raises(MismatchError, match="differs from the registered one") as failure:
        wherry.promote(f"models:/{name}@candidate")
    assert failure.value.path in {"a", "b"}
    assert held(client, name) == {"candidate": "1"}
    assert events("promotion", name) == []


def test_a_swapped_tokenizer_is_refused(candidate, client, name):
    tokenizer = Path(candidate.target.uri) / "tokenizer.json"
    text = tokenizer.read_text()
    tokenizer.write_text(text.replace("hello", "jello"))
    assert len(text) == tokenizer.stat().st_size
    with pytest.raises(MismatchError, match="companion") as failure:
        wherry.promote(f"models:/{name}@candidate")
    assert failure.value.path == "tokenizer.json"
    assert held(client, name) == {"candidate": "1"}


def test_a_tokenizer_that_was_added_is_refused(candidate, name):
    (Path(candidate.target.uri) / "added_tokens.json").write_text("{}")
    with pytest.raises(MismatchError, match=r"extra_companions.*added_tokens\.json"):
        wherry.promote(f"models:/{name}@candidate")
    assert not wherry.promote(f"models:/{name}@candidate", policy={"extra_companions": True}).already


def test_a_sidecar_that_was_altered_too_is_refused(candidate, name):
    flip_a_bit(Path(candidate.target.uri))
    rewrite_sidecar(candidate.target.uri)
    [sidecar, ledger] = wherry.verify(candidate.target.uri, level="digest").failed
    assert sidecar.reason.startswith("digest mismatch in the sidecar: it states checkpoint ")
    assert ledger.reason.startswith("not the checkpoint that the ledger recorded here on ")
    with pytest.raises(MismatchError, match="the checkpoint at this location is not the registered"):
        wherry.promote(f"models:/{name}@candidate")


@pytest.mark.parametrize("verb", ["register", "resolve", "promote", "verify"])
def test_a_forged_manifest_below_the_stated_digest_is_refused(candidate, client, name, verb):
    """The digest that the sidecar states is still the registered one; its manifest no longer hashes to it."""
    uri, model = candidate.target.uri, f"models:/{name}@candidate"
    flip_a_bit(Path(uri))
    rewrite_sidecar(uri)
    assert read_sidecar(locate(uri)).checkpoint.checkpoint_digest == candidate.target.checkpoint_digest
    done = CliRunner().invoke(cli, [verb, uri, "--model", "other"] if verb == "register" else [verb, model])
    assert isinstance(done.exception, MismatchError)
    assert done.exception.exit_code == 9
    said = (
        "digest mismatch in the sidecar: its manifest was altered"
        if verb == "register"
        else "the checkpoint at this location is not the registered"
    )
    assert said in str(done.exception)
    assert held(client, name) == {"candidate": "1"}
    assert events("promotion", name) == []


def test_a_manifest_that_is_forged_after_it_was_resolved_is_refused(candidate, client, name, monkeypatch):
    """Between the look at the registry and the gates, somebody changes bytes and manifest, not the stated digest."""

    def resolved_then_forged(uri, **stores):
        found = wherry.resolve(uri, **stores)
        flip_a_bit(Path(candidate.target.uri))
        rewrite_sidecar(candidate.target.uri)
        return found

    monkeypatch.setattr(promotion, "resolve_model", resolved_then_forged)
    with pytest.raises(
        MismatchError, match="the manifest of the checkpoint is not the registered one"
    ) as failure:
        wherry.promote(f"models:/{name}@candidate")
    assert (failure.value.exit_code, failure.value.uri) == (9, candidate.target.uri)
    assert held(client, name) == {"candidate": "1"}
    assert events("promotion", name) == []


def test_rollback_restores_the_alias_again_and_again(candidate, client, name, tmp_path):
    wherry.promote(f"models:/{name}@candidate")
    with pytest.raises(NotFoundError, match=f"no previous version of alias champion of {name}"):
        wherry.rollback(name)
    for number in ("2", "3"):
        wherry.register(converted(tmp_path / number), name, alias="candidate")
        wherry.promote(f"models:/{name}@candidate")
    assert held(client, name) == {"champion": "3", "previous": "2"}
    back = wherry.rollback(name)
    assert (back.version, back.replaced, back.level) == ("2", "3", "present")
    assert held(client, name) == {"champion": "2", "previous": "1"}
    assert "wherry.rolled_back" in client.get_model_version(name, "3").tags
    wherry.rollback(name, level="digest")
    assert held(client, name) == {"champion": "1"}
    assert [(one["version"], one["replaced"]) for one in events("rollback", name)] == [("2", "3"), ("1", "2")]


def test_rollback_refuses_what_is_not_whole(candidate, client, name, tmp_path):
    wherry.promote(f"models:/{name}@candidate")
    wherry.promote(converted(tmp_path / "two").target.uri, model=name)
    flip_a_bit(Path(candidate.target.uri))
    with pytest.raises(MismatchError):
        wherry.rollback(name, level="digest")
    (Path(candidate.target.uri) / "model.safetensors").unlink()
    with pytest.raises(wherry.WherryError):
        wherry.rollback(name)
    assert held(client, name) == {"champion": "2", "previous": "1"}


def broken(*_given):
    raise StorageError("the ledger is gone", retryable=True)


@pytest.mark.parametrize("verb", ["promote", "rollback"])
def test_a_ledger_that_fails_moves_everything_back(candidate, client, name, tmp_path, monkeypatch, verb):
    wherry.promote(f"models:/{name}@candidate")
    wherry.register(converted(tmp_path / "two"), name, alias="candidate")
    if verb == "rollback":
        wherry.promote(f"models:/{name}@candidate")
    before, tags = held(client, name), client.get_model_version(name, "2").tags
    monkeypatch.setattr("wherry.ledger.record.record_event", broken)
    with pytest.raises(StorageError, match="ledger is gone"):
        wherry.rollback(name) if verb == "rollback" else wherry.promote(f"models:/{name}@candidate")
    assert held(client, name) == before
    assert client.get_model_version(name, "2").tags == tags
    assert "wherry.lock" not in client.get_registered_model(name).tags


def test_a_move_that_fails_half_way_is_undone(candidate, client, name, tmp_path, monkeypatch):
    wherry.promote(f"models:/{name}@candidate")
    wherry.register(converted(tmp_path / "two"), name, alias="candidate")
    real = aliases._set

    def fail_at_champion(client, name, alias, version):
        real(client, name, alias, version)
        if (alias, version) == ("champion", "2"):
            raise StorageError("the answer was lost", retryable=True)

    monkeypatch.setattr(aliases, "_set", fail_at_champion)
    with pytest.raises(StorageError, match="answer was lost"):
        wherry.promote(f"models:/{name}@candidate")
    assert held(client, name) == {"champion": "1", "candidate": "2"}


def test_promotions_at_once_lose_none(client, name, tmp_path):
    receipts = [converted(tmp_path / str(number)) for number in range(3)]
    for receipt in receipts:
        wherry.register(receipt, name)
    with ThreadPoolExecutor(3) as pool:
        done = list(pool.map(lambda number: wherry.promote(f"models:/{name}/{number}"), (1, 2, 3)))
    chain = {row.replaced: row.version for row in done}
    first, second = chain[None], chain[chain[None]]
    third = chain[second]
    assert {first, second, third} == {"1", "2", "3"}
    assert held(client, name) == {"champion": third, "previous": second}


def test_an_alias_that_was_moved_meanwhile_is_left(candidate, client, name, tmp_path):
    wherry.register(converted(tmp_path / "two"), name)
    seen = held(client, name)
    client.set_registered_model_alias(name, "champion", "2")
    with (
        pytest.raises(TargetInUseError, match="was moved by another process") as failure,
        aliases.move_aliases(client, name, {"champion": "1"}, expected=seen),
    ):
        pytest.fail("it must not get here")
    assert failure.value.retryable
    assert held(client, name)["champion"] == "2"


def test_the_lock_of_a_dead_process_expires(candidate, client, name, monkeypatch):
    monkeypatch.setattr(aliases, "_PATIENCE_SECONDS", 0.3)
    client.set_registered_model_tag(name, aliases.LOCK_TAG, "somebody 99999999999")
    with waits_reported_at_once(monkeypatch) as lines, pytest.raises(TargetInUseError):
        wherry.promote(f"models:/{name}@candidate")
    assert f"models:/{name}: waiting for another process that moves its aliases" in lines
    client.set_registered_model_tag(name, aliases.LOCK_TAG, "somebody 1")
    assert wherry.promote(f"models:/{name}@candidate").version == "1"


def test_across_registries_with_all_tags(candidate, client, name, tmp_path):
    other = f"sqlite:///{tmp_path / 'production.db'}"
    done = wherry.promote(f"models:/{name}@candidate", to_registry_uri=other)
    there = mlflow.MlflowClient(tracking_uri=other, registry_uri=other)
    version = there.get_model_version_by_alias(name, "champion")
    ours = client.get_model_version(name, "1").tags
    staying = {"wherry.attempt", "wherry.logged_model", "wherry.source_model"}
    assert {key: version.tags[key] for key in ours if key not in staying} == {
        key: value for key, value in ours.items() if key not in staying
    }
    assert version.tags["wherry.promoted_from"].endswith(f"{name} 1")
    assert version.source == client.get_model_version(name, "1").source
    assert there.get_logged_model(version.tags["wherry.logged_model"]).model_type == "huggingface"
    assert held(client, name) == {"candidate": "1"}, "the registry that it comes from keeps its own aliases"
    assert done.registry == other
    assert wherry.promote(f"models:/{name}@candidate", to_registry_uri=other).already


def test_a_lock_that_nobody_of_ours_wrote_holds_nothing(candidate, client, name):
    client.set_registered_model_tag(name, aliases.LOCK_TAG, "do not touch")
    assert wherry.promote(f"models:/{name}@candidate").version == "1"


def test_the_command_line(candidate, name, tmp_path):
    run = CliRunner().invoke
    done = run(cli, ["promote", f"models:/{name}@candidate", "--json"])
    assert json.loads(done.stdout)["version"] == "1"
    assert run(cli, ["resolve", f"models:/{name}@champion"]).stdout.strip() == candidate.target.uri
    shown = json.loads(run(cli, ["resolve", f"models:/{name}/1", "--json"]).stdout)
    assert shown["checkpoint_digest"] == candidate.target.checkpoint_digest
    text = run(cli, ["promote", f"models:/{name}/1"]).stdout
    assert "the alias is already set" in text
    refused = run(cli, ["promote", "--rollback", name, "--policy", "p.toml"])
    assert isinstance(refused.exception, UsageError)


def test_each_alias_remembers_its_own_predecessor():
    """A rollback of one alias must not put the predecessor of another in its place."""
    from wherry.integrations.mlflow.promote import previous_of

    names = {alias: previous_of(alias) for alias in ("champion", "stable", "canary")}
    assert names == {"champion": "previous", "stable": "stable-previous", "canary": "canary-previous"}
