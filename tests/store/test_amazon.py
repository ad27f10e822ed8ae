"""What is particular to s3://: lists of parts that name a part more than once."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import permutations

import pytest

from wherry.store.amazon import AmazonStore
from wherry.store.store import Upload

UPLOAD = Upload("bucket/model", "key", "run")
START = datetime(2026, 1, 1, tzinfo=UTC)


def row(number, mark, second):
    moment = {} if second is None else {"LastModified": START + timedelta(seconds=second)}
    return {"PartNumber": number, "Size": 8, "ETag": mark, **moment}


@pytest.fixture
def listed(monkeypatch):
    """Pages of rows → number and mark of the parts that are found."""

    def find(*pages):
        left = list(pages)

        def answer(_objects, _path, method, UploadId, **_after):  # noqa: N803  the name of the client's argument
            assert (method, UploadId) == ("list_parts", "key")
            rows = left.pop(0)
            return {"Parts": rows, "IsTruncated": bool(left), "NextPartNumberMarker": 1}

        monkeypatch.setattr(AmazonStore, "_call", answer)
        return [(part.number, part.mark) for part in AmazonStore.__new__(AmazonStore).parts(UPLOAD)]

    return find


@pytest.mark.parametrize(
    "rows", list(permutations([row(1, "old", 0), row(1, "new", 2), row(1, "older", -1)]))
)
def test_the_state_of_a_part_that_was_sent_last_is_found_in_any_order(listed, rows):
    assert listed([*rows, row(2, "end", 1)]) == [(0, "new"), (1, "end")]


def test_the_states_of_a_part_are_on_different_pages(listed):
    assert listed([row(1, "new", 2)], [row(1, "old", 0), row(2, "end", 1)]) == [(0, "new"), (1, "end")]


@pytest.mark.parametrize("second", [1, None])
def test_a_part_is_left_out_if_nothing_tells_which_state_is_newer(listed, second):
    tied = [row(1, "a", second), row(1, "b", second), row(1, "a", second)]
    assert listed([*tied, row(2, "end", second)]) == [(1, "end")]
    assert listed([*tied, row(1, "older", 0)] if second else tied) == []


def test_a_part_that_is_listed_twice_in_the_same_state_is_found(listed):
    assert listed([row(1, "new", 1), row(1, "new", 1), row(1, "old", 0)]) == [(0, "new")]
