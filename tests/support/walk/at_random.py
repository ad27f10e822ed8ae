"""A random walk: models drawn from seeds go into a system, which must compute the same, or wherry refuses them.

    python -m tests.support.walk.at_random --seeds FIRST COUNT [--ask LIBRARY ...] [--record]

prints every wrong end, with the draw as JSON that a test is made of, and how many ended how; Ctrl-C ends it early:

    ok          the target computes what transformers computes from the source
    refused     wherry ended with 2, 4 or 7 and a cure
    not judged  nothing here computes what the target computes, or libraries may compute it differently (a tie decides,
                or a rounding); what comes back is equal or refused
    wrong       anything else: other outputs, another error, a model that comes back different
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

import wherry
from tests.support.judges.judge import Judge
from tests.support.memory_files import temporary_folder
from tests.support.oracles.parts import TieError
from tests.support.walk.draw import Draw, NoModelError, draws, save
from tests.support.walk.models import BASES, logits
from tests.support.walk.record import prepare
from tests.support.walk.target import LIBRARIES, Judges, allowed, computed, wanted
from tests.support.walk.walk import distance, strip
from wherry.core.request import LayoutRequest
from wherry.errors import WherryError

RUNS = Path(__file__).resolve().parents[2] / "golden" / "random_walk_runs.json"
REFUSED = (2, 4, 7)
_IDLE = re.compile(r"--set (\w+)=\S* changes nothing")
_LEAST = 1e-3  # of the largest logit: a model whose logits spread less computes next to nothing
_ROUNDINGS = 10  # times what one rounding of each weight changes
OK, NO, UNJUDGED, WRONG = "ok", "refused", "not judged", "wrong"


@dataclass(frozen=True, slots=True)
class Ended:
    """How a draw ended.

    Attributes:
        draw: what was drawn.
        word: ok, refused, not judged or wrong.
        detail: the refusal, or what is wrong.
        back: how the way back ended: equal, refused, or not tried.
    """

    draw: Draw
    word: str
    detail: str = ""
    back: str = "not tried"


def end_of(seed: int, judges: Judges) -> Ended:
    """Draw a model of a seed, and see how it ends.

    Raises:
        NoModelError: no draw of it is a model.
    """
    for draw in draws(seed):
        if (ended := end(draw, judges)) is not None:
            return ended
    raise NoModelError(f"seed {seed}: no draw is a model")


def end(draw: Draw, judges: Judges) -> Ended | None:
    """How a draw ends; None if it is no model of transformers."""
    judge = judges.of(draw)
    with temporary_folder("random") as name:
        folder = Path(name)
        try:
            source = save(folder / "source", draw)
            expected = wanted(source, draw, judge)
            plain = expected if draw.system not in ("maxtext", "t5x") else logits(source, draw.label)
        except Exception:
            return None
        if not np.isfinite(expected).all() or expected[0].std() < _LEAST * np.abs(expected[0]).max():
            return None
        target = folder / ("consolidated.00.pth" if draw.system == "meta" else "target")
        layout = LayoutRequest(
            family=BASES[draw.label].family if draw.system == "meta" else None, dtype=draw.dtype
        )
        options = {**draw.options, **(judge.options(draw.label) if judge else {})}
        stopped = _converted(draw, source, target, layout=layout, to=draw.to, options=options)
        if stopped is not None:
            return stopped
        judged = _judged(draw, judge, target, source, expected)
        if judged.word == WRONG or draw.system == "huggingface":
            return judged
        return _back(judged, judge, target, source, folder / "back", plain)


def _converted(draw: Draw, source: Path, target: Path, **request: Any) -> Ended | None:
    """Convert; the end if that is not possible. An option that is said to change nothing is removed."""
    try:
        wherry.convert(source, target, lineage=False, verify="none", **request)
    except WherryError as error:
        idle = _IDLE.match(error.what)
        if idle is not None and idle[1] in request["options"]:
            left = {name: value for name, value in request["options"].items() if name != idle[1]}
            return _converted(draw, source, target, **{**request, "options": left})
        cure = error.cure or error.usual_cure
        word = NO if error.exit_code in REFUSED and cure else WRONG
        return Ended(draw, word, f"{error.exit_code}: {error}")
    except Exception as error:
        return Ended(draw, WRONG, f"{type(error).__name__}: {error}")
    return None


def _judged(draw: Draw, judge: Judge | None, target: Path, source: Path, expected: np.ndarray) -> Ended:
    if judge is None:
        return Ended(draw, UNJUDGED, f"nothing here computes what {draw.system} computes")
    try:
        found = computed(target, source, draw, judge)
    except TieError as error:
        return Ended(draw, UNJUDGED, str(error))
    except Exception as error:
        return Ended(draw, WRONG, f"{type(error).__name__}: {error}"[-1000:])
    return _compared(draw, source, found, expected[0], allowed(draw, judge))


def _compared(draw: Draw, source: Path, found: np.ndarray, expected: np.ndarray, most: float) -> Ended:
    """Equal, different, or different by no more than roundings explain."""
    if found.shape != expected.shape:
        return Ended(draw, WRONG, f"shape {found.shape}, not {expected.shape}")
    far = distance(found, expected)
    if far <= most:
        return Ended(draw, OK)
    near = _sensitivity(draw, source)
    if far <= _ROUNDINGS * near:
        return Ended(draw, UNJUDGED, f"differs by {far:.1e}, where roundings to float32 change {near:.1e}")
    return Ended(draw, WRONG, f"differs by {far:.1e}")


def _sensitivity(draw: Draw, source: Path) -> float:
    """What the model computes otherwise if each weight is changed as a rounding to float32 changes it.

    transformers computes norms, rotary positions and softmax in float32, whatever the weights are.
    """

    def shake(model: Any) -> None:
        import torch

        rng = torch.Generator().manual_seed(1)
        for parameter in model.parameters():
            parameter.mul_(1 + 2**-24 * torch.randn(parameter.shape, generator=rng, dtype=parameter.dtype))

    return distance(logits(source, draw.label, change=shake), logits(source, draw.label))


def _back(
    judged: Ended, judge: Judge | None, target: Path, source: Path, back: Path, expected: np.ndarray
) -> Ended:
    """The end, with that of the way back by what the target states: equal, refused, or the whole is wrong."""
    draw = judged.draw
    strip(target, source, keep=draw.to.startswith("huggingface"))
    layout = LayoutRequest(family=BASES[draw.label].family)
    if (stopped := _converted(draw, target, back, layout=layout, to="huggingface")) is not None:
        if stopped.word == WRONG:
            return replace(stopped, detail=f"back: {stopped.detail}")
        return replace(judged, back=NO)
    try:
        found = logits(back, draw.label, own=False)
    except Exception as error:
        return Ended(draw, WRONG, f"back: {type(error).__name__}: {error}"[:500])
    again = _compared(draw, source, found, expected, allowed(draw, judge))
    if again.word == WRONG:
        return replace(again, detail=f"back: {again.detail}")
    return replace(judged, back="equal")


def walk(seeds: Iterable[int], libraries: Collection[str] = ()) -> Iterator[tuple[int, Ended]]:
    """How each seed ends.

    Args:
        seeds: the seeds.
        libraries: which of `LIBRARIES` are used.
    """
    with Judges(libraries) as judges:
        for seed in seeds:
            yield seed, end_of(seed, judges)


def summary(ends: Iterable[Ended]) -> dict[str, Any]:
    """How many ended how, and of each system."""
    found = list(ends)
    systems = {
        system: dict(sorted(Counter(ended.word for ended in found if ended.draw.system == system).items()))
        for system in sorted({ended.draw.system for ended in found})
    }
    counts = Counter(ended.word for ended in found)
    return {
        **{word: counts[word] for word in (OK, NO, UNJUDGED, WRONG)},
        "equal on the way back": sum(ended.back == "equal" for ended in found),
        "systems": systems,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs=2, metavar=("FIRST", "COUNT"), required=True)
    parser.add_argument("--ask", choices=LIBRARIES, nargs="+", default=[], help="ask these libraries too")
    parser.add_argument(
        "--record", action="store_true", help="add the summary to tests/golden/random_walk_runs.json"
    )
    parser.add_argument(
        "--details", type=Path, help="write each seed and its end into this file, a line of JSON"
    )
    options = parser.parse_args()
    first, count = options.seeds
    began, ends = time.monotonic(), []
    with (
        suppress(KeyboardInterrupt),
        temporary_folder("random-home") as home,
        (options.details or Path("/dev/null")).open("w", buffering=1) as stream,
    ):
        prepare(home)
        for seed, ended in walk(range(first, first + count), options.ask):
            ends.append(ended)
            row = {"seed": seed, "word": ended.word, "back": ended.back, "detail": ended.detail}
            print(json.dumps({**row, "draw": json.loads(ended.draw.text)}), file=stream)
            if ended.word == WRONG:
                print(f"seed {seed}: {ended.detail}\n  {ended.draw.text}", flush=True)
    found = {
        "first": first,
        "count": len(ends),
        "libraries": options.ask,
        **summary(ends),
        "seconds": round(time.monotonic() - began),
        "processor seconds": round(sum(os.times()[:4])),
        "day": datetime.now(UTC).date().isoformat(),
    }
    print(json.dumps(found, indent=1))
    if options.record:
        RUNS.write_text(json.dumps([*json.loads(RUNS.read_text()), found], indent=1) + "\n")
    return 1 if found[WRONG] or len(ends) < count else 0


if __name__ == "__main__":
    sys.exit(main())
