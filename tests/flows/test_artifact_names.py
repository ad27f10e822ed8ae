"""Names from checkpoints on pages of Prefect and MLflow: nothing is obeyed, no line forged, no credential shown."""

from __future__ import annotations

import pytest

from wherry.errors import CorruptError
from wherry.integrations.mlflow import figures
from wherry.routes.report import NightTable, _markdown_table
from wherry.tasks import artifacts, common

HOSTILE = "a\nok: done\u202e\x1b[2J`|<b>s3://user:geheim@host/x"
OBEYED = set("\x1b\u202e")


@pytest.fixture
def made(monkeypatch):
    """What is sent to Prefect, as one list of texts."""
    texts = []

    def note(*values, **named):
        def collect(value):
            if isinstance(value, str):
                texts.append(value)
            elif isinstance(value, dict):
                list(map(collect, value.values()))
            elif isinstance(value, (list, tuple)):
                list(map(collect, value))

        collect([*values, *named.values()])

    for name in ("create_table_artifact", "create_link_artifact", "create_markdown_artifact"):
        monkeypatch.setattr(artifacts, name, note)
    monkeypatch.setattr(common, "create_progress_artifact", note)
    return texts


@pytest.mark.parametrize(
    "show",
    [
        lambda: artifacts.show_table([{"what": "source", "value": HOSTILE}], "k", HOSTILE),
        lambda: artifacts.show_link("http://127.0.0.1/", HOSTILE, "k", HOSTILE),
        lambda: common.show_failure(CorruptError(HOSTILE, uri=HOSTILE, cure="restore it"), HOSTILE),
        lambda: common.progress_artifact("convert", HOSTILE),
    ],
    ids=["table", "link", "failure", "progress"],
)
def test_names_are_escaped_on_pages_of_prefect(made, show):
    show()
    said = "".join(made)
    assert r"a\nok: done\u202e\x1b[2J" in said
    assert not OBEYED & set(said)
    assert "\nok" not in said
    assert "geheim" not in said


def test_reports_keep_their_lines_and_lose_what_is_obeyed(made):
    artifacts.show_markdown("# Report\n\n\x1b]0;x\x07 row", "k", "d")
    assert made[0] == "# Report\n\n" + r"\x1b]0;x\x07 row"


def test_a_cell_of_the_night_is_one_cell():
    (row,) = _markdown_table(NightTable("t", ("a",), ((HOSTILE,),)))[5:]
    assert row.count("\n") == 0
    assert r"\|" in row
    assert "<b>" not in row
    assert not OBEYED & set(row)


def test_a_name_makes_no_link_and_no_picture_on_the_page_of_the_night():
    (row,) = _markdown_table(NightTable("t", ("a",), (("![x](https://e.example/1.png) [y](z) `c",),)))[5:]
    assert r"\!\[x\](https" in row
    assert r" \[y\](z) \`c" in row


def test_a_name_does_not_leave_the_code_of_a_description():
    tags = {
        "wherry.format": "dcp", "wherry.format_version": "", "wherry.source_uri": f"/x```\n{HOSTILE}",
        "wherry.fetch": f"wherry fetch {HOSTILE}", "wherry.uri": HOSTILE, "wherry.load": f"load(\n'{HOSTILE}```')",
    }  # fmt: skip
    text = figures.description(tags)
    assert not OBEYED & set(text)
    assert text.count("```") == 4, "two blocks, which names do not end"
    assert text.replace("```", "").count("`") == 4, "two spans"
