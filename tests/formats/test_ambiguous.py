"""Several formats may claim a place: the most specific one has it, and of two equals none is guessed."""

from __future__ import annotations

import json
import struct
from types import SimpleNamespace

import pytest

import wherry
from wherry.core.detection import Detection
from wherry.errors import AmbiguousError
from wherry.formats.detect import look
from wherry.formats.format import Glimpse
from wherry.storage.stores import locate


def row(name, *refines, claims=True):
    """A row of the registry, as far as detection looks at it."""
    claim = Detection("x", name) if claims else None
    return SimpleNamespace(refines=refines, signs=None, detect=lambda _glimpse: claim)


def looked(tmp_path, **rows):
    return look(Glimpse(locate(tmp_path)), rows)


def test_the_most_specific_format_has_it(tmp_path):
    found = looked(tmp_path, tree=row("tree"), system=row("system", "tree"), other=row("other", claims=False))
    assert (found.format, found.also) == ("system", ("tree",))
    assert looked(tmp_path, other=row("other", claims=False)) is None


def test_what_is_refined_through_another_is_no_second_answer(tmp_path):
    rows = {"tree": row("tree"), "item": row("item", "tree", claims=False), "system": row("system", "item")}
    assert looked(tmp_path, **rows).format == "system"


def test_of_two_equals_none_is_guessed(tmp_path):
    with pytest.raises(AmbiguousError, match="this could be one or two") as caught:
        looked(tmp_path, one=row("one"), two=row("two"))
    assert "--format one" in caught.value.cure


@pytest.mark.parametrize("low", range(0, 256, 8))
def test_a_header_of_any_length_is_a_header(tmp_path, low):
    """The JSON header that fills the file decides, whatever another format makes of the bytes of its length."""
    file = tmp_path / "ambiguous.bin"
    text = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    for length in (high * 256 + low for high in (*range(16), 0x20, 0x80, 0x8A, 0xFF, 0x102, 0x204, 0x505)):
        if length >= len(text):
            file.write_bytes(struct.pack("<Q", length) + text.ljust(length) + bytes(8))
            found = wherry.detect(file)
            assert (found.verdict, found.format) == ("ok", "safetensors"), hex(length)
