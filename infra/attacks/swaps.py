"""Converts what a route finds while another process exchanges its folder and files for links, again and again.

    PYTHONPATH=. python infra/attacks/swaps.py --rounds 10000

Each round surveys the route, or explains the run as an event does, and converts what that gives. Links lead to files
that nobody may read, and to a neighbour below the same root. Counted are rounds that gave the original or the whole
neighbour, that were refused with an error of wherry, that took in a byte from outside (leaks) or values of both
(mixes), or ended in any other way (outside). The counts are written to infra/attack-swaps.json. Exit code 1: a leak, a
mix or an error outside the tree.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from safetensors.numpy import save_file

if TYPE_CHECKING:
    from wherry.config.config import Config
    from wherry.core.request import SourceRequest
    from wherry.nightly.routes import RouteTarget

RESULTS = Path(__file__).resolve().parents[1] / "attack-swaps.json"
SECRET = "what only this user may read"
VALUES = {"runs/group/run": 1, "runs/near": 2, "private/run": 42}
HELD, APART = 0.01, 0.1  # seconds at most; about one exchange falls into a conversion, at any moment of it
_EXCHANGE, _AT_FDCWD = 2, -100
_CONFIG = """
[routes.r]
root = "{root}/runs"
runs = ["group/run"]
select = "all"
min_age = 0

[[routes.r.targets]]
format = "huggingface"
family = "none"
uri = "{root}/out/{{run}}"
"""


def make(root: Path) -> list[tuple[Path, Path]]:
    """The checkpoints and the configuration; returns what is exchanged: a place, and the link that takes it."""
    for name, value in VALUES.items():
        folder = root / name
        folder.mkdir(parents=True)
        for number in range(3):
            tensors = {f"t{number}": np.full((64, 3), value, "f4")}
            save_file(
                tensors, folder / f"model-{number + 1:05}-of-00003.safetensors", metadata={"format": "pt"}
            )
        files = {f"t{number}": f"model-{number + 1:05}-of-00003.safetensors" for number in range(3)}
        index = {"metadata": {"total_size": 3 * 64 * 3 * 4}, "weight_map": files}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        (folder / "config.json").write_text(json.dumps({"value": value}))
        (folder / "notes.txt").write_text(SECRET if value == VALUES["private/run"] else f"of {value}")
    (root / "wherry.toml").write_text(_CONFIG.format(root=root))
    links = root / "runs" / ".links"
    links.mkdir()
    run, pairs = root / "runs" / "group" / "run", []
    for number, (place, leads) in enumerate(
        [
            (run, root / "private" / "run"),
            (run, Path("..", "..", "private", "run")),
            (run.parent, root / "private"),
            (run.parent, Path("..", "private")),
            (run, root / "runs" / "near"),
            (run / "model-00002-of-00003.safetensors", root / "private/run/model-00002-of-00003.safetensors"),
            (run / "notes.txt", root / "private/run/notes.txt"),
            (run / "notes.txt", root / "runs" / "near" / "notes.txt"),
        ]
    ):
        link = links / str(number)
        link.symlink_to(leads)
        pairs.append((place, link))
    return pairs


def exchange(place: Path, other: Path) -> None:
    """Exchange two names in one step."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(_AT_FDCWD, os.fsencode(place), _AT_FDCWD, os.fsencode(other), _EXCHANGE):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(place))


def swap_forever(pairs: Sequence[tuple[Path, Path]], counter: Path, seed: int) -> None:
    """Exchange and restore one pair after another until this process is killed; a byte of the file counts each."""
    chance = random.Random(seed)
    with counter.open("ab", buffering=0) as counted:
        while True:
            place, link = chance.choice(pairs)
            exchange(place, link)
            time.sleep(chance.random() * HELD)
            exchange(place, link)
            counted.write(b".")
            time.sleep(chance.random() * APART)


def sources(read: Config, uri: str, number: int) -> Iterator[tuple[SourceRequest, Sequence[RouteTarget]]]:
    """The request and targets that the route gives: of a survey in every second round, else of an event."""
    from wherry.core.request import SourceRequest
    from wherry.formats.detect import resolve_source
    from wherry.nightly.routes import explain, wanted_targets
    from wherry.nightly.survey import survey

    [route] = read.routes
    if number % 2:
        for one in survey(route):
            yield route.source(one.found), wanted_targets(route, one.found, one.where)
        return
    [row] = explain(uri, read)
    if row.takes:
        found = resolve_source(SourceRequest(uri, below=route.root))[1]
        yield route.source(found), row.targets


def outcome(target: Path) -> str:
    """What a target is made of."""
    import wherry

    if any(SECRET.encode() in file.read_bytes() for file in target.rglob("*") if file.is_file()):
        return "leaks"
    with wherry.open(target) as found:
        values = {int(value) for number in range(3) for value in np.unique(found.read(f"t{number}"))}
    values.add(json.loads((target / "config.json").read_text())["value"])
    if VALUES["private/run"] in values:
        return "leaks"
    if values == {VALUES["runs/group/run"]}:
        return "original"
    return "neighbour" if values == {VALUES["runs/near"]} else "mixes"


def attack(rounds: int, root: Path, seed: int) -> dict[str, object]:
    """Run the rounds; returns the counts."""
    pairs = make(root)
    os.environ |= {"WHERRY_HOME": str(root / "home"), "WHERRY_SETTLE_SECONDS": "0"}
    from wherry.config.config import load_config
    from wherry.converter.convert import convert_all
    from wherry.core.request import convert_request
    from wherry.errors import WherryError

    read, uri, target = (
        load_config(root / "wherry.toml"),
        str(root / "runs/group/run"),
        root / "out/group/run",
    )
    found, refused, counter = Counter[str](), Counter[str](), root / "count"
    began, attacker = time.monotonic(), os.fork()
    if attacker == 0:
        os.nice(5)
        swap_forever(pairs, counter, seed)
    try:
        pause = random.Random(seed + 1)
        for number in range(rounds):
            time.sleep(pause.random() * HELD)  # a refusal is fast: the next round is not of the same exchange
            try:
                done = False
                for source, targets in sources(read, uri, number):
                    ends = [one.rule.at(one.uri) for one in targets]
                    request = convert_request("x", ends, lineage=False)
                    convert_all(replace(request, source=source))
                    done = True
                    found[outcome(target)] += 1
                if not done:
                    found["not taken"] += 1
            except WherryError as error:
                refused[type(error).__name__] += 1
            except Exception as error:  # noqa: BLE001  any other error is what is searched for
                found["outside"] += 1
                print(f"round {number}: {type(error).__name__}: {error}", file=sys.stderr)
            shutil.rmtree(root / "out", ignore_errors=True)
    finally:
        os.kill(attacker, 9)
        os.waitpid(attacker, 0)
    counts = {
        name: found[name] for name in ("original", "neighbour", "not taken", "leaks", "mixes", "outside")
    }
    return {
        "rounds": rounds, **counts, "refused": dict(sorted(refused.items())),
        "exchanges": counter.stat().st_size, "seconds": round(time.monotonic() - began),
        "machine": f"{platform.machine()}, Linux {platform.release()}, Python {platform.python_version()}",
    }  # fmt: skip


def main(words: Sequence[str] | None = None) -> int:
    """Attack, and write the counts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=1000, help="conversions (default: 1000)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments of the exchanges")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FILE", help="file for the counts")
    options = parser.parse_args(words)
    with tempfile.TemporaryDirectory(prefix="wherry-swaps-") as folder:
        found = attack(options.rounds, Path(os.path.realpath(folder)), options.seed)
    text = json.dumps(found, indent=1)
    options.results.write_text(f"{text}\n")
    print(text)
    return 1 if found["leaks"] or found["mixes"] or found["outside"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
