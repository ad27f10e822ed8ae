"""Ledgers that are none of wherry, or whose statements lie although their chain is sound.

SQLite runs what a file defines: a view in the place of a table can be endless, and a trigger can drop what is recorded.
A forger of a ledger seals his statements, too: the chain only proves that nothing was changed afterwards.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

from attacks import digits, heads, lies
from attacks.case import LEDGER, Case
from attacks.records import GOLDEN

Change = Callable[[sqlite3.Connection], object]

MODEL = "model.safetensors"
_SEALED = 90
_LONG_VALUE = 80 << 20  # bytes; wherry reads no value of more than 32 MiB
_ENDLESS = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT {} FROM c"
_LONG = "SELECT {} FROM (SELECT printf('%.*c', 900000000, 'x') AS x)"
TIMES = (
    "zzz", "", "9999-12-31T23:59:59.999+00:00", "99999-01-01T00:00:00+00:00", "2026-11-01T00:00:00.000", "2026-11-01",
    "0001-01-01T00:00:00+23:59", "9999-12-31T23:59:59-23:59", "2026-11-01T00:00:00Z", "2026-W44-7", "1e9",
    "\u0662\u0660\u0662\u0666-11-01T00:00:00+00:00", "2026-11-01T00:00:00+00:00\n", "2026-11-01T00:00:00+99:99",
    "\x1b]0;title\x07", digits.LONG,
)  # fmt: skip
_TEXTS = (
    "", "x", "null", "[]", "1", "{", "{" * 9000, "[" * 100_000, '{"a": 1, "a": 2}', '{"a": NaN}', '{"a": 1e999}',
    f'{{"seconds": {digits.LONG}}}', '{"a": "\\ud800"}',
)  # fmt: skip


def _ledger(change: Change) -> Callable[[Path], Path]:
    """The ledger of the tests with a change, next to a checkpoint that it knows."""

    def make(folder: Path) -> Path:
        (folder / MODEL).write_bytes(heads.safetensors(json.dumps(heads.HEADER).encode()))
        with closing(sqlite3.connect(folder / LEDGER)) as connection:
            connection.executescript((GOLDEN / "ledger-4.sql").read_text())
            _add_place(connection, folder / MODEL)
            change(connection)
            connection.commit()
        return folder / MODEL

    return make


def _add_place(connection: sqlite3.Connection, path: Path) -> None:
    """Let the ledger say that its first checkpoint is here."""
    found = {"checkpoint_digest": "SELECT source FROM edge LIMIT 1", "uri": f"'{path}'", "fingerprint": "'x'",
             "seen": "'2026-11-02T00:00:00.000+00:00'", "statement": "1"}  # fmt: skip
    values = ", ".join(f"({value})" for value in found.values())
    connection.execute(f"INSERT INTO location ({', '.join(found)}) VALUES ({values})")


def _script(text: str) -> Change:
    return lambda connection: connection.executescript(text)


def _tables() -> dict[str, list[str]]:
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.executescript((GOLDEN / "ledger-4.sql").read_text())
        names = connection.execute(
            "SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name"
        ).fetchall()
        return {name: _columns(connection, name) for (name,) in names}


def _columns(connection: sqlite3.Connection, table: str) -> list[str]:
    return [row[1] for row in connection.execute(f'PRAGMA table_info("{table}")')]


# ---- What a file defines


def _view(table: str, columns: list[str], view: str) -> str:
    found = ", ".join(f'x AS "{column}"' for column in columns)
    return f'DROP TABLE "{table}"; CREATE VIEW "{table}" AS {view.format(found)};'


def _definitions() -> Iterator[tuple[str, Change]]:
    tables = _tables()
    for kind, view in (("endless", _ENDLESS), ("long", _LONG)):
        yield f"views-{kind}", _script("".join(_view(*row, view) for row in tables.items()))
        for table, columns in tables.items():
            yield f"view-{kind}-{table}", _script(_view(table, columns, view))
    for table, columns in tables.items():
        rows = ", ".join(f'"{column}" GENERATED ALWAYS AS ({_MADE})' for column in columns)
        yield f"generated-{table}", _script(f'DROP TABLE "{table}"; CREATE TABLE "{table}" (own, {rows});'
                                            f'INSERT INTO "{table}" (own) VALUES (1), (2)')  # fmt: skip
        yield (
            f"virtual-{table}",
            _script(f'DROP TABLE "{table}"; CREATE VIRTUAL TABLE "{table}" USING fts5(a, b)'),
        )
        yield (
            f"trigger-{table}",
            _script(f'CREATE TRIGGER quiet BEFORE INSERT ON "{table}" BEGIN SELECT RAISE(IGNORE); END'),
        )
        yield (
            f"index-{table}",
            _script(f'CREATE UNIQUE INDEX odd ON "{table}" (length("{columns[0]}")) WHERE 0'),
        )
        yield f"added-{table}", _script(f'ALTER TABLE "{table}" ADD COLUMN odd DEFAULT ({digits.LONG[:9]})')


_MADE = "printf('%.*c', 900000000, 'x')"
_SCRIPTS = {
    "table": "CREATE TABLE other (x)",
    "view-apart": f"CREATE VIEW other AS {_ENDLESS.format('x')}",
    "no-triggers": "DROP TRIGGER statement_no_update; DROP TRIGGER statement_no_delete",
    "trigger-replaced": "DROP TRIGGER statement_no_update; CREATE TRIGGER statement_no_update BEFORE UPDATE ON "
    "statement BEGIN SELECT 1; END",
    "trigger-endless": "CREATE TRIGGER quiet AFTER INSERT ON statement BEGIN INSERT INTO location SELECT * FROM "
    f"({_ENDLESS.format('x, x, x, x, x')}); END",
    "name": 'CREATE TABLE "\x1b]0;title\x07" (x)',
    "name-markup": 'CREATE TABLE "[red]MARKUP[/red]" (x)',
    "utf-16": "PRAGMA encoding = 'UTF-16'; VACUUM",
    "statistics": "ANALYZE; UPDATE sqlite_stat1 SET stat = '9999999999 1'",
    "many-tables": "".join(f"CREATE TABLE t{number} (x);" for number in range(3000)),
}


# ---- Values


def _everywhere(value: Any, columns: tuple[str, ...]) -> Change:
    """A value in columns of these names, in every table and row."""

    def change(connection: sqlite3.Connection) -> None:
        with _triggers_away(connection):
            for table, names in _tables().items():
                for column in set(names) & set(columns):
                    with suppress(sqlite3.IntegrityError):
                        connection.execute(f'UPDATE "{table}" SET "{column}" = ?', (value,))

    return change


class _triggers_away:  # noqa: N801  a context
    """Without the triggers, which are there again afterwards."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def __enter__(self) -> None:
        query = "SELECT name, sql FROM sqlite_master WHERE type = 'trigger'"
        self._found = self._connection.execute(query).fetchall()
        for name, _text in self._found:
            self._connection.execute(f'DROP TRIGGER "{name}"')

    def __exit__(self, *_error: object) -> None:
        for _name, text in self._found:
            self._connection.execute(text)


def _long_values(count: int, size: int, column: str) -> Change:
    def change(connection: sqlite3.Connection) -> None:
        with _triggers_away(connection):
            connection.execute(
                f"UPDATE statement SET {column} = printf('%.*c', ?, 'x') WHERE seq <= ?", (size, count)
            )

    return change


def _values() -> Iterator[tuple[str, Change]]:
    for number, time in enumerate(TIMES):
        yield f"time-{number}", _everywhere(time, ("time", "seen"))
    for number, text in enumerate(_TEXTS):
        yield f"body-{number}", _everywhere(text, ("body", "options"))
    for number, value in enumerate((None, 7, 7.5, b"x", b"\xff" * 9, -1, 2**63 - 1, float("inf"))):
        yield (
            f"type-{number}",
            _everywhere(value, ("body", "kind", "content", "options", "software", "format")),
        )
        yield (
            f"number-{number}",
            _everywhere(value, ("schema", "step", "tensors", "nbytes", "lossless", "cursor")),
        )
        yield (
            f"digest-{number}",
            _everywhere(value, ("uri", "fingerprint", "target_uri", "source_uri", "registry")),
        )
    for column in ("body", "kind", "time"):
        yield f"gigantic-{column}", _long_values(1, _LONG_VALUE, column)
        yield f"large-{column}", _long_values(12, 31 << 20, column)


# ---- Statements that lie, in a chain that is sound


def _seal(connection: sqlite3.Connection, change: Callable[[dict[str, Any]], None]) -> None:
    """Change every statement, and compute the chain anew."""
    from wherry.ledger.schema import GENESIS
    from wherry.ledger.statements import content_of, hash_of

    connection.row_factory = sqlite3.Row
    prev = GENESIS
    with _triggers_away(connection):
        for row in map(dict, connection.execute("SELECT * FROM statement ORDER BY seq").fetchall()):
            change(row)
            row |= {"prev": prev, "content": content_of(row["kind"], row["body"])}
            row["hash"] = prev = hash_of(row)
            names = ", ".join(f"{name} = :{name}" for name in row)
            connection.execute(f"UPDATE statement SET {names} WHERE seq = :seq", row)


def _lie(number: int, row: dict[str, Any]) -> None:
    """A body with one lie."""
    [*_, (_, found)] = lies.documents(json.loads(row["body"]), 1, f"{number}-{row['seq']}")
    row["body"] = json.dumps(found)


def _set(row: dict[str, Any], **values: Any) -> None:
    row |= values


def _digit(form: str, row: dict[str, Any]) -> None:
    row["body"] = digits.everywhere(json.loads(row["body"]), digits.FORMS[form]).decode()


def _sealed() -> Iterator[tuple[str, Change]]:
    changes: dict[str, Callable[[dict[str, Any]], None]] = {
        **{f"lie-{number}": partial(_lie, number) for number in range(_SEALED)},
        **{f"time-{number}": partial(_set, time=time) for number, time in enumerate(TIMES)},
        **{f"body-{number}": partial(_set, body=text) for number, text in enumerate(_TEXTS)},
        **{f"digits-{form}": partial(_digit, form) for form in digits.FORMS},
        **{
            f"kind-{kind}": partial(_set, kind=kind)
            for kind in ("note", "audit", "deletion", "rebuild", "x\n")
        },
    }
    for name, change in changes.items():
        yield f"sealed-{name}", partial(_seal, change=change)


# ---- Graphs and rows without end


def _edges(pairs: str) -> Change:
    """Edges between made checkpoints, and from the first one of the ledger."""
    rows = f"INSERT OR IGNORE INTO edge SELECT a, b, 'p', 1 FROM ({pairs})"
    first = "SELECT source AS a, 'n0' AS b FROM edge LIMIT 1"
    return _script(f"PRAGMA foreign_keys = OFF; INSERT INTO edge SELECT a, b, 'p', 1 FROM ({first}); {rows}")


_COUNT = "WITH RECURSIVE c(x) AS (SELECT 0 UNION ALL SELECT x + 1 FROM c LIMIT {})"
_GRAPHS = {
    "chain": f"{_COUNT.format(50_000)} SELECT 'n' || x AS a, 'n' || (x + 1) AS b FROM c",
    "ring": f"{_COUNT.format(5000)} SELECT 'n' || x AS a, 'n' || ((x + 1) % 5000) AS b FROM c",
    "dense": f"{_COUNT.format(300)} SELECT 'n' || c.x AS a, 'n' || d.x AS b FROM c, c AS d WHERE c.x <> d.x",
    "ladder": f"{_COUNT.format(20_000)} SELECT 'n' || x AS a, 'n' || (x + d) AS b FROM c, "
    "(SELECT 1 AS d UNION SELECT 2)",
    "itself": "SELECT 'n0' AS a, 'n0' AS b",
}
_MANY = (
    f"DROP TRIGGER statement_continues; {_COUNT.format(200_000)} INSERT INTO statement SELECT 1000 + x, 'p' || x, "
    "'h' || x, 'note', 4, 'c', '{}', '2026-11-02T00:00:00.000+00:00', '2026-11-02T00:00:00.000+00:00' FROM c"
)


# ---- Files


def _file(put: Callable[[Path], object], suffix: str = "") -> Callable[[Path], Path]:
    """Something else in the place of a file of the ledger."""

    def make(folder: Path) -> Path:
        found = _ledger(lambda _connection: None)(folder)
        place = folder / f"{LEDGER}{suffix}"
        place.unlink(missing_ok=True)
        put(place)
        return found

    return make


_FILES: dict[str, Callable[[Path], object]] = {
    "fifo": os.mkfifo,
    "folder": lambda file: file.mkdir(),
    "passwd": lambda file: file.symlink_to("/etc/passwd"),
    "zero": lambda file: file.symlink_to("/dev/zero"),
    "random": lambda file: file.write_bytes(b"\xd9\xd5\x05\xf9\x20\xa1\x63\xd7" + bytes(range(256)) * 40),
    "sparse": lambda file: (file.touch(), os.truncate(file, 8 << 30)),
}


def cases() -> Iterator[Case]:
    """Every ledger."""
    changes = {
        **dict(_definitions()),
        **{f"script-{name}": _script(text) for name, text in _SCRIPTS.items()},
        **dict(_values()),
        **dict(_sealed()),
        **{f"graph-{name}": _edges(pairs) for name, pairs in _GRAPHS.items()},
        "many": _script(_MANY),
    }
    for name, change in changes.items():
        yield Case(f"ledger-forged/{name}", _ledger(change))
    for suffix in ("", "-wal", "-shm", "-journal"):
        for name, put in _FILES.items():
            yield Case(f"ledger-forged/file{suffix}-{name}", _file(put, suffix))
