"""A good guest: whenever a program that uses wherry ends, forks or gets a signal, nothing hangs and nothing is printed.

Each program has threads that convert, and an export in the background; it forks children that end at once, that end
like a program, or that convert as well, and ends itself at a random moment. Everything follows from its seed.
"""

from __future__ import annotations

import collections
import random
import signal
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import save_file

FORKS = 9  # of each program, which is an exit itself
PROGRAM = """
import os, random, sys, threading, time
import numpy as np
import wherry

seed, source, folder, forks = int(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
chance = random.Random(seed)
count = 0

def convert(name):
    try:
        wherry.convert(source, f"{folder}/{name}", to="dcp")
    except wherry.WherryError as error:
        if "was forked" not in str(error):
            raise

def loop(which):
    for turn in range(chance.randrange(1, 4)):
        convert(f"thread-{which}-{turn}")

threads = [
    threading.Thread(target=loop, args=(which,), daemon=chance.random() < 0.5) for which in range(chance.randrange(3))
]
for thread in threads:
    thread.start()
if chance.random() < 0.6:
    state = {"w": np.zeros((chance.randrange(1, 64), 65536), np.float32)}
    handle = wherry.export(state, f"{folder}/export", to="safetensors")
for number in range(forks):
    time.sleep(chance.uniform(0, 0.05))
    how = chance.choice(["at once", "as a program", "after a conversion"])
    child = os.fork()
    if not child:
        if how == "after a conversion":
            convert(f"child-{number}")
        if how == "at once":
            os._exit(0)
        sys.exit(0)
    deadline = time.monotonic() + 60
    while not (ended := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < deadline:
        time.sleep(0.01)
    if not ended[0]:
        os.kill(child, 9)
        print("hangs:", how, flush=True)
    else:
        print(f"{how}: {os.waitstatus_to_exitcode(ended[1])}", flush=True)
time.sleep(chance.uniform(0, 0.3))
"""


@pytest.fixture
def source(tmp_path):
    save_file({"w": np.ones((64, 1024), np.float32)}, tmp_path / "s.safetensors")
    return tmp_path / "s.safetensors"


def programs(seeds, source, tmp_path, monkeypatch):
    """How the programs of some seeds and their children ended, by kind, and what they printed as an error."""
    found, errors = collections.Counter(), []
    for seed in seeds:
        folder = tmp_path / str(seed)
        folder.mkdir()
        monkeypatch.setenv("WHERRY_HOME", str(folder / "home"))
        command = [sys.executable, "-c", PROGRAM, str(seed), str(source), str(folder), str(FORKS)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        found.update(done.stdout.splitlines())
        found[f"program: {done.returncode}"] += 1
        if done.stderr:
            errors.append(f"seed {seed}: {done.stderr}")
    return found, errors


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("count", [2, pytest.param(100, marks=pytest.mark.slow)])
def test_random_exits_and_forks_end_and_print_nothing(count, source, tmp_path, monkeypatch):
    found, errors = programs(range(count), source, tmp_path, monkeypatch)
    assert errors == []
    assert {name.rpartition(" ")[2] for name in found} == {"0"}, found
    assert sum(found.values()) == count * (FORKS + 1)


def test_a_forked_process_does_not_wait_for_the_export_of_its_parent(tmp_path):
    code = """
import multiprocessing, sys, threading
import numpy as np, wherry
go = threading.Event()
handle = wherry.export({"w": np.zeros(9, np.float32)}, sys.argv[1], to="npz", options={"join": "."},
                       on_done=lambda _: go.wait(60))
def look():
    try:
        handle.result(60)
    except wherry.WherryError as error:
        print(error.exit_code, error.what)
child = multiprocessing.get_context("fork").Process(target=look)
child.start()
child.join(30)
print(child.exitcode, handle.done())
go.set()
handle.result()
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "x.npz")],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    lines = [line for line in done.stderr.splitlines() if "waiting for the export to end" not in line]
    assert lines == [], "on a busy machine the parent waits for seconds, and says so"
    assert done.stdout == "2 the export runs in another process, which forked this one\n0 False\n"


FORK_IN_AN_IMPORT = """
import os, signal, sys, threading
from importlib.util import find_spec
import wherry
begun, go, parent, slow = threading.Event(), threading.Event(), os.getpid(), sys.argv.pop(1)
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name != slow or os.getpid() != parent:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        real = spec.loader.exec_module
        def run(module):
            begun.set()
            go.wait(60)
            real(module)
        spec.loader.exec_module = run
        return spec
sys.meta_path.insert(0, Finder())
thread = threading.Thread(target=lambda: wherry.convert)
thread.start()
assert begun.wait(60), f"{slow} is not imported"
child = os.fork()
if not child:
    signal.alarm(30)
    wherry.convert(*sys.argv[1:], to="dcp")
    sys.exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
go.set()
thread.join()
"""


@pytest.mark.parametrize(
    "slow",
    [
        "wherry.converter.convert",
        pytest.param("wherry.core.forks", marks=pytest.mark.full),
        pytest.param("logging", marks=pytest.mark.full),
    ],
)
def test_a_child_that_was_forked_in_the_first_import_converts(source, tmp_path, slow):
    words = [sys.executable, "-c", FORK_IN_AN_IMPORT, slow, str(source), str(tmp_path / "o")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=200, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", "")
    assert (tmp_path / "o" / ".metadata").exists()


@pytest.mark.parametrize("daemon", [True, False])
def test_a_program_that_ends_waits_for_a_conversion_in_a_thread(source, tmp_path, daemon):
    code = (
        "import sys, threading, wherry\n"
        f"threading.Thread(target=lambda: wherry.convert(*sys.argv[1:], to='dcp'), daemon={daemon}).start()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(source), str(tmp_path / "o")], capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "o" / ".metadata").exists() or daemon, "a daemon may end before it has begun"


AFTER_COMMIT = """
import os, signal, sys
from wherry.ledger import record
real, times = record.record_all, int(sys.argv.pop(1))
def interrupted(receipts):
    for _ in range(times):
        os.kill(os.getpid(), signal.SIGTERM)
    return real(receipts)
import wherry.converter.convert as convert
convert.record_all = interrupted
from wherry.__main__ import main
main()
"""


@pytest.mark.parametrize(("times", "code"), [(1, 0), (2, 12)])
def test_after_the_commit_one_signal_changes_nothing_and_the_second_says_what_is_missing(
    source, tmp_path, times, code
):
    words = ["convert", str(source), str(tmp_path / "o"), "--to", "dcp", "--quiet"]
    command = [sys.executable, "-c", AFTER_COMMIT, str(times), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == code, done.stderr
    assert (tmp_path / "o" / ".metadata").exists()
    assert "is being committed and recorded; interrupt again to end without that" in done.stderr
    assert ("wherry ledger record" in done.stderr) == (times == 2)
    assert "Traceback" not in done.stderr


IN_AN_IMPORT = """
import os, signal, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv_name:
            sys.meta_path.remove(self)
            print("sent", flush=True)
            os.kill(os.getpid(), {signal})
            return None
sys.argv_name = sys.argv.pop(1)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a run in the background ignores it
sys.meta_path.insert(0, Finder())
from wherry.__main__ import main
main()
"""


@pytest.mark.parametrize(
    ("module", "sent"),
    [
        ("wherry.cli", "SIGTERM"),
        ("click", "SIGINT"),
        ("numpy", "SIGINT"),
        ("numpy.linalg", "SIGTERM"),
        ("sqlite3", "SIGINT"),
    ],
)
def test_a_signal_in_the_middle_of_an_import_is_an_interrupt(source, tmp_path, module, sent):
    code = IN_AN_IMPORT.replace("{signal}", f"signal.{sent}")
    words = ["convert", str(source), str(tmp_path / "o"), "--to", "orbax", "--quiet"]
    done = subprocess.run(
        [sys.executable, "-c", code, module, *words], capture_output=True, text=True, timeout=120, check=False
    )
    assert "sent" in done.stdout, f"{module} is not imported"
    there = (tmp_path / "o" / ".metadata").exists()
    assert done.returncode == (0 if there else 130), done.stderr
    assert there or done.stderr.lstrip().startswith("error: interrupted before completion")
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_signal_at_a_random_moment_ends_with_130_or_the_target(source, tmp_path):
    chance, found = random.Random(7), collections.Counter()
    for number in range(60):
        target = tmp_path / f"o{number}"
        words = ["convert", str(source), str(target), "--to", "dcp", "--quiet"]
        process = subprocess.Popen(
            [sys.executable, "-m", "wherry", *words],
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
        try:
            process.wait(chance.uniform(0.1, 2))
        except subprocess.TimeoutExpired:
            process.send_signal(chance.choice([signal.SIGINT, signal.SIGTERM]))
        errors = process.communicate(timeout=120)[1]
        found[process.returncode, target.exists(), "Traceback" in errors] += 1
    # Before the interpreter runs wherry, SIGTERM ends it as any process, and Python prints its own KeyboardInterrupt.
    assert set(found) <= {(0, True, False), (130, False, False), (-15, False, False), (-2, False, True)}, (
        found
    )
