"""Faults of the network and of the store in a whole conversion to a bucket.

Whatever happens: no half target is visible, no wrong byte is committed, `wherry clean` names everything that is left,
and the same conversion ends well when the fault is over.
"""

import re
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import pytest

import wherry
from tests.support.faults import (
    ALWAYS,
    cut,
    cut_sent,
    first_of_each,
    flip_received,
    flip_sent,
    lagging,
    lose_answer,
    other_mark,
    shorten,
    shorten_sent,
    slow,
    sometimes,
    status,
)
from tests.support.object_stores import model
from wherry.errors import StorageError, TargetExistsError, TargetInUseError, WherryError
from wherry.store.local_store import locate
from wherry.target.clean import clean
from wherry.target.object_staging import is_committed

BUSY = status(503, b"busy")
SLOWER = status(429, b"slower", [("Retry-After", "1")])
EXPIRED = {
    "s3": status(400, b"<Error><Code>ExpiredToken</Code><Message>said so</Message></Error>"),
    "gs": status(401, b'{"error": {"code": 401, "message": "Invalid Credentials"}}'),
    "az": status(
        403,
        b"<Error><Code>AuthenticationFailed</Code></Error>",
        [("x-ms-error-code", "AuthenticationFailed")],
    ),
}
# Requests of one kind, by store: method and what the path contains.
PARTS = {"s3": ("PUT", "partNumber"), "gs": ("POST", "/upload/"), "az": ("PUT", "comp=block&")}
READS = {"s3": ("GET", ".distcp"), "gs": ("GET", "/download/"), "az": ("GET", ".distcp")}
LISTS = {"s3": ("GET", "list-type=2"), "gs": ("GET", "/o?"), "az": ("GET", "comp=list&")}
ANY = dict.fromkeys(PARTS, ("", ""))
_numbers = count()

pytestmark = pytest.mark.parametrize(
    "emulated",
    ["s3", *(pytest.param(one, marks=pytest.mark.slow) for one in ("gs", "az"))],
    indirect=True,
    scope="module",
)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return model(tmp_path_factory.mktemp("source") / "model", rows=60, count=3) / "model.safetensors"


@pytest.fixture
def target(faulty, tmp_path):
    return f"{faulty.uri}/{tmp_path.name}-{next(_numbers)}/out"


@pytest.fixture(scope="module")
def digest(source, tmp_path_factory):
    """Of the target of a conversion to a disk."""
    return attempt(source, str(tmp_path_factory.mktemp("disk") / "out"))


def attempt(source, target, **options):
    """The checkpoint digest; the error, if the conversion ends with one."""
    try:
        return wherry.convert(source, target, to="dcp", lineage=False, **options).target.checkpoint_digest
    except WherryError as error:
        return error


def left(target):
    """Keys of everything next to a target and, unless it is committed, below it; and its uploads."""
    place = locate(target)
    own = f"{place.name}/" if is_committed(place, (".metadata",)) else " "
    keys = [
        entry.name
        for entry in place.parent.walk()
        if not entry.name.startswith(own) or ".wherry-" in entry.name
    ]
    return keys + [one.key for one in place.store.uploads(place.parent.path)]


def assert_whole_or_absent(target, result):
    """What a reader may find once a run has ended in any way, and what `clean` must name."""
    if is_committed(locate(target), (".metadata",)):
        assert wherry.verify(target, level="digest").ok
    else:
        assert isinstance(result, WherryError), "a run that did not commit has failed"
    root = locate(target).parent.uri
    assert bool(left(target)) == bool(clean(root, dry_run=True, min_age=0))


def assert_resumed(source, target, digest):
    if is_committed(locate(target), (".metadata",)):
        clean(
            locate(target).parent.uri, min_age=0
        )  # a lost answer may have begun an upload that no run knows
    assert attempt(source, target) == digest
    assert wherry.verify(target, level="digest").ok
    assert left(target) == []


def case(name, act, where=ANY, *, times=ALWAYS, after=0, ends=None, marks=()):
    """A fault: what happens, to which requests, and the class of the error, or of the digest, that is its sure end."""
    return pytest.param((act, where, times, after, ends), id=name, marks=marks)


SLOW = pytest.mark.slow
CASES = [
    case("mixed", lambda _scheme: sometimes(0.3, BUSY, cut, cut_sent, lose_answer)),
    case("503-sometimes", lambda _scheme: sometimes(0.3, BUSY), marks=SLOW),
    *(case(f"503-from-{n}", lambda _scheme: BUSY, after=n, ends=StorageError if n < 48 else None,
           marks=() if n == 30 else SLOW)
      for n in (0, 8, 12, 18, 24, 30, 36, 42, 48, 54, 60)),
    case("429", lambda _scheme: SLOWER, PARTS, times=1, marks=SLOW),
    case("parts-cut", lambda _scheme: sometimes(0.3, cut_sent), PARTS),
    case("all-parts-cut", lambda _scheme: cut_sent, PARTS, after=4, ends=StorageError, marks=SLOW),
    case("reads-cut", lambda _scheme: sometimes(0.3, cut), READS, marks=SLOW),
    case("read-short", lambda _scheme: shorten, READS, times=1, marks=SLOW),
    case("sent-bits-flip", lambda _scheme: sometimes(0.3, flip_sent), PARTS),
    case("sent-short", lambda _scheme: sometimes(0.3, shorten_sent), PARTS),
    case("all-sent-short", lambda _scheme: shorten_sent, PARTS, after=4, ends=StorageError, marks=SLOW),
    case("all-sent-bits-flip", lambda _scheme: flip_sent, PARTS, after=4, ends=StorageError, marks=SLOW),
    case("read-bits-flip", lambda _scheme: flip_received, READS, ends=WherryError),
    case("50-ms", lambda _scheme: slow(0.05), marks=SLOW),
    case("2-s", lambda _scheme: sometimes(0.2, slow(2)), marks=SLOW),
    case("answers-lost", lambda _scheme: first_of_each(lose_answer, kind), ends=str),
    *(case(f"answer-{n}-lost", lambda _scheme: lose_answer, times=1, after=n, ends=str,
           marks=SLOW) for n in range(0, 90, 3)),
    case("wrong-mark", lambda _scheme: other_mark, PARTS, times=1, after=3),
    case("wrong-marks", lambda _scheme: sometimes(0.1, other_mark), marks=SLOW),
    case("expired", EXPIRED.get, after=25, times=40, ends=StorageError),
    case("expired-for-good", EXPIRED.get, after=25, ends=StorageError, marks=SLOW),
    case("lists-lag", lambda _scheme: lagging(), LISTS, marks=SLOW),
]  # fmt: skip


def kind(method, path):
    """What a request is for: its method and path, without the names of a test, of a run and of a part."""
    return method, re.sub(r"[0-9a-f]{8,}|\d+|uploadId=[^&]*", "#", path.rpartition("out")[2] or path)


@pytest.mark.parametrize("fault", CASES)
def test_a_fault_leaves_no_half_target_and_the_next_run_goes_on(faulty, source, target, digest, fault):
    act, where, times, after, ends = fault
    method, path = where[faulty.scheme]
    faulty.proxy.inject(act(faulty.scheme), times, method, path, after)
    result = attempt(source, target)
    faulty.proxy.clear()
    if ends:
        assert isinstance(result, ends), result
    if ends is str:
        assert result == digest
    assert_whole_or_absent(target, result)
    assert_resumed(source, target, digest)


@pytest.mark.parametrize("after", [pytest.param(n, marks=() if n == 40 else SLOW) for n in range(10, 80, 10)])
def test_what_a_fault_leaves_is_removed_by_clean(faulty, source, target, after):
    faulty.proxy.inject(BUSY, ALWAYS, after=after)
    result = attempt(source, target)
    faulty.proxy.clear()
    assert_whole_or_absent(target, result)
    clean(locate(target).parent.uri, min_age=0)
    assert left(target) == []


def test_lists_that_lag_when_a_run_is_resumed(faulty, source, target, digest):
    """The journal and the objects of the interrupted run are there, and are not listed."""
    list(locate(target).parent.entries())
    method, path = LISTS[faulty.scheme]
    hidden = lagging()
    faulty.proxy.inject(hidden, ALWAYS, method, path)
    faulty.proxy.inject(BUSY, ALWAYS, after=30)
    assert isinstance(attempt(source, target), StorageError)
    faulty.proxy.clear()
    faulty.proxy.inject(hidden, ALWAYS, method, path)
    result = attempt(source, target)
    faulty.proxy.clear()
    assert_whole_or_absent(target, result)
    assert_resumed(source, target, digest)


@pytest.mark.slow  # two writers in the quick suite: test_streamed_buckets
@pytest.mark.parametrize("count", [2, 8])
def test_of_several_writers_one_makes_the_target(faulty, source, target, digest, count):
    with ThreadPoolExecutor(count) as pool:
        results = list(pool.map(lambda _number: attempt(source, target), range(count)))
    made = [one for one in results if one == digest]
    assert made
    assert all(one == digest or isinstance(one, (TargetInUseError, TargetExistsError)) for one in results)
    assert wherry.verify(target, level="digest").ok
    assert left(target) == []


@pytest.mark.parametrize("area", [False, True], ids=["", "with-a-staging-folder"])
def test_a_large_prefix_that_exists_is_refused_after_a_few_requests(faulty, source, target, area):
    place, store = locate(target), locate(target).store
    for number in range(40):
        store.put_object(place.join(f"folder-{number % 3}/{number}").path, b"somebody's", "")
    if area:
        store.put_object(place.parent.join(".wherry-out.0123abcd/journal-000000").path, b"{}", "")
    faulty.proxy.clear()
    assert isinstance(attempt(source, target), TargetExistsError)
    assert len(faulty.proxy.requests) < 24
    assert len(list(place.walk())) == 40
