"""The pass over a view: groups hang together, every tensor is in one, and what was decoded goes with its group."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

import wherry
from wherry.core.threads import Crew
from wherry.errors import MismatchError
from wherry.mover.decode import Spill
from wherry.transform import groups as view_pass
from wherry.transform.groups import groups

NAMES = [("a",), ("b",), ("c",), ("d",), ("e",)]


@given(
    st.dictionaries(st.integers(0, 9).map(lambda n: (f"t{n}",)), st.sets(st.sampled_from(NAMES), max_size=3)),
    st.dictionaries(st.sampled_from(NAMES), st.integers(0, 100)),
    st.integers(0, 200),
)
def test_every_tensor_is_in_one_group_with_all_that_it_needs(needs, sizes, limit):
    sizes = {name: sizes.get(name, 7) for name in NAMES}
    found = list(groups(needs, sizes, limit))
    assert sorted(path for one in found for path in one.sources) == NAMES
    assert sorted(path for one in found for path in one.targets) == sorted(needs)
    for one in found:
        assert all(needs[target] <= set(one.sources) for target in one.targets)
        pieces = list(
            groups({target: needs[target] for target in one.targets}, dict.fromkeys(one.sources, 1), 0)
        )
        assert sum(sizes[path] for path in one.sources) <= limit or len([p for p in pieces if p.sources]) <= 1


@pytest.fixture
def stacks(tmp_path):
    """A checkpoint in zstd chunks: eight layers that are stacked, and what is left alone."""
    rng = np.random.default_rng(0)
    tree = {f"layers_{number}.w": rng.normal(size=(600, 600)).astype(np.float32) for number in range(8)}
    tree["other"] = rng.normal(size=(700, 900)).astype(np.float32)
    save_file(tree, tmp_path / "a.safetensors")
    options = {"compression": "zstd", "chunks": "2x2", "split": "."}
    wherry.convert(tmp_path / "a.safetensors", tmp_path / "orbax", to="orbax", options=options)
    return tmp_path / "orbax", tree


@pytest.mark.parametrize("limit", [0, 4 << 20, 1 << 30])
def test_whatever_the_groups_the_result_is_the_same(stacks, tmp_path, monkeypatch, limit):
    monkeypatch.setattr(view_pass, "GROUP_BYTES", limit)
    monkeypatch.setattr(view_pass, "groups", lambda needs, sizes: groups(needs, sizes, limit))
    source, tree = stacks
    options = {"scan": "layers_{layers} -> layers:0", "join": "."}
    done = wherry.convert(source, tmp_path / "out.safetensors", to="safetensors", options=options)
    found = load_file(tmp_path / "out.safetensors")
    plain = wherry.convert(source, tmp_path / "plain", to="orbax")
    assert done.source.checkpoint_digest == plain.source.checkpoint_digest
    stacked = np.stack([tree[f"layers_{number}.w"] for number in range(8)])
    (name,) = set(found) - {"other"}
    assert np.array_equal(found[name], stacked)
    assert np.array_equal(found["other"], tree["other"])


def test_a_source_that_is_not_what_was_recorded_leaves_nothing(stacks, tmp_path):
    plain = tmp_path / "plain"
    wherry.convert(stacks[0], plain, to="orbax", options={"compression": "none", "ocdbt": "false"})
    chunk = next(
        path for path in sorted(plain.rglob("*")) if path.is_file() and path.stat().st_size > 1 << 20
    )
    data = bytearray(chunk.read_bytes())
    data[1000] ^= 1
    chunk.write_bytes(data)
    before = sorted(os.listdir(tmp_path))
    options = {"scan": "layers_{layers} -> layers:0"}
    with pytest.raises(MismatchError, match="changed since it was recorded") as caught:
        wherry.convert(plain, tmp_path / "out", to="orbax", options=options)
    assert caught.value.path == "layers_0/w"
    assert sorted(os.listdir(tmp_path)) == before


def test_files_go_with_their_group(stacks, tmp_path, monkeypatch):
    most, real = [], Spill._complete

    def complete(self, key, file, decode):
        real(self, key, file, decode)
        most.append(len(os.listdir(file.path.parent)))

    monkeypatch.setattr(Spill, "_complete", complete)
    monkeypatch.setattr(view_pass, "KEPT_BYTES", 0)
    monkeypatch.setattr(view_pass, "groups", lambda needs, sizes: groups(needs, sizes, 0))
    source, _tree = stacks
    options = {"scan": "layers_{layers} -> layers:0", "join": "."}
    wherry.convert(source, tmp_path / "out.safetensors", to="safetensors", options=options)
    assert max(most) <= 9
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".wherry")]


PROGRAM = """
import json, os, sys
import wherry
from wherry.mover import output
from wherry.core import threads
from wherry.transform import groups
fatal, calls, real = int(sys.argv[3]), 0, os.pwrite
def deadly(*arguments):
    global calls
    calls += 1
    if calls == fatal:
        os.kill(os.getpid(), 9)
    return real(*arguments)
os.pwrite = deadly
threads.worker_count = lambda: 1
output._GROUP_SECONDS, output._GROUP_BYTES = 1e9, 1 << 20
groups.groups = lambda needs, sizes, real=groups.groups: real(needs, sizes, 0)
options = {"scan": "layers_{layers} -> layers:0", "join": "."}
done = wherry.convert(sys.argv[1], sys.argv[2], to="safetensors", options=options, lineage=False)
print(json.dumps([calls, done.resumed_bytes, done.source.checkpoint_digest, done.target.checkpoint_digest]))
"""


def run(source, target, fatal):
    command = [sys.executable, "-c", PROGRAM, str(source), str(target), str(fatal)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == (-signal.SIGKILL if fatal else 0), done.stderr
    return json.loads(done.stdout) if done.returncode == 0 else None


def test_killed_at_any_write_it_goes_on_and_ends_the_same(stacks, tmp_path):
    source, _tree = stacks
    calls, resumed, *digests = run(source, tmp_path / "undisturbed", 0)
    assert resumed == 0
    taken_up = []
    for fatal in range(calls, 0, -(calls // 6)):
        target = tmp_path / f"out{fatal}.safetensors"
        run(source, target, fatal)
        assert not target.exists()
        _calls, resumed, *found = run(source, target, 0)
        taken_up.append(resumed)
        assert found == digests
    assert max(taken_up) > 0
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".wherry-out")]


def test_a_crew_ends_at_the_first_error():
    crew, done = Crew(), []

    def fail():
        raise ValueError("this one")

    def tasks():
        for number in range(1000):
            yield fail if number == 5 else lambda number=number: done.append(number)
            if crew.stopped.wait(0):
                return

    with pytest.raises(ValueError, match="this one"):
        crew.work(tasks(), 3, numbers=False)
    assert crew.stopped.is_set()
    assert len(done) < 1000


def test_a_crew_does_every_task_once():
    crew, done, lock = Crew(), [], threading.Lock()

    def task(number):
        with lock:
            done.append(number)

    crew.work((lambda number=number: task(number) for number in range(500)), 8, numbers=False)
    assert sorted(done) == list(range(500))
