"""The evidence of an audit: one zip file that can be checked without the ledger, the registry or the storage.

It holds the report (JSON and Markdown), the manifest of every checked checkpoint, the ledger's statements from the
first to the anchor, and the check itself (`wherry.prove.check`, which needs only the standard library). An index
states size and SHA-256 of each file. The bundle is written atomically and never overwrites a file; the ledger's
statement of the audit contains its SHA-256.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wherry.core.json_document import json_value, parse_json
from wherry.core.limits import SMALL
from wherry.core.receipt import utc_now
from wherry.cures import Command, Cure
from wherry.errors import NotFoundError, TargetExistsError, UsageError, storage_error
from wherry.prove import check
from wherry.prove.check import (
    ANCHOR,
    INDEX,
    LEDGER,
    MANIFESTS,
    PAGE,
    PROGRAM,
    README,
    REPORT,
    SCHEMA,
    CheckReport,
)
from wherry.prove.markdown import render_page
from wherry.prove.report import AuditReport
from wherry.store.folders import make_durable_folders, rename_without_replacing, sync_folder
from wherry.store.local_store import locate
from wherry.store.location import MOST_CONFIG

if TYPE_CHECKING:
    from wherry.ledger.record import Ledger
    from wherry.store.sidecar import Sidecar

_STAMP = (1980, 1, 1, 0, 0, 0)  # a fixed time, so that the digest of a bundle does not depend on it
_PLAIN_NAME = r"[\w+=@][\w.+=@ -]{0,254}"  # of a bundle, in a command that is pasted
_README = """Evidence of an audit by wherry.

Check it offline:  wherry audit --check {name} [--anchor HASH]
with a wherry that you installed yourself. `python {name}` runs the program in this bundle, which is that
of whoever made the bundle; the command above compares it with the known program and reports a difference.

report.md, report.json   the checked checkpoints and the findings
manifests/               the recorded contents of each checkpoint, with a digest per tensor
ledger.jsonl             the ledger's statements, each with the hash of the one before it
anchor.json              the end of that chain; compare it with an anchor that was kept elsewhere
index.json               size and SHA-256 of each file
"""


def place_for(bundle: str | os.PathLike[str], started: str) -> Path:
    """Path of a bundle: the file itself, or a file named by the time in a folder (an existing one, or `NAME/`).

    Raises:
        TargetExistsError: the file exists already.
        UsageError: it is not local.
    """
    location = locate(bundle)
    if not location.store.capabilities.local:
        raise UsageError(
            "the evidence bundle must be a local file",
            uri=location.uri,
            cure="write it to a local file and copy it there",
        )
    path = Path(location.path)
    if os.fspath(bundle).endswith("/"):
        prepare_folder(path)
    if path.is_dir():
        path /= f"wherry-audit-{started[:19].replace(':', '')}.zip"
    if path.exists():
        raise TargetExistsError("evidence bundle already exists", uri=str(path), cure="choose another name")
    return path


def prepare_folder(path: Path) -> None:
    """Create a folder for evidence durably, with missing parents.

    Raises:
        StorageError: the storage failed.
    """
    try:
        for _made in make_durable_folders(path):
            pass
    except OSError as error:
        raise storage_error(error, str(path)) from error


def record_of(sidecar: Sidecar) -> bytes:
    """A sidecar for the evidence: without the leaves, which the tensor digests cover."""
    receipt = sidecar.receipt.to_json() if sidecar.receipt else None
    data = {
        "checkpoint": asdict(sidecar.checkpoint),
        "manifest": sidecar.manifest.to_json(),
        "receipt": receipt,
    }
    return json.dumps({"schema": SCHEMA, **data}, ensure_ascii=False).encode()


def write_bundle(path: Path, report: AuditReport, page: str, records: Path, ledger: Ledger) -> str:
    """Write the evidence.

    Args:
        path: path of the new file.
        report: the report.
        page: the report as Markdown.
        records: a folder with a file (`record_name`, `record_of`) for each checked checkpoint.
        ledger: the ledger, for the statements up to the report's anchor.

    Returns:
        SHA-256 of the bundle.

    Raises:
        StorageError: it cannot be written; no file is left behind.
    """
    draft = path.with_name(f".wherry-{path.name}.{os.getpid()}")
    try:
        with zipfile.ZipFile(draft, "x", zipfile.ZIP_DEFLATED) as archive:
            _fill(archive, path.name, report, page, records, ledger)
        with draft.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            os.fsync(file.fileno())
        rename_without_replacing(draft, path)
        sync_folder(path.parent)
    except OSError as error:
        raise storage_error(error, str(path)) from error
    finally:
        draft.unlink(missing_ok=True)
    return digest


def check_bundle(bundle: str | os.PathLike[str], anchor: str | None = None) -> CheckReport:
    """Check a bundle offline; `anchor` is a hash, or a file that `wherry ledger anchor` wrote.

    Raises:
        NotFoundError: the bundle does not exist.
        StorageError: it cannot be read.
    """
    location = locate(bundle)
    if location.entry is None:
        raise NotFoundError(
            "evidence bundle not found", uri=location.uri, cure="check the path", stage="audit"
        )
    try:
        checked = check.check(location.path, anchor_hash(anchor))
        if checked.ok:
            _check_texts(location.path, checked)
    except OSError as error:
        raise storage_error(error, location.uri) from error
    return checked


def _check_texts(path: str, checked: CheckReport) -> None:
    """Compare what is no data in a bundle, its program, README and page, with the texts that wherry writes."""
    with zipfile.ZipFile(path) as archive:
        program, readme, page, report = (archive.read(name) for name in (PROGRAM, README, PAGE, REPORT))
    if program != program_text():
        checked.say(
            "__main__.py: not the check of this version of wherry; do not run `python` on this bundle, and check it "
            "with the wherry that made it"
        )
    # Only the first lines of a README name the bundle, whose file may have any name.
    pattern = _PLAIN_NAME.join(map(re.escape, _README.split("{name}")))
    if not re.fullmatch(pattern, readme.decode("utf-8", "replace")):
        checked.say("README.txt: not the text that wherry writes; do not follow it")
    try:  # the page that people read must say what the data says
        rendered = render_page(json_value(report))
    except ValueError as error:
        checked.say(f"{REPORT}: {error}")
        return
    if rendered.encode() != page:
        checked.say(f"{PAGE}: not the text that wherry renders from {REPORT}; do not trust it")


def program_text() -> bytes:
    """The program of a bundle: the text of `wherry.prove.check`, which needs no other module of wherry."""
    return Path(check.__file__).read_bytes()


def anchor_hash(anchor: str | None) -> str | None:
    """The hash of an anchor that is given as a hash or as a JSON file.

    Raises:
        UsageError: it is neither.
    """
    if anchor is None or _is_hash(anchor):
        return anchor
    try:
        kept = parse_json(locate(anchor).read_whole(MOST_CONFIG), "the anchor", limits=SMALL)["hash"]
    except (NotFoundError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"invalid anchor {anchor!r}",
            cure=Cure("give the hash or the file that {} printed", Command("ledger anchor")),
        ) from error
    if not _is_hash(kept):
        raise UsageError(
            f"invalid anchor {anchor!r}: its hash is not a SHA-256",
            cure=Cure("give the hash or the file that {} printed", Command("ledger anchor")),
        )
    return kept


def _is_hash(text: Any) -> bool:
    least, most = 16, 64
    return isinstance(text, str) and least <= len(text) <= most and set(text) <= set("0123456789abcdef")


def _fill(
    archive: zipfile.ZipFile,
    name: str,
    report: AuditReport,
    page: str,
    records: Path,
    ledger: Ledger,
) -> None:
    index: dict[str, dict[str, Any]] = {}

    def add(member: str, pieces: Iterable[bytes]) -> None:
        state, size = hashlib.sha256(), 0
        info = zipfile.ZipInfo(member, _STAMP)
        info.compress_type = zipfile.ZIP_DEFLATED
        with archive.open(info, "w", force_zip64=True) as file:
            for piece in pieces:
                file.write(piece)
                state.update(piece)
                size += len(piece)
        index[member] = {"size": size, "sha256": state.hexdigest()}

    chain = report.chain
    named = name if re.fullmatch(_PLAIN_NAME, name) else "BUNDLE.zip"
    add("README.txt", [_README.format(name=named).encode()])
    add("report.md", [page.encode()])
    add(REPORT, [_text(report.to_json())])
    add(ANCHOR, [_text({"schema": SCHEMA, "seq": chain.statements, "hash": chain.head, "time": chain.time})])
    add("__main__.py", [program_text()])
    for record in sorted(records.iterdir()):
        add(f"{MANIFESTS}{record.name}", [record.read_bytes()])
    add(LEDGER, _extract(ledger, chain.statements))
    made = {"schema": SCHEMA, "made": utc_now(), "wherry": report.wherry, "files": index}
    archive.writestr(zipfile.ZipInfo(INDEX, _STAMP), _text(made))


def _extract(ledger: Ledger, last: int) -> Iterator[bytes]:
    """Every statement up to the anchor as one line; the chain needs all of them."""
    from wherry.ledger.record import statements

    for row in statements(ledger):
        if row.seq > last:
            return
        line = {
            "seq": row.seq,
            "prev": row.prev,
            "hash": row.hash,
            "kind": row.kind,
            "schema": row.schema,
            "content": row.content,
            "body": row.text,
            "time": row.time,
            "storage_time": row.storage_time,
        }
        yield json.dumps(line, ensure_ascii=False).encode() + b"\n"


def _text(data: dict[str, Any]) -> bytes:
    return (json.dumps(data, indent=1, ensure_ascii=False) + "\n").encode()
