"""What every system writes to every format that is written, without the corpus: the target's own library finds the
element types and bytes of the source at their key paths, and what a format cannot hold is refused by name.

A system restores only trees of its own form, so a source's key paths are put into that form for it; as they are, they
are refused."""

from __future__ import annotations

import pytest

import wherry
from tests.support.formats import canonical, opened
from tests.support.forms import form_of, names_for
from tests.support.libraries import LIBRARIES, loaded
from tests.support.made import MAKERS
from wherry.core.keypath import render
from wherry.core.request import NONE, LayoutRequest
from wherry.errors import UnrepresentableError
from wherry.formats.registry import find_format, formats

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
SAME_TREE = LayoutRequest(family=NONE)  # containers alone: no tree is taken for a model's
# PaxML's 57 arrays are carried once here; tests/transform/test_systems.py takes every generation to every system.
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
    **dict.fromkeys(("safetensors", "huggingface", "huggingface-flax", "npz"), (*EVERY_DTYPE, "lingua")),
}
OPTIONS = "optim.param_groups.0.lr"
# Lingua's names: those that its own formats take from each other. With an optimizer, a step only resumes.
LINGUA = {"lingua": ("lingua_consolidated",), "lingua-consolidated": ("lingua", "lingua_consolidated")}
# Formats that take a source's tree under their own names and nothing else, before they look at anything else of it.
NAMED = {
    "lingua": ("Lingua", "model.tok_embeddings.weight"),
    "lingua-consolidated": ("Lingua", "tok_embeddings.weight"),
    "torchtitan": ("torchtitan", "tok_embeddings.weight"),
}
JOINED = ("paxml", *LINGUA)  # formats whose names are joined, so that a dot may have been a part's own
# Values that PaxML writes as arrays without dimensions: where they came from is in its metadata.
VALUES = {
    ("lingua", "paxml"): {
        f"mdl_vars.params.optim.param_groups.0.{name}" for name in ("lr", "betas_0", "betas_1", "fused")
    }
}


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
            made[name] = (
                folder,
                {path: (str(spec.dtype), spec.shape, canonical(found, path)) for path, spec in specs.items()},
            )
            found.reader.close()
        return made[name]

    return saved


def refusal(name, to, paths, around):
    """Why a format must refuse a source, or None: another system's, several parts, or names that are not Lingua's.

    Args:
        name: of the source.
        to: the format.
        paths: key path → element type, shape and bytes.
        around: the parts that a rule puts before and after a key path.
    """
    systems = {find_format(SOURCES[name][0]).system, find_format(to).system}
    named = to not in NAMED or name.startswith(
        "huggingface"
    )  # by a config, or not judged by names of its own
    formed = find_format(to).form is not None  # which no rule gives a tree
    if not form_of(to)[0] and named and (formed or len(systems - {""}) > 1):
        return f"{to} is no container: without a layout"
    if to in NAMED:
        return None if name in LINGUA.get(to, ()) else named_refusal(name, to)
    holds, deepest = find_format(to).holds, max(map(len, paths))
    if (holds.depth or 99) < deepest or (holds.ranks and deepest > 1):
        deeper = (holds.depth or 99) < deepest
        return (
            f"{to} cannot hold a key path of "
            if deeper
            else "a key path in rank files is a name, or the number"
        )
    if name not in REFUSED.get(to, ()):
        return None
    before, after = around
    if name == "lingua":
        return f"{to} cannot hold the non-tensor leaf {render((*before, OPTIONS, *after))}"
    path = next(path for path, (dtype, _, _) in paths.items() if dtype == "complex32")
    return f"dtype complex32 (tensor {render((*before, *path, *after))})"


def named_refusal(name, to):
    """Lingua's optimizer, its configuration that is missing, or the first of a system's names that is."""
    if to in LINGUA and name == "lingua":
        return "the source contains optimizer state"
    if to in LINGUA and name == "dcp":
        return "missing params.json: Lingua requires it"
    system, first = NAMED[to]
    return f"missing parameter {first}: the source does not have {system}'s parameter names"


def test_every_format_that_is_written_has_its_library():
    assert set(LIBRARIES) == {name for name, row in formats().items() if row.is_written}


@pytest.mark.parametrize("to", LIBRARIES)
@pytest.mark.parametrize("name", SOURCES)
def test_the_target_s_library_finds_the_bytes_of_the_source(name, to, source, tmp_path):
    folder, wanted = source(name)
    target = tmp_path / "out"
    rule, before, after = ("", (), ()) if in_form(name, folder, to) else form_of(to)
    if rule:
        refused(folder, target, to, f"{to} is no container: without a layout", "--to orbax")
    options = {"rename": rule} if rule else {}
    why = refusal(name, to, wanted, (before, after))
    if why is not None:
        refused(folder, target, to, why, options=options)
        return
    receipt = wherry.convert(folder, target, to=to, layout=SAME_TREE, options=options, lineage=False)
    if to not in LINGUA and not rule:  # which spell the names in their own way
        assert receipt.target.weights_digest == receipt.source.weights_digest
    wanted = {(*before, *path, *after): row for path, row in wanted.items()}
    held, meant = named(loaded(to, target), to), named(wanted, to)
    assert meant.items() <= held.items()
    values = held.keys() - meant.keys()
    assert values == VALUES.get((name, to), set())
    assert {held[value][1] for value in values} <= {()}


@pytest.mark.parametrize("to", ["megatron", "megatron-ranks", "torchtitan"])
@pytest.mark.parametrize("name", ["npz", "safetensors"])
def test_the_target_s_library_finds_the_bytes_under_a_system_s_names(name, to, source, tmp_path):
    """No rule gives any tree the names of these systems, so a tensor gets the one that each of their models has."""
    folder, wanted = source(name)
    renamed = dict(zip(("wide", "counts"), names_for(to), strict=False))
    rules = [f"{old} -> {new}" for old, new in renamed.items()]
    receipt = wherry.convert(
        folder, tmp_path / "out", to=to, layout=SAME_TREE, options={"rename": rules}, lineage=False
    )
    assert receipt.lossless
    held = loaded(to, tmp_path / "out")
    assert held == {(renamed.get(path[0], path[0]),): row for path, row in wanted.items()}


def refused(folder, target, to, what, cure="", **settings):
    """The conversion is refused with these words, and leaves nothing at the target."""
    with pytest.raises(UnrepresentableError) as caught:
        wherry.convert(folder, target, to=to, layout=SAME_TREE, lineage=False, **settings)
    assert what in caught.value.what
    assert caught.value.cure
    assert cure in caught.value.cure
    assert not target.exists()


def in_form(name, folder, to):
    """Whether a source's own key paths are a tree that the target's system restores."""
    if len({find_format(SOURCES[name][0]).system, find_format(to).system} - {""}) > 1:
        return False
    with wherry.open(folder) as checkpoint:
        return find_format(to).form is None or find_format(to).form.holds(checkpoint.manifest)


def named(held, to):
    """The arrays by key path, or by name where parts are joined."""
    return {".".join(path): row for path, row in held.items()} if to in JOINED else held
