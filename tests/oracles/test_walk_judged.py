"""The targets' own libraries compute each changed model that the table of attributes calls carried.

`tests.support.judges` has the libraries; tests/golden/judged.json is what they computed last.
"""

from __future__ import annotations

import json

import pytest

from tests.support.judges.judge import JUDGES, judge_for
from tests.support.walk.judged import JUDGED, collected, judge_class, system_of
from tests.support.walk.models import BASES
from tests.support.walk.walk import systems_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]


@pytest.fixture(scope="module", params=JUDGES)
def judge(request):
    """Its name, and one warm process for all classes."""
    with judge_for(request.param) as made:
        yield request.param, made


@pytest.mark.parametrize("label", BASES)
def test_the_target_computes_what_transformers_computed(judge, label):
    name, made = judge
    if system_of(name) not in systems_of(label):
        return
    found = list(judge_class(label, {name: made}, set()))
    assert not [one for one in found if one.why.startswith("differs")]
    expected = json.loads(JUDGED.read_text()).get(name, {"classes": {}})["classes"].get(label)
    if expected is not None:
        assert collected(found, {})[name]["classes"][label] == expected
