"""PaxML's names: flat names and optimizer groups, and the leaves of its Flax type by the structure's text."""

from __future__ import annotations

import shutil

import msgpack
import pytest

import wherry
from tests.support.formats import assert_as_expected, either, expected, opened, place
from wherry.core.keypath import parse
from wherry.core.tensorspec import TensorSpec
from wherry.errors import WherryError
from wherry.integrations.formats.paxml import flax, layout

FLAX = either("paxml-gpt3-l3-flax", "made-paxml-flax")


@pytest.fixture
def copied(tmp_path):
    """A copy of a case that may be changed."""

    def copy(case):
        shutil.copytree(place(case).parent, tmp_path / "checkpoints")
        return tmp_path / "checkpoints" / place(case).name

    return copy


@pytest.mark.parametrize(
    ("path", "lists", "name"),
    [
        (("step",), (), "step"),
        (("mdl_vars", "params", "lm", "w"), (), "mdl_vars.params.lm.w"),
        (("opt_states", "0", "p#3#i-1", "2", "m", "w"), [("opt_states",), ("opt_states", "0", "p#3#i-1")],
         "opt_states_0.p#3#i-1_2.m.w"),
        (("opt_states", "0", "2", "m"), [("opt_states",), ("opt_states", "0")], "opt_states_0_2.m"),
    ],
)  # fmt: skip
def test_flat_names(path, lists, name):
    assert layout.flat_name(path, lists) == name


def test_groups_of_another_optimizer():
    paths = ["opt_states_0_1.vr.params.lm.w", "opt_states_0_1.vc.params.lm.w", "opt_states_0_1.count"]
    specs = {path: TensorSpec(path, (1,), "float32") for path in map(layout.split_name, paths)}
    assert layout.optimizer_groups(specs) == {"opt_states_0_1": {"fields": ["count", "vc", "vr"]}}


def test_numbers_of_thousands_of_digits_are_names():
    """int() refuses them; a number of a stack or layer has at most 18 digits."""
    digits = "9" * 5000
    group = layout.split_name(f"opt_states_0.p#{digits}.2#i-1_1.m.w")
    found = layout.optimizer_groups({group: TensorSpec(group, (1,), "float32")})
    assert "stacked" not in next(iter(found.values()))
    assert layout.layers([("mdl_vars", "params", f"x_layers_{digits}", "w")]) is None


@pytest.mark.parametrize("case", FLAX)
def test_flax_names(case):
    found = opened(place(case), "paxml-flax").manifest
    names = found.custom["paxml"]["names"]
    for row in expected(case)["tensors"]:
        assert parse(names["/".join(row["path"])]) == tuple(row["tree_path"])


@pytest.mark.parametrize("case", FLAX)
def test_flax_files_of_version_0_0(tmp_path, case):
    (tmp_path / "run" / "checkpoint_100").mkdir(parents=True)
    shutil.copy(place(case) / "state" / "checkpoint", tmp_path / "run" / "checkpoint_100" / "checkpoint")
    shutil.copy(place(case) / "state" / "checkpoint", tmp_path / "checkpoint_100")
    for uri in (tmp_path / "run" / "checkpoint_100", tmp_path / "checkpoint_100"):
        found = wherry.detect(uri)
        assert (found.format, found.format_version, found.step) == (
            "paxml-flax",
            "paxml 0.0, one msgpack",
            100,
        )
        assert found.verdict == "ok"
        assert_as_expected(opened(uri, "paxml-flax"), expected(case))


@pytest.mark.parametrize("case", FLAX)
@pytest.mark.parametrize(
    "text", ["PyTreeDef(CustomNode(TrainState[()], [*, ...]))", "PyTreeDef([*, *])", "nonsense"]
)
def test_an_abbreviated_structure_leaves_the_leaves_numbered(copied, text, case):
    folder = copied(case)
    file = folder / "state" / "checkpoint"
    state = msgpack.unpackb(file.read_bytes(), strict_map_key=False)
    file.write_bytes(msgpack.packb({**state, "str_pytree_state": text}))
    found = opened(folder, "paxml-flax")
    assert "names" not in found.manifest.custom["paxml"]
    assert len(found.manifest.tensors) == 57
    assert any("no names of the leaves" in seen.seen for seen in found.detection.evidence)


@pytest.mark.parametrize("case", FLAX)
def test_a_cut_flax_file(copied, case):
    folder = copied(case)
    file = folder / "state" / "checkpoint"
    file.write_bytes(file.read_bytes()[:-100])
    assert wherry.detect(folder).verdict == "corrupt"


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("PyTreeDef(*)", [()]),
        ("PyTreeDef({'a': *, 'b c': [*, None, (*,)]})", [("a",), ("b c", "0"), ("b c", "2", "0")]),
        ('PyTreeDef({0: *, "it\'s": *})', [("0",), ("it's",)]),
        ("PyTreeDef(CustomNode(namedtuple[ScaleByAdamState], [*, *]))", [("0",), ("1",)]),
        (
            "PyTreeDef(CustomNode(<class 'praxis.py_utils.NestedMap'>[('x]', 'y')], [*, {'z': *}]))",
            [("x]",), ("y", "z")],
        ),
        (
            "PyTreeDef(CustomNode(TrainState[()], [*, {'params': *}, [], ()]))",
            [("step",), ("mdl_vars", "params")],
        ),
        ("PyTreeDef([*, ...])", None),
        ("PyTreeDef([*", None),
        ("PyTreeDef(" + "[" * 5000 + "*", None),
        ("PyTreeDef({*: *})", None),
        ("PyTreeDef({[: *})", None),
        ("", None),
    ],
)
def test_treedef(text, names):
    found = flax.parse_structure(text)
    assert (found and found.leaves) == names


@pytest.mark.parametrize("case", FLAX)
@pytest.mark.parametrize(("to", "options"), [("orbax", {}), ("safetensors", {"join": "."}), ("paxml", {})])
def test_targets_have_the_true_names(tmp_path, case, to, options):
    """The source keeps the key paths that it stores; every target has those of the state."""
    target = tmp_path / "run" / ("checkpoint_00004000" if to == "paxml" else "out")
    wherry.convert(place(case), target, to=to, options=options)
    assert wherry.verify(target, level="roundtrip", against=place(case)).ok
    with wherry.open(target) as checkpoint, wherry.open(place(case)) as source:
        assert len(checkpoint.manifest.tensors) == 57
        for row in expected(case)["tensors"]:
            path = tuple(row["tree_path"])
            name = (".".join(path),) if to == "safetensors" else path
            assert checkpoint.read_bytes(name) == source.read_bytes(tuple(row["path"]))


@pytest.mark.parametrize("case", FLAX)
def test_lists_are_lists_again(tmp_path, case):
    wherry.convert(place(case), tmp_path / "out", to="orbax")
    with wherry.open(tmp_path / "out") as checkpoint:
        assert ("opt_states",) in checkpoint.manifest.lists


STEPS = ("paxml-gpt3-l3-flax", "made-paxml-flax", "paxml-gpt3-l3-v11-gda-zarr", "paxml-gpt3-l3-v12-gda-ocdbt")


@pytest.mark.parametrize("case", either(*STEPS))
@pytest.mark.parametrize("text", ["", "  ", "{", "[1]"])
def test_an_empty_metadata_item_is_named(copied, tmp_path, case, text):
    step = copied(case)
    (step / "metadata" / "metadata").write_text(text)
    (tmp_path / "run").mkdir()
    step = step.rename(tmp_path / "run" / step.name)
    for uri in (step.parent, step, step / "state"):
        found = wherry.detect(uri)
        assert found.verdict == ("corrupt" if text.strip() else "incomplete"), (uri, found)
        assert text.strip() or "metadata/metadata is empty" in found.reason
        with pytest.raises(WherryError) as caught:
            wherry.convert(uri, tmp_path / "never", to="orbax")
        assert caught.value.exit_code == 5
