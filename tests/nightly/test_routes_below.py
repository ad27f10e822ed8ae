"""What a route reads lies below its root, and what it makes below the fixed part of its template."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial

import pytest
from click.testing import CliRunner

from tests.support.command import small
from tests.support.noting_server import noting_server
from wherry.cli import cli
from wherry.errors import HostileError
from wherry.formats.checkpoint import open_source
from wherry.ledger.resolve import detect
from wherry.nightly.routes import explain, load_config
from wherry.nightly.scores import score
from wherry.store.sidecar import read_sidecar

ROUTE = """
[routes.{name}]
root = "{root}/runs"
select = "all"
min_age = 0

[[routes.{name}.targets]]
format = "torch-zip"
uri = "{uri}"
"""

pytestmark = pytest.mark.usefixtures("own_home")


def config(folder, uri):
    (folder / "runs").mkdir(exist_ok=True)
    (folder / "wherry.toml").write_text(ROUTE.format(name="r", root=folder, uri=uri))
    return load_config(folder / "wherry.toml")


def checkpoint(folder):
    folder.mkdir(parents=True)
    small(folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("scheme", ["file://", ""])
def test_the_name_of_a_run_does_not_leave_the_folder_of_the_targets(tmp_path, scheme):
    config(tmp_path, f"{scheme}{tmp_path}/models/deep/{{run}}/w.pt")
    checkpoint(tmp_path / "runs" / "x%2f..%2f..%2f..%2fvictim")
    (tmp_path / "victim").mkdir()
    done = CliRunner().invoke(cli, ["nightly", "--config", str(tmp_path / "wherry.toml"), "--go"])
    assert done.exit_code == 0, done.output
    assert not list((tmp_path / "victim").iterdir())
    assert (tmp_path / "models" / "deep" / "x%2f..%2f..%2f..%2fvictim" / "w.pt").is_file()


def test_a_run_that_is_a_link_out_of_the_root_is_not_followed(tmp_path):
    read = config(tmp_path, f"{tmp_path}/models/{{run}}.pt")
    checkpoint(tmp_path / "elsewhere" / "run")
    (tmp_path / "runs" / "run").symlink_to(tmp_path / "elsewhere" / "run")
    [row] = explain(str(tmp_path / "runs" / "run"), read)
    assert not row.takes
    assert row.reason.startswith("symbolic link points outside")
    [row] = explain(f"{tmp_path}/runs/../elsewhere/run", read)
    assert not row.takes
    assert "not below" in row.reason
    words = ["routes", "explain", str(tmp_path / "runs" / "run"), "--config", str(tmp_path / "wherry.toml")]
    done = CliRunner().invoke(cli, words)
    assert done.exit_code == 0, done.output
    assert "symbolic link points outside" in " ".join(done.output.split())


def test_a_route_states_its_reason_although_the_link_is_refused_below_another_root(tmp_path):
    text = ROUTE.format(name="r", root=tmp_path, uri=f"{tmp_path}/models/{{run}}.pt")
    wide = text.replace("routes.r", "routes.wide").replace(
        f'root = "{tmp_path}/runs"', f'root = "{tmp_path}"'
    )
    (tmp_path / "runs").mkdir()
    (tmp_path / "wherry.toml").write_text(text + wide)
    checkpoint(tmp_path / "elsewhere" / "run")
    (tmp_path / "runs" / "run").symlink_to(tmp_path / "elsewhere" / "run")
    narrow, around = explain(str(tmp_path / "runs" / "run"), load_config(tmp_path / "wherry.toml"))
    assert narrow.reason.startswith("symbolic link points outside")
    assert around.takes, around.reason


def test_what_a_survey_reads_next_to_a_checkpoint_is_below_the_root(tmp_path):
    """Sidecars and scores are opened below the root too."""
    [route] = config(tmp_path, f"{tmp_path}/models/{{run}}.pt").routes
    run = checkpoint(tmp_path / "runs" / "run")
    outside = checkpoint(tmp_path / "elsewhere" / "run")
    (outside / "metrics.json").write_text('{"loss": 1}')
    (outside / "wherry.json").write_text("not a sidecar")
    run.rename(tmp_path / "away")
    run.symlink_to(outside)
    for read in (partial(score, metric="loss"), read_sidecar):
        with pytest.raises(HostileError, match="symbolic link points outside"):
            read(route.place(str(run)))
    with pytest.raises(HostileError, match="not below"):
        route.place(str(outside))


def test_filters_that_exclude_a_checkpoint_are_named(tmp_path):
    config(tmp_path, f"{tmp_path}/models/{{run}}.pt")
    file = tmp_path / "wherry.toml"
    file.write_text(file.read_text().replace("min_age = 0", 'min_age = 0\nruns = ["kept"]'))
    checkpoint(tmp_path / "runs" / "kept")
    checkpoint(tmp_path / "runs" / "other")
    words = ["nightly", "--config", str(file), "--go"]
    done = CliRunner().invoke(cli, words)
    assert done.exit_code == 0, done.output
    line = " ".join(done.output.split())
    assert "1 checkpoint excluded by `runs` or `formats` of every route" in line, done.output
    file.write_text(
        f"{file.read_text()}{ROUTE.format(name='s', root=tmp_path, uri=f'{tmp_path}/more/{{run}}.pt')}"
    )
    done = CliRunner().invoke(cli, words)
    assert done.exit_code == 0, done.output
    assert "excluded by" not in done.output, "the other route takes it"


def test_an_event_says_which_route_excludes_its_checkpoint(tmp_path, monkeypatch):
    config(tmp_path, f"{tmp_path}/models/{{run}}.pt")
    file = tmp_path / "wherry.toml"
    text = file.read_text().replace("min_age = 0", 'min_age = 0\nformats = ["orbax"]')
    file.write_text(text + ROUTE.format(name="s", root=tmp_path, uri=f"{tmp_path}/more/{{run}}.pt"))
    run = checkpoint(tmp_path / "runs" / "run")
    monkeypatch.setenv("WHERRY_CONFIG", str(file))
    monkeypatch.setattr("wherry.core.emit.post_event", lambda *_body, **_more: "1")
    done = CliRunner().invoke(cli, ["emit", str(run), "--api", "http://127.0.0.1:9/api"])
    assert done.exit_code == 0, done.output
    assert f"note: route r does not convert {run}: format" in " ".join(done.output.split()), done.output
    assert "route s" not in done.output


def test_a_run_that_becomes_a_link_after_the_survey_is_not_followed(tmp_path):
    read = config(tmp_path, f"{tmp_path}/models/{{run}}.pt")
    run = checkpoint(tmp_path / "runs" / "run")
    outside = checkpoint(tmp_path / "elsewhere" / "run")
    [row] = explain(str(run), read)
    run.rename(tmp_path / "away")
    run.symlink_to(outside)
    [route] = read.routes
    assert row.takes
    with pytest.raises(HostileError, match="symbolic link points outside"):
        open_source(replace(route.source(detect(tmp_path / "away")), uri=str(run)))


def test_the_uri_of_an_event_is_compared_with_the_roots_before_anything_is_opened(tmp_path):
    with noting_server() as (port, paths):
        uri = f"http://127.0.0.1:{port}/some/service/"
        [row] = explain(uri, config(tmp_path, f"{tmp_path}/out/{{run}}.pt"))
    assert not row.takes
    assert row.reason.startswith("it is not below")
    assert paths == []


def test_an_event_in_a_bucket_logs_in_to_no_store_where_no_route_has_a_root(tmp_path, monkeypatch):
    """Clients of clouds look for a login at the metadata server when they are made; found by `infra/attack`."""
    calls = []
    monkeypatch.setattr("socket.getaddrinfo", lambda *words, **_: calls.append(words))
    monkeypatch.setattr("socket.socket.connect", lambda _self, address: calls.append(address))
    read = config(tmp_path, f"{tmp_path}/out/{{run}}.pt")
    for uri in ("gs://bucket/run", "s3://bucket/run", "http://169.254.169.254/x"):
        [row] = explain(uri, read)
        assert (row.takes, row.reason) == (False, f"it is not below {tmp_path}/runs")
    assert calls == []


def test_a_run_whose_name_is_no_text_has_its_target_in_the_folder(tmp_path):
    config(tmp_path, f"file://{tmp_path}/models/{{run}}/w.pt")
    name = os.fsdecode(b"\xff\xfe")
    checkpoint(tmp_path / "runs" / name)
    done = CliRunner().invoke(cli, ["nightly", "--config", str(tmp_path / "wherry.toml"), "--go"])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "models" / name / "w.pt").is_file()
