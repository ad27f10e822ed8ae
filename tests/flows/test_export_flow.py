"""The post-training export: routes for one checkpoint, targets that are named, one failure among several."""

from __future__ import annotations

import json
import shutil
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

import wherry
from wherry.converter.plan import plan_targets
from wherry.core.request import ConvertRequest, SourceRequest
from wherry.errors import HostileError, MismatchError, NotFoundError, UnrepresentableError
from wherry.formats.checkpoint import open_source
from wherry.formats.detect import detect_source
from wherry.ledger.record import open_ledger
from wherry.ledger.statements import statements
from wherry.nightly.conversion import Conversion, note_made
from wherry.nightly.ending import ending
from wherry.nightly.night import plan_night
from wherry.nightly.prune import prune
from wherry.nightly.routes import load_config

pytest.importorskip("prefect")

from wherry.flows import export as flow
from wherry.flows.convert import ConvertSpec
from wherry.flows.export import ExportSpec
from wherry.tasks.steps import route_targets, verify

TOML = """
[routes.main]
root = "{root}/runs"
select = "latest"
model = "llama-{{run}}"
alias = "candidate"
level = "digest"

[[routes.main.targets]]
format = "safetensors"
uri = "{root}/out/{{run}}-{{step}}.safetensors"
options = {{ join = "." }}

[[routes.main.targets]]
format = "orbax"
uri = "{root}/out/{{run}}-{{step}}-orbax"
only = "params"

[routes.nightly]
root = "{root}/runs"
select = "best(loss)"

[[routes.nightly.targets]]
format = "orbax"
uri = "{root}/best/{{run}}"

[routes.elsewhere]
root = "{root}/others"

[[routes.elsewhere.targets]]
format = "orbax"
uri = "{root}/others-out/{{run}}"
"""


@pytest.fixture
def source(tmp_path):
    state = {"params": {"w": np.arange(6, dtype=np.float32)}, "step": np.int32(9)}
    handle = wherry.export(state, tmp_path / "runs" / "r1" / "9", to="orbax", step=9)
    return handle.result(60).target.uri


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "wherry.toml"
    path.write_text(TOML.format(root=tmp_path))
    return str(path)


def keep_the_best(config):
    text = Path(config).read_text()
    Path(config).write_text(f'{text}[routes.main.retention]\nkeep_best = 1\nmetric = "loss"\n')


def noted_in_ledger():
    with open_ledger() as ledger:
        return [one.body for one in statements(ledger, kinds={"note"}) if one.body["about"] == "route"]


@pytest.fixture
def plain(monkeypatch):
    """The flow's own logic without a server: tasks are called as functions, conversions are noted."""
    noted = []

    def chain(conversion):
        noted.append(conversion)
        if conversion.request.targets[0].uri.endswith("never"):
            raise UnrepresentableError("cannot be held")
        note_made(conversion.notes)
        return {"detection": {}, "receipt": {}, "further": []}

    monkeypatch.setattr(flow, "ending", ending)
    monkeypatch.setattr(flow, "chain", chain)
    monkeypatch.setattr(flow, "route_targets", route_targets.fn)
    monkeypatch.setattr(flow, "summary", lambda _done: [{"what": "target", "value": "x"}])
    monkeypatch.setattr(flow, "show_table", lambda table, *_: noted.append(table))
    return noted


def test_what_the_routes_say(source, config, tmp_path):
    rows = {row["route"]: row for row in route_targets.fn(source, (), config)}
    assert rows["main"]["takes"]
    conversion = Conversion.from_json(json.loads(json.dumps(rows["main"]["conversion"])))
    first, *further = conversion.request.targets
    assert (conversion.request.source.uri, first.to, first.options) == (source, "safetensors", {"join": "."})
    assert conversion.request.source.below == str(tmp_path / "runs")
    assert first.uri == str(tmp_path / "out" / "r1-9.safetensors")
    assert (conversion.models[0], conversion.alias, conversion.level) == ("llama-r1", "candidate", "digest")
    assert [(one.to, one.only) for one in further] == [("orbax", "params")]
    assert not rows["nightly"]["takes"]
    assert "nightly" in rows["nightly"]["reason"]
    assert not rows["elsewhere"]["takes"]
    assert [row["route"] for row in route_targets.fn(source, ("main",), config)] == ["main"]
    with pytest.raises(NotFoundError, match="unknown route"):
        route_targets.fn(source, ("absent",), config)


def test_the_flow_carries_out_what_takes_it(source, config, plain):
    done = flow.export.fn(ExportSpec(source=source, config=config, alias="chosen"))
    assert [row["route"] for row in done["routes"]] == ["main", "nightly", "elsewhere"]
    assert len(done["conversions"]) == 1
    assert plain[0].alias == "chosen"
    assert plain[-1][0] == {"what": "route main", "value": done["routes"][0]["reason"]}


def test_what_was_made_is_noted_for_its_route(source, config, plain, tmp_path):
    (tmp_path / "runs" / "r1" / "9" / "metrics").mkdir()
    (tmp_path / "runs" / "r1" / "9" / "metrics" / "metrics").write_text('{"loss": 1.5}')
    keep_the_best(config)
    flow.export.fn(ExportSpec(source=str(tmp_path / "runs" / "r1"), config=config))
    notes = noted_in_ledger()
    assert {(one["route"], one["source"], one["run"], one["step"], one["score"]) for one in notes} == {
        ("main", source, "r1", 9, 1.5)
    }
    assert [one["target"] for one in notes] == [one.uri for one in plain[0].request.targets]
    assert plain[0].request.source.uri == source, (
        "the step that the names are of, whichever the run gets meanwhile"
    )


def test_what_was_not_made_is_not_noted(source, tmp_path, plain):
    file = tmp_path / "wherry.toml"
    file.write_text(TOML.format(root=tmp_path).replace("-{step}.safetensors", "-never"))
    with pytest.raises(UnrepresentableError):
        flow.export.fn(ExportSpec(source=source, config=str(file), routes=("main",)))
    assert noted_in_ledger() == []


def test_a_score_that_cannot_be_read_is_not_known(source, config, tmp_path):
    (tmp_path / "runs" / "r1" / "9" / "metrics.json").write_text("[" * 100_000)
    keep_the_best(config)
    (row,) = route_targets.fn(source, ("main",), config)
    assert [one["score"] for one in row["conversion"]["notes"]] == [None, None]


def test_no_credentials_of_the_registry_are_kept(source, config, plain, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://user:secret@mlflow.example")
    monkeypatch.setenv("MLFLOW_REGISTRY_URI", "https://user:hidden@mlflow.example")
    text = json.dumps(route_targets.fn(source, (), config))
    assert "secret" not in text
    assert "hidden" not in text
    done = flow.export.fn(ExportSpec(source=source, config=config))
    assert plain[0].tracking_uri == "https://user:secret@mlflow.example"
    assert plain[0].registry_uri == "https://user:hidden@mlflow.example"
    assert "secret" not in json.dumps(done)


def test_a_step_that_a_newer_one_has_overtaken_is_left(source, config, plain, tmp_path):
    wherry.export({"w": np.ones(2, np.float32)}, tmp_path / "runs" / "r1" / "10", to="orbax", step=10).result(
        60
    )
    done = flow.export.fn(ExportSpec(source=source, config=config, routes=("main",)))
    assert done["conversions"] == []
    assert "step 10 of this run is newer and complete" in done["routes"][0]["reason"]


def test_nobody_takes_it_is_no_failure_but_never_plain_green(source, config, plain, monkeypatch, caplog):
    notices = []
    monkeypatch.setattr(
        "wherry.nightly.ending.send", lambda _, notice, page=None: notices.append(notice) or "sent"
    )
    state = flow.export.fn(ExportSpec(source=source, config=config, routes=("elsewhere",)))
    assert state.is_completed()
    assert (
        f"0 converted, 1 unrouted: {source}: no route takes it: elsewhere: it is not below" in state.message
    )
    assert state.message in caplog.text
    assert notices[0].warning == state.message
    assert state.data["conversions"] == []


def test_a_step_that_the_night_compares_is_no_reason_to_warn(source, config, plain):
    done = flow.export.fn(ExportSpec(source=source, config=config, routes=("nightly",)))
    assert "the nightly run compares" in done["routes"][0]["reason"]


def test_named_targets_take_the_place_of_routes(source, plain, tmp_path):
    targets = [{"target": str(tmp_path / "a"), "to": "orbax"}, {"target": str(tmp_path / "b"), "to": "npz"}]
    flow.export.fn(ExportSpec(source=source, targets=targets))
    assert [one.to for one in plain[0].request.targets] == ["orbax", "npz"]


def test_a_failure_is_reported_after_the_others_were_made(source, config, plain, tmp_path):
    never = [{"target": str(tmp_path / "never"), "to": "orbax"}]
    with pytest.raises(UnrepresentableError):
        flow.export.fn(ExportSpec(source=source, targets=never))
    assert plain[-1][-1]["what"] == "failed"


@pytest.mark.server
def test_on_a_server_it_converts_tells_and_is_noted(server, source, tmp_path, monkeypatch):
    from wherry.nightly import ending as telling
    from wherry.nightly.metrics import measure

    notices = []
    monkeypatch.setattr(telling, "send", lambda _, notice, page: notices.append((notice, page)))
    file = tmp_path / "wherry.toml"
    text = TOML.format(root=tmp_path).replace('model = "llama-{run}"', "")
    file.write_text(f'[metrics]\nfile = "{tmp_path}/wherry.prom"\n{text}')
    state = flow.export(ExportSpec(source=source, config=str(file)), return_state=True)
    assert state.is_completed(), state.message
    made = {one.uri for one in prune(load_config(file).routes).checkpoints if one.route == "main"}
    assert made == {str(tmp_path / "out" / "r1-9.safetensors"), str(tmp_path / "out" / "r1-9-orbax")}
    night, *_others = plan_night(load_config(file).routes)
    assert [one.why for one in night.todo.passed] == ["done", "done"]
    file.write_text(file.read_text().replace('only = "params"', ""))
    night, *_others = plan_night(load_config(file).routes)
    assert sorted(one.why for one in night.todo.passed) == ["done", "stale"]
    [done] = state.result()["conversions"]
    assert [one["verification"]["ok"] for one in (done, *done["further"])] == [True, True]
    assert (tmp_path / "out" / "r1-9.safetensors").is_file()
    [(notice, page)] = notices
    assert (notice.first_error, dict(notice.counts)) == (None, {"converted": 1, "failed": 0, "left": 2})
    assert str(state.state_details.flow_run_id) in page
    assert 'wherry_last_run_ok{flow="post-training-export"} 1' in (tmp_path / "wherry.prom").read_text()
    assert any(one.name == "wherry_last_run_ok" and one.value == 1 for one in measure([]))


def test_a_registration_that_fails_hides_nothing_else(monkeypatch):
    def refused(*_, **__):
        raise NotFoundError("no digests are recorded for it")

    monkeypatch.setattr(import_module("wherry.flows.export"), "verify", refused)
    failures = []
    spec = ExportSpec(source="s", register_source="m")
    assert import_module("wherry.flows.export")._register_source(spec, failures) is None
    assert [one.what for one in failures] == ["no digests are recorded for it"]


def outside_of_routes(source, tmp_path):
    """A checkpoint that no route has, and a link to it from the root of a route."""
    hidden = tmp_path / "private" / "run"
    shutil.copytree(source, hidden)
    (tmp_path / "runs" / "link").symlink_to(hidden)
    return str(hidden), str(tmp_path / "runs" / "link")


def test_a_source_that_no_route_has_is_not_converted_to_explicit_targets(source, config, plain, tmp_path):
    hidden, link = outside_of_routes(source, tmp_path)
    targets = [{"target": str(tmp_path / "a"), "to": "orbax"}]
    with pytest.raises(HostileError, match="no route reads or writes"):
        flow.export.fn(ExportSpec(source=hidden, targets=targets, config=config))
    assert plain == []
    flow.export.fn(ExportSpec(source=link, targets=targets, config=config))
    assert plain[0].request.source.below == str(tmp_path / "runs"), "below the root of the route"
    with pytest.raises(HostileError, match="symbolic link points outside"):
        open_source(plain[0].request.source)


def test_a_source_that_no_route_has_is_not_registered(source, config, plain, tmp_path, monkeypatch):
    named = []
    monkeypatch.setattr(flow, "verify", verify.fn)
    monkeypatch.setattr(flow, "register", lambda *place, **_more: named.append(place))
    monkeypatch.setattr("wherry.tasks.steps.progress_artifact", lambda *_what: None)
    hidden, link = outside_of_routes(source, tmp_path)
    wherry.inspect(hidden, write=True)
    for uri in (hidden, link):
        with pytest.raises((HostileError, MismatchError), match=r"no route reads or writes|outside"):
            flow.export.fn(ExportSpec(source=uri, register_source="m", config=config))
    assert named == []
    flow.export.fn(ExportSpec(source=source, register_source="m", config=config))
    assert named == [(source, "m", None)]


def test_a_run_that_becomes_a_link_after_detection_is_not_converted(source, tmp_path, monkeypatch):
    hidden, _link = outside_of_routes(source, tmp_path)
    requests = []

    def detected(**request):
        found = detect_source(SourceRequest(**request)).to_json()
        Path(source).rename(tmp_path / "away")
        Path(source).symlink_to(hidden)
        return found

    def planned(request):
        requests.append(ConvertRequest.from_json(request))
        return plan_targets(requests[-1])

    converting = import_module("wherry.flows.convert")
    monkeypatch.setattr(converting, "detect", detected)
    monkeypatch.setattr(converting, "plan", planned)
    spec = ConvertSpec(source=source, target=str(tmp_path / "a"), to="npz", below=str(tmp_path / "runs"))
    with pytest.raises(HostileError, match="symbolic link points outside"):
        converting.chain(spec.conversion)
    assert requests[0].source.below == str(tmp_path / "runs")
