"""Layers of any tree stacked and taken apart by a pattern: there and back is the identity, names included."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import linen as nn
from flax import traverse_util
from jax import numpy as jnp

import wherry
from tests.support.families import Made, carried, same
from tests.support.orbax import CORPUS, needs_corpus, write
from wherry.core.tensorspec import TensorSpec
from wherry.errors import IncompleteError, MismatchError, UnrepresentableError, UsageError
from wherry.transform.scan import parse_scan, scan_projection, scanned_view


def stack(*, layers=3, names=True):
    arrays = {("step",): np.int32(7).reshape(())}
    axes = {}
    for root in ("params", "mu"):
        for layer in range(layers):
            path = (root, f"layers_{layer}", "mlp", "kernel")
            arrays[path] = np.random.default_rng(layer).random((5, 4), "f4")
            axes |= {path: ("embed", "mlp")} if names else {}
            arrays[(root, f"layers_{layer}", "gain")] = np.float32(layer).reshape(())
    return Made(arrays, axes)


@pytest.mark.parametrize("axis", [0, 1])
def test_a_scan_and_its_inverse(axis):
    begun = stack()
    scan = parse_scan(f"layers_{{layers}} -> layers:{axis}")
    assert parse_scan(scan.text) == scan
    assert parse_scan(scan.inverse.text) == scan.inverse
    there = scan_projection(begun.manifest, scan)
    spec = there.targets[("mu", "layers", "mlp", "kernel")].spec
    assert spec.axes == (("layers", "embed", "mlp") if axis == 0 else ("embed", "layers", "mlp"))
    assert spec.shape == ((3, 5, 4) if axis == 0 else (5, 3, 4))
    made = carried(there, begun.read)
    back = scan_projection(made.manifest, scan.inverse)
    assert back.targets[("mu", "layers_1", "mlp", "kernel")].spec.axes == ("embed", "mlp")
    assert same(carried(back, made.read).tensors, begun.tensors)


def test_what_a_scan_refuses():
    begun = stack()
    for text in (
        "layers",
        "layers_{a}_{b} -> layers:0",
        "layers_{n} -> layers",
        "layers_{n} -> layers:2",
        "a -> b:0",
    ):
        with pytest.raises(UsageError, match="invalid value for scan"):
            parse_scan(text)
    with pytest.raises(UsageError, match="no key path matches layers"):
        scan_projection(begun.manifest, parse_scan("layers:0 -> layers_{n}"))
    with pytest.raises(UsageError):
        scan_projection(begun.manifest, parse_scan("blocks_{n} -> blocks:0"))
    lacking = {path: array for path, array in begun.tensors.items() if path[1:3] != ("layers_1", "gain")}
    with pytest.raises(IncompleteError):
        scan_projection(Made(lacking).manifest, parse_scan("layers_{n} -> layers:0"))
    path = ("mu", "layers_1", "mlp", "kernel")
    begun.manifest.tensors[path] = TensorSpec(path, (5, 4), "float32", axes=("mlp", "embed"))
    with pytest.raises(MismatchError, match="different axis names"):
        scan_projection(begun.manifest, parse_scan("layers_{n} -> layers:0"))


def test_a_view_keeps_what_is_no_tensor(tmp_path):
    begun = stack(names=False)
    manifest = replace(
        begun.manifest,
        values={("name",): "run"},
        empties={("params", f"layers_{n}", "nothing"): "dict" for n in range(3)},
        lists=frozenset({("mu",)}),
    )
    write(tmp_path / "a", begun.tensors, replace(manifest, lists=frozenset()))
    with wherry.open(tmp_path / "a") as checkpoint:
        view = scanned_view(checkpoint, "layers_{layers} -> layers:0")
        assert view.manifest.values == {("name",): "run"}
        assert view.manifest.empties == {("params", "layers", "nothing"): "dict"}
        assert view.read("params/layers/mlp/kernel").shape == (3, 5, 4)
        assert view.manifest.origin["scan"]["inverse"] == "layers:0 -> layers_{layers}"
    manifest = replace(manifest, values={("params", "layers_0", "text"): "x"}, lists=frozenset())
    write(tmp_path / "b", begun.tensors, manifest)
    with (
        wherry.open(tmp_path / "b") as checkpoint,
        pytest.raises(UnrepresentableError, match="is not a tensor"),
    ):
        scanned_view(checkpoint, "layers_{layers} -> layers:0")


@needs_corpus
def test_a_conversion_is_proved_and_undone(tmp_path):
    """A train state with axis names unrolled, then stacked and boxed: the corpus has the same, boxed by Flax."""
    source = CORPUS / "flax-linen-unboxed-scan/checkpoint/ckpt"
    apart = {"scan": "layers:0 -> layers_{layers}"}
    wherry.convert(source, tmp_path / "u", to="orbax", options=apart, lineage=False)
    assert wherry.verify(tmp_path / "u", against=source, level="roundtrip").ok
    together = {"scan": "layers_{layers} -> layers:0", "boxed": "true"}
    wherry.convert(tmp_path / "u", tmp_path / "s", to="orbax", options=together, lineage=False)
    assert wherry.verify(tmp_path / "s", against=tmp_path / "u").ok
    with wherry.open(tmp_path / "s") as stacked, wherry.open(boxed_case()) as wanted:
        assert set(stacked.manifest.tensors) == set(wanted.manifest.tensors)
        for path in wanted.manifest.tensors:
            np.testing.assert_array_equal(stacked.read(path), wanted.read(path))
        assert (stacked.manifest.lists, stacked.manifest.empties) == (
            wanted.manifest.lists,
            wanted.manifest.empties,
        )
        kernel = stacked.manifest.tensors["params", "layers", "wi", "kernel", "value"]
        assert kernel.axes == ("layers", "embed", "mlp")
    other = {"scan": "layers_{layers} -> layers:1"}
    wherry.convert(tmp_path / "u", tmp_path / "o", to="orbax", options=other, lineage=False)
    assert wherry.verify(tmp_path / "o", against=tmp_path / "u").ok
    assert wherry.verify(tmp_path / "o", against=source).verdict == "altered"


@pytest.mark.parametrize("axis", [0, 1])
def test_chunks_that_are_no_runs_are_proved_under_new_names(tmp_path, axis):
    """A mesh cuts the stacked tensor, which also gets another name: what was written is read back and compared."""
    rng = np.random.default_rng(0)
    arrays = {("params", f"layers_{n}", "w"): rng.random((64, 64), "f4") for n in range(8)}
    arrays |= {("params", f"layers_{n}", "square"): rng.random((8, 8), "f4") for n in range(8)}
    write(tmp_path / "u", arrays)
    options = {"scan": f"layers_{{n}} -> layers:{axis}", "chunks": "1x8x4", "boxed": "params/layers/w"}
    wherry.convert(tmp_path / "u", tmp_path / "s", to="orbax", options=options, lineage=False)
    assert wherry.verify(tmp_path / "s", against=tmp_path / "u").ok
    back = {"scan": f"layers:{axis} -> layers_{{n}}", "boxed": "false", "chunks": "1x8"}
    with pytest.raises(UsageError, match="changes nothing"):
        wherry.convert(tmp_path / "u", tmp_path / "x", to="orbax", options={"boxed": "false"}, lineage=False)
    wherry.convert(tmp_path / "s", tmp_path / "b", to="orbax", options=back, lineage=False)
    with wherry.open(tmp_path / "b") as checkpoint:
        for path, array in arrays.items():
            np.testing.assert_array_equal(checkpoint.read(path), array)


def boxed_case():
    return CORPUS / "flax-linen-boxed-scan/checkpoint/ckpt"


class Block(nn.Module):
    """One layer, with a matrix that is square: sizes alone would not tell the scan axis."""

    @nn.compact
    def __call__(self, x, _=None):
        return x + nn.Dense(3, name="mlp")(x), None


class Net(nn.Module):
    """Three layers, scanned or unrolled."""

    scan: bool

    @nn.compact
    def __call__(self, x):
        if self.scan:
            layers = nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
            return layers(name="layers")(x, None)[0]
        for layer in range(3):
            x, _ = Block(name=f"layers_{layer}")(x)
        return x


def test_linen_computes_the_same_scanned_and_unrolled(tmp_path):
    x = jnp.linspace(-1, 1, 6).reshape(2, 3)
    variables = Net(scan=True).init(jax.random.key(0), x)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "scanned", variables)
    with wherry.open(tmp_path / "scanned") as checkpoint:
        view = scanned_view(checkpoint, "layers:0 -> layers_{layers}")
        tensors = {path: view.read(path) for path in view.manifest.tensors}
        back = scanned_view(view, "layers_{layers} -> layers:0")
        for path in checkpoint.manifest.tensors:
            np.testing.assert_array_equal(back.read(path), checkpoint.read(path))
        assert set(back.manifest.tensors) == set(checkpoint.manifest.tensors)
    unrolled = Net(scan=False).init(jax.random.key(1), x)
    flat = traverse_util.flatten_dict(unrolled)
    assert set(tensors) == set(flat)
    found = traverse_util.unflatten_dict(tensors)
    np.testing.assert_array_equal(Net(scan=False).apply(found, x), Net(scan=True).apply(variables, x))
