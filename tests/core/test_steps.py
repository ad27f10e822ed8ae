"""Steps beyond 64 bits: no name states one, no manifest holds one, and nothing is written that cannot be recorded."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

import wherry
from wherry.core.detection import Detection
from wherry.core.manifest import Manifest
from wherry.core.request import TargetRequest, convert_request
from wherry.core.steps import LARGEST_STEP, step_number
from wherry.errors import CorruptError, UsageError
from wherry.ledger.record import check_chain, open_ledger


@pytest.mark.parametrize("prefix", ["", "checkpoint-", "global_step", "any_"])
@pytest.mark.parametrize("digits", [19, 200])
def test_a_name_of_too_many_digits_is_no_step(prefix, digits):
    assert step_number(f"{prefix}{'9' * 18}", any_prefix=True) == 10**18 - 1
    assert step_number(f"{prefix}{'9' * digits}", any_prefix=True) is None


@pytest.mark.parametrize(
    "step", [LARGEST_STEP + 1, -LARGEST_STEP - 1, 10**5000], ids=["over", "under", "long"]
)
def test_what_a_file_states_is_refused(step):
    with pytest.raises(CorruptError, match="beyond 64 bits"):
        Manifest({}, step=step)
    with pytest.raises(CorruptError, match="beyond 64 bits"):
        Detection("/a", "dcp", step=step)


@pytest.mark.parametrize("step", [-1, LARGEST_STEP + 1, 10**5000], ids=["under", "over", "long"])
def test_a_step_to_write_is_checked_before_anything_is_read(step):
    with pytest.raises(UsageError, match="invalid step number"):
        convert_request("s", [TargetRequest("t", "dcp")], as_step=step)


@pytest.fixture
def folder(tmp_path):
    def make(name):
        path = tmp_path / name
        path.mkdir()
        save_file({"w": np.ones((2, 2), np.float32)}, path / "model.safetensors")
        return path

    return make


@pytest.mark.parametrize("name", [f"checkpoint-{'9' * 200}", "9" * 200, f"iter_{'9' * 19}"])
def test_a_conversion_from_such_a_folder_is_recorded(folder, tmp_path, name):
    receipt = wherry.convert(folder(name), tmp_path / "out", to="orbax")
    assert (receipt.source.step, receipt.lineage) == (None, "recorded")
    with open_ledger() as ledger:
        assert check_chain(ledger).altered is None


def test_a_step_in_a_file_that_no_ledger_records_leaves_nothing(folder, tmp_path):
    source = folder("model")
    (source / "trainer_state.json").write_text(json.dumps({"global_step": 10**30}))
    with pytest.raises(CorruptError, match="beyond 64 bits"):
        wherry.convert(source, tmp_path / "out", to="orbax")
    assert not (tmp_path / "out").exists()
