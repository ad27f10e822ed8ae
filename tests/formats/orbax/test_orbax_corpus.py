"""Every corpus case of Orbax and of Penzai, whatever its generation: verdict, contents, step, kind, placement."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest

import wherry
from tests.support.orbax import CORPUS, cases, expectation, needs_corpus

pytestmark = needs_corpus
CASES = cases("orbax", "penzai")
WHOLE = [case for case in CASES if expectation(case)["verdict"].startswith("ok")]
DAMAGED = [case for case in CASES if case not in WHOLE]
LABELLED = [case for case in WHOLE if expectation(case)["format"] == "penzai"]


@pytest.fixture
def root(request, tmp_path):
    """The case's folder, copied where it needs empty folders that git does not keep."""
    folder = CORPUS / request.param / "checkpoint"
    missing = expectation(request.param).get("make_dirs")
    if not missing:
        return folder
    shutil.copytree(folder, tmp_path / "copy")
    for name in missing:
        (tmp_path / "copy" / name).mkdir(parents=True, exist_ok=True)
    return tmp_path / "copy"


@pytest.mark.parametrize(("case", "root"), [(case, case) for case in WHOLE], indirect=["root"], ids=WHOLE)
def test_whole(case, root):
    row = expectation(case)
    for uri in (row["uri"], *row.get("alternative_uris", ())):
        found = wherry.detect(root / uri)
        assert found.verdict == "ok", found.reason
        assert found.format in {row["format"], *row.get("format_accepts", ())}
        assert found.step == row["step"]
        assert found.writer
        assert found.evidence
        with wherry.open(root / uri) as checkpoint:
            wanted = {tuple(tensor["path"]): tensor for tensor in row["tensors"]}
            specs = checkpoint.manifest.tensors
            assert {path: (list(spec.shape), spec.dtype) for path, spec in specs.items()} == {
                path: (tensor["shape"], tensor["dtype"]) for path, tensor in wanted.items()
            }
            for path, tensor in wanted.items():
                assert hashlib.sha256(checkpoint.read_bytes(path)).hexdigest() == tensor["sha256"], path
                assert raw_bytes(checkpoint, path) in (None, checkpoint.read_bytes(path))
            assert set(map(tuple, row.get("string_leaves", ()))) <= set(checkpoint.manifest.values)
            assert checkpoint.detection.kind == checkpoint.manifest.kind


def raw_bytes(checkpoint, path):
    """What the extents of a tensor hold; None where it has none."""
    extents = checkpoint.reader.access(checkpoint.manifest.tensors[path]).extents
    if extents is None:
        return None
    parts = []
    for extent in extents:
        with Path(extent.file).open("rb") as file:
            file.seek(extent.offset)
            parts.append(file.read(extent.length))
    return b"".join(parts)


@pytest.mark.parametrize(("case", "root"), [(case, case) for case in DAMAGED], indirect=["root"], ids=DAMAGED)
def test_damaged(case, root):
    row = expectation(case)
    found = wherry.detect(root / row["uri"])
    assert found.verdict in {row["verdict"], *row.get("accepted_verdicts", ())}
    assert found.reason
    assert found.format in {row["format"], *row.get("format_accepts", ())} | {"orbax"}
    assert found.step == row["step"]
    with pytest.raises(wherry.errors.DamagedError):
        wherry.convert(root / row["uri"], root / "never", to="safetensors", lineage=False)


def test_the_nodes_that_only_msgpack_has():
    with wherry.open(CORPUS / "orbax-017-default" / "checkpoint" / "ckpt") as checkpoint:
        assert checkpoint.manifest.empties == {
            ("none",): "none", ("empty_dict",): "dict", ("empty_list",): "list"
        }  # fmt: skip
        assert checkpoint.manifest.lists == {("params", "list")}


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("orbax-017-aggregate", "aggregate msgpack, no _METADATA"),
        ("orbax-017-default", "per-array directories zarr2 + msgpack, no _METADATA"),
        ("orbax-041-default", "ocdbt zarr2 + msgpack, no _METADATA"),
        ("orbax-044-aggregate", "aggregate msgpack"),
        ("orbax-044-default", "ocdbt zarr2 + msgpack"),
        ("orbax-0110-aggregate", "ocdbt zarr2"),
        ("orbax-0128-v1", "ocdbt zarr3"),
    ],
)
def test_the_layout_in_words(case, words):
    row = expectation(case)
    assert row["layout_version"] == words
    with wherry.open(CORPUS / case / "checkpoint" / row["uri"]) as checkpoint:
        assert checkpoint.detection.format_version == words


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("flax-linen-boxed-scan", "12 of 20 arrays are in linen partition boxes"),
        ("flax-nnx-state", "9 of 9 arrays are NNX variables (`value`"),
        ("orbax-0110-nnx-state", "7 of 7 arrays are NNX variables"),
        ("orbax-0523-nnx-state", "NNX variables"),
        ("penzai-llama-unroll-label-dict", "30 of 30 arrays are Penzai NamedArrays"),
    ],
)
def test_boxes_and_wrappers_are_named(case, words):
    found = wherry.detect(CORPUS / case / "checkpoint" / expectation(case)["uri"])
    assert any(words in row.seen for row in found.evidence), found.evidence
    plain = wherry.detect(CORPUS / "flax-nnx-pure" / "checkpoint" / expectation("flax-nnx-pure")["uri"])
    assert not any("arrays are" in row.seen for row in plain.evidence)


def test_index_of_the_corpus_is_covered():
    rows = json.loads((CORPUS / "INDEX.json").read_text())
    rows = rows if isinstance(rows, list) else rows["cases"]
    assert {row["case"] for row in rows if row["format"] in ("orbax", "penzai")} == set(CASES)
