"""The pages behind README's doors: names, tables, numbers and paths are compared with the code and with `infra`.

Commands that need a server are parsed here by the command line that they are meant for; `test_end_to_end.py` runs them
with real ones, and `test_readme_flows.py` what needs none.
"""

from __future__ import annotations

import ast
import json
import re
import tomllib
from itertools import chain

import click
import pytest

from tests.support.readme import (
    AUDITOR,
    CONTAINERS,
    DEPLOY,
    EVERYTHING,
    FURTHER,
    PAGES,
    README,
    ROOT,
    SERVERS,
    SEVERAL,
    TEXTS,
    blocks,
    code,
    commands,
    section,
)
from wherry.cli import cli
from wherry.config.config import VARIABLES
from wherry.formats.registry import formats
from wherry.models.policy import Policy, policy_of
from wherry.nightly import metrics
from wherry.prove.report import KINDS
from wherry.prove.verify import LEVELS

SHOWN = {"wherry/families/tray.toml"}  # the file that docs/develop.md has a reader write
DOORS = ("trainers", "platform", "audit")


def test_the_doors_are_near_the_top_and_lead_to_their_pages():
    before = README.partition("\n## Screenshots")[0]
    assert all(f"](docs/{door}.md)" in before for door in DOORS)
    assert len(before.splitlines()) < 70


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 250


def test_the_examples_of_readme_are_those_of_the_pages():
    """What README shows besides `Use` is run where its page is tested."""
    shown = [
        line.partition("  #")[0]
        for language in ("sh", "python", "toml")
        for block in code(section("One example for each need"), language)
        for line in block.splitlines()
        if line
    ]
    run = {
        line.partition("  #")[0]
        for page in (*DOORS, "between-systems", "troubleshooting")
        for language in ("sh", "python", "toml")
        for block in blocks(page, language)
        for line in block.splitlines()
    }
    assert len(shown) >= 7
    assert [line for line in shown if line not in run] == []


def test_pictures_and_files_that_are_named_exist():
    pictures = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", README)
    assert {str(path.relative_to(ROOT)) for path in (ROOT / "infra" / "pictures").glob("*.png")} <= set(
        pictures
    )
    assert sum("infra/pictures/" in name for name in pictures) >= 3  # Prefect, MLflow and the lineage
    named = re.findall(r"`((?:docs|infra|tests|flows|wherry)/[\w./-]+)`", EVERYTHING)
    missing = [
        name
        for name in {*pictures, *named}
        if name not in SHOWN and "NAME" not in name and not (ROOT / name).exists()
    ]
    assert not missing


# ---- links


def anchors(text):
    """The anchors of a page's headings, as GitHub makes them; code blocks have none."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    slugs = [
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        for heading in re.findall(r"^#+ (.*)$", prose, re.MULTILINE)
    ]
    return {
        f"{slug}-{slugs[:at].count(slug)}" if slug in slugs[:at] else slug for at, slug in enumerate(slugs)
    }


def links(text):
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"\]\(([^)\s]+)\)", prose)


def broken(page, link):
    """Why a link of a page leads nowhere; empty where it leads somewhere."""
    file, _, anchor = link.partition("#")
    target = (ROOT / page).parent.joinpath(file).resolve() if file else ROOT / page
    if not target.is_relative_to(ROOT) or not target.exists():
        return "no such file"
    return "" if not anchor or anchor in anchors(target.read_text()) else "no such heading"


@pytest.mark.parametrize("page", TEXTS)
def test_every_link_leads_somewhere(page):
    relative = [link for link in links(TEXTS[page]) if not re.match(r"\w+:", link)]
    assert {link: why for link in relative if (why := broken(page, link))} == {}


def test_a_link_that_leads_nowhere_is_seen():
    assert broken("README.md", "docs/nowhere.md") == "no such file"
    assert broken("README.md", "#nowhere") == "no such heading"
    assert broken("docs/README.md", "../CONTRIBUTING.md#architecture") == ""
    assert broken("docs/README.md", "../../README.md") == "no such file"


def test_the_index_lists_every_page():
    listed = {link.partition("#")[0] for link in links(PAGES["README"])}
    listed |= {f"systems/{link}" for link in links(PAGES["systems/README"])}
    assert {f"{name}.md" for name in PAGES if name != "README"} <= listed


def test_the_extras_are_those_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = set(project["optional-dependencies"]) - {"demo", "demo-bucket", "docs", "bench"}
    further = section("Install").partition("Further extras: ")[2].partition("Tested")[0]
    assert set(re.findall(r"`(\w+)`", further)) | {"prefect", "mlflow"} == extras


def test_the_levels_are_those_of_verify():
    part = PAGES["proof"]
    assert tuple(re.findall(r"^\| `(\w+)` \|", part, re.MULTILINE)) == LEVELS
    from wherry.integrations.native import LOADERS

    without = part.partition("has no loader for")[2].partition(".\n")[0]
    assert set(re.findall(r"`([\w-]+)`", without)) == set(formats()) - set(LOADERS)


def test_variables_and_options_that_are_mentioned_exist():
    code = "".join(
        path.read_text()
        for room in ("wherry", "integrations", "flows", "tasks")
        for path in (ROOT / room).rglob("*.py")
    )
    named = set(re.findall(r"\b((?:WHERRY|OPENLINEAGE|MLFLOW|PREFECT)_[A-Z_]+)\b", EVERYTHING))
    assert set(VARIABLES.values()) <= named
    assert {name for name in named if f'"{name}"' not in code} <= {
        "WHERRY_VENV",
        "WHERRY_CORPUS",
        "WHERRY_EVERY_BYTE",
        "PREFECT_WORKER_QUERY_SECONDS",
    }
    fields = set(re.findall(r"`(\w+)=[^`]*`", PAGES["trainers"]))
    assert fields >= {"snapshot", "spool", "strict"}


@pytest.mark.parametrize("name", ["orbax", "maxtext", "t5x", "lingua", "torch"])
def test_the_hooks_are_the_files_that_test_hooks_runs(name):
    source = (ROOT / "tests" / "support" / f"hooks_{name}.py").read_text()
    shown = blocks("trainers", "python")[1:]
    trees = [ast.dump(ast.parse(text)) for text in shown]
    tree = ast.parse(source)
    tree.body = tree.body[1:]  # its docstring stands above the code
    assert ast.dump(tree) in trees
    assert (
        f"from tests.support.hooks_{name} import" in (ROOT / "tests" / "infra" / "test_hooks.py").read_text()
    )


def test_the_exit_codes_of_an_audit():
    codes = {kind.exit_code for kind in KINDS.values() if kind.severity == "error"}
    said = PAGES["audit"].partition("`audit` exits with ")[2].partition(";")[0]
    assert {int(number) for number in re.findall(r"\b\d+\b", said)} == codes


def test_the_policy_shows_every_gate():
    (text,) = blocks("audit", "toml")
    whole = tomllib.loads(re.sub(r"^# ", "", text, flags=re.MULTILINE))
    assert set(whole) == set(Policy.model_fields)
    policy_of(whole)
    assert policy_of(tomllib.loads(text)) != Policy()


def test_every_question_can_be_answered_in_json():
    for words in chain.from_iterable(map(commands, AUDITOR)):
        if words[:1] == ["wherry"] and words[1:3] != ["ledger", "anchor"]:  # which prints nothing else
            assert any(option.name == "json_" for option in parsed(words[1:]).command.params), words


def parsed(words, command=cli, parent=None):
    """The context of a command, parsed and not carried out; groups come without options of their own."""
    assert command is not None, f"no such command, before {words}"
    if isinstance(command, click.Group):
        here = click.Context(
            command, parent=parent, **command.context_settings
        )  # click keeps what `--help` is called
        return parsed(words[1:], command.get_command(here, words[0]), here)
    return command.make_context(command.name, list(words), parent=parent)


# ---- what needs servers, parsed by whom it is for


def prefect_takes(words):
    import prefect.cli  # noqa: F401  it registers the commands
    from prefect.cli._app import _app

    return _app.parse_args(words, exit_on_error=False, print_error=False)


def mlflow_takes(words):
    from mlflow.cli import cli as mlflow

    return parsed(words, mlflow)


def exports(words):
    assert all(re.fullmatch(r"[A-Z_]+=\S+", word) for word in words)


def names_files(words):
    """Of programs that are not ours: the files of the clone that they are given are there."""
    given = [word for word in words if word.startswith("infra/")]
    assert given
    assert all((ROOT / word).exists() for word in given), words


PARSERS = {
    "wherry": parsed, "prefect": prefect_takes, "mlflow": mlflow_takes, "export": exports,
    "docker": names_files, "kubectl": names_files,
}  # fmt: skip


@pytest.mark.parametrize(
    "words",
    list(chain.from_iterable(map(commands, (SERVERS, DEPLOY, FURTHER, SEVERAL, CONTAINERS)))),
    ids=lambda words: " ".join(words)[:60],
)
def test_what_needs_a_server_is_understood(words):
    if words[0] in ("prefect", "mlflow"):
        pytest.importorskip(words[0])
    PARSERS[words[0]](words[1:])


def test_the_run_of_a_deployment_fits_its_flow():
    from wherry.flows.promote import PromoteSpec

    runs = [words for words in commands(DEPLOY + FURTHER) if words[:2] == ["prefect", "deployment"]]
    for words in runs:
        assert f"`{words[3]}`" in PAGES["reference/deployments"]
    PromoteSpec.model_validate_json(runs[-1][5].removeprefix("spec="))


def test_pools_and_files_that_are_named_are_there():
    pools = {json.loads(path.read_text())["name"] for path in (ROOT / "infra" / "pools").glob("*.json")}
    named = {
        name
        for page in ("platform", "containers", "audit")
        for name in re.findall(r"--pool ([\w-]+)", PAGES[page])
    }
    assert named
    assert named <= pools


def test_the_alerts_are_about_metrics_that_are_written():
    part = PAGES["operation"] + PAGES["bad-night"]
    named = set(re.findall(r"\bwherry_[a-z_]+", part))
    assert named
    assert named <= set(metrics.HELP)
    flows = "".join(path.read_text() for path in (ROOT / "flows").glob("*.py"))
    for name in re.findall(r'flow="([\w-]+)"', part):
        assert f'ending("{name}"' in flows, f"nothing notes the end of {name}"


def test_the_times_of_the_automations():
    text = (ROOT / "infra" / "automations.yaml").read_text()
    assert [int(seconds) for seconds in re.findall(r"within: (\d+)", text)] == [120, 600, 26 * 3600]
    assert "two minutes" in PAGES["platform"]
    assert "ten minutes" in PAGES["platform"]
    assert "26 hours" in PAGES["platform"]


def test_every_flow_tells_how_it_ended():
    assert "every flow reports" in PAGES["operation"]
    for name in re.findall(r"^\| `([\w-]+)/[\w-]+` \|", PAGES["reference/deployments"], re.MULTILINE):
        assert any(f'ending("{name}"' in path.read_text() for path in (ROOT / "flows").glob("*.py")), name


def test_the_form_of_every_flow_has_a_schema():
    flows = {path.stem for path in (ROOT / "flows").glob("*.py") if "@flow(" in path.read_text()}
    assert flows == {"audit", "convert", "export", "nightly", "promote", "work"}
    for name in flows - {"work"}:  # which takes the name of a job, and no form
        schema = json.loads((ROOT / f"docs/reference/schemas/{name}-spec.json").read_text())
        assert schema["properties"], name
        assert f"schemas/{name}-spec.json" in PAGES["reference/schemas"]
