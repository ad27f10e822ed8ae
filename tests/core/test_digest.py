"""Digests do not depend on how the bytes arrive, and differ whenever content does."""

import hashlib
import itertools
import json
import random
import threading

import blake3
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wherry.core import digest
from wherry.core.digest import (
    ALGORITHMS,
    BLAKE3,
    SHA256,
    LeafHasher,
    algorithm_of,
    digest_in,
    digest_uri,
    require_digest,
    tensor_digest,
    weights_digest,
)
from wherry.core.manifest import Companion, Manifest, checkpoint_digest
from wherry.core.tensorspec import TensorSpec

LEAF = digest.LEAF
HASHES = {BLAKE3: blake3.blake3, SHA256: hashlib.sha256}
KNOWN = {
    "tensor": "sha256:f017ef16effb8f3228b887988b5737d207c12d66e01749d5e0be4c4056ceb2d9",
    "weights": "sha256:8293b2f558cf517d9059e47d3d9b26ea0b93c88052070cd757e3ed2e5d392a96",
    "checkpoint": "sha256:7d676e4d1fa9cced620748d56860fc96b20bccf4fe096df814a9f2d17974e75a",
}
ANY = pytest.mark.parametrize("algorithm", ALGORITHMS)


@pytest.fixture(autouse=True)
def small_leaves(monkeypatch):
    """Leaves of 64 bytes, hashed in order, so that a few hundred bytes have many of them; kernels know one size."""
    monkeypatch.setattr(digest, "LEAF", 64)
    monkeypatch.setattr("wherry.kernels.load", lambda: None)


def independent(spec, data, algorithm):
    """The tensor digest as the docstring of wherry.core.digest words it, written a second time."""
    new = HASHES[algorithm]
    leaves = [new(data[start : start + 64]).hexdigest() for start in range(0, len(data), 64)]
    text = json.dumps([spec.dtype, list(spec.shape), leaves], separators=(",", ":"))
    found = new(b"wherry tensor 1\n" + text.encode())
    return f"{algorithm}:{found.hexdigest()}"


@settings(deadline=None)
@given(
    size=st.integers(0, 400),
    cuts=st.lists(st.integers(0, 400), max_size=8),
    seed=st.integers(0, 99),
    algorithms=st.sampled_from([(BLAKE3,), (SHA256,), (BLAKE3, SHA256), (SHA256, BLAKE3)]),
)
def test_pieces_in_any_order_give_the_digest_of_the_definition(size, cuts, seed, algorithms):
    data = random.Random(seed).randbytes(size)
    spec = TensorSpec(("t",), (size,), "uint8")
    bounds = sorted({0, size, *(cut for cut in cuts if cut < size)})
    pieces = list(itertools.pairwise(bounds))
    random.Random(seed).shuffle(pieces)
    hasher = LeafHasher(spec, algorithms)
    for start, stop in pieces:
        hasher.update(start, memoryview(data)[start:stop])
    assert hasher.done()
    for algorithm in algorithms:
        assert hasher.digest(algorithm) == independent(spec, data, algorithm)


def test_pieces_from_many_threads_give_the_same_digest():
    data = random.Random(1).randbytes(64 * 50 + 7)
    spec = TensorSpec(("t",), (len(data),), "uint8")
    starts = list(range(0, len(data), 37))
    random.Random(2).shuffle(starts)
    hasher = LeafHasher(spec, ALGORITHMS)
    threads = [
        threading.Thread(
            target=lambda part: [hasher.update(s, memoryview(data)[s : s + 37]) for s in part], args=(part,)
        )
        for part in (starts[::3], starts[1::3], starts[2::3])
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for algorithm in ALGORITHMS:
        assert hasher.digest(algorithm) == independent(spec, data, algorithm)


def test_a_missing_byte_is_never_digested_silently():
    hasher = LeafHasher(TensorSpec(("t",), (100,), "uint8"), (BLAKE3,))
    hasher.update(0, memoryview(bytes(99)))
    with pytest.raises(AssertionError, match="never hashed"):
        hasher.digest(BLAKE3)


def test_the_leaf_is_four_mebibytes():
    assert LEAF == 4 * 1024 * 1024


@ANY
def test_dtype_and_shape_count_the_key_path_does_not(algorithm):
    leaves = [b"x" * 32]
    base = tensor_digest(TensorSpec(("a",), (4, 2), "int8"), leaves, algorithm)
    assert base == tensor_digest(TensorSpec(("b",), (4, 2), "int8"), leaves, algorithm)
    assert base != tensor_digest(TensorSpec(("a",), (2, 4), "int8"), leaves, algorithm)
    assert base != tensor_digest(TensorSpec(("a",), (4, 2), "uint8"), leaves, algorithm)


@ANY
def test_weights_digest_is_about_paths_and_content(algorithm):
    assert weights_digest({("a",): "1", ("b",): "2"}, algorithm) == weights_digest(
        {("b",): "2", ("a",): "1"}, algorithm
    )
    assert weights_digest({("a", "b"): "1"}, algorithm) != weights_digest({("a.b",): "1"}, algorithm)


@ANY
def test_checkpoint_digest_covers_container_companions_and_leaves(algorithm):
    config, form = (Companion("config.json", 2, "00"),), ("huggingface", "single safetensors")
    base = Manifest({}, companions=config)
    variants = [
        (base, *form),
        (base, "orbax", form[1]),
        (base, form[0], "sharded safetensors"),
        (Manifest({}, companions=(Companion("config.json", 2, "01"),)), *form),
        (Manifest({}, companions=(Companion("other.json", 2, "00"),)), *form),
        (Manifest({}), *form),
        (Manifest({}, companions=config, values={("s",): "x"}), *form),
        (Manifest({}, companions=config, values={("s",): "y"}), *form),
        (Manifest({}, companions=config, values={("t",): "x"}), *form),
        (Manifest({}, companions=config, empties={("s",): "none"}), *form),
        (Manifest({}, companions=config, empties={("s",): "dict"}), *form),
    ]
    assert len({checkpoint_digest(*variant, algorithm) for variant in variants}) == len(variants)


def test_sha256_digests_are_those_that_were_ever_recorded():
    spec, leaf = TensorSpec(("w",), (3,), "float32"), hashlib.sha256(bytes(12)).digest()
    tensor = tensor_digest(spec, [leaf], SHA256)
    manifest = Manifest({("w",): spec}, digests={("w",): tensor}, companions=(Companion("c.json", 2, "00"),))
    assert tensor == KNOWN["tensor"]
    assert weights_digest(manifest.digests, SHA256) == KNOWN["weights"]
    assert checkpoint_digest(manifest, "huggingface", None, SHA256) == KNOWN["checkpoint"]


def test_a_digest_names_its_algorithm():
    digits = "0123456789abcdef" * 4
    for text in (f"blake3:{digits}", f"sha256:{digits}"):
        assert require_digest(text) == text
    for text in (digits, "", "not a digest", f"md5:{digits}", f"sha256:{digits[1:]}", f"sha256:{digits}\n"):
        with pytest.raises(TypeError, match="expected a digest with its algorithm"):
            require_digest(text)
    assert (algorithm_of(f"blake3:{digits}"), algorithm_of(f"sha256:{digits}")) == (BLAKE3, SHA256)


@ANY
def test_a_digest_as_uri_and_back(algorithm):
    found = f"{algorithm}:{'0123456789abcdef' * 4}"
    assert digest_uri(found) == f"wherry://{algorithm}/{'0123456789abcdef' * 4}"
    assert digest_in(digest_uri(found)) == found
    for odd in (found, digest_uri(found)[:-1], f"{digest_uri(found)}0", f"wherry://md5/{'0' * 64}", ""):
        assert digest_in(odd) is None


def test_a_digest_of_another_algorithm_is_not_one_of_this_checkpoint():
    """The algorithm of every tensor's digest counts, so that a record with one altered label is altered."""
    digits = "0" * 64
    assert weights_digest({("a",): f"blake3:{digits}"}, BLAKE3) != weights_digest(
        {("a",): f"sha256:{digits}"}, BLAKE3
    )
    assert weights_digest({("a",): f"blake3:{digits}"}, SHA256) != weights_digest(
        {("a",): f"sha256:{digits}"}, SHA256
    )
