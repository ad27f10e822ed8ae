"""No text of an error is longer than a screen, whatever a file or a server puts into it."""

from __future__ import annotations

from click.testing import CliRunner

from tests.support.command import small
from tests.support.signing import key_pair
from wherry.cli import cli
from wherry.errors import MOST_PLACE, MOST_TEXT, CorruptError


def test_a_long_text_is_cut_in_its_middle_and_keeps_no_part_of_a_credential():
    error = CorruptError("begin " + "x" * 250 + " password=secret-word " + "y" * 100_000 + " end")
    assert len(error.what) <= MOST_TEXT
    assert error.what.startswith("begin ")
    assert "secret" not in str(error)


def test_bytes_that_are_no_text_are_not_printed(tmp_path):
    _private, public = key_pair(tmp_path)
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    small(folder / "model.safetensors")
    (folder / "wherry.sig").write_bytes(b"\xff" * 100_000)
    shown = CliRunner().invoke(cli, ["verify-signature", str(folder), "--key", str(public)])
    assert isinstance(shown.exception, CorruptError)
    assert len(str(shown.exception)) < 2 * MOST_TEXT


def test_a_place_of_any_length_is_cut_where_it_is_shown_and_whole_as_data():
    """An event states the URI of a checkpoint."""
    uri = "file:///" + "x" * 100_000
    error = CorruptError("it is damaged", uri=uri)
    assert len(error.for_shell().splitlines()[0]) < MOST_PLACE + MOST_TEXT
    assert error.to_json()["uri"] == uri
