"""Random models of every class are computed by their target as by transformers, or refused.

`python -m tests.support.walk.at_random --seeds FIRST COUNT` walks more seeds. A draw that ended wrong is kept in
tests/golden/random_walk.json, with what it was and how it ends now.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.support.walk import at_random
from tests.support.walk.at_random import OK, RUNS, WRONG, end, summary, walk
from tests.support.walk.draw import Draw, draws
from tests.support.walk.target import Judges

pytest.importorskip("transformers")
pytest.importorskip("torch")
pytest.importorskip("orbax.checkpoint")
pytest.importorskip("penzai")

FOUND = json.loads((Path(__file__).parents[1] / "golden" / "random_walk.json").read_text())
SEEDS = range(1, 9)
A_DAY = 300  # less than two minutes of one processor


def require_right(ends):
    wrong = [
        f"seed {seed}: {ended.detail}\n  {ended.draw.text}"
        for seed, ended in ends.items()
        if ended.word == WRONG
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("why", list(FOUND))
def test_what_was_found_stays_right(why):
    ended = end(Draw(**FOUND[why]["draw"]), Judges())
    assert ended is not None
    assert (ended.word, FOUND[why]["says"] in ended.detail) == (FOUND[why]["word"], True), ended.detail
    assert ended.back == FOUND[why].get("back", ended.back)


def test_a_few_seeds_end_right():
    ends = dict(walk(SEEDS))
    require_right(ends)
    assert summary(ends.values())[OK] > 1


def test_a_seed_is_always_the_same_draw():
    assert next(iter(draws(5))) == next(iter(draws(5))) == Draw(**json.loads(next(iter(draws(5))).text))


def test_another_config_than_the_source_s_is_noticed(monkeypatch):
    """Of a seed that is carried, with the epsilon of the target changed."""
    llama = Draw("llama", next(iter(FOUND.values()))["draw"]["settings"], "huggingface", "huggingface")
    assert end(llama, Judges()).word == OK
    convert = at_random.wherry.convert

    def changed(source, target, **request):
        convert(source, target, **request)
        file = Path(target) / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "rms_norm_eps": 0.01}))

    monkeypatch.setattr(at_random.wherry, "convert", changed)
    assert end(llama, Judges()).word == WRONG


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_the_seeds_of_this_day_end_right(capsys):
    first = datetime.now(UTC).date().toordinal() * 1000
    ends = dict(walk(range(first, first + A_DAY)))
    with capsys.disabled():
        print(f"\nrandom walk of seeds {first} to {first + A_DAY - 1}: {json.dumps(summary(ends.values()))}")
    require_right(ends)


def test_the_page_states_the_last_long_walk():
    walked = json.loads(RUNS.read_text())[-1]
    page = (Path(__file__).parents[2] / "docs" / "reference" / "judged.md").read_text()
    assert walked[WRONG] == len(walked["refused since"])
    assert f"Seeds {walked['first']} to {walked['first'] + walked['count'] - 1} ({walked['day']}): " in page
    assert f"{walked[OK]} equal, {walked['refused']} refused, {walked['not judged']} not judged" in page
