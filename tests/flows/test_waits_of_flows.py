"""Long waits for a store are written to the log of the flow run."""

from __future__ import annotations

import logging

import pytest

pytest.importorskip("prefect")

from wherry.core.progress import Progress
from wherry.store import waits
from wherry.tasks import common
from wherry.tasks.ending import ending

LINE = "gs://bucket/key has not answered for 12 s; attempt 2 of 6"


def test_a_wait_is_in_the_log_of_the_run(caplog):
    caplog.set_level(logging.WARNING)
    with ending("convert-checkpoint", "Conversion", only_failures=True):
        waits._tell(LINE)
    assert [
        (record.name, record.getMessage()) for record in caplog.records if LINE in record.getMessage()
    ] == [("wherry", LINE)]


@pytest.mark.parametrize(
    ("name", "show"),
    [
        ("common.create_table_artifact", lambda: common.show_table([{"what": "a"}], "k", "d")),
        ("common.create_link_artifact", lambda: common.show_link("http://127.0.0.1/", "a", "k", "d")),
        ("common.create_markdown_artifact", lambda: common.show_markdown("# a", "k", "d")),
        (
            "common.create_progress_artifact",
            lambda: common.progress_artifact("convert", "a")(Progress("read", 1, 1, 1.0, None, None)),
        ),
    ],
    ids=["table", "link", "page", "progress"],
)
def test_a_server_that_is_away_is_waited_for_and_fails_no_run(name, show, monkeypatch, caplog):
    """A new client does not try again where it cannot connect."""
    awaited = []
    monkeypatch.setattr(common, "answering_server", lambda: awaited.append(1))

    def refuse(*_positional, **_named):
        raise OSError("All connection attempts failed")

    monkeypatch.setattr(f"wherry.tasks.{name}", refuse)
    show()
    assert awaited == [1]
    [line] = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert line.startswith("could not show the ")
    assert line.endswith("in Prefect: All connection attempts failed")
