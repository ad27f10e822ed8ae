"""Every level names files that the record of a checkpoint does not have, those that are missing, and other sizes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import wherry
from tests.support.command import command
from wherry.errors import CorruptError, MismatchError
from wherry.formats.recorded_files import KNOWN, known_file
from wherry.prove.audit import audit
from wherry.store.local_store import locate
from wherry.store.sidecar import encode, read_sidecar

READING = ("structure", "present", "digest")


@pytest.fixture
def source(tmp_path):
    """A small folder of Hugging Face's, with a config."""
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"w": np.arange(64, dtype="f4"), "b": np.ones(3, "f4")}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def made(source, tmp_path):
    """What wherry made of it."""
    wherry.convert(source, tmp_path / "made", to="huggingface", family="none")
    return tmp_path / "made"


@pytest.mark.parametrize("level", [*READING, "native", "logits"])
def test_code_that_was_added_is_a_finding_at_every_level(made, level):
    (made / "modeling_llama.py").write_text("import os")
    found = wherry.verify(made, level=level)
    assert (found.verdict, found.exit_code, found.ok) == ("added", 9, False)
    assert [(row.path, row.reason) for row in found.failed] == [
        ("modeling_llama.py", "its record does not have this file")
    ]


def test_the_command_names_it_and_ends_with_9(made):
    (made / "pytorch_model.bin").write_bytes(b"weights of somebody else")
    done = command("verify", made)
    assert done.returncode == 9
    assert "pytorch_model.bin: its record does not have this file" in done.stdout


@pytest.mark.parametrize("to", ["orbax", "dcp", "npz"])
def test_files_in_folders_of_arrays_are_named_too(source, tmp_path, to):
    wherry.convert(source, tmp_path / "out", to=to, ignore=("companions",) if to == "npz" else ())
    assert wherry.verify(tmp_path / "out").ok
    if to == "npz":
        (tmp_path / "sibling.py").write_text("a file has no folder of its own")
        assert wherry.verify(tmp_path / "out").ok
        return
    (tmp_path / "out" / "code" / "run.py").parent.mkdir()
    (tmp_path / "out" / "code" / "run.py").write_text("import os")
    found = wherry.verify(tmp_path / "out")
    assert [(found.verdict, row.path) for row in found.failed] == [("added", "code/run.py")]


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("registered_model_meta", "registered_model_meta"),
        (".cache/huggingface/download/config.json.metadata", ".cache"),
        (".git/HEAD", ".git"),
        ("checkpoint-500/model.safetensors", "checkpoint-500"),
        (".DS_Store", ".DS_Store"),
    ],
)
def test_what_known_readers_leave_is_named_and_allowed(made, name, named):
    (made / name).parent.mkdir(parents=True, exist_ok=True)
    (made / name).write_text("left")
    for level in READING:
        found = wherry.verify(made, level=level)
        assert found.ok, found.failed
        [warning] = [one for one in found.warnings if named in one]
        assert warning.startswith(f"{named}: not in the record, but allowed: ")


def test_a_checkpoint_inside_the_folder_is_named_by_its_folder(made, source):
    wherry.convert(source, made / "arrays" / "orbax", to="orbax")
    found = wherry.verify(made)
    assert found.ok
    assert found.warnings == (
        "arrays/orbax: not in the record, but allowed: a checkpoint of its own, with its own record",
    )
    (made / "arrays" / "run.py").write_text("")
    assert [row.path for row in wherry.verify(made).failed] == ["arrays/run.py"]


def test_a_sidecar_below_excuses_nothing_in_a_folder_of_the_checkpoint(source, tmp_path):
    wherry.convert(source, tmp_path / "out", to="orbax")
    (tmp_path / "out" / "d" / "wherry.json").write_text("{}")
    (tmp_path / "out" / "d" / "run.py").write_text("")
    found = wherry.verify(tmp_path / "out")
    assert [row.path for row in found.failed] == ["d/run.py", "d/wherry.json"]


def test_a_known_name_is_known_at_the_top_only():
    assert known_file("registered_model_meta")
    assert not known_file("code/registered_model_meta")
    assert not known_file("registered_model_meta.py")
    assert len({row.what for row in KNOWN}) == len(KNOWN)


def test_both_are_named_where_bytes_differ_as_well(made):
    data = bytearray((made / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (made / "model.safetensors").write_bytes(data)
    (made / "setup.py").write_text("")
    found = wherry.verify(made, level="digest")
    assert found.verdict == "altered"
    assert "setup.py" in [row.path for row in found.failed]
    assert len(found.failed) == 2


def test_a_companion_cannot_be_excused_by_the_list(made):
    (made / "modeling_llama.py").write_text("import os")
    record = json.loads((made / "wherry.json").read_text())
    assert record["files"]["config.json"] == 2
    record["files"]["modeling_llama.py"] = 9
    (made / "wherry.json").write_text(json.dumps(record))
    assert wherry.verify(made).verdict == "added"


@pytest.mark.parametrize("level", READING)
def test_a_file_that_is_missing_or_has_another_size_is_found(source, tmp_path, level):
    wherry.convert(source, tmp_path / "out", to="orbax")
    mark = tmp_path / "out" / "commit_success.txt"
    mark.write_text("longer")
    found = wherry.verify(tmp_path / "out", level=level)
    assert [(found.verdict, row.path, row.reason) for row in found.failed] == [
        ("altered", "commit_success.txt", "size mismatch: expected 19 bytes, got 6")
    ]
    mark.unlink()
    found = wherry.verify(tmp_path / "out", level=level)
    assert [(found.verdict, found.exit_code, row.path) for row in found.failed] == [
        ("incomplete", 5, "commit_success.txt")
    ]


def test_bytes_after_the_end_of_one_file_are_found(tmp_path):
    save_file({"w": np.ones(3)}, tmp_path / "a.safetensors")
    wherry.convert(tmp_path / "a.safetensors", tmp_path / "a.npz", to="npz")
    with (tmp_path / "a.npz").open("ab") as file:
        file.write(bytes(64))
    found = wherry.verify(tmp_path / "a.npz", level="digest")
    assert (found.verdict, [row.path for row in found.failed]) in [("altered", ["."]), ("corrupt", [""])]


def test_files_of_a_trainer_that_were_there_are_in_the_record(source):
    (source / "optimizer.pt").write_bytes(b"state")
    wherry.inspect(source, write=True)
    assert wherry.verify(source, level="digest").ok
    (source / "optimizer.pt").unlink()  # it is no part of the checkpoint
    assert wherry.verify(source).ok
    (source / "scheduler.pt").write_bytes(b"state")
    assert wherry.verify(source).verdict == "added"


def test_a_record_from_which_the_list_was_removed_is_invalid(made):
    record = json.loads((made / "wherry.json").read_text())
    del record["files"]
    (made / "wherry.json").write_text(json.dumps(record))
    with pytest.raises(CorruptError, match=r"invalid sidecar: .*files"):
        read_sidecar(locate(made))


def test_a_record_without_a_list_says_so_and_knows_the_companions(made):
    from dataclasses import replace

    sidecar = read_sidecar(locate(made))
    assert sidecar is not None
    (made / "wherry.json").write_bytes(encode(replace(sidecar, files=None)))
    (made / "pytorch_model.bin").write_bytes(b"other weights")
    found = wherry.verify(made)
    assert found.ok
    assert "has no list of files" in found.warnings[0]
    (made / "modeling_llama.py").write_text("import os")
    assert [row.path for row in wherry.verify(made).failed] == ["modeling_llama.py"]


def test_without_a_record_nothing_is_compared_and_the_outcome_says_so(source, made):
    (source / "modeling_llama.py").write_text("import os")
    assert wherry.verify(source).to_json()["recorded"] is False
    assert wherry.verify(made).to_json()["recorded"] is True


def test_a_damaged_list_of_files_is_corrupt(made):
    record = json.loads((made / "wherry.json").read_text())
    for files in ([], {"model.safetensors": "large"}, {"model.safetensors": True}, 3):
        (made / "wherry.json").write_text(json.dumps({**record, "files": files}))
        assert wherry.verify(made).verdict == "corrupt"


def test_an_audit_finds_it_from_names(made):
    (made / "setup.py").write_text("")
    report = audit()
    [finding] = [one for one in report.findings if one.kind == "added"]
    assert (Path(finding.uri), finding.path, report.exit_code) == (made, "setup.py", 9)
    assert finding.cure
    assert "added" in {one.kind for one in audit(level="digest").findings}


def test_a_copy_without_it_is_fetched_and_with_it_refused(made, tmp_path):
    (made / "registered_model_meta").write_text("model_name: small")
    wherry.fetch(made, tmp_path / "copy")
    (made / "modeling_llama.py").write_text("import os")
    with pytest.raises(MismatchError, match=r"modeling_llama\.py has no recorded digest"):
        wherry.fetch(made, tmp_path / "again")


def test_an_outcome_with_added_files_is_no_damage_and_no_proof(made):
    (made / "setup.py").write_text("")
    wherry.verify(made, level="digest", record=True)
    (made / "setup.py").unlink()
    assert not [one for one in audit().findings if one.kind in ("known-damage", "added")]
