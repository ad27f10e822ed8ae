"""The text of a large lineage has the nearest conversions and counts the others; JSON and --all have all of them."""

from __future__ import annotations

import json
import re

import pytest

from tests.support.large_ledger import append_all
from tests.support.ledger import REGISTRY, conversion, digest, node
from tests.support.lineage import run
from tests.support.lineage_page import data_of
from wherry.cli.lineage import lineage as lineage_commands
from wherry.core.units import short
from wherry.ledger.record import open_ledger, record_registration, record_verification
from wherry.trace import nearest as limits
from wherry.trace.answers import impact, render_impact
from wherry.trace.lineage import show
from wherry.trace.lineage_text import render
from wherry.trace.nearest import NEIGHBOURS, nearest

CHILDREN = 3 * NEIGHBOURS
NOTABLE = 7  # of the children: registered
FAILED = 8  # failed a verification, and a later one
PASSED = 9  # failed a verification, but passed the last one
CLAIMED = 10  # is about to be registered


def grown(url, pairs):
    with open_ledger(url) as ledger:
        rows = (("conversion", conversion(*pair, software={"wherry": "1"}).to_json()) for pair in pairs)
        append_all(ledger, rows)


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """A checkpoint with 150 sources and 150 results, each of which has a result of its own."""
    found = f"sqlite:///{tmp_path_factory.mktemp('hub') / 'ledger.db'}"
    pairs = [(f"source-{number}", "hub") for number in range(CHILDREN)]
    pairs += [("hub", f"child-{number}") for number in range(CHILDREN)]
    pairs += [(f"child-{number}", f"grandchild-{number}") for number in range(CHILDREN)]
    grown(found, pairs)
    with open_ledger(found) as ledger:
        for number in (NOTABLE, FAILED, PASSED, CLAIMED, 140):
            subject = node(f"child-{number}")
            if number in (FAILED, PASSED):
                record_verification(ledger, subject, {"level": "digest", "verdict": "damaged", "ok": False})
            if number == PASSED:
                record_verification(ledger, subject, {"level": "roundtrip", "verdict": "ok", "ok": True})
            if number in (NOTABLE, 140):
                record_registration(ledger, subject, REGISTRY, "model", str(number))
        record_registration(ledger, node("grandchild-20"), REGISTRY, "model", "20")
    return found


@pytest.fixture(autouse=True)
def home(url, tmp_path, monkeypatch):
    monkeypatch.setenv("WHERRY_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("WHERRY_LEDGER", url)


def named(text, name):
    """The numbers of the checkpoints of a name whose places the text has."""
    return {int(number) for number in re.findall(rf"/checkpoints/{name}-(\d+)$", text, re.MULTILINE)}


LAST = {*range(CHILDREN - NEIGHBOURS + 2, CHILDREN)}


def test_the_notable_and_the_last_results_are_shown():
    code, text = run(lineage_commands, "show", digest("hub"))
    assert code == 0
    assert named(text, "child") == named(text, "grandchild") == {NOTABLE, FAILED, *LAST}
    assert named(text, "source") == {*range(CHILDREN - NEIGHBOURS, CHILDREN)}
    assert text.count(f"\n└─ and {CHILDREN - NEIGHBOURS} more\n") == 2
    assert text.endswith(
        f"└─ and {CHILDREN - NEIGHBOURS} more\n"
        f"{3 * NEIGHBOURS} of {3 * CHILDREN} conversions are shown; add --all to see every one\n"
    )
    order = [int(number) for number in re.findall(r"/checkpoints/child-(\d+)$", text, re.MULTILINE)]
    assert order == sorted(order), "in the order in which they were recorded"


def test_impact_counts_what_it_does_not_show():
    code, text = run(lineage_commands, "impact", digest("hub"))
    assert code == 0
    assert named(text, "child") == named(text, "grandchild") == {NOTABLE, FAILED, *LAST}
    assert text.endswith(
        f"\n{2 * NEIGHBOURS} of {2 * CHILDREN} conversions are shown; add --all to see every one\n"
        f"derived checkpoints: {2 * CHILDREN}, places: {2 * CHILDREN}, affected model versions: "
        + ", ".join(f"model version {number} in {REGISTRY}" for number in (140, 20, 7))
        + "\n"
    )
    whole, brief = impact(digest("hub")), impact(digest("hub"), receipts=False, brief=True)
    assert (brief.versions, brief.places) == (whole.versions, whole.places)
    assert {edge.target for edge in brief.rest}.isdisjoint(brief.nodes)
    assert len(brief.steps) + len(brief.rest) == len(whole.steps)


@pytest.mark.parametrize("verb", ["show", "impact"])
def test_all_and_json_have_every_conversion(verb):
    code, text = run(lineage_commands, verb, digest("hub"), "--all")
    assert code == 0
    assert named(text, "child") == {*range(CHILDREN)}
    assert " more" not in text
    assert "--all" not in text
    code, output = run(lineage_commands, verb, digest("hub"), "--json")
    found = json.loads(output)
    edges = found["edges"] if verb == "show" else [step["edge"] for step in found["steps"]]
    assert (code, len(edges)) == (0, 3 * CHILDREN if verb == "show" else 2 * CHILDREN)
    assert "rest" not in found


def test_the_page_has_the_whole_lineage(tmp_path):
    assert run(lineage_commands, "show", digest("hub"), "--html", tmp_path / "page.html")[0] == 0
    assert data_of((tmp_path / "page.html").read_text())["totals"]["edges"] == 3 * CHILDREN


@pytest.mark.parametrize("about", ["child-20", "grandchild-20", "source-20"])
def test_the_neighbourhood_of_another_checkpoint(about):
    """A small lineage is shown whole; from a source, the hub's results are shortened."""
    whole, brief = show(digest(about)), show(digest(about), brief=True)
    hidden = 0 if about != "source-20" else 2 * (CHILDREN - NEIGHBOURS)
    hidden += 0 if about == "source-20" else CHILDREN - NEIGHBOURS
    assert len(brief.rest) == hidden
    assert {*brief.edges, *brief.rest} == {*whole.edges}
    assert short(digest(about)) in render(brief)


def test_a_lineage_that_fits_is_the_same_text(tmp_path, monkeypatch):
    monkeypatch.setenv("WHERRY_LEDGER", f"sqlite:///{tmp_path / 'small.db'}")
    pairs = [("hub", f"child-{number}") for number in range(NEIGHBOURS)]
    grown(None, [*pairs, ("child-1", "x"), ("child-2", "x"), ("x", "y")])
    assert show(digest("hub"), brief=True) == show(digest("hub"))
    assert render_impact(impact(digest("hub"), brief=True)) == render_impact(impact(digest("hub")))


def test_a_long_chain_ends_with_the_number_of_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "MOST", 60)
    monkeypatch.setenv("WHERRY_LEDGER", f"sqlite:///{tmp_path / 'chain.db'}")
    grown(None, [(f"link-{number}", f"link-{number + 1}") for number in range(200)])
    text = render(show(digest("link-100"), brief=True))
    assert named(text, "link") == {*range(40, 161)}
    assert text.count("└─ and 1 more") == 2
    assert text.endswith("\n120 of 200 conversions are shown; add --all to see every one")


def test_a_result_that_is_reached_twice_is_counted_once(tmp_path, monkeypatch):
    """The conversions above it are counted too, so that every conversion is either shown or counted."""
    monkeypatch.setenv("WHERRY_LEDGER", f"sqlite:///{tmp_path / 'twice.db'}")
    pairs = [("hub", f"child-{number}") for number in range(NEIGHBOURS + 5)]
    grown(None, [*pairs, *((target, "merged") for _hub, target in pairs)])
    found = impact(digest("hub"), brief=True)
    text = render_impact(found)
    assert f"derived checkpoints: {NEIGHBOURS + 6}, places: {NEIGHBOURS + 6}," in text
    assert text.count("converted to") == 2 * NEIGHBOURS
    assert "and 5 more" in render(show(digest("hub"), brief=True))


def test_the_ledger_is_not_queried_about_few_neighbours():
    tree = show(digest("child-20"))
    few = tree.edges[: NEIGHBOURS + 1]
    queried = []
    shown, rest = nearest(few, digest("source-1"), lambda digests: queried.append(digests) or set())
    assert (len(shown), len(rest), queried) == (1, NEIGHBOURS, [])
