"""Metadata-only rewrites: the result is restored by Orbax and hashes equal; nothing is left of a failed one."""

from __future__ import annotations

import json
import shutil

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

import wherry
from tests import orbax_support as support
from tests.orbax_support import copied, expectation, needs_corpus
from wherry.errors import IncompleteError, NotFoundError, TargetExistsError, UnsupportedError, UsageError
from wherry.integrations.orbax.rewrite import box, merge, unbox


def hashes(folder):
    with wherry.open(folder) as checkpoint:
        return {path: checkpoint.read(path).tobytes() for path in checkpoint.manifest.tensors}


def snapshot(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def wanted_hashes(case):
    return {tuple(row["path"]): row["sha256"] for row in expectation(case)["tensors"]}


def sha256(found):
    import hashlib

    return {path: hashlib.sha256(data).hexdigest() for path, data in found.items()}


@needs_corpus
def test_an_unmerged_save_becomes_a_committed_item(tmp_path):
    case = "defect-orbax-unmerged-ocdbt"
    source = copied(case, tmp_path)
    before = snapshot(source)
    assert wherry.detect(source).verdict == "incomplete"
    done = merge(source, tmp_path / "merged")
    assert done.arrays == len(wanted_hashes(case))
    assert snapshot(source) == before
    assert wherry.detect(tmp_path / "merged").verdict == "ok"
    assert sha256(hashes(tmp_path / "merged")) == wanted_hashes(case)
    tree = tree_of(tmp_path / "merged")
    support.assert_same_tree(restored(tmp_path / "merged", tree), tree)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".wherry")]


@needs_corpus
def test_in_place_only_adds_and_keeps_what_it_changes(tmp_path):
    case = "defect-orbax-unmerged-ocdbt"
    source = copied(case, tmp_path)
    metadata = json.loads((source / "_CHECKPOINT_METADATA").read_text())
    (source / "_CHECKPOINT_METADATA").write_text(json.dumps({**metadata, "commit_timestamp_nsecs": None}))
    before = snapshot(source)
    merge(source, in_place=True)
    after = snapshot(source)
    changed = {name for name, data in before.items() if after[name] != data}
    assert changed == {"_CHECKPOINT_METADATA"}
    assert after["_CHECKPOINT_METADATA.before"] == before["_CHECKPOINT_METADATA"]
    assert sha256(hashes(source)) == wanted_hashes(case)
    assert wherry.detect(source).verdict == "ok"
    support.assert_same_tree(restored(source, tree_of(source)), tree_of(source))
    with pytest.raises(UsageError, match="no unmerged"):
        merge(source, tmp_path / "again")


@needs_corpus
def test_a_killed_save_with_its_temporary_name(tmp_path):
    case = "defect-orbax-unmerged-ocdbt"
    source = copied(case, tmp_path)
    temporary = source.rename(source.parent / f"{source.name}.orbax-checkpoint-tmp")
    with pytest.raises(UsageError, match="never committed"):
        merge(temporary, in_place=True)
    merge(temporary, tmp_path / "merged")
    assert sha256(hashes(tmp_path / "merged")) == wanted_hashes(case)


def restored(folder, like):
    """What Orbax restores as numpy arrays, whatever devices it was saved on."""
    as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), like)
    return ocp.PyTreeCheckpointer().restore(folder, restore_args=as_numpy)


def tree_of(folder):
    """The nested tree of an item, read by us."""
    with wherry.open(folder) as checkpoint:
        arrays = {path: checkpoint.read(path) for path in checkpoint.manifest.tensors}
        return support.nested(checkpoint.manifest, arrays)


def two_process_item(folder, arrays):
    """An item whose arrays lie in two databases that were never merged, as two processes leave it."""
    names = sorted(arrays)
    halves = (names[::2], names[1::2])
    for number, half in enumerate(halves):
        part = folder.parent / f"part{number}"
        support.write(part, {name: arrays[name] for name in half})
        process = folder / f"ocdbt.process_{number}"
        if (part / "ocdbt.process_0").exists():
            shutil.copytree(part / "ocdbt.process_0", process)
        else:
            shutil.copytree(part / "d", process / "d")
            shutil.copy(part / "manifest.ocdbt", process)
    whole = folder.parent / "whole"
    manifest = support.write(whole, arrays)
    shutil.copy(whole / "_METADATA", folder / "_METADATA")
    return manifest


def test_two_processes(tmp_path):
    arrays = support.sample()
    (tmp_path / "item").mkdir()
    manifest = two_process_item(tmp_path / "item", arrays)
    merge(tmp_path / "item", tmp_path / "merged")
    assert hashes(tmp_path / "merged") == {path: array.tobytes() for path, array in arrays.items()}
    found = ocp.StandardCheckpointer().restore(tmp_path / "merged")
    support.assert_same_tree(found, support.nested(manifest, arrays))


def test_what_no_process_wrote_is_named_and_nothing_is_left(tmp_path):
    arrays = support.sample()
    (tmp_path / "item").mkdir()
    two_process_item(tmp_path / "item", arrays)
    shutil.rmtree(tmp_path / "item" / "ocdbt.process_1")
    there = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(IncompleteError, match="no process wrote"):
        merge(tmp_path / "item", tmp_path / "merged")
    with pytest.raises(IncompleteError):
        merge(tmp_path / "item", in_place=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == there
    assert not (tmp_path / "item" / "manifest.ocdbt").exists()


def boxed():
    rng = np.random.default_rng(5)
    large = rng.standard_normal((40, 33)).astype(np.float32)
    return {
        ("params", "wi", "kernel", "value"): large,
        ("params", "wi", "bias", "value"): large[0].copy(),
        ("params", "norm", "scale"): large[1].copy(),
        ("params", "attention", "value", "kernel", "value"): large.astype(np.float16),
        ("params", "mixed", "value"): large[2].copy(),
        ("params", "mixed", "other"): large[3].copy(),
    }


@pytest.mark.parametrize(
    "options", [{}, {"ocdbt": False}, {"zarr": "3"}, {"zarr": "3", "compression": "zstd"}]
)
def test_unboxing_and_boxing(tmp_path, options):
    arrays = boxed()
    axes = {("params", "wi", "kernel", "value"): ("embed", "mlp")}
    manifest = support.manifest_of(arrays, values={("name",): "run"})
    from dataclasses import replace

    specs = {path: replace(spec, axes=axes.get(path)) for path, spec in manifest.tensors.items()}
    support.write(tmp_path / "boxed", arrays, replace(manifest, tensors=specs), **options)
    before = snapshot(tmp_path / "boxed")
    done = unbox(tmp_path / "boxed", tmp_path / "plain")
    wanted = {done.renamed.get(path, path): array for path, array in arrays.items()}
    assert set(wanted) == {
        ("params", "wi", "kernel"),
        ("params", "wi", "bias"),
        ("params", "norm", "scale"),
        ("params", "attention", "value", "kernel"),
        ("params", "mixed", "value"),
        ("params", "mixed", "other"),
    }
    assert hashes(tmp_path / "plain") == {path: array.tobytes() for path, array in wanted.items()}
    found = ocp.PyTreeCheckpointer().restore(tmp_path / "plain")
    support.assert_same_tree(
        found, support.nested(support.manifest_of(wanted, values={("name",): "run"}), wanted)
    )
    with wherry.open(tmp_path / "plain") as checkpoint:
        assert checkpoint.manifest.tensors[("params", "wi", "kernel")].axes == ("embed", "mlp")
        assert checkpoint.manifest.values == {("name",): "run"}
    again = [done.renamed[path] for path in done.renamed]
    box(tmp_path / "plain", tmp_path / "again", again)
    assert hashes(tmp_path / "again") == {path: array.tobytes() for path, array in arrays.items()}
    support.assert_same_tree(
        ocp.PyTreeCheckpointer().restore(tmp_path / "again"),
        support.nested(support.manifest_of(arrays, values={("name",): "run"}), arrays),
    )
    assert snapshot(tmp_path / "boxed") == before


@needs_corpus
def test_boxes_that_flax_wrote(tmp_path):
    source = copied("flax-linen-boxed-scan", tmp_path)
    done = unbox(source, tmp_path / "plain")
    assert len(done.renamed) == 12
    found = sha256(hashes(tmp_path / "plain"))
    assert found == {
        done.renamed.get(path, path): row for path, row in wanted_hashes("flax-linen-boxed-scan").items()
    }
    kernel = ocp.StandardCheckpointer().restore(tmp_path / "plain")["params"]["layers"]["wi"]["kernel"]
    assert np.asarray(kernel).tobytes() == hashes(tmp_path / "plain")["params", "layers", "wi", "kernel"]
    with pytest.raises(UsageError, match="boxed"):
        unbox(tmp_path / "plain", tmp_path / "again")
    with pytest.raises(TargetExistsError):
        unbox(source, tmp_path / "plain")
    with pytest.raises(NotFoundError):
        box(tmp_path / "plain", tmp_path / "again", [("nothing",)])


@needs_corpus
def test_an_aggregate_has_its_keys_among_its_tensors(tmp_path):
    source = copied("orbax-044-aggregate", tmp_path)
    with pytest.raises(UnsupportedError, match="among the tensors"):
        box(source, tmp_path / "boxed", [("step",)])
