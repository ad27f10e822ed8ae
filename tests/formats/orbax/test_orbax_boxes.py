"""Boxed and unboxed keys: the same tensors under other key paths, restored by Orbax, without a byte being decoded."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import orbax.checkpoint as ocp
import pytest

import wherry
from tests.support import orbax as support
from tests.support.orbax import copied, needs_corpus
from tests.support.rewrite import hashes, renamed, restored, sha256, snapshot, tree_of, wanted_hashes
from wherry.errors import NotFoundError, TargetExistsError, UnrepresentableError, UnsupportedError, UsageError
from wherry.formats.registry import checked_options


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
