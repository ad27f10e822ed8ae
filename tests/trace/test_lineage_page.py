"""The page of a lineage, small and large, in a real browser."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from tests.support.browser import SCREENS, axe_faults, every_screen, every_theme, layout_faults
from tests.support.lineage_page import EVIL, TIME, data_of, digest, hostile, large, node, small, tree
from wherry.ledger.replay import PlaceRecord, RegistrationRecord, VerificationRecord
from wherry.trace.page import MOST_BYTES, NEIGHBOURS, page

pytest_plugins = ["tests.support.lineage_page", "tests.support.browser"]


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


# The page of a lineage that is too large to be shown: bounded, honest about the rest, and still
# searchable.


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
    monkeypatch.setattr("wherry.trace.page.MOST_BYTES", 300_000)
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


# The lineage page on a phone, a tablet and a desktop, light and dark: nothing overlaps, and axe finds no
# fault.


def long_names():
    """Names of 200 characters everywhere: words, one long word, and hostile characters."""
    names = [("name " * 40).strip(), "without-a-place-to-break" * 9, EVIL * 4]
    nodes = [
        node(
            f"n{number}",
            name[:200],
            f"/data/{name[:200]}/{name[:200]}",
            10**15,
            registrations=(RegistrationRecord(f"http://{name[:100]}", name[:200], "12345", "registered"),),
        )
        for number, name in enumerate(names)
    ]
    return tree("n0", nodes, [("n0", "n1"), ("n1", "n2"), ("n0", "n2")], lossy={("n1", "n2")})


TREES = {"small": small, "large": large, "long": long_names, "hostile": hostile}
QUICK = {("small", "light"), ("large", "dark"), ("long", "light"), ("hostile", "dark")}
every_tree_and_theme = pytest.mark.parametrize(
    ("which", "theme"),
    [
        pytest.param(which, theme, marks=[] if (which, theme) in QUICK else [pytest.mark.slow])
        for which in TREES
        for theme in ("light", "dark")
    ],
)


@every_tree_and_theme
def test_nothing_overlaps_or_scrolls_sideways(which, theme, opened):
    whole = TREES[which]()
    for screen, size in SCREENS.items():
        seen = opened(whole, theme, size=size)
        assert layout_faults(seen.page) == [], screen
        if which == "large":
            seen.page.locator("#fold").uncheck()
            assert layout_faults(seen.page) == [], f"{screen}, with all 300 cards"


def test_axe_finds_what_is_wrong(browser, axe):
    page = browser.new_page()
    page.set_content("<p style='color: #999'>hard to read<img src=x><button></button>")
    found = " ".join(axe_faults(page, axe))
    for rule in ("color-contrast", "image-alt", "button-name", "html-has-lang"):
        assert rule in found
    page.close()


def test_faults_of_a_layout_are_found(browser):
    page = browser.new_page()
    page.set_content(
        "<p style='position: absolute; top: 0'>one</p><p style='position: absolute; top: 5px'>two</p>"
        "<div style='width: 9999px'>wide</div><button style='width: 9px; height: 9px'></button>"
    )
    faults = layout_faults(page)
    for fault in ("it scrolls sideways by", "overlap: P  one | P  two", "too small to tap: <button"):
        assert any(one.startswith(fault) for one in faults), fault
    page.close()


@every_tree_and_theme
def test_axe_finds_no_fault(which, theme, opened, axe):
    whole = TREES[which]()
    for screen in ("phone", "desktop"):
        assert axe_faults(opened(whole, theme, size=SCREENS[screen]).page, axe) == [], screen


@every_theme
def test_axe_finds_no_fault_in_what_is_searched_or_linked(theme, opened, axe):
    seen = opened(large(), theme, fragment=f"#{digest('n123')}")
    assert axe_faults(seen.page, axe) == [], "the way of one of them"
    seen.page.locator("#search").fill("safetensors 12")
    assert axe_faults(seen.page, axe) == []


def in_view(seen, selector, scroller="view"):
    """Whether the middle of an element is within the window and within the box that scrolls it."""
    return seen.page.evaluate(
        """([selector, scroller]) => {
          const box = document.querySelector(selector).getBoundingClientRect();
          const view = document.getElementById(scroller).getBoundingClientRect();
          const middle = { x: box.left + box.width / 2, y: box.top + box.height / 2 };
          return middle.x > Math.max(0, view.left) && middle.x < Math.min(innerWidth, view.right)
            && middle.y > Math.max(0, view.top) && middle.y < Math.min(innerHeight, view.bottom);
        }""",
        [selector, scroller],
    )


@every_screen
def test_a_deep_link_focuses_its_checkpoint_and_scrolls_to_it(screen, opened):
    wanted = digest("n123")
    seen = opened(large(), size=SCREENS[screen], fragment=f"#{wanted}")
    card = f'.card[data-id="{wanted}"]'
    assert seen.page.evaluate("document.activeElement.dataset.id") == wanted
    assert in_view(seen, card)
    assert wanted in seen.page.locator("#details").inner_text()
    other = digest("n7")
    seen.page.evaluate(f"location.hash = '#{other}'")
    seen.page.wait_for_function(f"document.activeElement.dataset.id === '{other}'")
    assert in_view(seen, f'.card[data-id="{other}"]')
    seen.page.evaluate("location.hash = '#nothing'")
    assert other in seen.page.locator("#details").inner_text()


def test_a_link_to_a_checkpoint_that_is_only_listed_tells_of_it(opened):
    """Of a hub with more results than a page shows, one is linked that is left out."""
    nodes = [node("hub", "orbax", "/hub")]
    nodes += [node(f"n{number}", "orbax", f"/{number}" + "x" * 1000, number) for number in range(900)]
    whole = tree("hub", nodes, [("hub", f"n{number}") for number in range(900)])
    seen = opened(whole, fragment=f"#{digest('n3')}")
    assert digest("n3")[:19] in seen.page.locator("#details").inner_text()
    assert "wherry lineage show" in seen.page.locator("#details").inner_text()
    summary = seen.page.locator("#summary").inner_text()
    assert "901 checkpoints" in summary
    assert "only the 201 nearest are drawn; search lists the others" in summary


def test_on_a_phone_names_can_be_read_and_cards_tapped(opened):
    seen = opened(small(), size=SCREENS["phone"])
    sizes = seen.page.locator(".card .format, .card .where, #details dd").evaluate_all(
        "all => all.map(one => parseFloat(getComputedStyle(one).fontSize)"
        " * (one.closest('.card') ? one.getBoundingClientRect().width / one.offsetWidth : 1))"
    )
    assert min(sizes) >= 12
    title, tools = (seen.page.locator(one).bounding_box() for one in (".headline", ".tools"))
    assert title["width"] > 300, "the numbers have the width of the screen"
    assert tools["y"] >= title["y"] + title["height"]
    seen.page.locator(".card", has_text="maxtext").tap()
    assert "✗ altered at level digest" in seen.page.locator("#details").inner_text()


def test_the_keyboard_reaches_every_part_and_shows_where_it_is(opened):
    seen = opened(small())
    reached = []
    for _ in range(40):
        seen.page.keyboard.press("Tab")
        found = seen.page.evaluate(
            "() => [document.activeElement.id || document.activeElement.className,"
            " getComputedStyle(document.activeElement).outlineStyle]"
        )
        if found[0] == "" or (reached and found[0] == reached[0]):
            break
        reached.append(found[0])
        assert found[1] != "none", found[0]
    for part in ("larger", "theme", "search", "row", "card", "link"):
        assert any(part in one for one in reached), f"{part} of {reached}"


def tabbed(seen):
    """Press Tab; the id of what it reaches, or of the part around it."""
    seen.page.keyboard.press("Tab")
    return seen.page.evaluate("document.activeElement.closest('[id]')?.id")


@every_screen
def test_a_selection_is_shown_in_the_list_and_tab_goes_on_where_it_was_made(screen, opened):
    """The row of a checkpoint that is selected elsewhere is scrolled to; Tab does not start there."""
    seen = opened(large(), size=SCREENS[screen], fragment=f"#{digest('n7')}")
    seen.page.locator("#details .link").press("Enter")
    current = '.row[aria-current="true"]'
    assert seen.page.locator(current).get_attribute("data-id") == digest("two")
    assert tabbed(seen) == "details"
    seen.page.locator("#details .link", has_text="295.safetensors").press("Enter")
    assert seen.page.locator(current).get_attribute("data-id") == digest("n295")
    assert in_view(seen, current, "list")
    assert tabbed(seen) == "details"


def test_tab_starts_at_the_top_although_the_selected_row_is_scrolled_to(opened):
    """The root of this page is the last row of its list."""
    nodes = [node(f"n{number}", "orbax", f"/{number}", number) for number in range(60)]
    nodes.append(node("last", "maxtext", "/last"))
    seen = opened(tree("last", nodes, [(f"n{number}", "last") for number in range(60)]))
    assert seen.page.evaluate("document.getElementById('list').scrollTop") > 0
    assert in_view(seen, '.row[aria-current="true"]', "list")
    assert tabbed(seen) == "fold"
