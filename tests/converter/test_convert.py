"""convert: whole or not at all, proved, repeatable; the source is never changed; several targets."""

from __future__ import annotations

import hashlib
import json
import os
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import wherry
from tests.support.command import small
from tests.support.signing import key_pair
from wherry.cli import main
from wherry.converter import job
from wherry.converter.convert import convert_all
from wherry.core.request import TargetRequest, convert_request
from wherry.errors import MismatchError, StorageError, TargetExistsError, UnrepresentableError, UsageError
from wherry.formats.registry import find_format
from wherry.store.local_store import locate
from wherry.store.sidecar import read_sidecar
from wherry.trace.lineage import show

TENSORS = {
    "model.layers.0.weight": np.arange(300_000, dtype="<f4").reshape(300, 1000),
    "model.layers.1.weight": np.arange(12, dtype="<i8").reshape(3, 4),
    "scale": np.array(2.5, dtype="<f2"),
}


@pytest.fixture
def model(tmp_path):
    """A Hugging Face folder with a config and a tokenizer."""
    folder = tmp_path / "model"
    folder.mkdir()
    save_file(TENSORS, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"model_type": "tiny", "transformers_version": "5.0.0"}))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def tree(folder):
    return {
        str(path.relative_to(folder)): (
            hashlib.sha256(path.read_bytes()).hexdigest(),
            path.stat().st_mtime_ns,
        )
        for path in sorted(Path(folder).rglob("*"))
        if path.is_file()
    }


def read_all(uri):
    with wherry.open(uri) as checkpoint:
        return {path: checkpoint.read(path) for path in checkpoint.manifest.tensors}


@pytest.mark.parametrize("options", [{}, {"zarr": "3"}, {"ocdbt": "false"}, {"compression": "zstd"}], ids=str)
def test_there_and_back_keeps_every_bit_and_the_weights_digest(model, tmp_path, options):
    before = tree(model)
    there = wherry.convert(model, tmp_path / "orbax", to="orbax", options=options)
    back = wherry.convert(tmp_path / "orbax", tmp_path / "back", to="hf")
    assert there.source.weights_digest == there.target.weights_digest == back.target.weights_digest
    assert there.source.checkpoint_digest != there.target.checkpoint_digest
    assert back.source.checkpoint_digest == there.target.checkpoint_digest
    for name, array in load_file(tmp_path / "back/model.safetensors").items():
        assert array.tobytes() == TENSORS[name].tobytes()
        assert array.shape == TENSORS[name].shape
    assert json.loads((tmp_path / "back/config.json").read_text())["model_type"] == "tiny"
    assert tree(model) == before


def test_identity_of_a_checkpoint_does_not_depend_on_the_path_it_took(model, tmp_path):
    one = wherry.convert(model, tmp_path / "a", to="hf")
    two = wherry.convert(model, tmp_path / "b", to="hf")
    assert one.target.checkpoint_digest == two.target.checkpoint_digest
    assert one.plan_digest == two.plan_digest


def test_an_unchanged_rerun_does_nothing(model, tmp_path):
    wherry.convert(model, tmp_path / "out", to="orbax")
    before = tree(tmp_path / "out")
    again = wherry.convert(model, tmp_path / "out", to="orbax")
    assert again.already
    assert tree(tmp_path / "out") == before


def test_another_conversion_never_touches_what_is_there(model, tmp_path):
    wherry.convert(model, tmp_path / "out", to="orbax")
    before = tree(tmp_path / "out")
    with pytest.raises(TargetExistsError):
        wherry.convert(model, tmp_path / "out", to="orbax", options={"zarr": "3"})
    assert wherry.convert(
        model, tmp_path / "out", to="orbax", options={"zarr": "3"}, if_exists="skip"
    ).already
    assert tree(tmp_path / "out") == before


def test_a_changed_source_is_not_the_same_conversion(model, tmp_path):
    wherry.convert(model, tmp_path / "out", to="orbax")
    changed = {**TENSORS, "scale": np.array(3.5, dtype="<f2")}
    save_file(changed, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(TargetExistsError):
        wherry.convert(model, tmp_path / "out", to="orbax")


def test_a_target_that_was_altered_is_not_the_result_any_more(model, tmp_path):
    wherry.convert(model, tmp_path / "out", to="hf")
    (tmp_path / "out/tokenizer.json").write_text('{"swapped": true}')
    with pytest.raises(TargetExistsError):
        wherry.convert(model, tmp_path / "out", to="hf")


def test_a_source_that_changed_since_we_wrote_it_is_refused(model, tmp_path):
    wherry.convert(model, tmp_path / "first", to="hf")
    weights = tmp_path / "first/model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-5] ^= 1
    weights.write_bytes(data)
    with pytest.raises(MismatchError, match="has changed since it was recorded"):
        wherry.convert(tmp_path / "first", tmp_path / "out", to="orbax")
    assert not (tmp_path / "out").exists()


def test_read_back_finds_what_the_disk_did_to_the_bytes(model, tmp_path, monkeypatch):
    import importlib

    job = importlib.import_module("wherry.converter.job")
    real = job.finish

    def damage(writer):
        real(writer)
        (staged,) = tmp_path.glob(".wherry-*/out/model.safetensors")
        data = bytearray(staged.read_bytes())
        data[-3] ^= 1
        staged.write_bytes(data)

    monkeypatch.setattr(job, "finish", damage)
    with pytest.raises(MismatchError, match=r"read-back differs .*leaf 0.*tensor"):
        wherry.convert(model, tmp_path / "out", to="hf")
    assert sorted(os.listdir(tmp_path)) == ["model"]


@pytest.mark.parametrize("change", ["more", "less"])
def test_read_back_finds_tensors_that_nobody_planned(model, tmp_path, monkeypatch, change):
    import importlib

    job = importlib.import_module("wherry.converter.job")
    real = job.finish

    def other(writer):
        real(writer)
        (staged,) = tmp_path.glob(".wherry-*/out/model.safetensors")
        tensors = load_file(staged)
        tensors.pop(min(tensors)) if change == "less" else tensors.update(extra=np.ones(3, np.float32))
        save_file(tensors, staged, {"format": "pt"})

    monkeypatch.setattr(job, "finish", other)
    with pytest.raises(MismatchError, match="read-back differs from the plan in shape or dtype"):
        wherry.convert(model, tmp_path / "out", to="hf")
    assert sorted(os.listdir(tmp_path)) == ["model"]


def test_split_makes_a_tree_and_join_takes_it_apart(model, tmp_path):
    wherry.convert(model, tmp_path / "tree", to="orbax", options={"split": "."})
    assert ("model", "layers", "0", "weight") in read_all(tmp_path / "tree")
    with pytest.raises(UnrepresentableError, match="cannot hold a key path of 4 parts"):
        wherry.convert(tmp_path / "tree", tmp_path / "flat", to="hf")
    wherry.convert(tmp_path / "tree", tmp_path / "flat", to="hf", options={"join": "."})
    assert set(load_file(tmp_path / "flat/model.safetensors")) == set(TENSORS)
    assert wherry.verify(tmp_path / "tree", against=model).ok
    assert wherry.verify(tmp_path / "flat", level="digest").ok


def test_split_that_would_lose_a_tensor_is_refused(tmp_path):
    save_file({"a": np.zeros(1), "a.b": np.zeros(1)}, tmp_path / "m.safetensors")
    with pytest.raises(
        UnrepresentableError, match="key collision: a would be both a tensor and the parent of a/b"
    ):
        wherry.convert(tmp_path / "m.safetensors", tmp_path / "out", to="orbax", options={"split": "."})


def test_what_the_target_cannot_hold_is_refused_by_name(tmp_path):
    save_file({"empty": np.zeros((0, 3), dtype="f4"), "x": np.zeros(2)}, tmp_path / "m.safetensors")
    with pytest.raises(
        UnrepresentableError, match=r"orbax cannot hold a tensor without elements \(tensor empty"
    ):
        wherry.convert(tmp_path / "m.safetensors", tmp_path / "out", to="orbax")
    assert sorted(os.listdir(tmp_path)) == ["m.safetensors"]


def test_single_file_target_has_its_sidecar_next_to_it(model, tmp_path):
    receipt = wherry.convert(model, tmp_path / "one.safetensors", to="safetensors")
    assert sorted(os.listdir(tmp_path)) == ["model", "one.safetensors", "one.safetensors.wherry.json"]
    sidecar = read_sidecar(locate(tmp_path / "one.safetensors"))
    assert sidecar.checkpoint == receipt.target
    assert sidecar.receipt.plan_digest == receipt.plan_digest
    assert wherry.verify(tmp_path / "one.safetensors", level="digest").ok
    assert wherry.convert(model, tmp_path / "one.safetensors", to="safetensors").already


def test_a_target_inside_the_source_is_refused(model):
    with pytest.raises(UsageError, match="inside the source"):
        wherry.convert(model, model / "out", to="orbax")


def test_user_metadata_is_kept(model, tmp_path):
    wherry.convert(model, tmp_path / "out", to="hf", meta={"commit": "abc"})
    assert read_sidecar(locate(tmp_path / "out")).manifest.origin["meta"] == {"commit": "abc"}


def test_into_makes_the_step_folder_of_a_run(model, tmp_path):
    receipt = wherry.convert(model, tmp_path / "run", to="orbax", into=True, as_step=7)
    assert receipt.target.uri == str(tmp_path / "run/7/default")
    found = wherry.detect(tmp_path / "run")
    assert (found.format, found.step, found.verdict) == ("orbax", 7, "ok")
    with pytest.raises(UsageError, match="has no step number"):
        wherry.convert(model, tmp_path / "run", to="orbax", into=True)


def test_to_an_object_store_and_back(model, tmp_path):
    target = f"memory://bucket/{tmp_path.name}/out"
    there = wherry.convert(model, target, to="hf")
    assert wherry.detect(target).verdict == "ok"
    assert wherry.verify(target, level="digest").ok
    assert wherry.convert(model, target, to="hf").already
    back = wherry.convert(target, tmp_path / "back", to="orbax")
    assert back.source.checkpoint_digest == there.target.checkpoint_digest


def test_progress_ends_at_the_total_and_never_runs_back(model, tmp_path):
    seen = []
    wherry.convert(model, tmp_path / "out", to="orbax", progress=seen.append)
    moved = [now.done for now in seen if now.stage == "convert"]
    assert moved == sorted(moved)
    assert moved[-1] == seen[0].total == sum(array.nbytes for array in TENSORS.values())


def test_plan_writes_nothing_and_says_what_will_happen(model, tmp_path):
    plan = wherry.plan(model, tmp_path / "out", to="orbax")
    data = plan.to_json()
    assert sorted(os.listdir(tmp_path)) == ["model"]
    assert data["tensors"] == 3
    assert data["bytes_out"] == sum(array.nbytes for array in TENSORS.values())
    assert data["parameters"]["found"] == sum(array.size for array in TENSORS.values())
    assert wherry.convert(model, tmp_path / "out", to="orbax").plan_digest == plan.digest


@pytest.mark.parametrize(
    "wrong",
    [{"to": "nothing"}, {"to": "orbax", "options": {"zzz": "1"}}, {"to": "orbax", "memory": "x"},
     {"to": "orbax", "verify": "maybe"}, {"to": "orbax", "options": {"zarr": "9"}},
     {"to": "orbax", "ignore": ("all",)}],
)  # fmt: skip
def test_requests_that_make_no_sense_are_usage_errors(model, tmp_path, wrong):
    with pytest.raises(UsageError):
        wherry.convert(model, tmp_path / "out", **wrong)
    assert sorted(os.listdir(tmp_path)) == ["model"]


def test_several_targets_are_made_in_one_pass(model, tmp_path, monkeypatch):
    from wherry.mover import carrier, source

    read = []
    real, fill = source.read_span, carrier.fill_range
    monkeypatch.setattr(source, "read_span", lambda *a, **k: (read.append(a[1].nbytes), real(*a, **k)))
    monkeypatch.setattr(carrier, "fill_range", lambda *a, **k: (read.append(len(a[2])), fill(*a, **k)))
    targets = [
        TargetRequest(str(tmp_path / "a"), "orbax"),
        TargetRequest(str(tmp_path / "b"), "hf", {"max_shard_size": "1MB"}),
        TargetRequest(str(tmp_path / "c.safetensors"), "safetensors"),
    ]
    group = convert_all(convert_request(model, targets, verify="none"))
    receipts = group.receipts
    assert {receipt.group for receipt in receipts} == {group.group}
    assert group.to_json()["bytes_written"] == 3 * group.to_json()["bytes_read"]
    assert read_sidecar(locate(targets[0].uri)).receipt.group == group.group
    assert sum(read) == sum(array.nbytes for array in TENSORS.values())
    assert len({receipt.target.weights_digest for receipt in receipts}) == 1
    assert len({receipt.source.checkpoint_digest for receipt in receipts}) == 1
    assert len({receipt.target.checkpoint_digest for receipt in receipts}) == 3
    for target in targets:
        assert wherry.verify(target.uri, level="digest").ok
    assert all(receipt.already for receipt in convert_all(convert_request(model, targets)).receipts)


def test_one_target_that_fails_does_not_stop_the_others(model, tmp_path, monkeypatch):
    from wherry.errors import StorageError
    from wherry.target.files import FlatFiles

    def full(*_arguments):
        raise StorageError("storage failed: No space left on device")

    monkeypatch.setattr(FlatFiles, "add", full)
    with pytest.raises(StorageError, match="No space"):
        convert_all(
            convert_request(
                model,
                [
                    TargetRequest(str(tmp_path / "a"), "orbax", {"ocdbt": "false"}),
                    TargetRequest(str(tmp_path / "b"), "hf"),
                ],
            )
        )
    assert sorted(os.listdir(tmp_path)) == ["model"]
    monkeypatch.undo()

    sync = FlatFiles.sync
    monkeypatch.setattr(
        FlatFiles, "sync", lambda files: full() if "model.safetensors" in files._sizes else sync(files)
    )
    with pytest.raises(StorageError, match="No space"):
        convert_all(
            convert_request(
                model,
                [
                    TargetRequest(str(tmp_path / "a"), "orbax", {"ocdbt": "false"}),
                    TargetRequest(str(tmp_path / "b"), "hf"),
                ],
            )
        )
    assert sorted(os.listdir(tmp_path)) == ["a", "model"]
    assert wherry.verify(tmp_path / "a", level="digest").ok


def test_two_targets_in_one_place_are_refused(model, tmp_path):
    with pytest.raises(UsageError, match="duplicate target"):
        convert_all(
            convert_request(
                model, [TargetRequest(str(tmp_path / "a"), "orbax"), TargetRequest(str(tmp_path / "a"), "hf")]
            )
        )


# Several targets of which one fails: the others are committed, recorded, signed and named.


@pytest.fixture
def source(tmp_path):
    return small(tmp_path / "source.safetensors")


@pytest.fixture
def full(monkeypatch):
    """A storage that takes no npz file."""
    real = job.complete

    def complete(staged, hashes):
        if staged.job.target.uri.endswith(".npz"):
            raise StorageError("storage failed: No space left on device", uri=staged.job.target.uri)
        return real(staged, hashes)

    monkeypatch.setattr(job, "complete", complete)


def targets(tmp_path):
    places = {"npz": tmp_path / "b.npz", "orbax": tmp_path / "a", "flax-msgpack": tmp_path / "c.msgpack"}
    return [TargetRequest(str(place), to) for to, place in places.items()]


def test_the_others_are_recorded_signed_and_named(source, tmp_path, full, monkeypatch):
    failed = []
    monkeypatch.setattr(
        import_module("wherry.converter.convert"), "report_failure", lambda *words: failed.append(words[2])
    )
    wherry.convert(source, tmp_path / "c.msgpack", to="flax-msgpack", lineage=False)
    key, _public = key_pair(tmp_path)
    with pytest.raises(StorageError, match="No space left") as caught:
        convert_all(convert_request(source, targets(tmp_path), sign=key))
    error = caught.value
    made = [tmp_path / "a", tmp_path / "c.msgpack"]
    assert {number: one.target.uri for number, one in error.committed.items()} == {
        1: str(made[0]), 2: str(made[1]),
    }  # fmt: skip
    assert [show(place).edges[0].statement for place in made] == [1, 2]
    assert [(tmp_path / name).exists() for name in ("a/wherry.sig", "c.msgpack.wherry.sig")] == [True, True]
    assert failed == [str(tmp_path / "b.npz")]
    assert error.__notes__ == [f"these targets are committed: {made[0]}, {made[1]}"]


def test_the_command_says_what_is_committed(source, tmp_path, full, capsys):
    line = [
        "convert",
        str(source),
        "--to",
        "npz",
        str(tmp_path / "b.npz"),
        "--to",
        "orbax",
        str(tmp_path / "a"),
    ]
    with pytest.raises(SystemExit) as ended:
        main([*line, "--json"])
    shown = capsys.readouterr()
    assert ended.value.code == 10
    assert json.loads(shown.out)["error"] == "StorageError"
    assert shown.err.splitlines()[-1] == f"note: these targets are committed: {tmp_path / 'a'}"


def test_what_cannot_be_recorded_either_is_a_note(source, tmp_path, full, monkeypatch):
    monkeypatch.setenv("WHERRY_LEDGER", f"sqlite:///{tmp_path}")
    with pytest.raises(StorageError, match="No space left") as caught:
        convert_all(convert_request(source, targets(tmp_path)[:2]))
    assert f"run `wherry ledger record {tmp_path / 'a'}`" in caught.value.__notes__[1]
    assert caught.value.committed[1].lineage.startswith("not recorded: the ledger")


def test_without_lineage_nothing_is_recorded(source, tmp_path, full):
    with pytest.raises(StorageError) as caught:
        convert_all(convert_request(source, targets(tmp_path)[:2], lineage=False))
    assert caught.value.committed[1].lineage == "left out by request"
    assert show(tmp_path / "a").edges[0].statement is None


def test_a_pass_that_fails_keeps_no_other_from_being_made(tmp_path, monkeypatch):
    row, sent = find_format("npz"), locate(f"memory://bucket{tmp_path}/a.npz")  # which has a pass of its own
    one, other = (SimpleNamespace(checkpoint=object(), row=row, committed=sent) for _ in range(2))
    error = StorageError("gone")

    def carried(jobs):
        if jobs[0] is other:
            raise error
        return ["receipt"] * len(jobs)

    monkeypatch.setattr(job, "_pass", carried)
    assert job.run([other, one, other]) == [error, "receipt", error]
