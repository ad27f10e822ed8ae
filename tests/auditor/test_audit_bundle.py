"""The evidence bundle: whole, consistent, checked by two hands, and every change of it found."""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
import zipfile
from pathlib import Path

import blake3
import numpy as np
import pytest
from click.testing import CliRunner

import wherry
from tests.support import audit as support
from tests.support.audit import rewritten
from wherry.auditor import check
from wherry.auditor.audit import audit
from wherry.auditor.bundle import check_bundle
from wherry.cli.audit import audit as command
from wherry.core.algorithms import ALGORITHMS, BLAKE3
from wherry.core.digest import checkpoint_digest
from wherry.core.manifest import Companion, Manifest, from_json
from wherry.errors import NotFoundError, UsageError
from wherry.ledger import schema as tables
from wherry.ledger.record import head, open_ledger

GOLDEN = Path(__file__).parents[1] / "golden" / "bundle-2.zip"


@pytest.fixture
def bundle(tmp_path):
    receipt = support.converted(tmp_path)
    support.registered(receipt)
    wherry.convert(receipt.target.uri, tmp_path / "tree", to="orbax")
    path = tmp_path / "evidence.zip"
    audit(bundle=path)
    return path


def test_a_bundle_is_whole_and_says_what_it_proves(bundle):
    checked = check_bundle(bundle)
    assert checked.ok, checked.problems
    assert (checked.checkpoints, checked.manifests) == (3, 2)
    with zipfile.ZipFile(bundle) as archive:
        report = json.loads(archive.read("report.json"))
        assert "# Audit of 3 checkpoints" in archive.read("report.md").decode()
    assert report["chain"]["head"] == checked.head
    assert check_bundle(bundle, checked.head).ok
    assert "no statement has the hash" in check_bundle(bundle, "0" * 64).problems[0]


def test_the_check_inside_the_bundle_runs_without_wherry(bundle):
    command = [sys.executable, "-I", "-S", str(bundle)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "complete and consistent" in done.stdout
    assert subprocess.run([*command, "--anchor", "1" * 64], check=False, capture_output=True).returncode == 1


def test_the_second_hand_computes_what_the_engine_computes(tmp_path):
    np.savez(tmp_path / "odd.npz", **{"a~b.c": np.ones(2), "plain": np.zeros((1, 3))})
    receipt = wherry.convert(tmp_path / "odd.npz", tmp_path / "odd", to="orbax")
    data = json.loads((tmp_path / "odd" / "wherry.json").read_text())
    expected = checkpoint_digest(from_json(data["manifest"]), "orbax", receipt.target.format_version, BLAKE3)
    assert check.checkpoint_digest(data["manifest"], data["checkpoint"]) == expected
    full = Manifest(
        {}, values={("step",): 7, ("a", "b/c"): "é"}, empties={("n",): "none"}, companions=(Companion("x", 1, "00"),)
    )  # fmt: skip
    for algorithm in ALGORITHMS:
        expected = checkpoint_digest(full, "orbax", None, algorithm)
        reference = {"format": "orbax", "format_version": None, "checkpoint_digest": f"{algorithm}:"}
        assert check.checkpoint_digest(full.to_json(), reference) == expected
    for path in [("a/b",), ("~", "", "~1"), ()]:
        assert check._parts(wherry.core.keypath.render(path)) == list(path)


def with_index(bundle, **fields):
    """The bundle with other fields in its index."""
    target = bundle.with_name("restated.zip")
    with zipfile.ZipFile(bundle) as old, zipfile.ZipFile(target, "w") as new:
        for name in old.namelist():
            data = old.read(name)
            new.writestr(name, json.dumps({**json.loads(data), **fields}) if name == "index.json" else data)
    return target


@pytest.mark.parametrize("schema", [1, 3, 99, None, "2"], ids=repr)
@pytest.mark.parametrize("name", ["index.json", "report.json", "anchor.json", "ledger.jsonl"])
def test_a_record_of_another_schema_is_refused(bundle, name, schema):
    def change(member, data):
        if member != name:
            return data
        if name == "ledger.jsonl":
            return lines(data, lambda row: {**row, "schema": schema})
        return json.dumps({**json.loads(data), "schema": schema}).encode()

    changed = rewritten(bundle, change)
    if name == "index.json":
        changed = with_index(changed, schema=schema)
    first = check_bundle(changed).problems[0]
    assert f"it has schema {schema}, but this check requires {4 if name == 'ledger.jsonl' else 2}" in first
    assert (name in first, "use the wherry that made the bundle" in first) == (True, True)


def test_the_golden_bundle_is_consistent():
    """Evidence of another day; its program is that of its day, so that it is not compared here."""
    checked = check.check(str(GOLDEN))
    assert (checked.problems, checked.checkpoints, checked.findings) == ([], 4, {"error": 2})


def test_the_statements_that_the_check_reads_are_those_of_the_ledger():
    assert check._STATEMENT_SCHEMA == tables.SCHEMA


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 1023, 1024, 1025, 2048, 2049, 3072, 3073, 5120, 40_000])
def test_the_second_hand_computes_blake3(size):
    data = random.Random(size).randbytes(size)
    assert check._blake3(data) == blake3.blake3(data).digest()


def lines(data, change):
    return b"".join(json.dumps(change(json.loads(line))).encode() + b"\n" for line in data.splitlines())


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("ledger.jsonl", lambda data: data.replace(b'lossless\\":true', b'lossless\\":false'), "altered"),
        ("ledger.jsonl", lambda data: b"\n".join(data.split(b"\n")[1:]), "missing statement 1"),
        ("ledger.jsonl", lambda data: data.rsplit(b"\n", 2)[0] + b"\n", "the chain ends at"),
        ("ledger.jsonl", lambda data: lines(data, lambda row: {**row, "time": "2001"}), "hash mismatch with its"),
        ("anchor.json", lambda data: data.replace(b'"seq": ', b'"seq": 1'), "not the end of the chain"),
        ("report.json", lambda data: data.replace(b'"model version 1"', b'"model version 2"'), "no statement records"),
        ("report.json", lambda data: data.replace(b'"ok": true', b'"ok": false'), "ok=False"),
        ("report.json", lambda data: data.replace(b'"errors": 0', b'"errors": 1'), "counts"),
        ("report.json", lambda data: b"[" + data, "invalid evidence bundle"),
    ],
)  # fmt: skip
def test_a_change_under_a_new_index_is_found(bundle, name, change, said):
    changed = rewritten(bundle, lambda found, data: change(data) if found == name else data)
    checked = check_bundle(changed)
    assert said in " ".join(checked.problems), checked.problems


def test_a_manifest_that_gives_another_digest_is_found(bundle):
    def change(name, data):
        return data.replace(b'"layer.w"', b'"layer.v"') if name.startswith("manifests/") else data

    assert (
        "digest mismatch: the manifest is of another checkpoint"
        in check_bundle(rewritten(bundle, change)).problems[0]
    )


def test_a_checkpoint_that_no_statement_names_is_found(bundle):
    """A row that a forger adds to the report, without a manifest or a model that would contradict it."""
    other = f"blake3:{'f' * 64}"

    def change(name, data):
        if name != "report.json":
            return data
        report = json.loads(data)
        row = {**report["checkpoints"][0], "checkpoint_digest": other, "models": [], "manifest": False}
        return json.dumps({**report, "checkpoints": [*report["checkpoints"], row]}).encode()

    [problem] = check_bundle(rewritten(bundle, change)).problems
    assert f"no statement records checkpoint {other}" in problem


def test_a_manifest_that_is_left_out_under_a_new_index_is_found(bundle):
    cut = rewritten(bundle, lambda name, data: None if name.startswith("manifests/") else data)
    problems = check_bundle(cut).problems
    assert len(problems) == 2
    assert all(one.startswith("manifests/") and one.endswith(": missing file") for one in problems)


def test_files_that_are_changed_missing_or_added_are_named(bundle):
    cut = rewritten(bundle, lambda name, data: None if name == "report.md" else data, index=False)
    assert check_bundle(cut).problems == ["report.md: missing file"]
    changed = rewritten(bundle, lambda name, data: data + b" " if name == "report.md" else data, index=False)
    assert check_bundle(changed).problems == ["report.md: digest mismatch with the index"]
    with zipfile.ZipFile(bundle, "a") as archive:
        archive.writestr("extra", "x")
    assert check_bundle(bundle).problems == ["extra: unknown file; a program in the bundle could import it"]
    with pytest.warns(UserWarning, match="Duplicate"), zipfile.ZipFile(bundle, "a") as archive:
        archive.writestr("report.md", "x")
    assert "report.md: duplicate file in the bundle" in check_bundle(bundle).problems
    bundle.write_bytes(b"PK not")
    assert "invalid evidence bundle" in check_bundle(bundle).problems[0]


@pytest.mark.parametrize("name", ["__main__.py", "README.txt"])
def test_a_program_or_readme_of_another_maker_is_named(bundle, name):
    forged = rewritten(bundle, lambda member, data: data + b"\nprint('owned')\n" if member == name else data)
    checked = check_bundle(forged)
    assert not checked.ok
    assert checked.problems[0].startswith(f"{name}: not the ")


def test_a_module_that_the_program_would_import_is_named(bundle):
    with zipfile.ZipFile(bundle, "a") as archive:
        archive.writestr("hashlib.py", "print('owned')")
    assert check_bundle(bundle).problems == [
        "hashlib.py: unknown file; a program in the bundle could import it"
    ]


def test_the_readme_of_a_bundle_names_the_way_to_trust_first(bundle):
    with zipfile.ZipFile(bundle) as archive:
        text = archive.read("README.txt").decode()
    assert text.index(f"wherry audit --check {bundle.name}") < text.index(f"python {bundle.name}")


def bomb(path, **members):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        files = {"report.json": b"{}", "anchor.json": b"{}", "ledger.jsonl": b"", **members}
        for name, data in files.items():
            archive.writestr(name, data)
        rows = {
            name: {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            for name, data in files.items()
        }
        archive.writestr("index.json", json.dumps({"schema": 2, "files": rows}))
    return path


def test_a_bundle_that_becomes_much_more_than_it_is_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(check, "_NODES_MAX", 1000)
    monkeypatch.setattr(check, "_RATIO_FREE", 50_000)
    wide = bomb(tmp_path / "wide.zip", **{"report.json": b"[" + b"{}," * 2000 + b"{}]"})
    assert "report.json exceeds the limit of 1000 JSON values" in check_bundle(wide).problems[0]
    line = bomb(tmp_path / "line.zip", **{"ledger.jsonl": b"[" + b"{}," * 2000 + b"{}]"})
    assert "ledger.jsonl exceeds the limit" in check_bundle(line).problems[0]
    zeros = bomb(tmp_path / "zeros.zip", **{"report.md": bytes(1 << 20)})
    assert "report.md: 1048576 bytes in" in check_bundle(zeros).problems[0]
    monkeypatch.setattr(check, "_MEMBERS_MAX", 3)
    assert "exceeds the limit of 3 files" in check_bundle(wide).problems[0]


def test_anchors_as_hash_and_as_file(bundle, tmp_path):
    with open_ledger() as ledger:
        now = head(ledger)
    file = tmp_path / "anchor.json"
    file.write_text(json.dumps({"seq": now.seq, "hash": now.hash, "time": now.time}))
    assert audit(anchor=str(file)).ok
    assert not check_bundle(bundle, str(file)).ok, (
        "the anchor is the statement of the audit, which came after"
    )
    for bad in ("nothing", str(bundle)):
        with pytest.raises(UsageError):
            audit(anchor=bad)
    with pytest.raises(NotFoundError):
        check_bundle(tmp_path / "none.zip")


def test_the_command_line(bundle, tmp_path):
    run = CliRunner().invoke
    done = run(command, ["--json"])
    assert (done.exit_code, json.loads(done.output)["ok"]) == (0, True)
    done = run(command, [str(tmp_path), "--level", "digest", "--markdown", str(tmp_path / "r.md")])
    assert done.exit_code == 0
    assert "3, 3 of them ok" in done.output
    assert (tmp_path / "r.md").read_text().startswith("# Audit of 3")
    done = run(command, ["--check", str(bundle), "--json"])
    assert (done.exit_code, json.loads(done.output)["manifests"]) == (0, 2)
    bundle.write_bytes(bundle.read_bytes()[:-30])
    done = run(command, ["--check", str(bundle)])
    assert done.exit_code == 9
    support.flip(tmp_path / "source.out")
    done = run(command, ["--level", "digest"])
    assert done.exit_code == 9
    assert "altered" in done.output
    assert "wherry convert" in done.output


def test_a_pipe_is_no_bundle_and_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "evidence.zip")
    with pytest.raises(OSError, match="not a regular file"):
        check.check(str(tmp_path / "evidence.zip"))
    (tmp_path / "zero.zip").symlink_to("/dev/zero")
    with pytest.raises(OSError, match="not a regular file"):
        check.check(str(tmp_path / "zero.zip"))


def test_a_sparse_file_is_refused_before_it_is_read(tmp_path):
    with (tmp_path / "evidence.zip").open("wb") as file:
        file.truncate(1 << 42)
    assert not check.check(str(tmp_path / "evidence.zip")).ok


def test_members_outside_the_file_are_a_problem_of_the_bundle(bundle, tmp_path):
    """zipfile seeks to what an archive states, and the system refuses it."""
    data, refused = bundle.read_bytes(), 0
    for at in range(20, 80, 2):
        place = data.index(b"PK\x01\x02") + 42 - at  # a part of the record, and of what comes before it
        (tmp_path / "evidence.zip").write_bytes(data[:place] + b"\xff" * 4 + data[place + 4 :])
        refused += not check.check(str(tmp_path / "evidence.zip")).ok
    (tmp_path / "evidence.zip").write_bytes(data[: data.rindex(b"PK\x05\x06") + 12] + b"\xff" * 4 + data[-6:])
    assert not check.check(str(tmp_path / "evidence.zip")).ok
    assert refused


def test_no_damage_makes_the_check_fall(bundle):
    """Any byte of the bundle may be another: that is said, or it is a byte that means nothing, never an exception."""
    data = bundle.read_bytes()
    generator = np.random.default_rng(0)
    noticed = 0
    for place in generator.integers(0, len(data), 200):
        changed = bytearray(data)
        changed[place] ^= 0xFF
        bundle.write_bytes(changed)
        noticed += not check_bundle(bundle).ok
    assert noticed > 150
