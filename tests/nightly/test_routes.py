"""Routes: what they select, explain and refuse."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path

import pytest
from click.testing import CliRunner

import wherry
from tests.support.command import typed
from tests.support.routes import checkpoint
from wherry.cli import cli
from wherry.core.detection import Detection
from wherry.core.request import SourceRequest
from wherry.errors import NotFoundError, StorageError, UnsupportedError, UsageError
from wherry.nightly import night as nights
from wherry.nightly.check import check
from wherry.nightly.conversion import conversion_for
from wherry.nightly.night import holding, run_night
from wherry.nightly.report import markdown
from wherry.nightly.routes import RouteTarget, Whereabouts, chosen_routes, explain, load_config, whereabouts
from wherry.store.local_store import limits_of, locate, store_of
from wherry.store.sidecar import read_sidecar
from wherry.workers import engines

EXAMPLE = Path(__file__).resolve().parents[2] / "infra" / "wherry.toml"
BODY = """
[routes.{name}]
root = "runs"
select = "all"
min_age = 0
{fields}

[[routes.{name}.targets]]
format = "{format}"
uri = "{uri}"
{more}
"""


def config(folder, name="r", format="safetensors", uri="out/{run}/{step}.safetensors", fields="", more=""):
    text = BODY.format(name=name, format=format, uri=uri, fields=fields, more=more)
    (folder / "wherry.toml").write_text(text)
    return load_config(folder / "wherry.toml")


@pytest.mark.parametrize(
    ("uri", "step", "run", "name"),
    [
        ("/runs/a/100/default", 100, "a", "a/100/default"),
        ("/runs/team/a/checkpoints/0000000100", 100, "team/a", "team/a/checkpoints/0000000100"),
        ("/runs/a/checkpoint_100", 100, "a", "a/checkpoint_100"),
        ("/runs/final", None, "final", "final"),
        ("/runs/100", 100, "runs", "100"),
        ("gs://runs/a/100", 100, None, None),
        ("/runsaway/a/100", 100, None, None),
    ],
)
def test_run_and_name(uri, step, run, name, monkeypatch):
    from wherry.store import remote_store

    monkeypatch.setattr(
        remote_store, "remote_store", lambda protocol: type("Store", (), {"protocol": protocol})()
    )
    found = whereabouts("/runs", Detection(uri=uri, format="orbax", step=step))
    assert (found and found.run, found and found.name) == (run, name)


def test_stores():
    assert [store_of(uri) for uri in ("/a", "file:///a", "gs://b/c", "s3://b", "gcs://b/c")] == [
        "file", "file", "gs-b", "s3-b", "gs-b",
    ]  # fmt: skip
    assert limits_of(["/a", "/b", "gs://b/c"], {"file", "gs-other"}) == ["file"]


def test_the_example_is_good():
    for env in ([], ["--env", "prod"]):
        done = CliRunner().invoke(cli, ["routes", "check", "--config", str(EXAMPLE), "--json", *env])
        problems = [one for one in json.loads(done.output)["problems"] if not one["where"].endswith(".root")]
        assert problems == []
        assert done.exit_code == 0
    commented = [line.removeprefix("# ") for line in EXAMPLE.read_text().splitlines() if " = " in line]
    assert any(line.startswith("allow_opaque =") for line in commented)


def problems(loaded):
    return {(one.severity, one.where) for one in check(loaded)}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"format": "safetensor"}, ("error", "routes.r.targets[0].format")),
        ({"format": "torch-legacy"}, ("error", "routes.r.targets[0].format")),
        ({"more": "options = { ropes = 'half' }"}, ("error", "routes.r.targets[0].options")),
        ({"more": "family = 'lama'"}, ("error", "routes.r.targets[0].family")),
        ({"more": "assets = 'nowhere'"}, ("error", "routes.r.targets[0].assets")),
        ({"more": "into = true"}, ("error", "routes.r.targets[0].into")),
        ({"fields": "allow_opaque = ['*']"}, ("error", "routes.r")),
        ({"fields": "formats = ['t5']\nsign = 'no.pem'"}, ("error", "routes.r.sign")),
        ({"uri": "out/{step}"}, ("warning", "routes.r.targets[0].uri")),
        ({"uri": "out/{run}"}, ("warning", "routes.r.targets[0].uri")),
        ({"fields": "alias = 'c'"}, ("warning", "routes.r.targets[0].model")),
    ],
)
def test_check_finds(tmp_path, fields, expected):
    (tmp_path / "runs").mkdir()
    found = problems(config(tmp_path, **fields))
    assert expected in found
    good = config(tmp_path)
    assert problems(good) == set()


def test_two_routes_with_one_place(tmp_path):
    (tmp_path / "runs").mkdir()
    one, two = (BODY.format(name=name, format="npz", uri="o/{name}", fields="", more="") for name in "ab")
    (tmp_path / "wherry.toml").write_text(one + two)
    assert problems(load_config(tmp_path / "wherry.toml")) == {("warning", "routes.b")}


def test_explain(tmp_path):
    place = checkpoint(tmp_path, "team/a", 7)
    (row,) = explain(str(place), config(tmp_path, fields='model = "{run}"'))
    assert (row.takes, row.where.run, row.where.step) == (True, "team/a", 7)
    assert row.targets[0].place == str(tmp_path / "out" / "team" / "a" / "7.safetensors")
    assert row.targets[0].model == "team-a"
    (row,) = explain(str(place), config(tmp_path, fields='runs = ["b"]'))
    assert not row.takes
    assert "matches none of b" in row.reason
    shown = CliRunner().invoke(
        cli, ["routes", "explain", str(place), "--config", str(tmp_path / "wherry.toml")]
    )
    assert "does not take it" in shown.output


def test_into_a_run_names_what_is_committed(tmp_path):
    place = checkpoint(tmp_path, "a", 7)
    (row,) = explain(str(place), config(tmp_path, format="orbax", uri="out/{run}", more="into = true"))
    (one,) = row.targets
    assert one.place.startswith(f"{one.uri}/")
    assert one.place.startswith(one.committed)
    assert Path(one.committed).parent == Path(one.uri)


def test_chosen_routes(tmp_path):
    loaded = config(tmp_path)
    assert [route.name for route in chosen_routes(loaded, ["r"])] == ["r"]
    with pytest.raises(NotFoundError, match="unknown route 'x'"):
        chosen_routes(loaded, ["x"])
    (tmp_path / "wherry.toml").write_text("")
    with pytest.raises(NotFoundError, match="no routes"):
        chosen_routes(load_config(tmp_path / "wherry.toml"))


def test_a_night_without_prefect(tmp_path):
    for step in (1, 2):
        checkpoint(tmp_path, "a", step)
    more = '[[routes.r.targets]]\nformat = "orbax"\nuri = "out/{run}"\ninto = true'
    loaded = config(tmp_path, fields='level = "digest"', more=more)
    report = run_night(loaded, loaded.routes)
    assert dict(report.counts) == {"converted": 2}, report.to_json()
    again = run_night(loaded, loaded.routes)
    assert dict(again.counts) == {"done": 4}
    (tmp_path / "out" / "a" / "1.safetensors").unlink()
    assert dict(run_night(loaded, loaded.routes).counts) == {"converted": 1, "done": 3}
    with holding(loaded.routes[0]):
        assert run_night(loaded, loaded.routes).skipped == ("r",)
    line = ["nightly", "--config", str(tmp_path / "wherry.toml"), "--dry-run", "--json"]
    done = CliRunner().invoke(cli, line)
    assert json.loads(done.output)["counts"] == {"done": 4}


@pytest.mark.parametrize("verify", ["digest", "none"])
def test_a_route_states_how_its_targets_are_read_back(tmp_path, verify):
    source = checkpoint(tmp_path, "a", 1)
    loaded = config(tmp_path, fields=f'verify = "{verify}"')
    assert dict(run_night(loaded, loaded.routes).counts) == {"converted": 1}
    sidecar = read_sidecar(locate(str(tmp_path / "out" / "a" / "1.safetensors")))
    assert (sidecar.receipt.verification is not None) == (verify == "digest")
    [found] = explain(str(source), loaded)
    requested = SourceRequest(str(source))
    conversion = conversion_for(loaded.routes[0], requested, found.where, found.targets, "64MiB", None)
    assert conversion.request.verify == verify


def test_what_was_made_is_no_source(tmp_path):
    checkpoint(tmp_path, "a", 1)
    loaded = config(tmp_path, uri="runs/{run}/made/{step}.safetensors")
    assert dict(run_night(loaded, loaded.routes).counts) == {"converted": 1}
    assert dict(run_night(loaded, loaded.routes).counts) == {"done": 1, "ours": 1}


def test_a_failing_night_ends_with_the_first_error(tmp_path):
    checkpoint(tmp_path, "a<b>|c", 1)
    config(tmp_path)
    (tmp_path / "out" / "a<b>|c").mkdir(parents=True)
    (tmp_path / "out" / "a<b>|c" / "1.safetensors").write_text("somebody's")
    done = CliRunner().invoke(cli, ["nightly", "--config", str(tmp_path / "wherry.toml")])
    assert not any(mark in done.output for mark in ("|--", "##", "**")), (
        "a terminal shows tables, not Markdown"
    )
    assert all(word in done.output for word in ("waiting", "tonight"))
    assert done.exit_code == 8
    assert "cure: choose another target" in done.output
    assert "a<b>|c" in done.output
    loaded = load_config(tmp_path / "wherry.toml")
    page = markdown(run_night(loaded, loaded.routes))
    assert "it failed before with the same files and options" in page
    assert "a&lt;b>\\|c" in page, "names break neither the table nor the page"


def test_a_family_and_a_dtype_reach_the_conversion(tmp_path):
    checkpoint(tmp_path, "a", 1)
    loaded = config(tmp_path, more='family = "nobody"')
    report = run_night(loaded, loaded.routes)
    assert report.counts["failed"] == 1
    assert "nobody" in report.failures[0][1].what


def test_config_show(tmp_path, monkeypatch):
    config(tmp_path)
    monkeypatch.setenv("WHERRY_NOTIFY_WEBHOOK", "https://hooks.example/secret")
    done = CliRunner().invoke(cli, ["config", "show", "--config", str(tmp_path / "wherry.toml")])
    assert "environment variable WHERRY_NOTIFY_WEBHOOK" in done.output
    assert "secret" not in done.output


def test_policies_and_keys_are_checked_too(tmp_path):
    from wherry.config.config import in_force, named_policy
    from wherry.models.policy import policy_of
    from wherry.nightly.check import check

    (tmp_path / "wherry.toml").write_text(
        '[policy.good]\nlevel = "digest"\n[policy.typo]\noptimiser = "absent"\n'
        '[policy.key]\nsignature = "keys/release.pub"\n[audit]\nkey = "keys/release.pub"\n'
    )
    problems = {one.where: one for one in check(load_config(tmp_path / "wherry.toml"))}
    assert set(problems) == {"policy.typo", "policy.key.signature", "audit.key"}
    assert "optimiser" in problems["policy.typo"].what
    assert "max_age_days" in problems["policy.typo"].cure
    assert str(tmp_path / "keys" / "release.pub") in problems["audit.key"].what
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys" / "release.pub").write_text("a key")
    assert {one.where for one in check(load_config(tmp_path / "wherry.toml"))} == {"policy.typo"}
    with in_force(tmp_path / "wherry.toml"):
        assert policy_of(named_policy("key")).signature == str(tmp_path / "keys" / "release.pub")
        with pytest.raises(NotFoundError, match=r"unknown policy 'absent': missing table \[policy.absent\]"):
            named_policy("absent")


def test_route_names_are_words(tmp_path):
    with pytest.raises(UsageError, match="name"):
        config(tmp_path, name='"../up"')


def test_a_route_states_what_the_files_do_not_tell(tmp_path, corpus):
    """Family, forms, dtype and the run's own step folders, from one read of a Lingua checkpoint."""
    root = corpus / "lingua-noshard-w2" / "checkpoint"
    more = """family = "llama"
into = true
options = { scan_layers = true }

[[routes.r.targets]]
format = "huggingface"
uri = "out/{run}/{step}/hf"
family = "llama"
dtype = "bfloat16"
only = "params"
"""
    config(tmp_path, format="maxtext", uri="out/{run}", more=more, fields='level = "structure"')
    loaded = load_config(tmp_path / "wherry.toml")
    route = loaded.routes[0].model_copy(update={"root": str(root)})
    report = run_night(loaded, [route])
    assert dict(report.counts) == {"converted": 1}, report.failures
    import wherry

    scanned, plain = report.outcomes[0].targets
    with wherry.open(plain) as opened:
        assert {spec.dtype for spec in opened.manifest.tensors.values()} == {"bfloat16"}
    assert wherry.detect(scanned).format == "maxtext"
    assert dict(run_night(loaded, [route]).counts) == {"done": 2}


# What a route does with one stated checkpoint: `latest` and `since` as a night would decide them.


CONFIG = """
[routes.r]
root = "runs"
select = "{select}"
min_age = {min_age}

[[routes.r.targets]]
format = "safetensors"
uri = "out/{{run}}/{{name}}.safetensors"
"""


def row_of(folder, place, select="latest", min_age=0):
    (folder / "wherry.toml").write_text(CONFIG.format(select=select, min_age=min_age))
    (row,) = explain(str(place), load_config(folder / "wherry.toml"))
    return row


def test_latest_leaves_a_step_that_a_newer_one_has_overtaken(tmp_path):
    older, newer = checkpoint(tmp_path, "team/a", 9), checkpoint(tmp_path, "team/a", 10)
    checkpoint(tmp_path, "team/b", 99)
    row = row_of(tmp_path, older)
    assert (row.takes, row.reason) == (False, "step 10 of this run is newer and complete")
    row = row_of(tmp_path, newer)
    assert (row.takes, row.reason, row.source) == (True, "select = latest", str(newer))
    assert row_of(tmp_path, tmp_path / "runs" / "team" / "a").source == str(newer)
    assert row_of(tmp_path, older, "all").takes
    assert row_of(tmp_path, older, min_age=900).takes, "nothing says yet that the newer one is complete"
    file = newer / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    assert row_of(tmp_path, older).takes, "the newer one is damaged"


def test_latest_of_steps_between_run_and_folder(tmp_path):
    older = checkpoint(tmp_path, "a/checkpoints", 1)
    assert row_of(tmp_path, older).takes
    checkpoint(tmp_path, "a/checkpoints", 2)
    row = row_of(tmp_path, older)
    assert (row.takes, row.where.run) == (False, "a")


def test_latest_of_steps_that_are_files(tmp_path):
    from wherry import convert

    for step in (1, 2):
        convert(
            checkpoint(tmp_path / "from", "x", step), tmp_path / "runs" / "a" / f"checkpoint_{step}",
            to="flax-msgpack", lineage=False,
        )  # fmt: skip
    first, second = (row_of(tmp_path, tmp_path / "runs" / "a" / f"checkpoint_{step}") for step in (1, 2))
    assert (first.takes, second.takes) == (False, True)


def test_latest_and_no_step(tmp_path):
    place = checkpoint(tmp_path, "a", 1)
    checkpoint(tmp_path, "a", 2)
    final = place.rename(place.parent / "final")
    assert row_of(tmp_path, final).takes


def test_since_leaves_what_is_older(tmp_path):
    place = checkpoint(tmp_path, "a", 1)
    written = datetime(2026, 3, 1, 12, tzinfo=UTC).timestamp()
    for file in place.iterdir():
        os.utime(file, (written, written))
    row = row_of(tmp_path, place, "since 2026-03-02")
    assert (row.takes, row.reason) == (False, "it was written before 2026-03-02T00:00:00+00:00")
    assert row_of(tmp_path, place, "since 2026-03-01").takes


@pytest.mark.parametrize(
    ("select", "module", "name", "error"),
    [
        ("latest", "wherry.formats.discover", "walk", StorageError("it does not answer", retryable=True)),
        (
            "since 2026-03-02",
            "wherry.store.location",
            "modified_time",
            UnsupportedError("the storage does not report modification times"),
        ),
    ],
)
def test_what_cannot_be_determined_is_taken(tmp_path, monkeypatch, select, module, name, error):
    def refuse(*_args, **_named):
        raise error

    place = checkpoint(tmp_path, "a", 1)
    monkeypatch.setattr(import_module(module), name, refuse)
    row = row_of(tmp_path, place, select)
    assert row.takes
    assert f"cannot be determined: {error.what}" in row.reason


# `wherry routes check`: every mistake of a configuration in one pass, each with its place and its cure.


TEN = """\
ledgr = "x"
memory = "128 megs"
[mlflow]
tracking_url = "http://127.0.0.1:5061"
[routes.t5x]
root = "~/runs"
selct = "latest"
select = "newest"
[[routes.t5x.target]]
format = "hugingface"
[[routes.t5x.targets]]
format = "hugingface"
uri = "models/{run}/{stp}"
famly = "t5"
family = "t6"
only = "weights"
[routes.t5x.retention]
keep_lst = 3
"""
# line → what is wrong, and the cure.
EXPECTED = {
    1: ("ledgr: unknown field", "did you mean ledger?"),
    2: ("memory: invalid size", "write for example 128MiB"),
    4: ("mlflow.tracking_url: unknown field", "did you mean tracking_uri?"),
    7: ("routes.t5x.selct: unknown field", "did you mean select?"),
    8: ("routes.t5x.select: invalid selection 'newest'", "latest"),
    9: ("routes.t5x.target: unknown field", "did you mean targets"),
    12: ("routes.t5x.targets[0].format: unknown format 'hugingface'", "did you mean huggingface"),
    13: ("routes.t5x.targets[0].uri: unknown field {stp}", "{step}"),
    14: ("routes.t5x.targets[0].famly: unknown field", "did you mean family"),
    15: ("routes.t5x.targets[0].family: unknown family 't6'", "t5"),
    16: ("routes.t5x.targets[0].only: Input should be 'params'", "write 'params'"),
    18: ("routes.t5x.retention.keep_lst: unknown field", "did you mean keep_last"),
}
ROUTE = """
[routes.a]
root = "runs"
model = "m"
alias = "candidate"

[[routes.a.targets]]
format = "npz"
uri = "out/{run}-{step}.npz"

[[routes.a.targets]]
format = "orbax"
uri = "out/{run}-{step}"
"""


def test_ten_mistakes_are_ten_lines_in_the_order_of_the_file(tmp_path, capfd):
    (tmp_path / "bad.toml").write_text(TEN)
    code, printed = typed("routes check --config HOME/bad.toml", tmp_path, capfd)
    assert code == 2
    lines = printed.splitlines()
    assert [int(line.split(":")[1]) for line in lines] == sorted(EXPECTED)
    for line, (what, cure) in zip(lines, EXPECTED.values(), strict=True):
        assert line.startswith("HOME/bad.toml:")
        assert what in line
        assert cure in line.partition("; ")[2]
    code, printed = typed("routes check --json --config HOME/bad.toml", tmp_path, capfd)
    assert (code, len(json.loads(printed)["problems"])) == (2, len(EXPECTED))


def test_two_targets_of_one_model_are_named_with_a_cure(tmp_path, capfd):
    file = tmp_path / "wherry.toml"
    file.write_text(ROUTE)
    (tmp_path / "runs").mkdir()
    code, printed = typed("routes check --config HOME/wherry.toml", tmp_path, capfd)
    assert code == 0
    assert "warning: routes.a.targets[1].model" in printed
    assert "the alias candidate ends on the version that is registered last" in printed
    cure = printed.rpartition("for example ")[2].splitlines()[0]
    assert cure == 'model = "m-orbax"'
    file.write_text(f"{ROUTE}{cure}\n")
    assert "warning" not in typed("routes check --config HOME/wherry.toml", tmp_path, capfd)[1]


# `on` in a route: which carrier makes the targets of a night, and of the flow.


TARGET = '[[routes.r.targets]]\nformat = "hf"\nuri = "out/{run}-{step}"\n'


def config_of_engine(folder, more, targets=1):
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
    read = config_of_engine(tmp_path, 'on = "processes:1"\nunit = "1MiB"')
    assert dict(nights.run_night(read, read.routes).counts) == {"converted": 1}
    assert [words[1][0] for words in started] == ["work"]
    assert wherry.verify(tmp_path / "out" / "a-1", level="digest").ok
    assert not locate(str(tmp_path / "out" / ".wherry-a-1.job")).exists()


def test_the_flow_of_a_route_gets_its_engine(tmp_path):
    [route] = config_of_engine(tmp_path, 'on = "dask://scheduler:8786"\nunit = "2GiB"').routes
    source = wherry.detect(checkpoint(tmp_path, "a", 1)).uri
    target = RouteTarget(route.targets[0], "out", "out", "out", None, "")
    conversion = conversion_for(
        route, SourceRequest(source), Whereabouts("a", 1, "a/1"), [target], "1GiB", None
    )
    assert (conversion.on, conversion.unit) == ("dask://scheduler:8786", "2GiB")


@pytest.mark.parametrize("engine", ["horses", "processes:0", "dask://", "threads:2", "processes://here"])
def test_an_engine_that_is_unknown_is_refused_when_the_file_is_read(tmp_path, engine):
    with pytest.raises(UsageError, match="engine"):
        config_of_engine(tmp_path, f'on = "{engine}"')


def test_several_targets_need_threads(tmp_path):
    with pytest.raises(UsageError, match="an engine writes only one target at a time"):
        config_of_engine(tmp_path, 'on = "processes:2"', targets=2)
    assert config_of_engine(tmp_path, "", targets=2).routes[0].on == "threads"
