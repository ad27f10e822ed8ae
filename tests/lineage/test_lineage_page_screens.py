"""The lineage page on a phone, a tablet and a desktop, light and dark: nothing overlaps, and axe finds no fault."""

from __future__ import annotations

import pytest

from tests.support.browser import SCREENS, axe_faults, every_screen, every_theme, layout_faults
from tests.support.lineage_page import EVIL, digest, hostile, large, node, small, tree
from wherry.ledger.replay import RegistrationRecord

pytest_plugins = ["tests.support.lineage_page", "tests.support.browser"]  # their fixtures


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
