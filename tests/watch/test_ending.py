"""How a workflow ends: which notices are sent, what the metrics note, and that neither ever fails it."""

from __future__ import annotations

import pytest

from wherry.config.config import in_force
from wherry.config.file import config_file
from wherry.config.settings import configured_value
from wherry.errors import CorruptError
from wherry.watch import ending as module
from wherry.watch.ending import blame, ending
from wherry.watch.metrics import measure


@pytest.fixture
def notices(monkeypatch):
    sent = []
    monkeypatch.setattr(module, "send", lambda _, notice, page=None: sent.append((notice, page)) or "sent")
    return sent


def noted():
    return {(one.name, dict(one.labels).get("outcome")): one.value for one in measure([])}


def test_a_good_end(notices):
    with ending("promote", "Promotion", page="https://ui.example/1") as end:
        end.counts = {"promoted": 1}
    [(notice, page)] = notices
    assert (notice.title, notice.counts, notice.first_error) == ("Promotion", {"promoted": 1}, None)
    assert page == "https://ui.example/1"
    assert noted()["wherry_last_run_ok", None] == 1
    assert noted()["wherry_last_run_count", "promoted"] == 1


def test_an_error_is_reported_noted_and_goes_on(notices):
    with pytest.raises(CorruptError), ending("promote", "Promotion", only_failures=True):
        raise CorruptError("torn", uri="/a", path="w", cure="copy it again")
    [(notice, _page)] = notices
    assert (notice.first_error, notice.cure, notice.counts) == ("/a: w: torn", "copy it again", {"failed": 1})
    assert noted()["wherry_last_run_ok", None] == 0


def test_a_bug_is_reported_and_what_the_block_said_stays(notices):
    with pytest.raises(ZeroDivisionError), ending("audit", "Audit") as end:
        end.first_error, end.counts = "said before", {"errors": 2}
        raise ZeroDivisionError("by zero")
    assert notices[0][0].first_error == "said before"
    with ending("audit", "Audit") as end:
        blame(end, ZeroDivisionError("by zero"))
    assert notices[1][0].first_error == "ZeroDivisionError: by zero"
    assert notices[1][0].cure == "see the log of the run"


def test_nothing_is_reported_of_what_was_not_done_or_is_not_over(notices):
    with ending("nightly-convert", "Night") as end:
        end.silent = True
    with pytest.raises(KeyboardInterrupt), ending("nightly-convert", "Night"):
        raise KeyboardInterrupt
    with ending("convert-checkpoint", "Conversion", only_failures=True):
        pass
    assert notices == []
    assert noted()["wherry_last_run_ok", None] == 1, "only the conversion ended"


def test_what_cannot_be_noted_does_not_fail_it(notices, monkeypatch, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("WHERRY_LEDGER", f"sqlite:///{tmp_path / 'file' / 'ledger.db'}")
    with ending("promote", "Promotion"):
        pass
    assert notices
    assert "the end of the run was not recorded for the metrics" in caplog.text


def test_a_configuration_in_force(tmp_path, monkeypatch):
    file = tmp_path / "some.toml"
    file.write_text('memory = "1MiB"\n[env.prod]\nmemory = "2MiB"\n')
    monkeypatch.setenv("WHERRY_ENV", "prod")
    with in_force(file) as loaded:
        assert loaded.settings.memory == configured_value("memory") == "2MiB"
    assert config_file() is None
    monkeypatch.delenv("WHERRY_ENV")
    with pytest.raises(CorruptError), in_force(file, "prod"):
        assert configured_value("memory") == "2MiB"
        raise CorruptError("it ends badly")
    with in_force(None) as loaded:
        assert loaded.file is None
