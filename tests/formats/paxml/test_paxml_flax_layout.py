"""PaxML's Flax type has numbers for names on disk, and states its names in a text: a family reads it by these."""

from __future__ import annotations

import wherry
from tests.support.corpus import needs, place


def test_the_flax_type_gives_what_the_type_of_arrays_gives(tmp_path):
    cases = ("paxml-gpt3-l3-flax", "paxml-gpt3-l3-v12-gda-ocdbt")
    for case in cases:
        needs(case)
    made = [wherry.convert(place(case), tmp_path / case, to="maxtext", lineage=False) for case in cases]
    assert len({one.target.weights_digest for one in made}) == 1
