"""The report of an audit as a page: a block for each finding, in which names stay text."""

from __future__ import annotations

from itertools import pairwise

import pytest

from wherry.auditor import markdown as module
from wherry.auditor.markdown import markdown
from wherry.auditor.report import AffectedCheckpoint, AuditReport, ChainProof, CheckpointAudit, Finding

MarkdownIt = pytest.importorskip("markdown_it").MarkdownIt
EVIL = "a|b`<img src=x>` **c** [d](http://e)\n# f\u202e"
TIME = "2026-11-23T00:00:00+00:00"
DIGEST = "blake3:" + "a" * 64


def report(*findings, checkpoints=()):
    chain = ChainProof("sqlite:///ledger.db", 7, "f" * 64, TIME, None)
    return AuditReport(
        ("all",), "digest", None, "", TIME, TIME, 1.0, "0.1", chain, tuple(checkpoints), findings
    )


def parsed(text):
    """The blocks of the page as (kind of block, text), as a reader of Markdown sees them."""
    tokens = MarkdownIt("commonmark").enable("table").parse(text)
    found = []
    for token, following in pairwise(tokens):
        if following.type == "inline":
            found.append((token.tag, "".join(child.content for child in following.children)))
            assert {child.type for child in following.children} <= {
                "text", "strong_open", "strong_close", "text_special"
            }, following.content  # fmt: skip
    return found


def test_each_finding_is_a_block_with_what_is_known():
    affected = AffectedCheckpoint(DIGEST, "orbax", ("/out/x",), ("m version 2",))
    one = Finding(
        "altered",
        "tensor w differs",
        "/data/run/7",
        DIGEST,
        "w",
        3,
        ("m version 1",),
        "convert again",
        (affected,),
    )
    other = Finding("altered", "tensor b differs", "/data/run/8", DIGEST, "b")
    note = Finding("deleted", "too old", "/data/run/1")
    blocks = parsed(markdown(report(one, other, note)))
    assert [text for tag, text in blocks if tag == "h2"] == ["Errors", "Notes"]
    assert [text for tag, text in blocks if tag == "h3"] == ["1. altered", "2. altered", "1. deleted"]
    first = blocks[blocks.index(("h3", "1. altered")) + 1 : blocks.index(("h3", "2. altered"))]
    assert [text for _, text in first] == [
        "tensor w differs",
        "Where: /data/run/7",
        "Tensor or file: w, leaf 3",
        f"Checkpoint: {DIGEST}",
        "Models: m version 1",
        "Cure: convert again",
        "Meaning: bytes that differ from the recorded ones",
        f"Affected: orbax {DIGEST[:19]}, /out/x, m version 2",
    ]


def test_names_stay_text():
    row = CheckpointAudit(EVIL, DIGEST, EVIL, "written", models=(EVIL,))
    text = markdown(report(Finding("altered", EVIL, EVIL, DIGEST, EVIL, cure=EVIL), checkpoints=[row]))
    blocks = parsed(text)
    shown = EVIL.replace("\n", " ").replace("\u202e", " ").strip()
    said = [one.strip() for tag, one in blocks if tag in ("p", "td")]
    assert said.count(shown) == 4, "the sentence, and three cells"
    assert f"Where: {shown}" in said
    assert [tag for tag, _ in blocks if tag == "h1"] == ["h1"]


def test_of_many_findings_the_first_are_shown(monkeypatch):
    monkeypatch.setattr(module, "LISTED", 3)
    rows = [CheckpointAudit(f"/{number}", DIGEST, "orbax", "written") for number in range(4)]
    text = markdown(report(*(Finding("altered", f"w{number}") for number in range(5)), checkpoints=rows))
    assert [one for tag, one in parsed(text) if tag == "h3"] == [f"{number}. altered" for number in (1, 2, 3)]
    assert "and 2 more; report.json lists all" in text
    assert "and 1 more; report.json lists all" in text
