"""What the tests of conversions between systems share: carrying with proof, and the hashes of what lies somewhere."""

from __future__ import annotations

import hashlib

import wherry


def carry(source, target, to, **arguments):
    """Convert, and prove it from what lies in storage; the receipt."""
    receipt = wherry.convert(source, target, to=to, lineage=False, **arguments)
    proof = wherry.verify(target, level="roundtrip", against=source)
    assert proof.ok, proof.failed
    assert not receipt.lossless or proof.measured is None
    return receipt


def hashes(uri, *, leave=()):
    """Key path → shape and SHA-256 of the canonical bytes, as the corpus states them."""
    with wherry.open(uri) as checkpoint:
        return {
            path: (list(spec.shape), hashlib.sha256(checkpoint.read(path).tobytes()).hexdigest())
            for path, spec in checkpoint.manifest.tensors.items()
            if path[0] not in leave
        }
