"""Helpers of the msgpack tests: flax's ext types by the reference codec, and trees as Python's own objects."""

from __future__ import annotations

import pytest

from wherry.integrations.containers.msgpack.index import Scalar, Sequence, Table

msgpack = pytest.importorskip("msgpack", reason="the reference codec is not installed")


def payload(shape, dtype, data, **options):
    return msgpack.packb([list(shape), dtype, data], **{"use_bin_type": True, **options})


def ext(code, data):
    return msgpack.ExtType(code, data)


def array(shape, dtype, data, code=1, **options):
    return ext(code, payload(shape, dtype, data, **options))


def plain(node):
    """A tree as Python's own objects, arrays as (shape, dtype, pieces)."""
    if isinstance(node, Table):
        return {key: plain(child) for key, child in node.entries.items()}
    if isinstance(node, Sequence):
        return [plain(child) for child in node.items]
    return node.value if isinstance(node, Scalar) else node
