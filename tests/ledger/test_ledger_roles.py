"""The grants of infra/postgres/roles.sql on a real server: each role does its work, and nothing else."""

from __future__ import annotations

import re
import subprocess

import pytest

from tests.support.infra import INFRA
from tests.support.ledger import REGISTRY, conversion, filled, node
from tests.support.postgres import new_database, postgres_server
from wherry.errors import StorageError
from wherry.ledger.check import check_chain
from wherry.ledger.record import (
    claim_registration,
    open_ledger,
    record_conversion,
    record_event,
    record_registration,
    record_verification,
)
from wherry.ledger.statements import _STATES, KINDS, ClockReadings

TABLES = (
    "statement",
    "edge",
    "conversion",
    "checkpoint",
    "location",
    "tombstone",
    "verification",
    "registration",
    "projection",
)
ROLES = {"auditor": "wherry_auditor", "worker": "wherry_worker", "registrar": "wherry_registrar"}


@pytest.fixture(scope="module")
def server():
    with postgres_server() as url:
        yield url


@pytest.fixture
def urls(server, request):
    """The owner's URL, and one of a login with each role."""
    import psycopg

    name = f"roles{abs(hash(request.node.name)) % 10**8}"
    owner = new_database(server, name)
    filled(owner)
    with psycopg.connect(owner, autocommit=True) as connection:
        for _ in range(2):  # again, as the file says
            connection.execute((INFRA / "postgres" / "roles.sql").read_text())
        for login, role in ROLES.items():
            connection.execute(f'CREATE ROLE "{login}_{name}" LOGIN IN ROLE {role}')
    return {"owner": owner, **{login: owner.replace("postgres@", f"{login}_{name}@") for login in ROLES}}


def sound(url):
    """Whether the whole chain is, as the check of the command line says."""
    with open_ledger(url) as ledger:
        return check_chain(ledger).altered is None


def refused(url, text):
    """Whether the server refuses it for want of permission; any other error is one of the test."""
    import psycopg

    with psycopg.connect(url) as connection:
        try:
            connection.execute(text)
        except psycopg.errors.InsufficientPrivilege:
            return True
        finally:
            connection.rollback()
    return False


def grants(url):
    """Role → table → what it may do there, for everybody but the owner; then schema, policies, columns."""
    import psycopg

    found = {}
    query = (
        "SELECT COALESCE(r.rolname, 'PUBLIC'), c.relname, string_agg(a.privilege_type, ' ' ORDER BY a.privilege_type) "
        "FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace AND n.nspname = 'wherry' "
        "CROSS JOIN aclexplode(c.relacl) a LEFT JOIN pg_roles r ON r.oid = a.grantee "
        "WHERE a.grantee != c.relowner GROUP BY 1, 2"
    )
    schema = (
        "SELECT COALESCE(r.rolname, 'PUBLIC'), a.privilege_type FROM pg_namespace n CROSS JOIN aclexplode(n.nspacl) a "
        "LEFT JOIN pg_roles r ON r.oid = a.grantee WHERE n.nspname = 'wherry' AND a.grantee != n.nspowner"
    )
    with psycopg.connect(url) as connection:
        for role, table, words in connection.execute(query).fetchall():
            found.setdefault(role, {})[table] = words
        policies = connection.execute(
            "SELECT policyname FROM pg_policies WHERE schemaname = 'wherry'"
        ).fetchall()
        columns = connection.execute(
            "SELECT count(*) FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid "
            "JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = 'wherry' AND a.attacl IS NOT NULL"
        ).fetchone()
        return found, sorted(connection.execute(schema).fetchall()), {name for (name,) in policies}, columns


READS = dict.fromkeys(TABLES, "SELECT")
APPENDS = dict.fromkeys(("statement", "edge", "conversion", "checkpoint"), "INSERT SELECT")
DERIVES = dict.fromkeys(("location", "verification", "projection"), "INSERT SELECT UPDATE")
WORKS = {**READS, **APPENDS, **DERIVES, "tombstone": "DELETE INSERT SELECT UPDATE"}
GRANTS = {
    "wherry_auditor": READS,
    "wherry_worker": WORKS,
    "wherry_registrar": {**WORKS, "registration": "DELETE INSERT SELECT UPDATE"},
}
_PASSED_ON = "GRANT SELECT ON wherry.statement TO wherry_worker WITH GRANT OPTION"
POLICIES = {"wherry_reads", "wherry_form", "wherry_worker_states", "wherry_registrar_states"}
NOW = "to_char(now() AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.MS+00:00')"
SCHEMA = [("wherry_auditor", "USAGE"), ("wherry_registrar", "USAGE"), ("wherry_worker", "USAGE")]


def test_the_grants_are_these_and_no_others(urls):
    assert grants(urls["owner"]) == (GRANTS, SCHEMA, POLICIES, (0,))


@pytest.mark.parametrize(
    "added",
    [
        "GRANT UPDATE ON ALL TABLES IN SCHEMA wherry TO wherry_auditor",
        "GRANT INSERT, UPDATE, DELETE ON wherry.registration TO wherry_worker",
        "GRANT TRIGGER, TRUNCATE ON ALL TABLES IN SCHEMA wherry TO wherry_worker",
        "GRANT SELECT ON ALL TABLES IN SCHEMA wherry TO PUBLIC",
        "GRANT CREATE ON SCHEMA wherry TO wherry_worker",
        "GRANT wherry_registrar TO wherry_worker",
        "ALTER ROLE wherry_worker CREATEROLE BYPASSRLS LOGIN",
        "ALTER TABLE wherry.statement DISABLE ROW LEVEL SECURITY",
        "DROP POLICY wherry_worker_states ON wherry.statement",
        "CREATE POLICY more ON wherry.statement FOR INSERT TO wherry_worker WITH CHECK (true)",
        "GRANT UPDATE (version) ON wherry.registration TO wherry_worker",
        f"{_PASSED_ON}; SET ROLE wherry_worker; GRANT SELECT ON wherry.statement TO PUBLIC; RESET ROLE",
        "DROP OWNED BY wherry_worker",
    ],
)
def test_the_file_takes_back_what_was_added_and_restores_what_was_removed(urls, added):
    import psycopg

    with psycopg.connect(urls["owner"], autocommit=True) as connection:
        connection.execute(added)
        connection.execute((INFRA / "postgres" / "roles.sql").read_text())
        attributes = connection.execute(
            "SELECT bool_or(rolsuper OR rolcreatedb OR rolcreaterole OR rolbypassrls OR rolcanlogin) FROM pg_roles "
            "WHERE rolname LIKE 'wherry\\_%'"
        ).fetchone()
        above = connection.execute(
            "SELECT count(*) FROM pg_auth_members m JOIN pg_roles r ON r.oid = m.member "
            "WHERE r.rolname LIKE 'wherry\\_%'"
        ).fetchone()
    assert (attributes, above) == ((False,), (0,))
    assert grants(urls["owner"]) == (GRANTS, SCHEMA, POLICIES, (0,))
    with open_ledger(urls["worker"]) as ledger:
        record_conversion(ledger, conversion("d", "e"))
    with pytest.raises(StorageError, match="lacks a permission"), open_ledger(urls["worker"]) as ledger:
        claim_registration(ledger, node("e"), REGISTRY, "model")


def test_an_auditor_reads_everything_and_writes_nothing(urls):
    assert sound(urls["auditor"])
    for table in TABLES:
        assert not refused(urls["auditor"], f"SELECT count(*) FROM wherry.{table}")
        for text in (
            f"INSERT INTO wherry.{table} DEFAULT VALUES",
            f"DELETE FROM wherry.{table}",
            f"TRUNCATE wherry.{table}",
            f"DROP TABLE wherry.{table}",
            f"ALTER TABLE wherry.{table} DISABLE TRIGGER ALL",
        ):
            assert refused(urls["auditor"], text), text
    with pytest.raises(Exception, match="permission denied"), open_ledger(urls["auditor"]) as ledger:
        record_event(ledger, "audit", None, {"ok": True})


@pytest.mark.parametrize("login", ["worker", "registrar"])
@pytest.mark.parametrize("table", ["statement", "edge", "conversion", "checkpoint"])
def test_nobody_alters_or_deletes_what_was_stated(urls, login, table):
    column = {"statement": "body", "edge": "plan_digest", "conversion": "format", "checkpoint": "format"}[
        table
    ]
    for text in (
        f"UPDATE wherry.{table} SET {column} = 'x'",
        f"DELETE FROM wherry.{table}",
        f"TRUNCATE wherry.{table} CASCADE",
        f"DROP TABLE wherry.{table} CASCADE",
        f"ALTER TABLE wherry.{table} DISABLE TRIGGER ALL",
        "DROP TRIGGER statement_continues ON wherry.statement",
        "CREATE TABLE wherry.more (x int)",
        "COMMENT ON TABLE wherry.statement IS 'x'",
        "DROP SCHEMA wherry CASCADE",
    ):
        assert refused(urls[login], text), text
    assert sound(urls["owner"])


def test_no_login_stops_the_others_of_its_role(urls):
    import psycopg

    with psycopg.connect(urls["worker"], autocommit=True) as connection:
        connection.execute("DROP OWNED BY wherry_worker")
    with open_ledger(urls["worker"]) as ledger:
        record_conversion(ledger, conversion("d", "e"))
    assert sound(urls["owner"])


def test_a_worker_records_conversions_and_verifications_but_no_model_version(urls):
    with open_ledger(urls["worker"]) as ledger:
        record_conversion(ledger, conversion("d", "e"))
        record_conversion(ledger, conversion("d", "e"))
        record_verification(ledger, node("e"), {"level": "digest", "verdict": "ok", "ok": True})
    with pytest.raises(StorageError, match="lacks a permission"), open_ledger(urls["worker"]) as ledger:
        claim_registration(ledger, node("e"), REGISTRY, "model")
    assert sound(urls["auditor"])


def kinds_of(role):
    """The kinds of statements that the file lets a role append."""
    text = (INFRA / "postgres" / "roles.sql").read_text()
    policy = re.search(rf"CREATE POLICY wherry_{role}_states .*?(kind IN .*?)\);", text, re.DOTALL)
    return set(re.findall(r"'(\w+)'", policy[1]))


def test_every_kind_of_statement_has_a_role_or_is_the_owners():
    assert kinds_of("registrar") == set(KINDS) - {"rebuild"}
    assert kinds_of("worker") == kinds_of("registrar") - {*_STATES, "promotion", "rollback", "deletion"}


def stating(kind="note", body="{}", time=NOW, storage_time=NOW):
    return (
        "INSERT INTO wherry.statement (seq, prev, kind, schema, content, body, time, storage_time, hash) "
        f"SELECT seq + 1, hash, '{kind}', 1, repeat('a', 64), '{body}', {time}, {storage_time}, repeat('b', 64) "
        "FROM wherry.statement ORDER BY seq DESC LIMIT 1"
    )


@pytest.mark.parametrize("login", ["worker", "registrar"])
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_the_server_refuses_a_statement_that_is_not_of_the_role(urls, login, kind):
    import psycopg

    text = stating(kind)
    with psycopg.connect(urls[login]) as connection:
        if kind in kinds_of(login):
            assert connection.execute(text).rowcount == 1
        else:
            with pytest.raises(psycopg.errors.InsufficientPrivilege, match="row-level security"):
                connection.execute(text)
        connection.rollback()


@pytest.mark.parametrize(
    "odd",
    [
        {"time": "'zzz'"},
        {"time": "'9999-01-01T00:00:00.000+00:00'"},
        {"time": "'2026-13-01T00:00:00.000+00:00'"},
        {"time": "'2026-01-01 00:00:00'"},
        {"time": "'infinity'"},
        {"time": "'2001-01-01T00:00:00.000+00:00'"},
        {"storage_time": "'9999-01-01T00:00:00.000+00:00'"},
        {"storage_time": "'2001-01-01T00:00:00.000+00:00'"},
        {"storage_time": "NULL"},
        {"body": "[]"},
        {"body": "{"},
        {"body": ""},
    ],
    ids=str,
)
@pytest.mark.parametrize("login", ["worker", "registrar"])
def test_the_server_refuses_a_statement_that_spoils_the_later_ones(urls, login, odd):
    import psycopg

    with psycopg.connect(urls[login]) as connection:
        with pytest.raises((psycopg.errors.InsufficientPrivilege, psycopg.DataError)):
            connection.execute(stating(**odd))
        connection.rollback()
        assert connection.execute(stating()).rowcount == 1
        connection.rollback()


def test_a_clock_that_is_days_off_is_named(urls, monkeypatch):
    late = ClockReadings(*["2999-01-01T00:00:00.000+00:00"] * 2)
    monkeypatch.setattr("wherry.ledger.statements.plausible_clocks", lambda _connection: late)
    with pytest.raises(StorageError, match="wherry_form") as caught, open_ledger(urls["worker"]) as ledger:
        record_conversion(ledger, conversion("d", "later"))
    assert "set the clock of this machine" in caught.value.cure


def test_the_error_names_the_permission_and_the_cure(urls):
    with (
        pytest.raises(StorageError, match=r"lacks a permission: .*row-level security") as caught,
        open_ledger(urls["worker"]) as ledger,
    ):
        record_event(ledger, "promotion", node("e"), {"registry": REGISTRY, "name": "model", "version": "1"})
    assert "registrar" in caught.value.cure
    assert caught.value.exit_code == 10
    assert not caught.value.retryable
    assert sound(urls["auditor"])


def test_the_owner_records_and_checks_as_before(urls):
    with open_ledger(urls["owner"]) as ledger:
        record_event(ledger, "note", None, {"a": 1})
        assert check_chain(ledger).altered is None


def test_a_registrar_registers(urls):
    with open_ledger(urls["registrar"]) as ledger:
        claim_registration(ledger, node("c"), REGISTRY, "model")
        record_registration(ledger, node("c"), REGISTRY, "model", "2")
    assert sound(urls["auditor"])


def test_psql_takes_the_file(urls):
    done = subprocess.run(
        [
            "psql",
            "-v",
            "ON_ERROR_STOP=1",
            "-q",
            "-d",
            urls["owner"],
            "-f",
            str(INFRA / "postgres" / "roles.sql"),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
