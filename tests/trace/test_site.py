"""The site: its pages, and the same in a real browser."""

from __future__ import annotations

import http.client
import re
import threading
from contextlib import contextmanager
from dataclasses import replace
from urllib.parse import quote

import pytest
from click.testing import CliRunner

import wherry
from tests.support.browser import SCREENS, axe_faults, chromium, layout_faults
from tests.support.command import small
from tests.support.registry import flip_a_bit, model_folder
from wherry.cli import cli
from wherry.config.settings import pages_url
from wherry.errors import UsageError
from wherry.ledger.record import open_ledger, record_sighting
from wherry.store.local_store import locate
from wherry.store.sidecar import read_sidecar
from wherry.trace import site_pages as pages
from wherry.trace.site_contents import LedgerReader
from wherry.trace.site_server import SiteServer

pytest_plugins = ["tests.support.browser"]

EVIL = "<script>alert(1)</script>\u202e&\"'"


@contextmanager
def serving():
    """The server in a thread; yields what sends it a request, and its port."""
    with SiteServer(0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()

        def ask(path, method="GET", **headers):
            connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
            headers.setdefault("Cookie", f"{server.cookie}={server.token}")
            connection.request(method, path, headers=headers)
            answer = connection.getresponse()
            text = answer.read().decode()
            connection.close()
            return answer, text

        try:
            yield ask, server.server_port
        finally:
            server.shutdown()


@pytest.fixture
def runs(tmp_path):
    """Three steps of one run, converted, and what the conversions reported."""
    for step in (1000, 2000, 3000):
        model_folder(tmp_path / "run" / str(step), seed=step)
    return [wherry.convert(tmp_path / "run" / str(step), tmp_path / "out" / str(step), to="orbax")
            for step in (1000, 2000, 3000)]  # fmt: skip


def test_checkpoints_are_listed_and_searched(runs):
    with serving() as (ask, _):
        answer, text = ask("/")
        assert (answer.status, "6 checkpoints" in text) == (200, True)
        digest = runs[1].target.checkpoint_digest
        assert f'<li id="{digest}">' in text
        assert f'href="/lineage/{digest}#{digest}"' in text
        _, text = ask("/?q=orbax+2000")
        assert "1 checkpoint of 6" in text
        assert re.findall(r'<li id="([^"]*)"', text) == [digest]
        _, text = ask(f"/?q={digest[:25]}")
        assert re.findall(r'<li id="([^"]*)"', text) == [digest]
        assert "no checkpoint" in ask("/?q=nowhere")[1]


def test_runs_have_a_timeline_and_storage_a_share(runs, tmp_path):
    with serving() as (ask, _):
        _, text = ask("/runs")
        assert "steps 1,000 to 3,000" in text
        _, text = ask(f"/runs?run={tmp_path}/out")
        places = [float(at) for at in re.findall(r'<circle cx="([\d.]+)"', text)]
        assert places == [12.0, 500.0, 988.0]
        assert len(re.findall("<li id=", text)) == 3
        _, text = ask("/storage")
        shares = [int(share) for share in re.findall(r", (\d+)%", text)]
        assert (sum(shares) in range(98, 103), f"/runs?run={tmp_path}/out".replace("/", "%2F") in text) == (
            True,
            False,
        )
        assert ask("/runs?run=elsewhere")[0].status == 404


def test_open_findings_are_those_of_the_last_audit_and_of_verifications(runs, tmp_path):
    with serving() as (ask, _):
        assert "no open finding" in ask("/findings")[1]
        place = tmp_path / "out" / "2000"
        away = place.rename(tmp_path / "away")
        wherry.audit("all")
        _, text = ask("/findings")
        assert (str(place) in text, 'class="error"' in text) == (True, True)
        away.rename(place)
        assert wherry.audit("all").ok
        assert "no open finding" in ask("/findings")[1], "it was mended"


def test_damage_that_a_verification_found_is_open_until_one_passes(tmp_path):
    receipt = wherry.convert(small(tmp_path / "a.safetensors"), tmp_path / "b.safetensors", to="safetensors")
    sound = (tmp_path / "b.safetensors").read_bytes()
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "b.safetensors").write_bytes(sound)
    altered = flip_a_bit(tmp_path / "copy").read_bytes()
    (tmp_path / "b.safetensors").write_bytes(altered)
    assert not wherry.verify(receipt.target.uri, level="digest", record=True).ok
    with serving() as (ask, _):
        assert "b.safetensors" in ask("/findings")[1]
        (tmp_path / "b.safetensors").write_bytes(sound)
        assert wherry.verify(receipt.target.uri, level="digest", record=True).ok
        assert "no open finding" in ask("/findings")[1]


def test_a_lineage_has_its_own_page_and_policy(runs):
    digest = runs[0].target.checkpoint_digest
    with serving() as (ask, _):
        answer, text = ask(f"/lineage/{digest}")
        stated = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)[1]
        assert answer.headers["Content-Security-Policy"] == f"{stated}; frame-ancestors 'none'"
        assert ask(f"/lineage/{digest.partition(':')[2][:10]}")[0].status == 200
        assert ask("/lineage/blake3:00000000")[0].status == 404
        assert ask("/lineage/nothing")[0].status == 404


@pytest.mark.parametrize("path", ["/", "/runs", "/storage", "/findings", "/elsewhere"])
def test_every_answer_forbids_scripts_frames_and_other_origins(path, runs):
    with serving() as (ask, _):
        answer, text = ask(path)
    policy = answer.headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert {"base-uri 'none'", "form-action 'self'", "frame-ancestors 'none'"} <= set(policy.split("; "))
    assert "script" not in policy
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert answer.headers["X-Frame-Options"] == "DENY"
    assert answer.headers["Cache-Control"] == "no-store"
    assert not re.search(r"<script|\sstyle=|\son\w+=|https?://", text)


def test_only_get_is_answered_and_only_under_its_own_name(runs):
    with serving() as (ask, port):
        for method in ("POST", "PUT", "PATCH", "DELETE", "OPTIONS"):
            answer, _ = ask("/", method)
            assert (answer.status, answer.headers["Allow"]) == (405, "GET, HEAD")
        head, text = ask("/", "HEAD")
        assert (head.status, text, int(head.headers["Content-Length"]) > 100) == (200, "", True)
        for host in ("evil.example", f"evil.example:{port}", "127.0.0.1"):
            answer, text = ask("/", Host=host)
            assert (answer.status, "run/1000" in text) == (421, False)
        assert ask("/", Host=f"localhost:{port}")[0].status == 200
        assert ask("/?" + "&".join(f"a{number}=1" for number in range(50)))[0].status == 400


def test_hostile_names_stay_text(tmp_path):
    receipt = wherry.convert(small(tmp_path / "a.safetensors"), tmp_path / "b.safetensors", to="safetensors")
    subject = read_sidecar(locate(receipt.target.uri)).checkpoint
    with open_ledger() as ledger:
        record_sighting(ledger, replace(subject, uri=f"/data/{EVIL}/x", format=EVIL))
    with serving() as (ask, _):
        for path in (
            "/",
            "/runs",
            "/storage",
            "/findings",
            f"/?q={'%3Cscript%3E%22'}",
            "/runs?run=%3Cscript%3E",
        ):
            text = ask(path)[1]
            assert "<script" not in text, path
            assert "\u202e" not in text, path
        _, text = ask("/?q=data")
        assert "&lt;script&gt;alert(1)&lt;/script&gt;\\u202e&amp;&quot;&#x27;" in text
        (run,) = [name for name in LedgerReader().read().runs if "script" in name]
        assert ask(re.search(r'href="(/runs\?run=[^"]*script[^"]*)"', ask("/runs")[1])[1])[0].status == 200
        assert run.startswith("/data/")


def test_an_id_is_on_a_page_only_once_however_many_places_hold_the_checkpoint(tmp_path):
    for name in ("a", "b"):
        wherry.convert(small(tmp_path / f"{name}.safetensors"), tmp_path / f"{name}-out", to="orbax")
    with serving() as (ask, _):
        _, text = ask("/")
    ids = re.findall(r'<li id="([^"]*)"', text)
    assert (len(ids), len(set(ids)), text.count("<li")) == (2, 2, 4)


def test_a_long_list_is_cut_and_says_so(runs, monkeypatch):
    monkeypatch.setattr(pages, "MOST_ROWS", 4)
    with serving() as (ask, _):
        _, text = ask("/")
    assert len(re.findall("<li id=", text)) == 4
    assert "and 2 more; search for them" in text


def test_the_ledger_is_read_again_only_when_it_has_changed(runs, tmp_path):
    reader = LedgerReader()
    before = reader.read()
    assert reader.read() is before
    wherry.convert(small(tmp_path / "new.safetensors"), tmp_path / "new", to="orbax")
    assert len(reader.read().entries) == len(before.entries) + 2


def test_it_listens_on_the_loopback_interface_alone_and_says_when_a_port_is_taken():
    with SiteServer(0) as server:
        assert server.server_address[0] == "127.0.0.1"
        with pytest.raises(UsageError, match="cannot be used"):
            SiteServer(server.server_port)
        refused = CliRunner().invoke(cli, ["lineage", "serve", "--port", str(server.server_port)])
        assert isinstance(refused.exception, UsageError)


def test_pages_are_shown_only_to_who_has_the_printed_address(runs):
    with SiteServer(0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()

        def ask(path, **headers):
            connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
            connection.request("GET", path, headers=headers)
            answer = connection.getresponse()
            text = answer.read().decode()
            connection.close()
            return answer, text

        for path in ("/", "/runs", "/?token=", "/?token=guess"):
            answer, text = ask(path, Cookie="wherry-1=guess")
            assert (answer.status, "1000" in text, answer.headers["Set-Cookie"]) == (403, False, None)
        answer, text = ask(server.url.partition(str(server.server_port))[2])
        assert (answer.status, "1000" in text) == (200, True)
        cookie = answer.headers["Set-Cookie"]
        assert "HttpOnly" in cookie
        assert ask("/runs", Cookie=cookie.partition(";")[0])[0].status == 200
        assert server.token not in text
        server.shutdown()


def test_a_proxy_shows_the_pages_under_the_address_of_the_configuration(runs, tmp_path, monkeypatch):
    (tmp_path / "wherry.toml").write_text('[lineage]\nurl = "https://Pages.example/"\n')
    monkeypatch.setenv("WHERRY_CONFIG", str(tmp_path / "wherry.toml"))
    url = pages_url()
    assert url == "https://pages.example"
    with SiteServer(0, public=url) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert server.url == f"https://pages.example/?token={server.token}"

        def ask(host, path):
            connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
            connection.request("GET", path, headers={"Host": host})
            answer = connection.getresponse()
            answer.read()
            connection.close()
            return answer

        first = f"/?token={server.token}"
        assert ask("other.example", first).status == 421
        assert ask("pages.example", "/").status == 403
        for host, secure in (("pages.example", True), (f"127.0.0.1:{server.server_port}", False)):
            answer = ask(host, first)
            assert (answer.status, "Secure" in answer.headers["Set-Cookie"]) == (200, secure)
        server.shutdown()


@pytest.mark.parametrize(
    "url",
    [
        "ftp://x",
        "pages.example",
        "https://",
        "https://x/below",
        "https://me:pw@x",
        "https://x?q",
        "http://x:port",
    ],
)
def test_an_address_of_pages_that_is_none_is_refused(url, tmp_path, monkeypatch):
    monkeypatch.setenv("WHERRY_LINEAGE_URL", url)
    with pytest.raises(UsageError, match=r"lineage\.url"):
        pages_url()
    monkeypatch.delenv("WHERRY_LINEAGE_URL")
    (tmp_path / "wherry.toml").write_text(f'[lineage]\nurl = "{url}"\n')
    monkeypatch.setenv("WHERRY_CONFIG", str(tmp_path / "wherry.toml"))
    with pytest.raises(UsageError, match=r"lineage\.url|lineage: url"):
        pages_url()


def test_every_interface_needs_a_name_and_only_own_addresses_are_bound(tmp_path, monkeypatch):
    monkeypatch.delenv("WHERRY_LINEAGE_URL", raising=False)
    for host in ("0.0.0.0", "::", ""):
        refused = CliRunner().invoke(cli, ["lineage", "serve", "--port", "0", "--host", host])
        assert isinstance(refused.exception, UsageError), host
        assert "lineage.url" in str(refused.exception)
    for host in ("192.0.2.1", "no such host"):
        with pytest.raises(UsageError, match="is not an address of this machine"):
            SiteServer(0, host)
    with SiteServer(0, "127.0.0.2") as server:
        assert server.url.startswith(f"http://127.0.0.2:{server.server_port}/?token=")
        assert f"127.0.0.2:{server.server_port}" in server.names
    with SiteServer(0, "0.0.0.0", "http://pages.example:80") as server:
        assert {"pages.example", "pages.example:80"} <= server.names


# The pages in a real browser: three screens, light and dark; nothing overlaps, and axe finds no fault.


EVIL_OF_BROWSER = "</a><script>alert(1)</script>\u202e&\"'"
PATHS = ("/", "/?q=data", "/runs", "/storage", "/findings", "/nowhere")


def crowd(ledger, subject):
    """Record 300 checkpoints in 3 runs, with names of 200 characters, one long word and hostile ones among them."""
    for number in range(300):
        run = ("name " * 40, "without-a-place-to-break" * 9, EVIL_OF_BROWSER * 7)[number % 3]
        digest = f"blake3:{number:064x}"
        uri = f"/data/{run[:200].strip()}/{number}"
        one = replace(
            subject, uri=uri, format=EVIL_OF_BROWSER if number % 50 == 0 else "orbax", step=number * 10**9
        )
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
