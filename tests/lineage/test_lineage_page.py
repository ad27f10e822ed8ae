"""The lineage page: self-contained, safe against hostile names, and usable in a real browser."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from tests.support.lineage_page import EVIL, TIME, data_of, digest, hostile, large, node, small, tree
from wherry.ledger.replay import PlaceRecord
from wherry.lineage.page import page

pytest_plugins = ["tests.support.lineage_page"]  # its fixtures


def test_the_page_holds_the_tree_and_asks_for_nothing():
    text = page(small())
    data = data_of(text)
    assert data["schema"] == 1
    assert data["root"] == digest("b")
    assert [row["format"] for row in data["nodes"]] == ["t5x-orbax", "huggingface", "maxtext"]
    assert len(data["edges"]) == 3
    assert "default-src 'none'" in text
    assert not re.search(r"https?://(?!mlflow|www\.w3\.org/2000/svg)", text)
    assert "{{" not in re.sub(r"<script.*?</script>|<style.*?</style>", "", text, flags=re.DOTALL)


def test_hostile_names_stay_data():
    text = page(hostile())
    text.encode()  # no lone surrogate is left
    assert "<script>alert" not in text
    assert "<img" not in text
    assert "\u202e" not in text
    assert "\x00" not in text
    names = [place["uri"] for row in data_of(text)["nodes"] for place in row["places"]]
    assert names[0] == f"/data/{EVIL}/{{{{data}}}}"
    assert names[1].endswith("characters)")
    assert data_of(text)["nodes"][1]["format"] == "safe\\u202etensors"


def test_three_checkpoints_are_drawn_and_described(opened):
    seen = opened(small())
    assert len(seen.texts(".card")) == 3
    assert "root" in seen.page.locator(".card.root").evaluate(
        "card => getComputedStyle(card, '::before').content"
    )
    assert seen.page.locator("#lines g").count() == 3
    assert seen.page.locator("#lines g.back").count() == 1
    assert seen.page.locator("#lines g.lossy").count() == 1
    details = seen.page.locator("#details").inner_text()
    assert digest("b") in details
    assert "t5-base version 3" in details
    assert "/models/t5/hf" in details
    seen.page.locator(".link", has_text="maxtext").first.click()
    assert "✗ altered at level digest" in seen.page.locator("#details").inner_text()
    places = seen.page.locator(".card").evaluate_all(
        "cards => cards.map(card => card.getBoundingClientRect().x)"
    )
    assert len(set(places)) == 3, "sources left, results right"


def test_search_finds_and_says_how_many(opened):
    seen = opened(large())
    assert seen.texts("#count") == ["300 checkpoints"]
    seen.page.keyboard.press("/")
    seen.page.keyboard.type("safetensors 123")
    assert seen.texts("#count") == ["1 of 300 checkpoints"]
    assert len(seen.texts("#list li:visible")) == 1
    seen.page.keyboard.press("Enter")
    assert digest("n123") in seen.page.locator("#details").inner_text()
    card = seen.page.locator(f'.card[data-id="{digest("n123")}"]')
    assert card.is_visible()
    box, view = card.bounding_box(), seen.page.locator("#view").bounding_box()
    assert view["y"] <= box["y"] <= view["y"] + view["height"]
    seen.page.keyboard.press("Escape")
    assert seen.texts("#count") == ["300 checkpoints"]


def test_what_is_alike_is_one_card_until_opened(opened):
    seen = opened(large())
    assert len(seen.texts(".card")) == 5
    assert seen.page.locator(".card.stack").count() == 2
    seen.page.locator(".card.stack").first.click()
    assert len(seen.texts(".card")) > 140
    seen.page.locator("#details .plain").click()
    assert len(seen.texts(".card")) == 5
    seen.page.locator("#fold").uncheck()
    assert len(seen.texts(".card")) == 300
    boxes = seen.page.locator(".card").evaluate_all(
        "cards => cards.map(card => [parseFloat(card.style.left), parseFloat(card.style.top)])"
    )
    taken = {}
    for left, top in boxes:
        assert all(abs(top - other) >= 76 for other in taken.setdefault(left, [])), "cards do not overlap"
        taken[left].append(top)


def test_keys_walk_the_graph(opened):
    seen = opened(small())

    def selected():
        return seen.page.locator('.card[aria-current="true"]').get_attribute("data-id")

    assert selected() == digest("b")
    seen.page.keyboard.press("ArrowLeft")
    assert selected() == digest("a")
    seen.page.keyboard.press("ArrowRight")
    seen.page.keyboard.press("ArrowRight")
    assert selected() == digest("c")
    assert seen.page.evaluate("document.activeElement.dataset.id") == digest("c")
    assert seen.page.url.endswith(f"#{digest('c')}")
    before = seen.page.locator(".card").first.bounding_box()["width"]
    seen.page.keyboard.press("+")
    assert seen.page.locator(".card").first.bounding_box()["width"] > before


def test_what_was_deleted_says_so(opened):
    gone = replace(
        node("c", "maxtext", "/old"),
        places=(PlaceRecord("/old", digest("c"), "f", 1, TIME, gone="2026-11-22T01:00:00+00:00"),),
    )
    seen = opened(tree("a", [node("a", "orbax", "/a"), gone], [("a", "c")]))
    assert seen.texts(".card.gone .mark") == ["deleted"]
    seen.page.locator(".card.gone").click()
    assert "deleted 2026-11-22 01:00:00 +00:00" in seen.page.locator("#details").inner_text()
    assert seen.page.locator("#details s").inner_text() == "/old"


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_themes_have_contrast(opened, theme):
    seen = opened(small(), theme)
    assert seen.page.evaluate("document.documentElement.dataset.theme") == theme
    ink, ground = seen.page.evaluate(
        "() => [getComputedStyle(document.body).color,"
        " getComputedStyle(document.querySelector('.card')).backgroundColor]"
    )
    dark, light = sorted(sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in (ink, ground))
    assert light - dark > 450
    seen.page.locator("#theme").click()
    assert seen.page.evaluate("document.documentElement.dataset.theme") != theme


def test_hostile_names_do_nothing_in_a_browser(opened):
    seen = opened(hostile())
    assert len(seen.texts(".card")) == 3
    assert seen.page.locator("img, a, iframe").count() == 0
    assert EVIL in seen.texts(".card .format")
    assert seen.page.locator("body > script").count() == 2
    width = seen.page.evaluate("document.documentElement.scrollWidth")
    assert width <= 1500, "long names do not widen the page"
