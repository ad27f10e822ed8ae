"""Penzai: what is on disk of labels and axis names is read, and what we write becomes NamedArrays again."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import orbax.checkpoint as ocp
import pytest

import wherry
from tests.support import orbax as support
from tests.support.orbax import CORPUS, cases, expectation, needs_corpus
from wherry.errors import CorruptError, UnrepresentableError
from wherry.formats.format import Glimpse
from wherry.formats.registry import checked_options
from wherry.integrations.formats import penzai
from wherry.integrations.formats.penzai import FORMATS
from wherry.mover.map_writer import writer_of
from wherry.mover.read import read_array
from wherry.store.local_store import locate

PENZAI = FORMATS[0]
WHOLE = [case for case in cases("penzai") if expectation(case)["verdict"] == "ok"]
AXES = {
    ("query.weights",): ("embedding", "head_groups", "query_heads", "projection"),
    ("key.weights", "data_array"): ("embedding", None, "projection"),
    ("scale",): (None,),
    ("unknown",): None,
}


def arrays():
    rng = np.random.default_rng(3)
    shapes = {("query.weights",): (8, 2, 2, 4), ("key.weights", "data_array"): (8, 2, 4)}
    return {path: rng.standard_normal(shapes.get(path, (6,))).astype(np.float32) for path in AXES}


def manifest():
    plain = support.manifest_of(arrays(), kind="params")
    return replace(
        plain, tensors={path: replace(spec, axes=AXES[path]) for path, spec in plain.tensors.items()}
    )


def write(folder, held=None, **options):
    """Write through the penzai writer, chunk by chunk."""
    held = held or manifest()
    checked = checked_options(PENZAI, options)
    writer = writer_of(PENZAI, locate(folder), PENZAI.prepare(held, checked), checked)
    for path, array in arrays().items():
        for region in support.regions(array.shape, writer.grid(path)):
            part = np.ascontiguousarray(array[region])
            writer.write(path, region, memoryview(part.reshape(-1).view("u1")))
    writer.finish()
    writer.close()
    return folder


def opened(folder):
    detection = PENZAI.detect(Glimpse(locate(folder)))
    assert detection is not None
    return PENZAI.open(locate(folder), detection)


@needs_corpus
@pytest.mark.parametrize("case", WHOLE)
def test_what_is_on_disk_of_names(case):
    row = expectation(case)
    with wherry.open(CORPUS / case / "checkpoint" / row["uri"]) as checkpoint:
        assert (checkpoint.detection.format, checkpoint.detection.also) == ("penzai", ("orbax",))
        evidence = " ".join(seen.seen for seen in checkpoint.detection.evidence)
        for tensor in row["tensors"]:
            spec = checkpoint.manifest.tensors[tuple(tensor["path"])]
            assert (spec.axes is not None) == case.endswith("plain")
            if case.endswith("plain") and "axes" in tensor:
                assert spec.axes == tuple(tensor["axes"])
            if case.endswith(("plain", "label-dict")):
                assert spec.tags == {"label": tensor.get("label", tensor["path"][0])}
        assert ("not stored" in evidence) == (not case.endswith("plain"))
        words = {
            "frozen-model": "frozen model",
            "label-dict": "label dict",
            "params-tuple": "parameter tuple",
        }
        form = next((word for end, word in words.items() if case.endswith(end)), "axis names")
        assert form in checkpoint.detection.format_version


@needs_corpus
def test_a_failed_save_is_incomplete():
    case = "penzai-llama-unroll-mutable-params-uncommitted"
    found = wherry.detect(CORPUS / case / "checkpoint" / expectation(case)["uri"])
    assert (found.verdict, found.format) == ("incomplete", "orbax")


@pytest.mark.parametrize("options", [{}, {"zarr": "3", "ocdbt": False}])
def test_names_survive_and_orbax_restores(tmp_path, options):
    folder = write(tmp_path / "item", **options)
    found = opened(folder)
    assert {path: spec.axes for path, spec in found.manifest.tensors.items()} == AXES
    labels = {spec.tags["label"] for spec in found.manifest.tensors.values()}
    assert labels == {"query.weights", "key.weights", "scale", "unknown"}
    assert found.detection.format_version == PENZAI.version(manifest(), checked_options(PENZAI, options))
    wanted = support.nested(manifest(), arrays())
    support.assert_same_tree(ocp.StandardCheckpointer().restore(folder), wanted)
    for path, array in arrays().items():
        spec = found.manifest.tensors[path]
        assert read_array(found.reader, spec, spec.whole).tobytes() == array.tobytes()


def test_a_plain_reader_finds_names_in_both_places(tmp_path):
    folder = write(tmp_path / "item")
    file = json.loads((folder / "penzai.json").read_text())
    inside = json.loads((folder / "_METADATA").read_text())["custom_metadata"]["penzai"]
    assert file["arrays"] == inside
    assert inside["key.weights"] == {
        "axes": ["embedding", None, "projection"],
        "shape": [8, 2, 4],
        "path": "key.weights/data_array",
        "metadata": {},
    }
    restored = ocp.PyTreeCheckpointer().metadata(folder)
    assert restored is not None
    metadata = json.loads((folder / "_METADATA").read_text())
    del metadata["custom_metadata"]["penzai"]
    (folder / "_METADATA").write_text(json.dumps(metadata))
    assert {path: spec.axes for path, spec in opened(folder).manifest.tensors.items()} == AXES


def test_named_arrays_are_built_again(tmp_path):
    pytest.importorskip("penzai", reason="penzai is not installed; pip install 'wherry[penzai]'")
    from wherry.integrations.penzai.rebuild import named_arrays

    folder = write(tmp_path / "item")
    built = named_arrays(ocp.StandardCheckpointer().restore(folder), folder)
    query, key = built["query.weights"], built["key.weights"]
    assert query.named_shape == {"embedding": 8, "head_groups": 2, "query_heads": 2, "projection": 4}
    wanted = arrays()[("query.weights",)]
    unwrapped = query.unwrap("embedding", "head_groups", "query_heads", "projection")
    assert np.asarray(unwrapped).tobytes() == wanted.tobytes()
    swapped = np.asarray(query.unwrap("embedding", "query_heads", "head_groups", "projection"))
    assert swapped.tobytes() == np.ascontiguousarray(wanted.transpose(0, 2, 1, 3)).tobytes()
    assert (key.positional_shape, dict(key.named_shape)) == ((2,), {"embedding": 8, "projection": 4})
    assert built["scale"].positional_shape == (6,)
    assert built["unknown"].positional_shape == (6,)


@needs_corpus
def test_the_corpus_becomes_named_arrays():
    pytest.importorskip("penzai", reason="penzai is not installed; pip install 'wherry[penzai]'")
    from wherry.integrations.penzai.rebuild import named_arrays

    case = "penzai-llama-unroll-plain"
    folder = CORPUS / case / "checkpoint" / "plain"
    built = named_arrays(ocp.PyTreeCheckpointer().restore(folder), folder)
    tensors = [tensor for tensor in expectation(case)["tensors"] if "axes" in tensor]
    assert len(tensors) > 10
    for tensor in tensors:
        assert list(built[tensor["label"]].named_shape) == tensor["axes"]


@needs_corpus
@pytest.mark.parametrize("case", WHOLE)
def test_conversion_keeps_names_and_bytes(case, tmp_path):
    source = CORPUS / case / "checkpoint" / expectation(case)["uri"]
    before = wherry.convert(source, tmp_path / "again", to="penzai", lineage=False)
    there = wherry.convert(tmp_path / "again", tmp_path / "orbax", to="orbax", lineage=False)
    assert before.target.weights_digest == there.target.weights_digest
    with wherry.open(source) as one, wherry.open(tmp_path / "again") as two:
        assert two.detection.format == "penzai"
        assert two.manifest.lists == one.manifest.lists
        for path, spec in one.manifest.tensors.items():
            assert two.manifest.tensors[path].axes == spec.axes
    with wherry.open(tmp_path / "orbax", format="orbax") as three:
        for path, spec in two.manifest.tensors.items():
            assert three.manifest.tensors[path].axes == spec.axes


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({"axes": ["a"], "path": "query.weights"}, "do not match any array"),
        ({"axes": ["a"], "path": "elsewhere"}, "do not match any array"),
        ({"axes": "abc", "path": "query.weights"}, "invalid axis names"),
        ({"axes": [3, 1, 1, 1], "path": "query.weights"}, "invalid axis names"),
        ({"path": "query.weights"}, "invalid axis names"),
        ({"axes": [], "positional": 3_000_000_000}, "expected a number of unnamed axes, got 3000000000"),
        ({"axes": [], "positional": "2"}, "expected a number of unnamed axes, got '2'"),
    ],
)
def test_names_that_do_not_fit_are_refused(tmp_path, row, named):
    folder = write(tmp_path / "item")
    (folder / "penzai.json").unlink()
    metadata = json.loads((folder / "_METADATA").read_text())
    metadata["custom_metadata"]["penzai"] = {"query.weights": row}
    (folder / "_METADATA").write_text(json.dumps(metadata))
    with pytest.raises(CorruptError, match=named):
        opened(folder)


def test_two_places_that_disagree_are_refused(tmp_path):
    folder = write(tmp_path / "item")
    text = (folder / "penzai.json").read_text()
    (folder / "penzai.json").write_text(text.replace("head_groups", "query_heads2"))
    with pytest.raises(CorruptError, match="do not match"):
        opened(folder)


def test_two_arrays_with_one_label_are_refused():
    held = manifest()
    tags = {"label": "same"}
    held = replace(held, tensors={path: replace(spec, tags=tags) for path, spec in held.tensors.items()})
    with pytest.raises(UnrepresentableError, match="same"):
        PENZAI.prepare(held, checked_options(PENZAI, {}))
    assert penzai.label_of(held.tensors[("scale",)]) == "same"
