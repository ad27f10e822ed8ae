"""What a loss of power leaves of everything else that is written next to or into a checkpoint."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import wherry
from tests.support import audit as audit_support
from tests.support import orbax as orbax_support
from tests.support.durability import make_source, watched
from tests.support.orbax import copied, needs_corpus
from tests.support.signing import key_pair
from wherry.ledger.record import open_ledger, record_event
from wherry.nightly.removal import removing
from wherry.prove.audit import audit
from wherry.prove.inspect import inspect

STATE = {"w": np.arange(60_000, dtype=np.float32), "b": np.ones(3, np.int32)}


def disk_with(name, tmp_path):
    """A folder to watch with a checkpoint in it."""
    (tmp_path / "disk").mkdir()
    return make_source(name, tmp_path / "disk" / name)


@pytest.mark.parametrize("name", ["orbax", "huggingface", "safetensors", "npz"])
def test_fetch(tmp_path, name):
    made = wherry.convert(make_source(name, tmp_path / "source"), tmp_path / "from" / name, to=name).target
    target = tmp_path / "disk" / "new" / name
    with watched(tmp_path / "disk", target) as disk:
        assert wherry.fetch(made.uri, target).lineage == "recorded"
    assert disk.broken == []


@pytest.mark.parametrize("where", ["host", "disk"])
def test_export(tmp_path, where):
    target = tmp_path / "disk" / "run" / "step"
    with watched(tmp_path / "disk", target) as disk:
        wherry.export(dict(STATE), target, to="orbax", step=1, snapshot=where).result(60)
    assert disk.broken == []


@pytest.mark.parametrize("name", ["orbax", "safetensors"])
def test_taking_stock_writes_a_sidecar(tmp_path, name):
    source = disk_with(name, tmp_path)
    with watched(tmp_path / "disk") as disk:
        inspect(source, digest=True, write=True)
    assert [path.name for path in (tmp_path / "disk").rglob("*wherry.json")]
    assert disk.broken == []


@pytest.mark.parametrize("name", ["orbax", "safetensors"])
def test_signatures(tmp_path, name):
    keys = signing_keys(tmp_path)
    target = tmp_path / "disk" / name
    with watched(tmp_path / "disk", target) as disk:
        wherry.convert(make_source(name, tmp_path / "source"), target, to=name)
    with watched(tmp_path / "disk") as disk:
        signature = signing().sign(target, keys)
    assert Path(signature).exists()
    assert disk.broken == []
    with watched(tmp_path / "disk") as disk:
        signing().sign(target, keys)
    assert disk.broken == [], "the older signature must stay until the new one is durable"
    if name == "safetensors":
        with watched(tmp_path / "copies") as disk:
            wherry.fetch(target, tmp_path / "copies" / "one")
        assert len(list((tmp_path / "copies").iterdir())) == 3
        assert disk.broken == []


def signing():
    pytest.importorskip("cryptography", reason="cryptography is not installed")
    from wherry.integrations import signing

    return signing


def signing_keys(folder):
    return key_pair(folder)[0]


@pytest.mark.parametrize("name", ["orbax", "safetensors"])
def test_a_removal_is_durable_before_it_is_recorded(tmp_path, name):
    uri = tmp_path / "disk" / name
    uri.parent.mkdir()
    made = wherry.convert(make_source(name, tmp_path / "source"), uri, to=name).target
    with watched(tmp_path / "disk") as disk, removing(str(uri), str(uri), name), open_ledger() as ledger:
        record_event(ledger, "deletion", made, {"reason": "test"})
    assert list((tmp_path / "disk").iterdir()) == []
    assert disk.broken == []


def test_evidence(tmp_path):
    audit_support.converted(tmp_path)
    with watched(tmp_path / "disk") as disk:
        audit(bundle=tmp_path / "disk" / "evidence.zip")
        audit(bundle=tmp_path / "disk" / "new" / "deep" / "evidence.zip")
        audit(bundle=f"{tmp_path / 'disk' / 'folder'}/")
    assert len(list((tmp_path / "disk").rglob("*.zip"))) == 3
    assert disk.broken == []


@pytest.fixture
def torch_source(tmp_path):
    """A folder that torch.distributed.checkpoint saved, below a folder to watch."""
    pytest.importorskip("torch.distributed.checkpoint")
    from tests.support.torch import save, torch

    (tmp_path / "disk").mkdir()
    state = {"a": torch.arange(30_000.0), "b": torch.ones(3, dtype=torch.bfloat16)}
    return save(state, tmp_path / "disk" / "source")


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("in_place", [False, True], ids=["staged", "in place"])
def test_a_rewrite_of_torch_metadata(tmp_path, torch_source, in_place):
    target = None if in_place else tmp_path / "disk" / "new" / "out"
    with watched(tmp_path / "disk", *([target] if target else ())) as disk:
        done = wherry.rewrite(torch_source, target, as_="for-torch=2.3", in_place=in_place)
    assert done.receipt.lineage == "recorded"
    assert disk.broken == []


@pytest.mark.parametrize("options", [{}, {"ocdbt": False}], ids=str)
@pytest.mark.parametrize("name", ["box", "unbox"])
def test_a_rewrite_that_renames_keys(tmp_path, name, options):
    """What tensorstore syncs by itself is not seen, so that all of it must be synced again."""
    (tmp_path / "disk").mkdir()
    arrays = {("params", "wi", "value"): STATE["w"], ("params", "norm", "value"): STATE["b"]}
    orbax_support.write(tmp_path / "source", arrays, **options)
    target = tmp_path / "disk" / "new" / "out"
    with watched(tmp_path / "disk", target) as disk:
        wherry.rewrite(tmp_path / "source", target, as_=name)
    assert disk.broken == []


@needs_corpus
@pytest.mark.parametrize("in_place", [False, True], ids=["staged", "in place"])
def test_a_rewrite_that_merges(tmp_path, in_place):
    (tmp_path / "disk").mkdir()
    source = copied("defect-orbax-unmerged-ocdbt", tmp_path / "disk")
    target = None if in_place else tmp_path / "disk" / "new" / "out"
    with watched(tmp_path / "disk", *([target] if target else ())) as disk:
        wherry.rewrite(source, target, as_="merge", in_place=in_place)
    made = [
        row for row in disk.broken if row.rule == "contents" and in_place
    ]  # tensorstore writes there itself
    assert all(row.path.endswith("manifest.ocdbt") or "/d/" in row.path for row in made)
    assert [row for row in disk.broken if row not in made] == []
