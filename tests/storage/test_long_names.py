"""Names as long as a file system takes them: what wherry derives from them is not longer."""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import wherry
from tests.support.command import small
from wherry.routes.removal import removing
from wherry.storage.folders import short_name, staging_stem
from wherry.storage.sidecar import sidecar_name, signature_name
from wherry.target.clean import clean
from wherry.target.in_use import in_use, is_in_use

LONGEST = 255


@given(st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1))
def test_derived_names_fit_and_differ_as_their_names_do(text):
    name = (text * 255).encode()[:LONGEST].decode("utf-8", "ignore")
    assert len(os.fsencode(staging_stem(name))) + 40 <= LONGEST
    for derived in (sidecar_name, signature_name):
        assert len(os.fsencode(derived(name))) <= LONGEST
    assert short_name(f"{name[:-1]}") != short_name(name)


@pytest.mark.parametrize("count", [207, 208, 250, 255])
def test_a_checkpoint_with_a_long_name_is_written_verified_read_and_removed(tmp_path, count):
    source = small(tmp_path / "s.safetensors")
    folder = tmp_path / ("n" * count)
    wherry.convert(source, folder, to="dcp")
    file = tmp_path / ("f" * (count - 12) + ".safetensors")
    with in_use(str(folder)):
        assert is_in_use(str(folder))
        receipt = wherry.convert(folder, file, to="safetensors")
    assert wherry.verify(file, level="digest").verdict == "ok"
    assert wherry.convert(folder, file, to="safetensors").already
    assert receipt.lineage == "recorded"
    handle = wherry.export(
        {"w": np.ones(3, np.float32)}, tmp_path / ("e" * (count - 4) + ".npz"), to="npz", snapshot="disk"
    )
    assert handle.wait(60)
    assert {len(os.fsencode(path.name)) <= LONGEST for path in tmp_path.iterdir()} == {True}
    with removing(str(file), str(file), "safetensors"):
        assert not file.exists()
    assert clean(tmp_path) == []
    assert not (tmp_path / sidecar_name(file.name)).exists()


def test_what_a_killed_conversion_left_is_cleaned(tmp_path):
    name = "n" * 250
    area = tmp_path / f"{staging_stem(name)}.01234567-89abcdef"
    (area / name).mkdir(parents=True)
    assert [one.removed for one in clean(tmp_path, min_age=0)] == [True]
    assert not area.exists()
