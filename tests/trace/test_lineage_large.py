"""Large ledgers: the same answers as from the whole chain, and work that grows with the answer, not with the ledger.

Growth is compared in calls and lines, which do not depend on what else the machine does. Only the slow test of 100,000
checkpoints measures processor time.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys

import pytest

from tests.support.large_ledger import CHAIN, HUB, LedgerShape, grow, steps_in
from tests.support.ledger import conversion, digest
from wherry.errors import AmbiguousError
from wherry.ledger.check import check_chain
from wherry.ledger.nodes import current_conversions
from wherry.ledger.record import open_ledger, record_conversion
from wherry.ledger.replay import replay
from wherry.trace import stale as lineage_stale
from wherry.trace.answers import impact, render_impact, render_why, why
from wherry.trace.lineage import show
from wherry.trace.lineage_text import render
from wherry.trace.page import page
from wherry.trace.stale import stale

FEW, LONG, TIMES = 1000, 200, 5
MOST = 7  # times the work for five times the checkpoints
MEMBER = "run-7/step-7/maxtext"


@pytest.fixture(scope="module")
def ledgers(tmp_path_factory):
    """The URLs of a ledger of a thousand checkpoints, and of one of five thousand."""
    folder = tmp_path_factory.mktemp("large")
    urls = [f"sqlite:///{folder / f'{nodes}.db'}" for nodes in (FEW, FEW * TIMES)]
    for nodes, url in zip((FEW, FEW * TIMES), urls, strict=True):
        grow(url, LedgerShape.of(nodes))
    return urls


@pytest.fixture(scope="module")
def chains(tmp_path_factory):
    """The URLs of ledgers with one chain each, of 200 and of a thousand checkpoints."""
    folder = tmp_path_factory.mktemp("chains")
    urls = [f"sqlite:///{folder / f'{length}.db'}" for length in (LONG, LONG * TIMES)]
    for length, url in zip((LONG, LONG * TIMES), urls, strict=True):
        grow(url, LedgerShape(children=0, chain=length, families=0))
    return urls


@pytest.fixture(autouse=True)
def own_home(tmp_path, monkeypatch):
    monkeypatch.setenv("WHERRY_HOME", str(tmp_path / "home"))


@pytest.fixture
def few(ledgers, monkeypatch):
    monkeypatch.setenv("WHERRY_LEDGER", ledgers[0])


def growth(ledgers, monkeypatch, act):
    """How many times more work an act is in the larger ledger; the first call imports what it needs."""
    works = []
    for url in (ledgers[0], *ledgers):
        monkeypatch.setenv("WHERRY_LEDGER", url)
        works.append(steps_in(lambda: act(ledgers.index(url))))  # noqa: B023  it is called at once
    return works[2] / works[1]


def reached(start, edges):
    """Everything that is reached from a checkpoint, without it."""
    found, waiting = set(), [start]
    while waiting:
        new = set(edges.get(waiting.pop(), ())) - found
        found |= new
        waiting += new
    return found


@pytest.fixture(params=[HUB, f"{CHAIN}-7", "child-20", "grandchild-20", MEMBER, "run-7/step-7"])
def about(request):
    return digest(request.param)


@pytest.mark.usefixtures("few")
def test_answers_are_those_of_the_whole_chain(about):
    with open_ledger() as ledger:
        state = replay(ledger)
    above, below = reached(about, state.parents), reached(about, state.children)
    up, down, tree = why(about), impact(about), show(about)
    assert {*up.nodes} == {about, *above}
    assert {*down.nodes} == {about, *below}
    assert {*tree.nodes} == {about, *above, *below}
    assert {step.edge.statement for step in (*up.steps, *down.steps)} == {
        edge.statement for edge in tree.edges
    }
    assert {*up.origins} == {one for one in up.nodes if one not in state.parents}
    assert all(step.how["software"]["wherry"] == "0.9.0" for step in (*up.steps, *down.steps))
    versions = {version for one in down.nodes for version in state.models(one)}
    assert {version.rpartition(" in ")[0] for version in down.versions} == versions
    brief = impact(about, receipts=False)
    assert (brief.nodes, brief.versions, brief.places) == (down.nodes, down.versions, down.places)
    assert render_impact(brief) == render_impact(down)


@pytest.mark.usefixtures("few")
def test_current_conversions_are_the_last_at_each_place_that_is_not_deleted():
    with open_ledger() as ledger:
        state, every = replay(ledger), current_conversions(ledger)
        some = current_conversions(ledger, set(state.children[digest(HUB)]))
    last = [(one.statement, one.request) for one in state.by_target.values() if one.gone is None]
    assert [(one.statement, one.request) for one in every] == sorted(last, key=lambda row: row[0])
    assert [*some] == [one for one in every if one.target_digest in state.children[digest(HUB)]]


@pytest.mark.usefixtures("few")
def test_grouped_conversions_are_as_stale_as_each_alone():
    together = stale()
    rows, nodes = lineage_stale._rows(None)
    alone = [one for row in rows for one in lineage_stale._look([row], (), nodes)]
    assert [one for one in lineage_stale._with_upstream(rows, alone) if one.reasons] == together
    assert {reason.kind for one in together for reason in one.reasons} == {lineage_stale.SOURCE_GONE}


def test_an_ambiguous_digest_names_a_few_of_many(tmp_path, monkeypatch):
    monkeypatch.setenv("WHERRY_LEDGER", f"sqlite:///{tmp_path / 'ledger.db'}")
    with open_ledger() as ledger:
        for number in range(15):
            record_conversion(ledger, conversion("a", f"t{number}"))
    with pytest.raises(AmbiguousError, match="16 checkpoints") as failure:
        show(digest("w"))
    assert (failure.value.cure or "").endswith(" and 6 more")


def test_the_neighbourhood_of_one_checkpoint_costs_the_same_in_any_ledger(ledgers, monkeypatch):
    def ask(_number):
        for name in (MEMBER, "child-20"):
            why(digest(name)), impact(digest(name)), show(digest(name)), stale(digest(name))
        why(digest(HUB))

    assert growth(ledgers, monkeypatch, ask) < 1.3


VERBS = {
    "show hub": lambda _number: render(show(digest(HUB))),
    "show hub in brief": lambda _number: render(show(digest(HUB), brief=True)),
    "impact hub in brief": lambda _number: render_impact(impact(digest(HUB), receipts=False, brief=True)),
    "impact hub": lambda _number: (render_impact(impact(digest(HUB))), impact(digest(HUB)).to_json()),
    "page of hub": lambda _number: page(show(digest(HUB))),
    "stale": lambda _number: stale(),
    "stale hub": lambda _number: stale(digest(HUB)),
}


@pytest.mark.parametrize("verb", VERBS)
def test_work_grows_with_the_answer(ledgers, monkeypatch, verb):
    assert growth(ledgers, monkeypatch, VERBS[verb]) < MOST


def test_the_check_is_linear(ledgers, monkeypatch):
    def check(number):
        with open_ledger(ledgers[number]) as ledger:
            assert check_chain(ledger).altered is None

    assert growth(ledgers, monkeypatch, check) < MOST


def test_a_chain_takes_linear_work_and_text(chains, monkeypatch):
    sizes = []

    def ask(number):
        found, tree = why(digest(f"{CHAIN}-{LONG * TIMES**number - 1}")), show(digest(f"{CHAIN}-0"))
        sizes.append(len(render_why(found)) + len(render(tree)) + len(page(tree)))

    assert growth(chains, monkeypatch, ask) < MOST
    assert sizes[2] < MOST * sizes[1]
    text = render_why(why(digest(f"{CHAIN}-{LONG * TIMES - 1}")))
    assert "(999 conversions away)" in text
    assert text.count("converted from") == LONG * TIMES - 1


# Seconds of processor time on a machine that does nothing else; half a second of each is the start of the command.
SECONDS = {
    ("why", MEMBER): 1, ("why", HUB): 1, ("why", f"{CHAIN}-1999"): 1, ("show", MEMBER): 1, ("impact", MEMBER): 1,
    ("show", HUB): 1, ("impact", HUB): 1,
    ("stale",): 20, ("check",): 20,
}  # fmt: skip


@pytest.mark.slow
def test_a_hundred_thousand_checkpoints(tmp_path):
    """Each command in a process of its own takes at most twice the seconds of processor time that it should."""
    url = f"sqlite:///{tmp_path / 'ledger.db'}"
    grow(url, LedgerShape.of(100_000))
    late = {}
    for (verb, *names), most in SECONDS.items():
        words = ["ledger" if verb == "check" else "lineage", verb, *map(digest, names)]
        used = processor_seconds(words, {"WHERRY_LEDGER": url})
        if used > 2 * most:
            late[verb, *names] = used
    assert late == {}


def processor_seconds(words, env):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "wherry.cli", *words]
    done = subprocess.run(
        command, env={**os.environ, **env}, stdout=subprocess.DEVNULL, check=False, timeout=300
    )
    assert done.returncode in (0, 9), words
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
