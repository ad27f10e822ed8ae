"""What came back changed through the inverse is measured, and found where it is more than the plan allowed."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

import wherry
from tests.support.families import LLAMA, made
from wherry.core.request import LayoutRequest
from wherry.errors import AmbiguousError, UnrepresentableError, UnsupportedError, UsageError
from wherry.families import load_family

NAME = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def narrowed(tmp_path):
    """A Hugging Face Llama, and the same in bfloat16."""
    tensors = made(load_family("llama"), "huggingface", {}).tensors
    (tmp_path / "wide").mkdir()
    save_file({path[0]: array for path, array in tensors.items()}, tmp_path / "wide" / "model.safetensors")
    (tmp_path / "wide" / "config.json").write_text(json.dumps(LLAMA))
    wherry.convert(
        tmp_path / "wide", tmp_path / "narrow", to="huggingface", layout=LayoutRequest(dtype="bfloat16")
    )
    return tmp_path / "wide", tmp_path / "narrow"


def roundtrip(narrowed):
    wide, narrow = narrowed
    return wherry.verify(narrow, level="roundtrip", against=wide)


def test_a_cast_stays_within_its_bound(narrowed):
    found = roundtrip(narrowed)
    assert found.ok
    assert 0 < found.measured.share <= 1


def test_a_value_that_is_off_by_more_than_the_bound_is_found(narrowed):
    with wherry.open(narrowed[1]) as checkpoint:
        values = checkpoint.read(NAME).view("u2")
    file = narrowed[1] / "model.safetensors"
    data, raw = file.read_bytes(), values.tobytes()
    assert data.count(raw) == 1
    values[0, 0] ^= np.uint16(1 << 10)  # an eighth of the exponent's range
    file.write_bytes(data.replace(raw, values.tobytes()))
    reasons = [one.reason for one in roundtrip(narrowed).failed if one.path == NAME]
    assert any("its values differ by up to" in reason for reason in reasons)


def test_a_conversion_with_a_config_from_elsewhere_is_checked(narrowed, tmp_path):
    """Without its config nothing states how many heads the source has."""
    wide = narrowed[0]
    config = (wide / "config.json").rename(tmp_path / "config.json")
    target = tmp_path / "maxtext" / "0"
    with pytest.raises(AmbiguousError):
        wherry.convert(wide, target, to="maxtext", layout=LayoutRequest(family="llama"))
    wherry.convert(wide, target, to="maxtext", layout=LayoutRequest(family="llama", config=str(config)))
    assert wherry.verify(target, level="roundtrip", against=wide).ok


def forged(place, **layout):
    """The sidecar of a target, with another record of its layout."""
    file = place / "wherry.json"
    data = json.loads(file.read_text())
    origin = data["manifest"]["origin"]
    origin["layout"] = {**origin["layout"], **layout}
    file.write_text(json.dumps(data))


@pytest.mark.parametrize(
    ("layout", "words"),
    [({"family": 1}, "origin.layout.family"), ({"from": {}}, "missing origin.layout.from.system")],
    ids=str,
)
def test_a_layout_of_another_form_is_damage(layout, words, narrowed):
    forged(narrowed[1], **layout)
    found = roundtrip(narrowed)
    assert not found.ok
    assert words in found.failed[0].reason


@pytest.mark.parametrize(
    ("layout", "kind", "words"),
    [
        ({"family": "x"}, UsageError, "family 'x' was declared in a family file"),
        ({"to": {"system": "x"}}, UsageError, "family llama has no layouts for x"),
        ({"from": {"system": "huggingface", "x": "1"}}, UsageError, "unknown option 'x'"),
        ({"dtype": "int8"}, UnrepresentableError, "cannot cast from float32 to int8"),
        ({"dtype": "x"}, UnsupportedError, "numpy cannot represent dtype 'x'"),
    ],
    ids=str,
)
def test_a_layout_that_nobody_writes_is_refused(layout, kind, words, narrowed):
    forged(narrowed[1], **layout)
    with pytest.raises(kind, match=words):
        roundtrip(narrowed)


@pytest.mark.parametrize("dtype", ["int8", "bool", "int4", "uint64"])
def test_parameters_are_not_cast_to_integers(dtype, narrowed, tmp_path):
    with pytest.raises(UnrepresentableError, match=f"from float32 to {dtype}: it needs floating point"):
        wherry.convert(narrowed[0], tmp_path / "a", to="huggingface", layout=LayoutRequest(dtype=dtype))
