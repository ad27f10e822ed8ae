"""Equinox files of many records: read in linear time, within limits, whatever their headers look like."""

from __future__ import annotations

import ast
import io
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import wherry
from wherry.errors import CorruptError, HostileError
from wherry.integrations.containers.npz.npy import _plain_literal, build_header, read_header

EMPTY = build_header("float32", (0,))


def header_of(text):
    """A record of version 1.0 with any text as its header."""
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


def test_more_records_than_the_limit_are_refused_in_time(tmp_path):
    file = tmp_path / "m.eqx"
    file.write_bytes(EMPTY * 130_000)
    began = time.process_time()
    with pytest.raises(HostileError, match="limit of 120,000 records"):
        wherry.open(file)
    assert time.process_time() - began < 5


def test_more_unusual_headers_than_the_limit_are_refused_in_time(tmp_path):
    file = tmp_path / "m.eqx"
    file.write_bytes(header_of(b"{'shape': (0,), 'descr': '<f4', 'fortran_order': False}\n") * 11_000)
    began = time.process_time()
    with pytest.raises(HostileError, match="limit of 10,000 unusual headers"):
        wherry.open(file)
    assert time.process_time() - began < 5


def test_records_longer_and_shorter_than_the_window_are_read(tmp_path):
    arrays = [np.arange(size, dtype="i4") for size in (0, 1, 16_300, 16_400, 40_000, 3, 70_000, 5)]
    data = io.BytesIO()
    for one in arrays:
        np.save(data, one)
    (tmp_path / "m.eqx").write_bytes(data.getvalue())
    with wherry.open(tmp_path / "m.eqx") as found:
        assert len(found.manifest.tensors) == len(arrays)
        for number, one in enumerate(arrays):
            np.testing.assert_array_equal(found.read((str(number),)), one)
    (tmp_path / "m.eqx").write_bytes(data.getvalue()[:-1])
    with pytest.raises(CorruptError, match="record 7 is truncated"):
        wherry.open(tmp_path / "m.eqx")


@given(
    descr=st.sampled_from(["<f4", "|b1", "<V2", ">i8"]),
    shape=st.lists(st.integers(0, 2**63 - 1), max_size=5).map(tuple),
    fortran=st.booleans(),
)
def test_headers_of_numpy_are_plain(descr, shape, fortran):
    said = {"descr": descr, "fortran_order": fortran, "shape": shape}
    text = "{" + "".join(f"'{key}': {value!r}, " for key, value in said.items()) + "}"
    assert _plain_literal(f"{text}   \n") == said == ast.literal_eval(text)
    data = io.BytesIO()
    np.lib.format.write_array_header_1_0(data, said)
    held = data.getvalue()
    assert read_header(lambda start, stop: held[start:stop], "it", "it").plain


@given(
    st.lists(
        st.sampled_from(
            ["{", "}", "'descr': ", "'<f4'", ", ", "'fortran_order': ", "True", "False", "'shape': ", "(", ")", "3",
             "07", "00", "0", ",", " ", "4,", "(3, )", "(3)", "(3,4)", "-1", "\n", "'\\x41'"]
        ),
        max_size=20,
    )
)  # fmt: skip
def test_a_plain_header_is_what_python_reads(parts):
    for text in (
        "".join(parts),
        "{'descr': '<f4', 'fortran_order': False, 'shape': (" + "".join(parts) + "), }",
    ):
        found = _plain_literal(text)
        assert found is None or found == ast.literal_eval(text.strip())
