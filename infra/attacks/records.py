"""Records of wherry that somebody else wrote: journals, leases, sidecars, signatures, ledgers and bundles."""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import shutil
import sqlite3
import zipfile
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from attacks import lies, prepare
from attacks.archives import write_file
from attacks.case import LEDGER, MARKER, Case
from wherry.target.area import JOURNAL

GOLDEN = Path(__file__).resolve().parents[2] / "tests" / "golden"
_LISTING = "index.json"  # of a bundle
TARGET = "target"  # where the verb `convert here` writes
_SIDECARS, _LEASES, _ROWS, _INDEX = 150, 60, 80, 60
_LEASE = {"host": "h", "pid": 1, "namespace": "n", "start": 1, "token": "01234567"}


# ---- Sidecars and signatures


def _replace_record(place: Path, name: str, data: bytes) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        shutil.copytree(place / prepare.WRITTEN, folder / "written")
        (folder / "written" / name).write_bytes(data)
        return folder / "written"

    return make


def _sidecars(place: Path) -> Iterator[Case]:
    for name, count in (("wherry.json", _SIDECARS), ("wherry.sig", _INDEX)):
        sound = json.loads((place / prepare.WRITTEN / name).read_bytes())
        for number, found in lies.documents(sound, count, name):
            text = json.dumps(found).encode("utf-8", "surrogatepass")
            yield Case(f"{name}/{number}", _replace_record(place, name, text))
        for number, text in enumerate(
            (b"", b"{}", b"[]", b"null", b"{" * 5000, b'{"schema": 99}', b"\xff", bytes(4096))
        ):
            yield Case(f"{name}/text-{number}", _replace_record(place, name, text))


# ---- Leases and journals


def killed_before_its_commit(good: Path, folder: Path) -> Path:
    """What a conversion leaves that was killed when everything was written: lease, staging area and journal."""
    from wherry.testing.faults import killing, replace_value

    child = os.fork()
    if child == 0:
        import wherry

        with replace_value("wherry.target.file_staging:rename_without_replacing", killing):
            wherry.convert(good, folder / TARGET, to="torch-zip", lineage=False)
        os._exit(9)
    os.waitpid(child, 0)
    areas = [path for path in folder.iterdir() if path.is_dir()]
    assert areas, "the killed conversion left no staging area"
    return areas[0]


def _lease(text: bytes) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        (folder / f".wherry-{TARGET}.lease").write_bytes(text)
        (folder / f".wherry-{TARGET}.00112233-01234567").mkdir(mode=0o700)
        return folder

    return make


def _area(good: Path, change: Callable[[Path], None]) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        change(killed_before_its_commit(good, folder))
        return folder

    return make


def _line(text: bytes) -> Callable[[Path], None]:
    def change(area: Path) -> None:
        (area / JOURNAL).write_bytes(text)

    return change


def _last_line_changed(at: int) -> Callable[[Path], None]:
    def change(area: Path) -> None:
        data = bytearray((area / JOURNAL).read_bytes())
        data[at % len(data)] ^= 1
        (area / JOURNAL).write_bytes(data)

    return change


def _data_changed(area: Path) -> None:
    for file in area.rglob("*"):
        if file.is_file() and file.name != JOURNAL:
            file.write_bytes(b"\xff" * file.stat().st_size)


def _link_out(area: Path) -> None:
    for file in list(area.rglob("*")):
        if file.is_file():
            file.unlink()
            file.symlink_to("/etc/passwd")


def _replaced_by_link(area: Path) -> None:
    shutil.rmtree(area)
    area.symlink_to("/etc")


def _journal_is(put: Callable[[Path], object]) -> Callable[[Path], None]:
    def change(area: Path) -> None:
        (area / JOURNAL).unlink(missing_ok=True)
        put(area / JOURNAL)

    return change


def _open_to_all(area: Path) -> None:
    area.chmod(0o777)


def _staging(place: Path) -> Iterator[Case]:
    good = place / prepare.GOOD
    for number, found in lies.documents(_LEASE, _LEASES, "lease"):
        yield Case(f"lease/{number}", _lease(json.dumps(found).encode("utf-8", "surrogatepass")))
    for number, text in enumerate(
        (b"", b"\0" * 99, b"{" * 9000, b"[1]", b"null", b'{"pid":' + b"9" * 9000 + b"}")
    ):
        yield Case(f"lease/text-{number}", _lease(text))
    changes: dict[str, Callable[[Path], None]] = {
        "data": _data_changed,
        "links": _link_out,
        "area-is-link": _replaced_by_link,
        "open": _open_to_all,
        "fifo": _journal_is(os.mkfifo),
        "device": _journal_is(lambda path: path.symlink_to("/dev/zero")),
        "folder": _journal_is(Path.mkdir),
        "outside": _journal_is(lambda path: path.symlink_to("/etc/passwd")),
        **{f"flipped-{at}": _last_line_changed(at) for at in range(0, 400, 40)},
        **{
            f"text-{number}": _line(text)
            for number, text in enumerate(
                (
                    b"\n",
                    b"{}\tmac\n",
                    b"{" * 9000 + b"\t" + b"0" * 64 + b"\n",
                    b"\xff\t\xff\n",
                    bytes(1 << 20),
                    b"a\tb\n" * 9000,
                    b"\t" + b"\xc3\xa9".ljust(64, b"0") + b"\n",
                )
            )
        },
    }
    for name, change in changes.items():
        yield Case(f"journal/{name}", _area(good, change))


# ---- Ledgers


def _ledger(change: Callable[[sqlite3.Connection], object]) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        with closing(sqlite3.connect(folder / LEDGER)) as connection:
            connection.executescript((GOLDEN / "ledger-4.sql").read_text())
            change(connection)
            connection.commit()
        return folder / LEDGER

    return make


def _tables() -> dict[str, list[str]]:
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.executescript((GOLDEN / "ledger-4.sql").read_text())
        names = [
            row[0]
            for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name")
        ]
        return {
            name: [row[1] for row in connection.execute(f'PRAGMA table_info("{name}")')] for name in names
        }


def _value(table: str, column: str, value: Any) -> Callable[[sqlite3.Connection], None]:
    def change(connection: sqlite3.Connection) -> None:
        for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall():
            connection.execute(f'DROP TRIGGER "{name}"')
        with suppress(sqlite3.IntegrityError):  # a row that the schema itself refuses
            connection.execute(f'UPDATE OR IGNORE "{table}" SET "{column}" = ?', (value,))

    return change


def _ledgers() -> Iterator[Case]:
    generator, tables = random.Random("ledger"), _tables()
    values = (
        None,
        "",
        -1,
        2**63 - 1,
        1.5,
        b"\0",
        "x" * 99_999,
        "{" * 9000,
        "[]",
        "{}",
        "null",
        *lies.NAMES[:14],
    )
    for number in range(_ROWS):
        table = generator.choice(list(tables))
        column, value = generator.choice(tables[table]), generator.choice(values)
        text = value.encode("utf-8", "replace").decode() if isinstance(value, str) else value
        yield Case(f"ledger/{number}-{table}.{column}", _ledger(_value(table, column, text)))
    scripts = {
        "trigger": f"CREATE TRIGGER t AFTER INSERT ON statement BEGIN SELECT writefile('{MARKER}', 'x'); END",
        "extension": "CREATE VIEW v AS SELECT load_extension('evil')",
        "attach": "CREATE TABLE extra AS SELECT 1",
        "endless": "DROP TABLE location; CREATE VIEW location AS "
        "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x+1 FROM c) "
        "SELECT "
        "x AS checkpoint_digest, x AS uri, x AS fingerprint, x AS seen, x AS statement FROM c LIMIT 3000000",
        "version": "PRAGMA user_version = 2147483647",
        "negative": "PRAGMA user_version = -1",
        **{f"no-{name}": f'DROP TABLE "{name}"' for name in tables},
    }
    for name, script in scripts.items():
        yield Case(
            f"ledger/{name}", _ledger(lambda connection, script=script: connection.executescript(script))
        )
    for number, data in enumerate(
        (b"", b"SQLite format 3\0" + bytes(84), b"SQLite format 3\0" + b"\xff" * 5000, b"x" * 200)
    ):
        yield Case(f"ledger/file-{number}", write_file(LEDGER, data))


# ---- Bundles


def evidence() -> dict[str, bytes]:
    """The members of the golden evidence, with the program that wherry puts into a bundle now."""
    from wherry.auditor.bundle import program_text

    with zipfile.ZipFile(GOLDEN / "bundle-2.zip") as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    return listed({**members, "__main__.py": program_text()})


def listed(contents: dict[str, bytes]) -> dict[str, bytes]:
    """The contents under an index that agrees."""
    index = json.loads(contents[_LISTING])
    index["files"] = {
        name: {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for name, data in contents.items()
        if name != _LISTING
    }
    return {**contents, _LISTING: json.dumps(index).encode()}


def bundle(change: Callable[[dict[str, bytes]], object]) -> bytes:
    """The evidence of the tests with other members."""
    members = evidence()
    change(members)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return buffer.getvalue()


def _bundles() -> Iterator[Case]:
    members = evidence()
    for name in (name for name in members if name.endswith(".json")):
        for number, found in lies.documents(json.loads(members[name]), _INDEX // 3, name):
            text = json.dumps(found).encode("utf-8", "surrogatepass")
            yield _bundle(f"{name}-{number}", lambda all_, name=name, text=text: all_.update({name: text}))
    code = f"open({MARKER!r}, 'w')\n".encode()
    for number, name in enumerate(
        ("__main__.py", "hashlib.py", "json/__init__.py", "../evil.py", "/evil.py", "manifests/../x")
    ):
        yield _bundle(f"program-{number}", lambda all_, name=name: all_.update({name: code}), evil=True)
    for exponent in (20, 26, 29):
        yield _bundle(
            f"zeros-{exponent}", lambda all_, size=1 << exponent: all_.update({"ledger.jsonl": bytes(size)})
        )
    yield _bundle("lines", lambda all_: all_.update({"ledger.jsonl": b"{}\n" * 3_000_000}))
    yield _bundle("values", lambda all_: all_.update({"report.json": b"[" + b"{}," * 3_000_000 + b"{}]"}))
    yield _bundle("many", lambda all_: all_.update({f"manifests/{number}": b"" for number in range(30_000)}))


def _bundle(name: str, change: Callable[[dict[str, bytes]], object], *, evil: bool = False) -> Case:
    def make(folder: Path) -> Path:
        return write_file("evidence.zip", bundle(change))(folder)

    return Case(f"bundle/{name}", make, evil)


def cases(place: Path) -> Iterator[Case]:
    """Every record; `place` has what `prepare` made."""
    yield from _sidecars(place)
    yield from _staging(place)
    yield from _ledgers()
    yield from _bundles()
