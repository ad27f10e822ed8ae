"""A checkpoint without tensors as DCP: one file that holds no archive."""

from __future__ import annotations

import pytest
from safetensors.numpy import save_file

import wherry
from wherry.core.request import TargetRequest, convert_request
from wherry.workers.commit import commit
from wherry.workers.job import split
from wherry.workers.work import work


@pytest.fixture
def empty(tmp_path):
    save_file({}, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def test_it_is_streamed_to_a_bucket(empty, tmp_path):
    target = f"memory://bucket{tmp_path}/out"
    wherry.convert(empty, target, to="dcp", lineage=False)
    assert wherry.verify(target, level="digest").ok


def test_it_can_be_split(empty, tmp_path):
    request = convert_request(str(empty), [TargetRequest(str(tmp_path / "out"), "dcp")], lineage=False)
    assert len(split(request, 1 << 20).units) == 1
    work(str(tmp_path / "out"))
    commit(str(tmp_path / "out"))
    assert wherry.verify(tmp_path / "out", level="digest").ok
