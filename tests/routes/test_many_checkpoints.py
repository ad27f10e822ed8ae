"""Many small checkpoints in one process: processor time and memory per checkpoint do not grow."""

from __future__ import annotations

import gc
import os
import time
import tracemalloc

import numpy as np
from safetensors.numpy import save_file

import wherry
from wherry.config.config import load_config
from wherry.routes.night import run_night
from wherry.routes.routes import chosen_routes


def sources(folder, count):
    """Checkpoints that have been left alone for a long time."""
    for number in range(count):
        place = folder / f"r{number}" / "checkpoint-1"
        place.mkdir(parents=True)
        save_file({"w": np.full((8, 4), number, "f4")}, place / "model.safetensors")
        for path in (place / "model.safetensors", place, place.parent):
            os.utime(path, (1e9, 1e9))
    return folder


def test_conversions_in_one_process(own_home, tmp_path):
    places = sorted(sources(tmp_path / "runs", 33).glob("*/*"))

    def converted(some):
        began = time.process_time()
        for place in some:
            wherry.convert(place, tmp_path / "out" / place.parent.name, to="orbax")
        return time.process_time() - began

    converted(places[:3])  # imports, the ledger's tables
    first = converted(places[3:13])
    gc.collect()
    tracemalloc.start()
    later = [converted(places[13:23])]
    gc.collect()
    held = tracemalloc.get_traced_memory()[0]
    later.append(converted(places[23:]))
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0] - held
    tracemalloc.stop()
    assert later[1] < 2 * later[0]
    assert later[1] < 10 * first  # tracing costs several times the work
    assert grown < 200_000


def test_a_night_of_many_checkpoints(own_home, tmp_path):
    few, many = (night(tmp_path / str(count), count) for count in (6, 30))
    assert many < 10 * few


def night(folder, count):
    sources(folder / "runs", count)
    (folder / "wherry.toml").write_text(
        f'[routes.r{count}]\nroot = "{folder}/runs"\n[[routes.r{count}.targets]]\n'
        f'format = "orbax"\nuri = "{folder}/out/{{run}}/{{step}}"\n'
    )
    loaded = load_config(folder / "wherry.toml")
    began = time.process_time()
    report = run_night(loaded, chosen_routes(loaded), go=True)
    assert dict(report.counts) == {"converted": count}
    return time.process_time() - began
