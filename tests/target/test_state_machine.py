"""The state machine of a target: whatever happens to its writers, nothing wrong is visible and nothing durable is lost.

Each seed is a simulation of one to three writers, and of `clean`, on a file system or on a store of objects, with
kills, stops, lost answers, late requests, losses of power, interrupts and forged logs (`tests/support/simulation`).
What must hold is checked after each step, and in the end after one more run and one more `clean`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter

import pytest

from tests.support.house import ROOT
from tests.support.simulation.scenario import STORES, first_broken, run_seed, simulations

FEW = 100  # seeds of a store
MANY, STEP = 25_000, 2_500


@pytest.fixture(scope="module", autouse=True)
def simulated():
    with simulations():
        yield


@pytest.mark.parametrize("store", STORES)
def test_few_seeds(store):
    """They also reach what they are for: every fault and end, resumed runs, copies of areas."""
    kinds, ends = Counter(), Counter()
    for seed in range(FEW):
        outcome = run_seed(seed, store)
        assert not outcome.broken, f"seed {seed} of {store}: {outcome.broken}\n{outcome.processes}"
        kinds.update(name for _process, name, *_what in outcome.trace if name.startswith("! "))
        ends.update(outcome.processes.values())
        kinds["resumed"] += any(outcome.resumed.values())
        kinds["copied"] += any(".former" in what for _process, _name, what in outcome.trace)
    expected = {"! kill", "! stop", "! fail", "! lose", "! slow", "! interrupt", "resumed"}
    expected |= {"! power", "copied"} if store == "files" else {"! late"}
    assert expected <= {kind for kind, count in kinds.items() if count}, kinds
    assert {"done", "made before", "killed", "TargetInUseError", "KeyboardInterrupt"} <= ends.keys()


@pytest.mark.full
@pytest.mark.parametrize("first", range(0, MANY, STEP))
@pytest.mark.parametrize("store", STORES)
def test_many_seeds(store, first):
    outcome = first_broken(range(first, first + STEP), store)
    assert outcome is None, f"seed {outcome.seed} of {store}: {outcome.broken}\n{outcome.processes}"


def test_a_seed_makes_the_same_calls_again():
    for store in STORES:
        for seed in range(3):
            first, second = run_seed(seed, store), run_seed(seed, store)
            assert first.trace == second.trace
            assert first.digest == second.digest
    assert len({run_seed(seed, store).digest for store in STORES for seed in range(3)}) == 12


PROGRAM = """
from tests.support.simulation.scenario import STORES, run_seed, simulations
with simulations():
    print(*(run_seed(seed, store).digest for store in STORES for seed in range(10)))
"""


def test_a_seed_makes_the_same_calls_in_another_process():
    """Also where texts have other hashes, which decide the order of sets."""
    found = set()
    for number in ("1", "2"):
        variables = {**os.environ, "PYTHONHASHSEED": number, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            capture_output=True,
            text=True,
            check=True,
            env=variables,
            cwd=ROOT,
        )
        found.add(done.stdout)
    assert len(found) == 1
