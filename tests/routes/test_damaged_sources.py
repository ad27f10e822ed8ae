"""A night with a damaged source: it succeeds, and says so everywhere that anybody looks."""

from __future__ import annotations

import json
import os
import shutil
import time

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.support.command import typed
from tests.support.webhook import webhook_server

CONFIG = """
[routes.r]
root = "runs"
min_age = {min_age}
select = "{select}"

[[routes.r.targets]]
format = "npz"
uri = "out/{{run}}-{{step}}.npz"
"""


def _truncated(place):
    data = (place / "model.safetensors").read_bytes()
    (place / "model.safetensors").write_bytes(data[:-4])


def _empty(place):
    (place / "model.safetensors").write_bytes(b"")


def _zeros(place):
    data = (place / "model.safetensors").read_bytes()
    (place / "model.safetensors").write_bytes(bytes(64) + data[64:])


def _cut_header(place):
    (place / "model.safetensors").write_bytes((place / "model.safetensors").read_bytes()[:20])


def _missing_shard(place):
    (place / "model.safetensors").rename(place / "model-00001-of-00002.safetensors")
    where = {"w": "model-00001-of-00002.safetensors", "v": "model-00002-of-00002.safetensors"}
    index = {"metadata": {"total_size": 256}, "weight_map": where}
    (place / "model.safetensors.index.json").write_text(json.dumps(index))


def _junk_sidecar(place):
    (place / "wherry.json").write_text("{")


KINDS = (_truncated, _empty, _zeros, _cut_header, _missing_shard, _junk_sidecar)


@pytest.fixture
def night(tmp_path, monkeypatch):
    """A function that runs `wherry nightly`, and gives its exit code and what it prints."""
    (tmp_path / "wherry.toml").write_text(CONFIG.format(min_age=0, select="all"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WHERRY_METRICS", str(tmp_path / "wherry.prom"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with webhook_server("/hooks/T0KEN") as webhook:
        monkeypatch.setenv("WHERRY_NOTIFY_WEBHOOK", webhook.url)
        yield webhook


def _checkpoint(folder, run):
    place = folder / "runs" / run / "checkpoint-1"
    place.mkdir(parents=True)
    save_file({"w": np.ones((8, 4), np.float32)}, place / "model.safetensors")
    return place


@pytest.mark.parametrize("select", ["all", "latest"])
@pytest.mark.parametrize("damage", KINDS)
def test_each_kind_of_damage_reaches_the_log_the_webhook_and_prometheus(
    damage, select, night, tmp_path, capfd, caplog
):
    (tmp_path / "wherry.toml").write_text(CONFIG.format(min_age=0, select=select))
    _checkpoint(tmp_path, "good")
    bad = _checkpoint(tmp_path, "bad")
    damage(bad)
    code, printed = typed("nightly", tmp_path, capfd)
    assert code == 0, printed
    [logged] = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    assert logged.startswith(f"1 converted, 1 damaged: {bad}: ")
    [(_path, body)] = night.got
    assert f"warning: {logged}" in body["text"]
    assert body["wherry"]["counts"] == {"converted": 1, "damaged": 1}
    metrics = (tmp_path / "wherry.prom").read_text()
    assert 'wherry_unconverted{route="r"} 1\n' in metrics
    assert 'wherry_last_run_count{flow="nightly-convert",outcome="damaged"} 1\n' in metrics
    assert 'wherry_oldest_unconverted_age_seconds{route="r"} 0\n' not in metrics


@pytest.mark.parametrize("select", ["all", "latest"])
def test_a_checkpoint_that_is_being_written_is_no_damage(select, night, tmp_path, capfd):
    """A copy in progress looks cut off: it counts as damaged when nothing has changed for `min_age`."""
    (tmp_path / "wherry.toml").write_text(CONFIG.format(min_age='"15m"', select=select))
    bad = _checkpoint(tmp_path, "bad")
    _truncated(bad)
    assert typed("nightly", tmp_path, capfd)[0] == 0
    assert night.got == []
    earlier = time.time() - 3600
    for path in (bad / "model.safetensors", bad):
        os.utime(path, (earlier, earlier))
    assert typed("nightly", tmp_path, capfd)[0] == 0
    assert [body["wherry"]["counts"] for _path, body in night.got] == [{"damaged": 1}]


def test_a_damaged_newest_step_is_reported_although_an_earlier_one_is_converted(night, tmp_path, capfd):
    (tmp_path / "wherry.toml").write_text(CONFIG.format(min_age=0, select="latest"))
    place = _checkpoint(tmp_path, "run")
    newest = place.with_name("checkpoint-2")
    shutil.copytree(place, newest)
    _truncated(newest)
    code, printed = typed("nightly", tmp_path, capfd)
    assert (code, (tmp_path / "out" / "run-1.npz").exists()) == (0, True), printed
    [(_path, body)] = night.got
    assert f"warning: 1 converted, 1 damaged: {newest}: " in body["text"]


def test_a_night_without_damage_says_nothing_more(night, tmp_path, capfd):
    _checkpoint(tmp_path, "good")
    code, printed = typed("nightly", tmp_path, capfd)
    assert (code, "warning" in printed, night.got) == (0, False, [])
    assert 'wherry_unconverted{route="r"} 0\n' in (tmp_path / "wherry.prom").read_text()


def test_an_event_that_no_route_takes_is_announced_when_it_is_sent(night, tmp_path, capfd, monkeypatch):
    elsewhere = _checkpoint(tmp_path / "others", "a")
    with webhook_server("/api/events") as prefect:
        monkeypatch.setenv("PREFECT_API_URL", prefect.url.removesuffix("/events"))
        code, printed = typed(f"emit {elsewhere}", tmp_path, capfd)
        assert code == 0, printed
        assert (
            "warning: the event will not convert HOME/others/runs/a/checkpoint-1: no route takes it: r: "
            in printed
        )
        cure = printed.partition("note: `")[2].partition("`")[0]
        code, explanation = typed(cure.removeprefix("wherry "), tmp_path, capfd)
        assert code == 0
        assert "it is not below" in explanation
        wanted = _checkpoint(tmp_path, "b")
        code, printed = typed(f"emit {wanted}", tmp_path, capfd)
    assert (code, "warning" in printed) == (0, False)
