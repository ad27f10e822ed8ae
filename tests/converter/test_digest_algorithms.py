"""Records of both algorithms: what is new has the chosen one, and what was recorded is verified with its own."""

from __future__ import annotations

import hashlib
import json

import blake3
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import wherry
from tests.support.families import LLAMA, made
from wherry.config import settings
from wherry.config.settings import DIGEST_ENV
from wherry.core.digest import ALGORITHMS, BLAKE3, LEAF, SHA256, algorithm_of
from wherry.errors import MismatchError
from wherry.families import load_family
from wherry.ledger.record import check_chain, open_ledger
from wherry.store.local_store import locate
from wherry.store.sidecar import read_sidecar
from wherry.trace.lineage import show

# Written by the commit before digests had an algorithm.
HASHES = {BLAKE3: blake3.blake3, SHA256: hashlib.sha256}


@pytest.fixture
def source(tmp_path):
    """Tensors of one leaf and of several."""
    path = tmp_path / "source.safetensors"
    generator = np.random.default_rng(0)
    large = generator.integers(0, 255, 2 * LEAF + 5, np.uint8)
    save_file({"large": large, "small": generator.normal(size=(4, 8))}, path)
    return path


def recorded(path):
    """The sidecar of a checkpoint, as JSON."""
    folder = path / "wherry.json"
    return json.loads((folder if folder.exists() else path.with_name(f"{path.name}.wherry.json")).read_text())


def stated(array, algorithm):
    """The tensor digest by its definition, written a second time."""
    new, data = HASHES[algorithm], array.tobytes()
    leaves = [new(data[at : at + LEAF]).hexdigest() for at in range(0, len(data), LEAF)]
    text = json.dumps([NAMES[array.dtype.str], list(array.shape), leaves], separators=(",", ":"))
    return f"{algorithm}:{new(b'wherry tensor 1' + bytes([10]) + text.encode()).hexdigest()}"


NAMES = {"|u1": "uint8", "<f8": "float64"}


def damage(path, offset=-3):
    """Change one byte, in place."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("to", ["safetensors", "orbax", "dcp"])
def test_a_new_record_has_the_chosen_algorithm(algorithm, to, source, tmp_path, monkeypatch):
    monkeypatch.setenv(DIGEST_ENV, algorithm)
    receipt = wherry.convert(source, tmp_path / "out", to=to)
    data = recorded(tmp_path / "out")
    assert list(data["leaves"]) == [algorithm]
    assert {row["path"]: row["digest"] for row in data["manifest"]["tensors"]} == {
        name: stated(array, algorithm) for name, array in load_file(source).items()
    }
    for one in (receipt.source, receipt.target):
        assert {algorithm_of(one.checkpoint_digest), algorithm_of(one.weights_digest)} == {algorithm}
    assert wherry.verify(tmp_path / "out", level="digest").ok
    assert wherry.verify(tmp_path / "out", level="roundtrip", against=source).ok


@pytest.mark.parametrize(("first", "then"), [(SHA256, BLAKE3), (BLAKE3, SHA256)])
def test_records_of_both_algorithms_mix(first, then, source, tmp_path, monkeypatch):
    monkeypatch.setenv(DIGEST_ENV, first)
    one = wherry.convert(source, tmp_path / "one", to="dcp")
    monkeypatch.setenv(DIGEST_ENV, then)
    two = wherry.convert(tmp_path / "one", tmp_path / "two", to="orbax")
    assert two.source == one.target, "the source is the node that was recorded"
    assert algorithm_of(two.target.checkpoint_digest) == then
    tree = show(tmp_path / "two")
    assert {(edge.source, edge.target) for edge in tree.edges} == {
        (one.source.checkpoint_digest, one.target.checkpoint_digest),
        (two.source.checkpoint_digest, two.target.checkpoint_digest),
    }
    assert show(one.target.checkpoint_digest.partition(":")[2][:12]).root == one.target.checkpoint_digest
    assert show(two.target.checkpoint_digest[:20]).root == two.target.checkpoint_digest
    with open_ledger() as ledger:
        assert check_chain(ledger).altered is None
    for name in ("one", "two"):
        assert wherry.verify(tmp_path / name, level="digest").ok
    assert wherry.verify(tmp_path / "two", against=tmp_path / "one").ok
    assert wherry.verify(tmp_path / "one", against=tmp_path / "two").ok


@pytest.mark.parametrize(("first", "then"), [(SHA256, BLAKE3), (BLAKE3, SHA256)])
def test_a_source_is_compared_with_its_record_by_the_algorithm_of_the_record(
    first, then, source, tmp_path, monkeypatch
):
    monkeypatch.setenv(DIGEST_ENV, first)
    wherry.inspect(source, digest=True, write=True)
    damage(source)
    monkeypatch.setenv(DIGEST_ENV, then)
    with pytest.raises(MismatchError, match="the source has changed since it was recorded") as caught:
        wherry.convert(source, tmp_path / "out", to="dcp")
    assert caught.value.path == "large"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("first", "then"), [(SHA256, BLAKE3), (BLAKE3, SHA256)])
@pytest.mark.parametrize("damaged", [False, True])
def test_a_source_of_another_system_too(first, then, damaged, tmp_path, monkeypatch):
    folder = tmp_path / "llama"
    folder.mkdir()
    tensors = made(load_family("llama"), "huggingface", {}).tensors
    save_file({path[0]: array for path, array in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(LLAMA))
    monkeypatch.setenv(DIGEST_ENV, first)
    wherry.inspect(folder, digest=True, write=True)
    monkeypatch.setenv(DIGEST_ENV, then)
    if damaged:
        damage(folder / "model.safetensors")
        with pytest.raises(MismatchError, match="the source has changed since it was recorded"):
            wherry.convert(folder, tmp_path / "out", to="maxtext")
        return
    receipt = wherry.convert(folder, tmp_path / "out", to="maxtext")
    assert algorithm_of(receipt.source.checkpoint_digest) == first
    assert algorithm_of(receipt.target.checkpoint_digest) == then
    assert wherry.verify(tmp_path / "out", level="roundtrip", against=folder).ok


def test_a_run_that_was_interrupted_under_another_algorithm_starts_over(source, tmp_path, monkeypatch):
    from wherry.converter import job

    def fail(*_arguments, **_options):
        raise KeyboardInterrupt

    monkeypatch.setenv(DIGEST_ENV, SHA256)
    with monkeypatch.context() as patch:
        patch.setattr(job, "finish", fail)
        with pytest.raises(KeyboardInterrupt):
            wherry.convert(source, tmp_path / "out", to="dcp")
    monkeypatch.setenv(DIGEST_ENV, BLAKE3)
    receipt = wherry.convert(source, tmp_path / "out", to="dcp")
    assert (receipt.resumed_bytes, receipt.note) == (
        0,
        "the interrupted run had a different source, plan, option or digest algorithm",
    )
    assert wherry.verify(tmp_path / "out", level="digest").ok


def test_a_receipt_says_that_a_host_in_fips_mode_chose(source, tmp_path, monkeypatch):
    (tmp_path / "fips").write_text("1\n")
    monkeypatch.setattr(settings, "_FIPS", tmp_path / "fips")
    receipt = wherry.convert(source, tmp_path / "out", to="dcp")
    assert algorithm_of(receipt.target.checkpoint_digest) == SHA256
    assert [one for one in receipt.warnings if "FIPS" in one]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_inspect_keeps_the_algorithm_of_an_existing_record(algorithm, source, monkeypatch):
    monkeypatch.setenv(DIGEST_ENV, algorithm)
    wherry.inspect(source, write=True)
    before = recorded(source)
    for other in ALGORITHMS:
        monkeypatch.setenv(DIGEST_ENV, other)
        found = wherry.inspect(source, digest=True, write=True)
        assert {algorithm_of(one) for one in found.manifest.digests.values()} == {algorithm}
    assert recorded(source) == before


@pytest.mark.parametrize(("first", "then"), [(SHA256, BLAKE3), (BLAKE3, SHA256)])
def test_a_rewrite_compares_with_the_record_and_records_anew(first, then, tmp_path, monkeypatch):
    save_file({"w": np.arange(8.0)}, tmp_path / "source.safetensors")
    monkeypatch.setenv(DIGEST_ENV, first)
    made_first = wherry.convert(tmp_path / "source.safetensors", tmp_path / "orbax", to="orbax")
    monkeypatch.setenv(DIGEST_ENV, then)
    copied = wherry.convert(tmp_path / "orbax", tmp_path / "again", to="orbax")
    assert copied.source == made_first.target
    assert algorithm_of(copied.target.checkpoint_digest) == then


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_fetched_copy_is_verified_by_the_algorithm_of_its_record(algorithm, source, tmp_path, monkeypatch):
    monkeypatch.setenv(DIGEST_ENV, algorithm)
    receipt = wherry.convert(source, tmp_path / "one", to="huggingface", family="none")
    monkeypatch.setenv(DIGEST_ENV, next(one for one in ALGORITHMS if one != algorithm))
    wherry.fetch(
        f"wherry://{algorithm}/{receipt.target.checkpoint_digest.partition(':')[2]}", tmp_path / "copy"
    )
    assert (
        read_sidecar(locate(tmp_path / "copy")).checkpoint.checkpoint_digest
        == receipt.target.checkpoint_digest
    )
    damage(tmp_path / "one" / "model.safetensors")
    with pytest.raises(MismatchError, match=algorithm):
        wherry.fetch(tmp_path / "one", tmp_path / "second")
