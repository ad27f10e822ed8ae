"""Damaged and hostile Orbax checkpoints: each is refused by name, none takes memory by what it claims."""

from __future__ import annotations

import base64
import json
import shutil
from pathlib import Path

import pytest

from tests.support.orbax import copied, needs_corpus, opened, verdict_of
from wherry.errors import CorruptError, HostileError, IncompleteError, UnsupportedError
from wherry.mover.read import read_array


@needs_corpus
@pytest.mark.parametrize("name", ["_METADATA", "_CHECKPOINT_METADATA"])
def test_empty_json_after_a_power_failure(tmp_path, name):
    folder = copied("orbax-0128-standard", tmp_path)
    (folder / name).write_text("")
    verdict, reason = verdict_of(folder)
    assert (verdict, name in reason) == ("incomplete", True)


@needs_corpus
@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda folder: shutil.rmtree(folder / "d"), "incomplete"),
        (lambda folder: (folder / "manifest.ocdbt").unlink(), "incomplete"),
        (lambda folder: (folder / "manifest.ocdbt").write_bytes(b"no"), "corrupt"),
        (lambda folder: (folder / "_METADATA").unlink(), "incomplete"),
        (lambda folder: (folder / "_METADATA").write_text("[1]"), "corrupt"),
        (lambda folder: (folder / "_METADATA").write_text("{" * 100_000), "corrupt"),
        (lambda folder: (folder / "_sharding").write_text('{"a": "b"}'), "corrupt"),
        (lambda folder: shutil.rmtree(folder / "ocdbt.process_0" / "d"), "incomplete"),
    ],
)
def test_damage(tmp_path, damage, expected):
    folder = copied("orbax-0128-ocdbt-nocompress", tmp_path)
    damage(folder)
    assert verdict_of(folder)[0] == expected


@needs_corpus
def test_a_truncated_data_file_is_noticed(tmp_path):
    folder = copied("orbax-0128-ocdbt-nocompress", tmp_path)
    found = opened(folder)
    spec = found.manifest.tensors[("params", "embed", "embedding")]
    (extent,) = found.reader.access(spec).extents
    with Path(extent.file).open("r+b") as file:
        file.truncate(extent.offset + extent.length - 1)
    verdict, reason = verdict_of(folder)
    assert verdict == "incomplete"
    assert "is truncated: expected" in reason
    again = opened(folder)
    assert again.reader.access(spec).extents is None
    with pytest.raises(IncompleteError, match="is truncated: expected"):
        read_array(again.reader, spec, spec.whole)


@needs_corpus
def test_names_that_point_outside(tmp_path):
    folder = copied("orbax-0128-noocdbt-zarr2", tmp_path)
    metadata = json.loads((folder / "_METADATA").read_text())
    row = metadata["tree_metadata"]["('bool',)"]
    row["key_metadata"] = [{"key": "/../../etc/passwd", "key_type": 2}]
    (folder / "_METADATA").write_text(json.dumps(metadata))
    with pytest.raises(HostileError):
        opened(folder)


@needs_corpus
def test_a_chunk_that_claims_to_decode_to_a_terabyte(tmp_path):
    folder = copied("orbax-0128-noocdbt-zarr2", tmp_path)
    file = folder / "bool" / ".zarray"
    fields = json.loads(file.read_text()) | {"shape": [1 << 20, 1 << 19], "chunks": [1 << 20, 1 << 19]}
    file.write_text(json.dumps(fields))
    found = opened(folder)
    with pytest.raises(HostileError, match="claims"):
        read_array(found.reader, found.manifest.tensors[("bool",)], (slice(0, 1), slice(0, 1)))


@needs_corpus
def test_an_array_of_more_chunks_than_can_be_counted(tmp_path):
    folder = copied("orbax-0128-noocdbt-zarr2", tmp_path)
    file = folder / "bool" / ".zarray"
    fields = json.loads(file.read_text()) | {"shape": [1 << 30, 1 << 30], "chunks": [1, 1]}
    file.write_text(json.dumps(fields))
    found = opened(folder)
    spec = found.manifest.tensors[("bool",)]
    absent = list(found.reader.absent())
    assert len(absent) == 1001
    assert "more" in absent[-1].chunk
    with pytest.raises(IncompleteError):
        read_array(found.reader, spec, spec.whole)
    assert found.reader.access(spec).extents is None


@needs_corpus
def test_what_an_absent_chunk_means(tmp_path):
    folder = copied("orbax-0128-noocdbt-zarr2", tmp_path)
    (folder / "bool" / "0.0").unlink()
    assert "lost" in next(iter(opened(folder).reader.absent())).reason
    metadata = json.loads((folder / "_METADATA").read_text()) | {
        "store_array_data_equal_to_fill_value": False
    }
    (folder / "_METADATA").write_text(json.dumps(metadata))
    assert "lost" in next(iter(opened(folder).reader.absent())).reason
    fields = json.loads((folder / "bool" / ".zarray").read_text()) | {"fill_value": False}
    (folder / "bool" / ".zarray").write_text(json.dumps(fields))
    found = opened(folder)
    assert (
        next(iter(found.reader.absent())).reason
        == "not found; either zeros that its writer left out, or lost data"
    )
    with pytest.raises(IncompleteError, match="either zeros that its writer left out, or lost data"):
        read_array(found.reader, found.manifest.tensors[("bool",)], found.manifest.tensors[("bool",)].whole)


@needs_corpus
def test_two_leaves_with_one_stored_name(tmp_path):
    folder = copied("orbax-0128-ocdbt-nocompress", tmp_path)
    metadata = json.loads((folder / "_METADATA").read_text())
    rows = metadata["tree_metadata"]
    keys = [{"key": "params.embed", "key_type": 2}, {"key": "embedding", "key_type": 2}]
    rows["again"] = {
        "key_metadata": keys,
        "value_metadata": {"value_type": "np.ndarray", "skip_deserialize": False},
    }
    (folder / "_METADATA").write_text(json.dumps(metadata))
    with pytest.raises(CorruptError, match=r"params/embed/embedding and params\.embed/embedding"):
        opened(folder)


@needs_corpus
def test_unknown_types_are_named(tmp_path):
    folder = copied("orbax-0128-ocdbt-nocompress", tmp_path)
    text = (folder / "_METADATA").read_text()
    (folder / "_METADATA").write_text(text.replace('"Tuple"', '"Zebra"'))
    with pytest.raises(UnsupportedError, match="Zebra"):
        opened(folder)
    (folder / "_METADATA").write_text(text)
    key = base64.urlsafe_b64encode(b"bool").decode()
    (folder / "_sharding").write_text(json.dumps({key: json.dumps({"sharding_type": "SpiralSharding"})}))
    assert any("SpiralSharding" in row.seen for row in opened(folder).detection.evidence)


@needs_corpus
def test_a_newer_writer_is_named_and_read(tmp_path):
    folder = copied("orbax-0128-standard", tmp_path)
    metadata = json.loads((folder / "_METADATA").read_text()) | {"use_zarr4": False}
    for row in metadata["tree_metadata"].values():
        row["value_metadata"]["entropy"] = 3
    (folder / "_METADATA").write_text(json.dumps(metadata))
    assert verdict_of(folder)[0] == "ok"
    seen = " ".join(row.seen for row in opened(folder).detection.evidence)
    assert "unknown field 'use_zarr4', which Orbax up to 0.12.8 does not write" in seen
    assert "unknown field 'entropy'" in seen


@needs_corpus
def test_a_newer_writer_whose_meaning_is_unknown_is_refused(tmp_path):
    folder = copied("orbax-0128-standard", tmp_path)
    text = (folder / "_METADATA").read_text()
    (folder / "_METADATA").write_text(text.replace('"key_type": 2', '"key_type": 3'))
    with pytest.raises(UnsupportedError, match="unsupported key type 3"):
        opened(folder)


@needs_corpus
def test_two_trees_that_contradict_each_other(tmp_path):
    folder = copied("orbax-044-aggregate", tmp_path)
    text = (folder / "_METADATA").read_text()
    metadata = json.loads(text)
    metadata["tree_metadata"]["('bool',)"]["value_metadata"]["value_type"] = "None"
    (folder / "_METADATA").write_text(json.dumps(metadata))
    with pytest.raises(CorruptError, match="conflict between _METADATA and checkpoint: none"):
        opened(folder)


@needs_corpus
def test_an_aggregate_that_was_cut_short(tmp_path):
    folder = copied("orbax-017-aggregate", tmp_path)
    with (folder / "checkpoint").open("r+b") as file:
        file.truncate((folder / "checkpoint").stat().st_size - 1)
    assert verdict_of(folder)[0] == "corrupt"


@needs_corpus
def test_an_aggregate_whose_msgpack_lacks_an_array(tmp_path):
    folder = copied("orbax-044-aggregate", tmp_path)
    metadata = json.loads((folder / "_METADATA").read_text())
    keys = [{"key": "more", "key_type": 2}]
    value = {"value_type": "jax.Array", "skip_deserialize": True}
    metadata["tree_metadata"]["('more',)"] = {"key_metadata": keys, "value_metadata": value}
    (folder / "_METADATA").write_text(json.dumps(metadata))
    with pytest.raises(IncompleteError, match="checkpoint has no data for them"):
        opened(folder)
