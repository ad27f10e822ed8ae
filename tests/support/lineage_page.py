"""Lineages for tests of the page, and the page in a real browser."""

from __future__ import annotations

import hashlib
import json
import re

import pytest

from tests.support.browser import chromium
from wherry.ledger.nodes import LineageNode
from wherry.ledger.record import Edge
from wherry.ledger.replay import PlaceRecord, RegistrationRecord, VerificationRecord
from wherry.trace.lineage import LineageTree
from wherry.trace.page import page

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
TIME = "2026-11-21T09:12:44.120+00:00"


def digest(key):
    return f"blake3:{hashlib.sha256(key.encode()).hexdigest()}"


def node(key, format_, uri, step=None, **more):
    place = (PlaceRecord(uri, digest(key), "f", 1, TIME),)
    values = {"kind": "params", "tensors": 2, "parameters": 10, "nbytes": 4000, **more}
    return LineageNode(digest(key), digest("weights"), format_, "1", step=step, places=place, **values)


def tree(root, nodes, pairs, lossy=()):
    edges = tuple(
        Edge(digest(source), digest(target), digest("plan"), number, TIME, (source, target) not in lossy)
        for number, (source, target) in enumerate(pairs, 1)
    )
    return LineageTree(digest(root), {one.checkpoint_digest: one for one in nodes}, edges)


def small():
    registered = (RegistrationRecord("http://mlflow", "t5-base", "3", "registered"),)
    return tree(
        "b",
        [
            node("a", "t5x-orbax", "gs://runs/t5/checkpoint_1000", 1000),
            node("b", "huggingface", "/models/t5/hf", 1000, registrations=registered),
            node(
                "c",
                "maxtext",
                "/models/t5/maxtext",
                1000,
                verified=VerificationRecord("digest", "altered", TIME),
            ),
        ],
        [("a", "b"), ("b", "c"), ("c", "b")],
        lossy={("b", "c")},
    )


def large():
    """300 checkpoints: one source, two runs, and 297 steps that became something else."""
    nodes = [
        node("source", "maxtext", "/runs/base/1"),
        node("one", "orbax", "/one"),
        node("two", "dcp", "/two"),
    ]
    pairs = [("source", "one"), ("source", "two")]
    for number in range(297):
        parent = ("one", "two")[number % 2]
        nodes.append(node(f"n{number}", "safetensors", f"/out/{parent}/{number}.safetensors", number))
        pairs.append((parent, f"n{number}"))
    return tree("source", nodes, pairs)


def hostile():
    return tree(
        "b",
        [
            node("a", EVIL, f"/data/{EVIL}/{{{{data}}}}"),
            node("b", "safe\u202etensors", "/long/" + "name-" * 500 + "\ud800\x00\u2028.bin", 10**15),
            node(
                "c",
                "orbax",
                "",
                kind="<i>",
                registrations=(RegistrationRecord("javascript:alert(1)", EVIL, "1", "x"),),
            ),
        ],
        [("a", "b"), ("b", "c")],
    )


def data_of(text):
    return json.loads(re.search(r'<script type="application/json" id="lineage">(.*?)</script>', text)[1])


@pytest.fixture(scope="module")
def browser():
    with chromium() as found:
        yield found


class Seen:
    """A page in the browser, and everything that it did that it should not."""

    def __init__(self, browser, path, theme="light", size=(1500, 900), fragment=""):
        viewport = {"width": size[0], "height": size[1]}
        self.context = browser.new_context(viewport=viewport, color_scheme=theme, has_touch=size[0] < 500)
        self.page = self.context.new_page()
        self.faults = []
        self.page.on("console", lambda message: self.faults.append(message.text))
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.faults.append("dialog"), dialog.dismiss()))
        self.page.on("request", lambda request: self._requested(request.url))
        self.page.goto(f"{path.as_uri()}{fragment}")

    def _requested(self, url):
        if not url.startswith("file:"):
            self.faults.append(url)

    def texts(self, selector):
        return self.page.locator(selector).all_inner_texts()


@pytest.fixture
def opened(browser, tmp_path):
    seen = []

    def open_(tree_, theme="light", **how):
        path = tmp_path / "lineage.html"
        path.write_text(page(tree_), encoding="utf-8")
        seen.append(Seen(browser, path, theme, **how))
        return seen[-1]

    yield open_
    for one in seen:
        assert one.faults == []
        one.context.close()
