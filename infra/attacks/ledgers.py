"""Ledgers that are none of wherry, or whose statements lie although their chain is sound.

SQLite runs what a file defines: a view in the place of a table can be endless, and a trigger can drop what is recorded.
A forger of a ledger seals his statements, too: the chain only proves that nothing was changed afterwards.
"""

from __future__ import annotations

import json
import random
import sqlite3
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

from infra.attacks import heads, lies
from infra.attacks.bundles import GOLDEN
from infra.attacks.case import LEDGER, MARKER, Case, Make, named, write_file
from infra.attacks.records import PLACES

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
    "\x1b]0;title\x07", lies.LONG,
)  # fmt: skip
_TEXTS = (
    "", "x", "null", "[]", "1", "{", "{" * 9000, "[" * 100_000, '{"a": 1, "a": 2}', '{"a": NaN}', '{"a": 1e999}',
    f'{{"seconds": {lies.LONG}}}', '{"a": "\\ud800"}',
)  # fmt: skip


def _ledger(change: Change, *, examined: str = MODEL) -> Callable[[Path], Path]:
    """The ledger of the tests with a change, next to a checkpoint that it knows; what is examined is one of the two."""

    def make(folder: Path) -> Path:
        if examined == MODEL:
            (folder / MODEL).write_bytes(heads.SOUND)
        with closing(sqlite3.connect(folder / LEDGER)) as connection:
            connection.executescript((GOLDEN / "ledger-4.sql").read_text())
            if examined == MODEL:
                found = {"checkpoint_digest": "SELECT source FROM edge LIMIT 1", "uri": f"'{folder / MODEL}'",
                         "fingerprint": "'x'", "seen": "'2026-11-02T00:00:00.000+00:00'", "statement": "1"}  # fmt: skip
                values = ", ".join(f"({value})" for value in found.values())
                connection.execute(f"INSERT INTO location ({', '.join(found)}) VALUES ({values})")
            change(connection)
            connection.commit()
        return folder / examined

    return make


def _script(text: str) -> Change:
    return lambda connection: connection.executescript(text)


@cache
def _tables() -> dict[str, list[str]]:
    """The columns of each table."""
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.executescript((GOLDEN / "ledger-4.sql").read_text())
        tables = connection.execute(
            "SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name"
        ).fetchall()
        return {
            name: [row[1] for row in connection.execute(f'PRAGMA table_info("{name}")')] for (name,) in tables
        }


# ---- What a file defines


def _view(table: str, columns: list[str], view: str) -> str:
    found = ", ".join(f'x AS "{column}"' for column in columns)
    return f'DROP TABLE "{table}"; CREATE VIEW "{table}" AS {view.format(found)};'


def _definitions() -> Iterator[tuple[str, str]]:
    for kind, view in (("endless", _ENDLESS), ("long", _LONG)):
        yield f"views-{kind}", "".join(_view(*row, view) for row in _tables().items())
        for table, columns in _tables().items():
            yield f"view-{kind}-{table}", _view(table, columns, view)
    for table, columns in _tables().items():
        rows = ", ".join(f'"{column}" GENERATED ALWAYS AS ({_MADE})' for column in columns)
        made = f'DROP TABLE "{table}"; CREATE TABLE "{table}" (own, {rows});'
        yield f"generated-{table}", f'{made}INSERT INTO "{table}" (own) VALUES (1), (2)'
        yield f"virtual-{table}", f'DROP TABLE "{table}"; CREATE VIRTUAL TABLE "{table}" USING fts5(a, b)'
        quiet = f'CREATE TRIGGER quiet BEFORE INSERT ON "{table}"'
        yield f"trigger-{table}", f"{quiet} BEGIN SELECT RAISE(IGNORE); END"
        yield f"index-{table}", f'CREATE UNIQUE INDEX odd ON "{table}" (length("{columns[0]}")) WHERE 0'
        yield f"added-{table}", f'ALTER TABLE "{table}" ADD COLUMN odd DEFAULT ({lies.LONG[:9]})'


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


@contextmanager
def _triggers_away(connection: sqlite3.Connection) -> Generator[None]:
    """Without the triggers, which are there again afterwards."""
    query = "SELECT name, sql FROM sqlite_master WHERE type = 'trigger'"
    found = connection.execute(query).fetchall()
    for name, _text in found:
        connection.execute(f'DROP TRIGGER "{name}"')
    yield
    for _name, text in found:
        connection.execute(text)


def _long_values(count: int, size: int, column: str) -> Change:
    def change(connection: sqlite3.Connection) -> None:
        with _triggers_away(connection):
            connection.execute(
                f"UPDATE statement SET {column} = printf('%.*c', ?, 'x') WHERE seq <= ?", (size, count)
            )

    return change


_TYPED = (None, 7, 7.5, b"x", b"\xff" * 9, -1, 2**63 - 1, float("inf"))
_TYPED_COLUMNS = {
    "type": ("body", "kind", "content", "options", "software", "format"),
    "number": ("schema", "step", "tensors", "nbytes", "lossless", "cursor"),
    "digest": ("uri", "fingerprint", "target_uri", "source_uri", "registry"),
}


def _values() -> Iterator[tuple[str, Change]]:
    for number, time in enumerate(TIMES):
        yield f"time-{number}", _everywhere(time, ("time", "seen"))
    for number, text in enumerate(_TEXTS):
        yield f"body-{number}", _everywhere(text, ("body", "options"))
    for kind, columns in _TYPED_COLUMNS.items():
        for number, value in enumerate(_TYPED):
            yield f"{kind}-{number}", _everywhere(value, columns)
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
    [found] = lies.documents(json.loads(row["body"]), 1, f"{number}-{row['seq']}")
    row["body"] = json.dumps(found)


def _set(row: dict[str, Any], **values: Any) -> None:
    row |= values


def _digit(form: str, row: dict[str, Any]) -> None:
    body = json.loads(row["body"])
    row["body"] = lies.with_digits(body, lies.numbers(body), lies.DIGITS[form]).decode()


def _sealed() -> Iterator[tuple[str, Change]]:
    changes: dict[str, Callable[[dict[str, Any]], None]] = {
        **{f"lie-{number}": partial(_lie, number) for number in range(_SEALED)},
        **{f"time-{number}": partial(_set, time=time) for number, time in enumerate(TIMES)},
        **{f"body-{number}": partial(_set, body=text) for number, text in enumerate(_TEXTS)},
        **{f"digits-{form}": partial(_digit, form) for form in lies.DIGITS},
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


def _file(put: Callable[[Path], object], suffix: str, folder: Path) -> Path:
    """Something else in the place of a file of the ledger."""
    found = _ledger(lambda _connection: None)(folder)
    place = folder / f"{LEDGER}{suffix}"
    place.unlink(missing_ok=True)
    put(place)
    return found


_PUT: dict[str, Callable[[Path], object]] = {
    **{name: PLACES[name] for name in ("fifo", "folder", "sparse")},
    "passwd": PLACES["outside"],
    "zero": PLACES["device"],
    "random": lambda file: file.write_bytes(b"\xd9\xd5\x05\xf9\x20\xa1\x63\xd7" + bytes(range(256)) * 40),
}


# ---- Ledgers that are examined themselves: one value of one row, one script, or no ledger at all

_ONE = (
    None, "", -1, 2**63 - 1, 1.5, b"\0", "x" * 99_999, "{" * 9000, "[]", "{}", "null", *lies.NAMES[:14],
)  # fmt: skip
_ALONE = {
    "trigger": f"CREATE TRIGGER t AFTER INSERT ON statement BEGIN SELECT writefile('{MARKER}', 'x'); END",
    "extension": "CREATE VIEW v AS SELECT load_extension('evil')",
    "attach": "CREATE TABLE extra AS SELECT 1",
    "endless": "DROP TABLE location; CREATE VIEW location AS WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x+1 "
    "FROM c) SELECT x AS checkpoint_digest, x AS uri, x AS fingerprint, x AS seen, x AS statement FROM c LIMIT 3000000",
    "version": "PRAGMA user_version = 2147483647",
    "negative": "PRAGMA user_version = -1",
}
_NO_LEDGERS = (b"", b"SQLite format 3\0" + bytes(84), b"SQLite format 3\0" + b"\xff" * 5000, b"x" * 200)


def _one_value(table: str, column: str, value: Any, connection: sqlite3.Connection) -> None:
    for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall():
        connection.execute(f'DROP TRIGGER "{name}"')
    with suppress(sqlite3.IntegrityError):  # a row that the schema itself refuses
        connection.execute(f'UPDATE OR IGNORE "{table}" SET "{column}" = ?', (value,))


def _alone() -> Iterator[tuple[str, Make]]:
    generator = random.Random("ledger")
    for number in range(80):
        table = generator.choice(list(_tables()))
        column, value = generator.choice(_tables()[table]), generator.choice(_ONE)
        text = value.encode("utf-8", "replace").decode() if isinstance(value, str) else value
        yield f"{number}-{table}.{column}", _ledger(partial(_one_value, table, column, text), examined=LEDGER)
    for name, script in (*_ALONE.items(), *((f"no-{table}", f'DROP TABLE "{table}"') for table in _tables())):
        yield name, _ledger(_script(script), examined=LEDGER)
    for number, data in enumerate(_NO_LEDGERS):
        yield f"file-{number}", write_file(LEDGER, data)


def cases() -> Iterator[Case]:
    """Every ledger."""
    scripts = {
        **dict(_definitions()), **{f"script-{name}": text for name, text in _SCRIPTS.items()}, "many": _MANY,
    }  # fmt: skip
    changes = {
        **{name: _script(text) for name, text in scripts.items()},
        **dict(_values()),
        **dict(_sealed()),
        **{f"graph-{name}": _edges(pairs) for name, pairs in _GRAPHS.items()},
    }
    yield from named("ledger-forged", ((name, _ledger(change)) for name, change in changes.items()))
    for suffix in ("", "-wal", "-shm", "-journal"):
        for name, put in _PUT.items():
            yield Case(f"ledger-forged/file{suffix}-{name}", partial(_file, put, suffix))
    yield from named("ledger", _alone())
