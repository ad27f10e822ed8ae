"""The pages in a real browser: three widths, light and dark, no sideways scrolling, and nothing that overlaps."""

from __future__ import annotations

import threading

import pytest

import wherry
from tests.support.browser import chromium
from tests.support.command import small
from tests.support.registry import model_folder
from wherry.site.server import SiteServer

WIDTHS = (360, 800, 1400)
# Boxes that hold text or a control: no two of them may share more than a hairline, unless one holds the other.
OVERLAPS = """
() => {
  const all = [...document.querySelectorAll("h1, nav a, input, button, main p, main svg, footer, .rows > li")];
  const boxes = all.map(one => [one, one.getBoundingClientRect()]).filter(([, box]) => box.width && box.height);
  const found = [];
  boxes.forEach(([a, one], at) => boxes.slice(at + 1).forEach(([b, two]) => {
    if (a.contains(b) || b.contains(a)) return;
    const across = Math.min(one.right, two.right) - Math.max(one.left, two.left);
    const down = Math.min(one.bottom, two.bottom) - Math.max(one.top, two.top);
    if (across > 1 && down > 1) found.push(`${a.outerHTML.slice(0, 80)} | ${b.outerHTML.slice(0, 80)}`);
  }));
  return found;
}
"""
CONTRAST = """
() => [...document.querySelectorAll("main p, main a, .good, .bad, .error, footer, button")].map(one => {
  const light = colour => {
    const parts = colour.match(/[\\d.]+/g).slice(0, 3).map(part => part / 255)
      .map(part => part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
  };
  let ground = one;
  while (ground && getComputedStyle(ground).backgroundColor === "rgba(0, 0, 0, 0)") ground = ground.parentElement;
  const [a, b] = [getComputedStyle(one).color, getComputedStyle(ground || document.body).backgroundColor].map(light);
  return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
})
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory, own_home):
    """A served ledger with runs, a long name and an open finding; yields the address and a digest."""
    folder = tmp_path_factory.mktemp("site")
    for step in (1000, 2000, 3000):
        model_folder(folder / "run" / str(step), seed=step)
        receipt = wherry.convert(folder / "run" / str(step), folder / "out" / str(step), to="orbax")
    long = folder / ("a-very-long-name-without-a-place-to-break" * 4)
    wherry.convert(small(folder / "x.safetensors"), long, to="orbax")
    (folder / "out" / "2000").rename(folder / "away")
    wherry.audit("all")
    with SiteServer(0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.url, receipt.target.checkpoint_digest
        server.shutdown()


@pytest.fixture(scope="module")
def browser():
    with chromium() as found:
        yield found


@pytest.fixture
def opened(browser, site):
    """Opens a page; at the end, nothing may have been loaded from elsewhere, logged or refused."""
    contexts, faults = [], []

    def open_(path, width=1400, theme="light"):
        context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=theme)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: faults.append(message.text))
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on(
            "request", lambda request: None if request.url.startswith(site[0]) else faults.append(request.url)
        )
        page.goto(site[0].rstrip("/") + path)
        return page

    yield open_
    for context in contexts:
        context.close()
    assert [fault for fault in faults if "favicon" not in fault] == []


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_pages_fit_every_width_in_both_themes(width, theme, opened):
    for path in ("/", "/?q=orbax", "/runs", "/storage", "/findings"):
        page = opened(path, width, theme)
        assert page.evaluate("document.documentElement.scrollWidth") <= width, path
        assert page.evaluate(OVERLAPS) == [], path
        assert min(page.evaluate(CONTRAST)) >= 4.5, path
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, ground[4:-1].split(","))) < 200) == (theme == "dark")


def test_a_person_searches_follows_a_lineage_and_comes_to_a_deep_link(opened, site):
    digest = site[1]
    page = opened("/")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Checkpoints", (
        "the keyboard reaches the pages"
    )
    page.get_by_role("searchbox", name="Search checkpoints").fill("out 3000")
    page.get_by_role("button", name="Search").click()
    assert page.locator(".rows > li").count() == 1
    page.locator(".rows > li a").first.click()
    page.locator("#details").wait_for()
    assert digest in page.locator("#details").inner_text(), "the lineage page, with its script"
    page = opened(f"/?q={digest}#{digest}")
    assert page.locator(".rows > li:target").get_attribute("id") == digest


def test_pages_have_landmarks_one_heading_and_names(opened):
    for path in ("/", "/runs", "/storage", "/findings"):
        page = opened(path)
        assert page.locator("html").get_attribute("lang") == "en"
        assert [page.get_by_role(role).count() for role in ("banner", "main", "contentinfo")] == [1, 1, 1]
        assert page.locator("h1").count() == 1
        assert page.locator("nav a[aria-current=page]").count() == 1
        assert page.locator("svg:not([role=img][aria-label]):not([aria-hidden=true])").count() == 0
        ids = page.locator("[id]").evaluate_all("all => all.map(one => one.id)")
        assert len(ids) == len(set(ids))
