"""The order in which a worker tries to claim units: few looks at claims of others, and rarely the choice of another."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

from wherry.workers.records import Task, TaskKind
from wherry.workers.work import LOOKED_AT, LOOKED_AT_LAST, in_order


def units(count):
    return [Task(TaskKind.MAKE, SimpleNamespace(number=number)) for number in range(count)]


def claims(*numbers):
    return [f"claim-receipt-{number:05d}-0" for number in numbers]


def numbers(order):
    return [task.unit.number for task in order]


def test_a_worker_that_is_alone_goes_in_order():
    assert numbers(in_order(units(200), ["job.json"]))[0] == 0


def test_few_claims_of_others_are_looked_at_before_a_free_unit_and_every_free_unit_follows():
    order = numbers(in_order(units(200), claims(*range(10, 80)), "a worker"))
    assert set(order[:LOOKED_AT]) <= set(range(10, 80))
    assert sorted(order[LOOKED_AT:]) == [*range(10), *range(80, 200)]


def test_a_worker_looks_at_the_same_claims_again_as_long_as_they_are_there():
    orders = [numbers(in_order(units(80 + more), claims(*range(80)), "a worker")) for more in range(5)]
    assert len({tuple(order[:LOOKED_AT]) for order in orders}) == 1


def test_many_workers_together_look_at_every_claim_once_no_unit_is_free():
    orders = [numbers(in_order(units(50), claims(*range(50)), f"worker {number}")) for number in range(100)]
    assert all(len(order) == LOOKED_AT_LAST for order in orders)
    assert {number for order in orders for number in order} == set(range(50))


def test_workers_rarely_choose_the_same_unit():
    chosen = Counter(numbers(in_order(units(200), claims(0)))[LOOKED_AT - 1] for _worker in range(64))
    assert max(chosen.values()) < 16
