"""Every format that is written keeps the contract of writers, every format that is read that of readers."""

from __future__ import annotations

import pytest

from tests.support.crash import own_container
from tests.support.formats import cases, expected, opened, place
from tests.support.variants import FURTHER, WRITTEN, each_container, each_variant, words
from wherry.errors import UnsupportedError
from wherry.formats.registry import find_format, formats
from wherry.testing import readers, samples, writers


@pytest.fixture(scope="module")
def sample_of():
    """Samples, each made once."""
    made = {}

    def get(name, options=None, *, large=True):
        key = (name, words(options or {}), large)
        if key not in made:
            made[key] = samples.sample(find_format(name), options, large=large)
        return made[key]

    yield get
    made.clear()


@each_variant
def test_random_order_threads_repeats_and_two_finishes(sample_of, tmp_path, name, options):
    sample = sample_of(name, options, large=not options or options in FURTHER.get(name, []))
    writers.check_writer(sample, tmp_path)


@each_container
def test_abandoned_after_a_sync_and_taken_up(sample_of, tmp_path, name, options):
    sample = sample_of(name, options, large=False)
    for seed in range(2):
        folder = tmp_path / str(seed)
        folder.mkdir()
        writers.check_kill_between(sample, folder, seed)


def sizes():
    """Every format with large tensors; where it writes through another one's container that is slow, and small is not.

    Four ways to write 26 MiB are a third of this suite, and cuts of large tensors are the container's own business.
    """
    for name in WRITTEN:
        own = own_container(name)
        yield pytest.param(name, True, id=f"{name}-large", marks=[] if own else [pytest.mark.slow])
        if not own:
            yield pytest.param(name, False, id=f"{name}-small")


@pytest.mark.parametrize(("name", "large"), list(sizes()))
def test_however_it_was_written_it_is_the_same_checkpoint(sample_of, tmp_path, name, large):
    sample = sample_of(name, large=large)
    makers = (
        writers.check_writer, writers.check_writer, writers.check_kill_between, writers.check_kill_after_finish,
    )  # fmt: skip
    digests, files = set(), set()
    for number, make in enumerate(makers):
        folder = tmp_path / str(number)
        folder.mkdir()
        digests.add(make(sample, folder, number))
        if sample.row.single_file:
            files.add(writers.file_bytes(writers.staging_place(folder)))
    assert len(digests) == 1
    assert len(files) <= 1, "two runs wrote different bytes"


CORPUS_CASES = [name for row in formats() for name in cases(row)]
LARGEST_CASE = 32 << 20


@pytest.mark.parametrize("case", CORPUS_CASES)
def test_readers_of_what_the_real_systems_wrote(case):
    row = expected(case)
    try:
        found = opened(place(case), row["format"])
    except UnsupportedError as error:
        pytest.skip(error.what)
    if found.manifest.nbytes > LARGEST_CASE:
        pytest.skip(f"{found.manifest.nbytes} bytes")
    try:
        readers.check_reader(found, regions=2)
    finally:
        found.reader.close()
