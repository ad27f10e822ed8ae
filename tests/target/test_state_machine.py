"""The state machine of a target: nothing wrong is visible, nothing durable is lost, and planted faults are found."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest

from tests.support.house import ROOT
from tests.support.simulation.planted import PLANTED, plant
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


# Faults that are planted into the product are found by the simulation, each within 10,000 seeds.


TABLE = tomllib.loads(Path(__file__).with_name("planted.toml").read_text())
MOST = 10_000
QUICK = 400  # a fault that is found by an earlier seed is also looked for by default


def is_found(name):
    """Whether the simulation finds a planted fault; the seed that has found it before is tried first."""
    store = PLANTED[name][0]
    with plant(name):
        return (
            bool(run_seed(TABLE[name]["seed"], store).broken) or first_broken(range(MOST), store) is not None
        )


@pytest.mark.parametrize("name", [name for name in TABLE if TABLE[name]["seed"] < QUICK])
def test_a_planted_fault_is_found(name):
    assert is_found(name)


@pytest.mark.full
@pytest.mark.parametrize("name", TABLE)
def test_every_planted_fault_is_found_within_the_seeds(name):
    with plant(name):
        found = first_broken(range(MOST), PLANTED[name][0])
    assert found is not None, f"no seed below {MOST:,} finds it; seed {TABLE[name]['seed']} did"


def test_the_seed_that_finds_a_fault_is_sound_without_it():
    for name, row in TABLE.items():
        assert not run_seed(row["seed"], PLANTED[name][0]).broken, name


def test_the_table_has_every_fault():
    assert list(TABLE) == list(PLANTED)
    assert len(TABLE) >= 20
    assert all(row["seed"] < MOST for row in TABLE.values())
