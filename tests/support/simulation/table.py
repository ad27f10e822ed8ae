"""Writes tests/target/planted.toml: the first seed that finds each planted fault, and what it says.

    python -m tests.support.simulation.table [NAME...]

Faults that are not named keep their rows.
"""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path

from tests.support.simulation.planted import PLANTED, plant
from tests.support.simulation.scenario import first_broken, simulations

TABLE = Path(__file__).resolve().parents[2] / "target" / "planted.toml"
HEAD = (
    "# The first seed that finds each planted fault; `python -m tests.support.simulation.table` writes it.\n"
)
_MOST = 10_000
_BRIEF = 100


def write(names):
    """Look for the faults again, and write the table."""
    known = tomllib.loads(TABLE.read_text()) if TABLE.exists() else {}
    with simulations():
        for name in names:
            with plant(name):
                found = first_broken(range(_MOST), PLANTED[name][0])
            print(name, found and found.seed, found and found.broken[:_BRIEF], flush=True)
            if found is None:
                known.pop(name, None)
            else:
                known[name] = {"store": PLANTED[name][0], "seed": found.seed, "found": _brief(found.broken)}
            rows = [f"\n[{one}]\n{_rows(known[one])}" for one in PLANTED if one in known]
            TABLE.write_text(HEAD + "".join(rows))


def _rows(row):
    return "".join(f"{key} = {json.dumps(value)}\n" for key, value in row.items())


def _brief(text):
    line = text.partition("\n")[0]
    return line if len(line) <= _BRIEF else f"{line[:_BRIEF]} …"


if __name__ == "__main__":
    write(sys.argv[1:] or list(PLANTED))
