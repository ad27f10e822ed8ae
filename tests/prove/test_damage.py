"""Each level of `verify` finds the planted damage that the table in docs/proof.md says it finds, and no more.

The table is made of tests/golden/damage.json. If a change is intended, `python -m tests.support.damage` writes it anew.
"""

from __future__ import annotations

import pytest

from tests.support.corpus import PRESENT, needs_corpus
from tests.support.damage import (
    DAMAGE,
    LEVELS,
    OTHER_LIBRARIES,
    SOUND,
    TARGETS,
    Bench,
    damaged_target,
    golden,
    outcome,
)

for package in ("torch", "transformers", "safetensors", "orbax.checkpoint"):
    pytest.importorskip(package, reason=f"{package} is not installed")

pytest_plugins = ("tests.support.warm_native",)
READING = [level for level in LEVELS if level not in OTHER_LIBRARIES]
GOLDEN = golden()
CASES = [(damage, name) for damage in DAMAGE for name in TARGETS] if PRESENT else []
LIBRARY_CASES = [(damage, name) for damage, name in CASES if name in GOLDEN.get(damage, {})]


@pytest.fixture(scope="module")
def bench(own_home, tmp_path_factory):
    """Sound targets of a model of the corpus; each is made when a case needs it."""
    del own_home
    return Bench(tmp_path_factory.mktemp("damage"))


@pytest.mark.parametrize(("damage", "name"), CASES)
def test_damage_is_found_from_the_bytes_as_the_table_says(damage, name, bench):
    path = damaged_target(bench, name, damage)
    expected = GOLDEN[damage].get(name)
    assert (path is None) == (expected is None)
    if path is not None:
        found = {level: outcome(bench, path, level) for level in READING}
        assert found == {level: expected[level] for level in READING}


@pytest.mark.usefixtures("forked_loaders")
@pytest.mark.parametrize(("damage", "name"), LIBRARY_CASES)
def test_damage_is_found_by_libraries_as_the_table_says(damage, name, bench):
    path = damaged_target(bench, name, damage)
    found = {level: outcome(bench, path, level) for level in OTHER_LIBRARIES}
    assert found == {level: GOLDEN[damage][name][level] for level in OTHER_LIBRARIES}


def test_the_table_has_every_damage_and_at_least_forty():
    assert list(GOLDEN) == list(DAMAGE)
    assert len(DAMAGE) - len(SOUND) >= 40


@needs_corpus
@pytest.mark.parametrize("damage", SOUND)
def test_what_is_no_damage_passes_every_level_that_a_target_has(damage):
    for name, found in GOLDEN[damage].items():
        has = {
            level for level in LEVELS if level != "logits" or name != "torch-zip"
        }  # a file without a config
        assert {level for level, word in found.items() if word == "ok"} == has


def test_a_level_finds_what_the_levels_that_it_includes_find():
    for damage, rows in GOLDEN.items():
        for name, found in rows.items():
            for lower, upper in (("structure", "present"), ("present", "digest"), ("present", "native")):
                assert found[lower] == "ok" or found[upper] != "ok", (damage, name, lower, upper)
