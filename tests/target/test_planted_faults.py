"""Faults that are planted into the product are found by the simulation, each within 10,000 seeds.

`planted.toml` has the first seed that finds each fault, and what it says. `python -m tests.support.simulation.table`
writes it anew.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from tests.support.simulation.planted import PLANTED, plant
from tests.support.simulation.scenario import first_broken, run_seed, simulations

TABLE = tomllib.loads(Path(__file__).with_name("planted.toml").read_text())
MOST = 10_000
QUICK = 400  # a fault that is found by an earlier seed is also looked for by default


@pytest.fixture(scope="module", autouse=True)
def simulated():
    with simulations():
        yield


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
