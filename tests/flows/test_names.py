"""Names on pages of Prefect: steps, artifacts and assets."""

from __future__ import annotations

import inspect
import logging
import pkgutil
import string
import time
from importlib import import_module
from types import SimpleNamespace

import numpy as np
import pytest
from prefect import Task, flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from safetensors.numpy import save_file

import wherry.tasks
from wherry.core.receipt import CheckpointRef, Receipt
from wherry.errors import CorruptError
from wherry.flows.audit import AuditSpec
from wherry.flows.convert import ConvertSpec, convert_checkpoint
from wherry.flows.convert_spec import ConvertSpec as ConvertSpec_of_flows
from wherry.integrations.mlflow import figures
from wherry.nightly.report import NightTable, _markdown_table
from wherry.tasks import assets, common
from wherry.tasks.assets import asset_events, asset_key, asset_of
from wherry.tasks.ending import credentials_in, ending

HOSTILE = "a\nok: done\u202e\x1b[2J`|<b>s3://user:geheim@host/x"
OBEYED = set("\x1b\u202e")


@pytest.fixture
def made(monkeypatch):
    """What is sent to Prefect, as one list of texts."""
    texts = []

    def note(*values, **named):
        def collect(value):
            if isinstance(value, str):
                texts.append(value)
            elif isinstance(value, dict):
                list(map(collect, value.values()))
            elif isinstance(value, (list, tuple)):
                list(map(collect, value))

        collect([*values, *named.values()])

    for name in ("create_table_artifact", "create_link_artifact", "create_markdown_artifact"):
        monkeypatch.setattr(common, name, note)
    monkeypatch.setattr(common, "create_progress_artifact", note)
    return texts


@pytest.mark.parametrize(
    "show",
    [
        lambda: common.show_table([{"what": "source", "value": HOSTILE}], "k", HOSTILE),
        lambda: common.show_link("http://127.0.0.1/", HOSTILE, "k", HOSTILE),
        lambda: common.show_failure(CorruptError(HOSTILE, uri=HOSTILE, cure="restore it"), HOSTILE),
        lambda: common.progress_artifact("convert", HOSTILE),
    ],
    ids=["table", "link", "failure", "progress"],
)
def test_names_are_escaped_on_pages_of_prefect(made, show):
    show()
    said = "".join(made)
    assert r"a\nok: done\u202e\x1b[2J" in said
    assert not OBEYED & set(said)
    assert "\nok" not in said
    assert "geheim" not in said


def test_reports_keep_their_lines_and_lose_what_is_obeyed(made):
    common.show_markdown("# Report\n\n\x1b]0;x\x07 row", "k", "d")
    assert made[0] == "# Report\n\n" + r"\x1b]0;x\x07 row"


def test_a_cell_of_the_night_is_one_cell():
    (row,) = _markdown_table(NightTable("t", ("a",), ((HOSTILE,),)))[5:]
    assert row.count("\n") == 0
    assert r"\|" in row
    assert "<b>" not in row
    assert not OBEYED & set(row)


def test_a_name_makes_no_link_and_no_picture_on_the_page_of_the_night():
    (row,) = _markdown_table(NightTable("t", ("a",), (("![x](https://e.example/1.png) [y](z) `c",),)))[5:]
    assert r"\!\[x\](https" in row
    assert r" \[y\](z) \`c" in row


def test_a_name_does_not_leave_the_code_of_a_description():
    tags = {
        "wherry.format": "dcp", "wherry.format_version": "", "wherry.source_uri": f"/x```\n{HOSTILE}",
        "wherry.fetch": f"wherry fetch {HOSTILE}", "wherry.uri": HOSTILE, "wherry.load": f"load(\n'{HOSTILE}```')",
    }  # fmt: skip
    text = figures.description(tags)
    assert not OBEYED & set(text)
    assert text.count("```") == 4, "two blocks, which names do not end"
    assert text.replace("```", "").count("`") == 4, "two spans"


# On Prefect's pages each step says of which checkpoint it is, where hundreds of them stand below one
# night.


pytest.importorskip("prefect")


def tasks():
    """Every task, by the name of its function."""
    modules = [
        import_module(f"wherry.tasks.{one.name}") for one in pkgutil.iter_modules(wherry.tasks.__path__)
    ]
    return {
        task.fn.__name__: task for one in modules for task in vars(one).values() if isinstance(task, Task)
    }


def test_every_task_bears_the_name_of_what_it_works_on():
    assert len(tasks()) >= 11
    for task in tasks().values():
        assert isinstance(task.task_run_name, str), task.name
        fields = [
            name.split("[")[0] for _, name, _, _ in string.Formatter().parse(task.task_run_name) if name
        ]
        assert fields, task.name
        assert set(fields) <= set(inspect.signature(task.fn).parameters), task.name


@pytest.mark.server
def test_the_steps_of_a_conversion_on_a_server(server, tmp_path, monkeypatch):
    monkeypatch.setenv("WHERRY_HOME", str(tmp_path / "home"))
    source, target = tmp_path / "one.safetensors", tmp_path / "out"
    save_file({"a": np.arange(12, dtype=np.float32)}, source)
    state = convert_checkpoint(
        ConvertSpec(source=str(source), target=str(target), to="orbax"), return_state=True
    )
    with get_client(sync_client=True) as client:
        chosen = FlowRunFilter(id=FlowRunFilterId(any_=[state.state_details.flow_run_id]))
        names = {run.name for run in client.read_task_runs(flow_run_filter=chosen)}
    assert {f"detect {source}", f"plan {source}", f"convert {source}", f"lineage {target}"} <= names


# Prefect assets: keys that Prefect takes, and the events of a conversion on a real (temporary) server.


pytest.importorskip("prefect", reason="prefect is not installed")


DIGEST = "d" * 64


def receipt(source, target):
    ends = [
        CheckpointRef(uri, "orbax", None, DIGEST, "w" * 64, "f", "params", 7, 2) for uri in (source, target)
    ]
    return Receipt(*ends, plan_digest="p" * 64, seconds=1.0, bytes_written=4).to_json()


@pytest.mark.parametrize(
    ("uri", "key"),
    [
        ("/runs/a/7", "file:///runs/a/7"),
        ("GS://bucket/run/7", "gs://bucket/run/7"),
        ("live://host/run@9", "live://host/run@9"),
        ("s3://user:secret@bucket/a?token=secret", "s3://bucket/a"),
        ("/a b/{run}%/=[1]#?", "file:///a=20b/=7Brun=7D=25/=3D=5B1=5D=23=3F"),
        ("/naïve/模型", "file:///na=C3=AFve/=E6=A8=A1=E5=9E=8B"),
    ],
)
def test_keys_are_uris_that_prefect_takes(uri, key):
    assert asset_key(uri) == key
    assert asset_of({"uri": uri, "format": "orbax", "kind": "params", "tensors": 2}).key == key


def test_long_places_keep_keys_of_their_own():
    one, two = (asset_key(f"/{'folder/' * 100}{end}") for end in "ab")
    assert one != two
    assert len(one) <= 512
    asset_of({"uri": f"/{'folder/' * 100}a", "format": "orbax", "kind": "params", "tensors": 2})


def test_what_prefect_does_not_take_is_logged(monkeypatch, caplog):
    def refuse(*_, **__):
        raise ConnectionError("the server is gone")

    monkeypatch.setattr(assets, "add_asset_metadata", refuse)
    monkeypatch.setattr(assets, "materialize", lambda *_, **__: lambda function: function)
    with caplog.at_level(logging.WARNING, "wherry"):
        asset_events(receipt("/a", "/b"))
    assert "could not record the asset in Prefect: the server is gone" in caplog.text


@pytest.mark.server
def test_a_conversion_is_a_materialization_with_its_source(server, tmp_path):
    @flow(name="assets")
    def record():
        asset_events(receipt(str(tmp_path / "source"), str(tmp_path / "target")))

    record()
    event = _event("prefect.asset.materialization.succeeded", f"file://{tmp_path}/target")
    assert event["resource"]["prefect.resource.id"] == f"file://{tmp_path}/target"
    related = {row["prefect.resource.id"]: row["prefect.resource.role"] for row in event["related"]}
    assert related[f"file://{tmp_path}/source"] == "asset"
    assert related["wherry"] == "asset-materialized-by"
    assert event["payload"]["checkpoint_digest"] == DIGEST
    assert event["payload"]["lossless"] is True


def _event(name, resource):
    """The first event of that name about a resource; the server stores events a moment later."""
    wanted = {"event": {"name": [name]}, "resource": {"id": [resource]}}
    with get_client(sync_client=True) as client:
        for _ in range(100):
            answer = client._client.post("/events/filter", json={"filter": wanted})
            found = answer.json()["events"]
            if found:
                return found[0]
            time.sleep(0.2)
    raise AssertionError(f"no event {name} about {resource}")


# Credentials in the parameters of a run are named in its log, never shown: Prefect stored them before
# wherry ran.


pytest.importorskip("prefect")


SPEC = {"source": "s3://me:hunter2@store/runs", "target": "/out", "to": "orbax"}


@pytest.mark.parametrize(
    ("parameters", "names"),
    [
        (
            {"spec": ConvertSpec_of_flows(**SPEC, meta={"token": "hunter2", "note": "x"})},
            ["spec.source", "spec.meta.token"],
        ),
        ({"spec": {"roots": ["/a", "https://host/k?X-Amz-Signature=hunter2"]}}, ["spec.roots[1]"]),
        ({"spec": AuditSpec(key="/keys/release.pub", roots=("gs://bucket/a",), sample="10%")}, []),
        ({"spec": {"tags": {"tokens": "2e12", "team": "a"}}, "n": 3, "none": None}, []),
        ({"uri": "https://host/k?sig=hunter2&se=2026"}, ["uri"]),
    ],
)
def test_the_parameter_is_named(parameters, names):
    found = list(credentials_in(parameters))
    assert found == names
    assert "hunter2" not in str(found)


@pytest.mark.parametrize(("host", "said"), [("me:hunter2@store", True), ("store", False)])
def test_the_log_of_the_run_names_it_and_the_cure(caplog, monkeypatch, host, said):
    run = SimpleNamespace(parameters={"spec": {"source": f"s3://{host}/runs"}}, ui_url=None, id=None)
    monkeypatch.setattr("wherry.tasks.ending.flow_run", run)
    caplog.set_level(logging.WARNING)
    with ending("convert-checkpoint", "Conversion", only_failures=True):
        pass
    lines = [one.getMessage() for one in caplog.records if "contains a credential" in one.getMessage()]
    assert bool(lines) is said
    assert "hunter2" not in caplog.text
    if said:
        assert lines[0].startswith(
            "the parameter spec.source contains a credential, which Prefect has stored"
        )
        assert "environment of the worker" in lines[0]
