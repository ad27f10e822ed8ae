"""The offline check of an evidence bundle: a module that needs only the standard library, so every bundle contains it.

`wherry audit --check BUNDLE.zip` runs this module and compares the copy in the bundle with it. `python BUNDLE.zip` runs
that copy, and so whatever the maker of the bundle put there: use it only for bundles of your own. The check proves
that every file has the digest that the index states; that the ledger's statements form an unbroken chain from the
first one to the report's anchor; that every audited checkpoint and model version is stated in that chain; and that
every manifest has the digest under which its checkpoint was audited. It proves nothing about storage, which the audit
itself has checked. Compare the anchor with one kept elsewhere (`--anchor`): a chain that was rewritten completely is
consistent, too.

Digests are computed as in `wherry.core.digest` and `wherry.ledger.statements`; the code is repeated on purpose,
including BLAKE3, which is used if the package `blake3` is not installed. Bundles and statements of another schema are
refused.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import stat
import struct
import sys
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import asdict, dataclass, field
from typing import IO, Any

INDEX, REPORT, LEDGER, ANCHOR = "index.json", "report.json", "ledger.jsonl", "anchor.json"
PAGE, README, PROGRAM, MANIFESTS = "report.md", "README.txt", "__main__.py", "manifests/"
NAMES = frozenset({README, PAGE, REPORT, ANCHOR, PROGRAM, LEDGER, INDEX})
WHOLE_MAX = 64 << 20  # maximum bytes of a file that is read at once
PIECE = 1 << 20
SCHEMA = 2
_STATEMENT_SCHEMA = 4
GENESIS = "0" * 64
_LINE_MAX = 16 << 20  # maximum bytes of one statement
_NODES_MAX = 2_000_000  # JSON values of one file or statement; a manifest of 100,000 tensors has 1,500,000
_HASHED = ("seq", "prev", "kind", "schema", "content", "body", "time", "storage_time")
_DAMAGE = (
    zipfile.BadZipFile, zlib.error, ValueError, LookupError, TypeError, AttributeError, EOFError, RuntimeError
)  # fmt: skip
_OTHER = "use the wherry that made the bundle"
_LISTED = 100  # problems that are listed; the rest is counted


PROOF = (
    "proven: the files are those of the index, the ledger's statements form a chain up to the anchor, and the report "
    "agrees with itself, the chain and the manifests; not proven: that the verdicts and findings are those of the "
    "audit, which its author could have rewritten; compare the bundle's sha256 with bundle_sha256 in the ledger's "
    "statement of the audit"
)


@dataclass
class CheckReport:
    """The result of the check.

    Attributes:
        bundle: path of the bundle.
        sha256: SHA-256 of the bundle, which the ledger's statement of the audit contains.
        files: number of files in the index.
        statements: length of the chain.
        head: hash of its last statement.
        checkpoints: rows of the report.
        manifests: how many of them have a verified manifest.
        findings: severity → number of findings of the report.
        problems: problems of the bundle, each with the name of the file; empty where it is valid.
        unlisted: number of further problems.
    """

    bundle: str
    sha256: str = ""
    files: int = 0
    statements: int = 0
    head: str = GENESIS
    checkpoints: int = 0
    manifests: int = 0
    findings: dict[str, int] = field(default_factory=dict[str, int])
    problems: list[str] = field(default_factory=list[str])
    unlisted: int = 0

    @property
    def ok(self) -> bool:
        """Whether there are no problems."""
        return not self.problems

    def say(self, problem: str) -> None:
        """Add a problem; names in it come from the bundle, and are escaped for a terminal."""
        if len(self.problems) < _LISTED:
            self.problems.append(visible(problem))
        else:
            self.unlisted += 1

    def to_json(self) -> dict[str, Any]:
        """The JSON form, which `wherry audit --check --json` prints."""
        return {"schema": SCHEMA, "ok": self.ok, **asdict(self)}


@dataclass
class _ChainContents:
    """Checkpoints and (checkpoint, model version) pairs that the chain states, and the hashes of its statements."""

    digests: set[str] = field(default_factory=set[str])
    versions: set[tuple[str, str]] = field(default_factory=set[tuple[str, str]])
    hashes: dict[str, int] = field(default_factory=dict[str, int])


def check(bundle: str, anchor: str | None = None) -> CheckReport:
    """Check a bundle; all damage is reported as problems, unless the file itself cannot be read.

    Args:
        bundle: path of the zip file.
        anchor: hash of a statement that was kept elsewhere; the chain must have it.
    """
    checked = CheckReport(bundle)
    with _open(bundle) as file:
        problem = directory_problem(file)
        if problem:
            checked.say(problem)
            return checked
        try:
            with zipfile.ZipFile(file) as archive:
                for problem in member_problems(archive, file):
                    checked.say(problem)
                if checked.ok:
                    _check(archive, checked, anchor)
            if checked.files:  # its members account for every byte: it is no sparse file of terabytes
                file.seek(0)
                checked.sha256 = _digest(file)
        except _DAMAGE as error:
            checked.say(f"invalid evidence bundle: {type(error).__name__}: {error}")
        except OSError as error:
            if error.errno != errno.EINVAL:  # of an offset outside the file
                raise
            checked.say(f"invalid evidence bundle: {error}")
    return checked


def _open(bundle: str) -> IO[bytes]:
    """The file, which is not waited for: a pipe or a device is no bundle."""
    descriptor = os.open(bundle, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    file = os.fdopen(descriptor, "rb") if stat.S_ISREG(os.fstat(descriptor).st_mode) else None
    if file is None:
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", bundle)
    return file


def _check(archive: zipfile.ZipFile, checked: CheckReport, anchor: str | None) -> None:
    index = _json(archive, INDEX)
    if not _has_schema(index, INDEX, checked):
        return
    _check_files(archive, index["files"], checked)
    if checked.problems:
        return  # the contents of changed files prove nothing
    stated = _check_chain(archive, checked)
    report, kept = _json(archive, REPORT), _json(archive, ANCHOR)
    if not (_has_schema(report, REPORT, checked) and _has_schema(kept, ANCHOR, checked)):
        return
    chain = report["chain"]
    if (chain["head"], chain["statements"]) != (checked.head, checked.statements):
        checked.say(
            f"{REPORT}: its anchor is statement {chain['statements']}, but the chain ends at {checked.statements}"
        )
    if (kept["hash"], kept["seq"]) != (checked.head, checked.statements):
        checked.say(f"{ANCHOR}: it is not the end of the chain")
    if anchor is not None and not any(found.startswith(anchor) for found in stated.hashes):
        checked.say(f"{LEDGER}: no statement has the hash of the anchor, {anchor}")
    names = set(archive.namelist())
    for row in report["checkpoints"]:
        _check_row(row, names, archive, stated, checked)
    _check_counts(report, checked)
    _check_needed(report, names, checked)
    with archive.open(PAGE) as page:
        if not page.read(WHOLE_MAX).decode().replace("\n", "").isprintable():
            checked.say(f"{PAGE}: it contains control characters")


def _has_schema(data: dict[str, Any], name: str, checked: CheckReport) -> bool:
    fits = data["schema"] == SCHEMA
    if not fits:
        checked.say(f"{name}: it has schema {data['schema']}, but this check requires {SCHEMA}; {_OTHER}")
    return fits


def _check_files(archive: zipfile.ZipFile, files: dict[str, Any], checked: CheckReport) -> None:
    names = archive.namelist()
    for name in sorted({*names} ^ {*files, INDEX}):
        checked.say(f"{name}: {'not in the index' if name in names else 'missing file'}")
    for name in sorted({*names} & {*files}):
        longer = copy(archive.getinfo(name))
        longer.file_size += 1  # so that a stream that does not end there is an error
        with archive.open(longer) as file:
            if name == LEDGER and not _has_lines(file):
                checked.say(f"{name}: a statement exceeds the limit of {_LINE_MAX} bytes")
                return
        with archive.open(longer) as file:
            if _digest(file, files[name]["size"]) != files[name]["sha256"]:
                checked.say(f"{name}: digest mismatch with the index")
    checked.files = len(files)


def _check_chain(archive: zipfile.ZipFile, checked: CheckReport) -> _ChainContents:
    stated = _ChainContents()
    with archive.open(LEDGER) as file:
        while line := file.readline(_LINE_MAX):
            row = _load_json(line, LEDGER)
            fault = _fault(row, checked.head, checked.statements + 1)
            if fault:
                checked.say(f"{LEDGER}: statement {row.get('seq')}: {fault}")
                return stated
            checked.statements, checked.head = row["seq"], row["hash"]
            stated.hashes[row["hash"]] = row["seq"]
            body = _load_json(row["body"].encode(), LEDGER)
            stated.digests.update(_digests(body))
            if row["kind"] == "registration":
                named = f"{body['name']} version {body['version']}"
                stated.versions.add((body["checkpoint_digest"], named))
    return stated


def _fault(row: dict[str, Any], prev: str, seq: int) -> str | None:
    if row["seq"] != seq:
        return f"missing statement {seq}"
    if row["prev"] != prev:
        return "it does not contain the hash of the statement before it"
    if row["content"] != _sha256_of(row["kind"], _load_json(row["body"].encode(), LEDGER)):
        return "its contents were altered"
    if row["schema"] != _STATEMENT_SCHEMA:
        return f"it has schema {row['schema']}, but this check requires {_STATEMENT_SCHEMA}; {_OTHER}"
    if row["hash"] != _sha256_of("statement", {name: row[name] for name in _HASHED}):
        return "hash mismatch with its contents"
    return None


def _check_row(
    row: dict[str, Any],
    names: set[str],
    archive: zipfile.ZipFile,
    stated: _ChainContents,
    checked: CheckReport,
) -> None:
    digest = row["checkpoint_digest"]
    checked.checkpoints += 1
    if digest not in stated.digests:
        checked.say(f"{REPORT}: no statement records checkpoint {digest} at {row['uri']}")
    for model in row["models"]:
        if (digest, model) not in stated.versions:
            checked.say(f"{REPORT}: no statement records checkpoint {digest} as {model}")
    name = f"{MANIFESTS}{record_name(digest)}"
    if not row["manifest"]:
        return
    if name not in names:
        checked.say(f"{name}: missing file")
        return
    record = _json(archive, name)
    if checkpoint_digest(record["manifest"], record["checkpoint"]) != digest:
        checked.say(f"{name}: digest mismatch: the manifest is of another checkpoint")
    checked.manifests += 1


def _check_needed(report: dict[str, Any], names: set[str], checked: CheckReport) -> None:
    """Every file that wherry writes, and no manifest that the report does not name."""
    for name in sorted(NAMES - names):
        checked.say(f"{name}: missing file")
    needed = {
        f"{MANIFESTS}{record_name(row['checkpoint_digest'])}"
        for row in report["checkpoints"]
        if row["manifest"]
    }
    for name in sorted(names - NAMES - needed):
        checked.say(f"{name}: the report names no checkpoint with this manifest")


def _check_counts(report: dict[str, Any], checked: CheckReport) -> None:
    for finding in report["findings"]:
        severity = finding["severity"]
        checked.findings[severity] = checked.findings.get(severity, 0) + 1
    counted = {name: report["counts"].get(f"{name}s", 0) for name in ("error", "warning", "note")}
    for severity in sorted({*checked.findings} - {*counted}):
        checked.say(f"{REPORT}: unknown severity {severity!r} of a finding")
    if counted != {name: checked.findings.get(name, 0) for name in counted}:
        checked.say(f"{REPORT}: its counts do not match its findings")
    if report["ok"] != (not checked.findings.get("error")):
        checked.say(f"{REPORT}: it states ok={report['ok']}, but has {counted['error']} errors")


def record_name(digest: str) -> str:
    """The name of the file with the manifest of a checkpoint; not every file system takes a colon."""
    return f"{digest.replace(':', '-')}.json"


def checkpoint_digest(manifest: dict[str, Any], reference: dict[str, Any]) -> str:
    """The checkpoint digest of a manifest, as `wherry.core.manifest.checkpoint_digest` computes it."""
    algorithm = reference["checkpoint_digest"].partition(":")[0]
    own = f"{algorithm}:"
    rows = sorted(
        [_parts(tensor["path"]), tensor["digest"].removeprefix(own)]
        for tensor in manifest["tensors"]
        if tensor["digest"]
    )
    hash_of = _blake3_of if algorithm == "blake3" else _sha256_of
    return own + hash_of(
        "checkpoint",
        {
            "weights": hash_of("weights", rows),
            "format": reference["format"],
            "format_version": reference["format_version"],
            "values": manifest["values"],
            "empties": manifest["empties"],
            "companions": {one["name"]: one["sha256"] for one in manifest["companions"]},
        },
    )


def _parts(printed: str) -> list[str]:
    """The parts of a printed key path: `~0` is `~`, `~1` is `/`, a part `~2` is empty."""
    if not printed:
        return []
    return ["" if part == "~2" else part.replace("~1", "/").replace("~0", "~") for part in printed.split("/")]


def _sha256_of(kind: str, value: object) -> str:
    return hashlib.sha256(_text(kind, value)).hexdigest()


def _blake3_of(kind: str, value: object) -> str:
    try:
        from blake3 import blake3  # ten thousand times as fast
    except ImportError:
        return _blake3(_text(kind, value)).hex()
    return blake3(_text(kind, value)).hexdigest()


def _text(kind: str, value: object) -> bytes:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return f"wherry {kind} 1\n".encode() + text.encode("utf-8", "backslashreplace")


_IV = (0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A, 0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19)
_ORDER = (2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8)
_MIXED = (
    (0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15),
    (0, 5, 10, 15), (1, 6, 11, 12), (2, 7, 8, 13), (3, 4, 9, 14),
)  # fmt: skip
_ROUNDS, _BLOCK, _CHUNK, _WORD = 7, 64, 1024, 0xFFFFFFFF
_CHUNK_START, _CHUNK_END, _PARENT, _ROOT = 1, 2, 4, 8


def _blake3(data: bytes) -> bytes:
    """BLAKE3 of bytes, in pure Python, written from its specification: 32 bytes."""
    return struct.pack("<8I", *_tree(data, 0, _ROOT))


def _tree(data: bytes, counter: int, flags: int) -> list[int]:
    """The chaining value of a subtree: a chunk of up to 1 KiB, or two subtrees, the left one a full power of two."""
    if len(data) <= _CHUNK:
        return _leaf(data, counter, flags)
    left = _CHUNK << (((len(data) - 1) // _CHUNK).bit_length() - 1)
    halves = [*_tree(data[:left], counter, 0), *_tree(data[left:], counter + left // _CHUNK, 0)]
    return _compress(_IV, halves, 0, _BLOCK, flags | _PARENT)


def _leaf(data: bytes, counter: int, flags: int) -> list[int]:
    value: Sequence[int] = _IV
    starts = range(0, max(len(data), 1), _BLOCK)
    for start in starts:
        block = data[start : start + _BLOCK]
        message = list(struct.unpack("<16I", block.ljust(_BLOCK, b"\0")))
        mark = (_CHUNK_START if start == 0 else 0) | (_CHUNK_END | flags if start == starts[-1] else 0)
        value = _compress(value, message, counter, len(block), mark)
    return list(value)


def _compress(value: Sequence[int], message: list[int], counter: int, length: int, flags: int) -> list[int]:
    state = [*value, *_IV[:4], counter & _WORD, counter >> 32, length, flags]
    for _round in range(_ROUNDS):
        for place, (a, b, c, d) in enumerate(_MIXED):
            _mix(state, a, b, c, d, message[2 * place], message[2 * place + 1])
        message = [message[place] for place in _ORDER]
    return [state[place] ^ state[place + 8] for place in range(8)]


def _mix(state: list[int], a: int, b: int, c: int, d: int, first: int, second: int) -> None:
    for word, one, two in ((first, 16, 12), (second, 8, 7)):
        state[a] = (state[a] + state[b] + word) & _WORD
        state[d] = _rotate(state[d] ^ state[a], one)
        state[c] = (state[c] + state[d]) & _WORD
        state[b] = _rotate(state[b] ^ state[c], two)


def _rotate(word: int, places: int) -> int:
    return (word >> places | word << (32 - places)) & _WORD


def _digests(value: Any) -> set[str]:
    """Every checkpoint digest in a statement, at any depth."""
    if isinstance(value, list):
        return set[str]().union(*(_digests(one) for one in value)) if value else set()
    if not isinstance(value, dict):
        return set()
    own = value.get("checkpoint_digest")
    return ({own} if isinstance(own, str) else set()).union(*(_digests(one) for one in value.values()))


def _digest(file: IO[bytes], expected: int | None = None) -> str:
    """SHA-256 of a file; with an expected size, at most one byte more is read."""
    state, left = hashlib.sha256(), -1 if expected is None else expected + 1
    while left and (piece := file.read(PIECE if left < 0 else min(PIECE, left))):
        state.update(piece)
        left = left if left < 0 else left - len(piece)
    return state.hexdigest()


def _has_lines(file: IO[bytes]) -> bool:
    """Whether no line is longer than the limit: the zeros of a sparse file are one line."""
    return all(len(line) < _LINE_MAX for line in iter(lambda: file.readline(_LINE_MAX), b""))


def _json(archive: zipfile.ZipFile, name: str) -> dict[str, Any]:
    with archive.open(name) as file:
        data = file.read(WHOLE_MAX + 1)
    if len(data) > WHOLE_MAX:
        raise ValueError(f"{name} exceeds the limit of {WHOLE_MAX} bytes")
    return _load_json(data, name)


def _load_json(data: bytes, name: str) -> Any:
    """JSON that cannot become much more than its text: each value but the first follows one of four characters."""
    if sum(data.count(sign) for sign in b",:[{") > _NODES_MAX:
        raise ValueError(f"{name} exceeds the limit of {_NODES_MAX} JSON values")
    return json.loads(data, object_pairs_hook=_unique)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, in which no name occurs twice: readers differ in which value they take."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a JSON object states a name twice")
    return found


# ---- the files of a bundle: every reader of archives reads them in the same way --------------------------------------
# Names are exact, every file is a regular one without options, the header before each file states what the list of
# files states, compressed data ends where it is said to end, and every byte of the bundle belongs to a file.

_MANIFEST = re.compile(r"manifests/(?:blake3|sha256)-[0-9a-f]{64}\.json")
_MEMBERS_MAX = 200_000  # files
_DIRECTORY_MAX = 32 << 20  # bytes of the list of files
_RATIO_MAX, _RATIO_FREE = 100, 16 << 20  # inflated bytes for each stored one, and how many may be more
_END, _END64, _LOCATOR = struct.Struct("<4s4H2IH"), struct.Struct("<4sQ2H2I4Q"), struct.Struct("<4sIQI")
_LOCAL, _ENTRY, _EXTRA = struct.Struct("<4s5H3I2H"), struct.Struct("<4s6H3I5H2I"), struct.Struct("<HHQQ")
_UNCOUNTED = 12  # bytes of the wide end that its own length does not count
_MOST = 0xFFFFFFFF
_VERSIONS = (20, 45)  # of the format: with compressed data, and with sizes or places above 4 GiB
_WIDE = (0xFFFF, _MOST, _MOST)  # in the plain end, where only the wide one has the number
_PLAIN_MAX = (1 << 31) - 1  # above it Python writes sizes and places into the extra field
_REGULAR = (stat.S_IFREG | 0o777) << 16  # the attributes that a regular file may have


# Characters that nobody sees though Python calls them printable: fillers, and selectors of variations.
_UNSEEN = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)


def visible(text: str) -> str:
    """A text without what a terminal obeys or nobody sees: controls, marks of direction, line breaks, selectors."""
    return "".join(
        one if one.isprintable() and not _UNSEEN.match(one) else one.encode("unicode_escape").decode("ascii")
        for one in text
    )


def member_problems(archive: zipfile.ZipFile, file: IO[bytes]) -> list[str]:
    """The faults of an archive's files that show before their contents are read.

    Args:
        archive: the archive.
        file: the file that it is read from; `directory_problem` has found nothing there.

    Raises:
        zlib.error: compressed data is invalid.
    """
    infos = archive.infolist()
    problems = [*_name_problems(archive.namelist()), *_record_problems(infos)]
    return problems or [*_layout_problems(infos, file, archive.start_dir)]


def _name_problems(names: Sequence[str]) -> Iterator[str]:
    for name in sorted(name for name, count in Counter(names).items() if count > 1):
        yield f"{name}: duplicate file in the bundle"
    for name in sorted({*names} - NAMES):
        if not _MANIFEST.fullmatch(name):
            yield f"{name}: unknown file; a program in the bundle could import it"


def _record_problems(infos: Sequence[zipfile.ZipInfo]) -> Iterator[str]:
    for info in infos:
        most = min(info.compress_size * _RATIO_MAX, sys.maxsize if info.filename == LEDGER else WHOLE_MAX)
        known = info.compress_type == zipfile.ZIP_DEFLATED or (
            info.compress_type == zipfile.ZIP_STORED and info.compress_size == info.file_size
        )
        if info.file_size > max(_RATIO_FREE, most):
            yield f"{info.filename}: {info.file_size} bytes in {info.compress_size} exceed the limits"
        elif not known or info.filename != info.orig_filename or info.extract_version not in _VERSIONS:
            yield f"{info.filename}: another program may read it as a different file"
        elif info.external_attr & ~_REGULAR:
            yield f"{info.filename}: not a regular file"
        elif info.flag_bits or info.volume or info.comment or not _is_extra_of(info):
            yield f"{info.filename}: it has flags, a comment or an extra field"


def _is_extra_of(info: zipfile.ZipInfo) -> bool:
    """Whether the extra field is empty, or has the numbers that are too large for the list of files."""
    sizes = (info.file_size, info.compress_size)
    numbers = [
        *(sizes if max(sizes) > _PLAIN_MAX else ()),
        *([info.header_offset] if info.header_offset > _PLAIN_MAX else ()),
    ]
    wide = struct.pack(f"<HH{len(numbers)}Q", 1, 8 * len(numbers), *numbers) if numbers else b""
    return info.extra == wide


def _layout_problems(infos: Sequence[zipfile.ZipInfo], file: IO[bytes], end: int) -> Iterator[str]:
    """The first fault of what stands before the list of files, which begins at `end`."""
    at = 0
    for info in sorted(infos, key=lambda one: one.header_offset):
        if info.header_offset != at:
            yield f"{info.filename}: it is not directly behind the file before it; bytes belong to no file"
            return
        begin = _begin(file, info)
        if begin is None:
            yield f"{info.filename}: the header before it differs from the list of files"
            return
        at = begin + info.compress_size
        if at > end or (info.compress_type and not _ends_exactly(file, begin, info)):
            yield f"{info.filename}: its data does not end where the list of files says"
            return
    if at != end:
        yield f"{end - at} bytes of the bundle belong to no file"


def _begin(file: IO[bytes], info: zipfile.ZipInfo) -> int | None:
    """Where the data of a file begins, if the header before it states the same as the list of files."""
    name, sizes = info.orig_filename.encode(), (info.compress_size, info.file_size)
    file.seek(info.header_offset)
    head = file.read(_LOCAL.size + len(name) + _EXTRA.size)
    if len(head) < _LOCAL.size or not head.startswith(b"PK\3\4"):
        return None
    version, flags, method, _time, _date, crc, *stated, named, extra = _LOCAL.unpack_from(head)[1:]
    if (flags, method, crc, named) != (info.flag_bits, info.compress_type, info.CRC, len(name)):
        return None
    if version not in _VERSIONS or version > info.extract_version:
        return None
    wide = _EXTRA.pack(1, 16, info.file_size, info.compress_size) if extra else b""
    # Before Python 3.11.4, zipfile states sizes that fit a second time in front of the wide ones.
    same = (stated == [*sizes] or (bool(extra) and stated == [_MOST, _MOST])) and extra == len(wide)
    return info.header_offset + _LOCAL.size + named + extra if (
        same and head[_LOCAL.size :].startswith(name + wide)
    ) else None  # fmt: skip


def _ends_exactly(file: IO[bytes], begin: int, info: zipfile.ZipInfo) -> bool:
    """Whether compressed data ends with its last byte, and becomes as many bytes as are stated."""
    state, left, size = zlib.decompressobj(-zlib.MAX_WBITS), info.compress_size, 0
    file.seek(begin)
    while left and not state.eof and (piece := file.read(min(PIECE, left))):
        left -= len(piece)
        more = True
        while more:
            inflated = state.decompress(piece, PIECE)
            size += len(inflated)
            piece = state.unconsumed_tail
            more = size <= info.file_size and (len(piece) > 0 or len(inflated) == PIECE)
        if size > info.file_size:
            return False
    return state.eof and not left and not state.unused_data and size == info.file_size


def directory_problem(file: IO[bytes]) -> str | None:
    """Why the list of files must not be read: it is too long, or another reader would find another list.

    Python takes a kilobyte of memory for each file. `python BUNDLE` finds the list by other records than zipfile does.
    """
    at = file.seek(0, 2) - _END.size
    before = max(at - _END64.size - _LOCATOR.size, 0)
    file.seek(before)
    tail = file.read()
    if at < 0 or not tail.endswith(b"\0\0") or not tail.startswith(b"PK\5\6", at - before):
        return "invalid evidence bundle: it does not end as a zip file without a comment does"
    disk, other, here, *plain = _END.unpack_from(tail, at - before)[1:7]
    count, size, offset = plain
    parts = [disk, other, here - count]
    if tail.startswith(b"PK\6\7", max(at - before - _LOCATOR.size, 0)):
        at = before
        length, _made, _needed, disk, other, here, *wide = _END64.unpack_from(tail)[1:]
        count, size, offset = wide
        first, stated, disks = _LOCATOR.unpack_from(tail, _END64.size)[1:]
        parts += [length - (_END64.size - _UNCOUNTED), disk, other, here - count, first, disks - 1]
        same = all(one in (other, most) for one, other, most in zip(plain, wide, _WIDE, strict=True))
        if not tail.startswith(b"PK\6\6") or stated != at or not same:
            return "invalid evidence bundle: it has two lists of files"
    if any(parts):
        return "invalid evidence bundle: it is a part of an archive"
    if count > _MEMBERS_MAX or size > _DIRECTORY_MAX:
        return f"the bundle exceeds the limit of {_MEMBERS_MAX} files: {count} files, listed in {size} bytes"
    if offset + size != at:
        return "invalid evidence bundle: bytes belong to no file"
    file.seek(offset)
    return (
        None if _is_list(file.read(size), count) else "invalid evidence bundle: its list of files is damaged"
    )


def _is_list(directory: bytes, count: int) -> bool:
    """Whether a list of files has as many entries as its end states, and nothing else."""
    at = 0
    for _entry in range(count):
        if not directory.startswith(b"PK\1\2", at) or at + _ENTRY.size > len(directory):
            return False
        at += _ENTRY.size + sum(_ENTRY.unpack_from(directory, at)[10:13])
    return at == len(directory)


def main(arguments: list[str]) -> int:
    """Check a bundle and print the result; return 0 where it is valid, else 1."""
    anchor = arguments[arguments.index("--anchor") + 1] if "--anchor" in arguments[:-1] else None
    named = [word for word in arguments if word not in ("--anchor", anchor)]
    checked = check(named[0] if named else sys.argv[0], anchor)
    lines = [
        f"{name}: {value}" for name, value in asdict(checked).items() if name not in ("problems", "unlisted")
    ]
    lines += [f"PROBLEM {problem}" for problem in checked.problems]
    lines += ["the bundle is complete and consistent" if checked.ok else "the bundle is NOT valid"]
    if checked.ok:
        lines += [f"{PAGE} is not compared with {REPORT} here, only by an installed wherry", PROOF]
    sys.stdout.write("".join(f"{visible(line)}\n" for line in lines))
    return 0 if checked.ok else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
