"""A real browser for the tests of pages: Chromium through playwright, or a reason to skip; and faults of a page."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.node import node_file

CHROMIUM = Path("/usr/bin/chromium")
# Chromium 150 lets Tab start at what a page has scrolled into view; 156 does so unless nothing had focus yet.
# Without this exception Tab starts there in both; a Chromium that has no exception of this name ignores it.
_WITHOUT = "ScrollIntoViewNoInitialFocusNavigationStartingPoint"
ARGUMENTS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    f"--disable-blink-features={_WITHOUT}",
]  # fmt: skip
# Width and height of a phone, a tablet and a desktop.
SCREENS = {"phone": (390, 844), "tablet": (820, 1180), "desktop": (1440, 900)}
THEMES = ("light", "dark")
every_screen = pytest.mark.parametrize("screen", SCREENS)
every_theme = pytest.mark.parametrize("theme", THEMES)

# What is seen of each text and control: no two may share more than a hairline, unless one holds the other.
_OVERLAPS = """
() => {
  const clip = (box, element) => {
    let { left, top, right, bottom } = box;
    for (let up = element; up && up !== document.documentElement; up = up.parentElement) {
      if (getComputedStyle(up).overflow === "visible") continue;
      const edge = up.getBoundingClientRect();
      [left, top] = [Math.max(left, edge.left), Math.max(top, edge.top)];
      [right, bottom] = [Math.min(right, edge.right), Math.min(bottom, edge.bottom)];
    }
    return { left, top, right, bottom };
  };
  const seen = [];
  const add = (element, box) => {
    const shown = clip(box, element);
    if (shown.right - shown.left > 1 && shown.bottom - shown.top > 1) seen.push([element, shown]);
  };
  for (const element of document.querySelectorAll("body *")) {
    if (!element.checkVisibility({ visibilityProperty: true, contentVisibilityAuto: true })) continue;
    const drawn = element.matches("svg") && getComputedStyle(element).pointerEvents !== "none";
    if (drawn || element.matches("button, input, kbd, .rows > li")) add(element, element.getBoundingClientRect());
    for (const node of element.childNodes) {
      if (node.nodeType !== Node.TEXT_NODE || !node.data.trim()) continue;
      const range = document.createRange();
      range.selectNodeContents(node);
      for (const box of range.getClientRects()) add(element, box);
    }
  }
  const found = [];
  const named = one => `${one.tagName} ${one.className.baseVal ?? one.className} ${one.textContent.slice(0, 40)}`;
  seen.sort(([, one], [, two]) => one.top - two.top);
  seen.forEach(([a, one], at) => {
    for (const [b, two] of seen.slice(at + 1)) {
      if (two.top >= one.bottom - 1) break;
      if (a === b || a.contains(b) || b.contains(a)) continue;
      if (Math.min(one.right, two.right) - Math.max(one.left, two.left) > 1
        && Math.min(one.bottom, two.bottom) - two.top > 1) found.push(`${named(a)} | ${named(b)}`);
    }
  });
  return found.slice(0, 10);
}
"""
# What a finger cannot hit: controls of less than 24 pixels, but for links within a text.
_SMALL = """
() => [...document.querySelectorAll("a, button, input, summary")]
  .filter(one => one.checkVisibility({ visibilityProperty: true, contentVisibilityAuto: true }))
  .map(one => [one, (one.closest("label") ?? one).getBoundingClientRect()])
  .filter(([one, box]) => (box.width < 24 || box.height < 24) && getComputedStyle(one).display !== "inline")
  .map(([one, box]) => `${one.outerHTML.slice(0, 80)} ${box.width} × ${box.height}`)
"""
_RULES = "{ resultTypes: ['violations'] }"


@contextmanager
def chromium() -> Generator[Any]:
    """An opened browser with a profile of its own."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if not CHROMIUM.is_file():
        pytest.skip(f"there is no {CHROMIUM}")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=str(CHROMIUM), args=ARGUMENTS)
        try:
            yield browser
        finally:
            browser.close()


@pytest.fixture(scope="session")
def axe() -> str:
    """The source of axe-core, which finds what keeps people from using a page."""
    return node_file("axe-core", "axe-core", "axe.min.js").read_text()


def layout_faults(page: Any) -> list[str]:
    """What is wrong with the layout of an open page: sideways scrolling, overlapping boxes, and small controls."""
    wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    faults = [f"it scrolls sideways by {wide} pixels"] if wide > 0 else []
    faults += [f"overlap: {one}" for one in page.evaluate(_OVERLAPS)]
    return [*faults, *(f"too small to tap: {one}" for one in page.evaluate(_SMALL))]


def axe_faults(page: Any, axe: str) -> list[str]:
    """What axe-core finds on an open page: impact, rule, element and how to mend it."""
    if not page.evaluate("typeof axe === 'object'"):
        page.evaluate(f"() => {{ {axe}\n }}")
    found = page.evaluate(f"async () => (await axe.run(document, {_RULES})).violations")
    return [
        f"{rule['impact']} {rule['id']}: {node['html'][:120]}: {node['failureSummary']}"
        for rule in found
        for node in rule["nodes"]
    ]
