"""The page of a lineage that is too large to be shown: bounded, honest about the rest, and still searchable."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from tests.support.lineage_page import TIME, data_of, digest, node, tree
from wherry.ledger.replay import PlaceRecord, RegistrationRecord, VerificationRecord
from wherry.lineage.page import MOST_BYTES, NEIGHBOURS, page

pytest_plugins = ["tests.support.lineage_page"]  # its fixtures

CHILDREN = 10_000
LETTER = "\U0001d518"  # two units of UTF-16


@pytest.fixture(scope="module")
def hub():
    """A checkpoint with ten thousand results; the first is registered, the second is damaged."""
    nodes = [node("hub", "maxtext", "/runs/base/1")]
    nodes += [
        node(f"n{number}", "safetensors", f"gs://exports/models/nightly/{number}/model.safetensors", number)
        for number in range(CHILDREN)
    ]
    row = RegistrationRecord("http://mlflow", "first", "1", "registered")
    nodes[1] = replace(nodes[1], registrations=(row,))
    nodes[2] = replace(nodes[2], verified=VerificationRecord("digest", "altered", TIME))
    return tree("hub", nodes, [("hub", f"n{number}") for number in range(CHILDREN)])


def test_a_hub_is_shown_with_its_notable_and_its_last_results(hub):
    text = page(hub)
    data = data_of(text)
    assert len(text.encode()) < MOST_BYTES
    assert data["more"] == {digest("hub"): [0, CHILDREN - NEIGHBOURS]}
    shown = {row["step"] for row in data["nodes"][1:]}
    assert shown == {0, 1, *range(CHILDREN - NEIGHBOURS + 2, CHILDREN)}
    assert len(data["edges"]) == NEIGHBOURS
    assert len(data["hidden"]["rows"]) == CHILDREN - NEIGHBOURS
    assert data["hidden"]["unlisted"] == 0
    totals = {
        "nodes": CHILDREN + 1,
        "edges": CHILDREN,
        "lossy": 0,
        "failed": 1,
        "versions": 1,
        "models": ["first v1"],
    }
    assert data["totals"] == totals
    assert "not all of 10,001 checkpoints" in text


def test_a_lineage_that_fits_is_shown_whole():
    many = 3 * NEIGHBOURS
    nodes = [
        node("hub", "orbax", "/hub"),
        *(node(f"n{number}", "dcp", f"/{number}") for number in range(many)),
    ]
    data = data_of(page(tree("hub", nodes, [("hub", f"n{number}") for number in range(many)])))
    assert len(data["nodes"]) == many + 1
    assert len(data["edges"]) == many
    assert (data["more"], data["hidden"]["rows"]) == ({}, [])


def test_every_page_is_bounded_and_counts_what_it_cannot_list():
    """Long names of characters that grow when they are escaped, and more checkpoints than can be listed."""
    nodes = [node("n0", "<" * 3000, "\u202e" * 3000)]
    nodes += [
        node(f"n{number}", "<&>" * 900, "\x00\u202e" * 300 + f"{number}<" * 99) for number in range(1, 3000)
    ]
    place = nodes[0].places[0]
    nodes[0] = replace(nodes[0], places=tuple(replace(place, uri=f"{place.uri}{n}") for n in range(1000)))
    text = page(tree("n0", nodes, [("n0", f"n{number}") for number in range(1, 3000)]))
    data = data_of(text)
    assert len(text.encode()) <= MOST_BYTES
    hidden = data["hidden"]
    assert hidden["unlisted"] > 0
    assert len(data["nodes"]) + len(hidden["rows"]) + hidden["unlisted"] == 3000
    assert data["nodes"][0]["more"]["places"] + len(data["nodes"][0]["places"]) == 1000


def test_what_is_not_shown_is_found_by_search(hub, opened):
    seen = opened(hub)
    search = seen.page.locator("#search")
    assert "and 9,800 more" in seen.texts(".card.more .format")
    assert "200 shown here, and 9,800 more" in seen.page.locator("#details").inner_text()
    assert "10,001 checkpoints · 10,000 conversions" in seen.texts("#summary")[0]
    search.fill("nightly/1234/")
    assert seen.texts("#count") == ["1 of 10,001 checkpoints"]
    seen.page.keyboard.press("Enter")
    details = seen.page.locator("#details").inner_text()
    assert "gs://exports/models/nightly/1234/model.safetensors" in details
    assert f"wherry lineage show {digest('n1234')[:12]}" in details
    search.fill(digest("n4321"))
    assert seen.texts("#count") == ["1 of 10,001 checkpoints"]
    search.fill("safetensors")
    assert seen.texts("#count") == ["10,000 of 10,001 checkpoints"]
    assert seen.page.locator("#list li").last.text_content() == "and 9,600 more"
    seen.page.keyboard.press("Escape")
    assert seen.page.locator("#list li").last.text_content() == "and 9,800 more"
    seen.page.locator(".card.more").click()
    assert seen.page.evaluate("document.activeElement.id") == "search"


def test_a_page_says_that_search_cannot_find_all(opened, monkeypatch):
    monkeypatch.setattr("wherry.lineage.page.MOST_BYTES", 300_000)
    many = 5000
    nodes = [node("hub", "orbax", "/hub"), *(node(f"n{n}", "dcp", f"/{LETTER}/{n}", n) for n in range(many))]
    nodes[1] = replace(
        nodes[1], places=(*nodes[1].places, PlaceRecord("/copy", digest("n0"), "f", 1, TIME, gone=TIME))
    )
    seen = opened(tree("hub", nodes, [("hub", f"n{n}") for n in range(many)]))
    assert re.fullmatch(r"5,001 checkpoints; search cannot find [1-4],\d{3} of them", seen.texts("#count")[0])
    seen.page.locator("#search").fill("copy dcp")
    assert seen.texts("#count")[0].startswith("1 of 5,001 checkpoints; search cannot find ")
    seen.page.keyboard.press("Enter")
    assert f"/{LETTER}/0" in seen.page.locator("#details").inner_text()
