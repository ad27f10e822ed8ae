"""ZeRO folders become whole float32 tensors; the folders are imitated by the layout that zero_to_fp32.py reads."""

from __future__ import annotations

import subprocess

import numpy as np
import pytest

import wherry
from tests.support import zero
from tests.support.generations import old_python
from wherry.errors import CorruptError, HostileError, IncompleteError, UnsupportedError

torch = pytest.importorskip("torch")


def read(uri):
    with wherry.open(uri) as checkpoint:
        assert checkpoint.detection.format == "deepspeed"
        return {path[0]: checkpoint.read(path) for path in checkpoint.manifest.tensors}


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_stage_gives_whole_tensors(stage, ranks, tmp_path):
    """Sizes that no number of ranks divides: parameters lie in several partitions, and are padded."""
    folder, whole = zero.save(tmp_path / "run", stage, ranks), zero.parameters()
    for uri in (folder, folder / "global_step10"):
        found = read(uri)
        assert set(found) == set(whole)
        for name, tensor in whole.items():
            np.testing.assert_array_equal(found[name], tensor)
    detection = wherry.detect(folder)
    assert detection.step == 10
    assert detection.kind == "params"


@pytest.mark.parametrize("stage", [2, 3])
def test_frozen_shared_and_buffers(stage, tmp_path):
    frozen = {"f.weight": np.arange(10, dtype="f4").reshape(2, 5)}
    buffers = {"g.mean": np.arange(3, dtype="f4")}
    folder = zero.save(
        tmp_path / "run", stage, 3, frozen=frozen, shared={"head.weight": "a.weight"}, buffers=buffers
    )
    found = read(folder)
    np.testing.assert_array_equal(found["f.weight"], frozen["f.weight"])
    np.testing.assert_array_equal(found["g.mean"], buffers["g.mean"])
    np.testing.assert_array_equal(found["head.weight"], zero.parameters()["a.weight"])


def test_zero_1_lists_no_frozen_parameters_and_they_are_read(tmp_path):
    """Only the state of the module has them there; zero_to_fp32.py loses them."""
    others = {"f.weight": np.arange(10, dtype="f2").reshape(2, 5)}
    found = read(zero.save(tmp_path / "run", 1, 2, others=others))
    assert found["f.weight"].dtype == np.float16
    np.testing.assert_array_equal(found["f.weight"], others["f.weight"])


def test_it_converts_and_verifies(tmp_path):
    folder = zero.save(tmp_path / "run", 3, 2)
    receipt = wherry.convert(folder, tmp_path / "out", to="huggingface", family="none")
    assert receipt.verification == receipt.verification | {"level": "digest", "ok": True}
    with wherry.open(tmp_path / "out") as written:
        for name, tensor in zero.parameters().items():
            np.testing.assert_array_equal(written.read((name,)), tensor)
    assert {row["rule"] for row in receipt.ignored} == {"training state"}


def test_objects_of_deepspeed_are_opaque_and_others_refused(tmp_path):
    assert read(zero.save(tmp_path / "run", 2, 2, scaler=True))
    folder = zero.save(tmp_path / "other", 2, 1)
    file = folder / "global_step10" / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    state = torch.load(file, weights_only=False)
    torch.save({**state, "more": print}, file)
    with pytest.raises(HostileError):
        wherry.open(folder)


def test_a_rank_that_is_missing_is_named(tmp_path):
    folder = zero.save(tmp_path / "run", 2, 3)
    (folder / "global_step10" / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(IncompleteError, match="rank 1 is missing"):
        wherry.open(folder)
    (folder / "global_step10" / "zero_pp_rank_2_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(IncompleteError, match="1 of the files of 3 ranks"):
        wherry.open(folder)


@pytest.mark.parametrize("stage", [2, 3])
def test_partitions_of_another_size_are_corrupt(stage, tmp_path):
    folder = zero.save(tmp_path / "run", stage, 2, groups=(("a.weight", "a.bias", "b.weight"),))
    file = folder / "global_step10" / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    state = torch.load(file, weights_only=True)
    key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
    state["optimizer_state_dict"][key][0] = torch.zeros(3)
    torch.save(state, file)
    with pytest.raises(CorruptError, match=r"need .* bytes of a vector"):
        wherry.open(folder)


def test_tensor_parallel_ranks_and_other_stages_are_refused(tmp_path):
    folder = zero.save(tmp_path / "run", 2, 1)
    step = folder / "global_step10"
    (step / "zero_pp_rank_0_mp_rank_01_optim_states.pt").write_bytes(b"")
    with pytest.raises(UnsupportedError, match=r"mp_rank_01.* is of tensor parallelism"):
        wherry.open(folder)
    with pytest.raises(UnsupportedError, match="stage 7"):
        wherry.open(zero.save(tmp_path / "other", 7, 1))


def test_weights_next_to_the_folder_come_first(tmp_path):
    """A trainer's folder with whole weights is that of the weights."""
    from safetensors.numpy import save_file

    folder = zero.save(tmp_path / "run", 2, 1)
    save_file(zero.parameters(), folder / "model.safetensors", metadata={"format": "pt"})
    assert wherry.detect(folder).format == "huggingface"


# What DeepSpeed's own script makes of a folder.
SCRIPT = """
import sys
import numpy as np
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint as whole
np.savez(sys.argv[2], **{name: tensor.detach().numpy() for name, tensor in whole(sys.argv[1]).items()})
"""


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_s_own_script_gives_the_same(stage, tmp_path):
    python = old_python("deepspeed")
    more = {
        "frozen": {"f.weight": np.arange(10, dtype="f4").reshape(2, 5)},
        "shared": {"head.weight": "a.weight"},
    }
    folder = zero.save(tmp_path / "run", stage, 3, buffers={"g": np.arange(3, dtype="f4")}, **more)
    words = [str(python), "-c", SCRIPT, str(folder), str(tmp_path / "wanted.npz")]
    done = subprocess.run(words, capture_output=True, text=True, check=False, env={"PATH": "/usr/bin:/bin"})
    assert done.returncode == 0, done.stderr[-2000:]
    wanted, found = np.load(tmp_path / "wanted.npz"), read(folder)
    assert set(found) == set(wanted.files)
    for name in wanted.files:
        assert wanted[name].dtype == np.float32
        np.testing.assert_array_equal(found[name], wanted[name])
