"""Metrics: what the ledger adds up to, what waits, and a text that Prometheus can read."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import wherry
from tests.support import audit as support
from wherry.auditor.audit import audit
from wherry.cli.audit import metrics as command
from wherry.errors import StorageError
from wherry.ledger.record import open_ledger, record_event
from wherry.watch.metrics import HELP, MetricSample, after_run, measure, note_run, text, write

_LINE = re.compile(r'[a-z_]+(\{([a-z_]+="([^"\\\n]|\\.)*",?)+\})? -?[\d.e+-]+')


def values(samples, name):
    return {",".join(value for _, value in one.labels): one.value for one in samples if one.name == name}


def test_what_was_done_is_counted_from_the_ledger(tmp_path):
    before = time.time()
    receipt = support.converted(tmp_path)
    wherry.convert(receipt.source.uri, tmp_path / "tree", to="orbax")
    support.registered(receipt)
    support.flip(Path(receipt.target.uri))
    counts = audit(level="digest").to_json()["counts"]  # the registry has versions of other tests, too
    with open_ledger() as ledger:
        record_event(ledger, "note", None, {"about": "failure", "source": "/x"})
        record_event(ledger, "note", None, {"about": "something else"})
    found = measure([])
    assert values(found, "wherry_conversions_total") == {"safetensors": 1, "orbax": 1}
    assert values(found, "wherry_conversion_bytes_total")["written"] == 2 * receipt.bytes_written
    assert values(found, "wherry_failures_total") == {"conversion": 1, "verification": 1}
    assert values(found, "wherry_events_total") == {"registration": 1, "audit": 1}
    assert values(found, "wherry_audit_findings")["error"] == counts["errors"] > 0
    assert values(found, "wherry_last_run_ok") == {"audit": 0}
    assert values(found, "wherry_last_success_timestamp_seconds") == {}
    assert before - 1 < values(found, "wherry_last_conversion_timestamp_seconds")[""] <= time.time()


def test_a_run_that_is_missing_shows_by_the_last_success():
    note_run("nightly-convert", ok=True, counts={"converted": 3, "passed": 1})
    then = values(measure([]), "wherry_last_success_timestamp_seconds")["nightly-convert"]
    time.sleep(0.01)
    note_run("nightly-convert", ok=False, counts={"failed": 2})
    found = measure([])
    assert values(found, "wherry_last_success_timestamp_seconds") == {"nightly-convert": then}
    assert values(found, "wherry_last_run_timestamp_seconds")["nightly-convert"] > then
    assert values(found, "wherry_last_run_count") == {"nightly-convert,failed": 2}
    assert values(found, "wherry_failures_total")["nightly-convert"] == 1


def test_at_its_end_a_flow_writes_the_file_and_fails_over_nothing(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("WHERRY_METRICS", str(tmp_path / "wherry.prom"))
    assert after_run("export", ok=True, counts={"converted": 1}) == "recorded"
    assert 'wherry_last_run_ok{flow="export"} 1' in (tmp_path / "wherry.prom").read_text()
    monkeypatch.setenv("WHERRY_METRICS", str(tmp_path / "none" / "wherry.prom"))
    assert after_run("export", ok=True, counts={}).startswith("not recorded: storage failed")
    assert "was not recorded for the metrics" in caplog.text


def test_what_waits_below_roots(tmp_path):
    support.converted(tmp_path)
    old = tmp_path / "run" / "step_1.npz"
    old.parent.mkdir()
    np.savez(old, a=np.ones(2))
    import os

    os.utime(old, (time.time() - 5000, time.time() - 5000))
    found = measure([str(tmp_path), str(tmp_path / "nothing")])
    assert values(found, "wherry_unconverted") == {str(tmp_path): 1}
    assert 4990 < values(found, "wherry_oldest_unconverted_age_seconds")[str(tmp_path)] < 5100
    assert values(found, "wherry_root_reachable") == {str(tmp_path): 1, str(tmp_path / "nothing"): 0}


def test_what_waits_by_the_routes(tmp_path, monkeypatch):
    runs = tmp_path / "runs"
    runs.mkdir()
    np.savez(runs / "a.npz", a=np.ones(2))
    config = tmp_path / "wherry.toml"
    config.write_text(
        f'[routes.all]\nroot = "{runs}"\nselect = "all"\nmin_age = "0s"\n'
        f'[[routes.all.targets]]\nformat = "safetensors"\nuri = "{tmp_path}/out/{{run}}.safetensors"\n'
        f'[routes.gone]\nroot = "{tmp_path}/gone"\n'
        f'[[routes.gone.targets]]\nformat = "safetensors"\nuri = "{tmp_path}/out/{{run}}.safetensors"\n'
    )
    monkeypatch.setenv("WHERRY_CONFIG", str(config))
    found = measure()
    assert values(found, "wherry_unconverted") == {"all": 1}
    assert values(found, "wherry_unconverted_bytes")["all"] > 0
    assert values(found, "wherry_root_reachable") == {"all": 1, "gone": 0}


def test_the_text_is_what_prometheus_reads(tmp_path):
    support.converted(tmp_path)
    odd = MetricSample("wherry_unconverted", (("root", 'a"b\\c\nd'),), 3)
    lines = text([*measure([str(tmp_path)]), odd]).splitlines()
    assert r'wherry_unconverted{root="a\"b\\c\nd"} 3' in lines
    rows = [line for line in lines if not line.startswith("#")]
    assert [line for line in rows if not _LINE.fullmatch(line)] == []
    typed = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(typed) == len(set(typed))
    assert {row.partition("{")[0].partition(" ")[0] for row in rows} == set(typed) <= set(HELP)


def test_the_client_library_of_prometheus_reads_the_same_numbers(tmp_path):
    parser = pytest.importorskip("prometheus_client.parser", reason="prometheus_client is not installed")
    support.converted(tmp_path)
    odd = MetricSample("wherry_unconverted", (("root", 'a"b\\c\nd, {e="f"} ä'),), 1780000000.123456)
    samples = [*measure([str(tmp_path)]), odd]
    read = [*parser.text_string_to_metric_families(text(samples))]
    found = {(one.name, *sorted(one.labels.items())): one.value for family in read for one in family.samples}
    assert found == {(one.name, *sorted(one.labels)): one.value for one in samples}
    ours = {name.removesuffix("_total"): says for name, says in HELP.items()}
    assert all(ours[family.name] == (family.type, family.documentation) for family in read)


def test_the_file_appears_in_one_step_and_is_readable_to_all(tmp_path):
    out = tmp_path / "wherry.prom"
    write(measure([]), out)
    assert out.read_text().startswith("# HELP wherry_")
    assert out.stat().st_mode & 0o777 == 0o644
    assert [path.name for path in tmp_path.iterdir()] == ["wherry.prom"]
    with pytest.raises(StorageError):
        write([], tmp_path / "none" / "x")


def test_a_file_that_cannot_be_written_leaves_nothing_in_the_collectors_folder(tmp_path):
    (tmp_path / "wherry.prom").mkdir()
    with pytest.raises(StorageError):
        write(measure([]), tmp_path / "wherry.prom")
    assert [path.name for path in tmp_path.iterdir()] == ["wherry.prom"]


def test_the_command(tmp_path):
    done = CliRunner().invoke(command, [str(tmp_path)])
    assert done.exit_code == 0
    assert "wherry_ledger_statements 0" in done.output
    rows = json.loads(CliRunner().invoke(command, [str(tmp_path), "--json"]).output)
    assert {"name": "wherry_ledger_statements", "labels": {}, "value": 0} in rows
    assert CliRunner().invoke(command, ["--out", str(tmp_path / "x.prom")]).output == ""
    assert (tmp_path / "x.prom").exists()
