"""verify: each level finds what it promises to find; what nobody recorded is read; taking stock."""

from __future__ import annotations

import json
import re
import shutil

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from flax import serialization
from safetensors.numpy import load_file, save_file

import wherry
from tests.support.audit import flip as flip_of_reads
from tests.support.command import typed
from tests.support.forms import options_for
from tests.support.ledger import postgres, url
from tests.support.postgres import new_database
from tests.support.registry import flip_a_bit, model_folder
from tests.support.tiny_models import save_tiny
from wherry.cli import cli
from wherry.errors import MismatchError, NotFoundError, NotRecordedError, TargetExistsError, UsageError
from wherry.integrations import openlineage
from wherry.ledger.nodes import verifications
from wherry.ledger.record import open_ledger, statements
from wherry.ledger.replay import has_failed, has_passed, replay
from wherry.nightly.metrics import measure
from wherry.prove.audit import audit
from wherry.prove.verify import verify_and_record
from wherry.store.local_store import locate
from wherry.store.sidecar import read_sidecar
from wherry.trace.lineage import show
from wherry.trace.lineage_text import render
from wherry.trace.page import totals

SIZE = (9 << 20) // 4


@pytest.fixture
def pair(tmp_path):
    """A file and what wherry made of it; the tensor has three leaves."""
    array = np.random.default_rng(1).standard_normal(SIZE, dtype="f4")
    save_file({"w": array, "b": np.zeros(3, dtype="f4")}, tmp_path / "m.safetensors")
    wherry.convert(tmp_path / "m.safetensors", tmp_path / "out", to="hf", family="none")
    return tmp_path / "m.safetensors", tmp_path / "out"


def flip(path, offset):
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def test_a_flipped_bit_is_found_with_tensor_and_leaf(pair):
    _source, out = pair
    weights = out / "model.safetensors"
    position = weights.stat().st_size - 12 - 5 if _tail_is_b(weights) else weights.stat().st_size - 5
    flip(weights, position)
    assert wherry.verify(out, level="present").ok
    found = wherry.verify(out, level="digest")
    assert not found.ok
    assert (found.verdict, found.exit_code) == ("altered", 9)
    assert [(row.path, row.leaf) for row in found.failed] == [("w", 2)]


def _tail_is_b(path):
    import json

    data = path.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return header["b"]["data_offsets"][1] > header["w"]["data_offsets"][1]


def test_against_another_checkpoint(pair, tmp_path):
    source, out = pair
    assert wherry.verify(out, against=source).ok
    other = tmp_path / "other.safetensors"
    save_file({"w": np.zeros(SIZE, dtype="f4"), "extra": np.zeros(1, dtype="f4")}, other)
    failed = wherry.verify(out, against=other).failed
    assert {(row.path, row.reason.split(":")[0]) for row in failed} == {
        ("w", "digest mismatch"),
        ("extra", "missing tensor"),
        ("b", "unexpected tensor"),
    }


def test_an_unknown_level_is_refused(pair):
    with pytest.raises(UsageError, match="unknown level"):
        wherry.verify(pair[0], level="perfect")


@pytest.mark.parametrize("other", ['{"other": 1}', "[]"])  # of another length, and of the same
def test_a_swapped_companion_is_found(tmp_path, other):
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"w": np.zeros(3)}, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "tokenizer.json").write_text("{}")
    wherry.convert(folder, tmp_path / "out", to="orbax")
    (swapped,) = (tmp_path / "out").rglob("tokenizer.json")
    swapped.write_text(other)
    found = wherry.verify(tmp_path / "out", level="digest")
    assert [(row.path, row.reason) for row in found.failed] == [
        ("tokenizer.json", "digest mismatch in the companion file")
    ]


def test_a_tensor_that_was_added_is_found(tmp_path):
    tensors = {"a": np.arange(6.0), "b": np.ones(3, "i4")}
    save_file(tensors, tmp_path / "m.safetensors")
    wherry.convert(tmp_path / "m.safetensors", tmp_path / "out.safetensors", to="safetensors")
    save_file({**tensors, "c": np.zeros(2)}, tmp_path / "out.safetensors")
    found = wherry.verify(tmp_path / "out.safetensors", level="digest")
    assert [(row.path, row.reason) for row in found.failed] == [("c", "unexpected tensor")]


def test_inspect_hashes_are_those_of_the_canonical_bytes(pair):
    import hashlib

    from safetensors.numpy import load_file

    found = wherry.inspect(pair[1], sha256=True, digest=True)
    for name, array in load_file(pair[0]).items():
        assert found.sha256[name,] == hashlib.sha256(array.tobytes()).hexdigest()
    assert set(found.manifest.digests) == {("w",), ("b",)}


def test_damage_is_a_verdict_not_an_error(pair, tmp_path):
    source, out = pair
    data = source.read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(data[:-9])
    found = wherry.verify(tmp_path / "cut.safetensors")
    assert (found.verdict, found.ok, found.exit_code) == ("corrupt", False, 5)
    assert found.failed[0].reason
    (out / "model.safetensors").write_bytes((out / "model.safetensors").read_bytes()[:-9])
    assert wherry.verify(out, level="digest").exit_code == 5
    with pytest.raises(NotFoundError):
        wherry.verify(tmp_path / "nothing")


# `verify` against the ledger, on every database of it: what the ledger recorded decides.


__all__ = ["postgres", "url"]


@pytest.fixture
def recorded(tmp_path, monkeypatch, url):
    """A conversion that the ledger has, and a function that runs `verify` on its target."""
    monkeypatch.setenv("WHERRY_LEDGER", url)
    (tmp_path / "in").mkdir()
    save_file({"w": np.arange(12, dtype=np.float32)}, tmp_path / "in" / "model.safetensors")
    return tmp_path


def test_what_was_recorded_is_compared(recorded, capfd):
    assert typed("convert HOME/in HOME/out --to orbax", recorded, capfd)[0] == 0
    code, printed = typed("verify HOME/out --level digest --json", recorded, capfd)
    assert (code, json.loads(printed)["ledger"]) == (0, "equal")


@pytest.mark.parametrize("to", ["orbax", "safetensors"])
def test_another_checkpoint_with_a_fitting_sidecar_is_altered(recorded, capfd, to):
    """Of another format too: a sidecar can be made anew together with the bytes."""
    assert typed("convert HOME/in HOME/model --to orbax", recorded, capfd)[0] == 0
    shutil.rmtree(recorded / "model")
    save_file({"w": np.ones(12, np.float32)}, recorded / "in" / "model.safetensors")
    (recorded / "other").mkdir()
    assert typed(f"convert HOME/in HOME/other/model --to {to} --no-lineage", recorded, capfd)[0] == 0
    for each in (recorded / "other").iterdir():
        each.rename(recorded / each.name)
    code, printed = typed("verify HOME/model --level digest", recorded, capfd)
    assert code == 9, printed
    assert "not the checkpoint that the ledger recorded here" in printed


def test_every_verb_that_reads_the_ledger_says_the_same_on_both(postgres, tmp_path, capfd, monkeypatch):
    results = {}
    for name, ledger in (
        ("sqlite", f"sqlite:///{tmp_path / 'ledger.db'}"),
        ("postgresql", new_database(postgres, "verbs")),
    ):
        monkeypatch.setenv("WHERRY_LEDGER", ledger)
        folder = tmp_path / name
        (folder / "in").mkdir(parents=True)
        save_file({"w": np.arange(12, dtype=np.float32)}, folder / "in" / "model.safetensors")
        assert typed("convert HOME/in HOME/out --to orbax", folder, capfd)[0] == 0
        lines = (
            "verify HOME/out --level digest --record --json", "ls --json",
            "lineage HOME/out --json", "lineage --stale --json", "audit --json", "du HOME/out --json",
            "ledger check",
        )  # fmt: skip
        results[name] = [(line, *_without_times(typed(line, folder, capfd))) for line in lines]
    for at_sqlite, at_postgres in zip(results["sqlite"], results["postgresql"], strict=True):
        assert at_sqlite == at_postgres


def _without_times(result: tuple[int, str]) -> tuple[int, str]:
    code, printed = result
    plain = re.sub(r"\d{4}-\d\d-\d\d[T ][\d:.]+(Z|\+00:00)?", "TIME", printed)
    plain = re.sub(r"postgresql://[^\s\"]+|HOME/../ledger.db|/\S*ledger.db", "LEDGER", plain)
    plain = re.sub(r'("head": "|head: +)[0-9a-f]+', "HEAD", plain)  # the chain covers the times
    return code, re.sub(r"\d+\.\d+(e-\d+)?", "NUMBER", plain)


# verify reads: what nobody recorded is read all the same, and what the ledger knows is compared with it.


TENSORS = {"w": np.arange(4096, dtype="f4"), "b": np.ones(3, "f4")}


@pytest.fixture
def foreign(tmp_path):
    """A file that wherry neither wrote nor saw."""
    save_file(TENSORS, tmp_path / "foreign.safetensors")
    return tmp_path / "foreign.safetensors"


def run(*words):
    return CliRunner().invoke(cli, [str(word) for word in words])


def seen():
    with open_ledger() as ledger:
        return replay(ledger)


def test_what_nobody_recorded_is_read_and_proves_nothing(foreign):
    found = wherry.verify(foreign, level="digest")
    assert (found.verdict, found.ok, found.exit_code) == ("read", False, 0)
    assert found.nbytes == sum(array.nbytes for array in TENSORS.values())
    known = wherry.inspect(foreign, digest=True).manifest.digests
    report = found.to_json()
    assert report["digests"] == {path: known[path,] for path in TENSORS}
    assert report["ledger"] == "unknown place"
    assert seen().places == {}, "nothing is recorded unless that is requested"


def test_the_command_prints_the_digests_and_how_to_record_them(foreign):
    done = run("verify", foreign, "--level", "digest")
    assert done.exit_code == 0
    assert done.output.startswith("read: 2 tensors at level digest")
    digests = wherry.inspect(foreign, digest=True).manifest.digests
    assert all(f"{digest}  {path[0]}" in done.output for path, digest in digests.items())
    assert f"wherry verify {foreign} --level digest --record" in done.output
    report = json.loads(run("verify", foreign, "--level", "digest", "--json").output)
    assert (report["verdict"], set(report["digests"])) == ("read", set(TENSORS))


def test_a_checksum_of_the_container_is_compared_though_nothing_is_recorded(tmp_path):
    file = tmp_path / "m.pt"
    torch.save({"w": torch.arange(4096.0)}, file)
    assert wherry.verify(file, level="digest").verdict == "read"
    flip_of_reads(file, file.read_bytes().index(np.arange(4096, dtype="f4").tobytes()) + 99)
    found = wherry.verify(file, level="digest")
    assert (found.verdict, found.exit_code) == ("corrupt", 5)
    assert "CRC" in found.failed[0].reason


def test_a_source_is_known_from_the_day_on_which_it_was_recorded(foreign):
    first = json.loads(run("verify", foreign, "--level", "digest", "--record", "--json").output)
    assert (first["verdict"], first["lineage"]) == ("read", "recorded")
    state = seen()
    assert state.places[str(foreign)].checkpoint_digest == first["checkpoint_digest"]
    assert (state.proved, state.damaged) == ({}, {}), "it was read, which proves nothing"
    with open_ledger() as ledger:
        [statement] = statements(ledger, kinds={"verification"})
    assert "digests" not in statement.body["verification"], "a statement stays small"
    again = wherry.verify(foreign, level="digest", record=True)
    assert (again.verdict, again.to_json()["ledger"]) == ("ok", "equal")
    assert list(seen().proved) == [first["checkpoint_digest"]]
    flip_of_reads(foreign)
    changed = wherry.verify(foreign, level="digest")
    assert (changed.verdict, changed.exit_code) == ("altered", 9)
    assert changed.failed[0].reason.startswith("not the checkpoint that the ledger recorded here on 20")


def test_a_source_that_was_converted_is_known(foreign, tmp_path):
    wherry.convert(foreign, tmp_path / "out", to="orbax")
    assert wherry.verify(foreign, level="digest").verdict == "ok"
    flip_of_reads(foreign)
    assert wherry.verify(foreign, level="digest").verdict == "altered"


def test_an_altered_source_that_only_the_ledger_knows_says_how_to_name_its_tensors(foreign, tmp_path):
    wherry.convert(foreign, tmp_path / "out", to="orbax")
    copy = tmp_path / "copy.safetensors"
    shutil.copy(foreign, copy)
    flip_of_reads(foreign)
    [failure] = wherry.verify(foreign, level="digest").failed
    assert failure.path == ""
    assert "the ledger has no digests of single tensors" in failure.reason
    assert f"`wherry verify {foreign} --against COPY`" in failure.reason
    for other in (copy, tmp_path / "out"):  # a copy, and what was converted from it
        rows = wherry.verify(foreign, level="digest", against=other).failed
        assert len([one for one in rows if one.path]) == 1


def test_a_changed_companion_is_distinguished_from_changed_tensors(tmp_path):
    folder = model_folder(tmp_path / "foreign")
    wherry.verify(folder, level="digest", record=True)
    (folder / "tokenizer.json").write_text('{"other": 1}')
    [failure] = wherry.verify(folder, level="digest").failed
    assert "its tensors are the same" in failure.reason


def test_a_record_of_another_format_is_not_compared(foreign, tmp_path):
    """The identity covers the format, so the same bytes in the same place have another one."""
    out = tmp_path / "out"
    wherry.convert(foreign, out, to="penzai", options=options_for("penzai"), lineage=False)
    (out / "wherry.json").unlink()
    assert wherry.verify(out, level="digest", record=True).verdict == "read"
    assert wherry.verify(out, level="digest").verdict == "ok"
    found = wherry.verify(out, level="digest", format="orbax")
    assert found.verdict == "read"
    assert found.to_json()["ledger"].startswith("not compared: it has the checkpoint as penzai")


def rewritten(out):
    """Other bytes, with a sidecar that fits them."""
    flip_of_reads(out / "model.safetensors")
    (out / "wherry.json").unlink()
    wherry.inspect(out, write=True)


def test_a_sidecar_that_was_rewritten_with_the_bytes_does_not_pass(foreign, tmp_path):
    out = tmp_path / "out"
    wherry.convert(foreign, out, to="hf", family="none")
    rewritten(out)
    forged = read_sidecar(locate(out)).checkpoint.checkpoint_digest
    for _ in range(2):  # the record of the failure must not make the forgery the expected checkpoint
        found = wherry.verify(out, level="digest", record=True)
        assert (found.verdict, found.to_json()["ledger"], found.lineage) == (
            "altered",
            "different",
            "recorded",
        )
    assert forged not in {place.checkpoint_digest for place in seen().places.values()}
    with pytest.raises(MismatchError, match="not the checkpoint that the ledger recorded"):
        verify_and_record(str(out), level="digest")


def test_a_change_that_was_intended_is_recorded_by_the_cure_that_is_printed(foreign, tmp_path):
    out = tmp_path / "out"
    wherry.convert(foreign, out, to="hf", family="none")
    rewritten(out)
    done = run("verify", out, "--level", "digest")
    assert done.exit_code == 9
    cure = next(line for line in done.output.splitlines() if "if the change was intended: " in line)
    for command in cure.partition(": ")[2].split("; "):
        assert run(*command.split()[1:]).exit_code == 0
    assert wherry.verify(out, level="digest").verdict == "ok"


def test_a_sidecar_that_contradicts_itself_does_not_pass(foreign, tmp_path):
    out = tmp_path / "out"
    wherry.convert(foreign, out, to="hf", family="none")
    flip_of_reads(out / "model.safetensors")
    digests = wherry.inspect(out, digest=True).manifest.digests
    data = json.loads((out / "wherry.json").read_text())
    for row in data["manifest"]["tensors"]:
        row["digest"] = digests[row["path"],]
    (out / "wherry.json").write_text(json.dumps(data))
    found = wherry.verify(out, level="digest")
    assert found.verdict == "altered"
    assert found.failed[0].reason.startswith("digest mismatch in the sidecar: it states checkpoint")


def test_a_ledger_that_cannot_be_read_is_said_and_does_not_stop_a_verification(
    foreign, tmp_path, monkeypatch
):
    out = tmp_path / "out"
    wherry.convert(foreign, out, to="hf", family="none")
    monkeypatch.setenv("WHERRY_LEDGER", f"sqlite:///{tmp_path}")  # a folder
    found = wherry.verify(out, level="digest")
    assert (found.verdict, found.to_json()["ledger"][:12]) == ("uncompared", "not compared")
    assert (found.ok, found.exit_code) == (False, 10)
    with pytest.raises(NotRecordedError, match="the ledger was not compared") as error:
        wherry.verify(out, level="digest", record=True)
    assert error.value.result.verdict == "uncompared"
    assert wherry.verify(foreign, level="digest").verdict == "read"
    with pytest.raises(NotRecordedError) as error:
        wherry.verify(foreign, level="digest", record=True)
    assert error.value.result.verdict == "read"
    done = run("verify", foreign, "--level", "digest", "--record")
    assert isinstance(done.exception, NotRecordedError)  # ends with 12
    assert done.output.startswith("read: 2 tensors"), "the result comes before the error"
    flip_of_reads(out / "model.safetensors")
    damaged = wherry.verify(out, level="digest", record=True)
    assert (damaged.verdict, damaged.lineage[:14]) == ("altered", "not recorded: ")


def test_a_checkpoint_that_was_deleted_there_is_not_expected_any_more(foreign, tmp_path):
    from wherry.ledger.record import record_event

    digest = wherry.verify(foreign, level="digest", record=True).full_read.subject.checkpoint_digest
    with open_ledger() as ledger:
        record_event(ledger, "deletion", None, {"checkpoint_digest": digest, "uri": str(foreign)})
    flip_of_reads(foreign)
    assert wherry.verify(foreign, level="digest").verdict == "read"


def test_the_level_present_records_only_what_is_known(foreign, tmp_path):
    found = wherry.verify(foreign, record=True)
    assert (found.verdict, found.lineage) == (
        "ok",
        "not recorded: no record names it; level digest computes its digests",
    )
    wherry.convert(foreign, tmp_path / "out", to="hf", family="none")
    assert wherry.verify(tmp_path / "out", record=True).lineage == "recorded"


def test_a_workflow_does_not_go_on_with_what_was_only_read(foreign):
    with pytest.raises(NotFoundError, match="reading it proves nothing"):
        verify_and_record(str(foreign), level="digest")


def test_the_ledger_knows_it_by_either_algorithm(foreign, tmp_path, monkeypatch):
    monkeypatch.setenv("WHERRY_DIGEST", "sha256")
    wherry.verify(foreign, level="digest", record=True)
    monkeypatch.setenv("WHERRY_DIGEST", "blake3")
    assert wherry.verify(foreign, level="digest").verdict == "ok"
    wherry.inspect(foreign, write=True)
    assert wherry.verify(foreign, level="digest").verdict == "ok"
    flip_of_reads(foreign)
    assert [row.reason.split(" ")[0] for row in wherry.verify(foreign, level="digest").failed] == [
        "digest",
        "not",
    ]


def test_what_was_changed_in_place_is_not_moved_away_from_its_own_command(foreign, tmp_path):
    """Its source is gone: the command of its receipt would read the file that the cure has just moved."""
    torch.save({"w": torch.zeros(64, 64)}, tmp_path / "a.pt")
    wherry.convert(tmp_path / "a.pt", tmp_path / "dcp", to="dcp", lineage=False)
    wherry.rewrite(tmp_path / "dcp", as_="for-torch=2.3", in_place=True)
    [file] = (tmp_path / "dcp").glob("*.distcp")
    flip_of_reads(file, file.stat().st_size // 2)
    with pytest.raises(MismatchError) as caught:
        verify_and_record(tmp_path / "dcp", level="digest")
    assert caught.value.cure == "restore the checkpoint"


def test_a_target_of_parameters_alone_is_compared_with_those_of_its_source(tmp_path):
    """The source is no train state: it has a step next to its parameters, which the target does not have."""
    tree = {"params": {"dense": {"kernel": np.ones((2, 3), np.float32)}}, "step": np.int32(7)}
    (tmp_path / "a.msgpack").write_bytes(serialization.to_bytes(tree))
    options = {"join": "."}
    wherry.convert(
        tmp_path / "a.msgpack", tmp_path / "b.safetensors", to="safetensors", only="params", options=options
    )
    assert wherry.verify(tmp_path / "b.safetensors", level="digest", against=tmp_path / "a.msgpack").ok


# The verdict `read` is neither proof nor damage, for whoever asks the ledger about it.


@pytest.fixture
def noted(tmp_path):
    """A file of another tool that was read once, with its outcome in the ledger."""
    file = tmp_path / "foreign.safetensors"
    save_file({"w": np.arange(64, dtype="f4")}, file)
    return wherry.verify(file, level="digest", record=True)


def test_it_is_recorded_as_what_it_is(noted):
    with open_ledger() as ledger:
        outcome = verifications(ledger, noted.subject.checkpoint_digest)["digest"]
    assert (outcome["verdict"], has_passed(outcome), has_failed(outcome)) == ("read", False, False)


def test_an_audit_goes_to_it_first_and_then_it_is_proved(noted, tmp_path):
    wherry.convert(noted.uri, tmp_path / "out", to="orbax")
    [row] = [one for one in audit().checkpoints if one.uri == noted.uri]
    assert (row.verdict, row.verified) == ("ok", None)
    chosen = audit(level="digest", sample="1")
    assert {row.level for row in chosen.checkpoints if row.uri == noted.uri} == {"digest"}
    [row] = [one for one in audit().checkpoints if one.uri == noted.uri]
    assert row.verified is not None


def test_a_policy_does_not_take_it_for_a_verification(noted):
    pytest.importorskip("mlflow")
    wherry.inspect(noted.uri, write=True)
    gates = {"level": "present", "recorded": ["digest"]}
    with pytest.raises(MismatchError, match="recorded: required digest, found read, but not proved"):
        wherry.promote(noted.uri, model="foreign", policy=gates, level="present")
    assert wherry.verify(noted.uri, level="digest", record=True).ok
    assert wherry.promote(noted.uri, model="foreign", policy=gates, level="digest").version == "1"


def test_a_promotion_refuses_a_checkpoint_whose_record_vanishes(noted, monkeypatch):
    from wherry.errors import NotFoundError
    from wherry.models import promote

    monkeypatch.setattr(promote, "verify", lambda *_uri, **_how: noted)
    pytest.importorskip("mlflow")
    wherry.inspect(noted.uri, write=True)
    with pytest.raises(NotFoundError, match="reading it proves nothing"):
        wherry.promote(noted.uri, model="vanishing")


def test_no_failure_is_counted_or_reported(noted):
    rows = [one for one in measure([]) if one.name == "wherry_failures_total"]
    assert {one.value for one in rows} == {0}
    with open_ledger() as ledger:
        events = [event for one in statements(ledger) for event in openlineage.events(one)]
    assert [event["eventType"] for event in events] == ["COMPLETE"]


def test_the_lineage_names_it_and_counts_no_failure(noted):
    tree = show(noted.uri)
    assert "verified at level digest: read" in render(tree)
    assert totals(tree)["failed"] == 0


# Taking stock: a checkpoint that wherry did not write gets an identity, and none of its files is touched.


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_foreign_checkpoint_can_be_verified_and_fetched_afterwards(tmp_path):
    folder = model_folder(tmp_path / "foreign")
    before = contents(folder)
    with pytest.raises(NotFoundError, match="no digests are recorded"):
        wherry.fetch(folder, tmp_path / "copy")
    seen = wherry.inspect(folder, write=True).manifest
    sidecar = read_sidecar(locate(folder))
    assert sidecar.receipt is None
    assert sidecar.manifest.digests == seen.digests
    assert {one.name: bool(one.sha256) for one in seen.companions} == {
        "config.json": True,
        "tokenizer.json": True,
    }
    assert {name: data for name, data in contents(folder).items() if name != "wherry.json"} == before
    assert wherry.detect(folder).verdict == "ok"
    assert wherry.verify(folder, level="digest").ok
    copy = wherry.fetch(folder, tmp_path / "copy")
    assert copy.checkpoint_digest == sidecar.checkpoint.checkpoint_digest
    made = wherry.convert(folder, tmp_path / "o", to="orbax")
    assert made.source.checkpoint_digest == sidecar.checkpoint.checkpoint_digest


def test_it_is_the_node_that_a_conversion_names(tmp_path):
    folder = model_folder(tmp_path / "foreign")
    made = wherry.convert(folder, tmp_path / "o", to="orbax")
    wherry.inspect(folder, write=True)
    assert read_sidecar(locate(folder)).checkpoint.checkpoint_digest == made.source.checkpoint_digest


def test_a_record_is_never_replaced(tmp_path):
    folder = model_folder(tmp_path / "foreign")
    line = ["inspect", str(folder), "--digest", "--write", "--json"]
    done = CliRunner().invoke(cli, line)
    assert all(row["digest"] for row in json.loads(done.stdout)["tensors"])
    record = (folder / "wherry.json").read_bytes()
    assert CliRunner().invoke(cli, line).exit_code == 0
    flip_a_bit(folder)
    with pytest.raises(TargetExistsError, match="another checkpoint"):
        wherry.inspect(folder, write=True)
    assert (folder / "wherry.json").read_bytes() == record


def test_the_record_of_a_single_file_is_next_to_it(tmp_path):
    file = model_folder(tmp_path / "foreign") / "model.safetensors"
    file = file.rename(tmp_path / "one.safetensors")
    wherry.inspect(file, write=True)
    assert (tmp_path / "one.safetensors.wherry.json").exists()
    flip_a_bit(tmp_path)
    assert wherry.verify(file, level="digest").verdict == "altered"


# A checkpoint that went through another system and back is compared with where it began, which has the
# same names.


@pytest.fixture(scope="module", params=["maxtext", "lingua"])
def journey(tmp_path_factory, request, own_home):
    folder = tmp_path_factory.mktemp("journey")
    save_tiny(folder / "start", "llama")
    wherry.convert(folder / "start", folder / "there", to=request.param)
    wherry.convert(folder / "there", folder / "back", to="huggingface")
    return folder


def test_it_is_what_it_was(journey):
    found = wherry.verify(journey / "back", level="roundtrip", against=journey / "start")
    assert (found.verdict, found.exit_code, found.against) == ("ok", 0, str(journey / "start"))
    assert wherry.verify(journey / "back", level="roundtrip", against=journey / "there").ok


def test_another_model_is_not(journey, tmp_path):
    shutil.copytree(journey / "start", tmp_path / "other")
    file = tmp_path / "other/model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"] = tensors["model.norm.weight"] + 1
    save_file(tensors, file, {"format": "pt"})
    found = wherry.verify(journey / "back", level="roundtrip", against=tmp_path / "other")
    assert (found.verdict, [one.path for one in found.failed]) == ("altered", ["model.norm.weight"])


def test_both_spellings_of_the_dtype_are_one_statement(journey, tmp_path):
    shutil.copytree(journey / "start", tmp_path / "old")
    file = tmp_path / "old/config.json"
    config = json.loads(file.read_text())
    stated = config.pop("dtype", None) or config.pop("torch_dtype", None) or "float32"

    def compared(**attributes):
        file.write_text(json.dumps({**config, **attributes}))
        return {row.name for row in wherry.diff(journey / "start", tmp_path / "old").attributes}

    (journey / "start/config.json").write_text(json.dumps({**config, "dtype": stated}))
    assert compared(torch_dtype=stated) == compared(dtype=stated) == set()
    assert compared(torch_dtype="float16") == {"dtype"}
    assert compared(dtype=stated, torch_dtype="float16") == {"torch_dtype"}
