"""Rewrites of Orbax: saves that were killed, and boxed keys."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from dataclasses import replace
from importlib import import_module

import numpy as np
import orbax.checkpoint as ocp
import pytest

import wherry
from tests.support import orbax as support
from tests.support.orbax import copied, needs_corpus
from tests.support.rewrite import hashes, renamed, restored, sha256, snapshot, tree_of, wanted_hashes
from wherry.errors import (
    IncompleteError,
    MismatchError,
    NotFoundError,
    TargetExistsError,
    UnrepresentableError,
    UnsupportedError,
    UsageError,
)
from wherry.formats.registry import checked_options


def merge(source, target=None, **more):
    return wherry.rewrite(source, target, as_="merge", **more)


@needs_corpus
def test_an_unmerged_save_becomes_a_committed_item(tmp_path):
    case = "defect-orbax-unmerged-ocdbt"
    source = copied(case, tmp_path)
    before = snapshot(source)
    assert wherry.detect(source).verdict == "incomplete"
    done = merge(source, tmp_path / "merged")
    assert done.rewriting.tensors == len(wanted_hashes(case))
    assert done.receipt.source.weights_digest == done.receipt.target.weights_digest
    assert done.receipt.verification["ok"]
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
    assert "wherry.json" in after
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
    with pytest.raises(UnsupportedError, match="name of an uncommitted save"):
        merge(temporary, in_place=True)
    merge(temporary, tmp_path / "merged")
    assert sha256(hashes(tmp_path / "merged")) == wanted_hashes(case)


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


def test_a_save_that_was_never_merged_is_not_marked_as_committed(tmp_path):
    (tmp_path / "item").mkdir()
    two_process_item(tmp_path / "item", support.sample())
    with pytest.raises(UsageError, match="never merged") as caught:
        wherry.rewrite(tmp_path / "item", tmp_path / "committed", as_="commit")
    assert caught.value.cure == "pass --as merge"
    assert not (tmp_path / "committed").exists()


def test_two_processes(tmp_path):
    arrays = support.sample()
    (tmp_path / "item").mkdir()
    manifest = two_process_item(tmp_path / "item", arrays)
    merge(tmp_path / "item", tmp_path / "merged")
    assert hashes(tmp_path / "merged") == {path: array.tobytes() for path, array in arrays.items()}
    found = ocp.StandardCheckpointer().restore(tmp_path / "merged")
    support.assert_same_tree(found, support.nested(manifest, arrays))


@pytest.fixture
def item(tmp_path):
    folder = tmp_path / "source" / "item"
    folder.mkdir(parents=True)
    two_process_item(folder, support.sample())
    return folder


def while_carried(monkeypatch, act):
    module = import_module("wherry.converter.rewrite")
    original = module.carry

    def carry(*arguments):
        act()
        return original(*arguments)

    monkeypatch.setattr(module, "carry", carry)


def test_a_file_that_appears_is_a_change(tmp_path, monkeypatch, item):
    """Without the rewrite a save that was never committed does not open."""
    while_carried(monkeypatch, lambda: (item / "new").write_text("log"))
    with pytest.raises(MismatchError, match="added"):
        merge(item, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_a_file_that_goes_away_is_a_change(tmp_path, monkeypatch, item):
    lost = item / "_METADATA"
    while_carried(monkeypatch, lost.unlink)
    with pytest.raises(MismatchError, match="removed") as caught:
        merge(item, tmp_path / "merged")
    assert caught.value.uri == str(lost)
    assert not (tmp_path / "merged").exists()


def test_what_no_process_wrote_is_named_and_nothing_is_left(tmp_path):
    arrays = support.sample()
    (tmp_path / "item").mkdir()
    two_process_item(tmp_path / "item", arrays)
    shutil.rmtree(tmp_path / "item" / "ocdbt.process_1")
    there = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(IncompleteError, match=r"missing .zarray or zarr.json for \d+ arrays"):
        merge(tmp_path / "item", tmp_path / "merged")
    with pytest.raises(IncompleteError):
        merge(tmp_path / "item", in_place=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == there
    assert not (tmp_path / "item" / "manifest.ocdbt").exists()


@needs_corpus
def test_the_cure_of_the_error_is_a_command_that_works(tmp_path, capsys):
    """What opening an unmerged save answers can be typed as it stands, with a target."""
    from wherry.cli import main

    source = copied("defect-orbax-unmerged-ocdbt", tmp_path)
    with pytest.raises(IncompleteError) as caught, wherry.open(source):
        pass
    with pytest.raises(IncompleteError) as again:
        wherry.convert(source, tmp_path / "out", to="torch-zip")
    assert caught.value.cure == again.value.cure
    command = shlex.split(re.findall("`(.*?)`", caught.value.cure)[0])
    assert command[:3] == ["wherry", "rewrite", str(source)]
    words = [str(tmp_path / "merged") if word == "TARGET" else word for word in command[1:]]
    with pytest.raises(SystemExit) as done:
        main([*words, "--json"])
    assert done.value.code == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["receipt"]["verification"]["ok"] is True
    assert sha256(hashes(tmp_path / "merged")) == wanted_hashes("defect-orbax-unmerged-ocdbt")
    wherry.convert(tmp_path / "merged", tmp_path / "out", to="torch-zip")


@needs_corpus
def test_a_save_that_only_lacks_its_name(tmp_path):
    source = copied("defect-orbax-uncommitted-tmp", tmp_path)
    with pytest.raises(IncompleteError) as caught, wherry.open(source):
        pass
    assert f"wherry rewrite {source} TARGET --as commit" in caught.value.cure
    before = snapshot(source)
    wherry.rewrite(source, tmp_path / "item", as_="commit")
    assert snapshot(source) == before
    assert wherry.detect(tmp_path / "item").verdict == "ok"
    tree = tree_of(tmp_path / "item")
    support.assert_same_tree(restored(tmp_path / "item", tree), tree)
    with pytest.raises(UsageError, match="is already committed"):
        wherry.rewrite(tmp_path / "item", tmp_path / "again", as_="commit")


def test_a_killed_save_whose_chunk_is_missing_is_not_committed(tmp_path):
    folder = tmp_path / "item.orbax-checkpoint-tmp"
    support.write(folder, {("a",): np.ones((8, 8), np.float32), ("b",): np.ones(3, np.float32)}, ocdbt=False)
    next(path for path in (folder / "a").iterdir() if not path.name.startswith(".")).unlink()
    with pytest.raises(IncompleteError, match="chunk"):
        wherry.rewrite(folder, tmp_path / "item", as_="commit")
    assert not (tmp_path / "item").exists()


def test_chunks_of_one_array_in_two_databases(tmp_path):
    """What two hosts wrote of one array: each chunk lies in the database of one of them."""
    array = np.arange(64 * 6, dtype=np.float32).reshape(64, 6)
    manifest = support.manifest_of({("w",): array})
    spec = replace(manifest.tensors["w",], chunks=(16, 6))
    manifest = replace(manifest, tensors={("w",): spec})
    support.write(tmp_path / "whole", {("w",): array}, manifest)
    item = tmp_path / "item"
    item.mkdir()
    for number, kept in enumerate((("w/0.0", "w/1.0"), ("w/2.0", "w/3.0"))):
        database_with(tmp_path / "whole", item / f"ocdbt.process_{number}", {*kept, "w/.zarray"})
    shutil.copy(tmp_path / "whole" / "_METADATA", item)
    done = merge(item, tmp_path / "merged")
    assert done.receipt.source.weights_digest == done.receipt.target.weights_digest
    found = ocp.PyTreeCheckpointer().restore(tmp_path / "merged")["w"]
    assert np.array_equal(np.asarray(found), array)
    assert hashes(tmp_path / "merged") == {("w",): array.tobytes()}


def database_with(source, target, keys):
    """A database with some of the keys of another, as tensorstore writes it."""
    import tensorstore as ts

    def opened(folder):
        return ts.KvStore.open({"driver": "ocdbt", "base": f"file://{folder}/"}).result()

    target.mkdir()
    old, new = opened(source), opened(target)
    there = {key.decode() for key in old.list().result()}
    assert keys <= there
    for key in keys:
        new.write(key, old.read(key).result().value).result()


# Boxed and unboxed keys: the same tensors under other key paths, restored by Orbax, without a byte being
# decoded.


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
    specs = {path: replace(spec, axes=axes.get(path)) for path, spec in manifest.tensors.items()}
    support.write(tmp_path / "boxed", arrays, replace(manifest, tensors=specs), **options)
    before = snapshot(tmp_path / "boxed")
    done = wherry.rewrite(tmp_path / "boxed", tmp_path / "plain", as_="unbox")
    names = renamed(done)
    wanted = {names.get(path, path): array for path, array in arrays.items()}
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
    again = ",".join(done.rewriting.renamed.values())
    wherry.rewrite(tmp_path / "plain", tmp_path / "again", as_=f"box={again}")
    assert wherry.verify(tmp_path / "plain", against=tmp_path / "boxed").ok
    assert wherry.verify(tmp_path / "again", level="digest").ok
    assert hashes(tmp_path / "again") == {path: array.tobytes() for path, array in arrays.items()}
    support.assert_same_tree(
        ocp.PyTreeCheckpointer().restore(tmp_path / "again"),
        support.nested(support.manifest_of(arrays, values={("name",): "run"}), arrays),
    )
    assert snapshot(tmp_path / "boxed") == before


@needs_corpus
def test_boxes_that_flax_wrote(tmp_path):
    source = copied("flax-linen-boxed-scan", tmp_path)
    done = wherry.rewrite(source, tmp_path / "plain", as_="unbox")
    names = renamed(done)
    assert len(names) == 12
    found = sha256(hashes(tmp_path / "plain"))
    wanted = wanted_hashes("flax-linen-boxed-scan")
    assert found == {names.get(path, path): row for path, row in wanted.items()}
    kernel = ocp.StandardCheckpointer().restore(tmp_path / "plain")["params"]["layers"]["wi"]["kernel"]
    assert np.asarray(kernel).tobytes() == hashes(tmp_path / "plain")["params", "layers", "wi", "kernel"]
    with pytest.raises(UsageError, match="boxed"):
        wherry.rewrite(tmp_path / "plain", tmp_path / "again", as_="unbox")
    with pytest.raises(TargetExistsError):
        wherry.rewrite(source, tmp_path / "plain", as_="box")
    with pytest.raises(NotFoundError):
        wherry.rewrite(tmp_path / "plain", tmp_path / "again", as_="box=nothing")
    with pytest.raises(UnsupportedError, match="in place"):
        wherry.rewrite(source, as_="unbox", in_place=True)


def test_names_that_would_meet_are_refused(tmp_path):
    arrays = {("a", "value"): np.ones((3, 3), np.float32), ("a.value",): np.zeros((3, 3), np.float32)}
    support.write(tmp_path / "boxed", {path: arrays[path] for path in [("a", "value")]})
    with pytest.raises(UnrepresentableError):
        support.ORBAX.prepare(support.manifest_of(arrays), checked_options(support.ORBAX, {}))
    support.write(tmp_path / "plain", {("a",): np.ones(3, np.float32), ("a.value",): np.ones(3, np.float32)})
    with pytest.raises(UnrepresentableError):
        wherry.rewrite(tmp_path / "plain", tmp_path / "meet", as_="box=a")
    assert not (tmp_path / "meet").exists()


@needs_corpus
def test_an_aggregate_has_its_keys_among_its_tensors(tmp_path):
    source = copied("orbax-044-aggregate", tmp_path)
    with pytest.raises(UnsupportedError, match="cannot rename key paths"):
        wherry.rewrite(source, tmp_path / "boxed", as_="box=step")


@needs_corpus
@pytest.mark.parametrize("case", ["orbax-0110-sharded8", "orbax-0128-standard", "orbax-0128-ocdbt-zarr3"])
def test_keys_of_what_releases_of_orbax_wrote_are_boxed(tmp_path, case):
    source = copied(case, tmp_path)
    done = wherry.rewrite(source, tmp_path / "boxed", as_="box=params/*")
    names = renamed(done)
    assert names
    found = sha256(hashes(tmp_path / "boxed"))
    assert found == {names.get(path, path): row for path, row in wanted_hashes(case).items()}
    tree = tree_of(tmp_path / "boxed")
    support.assert_same_tree(restored(tmp_path / "boxed", tree), tree)


@needs_corpus
def test_the_item_of_a_maxtext_step(tmp_path):
    source = copied("maxtext-llama31-l3-scan", tmp_path)
    with pytest.raises(UsageError, match="Orbax item not found") as caught:
        wherry.rewrite(source, tmp_path / "boxed", as_="box")
    assert caught.value.cure == f"pass the item: {source} --format orbax"
    done = wherry.rewrite(source, tmp_path / "boxed", as_="box=*/query/kernel", format="orbax")
    names = renamed(done)
    assert names
    with wherry.open(tmp_path / "boxed") as boxed_, wherry.open(source, format="orbax") as plain:
        assert {names.get(path, path) for path in plain.manifest.tensors} == set(boxed_.manifest.tensors)
    tree = tree_of(tmp_path / "boxed")
    support.assert_same_tree(restored(tmp_path / "boxed", tree), tree)
