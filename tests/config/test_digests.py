"""Which algorithm new digests have: the setting, the host's rule, the ledger's last conversion, or the default."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import replace

import pytest
from click.testing import CliRunner

from tests.support.ledger import conversion, node
from wherry.cli import cli
from wherry.config import settings
from wherry.config.settings import DIGEST_ENV, digest_choice, ledger_url
from wherry.core.digest import BLAKE3, SHA256
from wherry.core.receipt import Receipt
from wherry.errors import UsageError
from wherry.ledger.record import open_ledger, record_conversion
from wherry.store.home import sqlite_file


@pytest.fixture
def no_fips(tmp_path, monkeypatch):
    """A host of which the test decides whether it is in FIPS mode; it is not."""
    file = tmp_path / "fips_enabled"
    file.write_text("0\n")
    monkeypatch.setattr(settings, "_FIPS", file)
    return file


@pytest.fixture
def config(tmp_path, monkeypatch):
    """Writes the configuration that is effective."""
    file = tmp_path / "wherry.toml"
    file.touch()
    monkeypatch.setenv("WHERRY_CONFIG", str(file))
    return file.write_text


def in_sha256():
    """A ledger whose last conversion has SHA-256 digests."""
    with open_ledger() as ledger:
        record_conversion(ledger, conversion("a", "b"))


def in_blake3():
    """A ledger whose last conversion has BLAKE3 digests."""
    named = {"checkpoint_digest": f"blake3:{'1' * 64}", "weights_digest": f"blake3:{'2' * 64}"}
    with open_ledger() as ledger:
        record_conversion(ledger, Receipt(node("b"), replace(node("c"), **named), "0" * 64))


def test_a_new_ledger_has_blake3(no_fips):
    assert digest_choice().algorithm == BLAKE3
    assert not digest_choice().note


def test_a_ledger_keeps_the_algorithm_of_its_last_conversion(no_fips):
    in_sha256()
    assert digest_choice().algorithm == SHA256
    assert "ledger" in digest_choice().reason
    assert digest_choice(ledger=False).algorithm == BLAKE3, "the result is not recorded there"
    in_blake3()
    assert digest_choice().algorithm == BLAKE3


def test_an_empty_file_does_not_become_a_ledger_when_it_is_read(no_fips):
    file = sqlite_file(ledger_url())
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()
    assert digest_choice().algorithm == BLAKE3
    assert not file.stat().st_size


def test_a_database_of_something_else_is_left_as_it_is(no_fips):
    """Commands that only read choose an algorithm, too: `inspect --digest`, `compare` and `doctor`."""
    file = sqlite_file(ledger_url())
    file.parent.mkdir(parents=True, exist_ok=True)
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("CREATE TABLE other (x)")
    before = file.read_bytes()
    assert digest_choice().algorithm == BLAKE3
    assert file.read_bytes() == before


def test_the_setting_decides_over_ledger_and_host(no_fips, config, monkeypatch):
    in_sha256()
    no_fips.write_text("1\n")
    config('digest = "blake3"\n')
    assert digest_choice().algorithm == BLAKE3
    monkeypatch.setenv(DIGEST_ENV, SHA256)
    assert digest_choice().algorithm == SHA256


def test_a_host_in_fips_mode_has_sha256_and_says_so(no_fips):
    no_fips.write_text("1\n")
    in_blake3()
    choice = digest_choice()
    assert choice.algorithm == SHA256
    assert "FIPS" in choice.reason
    assert "FIPS" in choice.note


def test_a_host_without_that_file_is_not_in_fips_mode(no_fips):
    no_fips.unlink()
    assert digest_choice().algorithm == BLAKE3


@pytest.mark.parametrize("value", ["md5", "BLAKE3", "sha-256"])
def test_an_unknown_algorithm_is_refused(value, no_fips, config, monkeypatch):
    config(f'digest = "{value}"\n')
    with pytest.raises(UsageError, match="line 1, digest"):
        digest_choice()
    monkeypatch.delenv("WHERRY_CONFIG")
    monkeypatch.setenv(DIGEST_ENV, value)
    with pytest.raises(UsageError, match=value):
        digest_choice()


@pytest.mark.parametrize("contents", [b"not a database", b""])
def test_a_ledger_that_cannot_be_read_decides_nothing(contents, no_fips, wherry_home):
    (wherry_home / "ledger.db").write_bytes(contents)
    assert digest_choice().algorithm == BLAKE3


def test_looking_creates_no_ledger(no_fips, wherry_home):
    digest_choice()
    assert not list(wherry_home.iterdir())


def test_a_ledger_that_another_process_writes_is_read(no_fips):
    in_sha256()
    writer = sqlite3.connect(ledger_url().removeprefix("sqlite:///"), isolation_level=None)
    writer.execute("BEGIN IMMEDIATE")
    assert digest_choice().algorithm == SHA256
    writer.close()


def test_doctor_names_the_algorithm_and_the_reason(no_fips):
    in_sha256()
    said = CliRunner().invoke(cli, ["doctor"]).output
    assert "sha256" in said
    assert "ledger's last conversion" in said
