"""docs/troubleshooting.md: the error is met with the software that raises it, the command is run word for word."""

from __future__ import annotations

import json
import re
import shutil
import sys

import numpy as np
import pytest

import wherry
from tests.support.formats import expected, place
from tests.support.troubleshooting import ENTRIES, SECTION, flat, here, lay, marks, run, solves, tested

pytestmark = marks

__all__ = ["here"]


# ---- JAX


def assert_restored(tree, source):
    """Orbax gave back every tensor of a checkpoint, bit for bit."""
    leaves = flat(tree)
    with wherry.open(source) as checkpoint:
        assert checkpoint.manifest.tensors
        for path in checkpoint.manifest.tensors:
            assert np.asarray(leaves[path]).tobytes() == checkpoint.read(path).tobytes(), path


@solves("Checkpoint versions earlier than 2 are not supported")
@pytest.mark.parametrize(
    "case", ["t5x-orbax-zarr-2023", "t5x-orbax-zarr-metadata-2024", "t5x-orbax-ocdbt-head"]
)
@pytest.mark.parametrize("part", ["", "state"])
def test_t5x_saved_through_orbax(here, commands, case, part):
    from tests.support.t5x import load

    lay(case, here / "checkpoint_1000")
    run([command.replace("checkpoint_1000 ", f"checkpoint_1000/{part} ", 1) for command in commands])
    leaves = load(here / "legacy" / "checkpoint_1000")
    with wherry.open(here / "checkpoint_1000") as checkpoint:
        for path in checkpoint.manifest.tensors:
            assert np.asarray(leaves["/".join(path)]).tobytes() == checkpoint.read(path).tobytes()


@solves('.zarray" does not exist')
def test_t5x_without_its_dot_files(here, commands):
    ts = pytest.importorskip("tensorstore")
    from tests.support.t5x import load

    source = lay("t5x-derived-no-zarray", here / "checkpoint_1000")
    array = next(path for path in source.iterdir() if path.is_dir())
    spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": f"{array}/"}}
    with pytest.raises(ValueError, match=r'\.zarray" does not exist'):
        ts.open(spec).result()
    run(commands)
    leaves = load(here / "whole" / "checkpoint_1000")
    wanted = {"/".join(row["path"]): row for row in expected("t5x-derived-no-zarray")["tensors"]}
    assert {name for name, leaf in leaves.items() if hasattr(leaf, "shape")} >= set(wanted)


@solves("Dict key mismatch")
def test_maxtext_expects_the_other_form_of_layers(here, commands):
    import jax

    lay("maxtext-gpt3-l3-converted-by-maxtext", here / "4000", "..")
    lay("maxtext-gpt3-l3-unscan", here / "unscanned", "..")
    decoder = {}
    for name in ("4000", "unscanned"):
        with wherry.open(here / name) as checkpoint:
            paths = [
                path[3:]
                for path in checkpoint.manifest.tensors
                if path[:3] == ("params", "params", "decoder")
            ]
        decoder[name] = {path[0]: 0 for path in paths}
    # Dict key mismatch; expected keys: [… 'layers_0' …]; dict: {'decoder_norm': …} in jax of that time
    with pytest.raises(ValueError, match=r"(?s)layers_0.*decoder_norm layers position_embedder"):
        jax.tree.map(lambda _one, _other: None, decoder["unscanned"], decoder["4000"])
    assert "layers are scanned (layers: 3 on axis 1)" in run(commands)
    assert "layers are unscanned" in run([commands[0].replace("4000", "unscanned")])
    assert "layers are unscanned" in run([commands[0].replace("4000", "apart")])
    assert wherry.verify("apart", level="roundtrip", against="4000").ok


@solves("NOT_FOUND: chunk")
def test_chunks_are_missing(here, commands):
    import orbax.checkpoint as ocp

    with pytest.raises(ValueError, match="NOT_FOUND: chunk"):
        ocp.PyTreeCheckpointer().restore(place("defect-orbax-zarr2-missing-chunk"))
    lay("defect-maxtext-one-of-4-hosts", here / "0", "..")
    printed = run(commands, codes=(5,))
    assert "1 of 4 hosts" in printed
    assert "params/params/decoder/layers/mlp/wi_0/kernel: missing" in printed


@solves("No structure could be identified")
@pytest.mark.parametrize(
    ("case", "literal"),
    [
        ("t5x-orbax-ocdbt-head", "No structure could be identified for the checkpoint"),
        ("paxml-gpt3-l3-v12-gda-ocdbt", "No structure could be identified for the checkpoint"),
        ("orbax-041-default", "Metadata file (named _METADATA) does not exist"),
        ("orbax-017-default", "Metadata file (named _METADATA) does not exist"),
    ],
)
def test_orbax_finds_no_tree(here, commands, case, literal):
    import orbax.checkpoint as ocp

    source = lay(case, here / "step")
    checkpointer = ocp.PyTreeCheckpointer() if "structure" in literal else ocp.StandardCheckpointer()
    with pytest.raises(FileNotFoundError, match=re.escape(literal)):
        checkpointer.restore(source)
    run(commands)
    assert_restored(ocp.StandardCheckpointer().restore(here / "restorable"), source)


def test_a_lost_tree_is_said():
    found = wherry.detect(place("orbax-upstream-v0-direct-cm-missing-missing"))
    assert "tree structure is lost" in found.reason


@solves("Topology mismatch detected")
def test_orbax_on_other_devices(here, commands):
    import orbax.checkpoint as ocp

    source = lay("orbax-0128-sharded8", here / "step")
    for checkpointer, literal in (
        (ocp.StandardCheckpointer(), "Topology mismatch detected"),
        (ocp.PyTreeCheckpointer(), "sharding passed to deserialization should be specified"),
    ):
        with pytest.raises(ValueError, match=literal):
            checkpointer.restore(source)
    run(commands)
    assert_restored(ocp.StandardCheckpointer().restore(here / "restorable"), source)
    assert_restored(ocp.PyTreeCheckpointer().restore(here / "restorable"), source)


@solves("Found incomplete checkpoint")
def test_orbax_never_committed(here, commands):
    import orbax.checkpoint as ocp

    with ocp.CheckpointManager(here / "run") as manager:
        for step in (1, 2):
            manager.save(step, args=ocp.args.StandardSave({"w": np.ones(3)}))
    unfinished = here / "run" / "3.orbax-checkpoint-tmp"
    shutil.copytree(place("defect-orbax-uncommitted-tmp"), unfinished)
    with pytest.raises(ValueError, match="Found incomplete checkpoint at"):
        ocp.StandardCheckpointer().restore(unfinished)
    printed = run(commands)
    assert re.search(r"^step: +2$", printed, re.MULTILINE)
    assert re.search(
        r"^skipped .*3\.orbax-checkpoint-tmp: Orbax did not finish this save", printed, re.MULTILINE
    )


@solves("in OCDBT database at local file")
def test_orbax_never_merged(here, commands):
    import jax
    import orbax.checkpoint as ocp

    from tests.support.orbax import nested

    lay("defect-orbax-unmerged-ocdbt", here / "step")
    with pytest.raises(ValueError, match=r'\.zarray" in OCDBT database at local file .* does not exist'):
        ocp.StandardCheckpointer().restore(here / "step")
    run(commands)
    wanted = {tuple(row["path"]): row["sha256"] for row in expected("defect-orbax-unmerged-ocdbt")["tensors"]}
    assert wherry.inspect(here / "merged", sha256=True).sha256 == wanted
    with wherry.open(here / "merged") as checkpoint:
        arrays = {path: checkpoint.read(path) for path in checkpoint.manifest.tensors}
        tree = nested(checkpoint.manifest, arrays)
    # as numpy arrays, because the devices it was saved on are not here
    args = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
    assert_restored(ocp.PyTreeCheckpointer().restore(here / "merged", restore_args=args), here / "merged")


def targets(folder):
    """What Orbax is to restore into: the tree of an item as Orbax itself tells it, without data."""
    import jax
    import orbax.checkpoint as ocp

    tree = ocp.StandardCheckpointer().metadata(folder).item_metadata.tree
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


@solves("Structure mismatch: Target path")
def test_flax_boxes(here, commands):
    import orbax.checkpoint as ocp

    lay("flax-linen-boxed-scan", here / "boxed")
    lay("flax-linen-unboxed-scan", here / "wanted")
    target = targets(here / "wanted")
    with pytest.raises(
        ValueError, match=r"(?s)Structure mismatch: Target path .* not found in metadata_tree"
    ):
        ocp.StandardCheckpointer().restore(here / "boxed", target)
    run(commands)
    restored = flat(ocp.StandardCheckpointer().restore(here / "unboxed", target))
    with wherry.open(here / "boxed") as checkpoint:
        for path in checkpoint.manifest.tensors:
            bare = path[:-1] if path[-1] == "value" else path
            assert np.asarray(restored[bare]).tobytes() == checkpoint.read(path).tobytes(), path


@solves("axes are named wrongly")
def test_penzai_keeps_its_axes(here, commands):
    import orbax.checkpoint as ocp

    source = lay("penzai-llama-unroll-plain", here / "plain")
    printed = run(commands)
    listed = json.loads(printed[printed.index("{\n") :])
    wanted = {
        row["path"][0]: row.get("axes", ["embedding"])
        for row in expected("penzai-llama-unroll-plain")["tensors"]
    }
    assert {row["path"].replace("~1", "/"): row["axes"] for row in listed["tensors"]} == wanted
    restored = ocp.StandardCheckpointer().restore(here / "named")
    assert_restored(restored, source)
    pytest.importorskip("penzai")
    from wherry.integrations.penzai.rebuild import named_arrays

    for label, array in named_arrays(restored, here / "named").items():
        assert list(array.named_shape) == wanted[label]


@solves("Unpack failed: incomplete input")
def test_flax_cannot_unpack(here, commands):
    from flax.training import checkpoints

    lay("flax-msgpack-step3", here / "run" / "checkpoint_3")
    cut = lay("defect-flax-msgpack-truncated", here / "run" / "checkpoint_7")
    with pytest.raises(ValueError, match="Unpack failed: incomplete input"):
        checkpoints.restore_checkpoint(str(cut), None)
    printed = run(commands)
    assert re.search(r"^step: +3$", printed, re.MULTILINE)
    assert "checkpoint_7: skipped: corrupt" in printed


# docs/troubleshooting.md, the part of PyTorch and Hugging Face; see test_troubleshooting.


# ---- PyTorch


@solves("Please convert the checkpoint distcp format")
@pytest.mark.parametrize("case", ["lingua-fsdp2-w2-consolidated", "lingua-noshard-w2-consolidated"])
def test_lingua_wants_dcp(here, commands, case):
    torch = pytest.importorskip("torch")
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    weights = torch.load(lay(case, here / "consolidated") / "consolidated.pth", weights_only=True)["model"]
    run(commands)
    assert (here / "init" / ".metadata").exists()
    assert (here / "init" / "params.json").exists()
    state = {"model": {name: torch.zeros_like(tensor) for name, tensor in weights.items()}}
    dcp.load(state, checkpoint_id=str(here / "init"), no_dist=True)
    assert all(torch.equal(state["model"][name], tensor) for name, tensor in weights.items())


@solves("too many values to unpack")
@pytest.mark.parametrize(
    "literal", ["too many values to unpack", "No module named 'pathlib._local'"], ids=["torch", "python"]
)
def test_dcp_of_newer_software(here, commands, literal, monkeypatch):
    import pathlib
    import pickle

    torch = pytest.importorskip("torch")
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    from torch.distributed.checkpoint.metadata import TensorProperties

    blank = {"w": torch.zeros(6)}
    dcp.save({"w": torch.arange(6.0)}, checkpoint_id=here / "step", no_dist=True)
    metadata = pickle.loads((here / "step" / ".metadata").read_bytes())
    if literal.startswith("too"):
        kept = TensorProperties.__getstate__
        monkeypatch.setattr(TensorProperties, "__getstate__", lambda one: (*kept(one), (1,)))
        data = pickle.dumps(metadata)
        monkeypatch.undo()
        monkeypatch.chdir(here)
    elif sys.version_info < (3, 13):
        metadata.storage_meta.checkpoint_id = pathlib.PurePosixPath("/data/step")
        data = pickle.dumps(metadata, protocol=2)
        assert b"cpathlib\nPurePosixPath\n" in data
        data = data.replace(b"cpathlib\nPurePosixPath\n", b"cpathlib._local\nPurePosixPath\n")
    else:
        pytest.skip("this Python has the module")
    (here / "step" / ".metadata").write_bytes(data)
    with pytest.raises(BaseException, match=re.escape(literal)):
        dcp.load(blank, checkpoint_id=here / "step", no_dist=True)
    run(commands)
    dcp.load(blank, checkpoint_id=here / "readable", no_dist=True)
    assert torch.equal(blank["w"], torch.arange(6.0))


def assert_parameters(loaded, source):
    """torch gave back the parameters of a checkpoint, bit for bit."""
    leaves = flat(loaded)
    with wherry.open(source) as checkpoint:
        for path, tensor in leaves.items():
            assert tensor.contiguous().numpy().tobytes() == checkpoint.read(path).tobytes(), path
    assert leaves


@solves("Weights only load failed")
def test_torch_will_not_unpickle(here, commands):
    torch = pytest.importorskip("torch")
    source = lay("torch-legacy-sapiens-vh", here / "checkpoint.pt")
    with pytest.raises(Exception, match="Weights only load failed"):
        torch.load(source, weights_only=True, map_location="cpu")
    assert "argparse.Namespace" in run(commands)
    assert_parameters(torch.load(here / "model.pt", weights_only=True), source)


@solves("Attempting to deserialize object on a CUDA device")
def test_torch_wants_a_gpu(here, commands):
    torch = pytest.importorskip("torch")
    source = lay("torch-legacy-sapiens-vh", here / "checkpoint.pt")
    if not torch.cuda.is_available():
        with (
            torch.serialization.safe_globals([__import__("argparse").Namespace]),
            pytest.raises(RuntimeError, match="Attempting to deserialize object on a CUDA device"),
        ):
            torch.load(source, weights_only=True)
    run(commands)
    assert_parameters(torch.load(here / "model.pt", weights_only=True), source)


@solves("invalid header or archive is corrupted")
@pytest.mark.parametrize(
    ("damage", "literal"),
    [
        (lambda data: data[: len(data) // 2], "failed finding central directory"),
        (lambda data: data.replace(b"PK\1\2", bytes(4), 1), "invalid header or archive is corrupted"),
    ],
)
def test_torch_cannot_open_the_archive(here, commands, damage, literal):
    torch = pytest.importorskip("torch")
    torch.save({"w": torch.arange(6.0)}, here / "model.pt")
    assert "read:" in run(commands)  # nothing recorded it
    (here / "model.pt").write_bytes(damage((here / "model.pt").read_bytes()))
    with pytest.raises(RuntimeError, match=literal):
        torch.load(here / "model.pt", weights_only=True)
    assert "corrupt:" in run(commands, codes=(5,))
    shutil.copy(place("defect-torch-zip-bitflip"), here / "model.pt")
    torch.load(here / "model.pt", weights_only=True)  # torch does not look
    assert "f64: checksum mismatch: expected CRC-32" in run(commands, codes=(5,))


# ---- Hugging Face


@solves("Due to a serious vulnerability issue in")
def test_transformers_will_not_load_a_pickle(here, commands, monkeypatch):
    transformers = pytest.importorskip("transformers")
    from transformers.utils import import_utils

    monkeypatch.setattr(import_utils, "is_torch_greater_or_equal", lambda *_args, **_options: False)
    with pytest.raises(ValueError, match=re.escape("Due to a serious vulnerability issue in `torch.load`")):
        import_utils.check_torch_load_is_safe()
    source = lay("hf-llama-bin-single-fp32", here / "model")
    run(commands)
    assert sorted(path.suffix for path in (here / "safe").glob("model*")) == [".safetensors"]
    loaded = transformers.AutoModelForCausalLM.from_pretrained(here / "safe").state_dict()
    with wherry.open(source) as checkpoint:
        for path in checkpoint.manifest.tensors:
            assert loaded[path[0]].numpy().tobytes() == checkpoint.read(path).tobytes()


@solves("model-00003-of-00004.safetensors")
def test_a_shard_is_missing(here, commands):
    transformers = pytest.importorskip("transformers")
    lay("defect-hf-missing-shard", here / "model")
    with pytest.raises(OSError, match=r"No such file or directory: .*model-00003-of-00004\.safetensors"):
        transformers.AutoModelForCausalLM.from_pretrained(here / "model")
    assert "model-00003-of-00004.safetensors" in run(commands, codes=(5,))


@solves("MetadataIncompleteBuffer")
def test_safetensors_is_cut(here, commands):
    from safetensors import SafetensorError, safe_open

    lay("defect-safetensors-truncated", here / "model.safetensors")
    with (
        pytest.raises(
            SafetensorError, match=r"MetadataIncompleteBuffer|incomplete metadata, file not fully covered"
        ),
        safe_open(here / "model.safetensors", "np"),
    ):
        pass
    assert re.search(r"truncated: expected at least \d+ bytes, got \d+", run(commands, codes=(5,)))


@solves("InvalidHeaderDeserialization")
@pytest.mark.parametrize(
    ("content", "literal", "reason"),
    [
        (
            b"version https://git-lfs.github.com/spec/v1\nsize 12345\n",
            "HeaderTooLarge|header too large",
            "git-lfs",
        ),
        (b"<!DOCTYPE html><html>404</html>", "HeaderTooLarge|header too large", "header"),
        (b"\x10" + bytes(7) + b"no JSON in here!", "InvalidHeaderDes|invalid JSON in header", "begin with {"),
    ],
)
def test_it_is_no_safetensors_file(here, commands, content, literal, reason):
    from safetensors import SafetensorError, safe_open

    (here / "model.safetensors").write_bytes(content)
    with pytest.raises(SafetensorError, match=literal), safe_open(here / "model.safetensors", "np"):
        pass
    assert reason in run(commands, codes=(4, 5))


def test_every_entry_is_tested_and_its_name_is_unique():
    assert set(ENTRIES) == tested()
    assert len(ENTRIES) == SECTION.count("\n## ")
