"""The tests of this room work where temporary files usually lie, also when `infra/test` has the others in memory."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from wherry.store import device


def test_the_folder_of_a_test_is_where_temporary_files_lie(tmp_path):
    assert tmp_path.stat().st_dev == Path(tempfile.gettempdir()).stat().st_dev


def test_the_rates_of_a_device_leave_nothing(tmp_path):
    rates = device.device_rates(tmp_path)
    assert list(tmp_path.iterdir()) == []
    if rates is None:
        pytest.skip("this file system has no direct I/O or no files without a name")
    assert rates.write > 0 < rates.read
    both = device.DeviceRates(write=4.0, read=2.0)
    assert (both.seconds(8, 0), both.seconds(8, 8)) == (2, 6)


def test_a_folder_that_takes_no_file_has_no_rates(tmp_path):
    assert device.device_rates(tmp_path / "absent") is None
    assert device.device_rates(Path("/proc")) is None
