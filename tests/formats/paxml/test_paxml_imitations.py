"""What `tests/support/paxml` writes is what PaxML wrote: names, shapes, dtypes and every small file but the values."""

from __future__ import annotations

import base64
import json

import msgpack
import pytest

from tests.support.corpus import expected, needs_corpus, place

pytestmark = needs_corpus
TWINS = [
    ("paxml-gpt3-l3-v11-gda-zarr", "made-paxml-v11"),
    ("paxml-gpt3-l3-v11-eval-only", "made-paxml-v11-eval-only"),
    ("paxml-gpt3-l3-v12-gda-ocdbt", "made-paxml-v12"),
    ("paxml-gpt3-l3-flax", "made-paxml-flax"),
]
FIELDS = ("uri", "alternative_uris", "format", "layout_version", "step", "kind", "verdict")


def held(case):
    return {
        (*row["path"], row["dtype"], *row["shape"], *row.get("tree_path", ()))
        for row in expected(case)["tensors"]
    }


@pytest.mark.parametrize(("original", "imitation"), TWINS)
def test_the_same_tree_at_the_same_place(original, imitation):
    assert held(imitation) == held(original)
    assert {name: expected(imitation)[name] for name in FIELDS} == {
        name: expected(original)[name] for name in FIELDS
    }


@pytest.mark.parametrize(("original", "imitation"), TWINS)
def test_the_same_item_of_metadata(original, imitation):
    items = [
        json.loads((place(case) / "metadata" / "metadata").read_text()) for case in (original, imitation)
    ]
    assert items[0] == items[1]


@pytest.mark.parametrize(("original", "imitation"), TWINS[:3])
def test_the_same_names_of_shardings(original, imitation):
    files = [json.loads((place(case) / "state" / "_sharding").read_text()) for case in (original, imitation)]
    names = [{base64.b64decode(name).decode() for name in rows} for rows in files]
    assert names[0] == names[1]
    assert [{json.loads(row)["sharding_type"] for row in rows.values()} for rows in files] == [
        {"NamedSharding"}
    ] * 2


@pytest.mark.parametrize(("original", "imitation"), TWINS[:2])
def test_the_same_arrays_but_for_their_chunks(original, imitation):
    for file in sorted((place(original) / "state").glob("*/.zarray")):
        rows = [
            json.loads((place(case) / "state" / file.parent.name / ".zarray").read_text())
            for case in (original, imitation)
        ]
        assert {**rows[0], "chunks": None} == {**rows[1], "chunks": None}


def test_the_same_tree_files_of_version_1_2():
    trees = [msgpack.unpackb((place(case) / "state" / "checkpoint").read_bytes()) for case in TWINS[2]]
    assert trees[0] == trees[1]
    files = [
        json.loads((place(case) / "state" / "_METADATA").read_text())["tree_metadata"] for case in TWINS[2]
    ]
    rows = [{tuple(map(_key, row["key_metadata"])): _kind(row) for row in tree.values()} for tree in files]
    assert rows[0] == rows[1]


def _key(key):
    return key["key"], key["key_type"]


def _kind(row):
    return row["value_metadata"]["value_type"]


def test_the_same_text_of_the_structure():
    files = [msgpack.unpackb((place(case) / "state" / "checkpoint").read_bytes()) for case in TWINS[3]]
    assert files[0]["str_pytree_state"] == files[1]["str_pytree_state"]
