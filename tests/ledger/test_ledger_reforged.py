"""A forger with write access who recomputes digests: each statement is consistent, and the chain still shows it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.support import audit as audit_support
from tests.support.audit import rewritten
from tests.support.ledger import altered, conversion, filled
from wherry.auditor.audit import audit
from wherry.auditor.bundle import check_bundle
from wherry.cli import cli
from wherry.config.settings import ledger_url
from wherry.ledger import schema as tables
from wherry.ledger.deliver import projection_rows, record_delivery, seal_of
from wherry.ledger.record import Anchor, check_chain, head, open_ledger, record_conversion, record_event
from wherry.ledger.statements import content_of, hash_of

pytest_plugins = ["tests.support.ledger"]  # its fixtures
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
