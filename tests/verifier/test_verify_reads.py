"""verify reads: what nobody recorded is read all the same, and what the ledger knows is compared with it."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from flax import serialization
from safetensors.numpy import save_file

import wherry
from tests.support.audit import flip
from tests.support.forms import options_for
from tests.support.registry import model_folder
from wherry.cli import cli
from wherry.errors import MismatchError, NotFoundError, NotRecordedError
from wherry.ledger.record import open_ledger, statements
from wherry.ledger.replay import replay
from wherry.storage.sidecar import read_sidecar
from wherry.storage.stores import locate
from wherry.verifier.verify import verify_and_record

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
    flip(file, file.read_bytes().index(np.arange(4096, dtype="f4").tobytes()) + 99)
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
    flip(foreign)
    changed = wherry.verify(foreign, level="digest")
    assert (changed.verdict, changed.exit_code) == ("altered", 9)
    assert changed.failed[0].reason.startswith("not the checkpoint that the ledger recorded here on 20")


def test_a_source_that_was_converted_is_known(foreign, tmp_path):
    wherry.convert(foreign, tmp_path / "out", to="orbax")
    assert wherry.verify(foreign, level="digest").verdict == "ok"
    flip(foreign)
    assert wherry.verify(foreign, level="digest").verdict == "altered"


def test_an_altered_source_that_only_the_ledger_knows_says_how_to_name_its_tensors(foreign, tmp_path):
    wherry.convert(foreign, tmp_path / "out", to="orbax")
    copy = tmp_path / "copy.safetensors"
    shutil.copy(foreign, copy)
    flip(foreign)
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
    flip(out / "model.safetensors")
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
    flip(out / "model.safetensors")
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
    flip(out / "model.safetensors")
    damaged = wherry.verify(out, level="digest", record=True)
    assert (damaged.verdict, damaged.lineage[:14]) == ("altered", "not recorded: ")


def test_a_checkpoint_that_was_deleted_there_is_not_expected_any_more(foreign, tmp_path):
    from wherry.ledger.record import record_event

    digest = wherry.verify(foreign, level="digest", record=True).full_read.subject.checkpoint_digest
    with open_ledger() as ledger:
        record_event(ledger, "deletion", None, {"checkpoint_digest": digest, "uri": str(foreign)})
    flip(foreign)
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
    flip(foreign)
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
    flip(file, file.stat().st_size // 2)
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
