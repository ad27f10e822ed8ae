"""Lineage: from real conversions, from the ledger, and from a sidecar alone."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest
from safetensors.numpy import save_file

import wherry
from wherry.core.digest import digits_of
from wherry.core.units import short
from wherry.errors import AmbiguousError, NotFoundError, NotRecordedError
from wherry.ledger.nodes import LineageNode
from wherry.ledger.record import Edge, check_chain, open_ledger, record, record_conversion, record_outcome
from wherry.store.home import ensure_home, home, sqlite_file, without_secrets
from wherry.trace.lineage import LineageTree, show
from wherry.trace.lineage_text import render


@pytest.fixture(autouse=True)
def own_home(tmp_path, monkeypatch):
    monkeypatch.setenv("WHERRY_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("WHERRY_LEDGER", raising=False)


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "source.safetensors"
    save_file({"a": np.arange(12, dtype=np.float32).reshape(3, 4), "b": np.ones(5, np.int32)}, path)
    return path


@pytest.fixture
def converted(source, tmp_path):
    return wherry.convert(source, tmp_path / "orbax", to="orbax")


def test_source_and_target_are_two_nodes_with_one_weights_digest(converted):
    assert converted.lineage == "recorded"
    tree = show(converted.target.uri)
    assert tree.root == converted.target.checkpoint_digest
    assert len(tree.nodes) == 2
    assert len({node.weights_digest for node in tree.nodes.values()}) == 1
    [edge] = tree.edges
    assert (edge.source, edge.target) == (
        converted.source.checkpoint_digest,
        converted.target.checkpoint_digest,
    )
    assert edge.statement == 1
    json.dumps(tree.to_json())


def test_down_from_the_source_and_by_digest(converted, source):
    digest = converted.source.checkpoint_digest
    for about in (source, digits_of(digest)[:8], digest[:16], digits_of(digest), digest):
        text = render(show(about))
        assert "converted to" in text
        assert "converted from" not in text
        assert converted.target.uri in text


def test_render_draws_up_and_down(converted, source, tmp_path):
    last = wherry.convert(converted.target.uri, tmp_path / "back.safetensors", to="safetensors")
    record_outcome(last.target, {"level": "digest", "verdict": "ok", "ok": True})
    text = render(show(converted.target.uri))
    lines = text.splitlines()
    assert lines[0].startswith(f"{short(converted.target.checkpoint_digest)} orbax")
    up, down = lines.index("converted from"), lines.index("converted to")
    assert lines[up + 1].startswith(f"└─ {short(converted.source.checkpoint_digest)} safetensors")
    assert lines[down + 1].startswith(f"└─ {short(last.target.checkpoint_digest)} safetensors")
    assert "verified at level digest: ok" in text


def test_a_round_trip_of_digests_is_drawn_once(converted, tmp_path):
    wherry.convert(converted.target.uri, tmp_path / "back.safetensors", to="safetensors")
    tree = show(converted.source.checkpoint_digest)
    assert {(edge.source, edge.target) for edge in tree.edges} == {
        (converted.source.checkpoint_digest, converted.target.checkpoint_digest),
        (converted.target.checkpoint_digest, converted.source.checkpoint_digest),
    }
    text = render(tree)
    assert text.count("(see above)") == 2
    assert str(tmp_path / "back.safetensors") in text.splitlines()[1]


def test_the_sidecar_answers_when_the_ledger_is_lost(converted):
    shutil.rmtree(home())
    tree = show(converted.target.uri)
    [edge] = tree.edges
    assert edge.statement is None
    assert edge.source == converted.source.checkpoint_digest
    assert "its sidecar" in render(tree)
    with open_ledger() as ledger:
        record_conversion(ledger, converted)
    assert show(converted.target.uri).edges[0].statement == 1


def test_a_ledger_that_cannot_be_written_does_not_undo_the_conversion(source, tmp_path, monkeypatch):
    (tmp_path / "no-folder").write_text("a file")
    monkeypatch.setenv("WHERRY_LEDGER", f"sqlite:///{tmp_path / 'no-folder' / 'ledger.db'}")
    with pytest.raises(
        NotRecordedError, match="done, but not recorded: the ledger cannot be used"
    ) as failure:
        wherry.convert(source, tmp_path / "orbax", to="orbax")
    receipt = failure.value.result
    assert receipt.lineage.startswith("not recorded: the ledger cannot be used")
    monkeypatch.delenv("WHERRY_LEDGER")
    assert record(receipt).lineage == "recorded"


def test_what_is_unknown_is_said(tmp_path, source):
    for about in (tmp_path / "nothing", source, "0123456789abcdef"):
        with pytest.raises(NotFoundError, match="no lineage is recorded") as failure:
            show(about)
        assert failure.value.exit_code == 3
        assert failure.value.cure


def test_a_weights_digest_of_several_checkpoints_is_ambiguous(converted):
    with pytest.raises(AmbiguousError, match="2 checkpoints") as failure:
        show(converted.source.weights_digest)
    assert converted.target.checkpoint_digest[:12] in (failure.value.cure or "")


def test_many_ways_to_one_checkpoint_are_printed_once():
    """Twenty diamonds, one below the other, have a million ways through them."""
    edges, above = [], "start"
    for number in range(20):
        ends = [(above, f"left{number}"), (above, f"right{number}")]
        above = f"joined{number}"
        ends += [(ends[0][1], above), (ends[1][1], above)]
        edges += [Edge(source, target, "p" * 64, 1, "now", lossless=True) for source, target in ends]
    names = {end for edge in edges for end in (edge.source, edge.target)}
    nodes = {name: LineageNode(name, name, "orbax", None, "params", 1, 1, 1, 1) for name in names}
    text = render(LineageTree("start", nodes, tuple(edges)))
    assert {name for name in names if name not in text} == set()
    assert text.count("(see above)") == 19, "each but the last, below which nothing is"
    assert len(text.splitlines()) < 4 * len(edges)


def test_a_chain_of_two_thousand_is_printed_whole():
    names = [f"n{number:04}" for number in range(2001)]
    edges = tuple(Edge(a, b, "p" * 64, 1, "now", lossless=True) for a, b in pairwise(names))
    nodes = {name: LineageNode(name, name, "orbax", None, "params", 1, 1, 1, 1) for name in names}
    text = render(LineageTree(names[0], nodes, edges))
    assert [line.strip().split()[1] for line in text.splitlines() if "└─" in line] == names[1:]


def test_no_lineage_leaves_no_ledger(source, tmp_path):
    wherry.convert(source, tmp_path / "orbax", to="orbax", lineage=False)
    assert not (home() / "ledger.db").exists()


def test_home_is_private(monkeypatch, tmp_path):
    assert ensure_home().stat().st_mode & 0o777 == 0o700
    with open_ledger() as ledger:
        assert check_chain(ledger).statements == 0
    assert (home() / "ledger.db").is_file()


@pytest.mark.parametrize(
    ("url", "printed"),
    [
        ("https://user:secret@host:80/path?token=secret#secret", "https://host:80/path"),
        ("postgresql+psycopg2://user:s@cret@host/db", "postgresql+psycopg2://host/db"),
        ("sqlite:////folder/ledger.db", "sqlite:////folder/ledger.db"),
        ("sqlite:////home/me@corp/ledger.db", "sqlite:////home/me@corp/ledger.db"),
        ("postgresql://u:p/w@127.0.0.1:1/db", "postgresql://127.0.0.1:1/db"),
        ("postgresql://u:1/w@127.0.0.1:1/db", "postgresql://127.0.0.1:1/db"),
        ("postgresql://u:p?w@host/db", "postgresql://host/db"),
        ("postgresql://u:p#w@host/db?sslmode=require", "postgresql://host/db"),
        ("mysql+pymysql://u:a@b/c@host/db", "mysql+pymysql://host/db"),
        ("https://u:p/w@host/x?token=secret", "https://host/x"),
        ("https://user:secret@host/models/x@y", "https://host/models/x@y"),
        ("https://host:80/x@y?mail=a@b", "https://host:80/x@y"),
        ("http://[::1]:5000/x@y", "http://[::1]:5000/x@y"),
        ("gs://bucket/me@corp/model", "gs://bucket/me@corp/model"),
        ("hdfs://host:8020/me@corp/model", "hdfs://host:8020/me@corp/model"),
        ("file:///home/me@corp/mlruns", "file:///home/me@corp/mlruns"),
    ],
)
def test_urls_are_kept_without_secrets(url, printed):
    assert without_secrets(url) == printed
    assert (sqlite_file(url) is not None) == url.startswith("sqlite")


def test_conversion_imports_no_orchestration(source, tmp_path):
    script = (
        "import sys, wherry; assert 'sqlite3' not in sys.modules\n"
        "wherry.convert(sys.argv[1], sys.argv[2], to='orbax')\n"
        "print(sorted({'prefect', 'mlflow', 'sqlalchemy', 'torch', 'jax'} & set(sys.modules)))"
    )
    arguments = [sys.executable, "-c", script, str(source), str(tmp_path / "o")]
    done = subprocess.run(arguments, check=True, capture_output=True, text=True)
    assert re.fullmatch(r"\[\]\s*", done.stdout)


def test_what_was_exported_from_memory_reads_well(tmp_path):
    state = {"w": np.arange(6, dtype=np.float32)}
    receipt = wherry.export(state, tmp_path / "run" / "9", to="orbax", step=9).result(60)
    text = render(show(receipt.target.uri))
    assert f"{receipt.source.uri} (memory of a training run; not on disk)" in text
    assert "live (numpy " in text
    assert show(receipt.source.uri).root == receipt.source.checkpoint_digest
