"""infra/attack: a short run of it notices what it must and finds nothing; the README has the results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from infra.attacks import parsers, prepare, report, swaps, verbs
from infra.attacks.watch import Watch
from wherry.cli import cli

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"}


def attacked(tmp_path, *words):
    """The exit code and the results of a run."""
    command = [sys.executable, "-m", "infra.attacks", "--results", str(tmp_path), "--systems", "none", *words]
    done = subprocess.run(
        command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=500, check=False
    )
    results = tmp_path / "attack-results.json"
    assert results.exists(), done.stderr
    return done.returncode, json.loads(results.read_text()), done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="forks, and reads /proc")
def test_a_short_run_notices_the_controls_and_finds_nothing(tmp_path, record_property):
    code, found, said = attacked(tmp_path, "--only", "files", "--cases", "24", "--seed", "7")
    assert "notices what it must" in said
    assert found["cases"] == {"files": 24}
    assert found["runs"] == 24 * len(found["verbs"])
    assert (code, found["faults"], found["found"]) == (0, 0, [])
    assert found["codes"]["6"] > 10  # some of it is refused as hostile
    assert "| files | 24 |" in (tmp_path / "attack-results.md").read_text()
    record_property("hostile runs", found["runs"])


@pytest.mark.skipif(sys.platform != "linux", reason="forks, and reads /proc")
def test_a_short_run_against_web_servers_finds_nothing(tmp_path):
    code, found, _said = attacked(tmp_path, "--only", "servers", "--match", "server-data/range-")
    assert found["cases"]["servers"] >= 9
    assert found["runs"] == found["cases"]["servers"] * len(found["verbs"])
    assert (code, found["faults"], found["found"]) == (0, 0, [])
    assert found["codes"]["10"] > 10  # what no server may answer
    assert found["codes"]["0"] > 10  # wherry reads the answers: the lie is only about the tensors, or no lie


@pytest.mark.skipif(sys.platform != "linux", reason="forks, and reads /proc")
def test_a_short_run_over_situations_finds_nothing(tmp_path):
    """Each kind: names of runs, events, races, files of another user, bytes of signatures."""
    code, found, _said = attacked(tmp_path, "--only", "situations", "--cases", "5", "--seed", "3")
    assert found["cases"] == {"situations": 10}
    assert found["runs"] == 5 * len(found["verbs"]) + 5 * 2
    assert (code, found["faults"], found["found"]) == (0, 0, [])


def test_single_parsers_by_chance_find_nothing(tmp_path):
    prepare.write_seeds(tmp_path)
    for name in ("gguf", "tensor bundle", "yaml config", "ocdbt node"):
        folder = tmp_path / name
        folder.mkdir()
        words = ["-m", "infra.attacks.parsers", name, str(tmp_path), str(folder), "200", "3", "chance"]
        command = [sys.executable, *words]
        subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, check=True, timeout=300)
        found = parsers.Fuzzed(**json.loads((folder / "counts.json").read_text()))
        assert (found.runs, found.faults, found.said) == (200, 0, [])
        assert found.refused > 20


def test_every_parser_of_the_table_can_be_called(tmp_path):
    """The module of one had moved, and each of its runs was a fault."""
    watch = Watch((str(tmp_path),), str(tmp_path))
    for name in parsers.PARSERS:
        runner = parsers.Runner(name, tmp_path, watch, parsers.Fuzzed(name, "chance"))
        runner(b"")
        assert (name, runner.counts.said) == (name, [])


def test_the_numbers_of_the_readme_are_those_of_the_results(tmp_path):
    data = json.loads((ROOT / "infra" / "attack-results.json").read_text())
    text = (ROOT / "README.md").read_text()
    assert report.readme_block(data) in text
    results = report.Results(data["machine"], data["commit"], data["commits"])
    results.join(data)
    page = (ROOT / "infra" / "attack-results.md").read_text()
    assert [row for row in report.markdown(results).splitlines() if row.startswith("|")] == [
        row for row in page.splitlines() if row.startswith("|")
    ]
    copy = tmp_path / "README.md"
    copy.write_text(text)
    report.put_into_readme(copy, {**data, "scanners": []})
    assert "| picklescan" not in copy.read_text()
    report.put_into_readme(copy, data)
    assert copy.read_text() == text


def test_the_results_are_of_a_whole_attack():
    data = json.loads((ROOT / "infra" / "attack-results.json").read_text())
    assert set(data["cases"]) == {"files", "bombs", "servers", "situations", "mutations"}
    assert data["cases"]["situations"] >= 190
    assert data["cases"]["servers"] >= 200
    assert data["cases"]["files"] >= 2000
    assert len({row["verb"] for row in data["verbs"] if row["phase"] == "files"}) >= 66
    assert data["cases"]["bombs"] >= 40
    assert data["cases"]["mutations"] >= 10_000
    assert sum(row["runs"] for row in data["parsers"]) >= 200_000
    assert {row["tool"] for row in data["scanners"]} == {"wherry", "picklescan", "modelscan", "fickling"}
    for name in ("executed", "hung", "over memory", "outside", "terminal"):
        assert not sum(row[name] for row in data["verbs"])
    assert not sum(
        row["executed"] + row["hung"] + row["over_memory"] + row["outside"] for row in data["parsers"]
    )


def leaves(group, above=()):
    """The names of all commands."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from leaves(command, (*above, name))
        else:
            yield " ".join((*above, name))


def test_every_command_is_attacked_or_has_a_reason():
    commands = set(leaves(cli))
    attacked = {line[0] if line[0] in commands else " ".join(line[:2]) for line in verbs.VERBS.values()}
    assert attacked <= commands
    assert commands - attacked == set(verbs.LEFT)
    assert all(len(reason) > 10 for reason in verbs.LEFT.values())


@pytest.mark.full
def test_a_short_race_finds_nothing(tmp_path):
    results = tmp_path / "counts.json"
    words = [sys.executable, "infra/attacks/swaps.py", "--rounds", "30", "--results", str(results)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(results.read_text())
    assert found["leaks"] == found["mixes"] == found["outside"] == 0
    ends = found["original"] + found["neighbour"] + found["not taken"] + sum(found["refused"].values())
    assert ends == found["rounds"] == 30


def test_a_parser_that_fails_hangs_or_grows_is_counted(tmp_path, monkeypatch):
    def parse(data, _folder):
        if data == b"fails":
            raise KeyError(data)
        if data == b"grows":
            held = bytearray(400 << 20)
            held[:: 1 << 12] = b"x" * len(held[:: 1 << 12])

    monkeypatch.setitem(parsers.PARSERS, "it", (parse, ()))
    runner = parsers.Runner(
        "it", tmp_path, Watch((str(tmp_path),), str(tmp_path)), parsers.Fuzzed("it", "chance")
    )
    for data in (b"fine", b"fails", b"grows"):
        runner(data)
    runner.finish()
    assert (runner.counts.runs, runner.counts.outside, runner.counts.over_memory) == (3, 1, 1)
    assert "KeyError" in runner.counts.said[0]


def test_a_watch_that_is_switched_off_stays_off(tmp_path, monkeypatch):
    """Also while another thread is inside the hook; and what that thread does not do is watched meanwhile."""
    watch, inside, go_on = Watch((str(tmp_path),), str(tmp_path)), threading.Event(), threading.Event()
    judge = Watch._judge

    def wait(self, event, values):
        if event == "slow":
            inside.set()
            assert go_on.wait(60)
        return judge(self, event, values)

    monkeypatch.setattr(Watch, "_judge", wait)
    watch.on = True
    thread = threading.Thread(target=watch._hook, args=("slow", ()))
    thread.start()
    assert inside.wait(60)
    watch._hook("os.system", ("whoami",))
    watch.on = False
    go_on.set()
    thread.join()
    assert watch.seen == ["os.system ('whoami',)"]
    assert not watch.on
    watch._hook("os.system", ("whoami",))
    assert len(watch.seen) == 1


@pytest.mark.parametrize(
    ("taken", "expected"),
    [
        ({}, "original"),
        ({"model-00002-of-00003.safetensors": "runs/near"}, "mixes"),
        ({"config.json": "runs/near"}, "mixes"),
        ({"model-00003-of-00003.safetensors": "private/run"}, "leaks"),
        ({"notes.txt": "private/run"}, "leaks"),
    ],
)
def test_what_a_target_took_in_is_noticed(tmp_path, taken, expected):
    swaps.make(tmp_path)
    run = tmp_path / "runs" / "group" / "run"
    for name, source in taken.items():
        (run / name).write_bytes((tmp_path / source / name).read_bytes())
    assert swaps.outcome(run) == expected
    assert swaps.outcome(tmp_path / "runs" / "near") == "neighbour"
