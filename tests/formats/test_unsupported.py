"""What other software wrote and wherry does not read is recognised by name, and the error says what to do."""

from __future__ import annotations

import io
import json
import tarfile
import zipfile

import msgpack
import numpy as np
import pytest
import torch
from click.testing import CliRunner

import wherry
from tests.support.huggingface import training_arguments
from tests.support.registry import model_folder
from wherry.cli import cli
from wherry.errors import HostileError, NotACheckpointError, NotFoundError, UnsupportedError
from wherry.formats.discover import discover


def folder(path, files):
    for name, data in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(data)
    return path


def deepspeed(tmp_path):
    """Without partitions of ZeRO, which are read."""
    files = ("mp_rank_00_model_states.pt", "layer_00-model_states.pt")
    run = folder(tmp_path / "run", {f"global_step10/{name}": b"PK" for name in files})
    return folder(run, {"latest": b"global_step10", "zero_to_fp32.py": b"#"})


def deepspeed_step(tmp_path):
    return deepspeed(tmp_path) / "global_step10"


SHARDS = (
    "mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt",
    "zero_pp_rank_0_mp_rank_00_optim_states.pt", "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt",
    "layer_00-model_states.pt", "layer_01-model_00-model_states.pt", "layer_1_expert_0_mp_rank_00_model_states.pt",
    "expp_rank_0_mp_rank_00_optim_states.pt",
)  # fmt: skip


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("name", SHARDS)
def test_the_file_of_one_rank_of_deepspeed_is_no_checkpoint(name, zipped, tmp_path):
    path = tmp_path / "global_step10" / name
    path.parent.mkdir()
    state = {"module": {"w": torch.ones(3)}, "ds_version": "0.18.0"}
    torch.save(state, path, _use_new_zipfile_serialization=zipped)
    found = wherry.detect(path)
    assert (found.verdict, found.reason) == (
        "unsupported", "the file of one rank of a DeepSpeed checkpoint, which wherry does not read",
    )  # fmt: skip
    with pytest.raises(UnsupportedError) as error:
        wherry.convert(path, tmp_path / "out", to="safetensors")
    assert "pass the folder of the step" in error.value.cure
    assert list(discover(path.parent)) == []
    for folder_ in (path.parent, folder(tmp_path, {"latest": b"global_step10"})):
        with pytest.raises(UnsupportedError, match=r"^a DeepSpeed checkpoint"):
            wherry.open(folder_)
    with wherry.open(path, format="torch-zip" if zipped else "torch-legacy") as chosen:
        assert list(chosen.manifest.tensors) == [("module", "w")]


def test_a_file_with_the_name_of_a_shard_and_other_contents_is_only_unknown(tmp_path):
    path = folder(tmp_path, {"mp_rank_00_model_states.pt": b"hello"}) / "mp_rank_00_model_states.pt"
    with pytest.raises(NotACheckpointError):
        wherry.open(path)


def nemo(tmp_path):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name in ("./model_config.yaml", "./model_weights.ckpt"):
            archive.addfile(tarfile.TarInfo(name))
    return folder(tmp_path, {"m.nemo": buffer.getvalue()}) / "m.nemo"


def keras(tmp_path):
    with zipfile.ZipFile(tmp_path / "m.keras", "w") as archive:
        for name in ("metadata.json", "config.json", "model.weights.h5"):
            archive.writestr(name, "{}")
    return tmp_path / "m.keras"


def hdf5(tmp_path):
    return folder(tmp_path, {"m.weights.h5": b"\x89HDF\r\n\x1a\n" + bytes(100)}) / "m.weights.h5"


def onnx(tmp_path):
    return folder(tmp_path, {"m.onnx": b"\x08\x08\x12\x07pytorch\x1a\x052.1.0"}) / "m.onnx"


def onnx_folder(tmp_path):
    return folder(tmp_path / "m", {"model.onnx": b"\x08\x08", "model.onnx_data": b"\0"})


def saved_model(tmp_path):
    return folder(tmp_path / "m", {"saved_model.pb": b"\x08\x01", "variables/variables.index": b"x"})


def easylm(tmp_path):
    rows = {("params", "wte", "kernel"): np.ones((2, 3)), ("params", "lm_head"): np.ones(3)}
    data = b"".join(msgpack.packb((key, value.tobytes())) for key, value in rows.items())
    return folder(tmp_path, {"streaming_params_7b": data}) / "streaming_params_7b"


FORMS = {
    deepspeed: ("a DeepSpeed checkpoint", "zero_to_fp32.py"),
    deepspeed_step: ("a DeepSpeed checkpoint", "zero_to_fp32.py"),
    nemo: ("a NeMo archive", "tar -xf"),
    keras: ("a Keras or HDF5 file", "numpy.savez"),
    hdf5: ("a Keras or HDF5 file", "numpy.savez"),
    onnx: ("an ONNX model", "from which it was exported"),
    onnx_folder: ("an ONNX model", "from which it was exported"),
    saved_model: ("a TensorFlow SavedModel", "`variables`"),
    easylm: ("an EasyLM stream", "flax.serialization.to_bytes"),
}


@pytest.mark.parametrize("make", FORMS, ids=lambda make: make.__name__)
def test_its_name_is_said_and_what_to_do(tmp_path, make):
    path, (name, cure) = make(tmp_path), FORMS[make]
    with pytest.raises(UnsupportedError, match=f"^{name}, which wherry does not read") as error:
        wherry.open(path)
    assert cure in error.value.cure
    assert (wherry.detect(path).verdict, error.value.exit_code) == ("unsupported", 4)


@pytest.mark.parametrize("data", [b"", b"\x92", b"\x92\x93", b"\x08\x08", b"hello", b"\x92\x90\xa1a"])
def test_other_files_are_only_unknown(tmp_path, data):
    (tmp_path / "file").write_bytes(data)
    with pytest.raises(NotACheckpointError):
        wherry.open(tmp_path / "file")


@pytest.fixture
def trainer(tmp_path, monkeypatch):
    """A folder of Hugging Face's Trainer: weights, arguments as a pickle of their class, and random states."""
    path = model_folder(tmp_path / "checkpoint-10")
    torch.save(training_arguments(monkeypatch), path / "training_args.bin")
    torch.save({"numpy": np.random.get_state()}, path / "rng_state.pth")  # noqa: NPY002  as Trainer saves it
    torch.save({"numpy": np.random.get_state()}, path / "rng_state_0.pth")  # noqa: NPY002
    torch.save({"numpy": np.random.get_state()}, path / "random_states_0.pkl")  # noqa: NPY002  as accelerate names it
    return path


def test_companions_of_a_trainer_are_opaque_and_not_malicious(trainer, tmp_path):
    assert wherry.detect(trainer).verdict == "ok"
    assert wherry.verify(trainer, level="digest").verdict == "read"
    assert wherry.convert(trainer, tmp_path / "out", to="orbax").target.tensors == 2
    for name in ("training_args.bin", "rng_state.pth", "rng_state_0.pth", "random_states_0.pkl"):
        assert wherry.detect(trainer / name).verdict == "unsupported"
        with pytest.raises(UnsupportedError, match="arguments or random states without weights"):
            wherry.open(trainer / name)
    (trainer / "model.safetensors").unlink()
    assert list(discover(trainer)) == []


def test_who_chooses_its_format_reads_its_pickle(trainer):
    with pytest.raises(HostileError, match=r"TrainingArguments"):
        wherry.open(trainer / "training_args.bin", format="torch-zip")


def test_a_folder_with_only_one_file_of_weights_says_which(tmp_path):
    path = tmp_path / "a folder"
    path.mkdir()
    torch.save({"tok_embeddings.weight": torch.ones(4, 2)}, path / "weights.pth")
    with pytest.raises(NotACheckpointError) as error:
        wherry.open(path)
    assert error.value.cure == f"pass its file: '{path}/weights.pth'"
    (path / "notes.txt").write_text("")
    assert wherry.convert(path / "weights.pth", tmp_path / "out", to="safetensors").target.tensors == 1


def test_the_parameters_of_lightning(tmp_path):
    state = {
        "epoch": 1, "global_step": 10, "pytorch-lightning_version": "2.4.0", "loops": {}, "callbacks": {},
        "state_dict": {"model.w": torch.ones(3), "model.b": torch.zeros(2)}, "lr_schedulers": [],
        "optimizer_states": [{"state": {0: {"exp_avg": torch.zeros(3)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}],
    }  # fmt: skip
    torch.save(state, tmp_path / "last.ckpt")
    words = ["convert", tmp_path / "last.ckpt", tmp_path / "out", "--to", "safetensors", "--only", "params", "--set",
             "join=.", "--json"]  # fmt: skip
    done = CliRunner().invoke(cli, list(map(str, words)))
    assert done.exit_code == 0, done.exception
    assert json.loads(done.stdout)["target"]["kind"] == "params"
    with wherry.open(tmp_path / "out") as found:
        assert sorted(found.manifest.tensors) == [("state_dict.model.b",), ("state_dict.model.w",)]


def test_an_item_of_a_run_is_that_of_its_newest_step(tmp_path):
    import orbax.checkpoint as ocp

    with ocp.CheckpointManager(tmp_path / "run", item_names=("params", "opt")) as manager:
        for step in (1, 2):
            items = {"params": {"w": np.ones(3) * step}, "opt": {"m": np.ones(3)}}
            saves = {name: ocp.args.StandardSave(tree) for name, tree in items.items()}
            manager.save(step, args=ocp.args.Composite(**saves))
        manager.wait_until_finished()
    found = wherry.detect(tmp_path / "run", item="opt")
    assert (found.uri, found.evidence[0].seen) == (
        str(tmp_path / "run" / "2" / "opt"), "newest step with a complete opt, of 2 steps",
    )  # fmt: skip
    for path in (tmp_path / "run" / "2" / "params").rglob("*"):
        if path.name.startswith("manifest"):
            path.unlink()
    assert wherry.detect(tmp_path / "run", item="params").uri == str(tmp_path / "run" / "1" / "params")
    assert wherry.detect(tmp_path / "run", step=1, item="opt").uri == str(tmp_path / "run" / "1" / "opt")
    with pytest.raises(NotFoundError, match="item nothing not found") as error:
        wherry.detect(tmp_path / "run", item="nothing")
    assert "wherry discover" in error.value.cure
