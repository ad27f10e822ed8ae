"""Evidence that was changed under an index that agrees: the page, names, attributes, headers, hidden bytes, JSON."""

from __future__ import annotations

import hashlib
import io
import json
import stat
import struct
import subprocess
import sys
import zipfile
import zlib

import pytest
from click.testing import CliRunner

from tests.support import audit as support
from tests.support.audit import rewritten
from wherry.auditor import check
from wherry.auditor.audit import audit
from wherry.auditor.bundle import check_bundle
from wherry.auditor.check import visible
from wherry.cli.audit import audit as command

EXECUTED = b"PK\3\4 a file for another reader"


@pytest.fixture
def bundle(tmp_path):
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


def test_what_is_written_byte_by_byte_is_valid(bundle):
    for whole in (built(bundle), bundle):
        assert check_bundle(whole).problems == []


def test_evidence_with_findings_is_valid_and_renders_again(damaged):
    assert check_bundle(damaged).problems == []


@pytest.mark.parametrize(
    "text", [b"# Audit of 2 checkpoints: no errors\n", b"", b"# Audit \x1b]0;owned\x07\n"]
)
def test_another_page_is_found(bundle, text):
    changed = rewritten(bundle, lambda name, data: text if name == "report.md" else data)
    [problem] = check_bundle(changed).problems
    assert problem.startswith("report.md: ")


@pytest.mark.parametrize("sign", ["\x1b[2J", "\x9b2J", "\u202e", "\r"])
def test_the_program_of_a_bundle_refuses_a_page_that_drives_the_terminal(bundle, sign):
    changed = rewritten(bundle, lambda name, data: data + sign.encode() if name == "report.md" else data)
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
def test_a_report_of_another_form_is_a_problem(bundle, name):
    for value in (None, 7.5, "x", {"errors": "x"}, [None], [[]], [{"models": 1}]):
        if (name, type(value)) not in (("seconds", float), ("history", list)):
            assert not check_bundle(
                reported(bundle, lambda report, at=name, to=value: {**report, at: to})
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
def test_a_name_that_wherry_does_not_write_is_found(bundle, name):
    [problem] = check_bundle(added(bundle, name)).problems
    assert problem.startswith(visible(name))
    assert problem.isprintable()


@pytest.mark.parametrize("left_out", ["README.txt", "__main__.py", "report.md"])
def test_a_file_that_is_left_out_of_the_index_too_is_found(bundle, left_out):
    cut = rewritten(bundle, lambda name, data: None if name == left_out else data)
    assert left_out in check_bundle(cut).problems[0]


@pytest.mark.parametrize(
    ("mode", "dos"),
    [
        (stat.S_IFLNK | 0o777, 0), (stat.S_IFDIR | 0o755, 0), (stat.S_IFREG | 0o4755, 0), (stat.S_IFIFO, 0),
        (0o644, 0x10),
    ],
)  # fmt: skip
def test_what_is_no_regular_file_is_found(bundle, mode, dos):
    whole = contents(bundle)
    with zipfile.ZipFile(bundle, "w") as archive:
        for name, data in whole.items():
            info = zipfile.ZipInfo(name)
            if name == "report.md":
                info.external_attr = mode << 16 | dos
            archive.writestr(info, data)
    assert check_bundle(bundle).problems == ["report.md: not a regular file"]


@pytest.mark.parametrize(
    "options", [{"comment": b"hidden"}, {"extra": struct.pack("<HH4s", 0x7075, 4, b"name")}]
)
def test_a_comment_or_an_extra_field_of_a_file_is_found(bundle, options):
    whole = contents(bundle)
    with zipfile.ZipFile(bundle, "w") as archive:
        for name, data in whole.items():
            info = zipfile.ZipInfo(name)
            for option, value in options.items() if name == "ledger.jsonl" else ():
                setattr(info, option, value)
            archive.writestr(info, data)
    assert check_bundle(bundle).problems == ["ledger.jsonl: it has flags, a comment or an extra field"]


@pytest.mark.parametrize("flag", [1, 8, 0x40, 0x800, 0x2000])
def test_flags_are_found(bundle, flag):
    data = bytearray(built(bundle).read_bytes())
    struct.pack_into("<H", data, data.rindex(b"PK\1\2") + 8, flag)
    bundle.write_bytes(data)
    assert "flags" in " ".join(check_bundle(bundle).problems)


@pytest.mark.parametrize("change", [{"gap": EXECUTED}, {"tail": EXECUTED}, {"gap": b"\0"}, {"tail": b"\0"}])
def test_a_single_hidden_byte_is_found(bundle, change):
    [problem] = check_bundle(built(bundle, **change)).problems
    assert "belong to no file" in problem or "does not end where" in problem


@pytest.mark.parametrize(
    "local",
    [
        (6, "<H", 1), (8, "<H", 0), (14, "<I", 7), (18, "<I", 1 << 20), (22, "<I", 1), (26, "<H", 3), (28, "<H", 4),
        (30, "<c", b"m"),
    ],
)  # fmt: skip
def test_a_header_that_differs_from_the_list_is_found(bundle, local):
    [problem] = check_bundle(built(bundle, local=local)).problems
    assert problem == "ledger.jsonl: the header before it differs from the list of files"


def test_a_list_with_an_entry_more_than_it_states_is_found(bundle):
    data = bytearray(bundle.read_bytes())
    end = data.rindex(b"PK\5\6")
    [count] = struct.unpack_from("<H", data, end + 10)
    struct.pack_into("<2H", data, end + 8, count - 1, count - 1)
    bundle.write_bytes(data)
    assert check_bundle(bundle).problems == ["invalid evidence bundle: its list of files is damaged"]


@pytest.mark.parametrize("at", [4, 6, 8])
def test_a_part_of_an_archive_is_refused(bundle, at):
    """Other readers take the number of files on this disk, or seek the disk of the list."""
    data = bytearray(bundle.read_bytes())
    struct.pack_into("<H", data, data.rindex(b"PK\5\6") + at, 1)
    bundle.write_bytes(data)
    assert check_bundle(bundle).problems == ["invalid evidence bundle: it is a part of an archive"]


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
def test_json_that_states_a_name_twice_is_found(bundle, member):
    whole = contents(bundle)
    [name] = [name for name in whole if name.startswith(member)]
    text = whole[name].rstrip()
    twice = text[:-1] + b', "schema": 2}'
    changed = rewritten(bundle, lambda found, data: twice if found == name else data)
    if name == "index.json":
        whole[name] = twice
        with zipfile.ZipFile(changed, "w") as archive:
            for found, data in whole.items():
                archive.writestr(found, data)
    assert "states a name twice" in check_bundle(changed).problems[0]


def test_what_the_program_prints_is_printable(bundle, capsys):
    """A name that forges the last line, and severities that the report makes up."""
    forged = added(bundle, "x\x1b[2J\x1b]0;owned\x07\nthe bundle is complete and consistent\n\x9b8m\u202e")
    assert check.main([str(forged)]) == 1
    out = capsys.readouterr().out
    assert out.replace("\n", "").isprintable()
    assert "the bundle is complete and consistent" not in out.splitlines()
    odd = reported(bundle, lambda report: {**report, "findings": [{"severity": "\x1b[2J"}]})
    assert check.main([str(odd)]) == 1
    assert "\x1b" not in capsys.readouterr().out


def test_the_program_says_what_it_has_not_compared(bundle):
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(bundle)], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "report.md is not compared" in done.stdout
    assert check.PROOF in done.stdout


def test_the_command_says_what_it_has_not_proven(bundle):
    done = CliRunner().invoke(command, ["--check", str(bundle)])
    assert done.exit_code == 0
    assert "bundle_sha256" in " ".join(done.output.split())


def test_a_program_in_one_file_has_no_import_of_wherry(bundle):
    program = contents(bundle)["__main__.py"].decode()
    assert "import wherry" not in program
    assert "\nfrom wherry" not in program
    compile(program, "__main__.py", "exec")
    assert io.StringIO(program).readline().startswith('"""')


def test_sizes_that_python_before_3_11_4_states_twice_are_valid(bundle):
    """Its zipfile writes the sizes of a file that may become large before the wide ones too, if they fit."""
    data = bytearray(bundle.read_bytes())
    with zipfile.ZipFile(bundle) as archive:
        infos = archive.infolist()
    wide = [info for info in infos if data[info.header_offset + 18 : info.header_offset + 26] == b"\xff" * 8]
    for info in wide:
        struct.pack_into("<II", data, info.header_offset + 18, info.compress_size, info.file_size)
    bundle.write_bytes(data)
    assert wide or sys.version_info < (3, 11, 4)
    assert check_bundle(bundle).problems == []
