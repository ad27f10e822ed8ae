"""Memory of parts: given in the order in which it was requested, and exceeded by one part at most."""

import threading
import time

import pytest

from wherry.errors import StorageError
from wherry.target.parts import Sender

pytest_plugins = ["tests.support.turns"]


@pytest.fixture
def sender():
    made = Sender(100, 2)
    yield made
    made.stop()


def started(count, act):
    """Threads that run at the same time, each begun when the one before it waits or has ended."""
    threads = [threading.Thread(target=act, args=(number,), daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
        thread.join(0.05)
    return threads


def test_who_waits_for_memory_is_not_overtaken(sender, asking):
    order, sent = [], threading.Event()
    sender.reserve(90)
    sender.send(90, lambda: sent.wait(120))

    def reserve(number):
        sender.reserve([80, 10, 10][number])
        order.append(number)

    threads = [asking(reserve, number) for number in range(3)]
    assert order == []
    sent.set()
    for thread in threads:
        thread.join(120)
    assert order[0] == 0
    assert sorted(order) == [0, 1, 2]
    assert sender.peak == 100


def test_the_memory_is_exceeded_only_while_nothing_is_sent_and_nothing_can_be_put_aside(sender):
    relief_calls, relieved, sent = [], threading.Event(), threading.Event()
    sender.reserve(90)

    def relieve():
        relief_calls.append(1)
        sender.send(0, lambda: sent.wait(120))  # another thread begins to send meanwhile
        relieved.set()
        return False

    sender.relieve = relieve
    (thread,) = started(1, lambda _number: sender.reserve(20))
    assert relieved.wait(120)
    assert relief_calls == [1]
    assert sender.peak == 90  # it waits for what is sent
    sent.set()
    thread.join(120)
    assert sender.peak == 110


def test_parts_that_were_put_aside_come_back_one_at_a_time_beyond_the_memory(sender):
    sender.reserve(90)

    def load(_number):
        with sender.loaded(30):
            time.sleep(0.15)  # longer than the next one takes to begin

    for thread in started(4, load):
        thread.join(120)
    assert sender.peak == 120
    sender.release(90)
    with sender.loaded(30), sender.loaded(30):
        assert sender.peak == 120  # several, where there is room


def test_all_who_wait_learn_that_sending_has_failed(sender):
    failed, errors = threading.Event(), []
    sender.reserve(100)

    def fail():
        failed.wait(120)
        raise StorageError("the store is gone", uri="memory://x", cure="try again")

    sender.send(50, fail)

    def reserve(_number):
        try:
            sender.reserve(60)
        except StorageError as error:
            errors.append(error)

    threads = started(3, reserve)
    failed.set()
    for thread in threads:
        thread.join(120)
    assert len(errors) == 3
