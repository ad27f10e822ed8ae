"""infra/attack: it notices what it must, a short run of it finds nothing, and its files are what they are called."""

import json
import os
import pickletools
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{ROOT / 'infra'}{os.pathsep}{ROOT}", "OPENBLAS_NUM_THREADS": "1"}


@pytest.fixture
def attacks(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.syspath_prepend(str(ROOT / "infra"))


def attacked(tmp_path, *words):
    """The exit code and the results of a run."""
    command = [sys.executable, "-m", "attacks", "--results", str(tmp_path), "--systems", "none", *words]
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


@pytest.mark.skipif(sys.platform != "linux", reason="forks, and reads /proc")
def test_a_short_run_over_situations_finds_nothing(tmp_path):
    """Each kind: names of runs, events, races, files of another user, bytes of signatures."""
    code, found, _said = attacked(tmp_path, "--only", "situations", "--cases", "5", "--seed", "3")
    assert found["cases"] == {"situations": 10}
    assert found["runs"] == 5 * len(found["verbs"]) + 5 * 2
    assert (code, found["faults"], found["found"]) == (0, 0, [])


@pytest.mark.skipif(sys.platform != "linux", reason="forks, and reads /proc")
@pytest.mark.parametrize("hanging", ["inspect", "verify present", "audit"])
def test_the_verb_that_hangs_is_named_and_the_others_run_once(hanging, tmp_path, attacks, monkeypatch):
    """A hang of a late verb was given to another one, or to none."""
    from attacks import verbs
    from attacks.case import Case
    from attacks.server import Server

    import wherry.cli

    (tmp_path / "home").mkdir()
    with sqlite3.connect(tmp_path / "home" / "mlflow.db") as store:
        store.execute("CREATE TABLE experiments (artifact_location TEXT)")
    words = verbs.VERBS[hanging][0]
    monkeypatch.setattr(wherry.cli, "main", lambda line: time.sleep(60) if line[0] == words else 0)
    server = Server(tmp_path, tmp_path, tmp_path / "home", tmp_path)
    names = list(verbs.LOOKING)
    found = list(server.examine(Case("a/b", lambda folder: folder), names, seconds=5.0))
    assert [run.verb for run in found] == names
    assert [run.verb for run in found if "hung" in run.faults] == [hanging]


def test_single_parsers_by_chance_find_nothing(tmp_path, attacks):
    from attacks import parsers, prepare

    prepare.write_seeds(tmp_path)
    for name in ("gguf", "tensor bundle", "yaml config", "ocdbt node"):
        folder = tmp_path / name
        folder.mkdir()
        command = [
            sys.executable,
            "-m",
            "attacks.parsers",
            name,
            str(tmp_path),
            str(folder),
            "200",
            "3",
            "chance",
        ]
        subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, check=True, timeout=300)
        found = parsers.Fuzzed(**json.loads((folder / "counts.json").read_text()))
        assert (found.runs, found.faults, found.said) == (200, 0, [])
        assert found.refused > 20


def test_every_parser_of_the_table_can_be_called(tmp_path, attacks):
    """The module of one had moved, and each of its runs was a fault."""
    from attacks import parsers
    from attacks.watch import Watch

    watch = Watch((str(tmp_path),), str(tmp_path))
    for name in parsers.PARSERS:
        runner = parsers.Runner(name, tmp_path, watch, parsers.Fuzzed(name, "chance"))
        runner(b"")
        assert (name, runner.counts.said) == (name, [])


def test_a_parser_that_fails_hangs_or_grows_is_counted(tmp_path, attacks, monkeypatch):
    from attacks import parsers
    from attacks.watch import Watch

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


def test_a_watch_that_is_switched_off_stays_off(tmp_path, attacks, monkeypatch):
    """Also while another thread is inside the hook; and what that thread does not do is watched meanwhile."""
    from attacks.watch import Watch

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


def test_every_maker_makes_what_it_is_called(tmp_path, attacks):
    from attacks import archives, arrays, bundles, case, heads, ledgers, pickles, texts

    makers = (pickles, archives, heads, arrays, texts, ledgers, bundles)
    found = case.require_unique([one for maker in makers for one in maker.cases()])
    kinds = Counter(one.kind for one in found)
    assert len(found) >= 2000
    assert {"pickle", "torch-zip", "torch-legacy", "npz", "safetensors", "gguf", "flax", "numpy", "ocdbt", "zarr-zstd",
            "zarr-gzip", "zarr-blosc", "tf-bundle", "dcp", "corpus", "ledger-forged",
            "bundle-forged"} <= set(kinds)  # fmt: skip
    for number, one in enumerate(found[:: len(found) // 60]):
        folder = tmp_path / str(number)
        folder.mkdir()
        assert one.make(folder).exists()
    with pytest.raises(ValueError, match="same name"):
        case.require_unique([found[0], found[0]])


def test_most_pickles_of_the_attack_are_sound_pickles_and_all_carry_the_payload(attacks):
    from attacks.pickles import forms

    kinds = forms("os", "system", "touch x")
    named = 0
    for data in kinds.values():
        try:
            list(pickletools.genops(data))
            named += 1
        except ValueError:  # those that lie about their frames or end, or name their global in bytes
            named += 0
    assert 30 < named < len(kinds)
    assert all(b"touch x" in data or name in ("frame-short", "reconstruct") for name, data in kinds.items())


def test_files_are_chosen_evenly(attacks):
    import argparse

    from attacks.__main__ import choose_cases
    from attacks.case import Case

    counts = {"a": 90, "b": 3, "c": 9}
    cases = [
        Case(f"{kind}/{number}", lambda folder: folder) for kind in counts for number in range(counts[kind])
    ]
    found = choose_cases(cases, argparse.Namespace(cases=15, match="", seed=0))
    assert Counter(one.kind for one in found) == {"a": 6, "b": 3, "c": 6}


def test_results_are_joined_if_those_of_a_part_are_of_one_commit(attacks):
    from attacks.case import Run
    from attacks.report import Results, markdown

    first, second = Results("m", "c"), Results("m", "c")
    first.add("files", Run("a", "detect", 0, megabytes=3.0))
    second.add("files", Run("b", "detect", 70, megabytes=5.0))
    second.cases["files"] = 1
    first.join(second.to_json())
    assert first.tried["files", "detect"] == 2
    assert (first.faults, first.peak, first.codes) == (1, 5.0, {0: 1, 70: 1})
    assert [run.case for run in first.found] == ["b"]
    assert "| files | 1 | 2 |" in markdown(first)
    assert "Commit c, m." in markdown(first)
    first.join(Results("m", "d", cases={"bombs": 3}).to_json())
    assert "Commits c (files), d (bombs), m." in markdown(first)
    with pytest.raises(ValueError, match="files of d cannot be joined to those of c"):
        first.join(Results("m", "d", cases={"files": 1}).to_json())


def test_the_numbers_of_the_readme_are_those_of_the_results(attacks, tmp_path):
    from attacks import readme
    from attacks.report import Results, markdown

    data = json.loads((ROOT / "infra" / "attack-results.json").read_text())
    text = (ROOT / "README.md").read_text()
    assert readme.block(data) in text
    results = Results(data["machine"], data["commit"], data["commits"])
    results.join(data)
    page = (ROOT / "infra" / "attack-results.md").read_text()
    assert [row for row in markdown(results).splitlines() if row.startswith("|")] == [
        row for row in page.splitlines() if row.startswith("|")
    ]
    copy = tmp_path / "README.md"
    copy.write_text(text)
    readme.put(copy, {**data, "scanners": []})
    assert "| picklescan" not in copy.read_text()
    readme.put(copy, data)
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
