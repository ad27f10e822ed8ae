"""`wherry init`: from a folder of checkpoints to a checked configuration and the plan of its first night."""

from __future__ import annotations

import json
import os
import tomllib

import pytest
from click.testing import CliRunner

from tests.support.tiny_models import save_tiny
from wherry.cli import cli
from wherry.config.config import load_config
from wherry.config.package_data import package_path
from wherry.errors import TargetExistsError, UsageError
from wherry.nightly.check import check
from wherry.nightly.first import FirstRoute, first_config, write_config


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A working folder with one old checkpoint in `runs`."""
    save_tiny(tmp_path / "runs" / "small" / "1000", "llama")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return tmp_path


def run(*words, answers=None):
    return CliRunner().invoke(cli, words, input=answers)


def only_route(place):
    (route,) = load_config(place / "wherry.toml").routes
    return route


def test_options_write_a_configuration_that_works_and_nothing_is_converted(place):
    done = run("init", "--root", "runs", "--target", "out", "--to", "hf", "--registry", "none", "--yes")
    assert done.exit_code == 0, done.output
    route = only_route(place)
    assert (route.root, route.model) == (str(place / "runs"), None)
    assert [(one.format, one.uri) for one in route.targets] == [("huggingface", f"{place}/out/{{name}}")]
    assert "runs/small/1000" in done.output
    assert "next: run `wherry nightly` when the checkpoints are settled, or set min_age = 0 in" in done.output
    assert sorted(path.name for path in place.iterdir()) == ["runs", "wherry.toml"]
    assert run("routes", "check").exit_code == 0
    (place / "wherry.toml").write_text((place / "wherry.toml").read_text().replace('"15m"', '"0s"'))
    night = run("nightly")
    assert (night.exit_code, (place / "out/small/1000/config.json").exists()) == (0, True), night.output


def test_the_last_line_says_what_to_do_now(place):
    again = run("init", "--root", "nothing", "--yes")
    assert (
        "next: correct the root, or save a checkpoint below it; then `wherry nightly --dry-run`"
        in again.output
    )
    for file in (place / "runs").rglob("*"):
        os.utime(file, (1, 1))
    settled = run("init", "--root", "runs", "--yes", "--config", "w.toml")
    assert f"next: `wherry nightly --config {place}/w.toml` converts now; `wherry deploy`" in settled.output


def test_init_prompts_for_what_no_option_gives(place):
    done = run("init", "--to", "orbax", answers="runs\n\nhttps://mlflow.example\n")
    assert done.exit_code == 0, done.output
    for question in ("with the checkpoints", "[converted]", "[embedded]"):
        assert question in done.stderr
    assert "format" not in done.stderr
    loaded = load_config(place / "wherry.toml")
    assert loaded.settings.mlflow.tracking_uri == "https://mlflow.example"
    assert (only_route(place).model, only_route(place).alias) == ("{run}", "candidate")


def test_an_existing_file_stays_unless_it_is_forced(place):
    (place / "wherry.toml").write_text("# by hand\n")
    refused = run("init", "--root", "runs", "--yes")
    assert isinstance(refused.exception, TargetExistsError)
    assert "--force" in refused.exception.for_shell()
    assert (place / "wherry.toml").read_text() == "# by hand\n"
    assert run("init", "--root", "runs", "--yes", "--force").exit_code == 0
    assert "by hand" not in (place / "wherry.toml").read_text()


def test_a_file_that_appears_meanwhile_is_not_overwritten(tmp_path):
    write_config(tmp_path / "wherry.toml", "first")
    with pytest.raises(TargetExistsError):
        write_config(tmp_path / "wherry.toml", "second")
    assert (tmp_path / "wherry.toml").read_text() == "first"


@pytest.mark.parametrize(
    ("words", "says"),
    [(["--yes"], "missing option '--root'"),
     (["--root", "runs", "--to", "jax", "--yes"], "unknown format 'jax'"),
     (["--root", "runs", "--registry", "elsewhere", "--yes"], "invalid registry 'elsewhere'"),
     (["--root", "runs", "--target", "runs/", "--yes"], "the same folder"),
     (["--root", "runs", "--target", "a{b}", "--yes"], "braces")],
)  # fmt: skip
def test_what_cannot_work_is_refused_before_anything_is_written(words, says, place):
    refused = run("init", *words)
    assert isinstance(refused.exception, UsageError)
    assert says in str(refused.exception)
    assert not (place / "wherry.toml").exists()


def test_json_has_the_problems_and_the_plan(place):
    done = run("init", "--root", "nothing", "--json")
    found = json.loads(done.stdout)
    assert (done.exit_code, [one["severity"] for one in found["problems"]]) == (0, ["warning"])
    assert [plan["route"] for plan in found["night"]["plans"]] == ["all"]


@pytest.mark.parametrize("odd", ['a"b', "a\\b", "käse", "a\tb", "a\x7fb", "a#b", "a'''b", "\U0001f40b"])
@pytest.mark.parametrize("registry", ["embedded", "none", "https://mlflow.example"])
def test_any_name_comes_back_from_the_file(odd, registry, tmp_path):
    text = first_config(FirstRoute(f"/runs/{odd}", f"/out/{odd}", registry=registry))
    route = tomllib.loads(text)["routes"]["all"]
    assert (route["root"], route["targets"][0]["uri"]) == (f"/runs/{odd}", f"/out/{odd}/{{name}}")
    assert "{{" not in text


def test_the_commented_examples_of_the_file_are_valid(tmp_path):
    text = first_config(FirstRoute("/runs", "/out"))
    settings = [
        line.removeprefix("# ")
        for line in text.splitlines()
        if " = " in line or line.startswith(("# [", "["))
    ]
    (tmp_path / "wherry.toml").write_text("\n".join(settings))
    assert len(settings) > 12
    found = [one for one in check(load_config(tmp_path / "wherry.toml")) if one.severity == "error"]
    assert found == []


def test_the_example_of_all_settings_is_printed(place):
    assert run("config", "example").output == package_path("wherry.toml").read_text()
