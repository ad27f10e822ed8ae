"""Long waits for a store are written to the log of the flow run."""

from __future__ import annotations

import logging

import pytest

pytest.importorskip("prefect")

from wherry.remote import waits
from wherry.tasks.ending import ending

LINE = "gs://bucket/key has not answered for 12 s; attempt 2 of 6"


def test_a_wait_is_in_the_log_of_the_run(caplog):
    caplog.set_level(logging.WARNING)
    with ending("convert-checkpoint", "Conversion", only_failures=True):
        waits._tell(LINE)
    assert [
        (record.name, record.getMessage()) for record in caplog.records if LINE in record.getMessage()
    ] == [("wherry", LINE)]
