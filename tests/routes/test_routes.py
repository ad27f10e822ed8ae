"""Routes: runs, steps and places; what `wherry routes check` finds; the shipped example; a night without Prefect."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.support.routes import checkpoint
from wherry.cli import cli
from wherry.core.detection import Detection
from wherry.core.request import SourceRequest
from wherry.errors import NotFoundError, UsageError
from wherry.flows.convert_spec import ConvertSpec
from wherry.routes.check import check
from wherry.routes.night import holding, run_night
from wherry.routes.report import markdown
from wherry.routes.routes import chosen_routes, explain, load_config, spec_of, whereabouts
from wherry.storage.sidecar import read_sidecar
from wherry.storage.stores import limits_of, locate, store_of

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
    spec = spec_of(loaded.routes[0], SourceRequest(str(source)), found.targets, "64MiB")
    assert ConvertSpec(**spec).request.verify == verify


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
    from wherry.routes.check import check

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
