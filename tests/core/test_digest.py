"""Digests do not depend on how the bytes arrive, and differ whenever content does."""

import hashlib
import itertools
import json
import random
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wherry.core import digest
from wherry.core.digest import LeafHasher, checkpoint_digest, tensor_digest, weights_digest
from wherry.core.manifest import Companion, Manifest
from wherry.core.tensorspec import TensorSpec

LEAF = digest.LEAF


@pytest.fixture(autouse=True)
def small_leaves(monkeypatch):
    """Leaves of 64 bytes, so that a few hundred bytes have many of them."""
    monkeypatch.setattr(digest, "LEAF", 64)


def independent(spec, data):
    """The tensor digest as the docstring of wherry.core.digest words it, written a second time."""
    leaves = [hashlib.sha256(data[start : start + 64]).hexdigest() for start in range(0, len(data), 64)]
    text = json.dumps([spec.dtype, list(spec.shape), leaves], separators=(",", ":"))
    return hashlib.sha256(f"wherry tensor 1\n{text}".encode()).hexdigest()


@settings(deadline=None)
@given(size=st.integers(0, 400), cuts=st.lists(st.integers(0, 400), max_size=8), seed=st.integers(0, 99))
def test_pieces_in_any_order_give_the_digest_of_the_definition(size, cuts, seed):
    data = random.Random(seed).randbytes(size)
    spec = TensorSpec(("t",), (size,), "uint8")
    bounds = sorted({0, size, *(cut for cut in cuts if cut < size)})
    pieces = list(itertools.pairwise(bounds))
    random.Random(seed).shuffle(pieces)
    hasher = LeafHasher(spec)
    for start, stop in pieces:
        hasher.update(start, memoryview(data)[start:stop])
    assert hasher.done()
    assert hasher.digest() == independent(spec, data)


def test_pieces_from_many_threads_give_the_same_digest():
    data = random.Random(1).randbytes(64 * 50 + 7)
    spec = TensorSpec(("t",), (len(data),), "uint8")
    starts = list(range(0, len(data), 37))
    random.Random(2).shuffle(starts)
    hasher = LeafHasher(spec)
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
    assert hasher.digest() == independent(spec, data)


def test_a_missing_byte_is_never_digested_silently():
    hasher = LeafHasher(TensorSpec(("t",), (100,), "uint8"))
    hasher.update(0, memoryview(bytes(99)))
    with pytest.raises(AssertionError, match="never hashed"):
        hasher.digest()


def test_the_leaf_is_four_mebibytes():
    assert LEAF == 4 * 1024 * 1024


def test_dtype_and_shape_count_the_key_path_does_not():
    leaves = [b"x" * 32]
    base = tensor_digest(TensorSpec(("a",), (4, 2), "int8"), leaves)
    assert base == tensor_digest(TensorSpec(("b",), (4, 2), "int8"), leaves)
    assert base != tensor_digest(TensorSpec(("a",), (2, 4), "int8"), leaves)
    assert base != tensor_digest(TensorSpec(("a",), (4, 2), "uint8"), leaves)


def test_weights_digest_is_about_paths_and_content():
    assert weights_digest({("a",): "1", ("b",): "2"}) == weights_digest({("b",): "2", ("a",): "1"})
    assert weights_digest({("a", "b"): "1"}) != weights_digest({("a.b",): "1"})


def test_checkpoint_digest_covers_container_companions_and_leaves():
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
    assert len({checkpoint_digest(*variant) for variant in variants}) == len(variants)
