"""What every system writes to every format that is written, without the corpus: the target's own library finds the
bytes of the source at their key paths, and what a format cannot hold is refused by name."""

from __future__ import annotations

import pytest

import wherry
from tests.support.formats import canonical, opened
from tests.support.libraries import LIBRARIES, loaded
from tests.support.made import MAKERS
from wherry.core.request import NONE, LayoutRequest
from wherry.errors import UnrepresentableError, UnsupportedError, UsageError
from wherry.formats.registry import find_format, formats

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
SAME_TREE = LayoutRequest(family=NONE)  # containers alone: no tree is taken for a model's
# PaxML's 57 arrays are carried once here; tests/view/test_systems_made.py takes every generation to every system.
SOURCES = {
    maker.__name__: (name, maker)
    for name, makers in MAKERS.items()
    for maker in makers
    if maker.__name__ not in ("paxml_ocdbt", "paxml_flax")
}
EVERY_DTYPE = ("torch_zip", "torch_legacy")  # with complex halves, which torch alone has
# What a format cannot hold though its key paths are short enough: element types, and values that are not tensors.
REFUSED: dict[str, tuple[str, ...]] = {
    **{to: EVERY_DTYPE for to in LIBRARIES if to not in ("torch-zip", "dcp")},
    **dict.fromkeys(("safetensors", "huggingface", "npz"), (*EVERY_DTYPE, "lingua")),
}
# Lingua's names: those that its own formats take from each other. With an optimizer, a step only resumes.
LINGUA = {"lingua": ("lingua_consolidated",), "lingua-consolidated": ("lingua", "lingua_consolidated")}
JOINED = ("paxml", *LINGUA)  # formats whose names are joined, so that a dot may have been a part's own


@pytest.fixture(scope="session")
def source(tmp_path_factory):
    """A checkpoint and its arrays by key path, made once."""
    made = {}

    def saved(name):
        if name not in made:
            row, maker = SOURCES[name]
            folder, _contents = maker(tmp_path_factory.mktemp(name) / "made")
            found = opened(folder, row)
            specs = found.manifest.tensors
            made[name] = folder, {path: (specs[path].shape, canonical(found, path)) for path in specs}
            found.reader.close()
        return made[name]

    return saved


def refused(name, to, paths):
    """Whether a format must refuse a source: flat ones hold one part, Lingua's its own names alone."""
    if to in LINGUA:
        return name not in LINGUA[to]
    return (find_format(to).holds.depth or 99) < max(map(len, paths)) or name in REFUSED.get(to, ())


def test_every_format_that_is_written_has_its_library():
    assert set(LIBRARIES) == {name for name, row in formats().items() if row.create is not None}


@pytest.mark.parametrize("to", LIBRARIES)
@pytest.mark.parametrize("name", SOURCES)
def test_the_target_s_library_finds_the_bytes_of_the_source(name, to, source, tmp_path):
    folder, wanted = source(name)
    target = tmp_path / "out"
    if refused(name, to, wanted):
        with pytest.raises((UnrepresentableError, UnsupportedError, UsageError)) as caught:
            wherry.convert(folder, target, to=to, wish=SAME_TREE, lineage=False)
        assert caught.value.cure
        assert not target.exists()
        return
    receipt = wherry.convert(folder, target, to=to, wish=SAME_TREE, lineage=False)
    if to not in LINGUA:  # which spell the names in their own way
        assert receipt.target.weights_digest == receipt.source.weights_digest
    found = {path: row[1:] for path, row in loaded(to, target).items()}
    held, meant = named(found, to), named(wanted, to)
    assert meant.items() <= held.items()
    assert {shape for shape, _data in (held[name] for name in held.keys() - meant.keys())} <= {()}  # values


def named(held, to):
    """The arrays by key path, or by name where parts are joined."""
    return {".".join(path): row for path, row in held.items()} if to in JOINED else held
