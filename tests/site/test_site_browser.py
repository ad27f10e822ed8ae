"""The pages in a real browser: three screens, light and dark; nothing overlaps, and axe finds no fault."""

from __future__ import annotations

import threading
from dataclasses import replace
from urllib.parse import quote

import pytest

import wherry
from tests.support.browser import SCREENS, axe_faults, chromium, layout_faults
from tests.support.command import small
from tests.support.registry import model_folder
from wherry.ledger.record import open_ledger, record_sighting
from wherry.site.server import SiteServer

pytest_plugins = ["tests.support.browser"]  # its fixture

EVIL = "</a><script>alert(1)</script>\u202e&\"'"
PATHS = ("/", "/?q=data", "/runs", "/storage", "/findings", "/nowhere")


def crowd(ledger, subject):
    """Record 300 checkpoints in 3 runs, with names of 200 characters, one long word and hostile ones among them."""
    for number in range(300):
        run = ("name " * 40, "without-a-place-to-break" * 9, EVIL * 7)[number % 3]
        digest = f"blake3:{number:064x}"
        uri = f"/data/{run[:200].strip()}/{number}"
        one = replace(subject, uri=uri, format=EVIL if number % 50 == 0 else "orbax", step=number * 10**9)
        record_sighting(ledger, replace(one, checkpoint_digest=digest, weights_digest=digest))


@pytest.fixture(scope="module", params=["small", "crowded"])
def site(request, tmp_path_factory, own_home):
    """A served ledger with runs, a long name and an open finding; yields the address, a digest and a run."""
    folder = tmp_path_factory.mktemp("site")
    for step in (1000, 2000, 3000):
        model_folder(folder / "run" / str(step), seed=step)
        receipt = wherry.convert(folder / "run" / str(step), folder / "out" / str(step), to="orbax")
    long = folder / ("a-very-long-name-without-a-place-to-break" * 4)
    wherry.convert(small(folder / "x.safetensors"), long, to="orbax")
    (folder / "out" / "2000").rename(folder / "away")
    wherry.audit("all")
    if request.param == "crowded":
        with open_ledger() as ledger:
            crowd(ledger, receipt.target)
    with SiteServer(0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.url, receipt.target.checkpoint_digest, str(folder / "out")
        server.shutdown()


@pytest.fixture(scope="module")
def browser():
    with chromium() as found:
        yield found


@pytest.fixture
def opened(browser, site):
    """Opens a page; at the end, nothing may have been loaded from elsewhere, logged or refused."""
    contexts, faults = [], []

    def open_(path, screen="desktop", theme="light"):
        base = site[0].partition("/?")[0]
        width, height = SCREENS[screen]
        context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=theme)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: faults.append(message.text))
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on(
            "request", lambda request: None if request.url.startswith(base) else faults.append(request.url)
        )
        page.goto(site[0])  # sets the cookie
        page.goto(base + path)
        return page

    yield open_
    for context in contexts:
        context.close()
    assert [fault for fault in faults if "favicon" not in fault and "404" not in fault] == []


QUICK = {("phone", "light"), ("desktop", "dark")}


def pages_of(site):
    """Every page, that of a run and that of a lineage among them."""
    _, digest, run = site
    return (*PATHS, f"/runs?run={quote(run)}", f"/lineage/{digest}#{digest}")


@pytest.mark.parametrize(
    ("screen", "theme"),
    [
        pytest.param(screen, theme, marks=[] if (screen, theme) in QUICK else [pytest.mark.slow])
        for screen in SCREENS
        for theme in ("light", "dark")
    ],
)
def test_pages_fit_every_screen_in_both_themes(screen, theme, opened, site):
    for path in pages_of(site):
        page = opened(path, screen, theme)
        assert layout_faults(page) == [], path
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, ground[4:-1].split(","))) < 200) == (theme == "dark")


@pytest.mark.parametrize(
    ("screen", "theme"), [("phone", "light"), pytest.param("desktop", "dark", marks=pytest.mark.slow)]
)
def test_axe_finds_no_fault(screen, theme, opened, site, axe):
    for path in pages_of(site):
        assert axe_faults(opened(path, screen, theme), axe) == [], path


def test_a_person_searches_follows_a_lineage_and_comes_to_a_deep_link(opened, site):
    _, digest, run = site
    page = opened("/")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Checkpoints", (
        "the keyboard reaches the pages"
    )
    page.get_by_role("searchbox", name="Search checkpoints").fill(f"{run}/3000")
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
