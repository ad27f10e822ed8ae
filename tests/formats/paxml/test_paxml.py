"""PaxML: checkpoints made as PaxML makes them, names, older versions, padding, and what is missing in words."""

from __future__ import annotations

import json
import shutil

import msgpack
import numpy as np
import pytest

import wherry
from tests.support.corpus import needs
from tests.support.corpus import place as place_of_layout
from tests.support.formats import assert_as_expected, canonical, cases, either, expected, home, opened, place
from tests.support.imitations import imitations
from tests.support.paxml import write_array as array
from wherry.core.keypath import parse
from wherry.core.tensorspec import TensorSpec
from wherry.errors import CorruptError, IncompleteError, UnsupportedError, WherryError
from wherry.integrations.formats.paxml import flax, layout
from wherry.mover.read import read_array

VERDICTS = ("ok", "incomplete", "corrupt")
FORMATS = ("paxml", "paxml-flax")
CASES = cases(*FORMATS, verdicts=VERDICTS) + imitations(*FORMATS, verdicts=VERDICTS)
V11 = either("paxml-gpt3-l3-v11-gda-zarr", "made-paxml-v11")
V12 = either("paxml-gpt3-l3-v12-gda-ocdbt", "made-paxml-v12")


@pytest.fixture
def copied(tmp_path):
    """A copy of a case that may be changed."""

    def copy(case):
        shutil.copytree(place(case).parent, tmp_path / "checkpoints")
        return tmp_path / "checkpoints" / place(case).name

    return copy


@pytest.mark.parametrize("case", CASES)
def test_detection(case):
    row = expected(case)
    for uri in (row["uri"], *row["alternative_uris"]):
        found = wherry.detect(home(case) / uri)
        assert (found.format, found.verdict, found.step, found.kind, found.format_version) == (
            row["format"], row["verdict"], row["step"], row["kind"], row["layout_version"],
        )  # fmt: skip
        assert found.uri == str(place(case))
        assert found.writer.startswith("paxml")
        said = "no metadata item" if " 0.0," in row["layout_version"] else "version 1."
        assert any(seen.seen.startswith(said) for seen in found.evidence)


ONE_OF_FOUR = either(
    ("defect-paxml-one-of-4-hosts", "57 of 123 chunks, 30 of 57 arrays"),
    ("made-paxml-one-of-4-hosts", "57 of 135 chunks, 42 of 57 arrays"),
)


@pytest.mark.parametrize(("case", "words"), ONE_OF_FOUR)
def test_one_of_four_hosts_is_said_in_words(case, words):
    reason = wherry.detect(place(case)).reason
    assert reason.startswith("1 of 4 hosts")
    assert f"{words} are incomplete" in reason


@pytest.mark.parametrize("case", either("defect-paxml-missing-chunk", "made-paxml-missing-chunk"))
def test_a_missing_chunk_is_named(case):
    reason = wherry.detect(place(case)).reason
    assert "chunk 0.1 of mdl_vars/params/lm/softmax/logits_ffn/linear/w" in reason
    assert "hosts" not in reason


@pytest.mark.parametrize("case", V11)
def test_optimizer_groups_are_found_by_content(case):
    groups = opened(place(case), "paxml").manifest.custom["paxml"]["optimizer_groups"]
    assert groups["opt_states_0/p#3#i-1_2"] == {"fields": ["count", "m", "v"], "stacked": [3]}
    assert groups["opt_states_0/no_prefix_2"] == {"fields": ["count", "m", "v"]}
    assert groups["opt_states_0/no_prefix_0"] == {"fields": ["count"]}


@pytest.mark.parametrize("case", V12)
def test_optimizer_groups_of_a_tree_are_found_by_content(case):
    groups = opened(place(case), "paxml").manifest.custom["paxml"]["optimizer_groups"]
    assert groups["opt_states/0/p#3#i-1/2"]["fields"] == ["count", "m", "v"]


@pytest.mark.parametrize("case", V11)
def test_a_lost_array_is_missed(copied, case):
    folder = copied(case)
    shutil.rmtree(folder / "state" / "opt_states_0.no_prefix_2.v.params.lm.final_ln.bias")
    found = wherry.detect(folder)
    assert found.verdict == "incomplete"
    assert "opt_states_0.no_prefix_2.v.params.lm.final_ln.bias" in found.reason
    (folder / "state" / "_sharding").unlink()
    assert wherry.detect(folder).verdict == "ok"  # nothing on disk can tell any more
    shutil.rmtree(folder / "state" / "mdl_vars.params.lm.final_ln.bias")
    assert "mdl_vars.params.lm.final_ln.bias" in wherry.detect(folder).reason


@pytest.mark.parametrize("case", V11)
def test_a_step_without_its_state(copied, case):
    folder = copied(case)
    for name in (folder / "state").iterdir():
        shutil.rmtree(name) if name.is_dir() else name.unlink()
    assert wherry.detect(folder).reason == "missing arrays: the state has none"
    (folder / "state").rmdir()
    found = wherry.detect(folder)
    assert (found.format, found.verdict, found.reason) == (
        "paxml",
        "incomplete",
        "missing arrays: the state has none",
    )


@pytest.mark.parametrize("case", V11)
def test_metadata_of_another_host(copied, case):
    folder = copied(case)
    (folder / "state" / "step" / ".zarray").unlink()
    found = wherry.detect(folder)
    assert (found.verdict, found.reason.split(";")[0]) == (
        "incomplete",
        "missing .zarray of 1 arrays that have chunks: step",
    )


@pytest.mark.parametrize("case", V11)
def test_metadata_under_another_name_is_refused_by_name(copied, case):
    folder = copied(case)
    (folder / "state" / "step" / ".zarray").rename(folder / "state" / "step" / ".zarray_pax")
    with pytest.raises(UnsupportedError, match=r"\.zarray_pax"):
        wherry.open(folder)


@pytest.mark.parametrize("case", V11)
@pytest.mark.parametrize(
    ("name", "words"),
    [("", "is empty"), ("{", "invalid JSON in metadata"), ('{"version": "x"}', "missing key 'version'")],
)
def test_a_damaged_metadata_item(copied, name, words, case):
    folder = copied(case)
    (folder / "metadata" / "metadata").write_text(name)
    found = wherry.detect(folder)
    assert (found.format, found.verdict) == ("paxml", "corrupt" if name else "incomplete")
    assert words in found.reason


@pytest.mark.parametrize("case", V11)
def test_version_1_0_and_0_0(copied, case):
    folder = copied(case)
    (folder / "metadata" / "metadata").write_text('{"version": 1.0}')
    found = wherry.detect(folder)
    assert (found.verdict, found.format_version) == ("ok", "paxml 1.0, per-array zarr2 directories")
    shutil.rmtree(folder / "metadata")
    for name in (folder / "state").iterdir():
        name.rename(folder / name.name)
    (folder / "state").rmdir()
    found = wherry.detect(folder)
    assert (found.verdict, found.format_version, found.step) == (
        "ok",
        "paxml 0.0, per-array zarr2 directories",
        4000,
    )
    assert_as_expected(opened(folder, "paxml"), expected(case))
    folder = folder.rename(folder.parent / "tmp_1700000000.checkpoint_4000")
    assert wherry.detect(folder).verdict == "incomplete"


@pytest.mark.parametrize("case", V11)
def test_a_save_that_was_never_committed(copied, case):
    folder = copied(case)
    folder = folder.rename(f"{folder}.orbax-checkpoint-tmp-17000")
    found = wherry.detect(folder)
    assert (found.format, found.verdict, found.step) == ("paxml", "incomplete", 4000)


@pytest.mark.parametrize("case", V11)
def test_a_state_by_itself(tmp_path, case):
    shutil.copytree(place(case) / "state", tmp_path / "state")
    found = wherry.detect(tmp_path / "state")
    assert (found.format, found.verdict) == ("paxml", "ok")


@pytest.mark.parametrize("case", V12)
def test_a_newer_version_is_named(copied, case):
    folder = copied(case)
    text = (folder / "metadata" / "metadata").read_text()
    (folder / "metadata" / "metadata").write_text(text.replace('"version": 1.2', '"version": 1.3'))
    found = wherry.detect(folder)
    assert (found.verdict, found.format_version) == ("ok", "paxml 1.3, ocdbt")
    assert any("newer than 1.2" in seen.seen for seen in found.evidence)


W = "transformer.repeat.sub.x_layers_0.ff_layer.ffn_layer1.linear.w"


def unpad(folder, name, shape):
    """State another `unpadded_shape` for a variable."""
    file = folder / "metadata" / "metadata"
    data = json.loads(file.read_text())
    node = data["train_state_metadata"]["mdl_vars"]["params"]["lm"]
    for part in name.split("."):
        node = node[part]
    node["unpadded_shape"] = shape
    file.write_text(json.dumps(data))


@pytest.mark.parametrize("case", V11 + V12)
def test_padding_is_cut(copied, tmp_path, case):
    whole = opened(place(case), "paxml")
    folder = copied(case)
    unpad(folder, W, [3, 13, 50])
    found = opened(folder, "paxml")
    cut = {path for path, spec in found.manifest.tensors.items() if spec != whole.manifest.tensors[path]}
    assert len(cut) == 3  # the variable and its two moments
    for path in cut:
        spec = found.manifest.tensors[path]
        stored = whole.manifest.tensors[path]
        assert spec.shape == (3, 13, 50)
        assert found.reader.access(spec).extents is None
        wanted = read_array(whole.reader, stored, stored.whole)[:, :13, :50]
        assert (read_array(found.reader, spec, spec.whole) == wanted).all()
    receipt = wherry.convert(folder, tmp_path / "cut", to="orbax", memory="1MiB", lineage=False)
    assert receipt.target.parameters == found.manifest.parameters < whole.manifest.parameters
    with wherry.open(tmp_path / "cut") as copy:
        for path in cut:
            assert copy.read(path).tobytes() == canonical(found, path)


@pytest.mark.parametrize("case", V11)
@pytest.mark.parametrize("shape", [[3, 16, 65], [3, 16]])
def test_an_array_smaller_than_before_padding_is_corrupt(copied, shape, case):
    folder = copied(case)
    unpad(folder, W, shape)
    with pytest.raises(CorruptError, match="before padding"):
        wherry.open(folder)


def test_layers_that_are_not_repeated(tmp_path):
    state = tmp_path / "checkpoint_00000007" / "state"
    model = "params.lm.transformer.x_layers_{}.ff_layer.w"
    for layer in range(2):
        for prefix in ("mdl_vars", "opt_states_0_2.m", "opt_states_0_2.v"):
            array(state, f"{prefix}.{model.format(layer)}", np.full((2, 3), layer, "f4"))
    array(state, "opt_states_0_0.count", np.int32(7))
    array(state, "step", np.uint32(7), compressor={"id": "gzip", "level": 1})
    (tmp_path / "checkpoint_00000007" / "metadata").mkdir()
    (tmp_path / "checkpoint_00000007" / "metadata" / "metadata").write_text('{"version": 1.0}')
    found = wherry.inspect(tmp_path)
    assert (found.detection.format, found.detection.kind, found.detection.step) == ("paxml", "train-state", 7)
    custom = found.manifest.custom["paxml"]
    assert custom["layers"] == {"repeated": False, "x_layers": 2}
    assert custom["optimizer_groups"]["opt_states_0_2"] == {"fields": ["m", "v"]}


def test_not_every_step_with_metadata_is_paxml(tmp_path):
    import orbax.checkpoint as ocp

    with ocp.CheckpointManager(tmp_path, item_names=("state", "metadata")) as manager:
        items = ocp.args.Composite(
            state=ocp.args.PyTreeSave({"w": np.ones(3)}), metadata=ocp.args.JsonSave({"version": 1.2})
        )
        manager.save(0, args=items)
        manager.wait_until_finished()
    assert wherry.detect(tmp_path).format == "orbax"


def test_hostile_names_are_refused(tmp_path):
    state = tmp_path / "checkpoint_1" / "state"
    array(state, "mdl_vars.params.w", np.ones(2, "f4"))
    (tmp_path / "checkpoint_1" / "metadata").mkdir()
    file = tmp_path / "checkpoint_1" / "metadata" / "metadata"
    file.write_text(json.dumps({"version": 1.1, "wherry": {"names": {"mdl_vars.params.w": "a~9"}}}))
    with pytest.raises(CorruptError, match="notes"):
        wherry.open(tmp_path / "checkpoint_1")
    nested = "{}"
    for _ in range(300):
        nested = f'{{"a": {nested}}}'
    file.write_text(f'{{"version": 1.1, "train_state_metadata": {nested}}}')
    assert wherry.detect(tmp_path / "checkpoint_1").verdict == "malicious"


def test_staged_is_not_whole(tmp_path):
    with pytest.raises(IncompleteError):
        folder = tmp_path / ".wherry-x.abc"
        array(folder / "state", "mdl_vars.params.w", np.ones(2, "f4"))
        wherry.open(folder)


# PaxML's names: flat names and optimizer groups, and the leaves of its Flax type by the structure's text.


FLAX = either("paxml-gpt3-l3-flax", "made-paxml-flax")


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


# PaxML's Flax type has numbers for names on disk, and states its names in a text: a family reads it by
# these.


def test_the_flax_type_gives_what_the_type_of_arrays_gives(tmp_path):
    cases = ("paxml-gpt3-l3-flax", "paxml-gpt3-l3-v12-gda-ocdbt")
    for case in cases:
        needs(case)
    made = [
        wherry.convert(place_of_layout(case), tmp_path / case, to="maxtext", lineage=False) for case in cases
    ]
    assert len({one.target.weights_digest for one in made}) == 1
