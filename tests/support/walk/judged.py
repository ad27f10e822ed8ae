"""Judges the carried cells: the changed model is converted, and the target's own library computes what it is then.

    python -m tests.support.walk.judged [--judges NAME ...] [--only CLASS ...] [--notes FILE]

A round trip cannot show a fault that both directions share. What tests/golden/attributes.json calls carried, and what
changes the outputs, is therefore judged by `tests.support.judges`; tests/golden/judged.json says by what, and names
each value that a judge could not judge, with the reason. Rows of classes and judges that are not named stay. Notes are
kept a line each, so that a run that was interrupted goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tests.support.judges.judge import JUDGES, WRITTEN, Judge, JudgeError, judge_for
from tests.support.memory_files import temporary_folder
from tests.support.walk.models import BASES, logits, save, tokens
from tests.support.walk.record import GOLDEN, golden, prepare
from tests.support.walk.walk import Case, all_cases, converted, distance, routes_of, strip

if TYPE_CHECKING:
    import numpy as np


JUDGED = GOLDEN.with_name("judged.json")
_TIMES = 3  # what a change changes must be so many times what the library's roundings do
_ENLARGED = 3  # a library may differ by so many times what transformers itself differs by in float32
_LARGEST = 1e-3  # a layout that is wrong in one place makes more
_SHAKY = "the model enlarges roundings to as much as a fault makes"
_SHOWN = 200  # characters of a reason


class Seen(NamedTuple):
    """What a judge said of a cell.

    Attributes:
        judge: its name, of `JUDGES`.
        label, attribute, value: the cell.
        why: empty if the target computes the same, or why nothing is known of it.
        far: the difference to what transformers computes, as a share of the largest logit.
        effect: that of the model without the change; None if it has other weights.
    """

    judge: str
    label: str
    attribute: str
    value: str
    why: str
    far: float | None = None
    effect: float | None = None

    @property
    def cell(self) -> tuple[str, str, str, str]:
        """Its place in the table."""
        return self[:4]


def system_of(judge: str) -> str:
    """The system whose files a judge reads."""
    return judge.removesuffix(WRITTEN)


def carried(judges: Iterable[str] = JUDGES) -> Iterator[tuple[str, str, str, str]]:
    """System, class, attribute and value of each cell that the table calls carried, and that changes the outputs."""
    wanted = {system_of(name) for name in judges}
    for label in BASES:
        for attribute, by in golden(label).items():
            for value, row in by.items():
                if row["changes"] != "no":
                    for system in sorted(wanted & row.keys()):
                        if row[system] == "carried":
                            yield system, label, attribute, value


def judge_class(label: str, judges: Mapping[str, Judge], known: set[tuple[str, ...]]) -> Iterator[Seen]:
    """Judge the carried cells of a class.

    Args:
        label: the class.
        judges: by their names.
        known: name of a judge, class, attribute and value of what is left out.
    """
    there = {cell for cell in carried(judges) if cell[1] == label}
    cells = {(name, *cell[1:]) for name in judges for cell in there if cell[0] == system_of(name)} - known
    references = References(label)
    for number, case in enumerate(all_cases(label) if cells else ()):
        wanted = [name for name in judges if (name, label, case.attribute, case.text) in cells]
        if wanted:
            yield from _judged(case, number, {name: judges[name] for name in wanted}, references)


class References:
    """What a class computes without a change, for each set of attributes that change together with another."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._known: dict[str, np.ndarray | None] = {}

    def logits(self, case: Case) -> np.ndarray | None:
        """The logits; None if transformers has no such model."""
        assert case.change is not None
        key = repr(sorted(case.change.also.items()))
        if key not in self._known:
            try:
                with temporary_folder("walk") as folder:
                    save(Path(folder, "reference"), self._label, case.named_change, reference=True)
                    self._known[key] = logits(Path(folder, "reference"), self._label)[0]
            except Exception:
                self._known[key] = None
        return self._known[key]


def _judged(case: Case, number: int, judges: Mapping[str, Judge], references: References) -> Iterator[Seen]:
    shaped = golden(case.label)[case.attribute][case.text]["changes"] == "shape"
    with temporary_folder("walk") as folder:
        source = save(Path(folder, "source"), case.label, case.named_change)
        wanted = logits(source, case.label)[0]
        without = None if shaped else references.logits(case)
        effect = None if without is None or without.shape != wanted.shape else distance(wanted, without)
        for name, judge in judges.items():
            routes = routes_of(case.label, system_of(name))
            route = routes[number % len(routes)]
            target = Path(folder, name)
            stopped = converted(
                "there",
                source,
                target,
                route._replace(options={**route.options, **judge.options(case.label)}),
            )
            far, why = None, f"{stopped.word}: {stopped.detail}" if stopped is not None else ""
            if stopped is None:
                strip(target, source, keep=route.to.startswith("huggingface"))
                rounded = (
                    wanted if judge.rounds is None else logits(source, case.label, change=judge.rounds)[0]
                )
                try:
                    found = judge.logits(target, tokens().numpy(), case.label, source)
                    far = distance(found, rounded) if found.shape == rounded.shape else float("inf")
                    why = reason(far, effect, judge.allowed)
                    if far > judge.allowed:  # a model may enlarge what float32 rounds
                        single = logits(source, case.label, dtype="float32")[0]
                        enlarged = _ENLARGED * distance(single, wanted)
                        why = _SHAKY if enlarged > max(far, _LARGEST) else reason(far, effect, enlarged)
                except JudgeError as error:
                    why = "does not load: " + str(error).strip().splitlines()[-1]
            yield Seen(name, case.label, case.attribute, case.text, why[:_SHOWN], far, effect)


def reason(far: float, effect: float | None, allowed: float) -> str:
    """Why a difference does not show that the target computes the same; empty if it does.

    Args:
        far: the difference.
        effect: what the change changes; None if the model has other weights with it.
        allowed: what the library's roundings may change.
    """
    if far > allowed:
        return f"differs by {far:.1e}"
    if effect is not None and far * _TIMES > effect:
        return "the library rounds more than the value changes"
    return ""


def collected(seen: Iterable[Seen], table: dict[str, Any]) -> dict[str, Any]:
    """The golden file: judge → its library, and of each class the values that are judged, and why the others are not.

    Args:
        seen: what was judged.
        table: the file as it was.
    """
    by: dict[tuple[str, str], list[Seen]] = {}
    for one in seen:
        by.setdefault((one.judge, one.label), []).append(one)
    for (name, label), rows in by.items():
        entry = table.setdefault(name, {"by": "", "classes": {}})
        entry["by"] = judge_for(name).name
        judged: dict[str, list[str]] = {}
        unseen: dict[str, dict[str, str]] = {}
        for one in rows:
            if one.why:
                unseen.setdefault(one.attribute, {})[one.value] = one.why
            else:
                judged.setdefault(one.attribute, []).append(one.value)
        entry["classes"][label] = {"judged": judged, "unseen": unseen}
    return table


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--judges", choices=JUDGES, nargs="+", default=JUDGES, help="ask these judges")
    parser.add_argument("--only", choices=BASES, nargs="+", default=list(BASES), help="judge these classes")
    parser.add_argument("--notes", type=Path, help="where each cell is written as soon as it is judged")
    arguments = parser.parse_args()
    with ExitStack() as stack:
        prepare(stack.enter_context(temporary_folder("walk")))
        notes = arguments.notes or Path(stack.enter_context(tempfile.TemporaryDirectory()), "notes.jsonl")
        judges = {name: stack.enter_context(judge_for(name)) for name in arguments.judges}
        seen = noted(notes)
        stream = stack.enter_context(notes.open("a", buffering=1))
        for label in arguments.only:
            for one in judge_class(label, judges, {row.cell for row in seen}):
                seen.append(one)
                print(json.dumps(one), file=stream)
                if one.why:
                    print(*one, flush=True)
    old = json.loads(JUDGED.read_text()) if JUDGED.is_file() else {}
    named = [one for one in seen if one.judge in arguments.judges and one.label in arguments.only]
    JUDGED.write_text(json.dumps(collected(named, old), indent=1, sort_keys=True) + "\n")
    print(f"{sum(not one.why for one in named)} of {len(named)} cells are judged")
    return int(any(one.why.startswith("differs") for one in named))


def noted(notes: Path) -> list[Seen]:
    """What a run noted before it was interrupted."""
    lines = notes.read_text().splitlines() if notes.is_file() else []
    return [Seen(*json.loads(line)) for line in lines if line.endswith("]")]


if __name__ == "__main__":
    sys.exit(main())
