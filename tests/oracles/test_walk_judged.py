"""The targets' own libraries compute each changed model that the table of attributes calls carried.

`tests.support.judges` has the libraries; tests/golden/judged.json is what they computed last.
"""

from __future__ import annotations

import json

import pytest

from tests.support.judges.judge import SYSTEMS, judge_for
from tests.support.walk.judged import JUDGED, collected, judge_class
from tests.support.walk.models import BASES
from tests.support.walk.walk import systems_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]


@pytest.fixture(scope="module", params=SYSTEMS)
def judge(request):
    """One warm process for all classes of a system."""
    with judge_for(request.param) as made:
        yield request.param, made


@pytest.mark.parametrize("label", BASES)
def test_the_target_computes_what_transformers_computed(judge, label):
    system, made = judge
    if system not in systems_of(label):
        return
    found = list(judge_class(label, {system: made}, set()))
    expected = json.loads(JUDGED.read_text()).get(system, {"classes": {}})["classes"].get(label)
    if expected is None:
        assert not found
    else:
        assert collected(found, {})[system]["classes"][label] == expected
