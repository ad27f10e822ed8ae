"""The rule for second attempts: at least 10 started, half of them done, and 3 times the median."""

from __future__ import annotations

import pytest

from wherry.workers.coordinator import stragglers


@pytest.mark.parametrize(
    ("running", "finished", "late"),
    [
        ({1: 31.0}, [10.0] * 9, [1]),
        ({1: 30.0}, [10.0] * 9, []),  # not more than 3 times the median
        ({1: 31.0}, [10.0] * 8, []),  # 9 were started
        (dict.fromkeys(range(6), 31.0), [10.0] * 5, []),  # fewer than half are done
        ({1: 40.0, 2: 50.0, 3: 5.0}, [10.0] * 7, [2, 1]),
        ({1: 31.0}, [10.0] * 5 + [100.0] * 4, [1]),  # the median, not the mean
        ({}, [10.0] * 20, []),
        ({1: 0.9, 2: 1.1}, [0.01] * 9, [2]),  # a second attempt costs more than it saves
    ],
)
def test_stragglers(running, finished, late):
    assert stragglers(running, finished) == late
