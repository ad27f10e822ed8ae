"""Tampering with the ledger: refused by triggers, and past them found and named, also where digests were recomputed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.support import audit as audit_support
from tests.support.audit import rewritten
from tests.support.ledger import REGISTRY, altered, conversion, digest, filled
from wherry.cli import cli
from wherry.config.settings import ledger_url
from wherry.core.units import short
from wherry.errors import StorageError
from wherry.ledger import schema as tables
from wherry.ledger.deliver import projection_rows, record_delivery, seal_of
from wherry.ledger.record import Anchor, check_chain, head, open_ledger, record_conversion, record_event
from wherry.ledger.statements import content_of, hash_of
from wherry.prove.audit import audit
from wherry.prove.bundle import check_bundle

pytest_plugins = ["tests.support.ledger"]


@pytest.mark.parametrize(
    "sql",
    [
        "UPDATE {}statement SET body = '{{}}'",
        "DELETE FROM {}edge",
        "DELETE FROM {}statement",
        "TRUNCATE {}statement CASCADE",
        (
            "INSERT INTO {0}statement SELECT seq + 7, hash, 'h', kind, schema, content, body, time, storage_time"
            " FROM {0}statement"
        ),
        (
            "INSERT INTO {0}statement SELECT seq + 1, prev, 'h', kind, schema, content, body, time, storage_time"
            " FROM {0}statement"
        ),
        "INSERT OR REPLACE INTO statement SELECT * FROM statement",
    ],
)
def test_triggers_abort(url, sql):
    postgres = url.startswith("postgresql")
    if ("REPLACE" in sql and postgres) or ("TRUNCATE" in sql and not postgres):
        pytest.skip("the other database has no such statement")
    with open_ledger(url) as ledger:
        record_conversion(ledger, conversion("a", "b"))
        with pytest.raises(StorageError, match="append-only") as refusal, ledger.write() as connection:
            connection.change(sql.format("wherry." if postgres else ""))
        assert not refusal.value.retryable
        assert check_chain(ledger).altered is None


@pytest.mark.parametrize("name", ["statement_no_update", "edge_no_delete", "statement_continues"])
@pytest.mark.parametrize("replaced", [False, True])
def test_a_ledger_without_its_triggers_is_named(tmp_path, name, replaced):
    url = f"sqlite:///{tmp_path / 'ledger.db'}"
    with open_ledger(url) as ledger:
        record_conversion(ledger, conversion("a", "b"))
        assert check_chain(ledger).altered is None
        with ledger.write() as connection:
            connection.change(f"DROP TRIGGER {name}")
            if replaced:
                connection.change(f"CREATE TRIGGER {name} BEFORE UPDATE ON location BEGIN SELECT 1; END")
        assert check_chain(ledger).altered == (
            f"all rows match, but triggers that refuse changes are missing or altered: {name}"
        )


ZERO = "0" * 64


TAMPERINGS = {
    "UPDATE statement SET body = replace(body, 'orbax', 'paxml') WHERE seq = 2": "statement 2: its contents",
    "UPDATE statement SET time = '1999' WHERE seq = 3": "statement 3: its contents",
    "UPDATE statement SET kind = 'note' WHERE seq = 4": "statement 4: its contents",
    "DELETE FROM statement WHERE seq = 2": "statement 3: statement 2 is missing",
    f"UPDATE edge SET source = '{digest('c')}' WHERE statement = 1": "edge",
    "UPDATE edge SET statement = 2 WHERE statement = 1": "edge",
    "DELETE FROM edge WHERE statement = 3": f"edge {short(digest('c'))} → {short(digest('d'))}: the row is missing",
    "UPDATE checkpoint SET nbytes = 1": "checkpoint",
    f"DELETE FROM checkpoint WHERE checkpoint_digest = '{digest('b')}'": "checkpoint",
    f"INSERT INTO checkpoint VALUES ('{ZERO}', '{ZERO}', 'npz', NULL, 'params', 1, 1, 1, 1)": "no statement records it",
    "UPDATE location SET fingerprint = 'another' WHERE uri = '/checkpoints/c'": "/checkpoints/c: the row differs",
    "UPDATE location SET uri = '/moved' WHERE uri = '/checkpoints/c'": "/moved: no statement records it",
    "DELETE FROM location WHERE uri = '/elsewhere'": "/elsewhere: the row is missing",
    "UPDATE conversion SET target_uri = '/moved' WHERE statement = 2": "conversion 2: the row differs",
    "DELETE FROM conversion WHERE statement = 2": "conversion 2: the row is missing",
    "UPDATE verification SET level = 'native'": "verification",
    "DELETE FROM verification": "verification",
    "UPDATE registration SET version = '7' WHERE version = '1'": "registration",
    "UPDATE registration SET state = 'released' WHERE state = 'pending'": "registration",
    "DELETE FROM registration WHERE state = 'pending'": f"{REGISTRY} model: the row is missing",
    "DELETE FROM tombstone": "tombstone",
    "UPDATE tombstone SET time = '1999'": "tombstone",
    "UPDATE projection SET delivered = 99": "projection openlineage: its contents",
}


@pytest.mark.parametrize(("sql", "named"), TAMPERINGS.items())
def test_an_altered_row_of_any_table_is_named(url, sql, named):
    filled(url)
    with open_ledger(url) as ledger:
        assert check_chain(ledger).altered is None
    altered(url, sql)
    with open_ledger(url) as ledger:
        assert named in (check_chain(ledger).altered or "")


def test_every_table_is_tampered_with():
    assert {table for table in tables.NAMES if any(table in sql for sql in TAMPERINGS)} == tables.NAMES


def test_an_anchor_finds_what_the_chain_alone_does_not(url):
    filled(url)
    with open_ledger(url) as ledger:
        kept = head(ledger)
        anchor = Anchor(kept.hash, kept.seq)
        record_event(ledger, "note", None, {"text": "afterwards"})
        chain = check_chain(ledger, anchor)
        assert (chain.anchored, chain.statements) == (kept.seq, kept.seq + 1)
        assert check_chain(ledger, Anchor(kept.hash[:16])).anchored == kept.seq
        assert check_chain(ledger, Anchor(kept.hash, kept.seq - 1)).anchored is None
    last = f"(SELECT max(seq) FROM statement) - {1}"
    altered(
        url, f"DELETE FROM statement WHERE seq >= {last}", "DELETE FROM location WHERE uri = '/elsewhere'"
    )
    altered(url, f"DELETE FROM conversion WHERE statement > {kept.seq - 1}")
    with open_ledger(url) as ledger:
        assert check_chain(ledger, anchor).anchored is None


@pytest.mark.parametrize(
    "sql",
    [
        "DROP TRIGGER edge_no_change ON wherry.edge",
        "ALTER TABLE wherry.edge DISABLE TRIGGER edge_no_change",
        "ALTER TABLE wherry.edge ENABLE REPLICA TRIGGER edge_no_change",  # fires in no ordinary session
        (
            "CREATE OR REPLACE TRIGGER edge_no_change BEFORE DELETE ON wherry.edge FOR EACH ROW "
            "EXECUTE FUNCTION wherry.refuse_change()"
        ),
        (
            "CREATE OR REPLACE TRIGGER edge_no_change BEFORE UPDATE OR DELETE ON wherry.edge FOR EACH ROW "
            "WHEN (false) EXECUTE FUNCTION wherry.refuse_change()"
        ),
        (
            "CREATE OR REPLACE FUNCTION wherry.refuse_change() RETURNS trigger LANGUAGE plpgsql "
            "AS $$ BEGIN RETURN NEW; END $$"
        ),
    ],
)
@pytest.mark.parametrize("url", ["postgresql"], indirect=True)
def test_a_trigger_that_refuses_nothing_more_is_named_on_postgresql(url, sql):
    with open_ledger(url) as ledger:
        record_conversion(ledger, conversion("a", "b"))
        assert check_chain(ledger).altered is None
        with ledger.write() as connection:
            connection.change(sql)
        assert "triggers that refuse changes are missing or altered: " in (check_chain(ledger).altered or "")
        assert "edge_no_change" in (check_chain(ledger).altered or "")


def test_a_number_with_the_same_hash_is_another_number(url):
    """Python's hash of an integer has no key, and is its rest by 2^61 - 1."""
    with open_ledger(url) as ledger:
        record_conversion(ledger, conversion("a", "b"))
        assert check_chain(ledger).altered is None
    altered(url, "UPDATE checkpoint SET nbytes = nbytes + 2305843009213693951")
    with open_ledger(url) as ledger:
        assert "the row differs from its statement" in (check_chain(ledger).altered or "")


# A forger with write access who recomputes digests: each statement is consistent, and the chain still
# shows it.


NOTES = 6
COLUMNS = [*tables.statement.columns]
FORGED = '{"text":"I was never here"}'


@pytest.fixture
def notes(url):
    """A ledger of notes, which tell no rows of other tables: nothing but the chain can show what was done to them."""
    with open_ledger(url) as ledger:
        for number in range(1, NOTES + 1):
            record_event(ledger, "note", None, {"text": f"note {number}"})
        assert check_chain(ledger).altered is None
    return url


def rows_of(url):
    with open_ledger(url) as ledger, ledger.read() as connection:
        found = connection.rows(f"SELECT {', '.join(COLUMNS)} FROM statement ORDER BY seq")
        return [dict(zip(COLUMNS, row, strict=True)) for row in found]


def sealed(row, **changes):
    """A statement whose own digests are right."""
    row = {**row, **changes}
    row["content"] = content_of(row["kind"], row["body"])
    return {**row, "hash": hash_of(row)}


def rewrite(url, rows, *, unique=True):
    """Put other statements in the place of all, past triggers and constraints."""
    if not unique:
        altered(url, *_without_constraints(url))
    altered(url, "DELETE FROM statement", *(_insert(row) for row in rows))


def _insert(row):
    values = ", ".join(map(_literal, row.values()))
    return f"INSERT INTO statement ({', '.join(row)}) VALUES ({values})"


def _literal(value):
    if value is None:
        return "NULL"
    return str(value) if isinstance(value, int) else "'" + value.replace("'", "''") + "'"


def _without_constraints(url):
    if url.startswith("postgresql"):
        return (
            "ALTER TABLE statement DROP CONSTRAINT statement_pkey CASCADE",
            "ALTER TABLE statement DROP CONSTRAINT statement_hash_key",
            "DROP INDEX statement_prev",
        )
    names = ", ".join(COLUMNS)
    return (
        f"CREATE TABLE copy AS SELECT {names} FROM statement",
        "DROP TABLE statement",
        "ALTER TABLE copy RENAME TO statement",
    )


def fault_of(url, anchor=None):
    """What the check says, by the function and by the command; the exit code of the command."""
    with open_ledger(url) as ledger:
        chain = check_chain(ledger, anchor)
    words = ["ledger", "check", "--json", "--ledger", url]
    done = CliRunner().invoke(cli, [*words, "--anchor", anchor.hash] if anchor else words)
    assert json.loads(done.output)["altered"] == chain.altered
    assert json.loads(done.output)["ok"] == (done.exit_code == 0)
    return chain.altered, done.exit_code


def test_a_statement_that_was_written_anew_with_its_own_digests(notes):
    rows = rows_of(notes)
    rows[2] = sealed(rows[2], body=FORGED)
    rewrite(notes, rows)
    assert fault_of(notes) == ("statement 4: the hash chain is broken: previous hash mismatch", 5)


def test_the_last_statement_written_anew_is_noticed_by_an_anchor_alone(notes):
    with open_ledger(notes) as ledger:
        kept = head(ledger)
    rows = rows_of(notes)
    rows[-1] = sealed(rows[-1], body=FORGED)
    rewrite(notes, rows)
    assert fault_of(notes) == (None, 0)
    assert fault_of(notes, Anchor(kept.hash)) == (None, 9)


@pytest.mark.parametrize("links", ["kept", "own", "none"])
def test_two_statements_that_changed_places(notes, links):
    """Their digests are kept, or made right, or the links between the two as well."""
    rows = rows_of(notes)
    third, fourth = {**rows[3], "seq": 3}, {**rows[2], "seq": 4}
    if links != "none":
        third, fourth = {**third, "prev": rows[2]["prev"]}, {**fourth, "prev": rows[3]["prev"]}
    if links == "own":
        third = sealed(third, time=rows[2]["time"])
        fourth = sealed(fourth, time=rows[3]["time"], prev=third["hash"])
    rewrite(notes, [*rows[:2], third, fourth, *rows[4:]])
    expected = {
        "none": "statement 3: the hash chain is broken: previous hash mismatch",
        "kept": "statement 3: its contents were altered",
        "own": "statement 5: the hash chain is broken: previous hash mismatch",
    }
    assert fault_of(notes) == (expected[links], 5)


def test_a_statement_that_was_taken_out_and_the_numbers_closed_up(notes):
    rows = rows_of(notes)
    after = [sealed(row, seq=row["seq"] - 1) for row in rows[3:]]
    rewrite(notes, [*rows[:2], *after])
    assert fault_of(notes) == ("statement 3: the hash chain is broken: previous hash mismatch", 5)


def test_a_statement_that_was_put_in(notes):
    rows = rows_of(notes)
    extra = sealed(rows[2], body=FORGED, prev=rows[1]["hash"])
    after = [sealed(row, seq=row["seq"] + 1) for row in rows[2:]]
    rewrite(notes, [*rows[:2], extra, *after], unique=False)
    assert fault_of(notes) == ("statement 4: the hash chain is broken: previous hash mismatch", 5)


def test_a_statement_that_is_gone(notes):
    rows = rows_of(notes)
    rewrite(notes, [*rows[:2], *rows[3:]])
    assert fault_of(notes) == ("statement 4: statement 3 is missing", 5)


def test_the_first_statement_must_begin_the_chain(notes):
    rows = rows_of(notes)
    rewrite(notes, [sealed(rows[0], prev="1" * 64), *rows[1:]])
    assert fault_of(notes) == ("statement 1: the hash chain is broken: previous hash mismatch", 5)


@pytest.mark.parametrize("own", [False, True], ids=["alone", "with its digest"])
def test_a_link_that_was_altered(notes, own):
    rows = rows_of(notes)
    rows[2] = {**rows[2], "prev": "1" * 64}
    rewrite(notes, [*rows[:2], sealed(rows[2]) if own else rows[2], *rows[3:]])
    assert fault_of(notes) == ("statement 3: the hash chain is broken: previous hash mismatch", 5)


@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
def test_a_number_that_two_statements_have(notes, first):
    rows = rows_of(notes)
    double = sealed(rows[2], body=FORGED, prev=rows[2]["prev"] if first else rows[2]["hash"])
    rewrite(notes, [*rows[:3], double, *rows[3:]], unique=False)
    fault, code = fault_of(notes)
    assert fault.startswith("statement 3: ")
    assert code == 5


@pytest.mark.parametrize(
    ("time", "fault"),
    [
        ("zzz", "its time is not one that wherry writes: 'zzz'"),
        ("", "its time is not one that wherry writes: ''"),
        ("2026-13-01T00:00:00+00:00", "its time is not one that wherry writes: '2026-13-01T00:00:00+00:00'"),
        ("2999-01-01T00:00:00", "its time is not one that wherry writes: '2999-01-01T00:00:00'"),
    ],
)
def test_a_time_that_no_writer_states(notes, time, fault):
    """Later statements would inherit it, and "the ledger up to a moment" would lose statements."""
    rows = rows_of(notes)
    rows[-1] = sealed(rows[-1], time=time)
    rewrite(notes, rows)
    assert fault_of(notes) == (f"statement {NOTES}: {fault}", 5)


def test_a_chain_that_was_written_anew_whole_is_noticed_by_an_anchor_alone(notes):
    with open_ledger(notes) as ledger:
        kept = head(ledger)
    rows, before = rows_of(notes), tables.GENESIS
    for place, row in enumerate(rows):
        body = FORGED if place == 2 else row["body"]
        rows[place] = sealed(row, body=body, prev=before)
        before = rows[place]["hash"]
    rewrite(notes, rows)
    assert fault_of(notes) == (None, 0)
    assert fault_of(notes, Anchor(kept.hash)) == (None, 9)


def relinked(rows, first):
    """The statements with right hashes and links from one on."""
    for place in range(first, len(rows)):
        rows[place] = {**rows[place], "prev": rows[place - 1]["hash"]}
        rows[place]["hash"] = hash_of(rows[place])
    return rows


def test_a_content_digest_that_was_altered_under_a_new_chain(notes):
    """By it a statement is found that was made already, so it must be that of the body."""
    rows = rows_of(notes)
    rows[2]["content"] = "3" * 64
    rewrite(notes, relinked(rows, 2))
    assert fault_of(notes) == ("statement 3: content digest mismatch", 5)


def test_a_statement_of_a_newer_schema(notes):
    """Which rows it tells, this version cannot know."""
    rows = rows_of(notes)
    rows[2]["schema"] = tables.SCHEMA + 1
    rewrite(notes, relinked(rows, 2))
    newer = f"statement 3: unsupported schema {tables.SCHEMA + 1}, expected {tables.SCHEMA}"
    assert fault_of(notes) == (newer, 5)


@pytest.mark.parametrize("number", [-1, NOTES + 1])
def test_a_cursor_under_its_own_seal_that_skips_what_is_to_come(notes, number):
    with open_ledger(notes) as ledger:
        record_delivery(ledger, "openlineage", NOTES)
        assert check_chain(ledger).altered is None
    with open_ledger(notes) as ledger, ledger.read() as connection:
        (row,) = projection_rows(connection)
    seal = seal_of(row._replace(delivered=number))
    altered(notes, f"UPDATE projection SET delivered = {number}, seal = '{seal}'")
    said = f"projection openlineage: statement {number} was delivered, but the last one is {NOTES}"
    assert fault_of(notes) == (said, 5)


def test_a_tail_that_was_cut_off_is_noticed_by_an_anchor_alone(notes):
    with open_ledger(notes) as ledger:
        kept = head(ledger)
    rewrite(notes, rows_of(notes)[:-2])
    assert fault_of(notes) == (None, 0)
    assert fault_of(notes, Anchor(kept.hash, kept.seq)) == (None, 9)


def test_a_conversion_forged_with_all_its_rows(url):
    """Also where the rows that it tells agree with it, the next statement does not."""
    filled(url)
    rows = rows_of(url)
    rows[0] = sealed(rows[0], body=rows[0]["body"].replace('"lossless":true', '"lossless":false'))
    rewrite(url, rows)
    altered(url, "UPDATE conversion SET lossless = false WHERE statement = 1")
    assert fault_of(url) == ("statement 2: the hash chain is broken: previous hash mismatch", 5)


def test_an_older_chain_cannot_be_grafted_on(url):
    """Statements of another ledger, which continue one another, do not continue this one."""
    with open_ledger(url) as ledger:
        record_conversion(ledger, conversion("a", "b"))
        record_event(ledger, "note", None, {"text": "one"})
        record_event(ledger, "note", None, {"text": "two"})
    rows = rows_of(url)
    other = sealed(rows[1], body=FORGED, prev="2" * 64)
    rewrite(url, [rows[0], other, sealed(rows[2], prev=other["hash"])])
    assert fault_of(url) == ("statement 2: the hash chain is broken: previous hash mismatch", 5)


# What an audit and its evidence say.


def forged_ledger():
    """The present ledger with a statement that was written anew."""
    rows = rows_of(ledger_url())
    rows[1] = sealed(rows[1], body=rows[1]["body"].replace("one", "two"))
    rewrite(ledger_url(), rows)


@pytest.fixture
def recorded(tmp_path):
    """A conversion, two notes about nothing, and another conversion."""
    audit_support.converted(tmp_path)
    with open_ledger() as ledger:
        for text in ("one", "two"):
            record_event(ledger, "note", None, {"text": text})
    return tmp_path


def test_an_audit_names_the_first_broken_statement(recorded):
    assert audit(record=False).ok
    forged_ledger()
    report = audit(record=False)
    [found] = [one for one in report.findings if one.kind == "chain-altered"]
    assert found.what == "statement 3: the hash chain is broken: previous hash mismatch"
    assert report.exit_code == 9


def test_an_audit_finds_the_checkpoint_whose_statement_was_cut_off(recorded):
    kept = rows_of(ledger_url())
    second = audit_support.converted(recorded, "second", seed=1)
    for table in ("edge", "conversion", "location"):
        altered(ledger_url(), f"DELETE FROM {table} WHERE statement > {len(kept)}")
    last = f"('{second.source.checkpoint_digest}', '{second.target.checkpoint_digest}')"
    altered(ledger_url(), f"DELETE FROM checkpoint WHERE checkpoint_digest IN {last}")
    rewrite(ledger_url(), kept)
    assert fault_of(ledger_url()) == (None, 0)
    report = audit([recorded], record=False)
    assert audit([recorded], record=False, as_of=kept[-1]["time"]).counts["warnings"] == 0
    assert ("unrecorded", "second.out") in {
        (one.kind, Path(one.uri).name) for one in report.findings if one.uri
    }


def test_evidence_keeps_an_anchor_that_a_forged_chain_does_not_have(recorded):
    bundle = recorded / "evidence.zip"
    report = audit(bundle=bundle)
    assert check_bundle(bundle, report.chain.head).ok
    rows = rows_of(ledger_url())
    rewrite(ledger_url(), rows[:2])
    later = audit(anchor=report.chain.head, record=False)
    assert "anchor-lost" in {one.kind for one in later.findings}
    assert later.exit_code == 9


@pytest.mark.parametrize("what", ["body", "prev"])
def test_evidence_whose_extract_was_forged(recorded, what):
    """The second hand compares links, too."""
    bundle = recorded / "evidence.zip"
    audit(bundle=bundle)

    def forge(name, data):
        if name != "ledger.jsonl":
            return data
        rows = [json.loads(line) for line in data.splitlines()]
        changes = {"body": FORGED} if what == "body" else {"prev": "1" * 64}
        rows[1] = sealed({name: rows[1][name] for name in COLUMNS}, **changes)
        return b"".join(json.dumps(row).encode() + b"\n" for row in rows)

    problems = check_bundle(rewritten(bundle, forge)).problems
    number = 3 if what == "body" else 2
    assert (
        problems[0]
        == f"ledger.jsonl: statement {number}: it does not contain the hash of the statement before it"
    )
