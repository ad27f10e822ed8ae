"""docs/troubleshooting.md, the part of PyTorch and Hugging Face; see test_troubleshooting."""

from __future__ import annotations

import re
import shutil
import sys

import pytest

import wherry
from tests.support.formats import place
from tests.support.troubleshooting import ENTRIES, SECTION, flat, here, lay, marks, run, solves, tested

pytestmark = marks
__all__ = ["here"]


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
