"""What the installed libraries write here is detected, read as readers promise and carried over, without the corpus."""

from __future__ import annotations

import pytest

import wherry
from tests.support.formats import canonical, opened
from tests.support.made import MAKERS
from wherry.layout.spelling import stated_names
from wherry.testing import readers

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
ROWS = [pytest.param(name, maker, id=maker.__name__) for name, makers in MAKERS.items() for maker in makers]


@pytest.fixture
def made(maker, tmp_path):
    return maker(tmp_path / "made")


@pytest.mark.parametrize(("name", "maker"), ROWS)
def test_detected_and_read(made, name):
    folder, contents = made
    detection = wherry.detect(folder)
    assert (detection.format, detection.verdict) == (name, "ok")
    assert wherry.verify(folder, level="present").ok
    found = opened(folder, name)
    try:
        held = {path: canonical(found, path) for path in found.manifest.tensors}
        assert contents.items() <= held.items()
        readers.check_reader(found, held, regions=2)
    finally:
        found.reader.close()


@pytest.mark.parametrize(("name", "maker"), ROWS)
def test_carried_over(made, name, tmp_path):
    """Into a container that holds every such tree: the weights digest stays, but for numbers that get their names."""
    folder, _contents = made
    source = wherry.inspect(folder, digest=True).manifest
    to = "dcp" if name.startswith("torch") else "orbax"  # which has no complex halves and nothing empty
    receipt = wherry.convert(folder, tmp_path / to, to=to, lineage=False)
    assert receipt.verification["ok"]
    names = stated_names(source)
    assert (receipt.target.weights_digest == receipt.source.weights_digest) is not bool(names)
    with wherry.open(tmp_path / to) as checkpoint:
        assert set(checkpoint.manifest.tensors) == {names.get(path, path) for path in source.tensors}
        digests = wherry.inspect(tmp_path / to, digest=True).manifest.digests
    assert {names.get(path, path): digest for path, digest in source.digests.items()} == digests
