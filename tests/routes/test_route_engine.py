"""`on` in a route: which carrier makes the targets of a night, and of the flow."""

from __future__ import annotations

import pytest

import wherry
from tests.support.routes import checkpoint
from wherry.core.request import SourceRequest
from wherry.errors import UsageError
from wherry.routes import night as nights
from wherry.routes.routes import RouteTarget, load_config, spec_of
from wherry.storage.stores import locate
from wherry.workers import engines

TARGET = '[[routes.r.targets]]\nformat = "hf"\nuri = "out/{run}-{step}"\n'


def config(folder, more, targets=1):
    text = f'[routes.r]\nroot = "runs"\nmin_age = 0\n{more}\n' + TARGET * targets
    (folder / "wherry.toml").write_text(text)
    return load_config(folder / "wherry.toml")


def test_a_night_has_its_targets_made_by_the_engine_of_the_route(tmp_path, monkeypatch):
    checkpoint(tmp_path, "a", 1)
    started = []
    real = engines.child.child_process
    monkeypatch.setattr(
        engines.child, "child_process", lambda *words, **how: started.append(words) or real(*words, **how)
    )
    read = config(tmp_path, 'on = "processes:1"\nunit = "1MiB"')
    assert dict(nights.run_night(read, read.routes).counts) == {"converted": 1}
    assert [words[1][0] for words in started] == ["work"]
    assert wherry.verify(tmp_path / "out" / "a-1", level="digest").ok
    assert not locate(str(tmp_path / "out" / ".wherry-a-1.job")).exists()


def test_the_flow_of_a_route_gets_its_engine(tmp_path):
    [route] = config(tmp_path, 'on = "dask://scheduler:8786"\nunit = "2GiB"').routes
    source = wherry.detect(checkpoint(tmp_path, "a", 1)).uri
    target = RouteTarget(route.targets[0], "out", "out", "out", None, "")
    spec = spec_of(route, SourceRequest(source), [target], "1GiB")
    assert (spec["on"], spec["unit"]) == ("dask://scheduler:8786", "2GiB")


@pytest.mark.parametrize("engine", ["horses", "processes:0", "dask://", "threads:2", "processes://here"])
def test_an_engine_that_is_unknown_is_refused_when_the_file_is_read(tmp_path, engine):
    with pytest.raises(UsageError, match="engine"):
        config(tmp_path, f'on = "{engine}"')


def test_several_targets_need_threads(tmp_path):
    with pytest.raises(UsageError, match="an engine writes only one target at a time"):
        config(tmp_path, 'on = "processes:2"', targets=2)
    assert config(tmp_path, "", targets=2).routes[0].on == "threads"
