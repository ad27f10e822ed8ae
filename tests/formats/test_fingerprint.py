"""A fingerprint covers each file's name, size and change mark, and nothing that wherry puts next to them."""

from __future__ import annotations

from wherry.formats.checkpoint import fingerprint
from wherry.storage.sidecar import OWN_NAMES
from wherry.storage.stores import locate
from wherry.store.store import Entry

BASE = [Entry("a", 1, is_dir=False, mark="1"), Entry("b", 2, is_dir=False, mark="2")]
PLACE = locate("/checkpoints/x")


def test_each_fact_counts():
    variants = [
        BASE,
        BASE[:1],
        [BASE[0], Entry("c", 2, is_dir=False, mark="2")],
        [BASE[0], Entry("b", 3, is_dir=False, mark="2")],
        [BASE[0], Entry("b", 2, is_dir=False, mark="3")],
    ]
    assert len({fingerprint(one, PLACE) for one in variants}) == len(variants)
    assert fingerprint(BASE[::-1], PLACE) == fingerprint(BASE, PLACE)


def test_sizes_count_where_marks_do_not():
    sizes = [[Entry("a", size, is_dir=False, mark=str(size))] for size in (1, 2)]
    assert len({fingerprint(one, PLACE, marks=False) for one in sizes}) == 2
    marks = [[Entry("a", 1, is_dir=False, mark=mark)] for mark in ("1", "2")]
    assert len({fingerprint(one, PLACE, marks=False) for one in marks}) == 1


def test_our_own_files_do_not_count():
    own = [Entry(name, 5, is_dir=False, mark="5") for name in sorted(OWN_NAMES)]
    assert own
    assert fingerprint([*BASE, *own], PLACE) == fingerprint(BASE, PLACE)


def test_a_single_file_keeps_its_fingerprint_under_another_name():
    one = [Entry("x", 1, is_dir=False, mark="1")]
    other = [Entry(".wherry-x.0123abcd", 1, is_dir=False, mark="1")]
    assert fingerprint(one, PLACE) == fingerprint(other, locate("/checkpoints/.wherry-x.0123abcd"))
