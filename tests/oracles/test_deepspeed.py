"""What DeepSpeed itself saves, of a model that it trains on two processes without a GPU, is what the engine had.

The engine's own functions gather the float32 parameters and the moments; `ds_to_universal.py` makes the universal
checkpoint. Both forms must read bit-equal. DeepSpeed has an environment of its own, in which it compiles an extension
at its first start.
"""

from __future__ import annotations

import socket
import subprocess

import pytest

import wherry
from tests.support.generations import old_python

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.slow

TRAIN = """
import os, sys
out, stage, world, port = sys.argv[1], int(sys.argv[2]), 2, sys.argv[3]
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, WORLD_SIZE=str(world))
import torch, torch.multiprocessing

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(7, 5)
        self.last = torch.nn.Linear(5, 3, bias=False)
        self.frozen = torch.nn.Parameter(torch.randn(2, 3), requires_grad=False)
        self.register_buffer("mean", torch.arange(3.0))

    def forward(self, x):
        return self.last(torch.tanh(self.first(x))) + self.frozen.sum(0) + self.mean.to(x.dtype)

def run(rank):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    model = Model()
    trained = [one for one in model.parameters() if one.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(trained, lr=0.1), config={
        "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False, "zero_optimization": {"stage": stage},
    })
    for step in range(3):
        x = torch.full((1, 7), rank + step + 1.0, dtype=torch.bfloat16)
        engine.backward(engine(x).float().pow(2).sum())
        engine.step()
    found = {}
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            found[name] = safe_get_full_fp32_param(parameter).clone()
            for key in ("exp_avg", "exp_avg_sq"):
                found[f"optimizer.state.{name}.{key}"] = safe_get_full_optimizer_state(parameter, key).clone()
    engine.save_checkpoint(out)
    if rank == 0:
        torch.save(found, f"{out}.pt")
    torch.distributed.barrier()

if __name__ == "__main__":
    torch.multiprocessing.spawn(run, nprocs=world)
"""


def run(words):
    done = subprocess.run(
        list(map(str, words)), capture_output=True, text=True, check=False,
        env={"PATH": "/usr/local/bin:/usr/bin:/bin", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_partitions_and_universal_checkpoints_are_what_the_engine_had(stage, tmp_path):
    python, out = old_python("deepspeed"), tmp_path / "run"
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    run([python, script, out, stage, port])
    step = out / "global_step3"
    convert = (
        "-m",
        "deepspeed.checkpoint.ds_to_universal",
        "--num_extract_workers",
        1,
        "--num_merge_workers",
        1,
    )
    target = out / "global_step3_universal"
    run([
        python, *convert, "--inject_missing_state", "--input_folder", step, "--output_folder", target,
    ])  # fmt: skip
    engine = torch.load(tmp_path / "run.pt", weights_only=True)
    parameters = {name for name in engine if not name.startswith("optimizer.")}
    assert len(parameters) == 3
    for uri, kind, wanted in ((step, "deepspeed", parameters), (target, "deepspeed-universal", set(engine))):
        with wherry.open(uri) as checkpoint:
            assert (checkpoint.detection.format, checkpoint.detection.step) == (kind, 3)
            names = {path[0] for path in checkpoint.manifest.tensors}
            assert names - {f"optimizer.state.{name}.step" for name in parameters} == {
                *wanted,
                "frozen",
                "mean",
            }
            for name in wanted:
                assert checkpoint.read((name,)).tobytes() == engine[name].numpy().tobytes(), name
    require_files(target)
    receipt = wherry.convert(target, tmp_path / "all", to="orbax", lineage=False)
    assert receipt.verification == receipt.verification | {"level": "digest", "ok": True}


def require_files(target):
    """Every file of a parameter, as torch loads it, has the bytes that are read of it."""
    with wherry.open(target) as checkpoint:
        for file in (target / "zero").glob("*/*.pt"):
            key = file.stem if file.stem != "fp32" else ""
            name = f"optimizer.state.{file.parent.name}.{key}" if key else file.parent.name
            loaded = torch.load(file, weights_only=True)
            tensor = loaded["param"] if isinstance(loaded, dict) else loaded
            read = torch.tensor(checkpoint.read((name,)).astype("f4"))
            assert torch.equal(read.flatten(), tensor.flatten().float()), file
