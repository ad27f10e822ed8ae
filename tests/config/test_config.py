"""wherry.toml: the schema, precedence and origins, hostile files, and errors that name file, line, field and cure."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from wherry.cli import cli
from wherry.config import settings
from wherry.config.config import load_config
from wherry.config.values import lines_of, moment, render, select
from wherry.core.units import duration
from wherry.errors import HostileError, NotFoundError, UsageError, WherryError
from wherry.store import home

ROUTE = '[routes.a]\nroot = "runs"\n[[routes.a.targets]]\nformat = "hf"\nuri = "out/{run}/{step}"\n'


@pytest.fixture
def toml(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(text):
        (tmp_path / "wherry.toml").write_text(text)
        return tmp_path / "wherry.toml"

    return write


def refusal(path):
    with pytest.raises(UsageError) as failure:
        load_config(path)
    return failure.value


def test_nothing_is_stated(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    config = load_config()
    assert (config.file, config.routes, config.settings.memory) == (None, (), "128MiB")
    assert set(config.origins.values()) == {"default"}
    assert settings.ledger_url() == f"sqlite:///{home.home() / 'ledger.db'}"


def test_precedence_and_origins(toml, monkeypatch):
    path = toml(
        'ledger = "sqlite:////file.db"\nmemory = "1GB"\n[mlflow]\ntracking_uri = "http://file"\n'
        '[env.prod]\nledger = "sqlite:////prod.db"\n[env.prod.mlflow]\nregistry_uri = "http://prod"\n' + ROUTE
    )
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    config = load_config()
    assert config.settings.ledger == settings.ledger_url() == "sqlite:////file.db"
    assert config.origins["ledger"] == f"{path}:1"
    assert config.origins["mlflow.tracking_uri"] == f"{path}:4"
    monkeypatch.setenv("WHERRY_ENV", "prod")
    assert settings.ledger_url() == "sqlite:////prod.db"
    assert settings.mlflow_tracking_uri() == "http://file"
    assert settings.mlflow_registry_uri() == "http://prod"
    assert load_config().origins["ledger"] == f"{path}:6 [env.prod]"
    monkeypatch.setenv("WHERRY_LEDGER", "sqlite:////variable.db")
    monkeypatch.setenv("WHERRY_SHARED_PATHS", "/mnt/a:/mnt/b")
    assert load_config().settings.ledger == settings.ledger_url() == "sqlite:////variable.db"
    assert load_config().origins["ledger"] == "environment variable WHERRY_LEDGER"
    assert load_config().settings.shared_paths == ("/mnt/a", "/mnt/b")
    assert load_config(env="prod").env == "prod"
    with pytest.raises(NotFoundError, match=r"\[env\.dev\]") as failure:
        load_config(env="dev")
    assert "prod" in failure.value.cure


def test_where_it_is_found(toml, tmp_path, monkeypatch):
    toml('memory = "1GB"\n')
    other = tmp_path / "other.toml"
    other.write_text('memory = "2GB"\n')
    (home.ensure_home() / "wherry.toml").write_text('memory = "3GB"\n')
    assert load_config().settings.memory == "1GB"
    monkeypatch.setenv("WHERRY_CONFIG", str(other))
    assert load_config().settings.memory == "2GB"
    monkeypatch.delenv("WHERRY_CONFIG")
    monkeypatch.chdir("/")
    assert load_config().settings.memory == "3GB"
    monkeypatch.setenv("WHERRY_CONFIG", str(tmp_path / "none.toml"))
    with pytest.raises(NotFoundError, match="WHERRY_CONFIG"):
        load_config()
    with pytest.raises(NotFoundError):
        settings.ledger_url()


def test_a_changed_file_is_read_again(toml):
    path = toml('memory = "1GB"\n')
    assert load_config(path).settings.memory == "1GB"
    path.write_text('memory = "22GB"\n')
    assert load_config(path).settings.memory == "22GB"


def test_relative_paths_count_from_the_file(toml, tmp_path):
    text = ROUTE.replace('root = "runs"', 'root = "../runs"').replace("out/", "gs://out/")
    (route,) = load_config(toml(text)).routes
    assert route.root == str(tmp_path.parent / "runs")
    assert route.targets[0].uri == "gs://out/{run}/{step}"


def test_env_sections_reach_into_routes(toml):
    path = toml(ROUTE + '[env.prod.routes.a]\nselect = "all"\n[env.prod.routes.a.retention]\nkeep_last = 2\n')
    assert load_config(path).routes[0].select == "latest"
    (route,) = load_config(path, "prod").routes
    assert (route.select, route.retention.keep_last, route.targets[0].format) == ("all", 2, "hf")


@pytest.mark.parametrize(
    ("text", "words", "cure"),
    [
        ("x =", "invalid TOML", "wherry config example"),
        ('memry = "1GB"\n', "line 1, memry", "did you mean memory?"),
        (ROUTE + "[routes.a.retention]\nkeep_best = 1\n", "line 6, routes.a.retention", "wherry config example"),
        (ROUTE.replace("{run}", "{rn}"), "line 5, routes.a.targets[0].uri: unknown field {rn}", "{run}"),
        (ROUTE.replace("{run}", "{run"), "unmatched brace", "{run}"),
        (ROUTE.replace('format = "hf"\n', ""), "line 3, routes.a.targets[0].format", "format"),
        (ROUTE.replace('root = "runs"', 'root = "r"\nselect = "some"'), "line 3, routes.a.select", "every N"),
        (ROUTE + '[env.p.routes.a]\nmin_age = "soon"\n', "line 7, routes.a.min_age", "15m"),
        ("# a note\n[concurrency]\nfile = 0\n", "line 3, concurrency.file", "wherry config example"),
        (ROUTE + '[routes."a/b"]\nroot = "x"\ntargets = []\n', "routes.a/b.name", "wherry config example"),
        ('note = """\n[routes.a]\n"""\nmemory = "much"\n', "line 4, memory", "128MiB"),
    ],
)  # fmt: skip
def test_refusals_name_line_field_and_cure(toml, text, words, cure):
    path = toml(text)
    error = refusal(path)
    assert words in error.what
    assert error.uri == str(path)
    assert cure in (error.cure if "note" not in text[:5] else error.cure + cure)


def test_all_faults_are_reported_at_once(toml):
    error = refusal(toml('memory = "much"\nlager = 1\n' + ROUTE.replace("{run}", "{rn}")))
    assert {line.split(":")[0] for line in error.what.split("; ")} == {
        "line 1, memory", "line 2, lager", "line 7, routes.a.targets[0].uri",
    }  # fmt: skip


def test_a_bad_variable_is_named(toml, monkeypatch):
    monkeypatch.setenv("WHERRY_MEMORY", "lots")
    with pytest.raises(UsageError) as failure:
        load_config()
    assert "memory" in failure.value.what


def test_secrets_are_masked(toml):
    path = toml('ledger = "postgresql://u:pw@db/x"\n[notify]\nwebhook = "https://hooks.example/T0/secret"\n')
    rows = {name: value for name, value, _origin in load_config(path).rows()}
    assert rows["notify.webhook"] == "***"
    assert rows["ledger"] == "postgresql://db/x"
    assert "secret" not in str(rows)


def shown(path, *more):
    done = CliRunner().invoke(cli, ["config", "show", "--config", str(path), *more])
    assert done.exit_code == 0, done.output
    return done.output


def test_what_routes_state_is_shown_with_its_origin(toml, tmp_path):
    path = toml(
        ROUTE.replace(
            'root = "runs"', 'root = "s3://key:secret@bucket/runs?token=secret"\nruns = ["a*", "b"]'
        )
        + 'options = { scan_layers = true }\n[[routes.a.targets]]\nformat = "orbax"\nuri = "more/{run}/{step}"\n'
        + '[routes.a.retention]\nkeep_last = 3\n[env.prod.routes.a]\nselect = "all"\n'
        + "[env.prod.routes.a.retention]\nkeep_last = 9\n[env.dev.routes.a]\n"
        + 'targets = [{ format = "dcp", uri = "dev/{run}/{step}" }]\n'
    )
    rows = {one["setting"]: one for one in json.loads(shown(path, "--json"))["settings"]}
    stated = {name: (row["value"], row["origin"]) for name, row in rows.items() if name.startswith("routes.")}
    assert stated == {
        "routes.a.root": ("s3://bucket/runs", f"{path}:2"),
        "routes.a.runs": ("a*, b", f"{path}:3"),
        "routes.a.targets[0].format": ("hf", f"{path}:5"),
        "routes.a.targets[0].uri": (str(tmp_path / "out/{run}/{step}"), f"{path}:6"),
        "routes.a.targets[0].options.scan_layers": ("True", f"{path}:7"),
        "routes.a.targets[1].format": ("orbax", f"{path}:9"),
        "routes.a.targets[1].uri": (str(tmp_path / "more/{run}/{step}"), f"{path}:10"),
        "routes.a.retention.keep_last": ("3", f"{path}:12"),
    }
    text = shown(path, "--env", "prod")
    assert re.search(
        rf"^routes.a.select +all +\({re.escape(str(path))}:14 \[env.prod\]\)$", text, re.MULTILINE
    )
    assert re.search(rf"^routes.a.retention.keep_last +9 +\({re.escape(str(path))}:16 ", text, re.MULTILINE)
    assert f"s3://bucket/runs  ({path}:2)" in text
    assert "secret" not in text
    dev = shown(path, "--env", "dev")
    assert re.search(r"^routes.a.targets\[0\].format +dcp +\(.*:18 \[env.dev\]\)$", dev, re.MULTILINE)
    assert "targets[1]" not in dev
    assert "options" not in dev


def test_the_home_costs_nothing_without_a_file(tmp_path):
    script = "import sys; from wherry.config.settings import ledger_url; ledger_url(); print('pydantic' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, check=True, capture_output=True, text=True
    )
    assert done.stdout.strip() == "False"


def test_values():
    assert [duration(text) for text in ("90", "15m", "2h", "1.5d", 3)] == [90, 900, 7200, 129600, 3]
    chosen = select("best(eval/accuracy, max)")
    assert (chosen.choice, chosen.metric, chosen.highest) == ("best", "eval/accuracy", True)
    assert select("best( loss )").highest is False
    assert select("every 500").steps == 500
    assert select("since 2026-11-01T02:00+02:00").since == moment("2026-11-01")
    for text in (
        "every 0",
        "best()",
        "newest",
        "since yesterday",
        "every " + "9" * 5000,
        "since 0001-01-01T00:00+23:59",
    ):
        with pytest.raises(UsageError):
            select(text)
    assert render("{run}/{step|final}", {"run": "a", "step": None}) == "a/final"
    with pytest.raises(UsageError, match="step") as failure:
        render("{run}/{step}", {"run": "a", "step": None})
    assert "{step|TEXT}" in failure.value.cure


def test_every_field_is_described():
    from wherry.config.schema import ConfigFile

    schema = ConfigFile.model_json_schema()
    tables = {"ConfigFile": schema, **schema["$defs"]}
    bare = [
        f"{table}.{name}"
        for table, body in tables.items()
        for name, field in body["properties"].items()
        if not field.get("description") and "$ref" not in field
    ]
    assert not bare
    assert Path(__file__).parents[2].joinpath("infra", "wherry.toml").is_file()


def test_configs_and_policies_accept_exactly_the_levels_of_verify():
    from typing import get_args

    from wherry.config.schema import VerifyLevel
    from wherry.models.policy import Level
    from wherry.prove.verify import LEVELS

    assert get_args(VerifyLevel) == ("none", *LEVELS)
    assert get_args(Level) == LEVELS


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('env = "prod"', "line 1, env: "),
        ("a = 1\n[env]\nprod = 3", "line 3, env.prod: "),
        ("mlflow = 3", "line 1, mlflow: "),
    ],
)
def test_what_should_be_a_table_and_is_none(tmp_path, monkeypatch, text, said):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://models.example")
    file = tmp_path / "wherry.toml"
    file.write_text(text)
    for env in (None, "prod") if "env" in said else (None,):
        with pytest.raises(UsageError, match=re.escape(said)):
            load_config(file, env)


# A wherry.toml that somebody else wrote is refused or read in linear time, and an error stays readable.


SECONDS = 5  # of processor time, as SECURITY.md promises
SIZE = 50_000
LINES = {
    "header": "[" + " " * SIZE,
    "closed": "[a" + " " * SIZE + "b",
    "comment": "[a]" + " " * SIZE + "x",
    "key": "a" * SIZE,
    "spaces": "a" + " " * SIZE,
    "parts": "a . " * SIZE,
    "quotes": '"a" . ' * SIZE,
    "indent": " " * SIZE + "x",
    "brackets": "[" * SIZE,
}


@pytest.mark.parametrize("line", LINES.values(), ids=LINES)
def test_a_line_is_looked_at_once(line):
    began = time.process_time()
    assert not any(number != 1 for number in lines_of(line).values())
    assert time.process_time() - began < SECONDS


def test_a_line_of_an_array_is_no_endless_header(tmp_path):
    file = tmp_path / "wherry.toml"
    file.write_text('[routes.x]\nroot = "/a"\nbogus = [\n[' + " " * SIZE + '\n"x"]]\n')
    began = time.process_time()
    with pytest.raises(UsageError, match=r"line 3, routes\.x\.bogus: unknown field"):
        load_config(file)
    assert time.process_time() - began < SECONDS


MANY = {
    "fields": '[routes.x]\nroot = "/a"\n' + "".join(f"b{at} = 1\n" for at in range(60_000)),
    "routes": "".join(f"[routes.r{at}]\nbogus = 1\n" for at in range(20_000)),
    "environments": "".join(f"[env.e{at}]\nx = 1\n" for at in range(20_000)),
    "settings": "[policy]\n" + "".join(f"p{at} = {{ level = 'x' }}\n" for at in range(20_000)),
}


@pytest.mark.parametrize("text", MANY.values(), ids=MANY)
def test_many_faults_are_found_in_linear_time_and_the_first_are_named(text, tmp_path):
    file = tmp_path / "wherry.toml"
    file.write_text(text)
    caught = None
    began = time.process_time()
    try:
        load_config(file)
    except WherryError as error:
        caught = error
    assert len(str(caught)) < 4000
    assert time.process_time() - began < SECONDS


def test_the_number_of_faults_that_are_not_named_is_stated(tmp_path):
    file = tmp_path / "wherry.toml"
    file.write_text('[routes.x]\nroot = "/a"\ntargets = []\n' + "".join(f"b{at} = 1\n" for at in range(25)))
    with pytest.raises(UsageError, match=r"line 22, routes\.x\.b18: unknown field; 6 more"):
        load_config(file)


def test_environments_are_limited(tmp_path):
    file = tmp_path / "wherry.toml"
    file.write_text("".join(f"[env.e{at}]\nlinks = []\n" for at in range(100)))
    load_config(file)
    file.write_text("".join(f"[env.e{at}]\nlinks = []\n" for at in range(101)))
    with pytest.raises(HostileError, match="limit of 100 environments"):
        load_config(file)
