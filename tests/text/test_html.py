"""What notebooks show: short texts and tables, in which no name of a checkpoint is markup."""

from __future__ import annotations

from html.parser import HTMLParser

import numpy as np
import pytest
from safetensors.numpy import save_file

import wherry
from wherry.text.html import MOST_ROWS, html_table


class Tags(HTMLParser):
    """Collects tags and text."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.texts = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, attrs))

    def handle_data(self, data):
        self.texts.append(data)


def parsed(shown):
    """The texts of the HTML of an object, after a check that it has only tags of tables, without attributes."""
    found = Tags(shown._repr_html_())
    assert {tag for tag, _ in found.tags} <= {"div", "p", "table", "thead", "tbody", "tr", "th", "td"}
    assert not any(attributes for _, attributes in found.tags)
    return found.texts


@pytest.fixture
def source(tmp_path):
    save_file(
        {"<script>x</script>": np.ones((2, 3), "f4"), "b": np.ones(1, "i4")}, tmp_path / "a.safetensors"
    )
    return tmp_path / "a.safetensors"


def test_a_checkpoint_and_its_manifest(source):
    with wherry.open(source) as checkpoint:
        assert repr(checkpoint) == f"<Checkpoint {str(source)!r}: safetensors, 2 tensors, 7 parameters, 28 B>"
        assert repr(checkpoint.manifest) == "<Manifest: params, 2 tensors, 7 parameters, 28 B>"
        assert {"<script>x<~1script>", "2 x 3", "float32"} <= set(parsed(checkpoint))
        assert "<script>x<~1script>" in parsed(checkpoint.manifest)


def test_a_plan_a_receipt_a_verification_and_the_lineage(source, tmp_path):
    plan = wherry.plan(source, tmp_path / "out", to="npz")
    assert repr(plan) == f"<Plan: {source} (safetensors) → {tmp_path}/out (npz), 2 tensors, 28 B>"
    assert parsed(plan).count("<script>x<~1script>") == 2
    receipt = wherry.convert(source, tmp_path / "out", to="npz")
    assert repr(receipt).startswith(f"<Receipt: {source} (safetensors) → {tmp_path}/out (npz), 28 B in ")
    assert receipt.target.checkpoint_digest in parsed(receipt)
    verification = wherry.verify(tmp_path / "out", level="digest")
    assert repr(verification) == f"<Verification: ok at level digest, 2 tensors of {tmp_path}/out>"
    assert parsed(verification)
    why = wherry.why(tmp_path / "out")
    assert repr(why).endswith("result of 1 conversion>")
    assert "1" in parsed(why)


def test_a_store(tmp_path):
    store = wherry.Store(tmp_path / "run", to="safetensors")
    assert repr(store) == f"<Store '{tmp_path}/run': safetensors, no steps>"
    store.save({"w": np.ones(3)}, 5, metrics={"loss": 0.5}).result(60)
    assert repr(store).endswith("steps 5>")
    assert "{'loss': 0.5}" in parsed(store)


def test_of_many_rows_the_first_are_shown():
    text = html_table("t", ("n",), ([n] for n in range(1000)))
    assert text.count("<tr>") == MOST_ROWS + 1
    assert "and 950 more" in text


def test_secrets_and_control_characters_do_not_reach_a_page():
    text = html_table("https://user:hidden@host/x", ("a\x1b[2J",), [])
    assert "hidden" not in text
    assert "\x1b" not in text
