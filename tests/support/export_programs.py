"""Programs that tests of the export run as processes of their own: a training loop on 8 devices, two ranks, an exit."""

from __future__ import annotations

EIGHT_DEVICES = """
import json, os, sys
import jax, jax.numpy as jnp, numpy as np, optax
from jax.sharding import NamedSharding, PartitionSpec as P
import wherry
from flax.training.train_state import TrainState

out = sys.argv[1]
mesh = jax.make_mesh((4, 2), ("data", "model"))
rng = np.random.default_rng(0)
def put(shape, *spec):
    return jax.device_put(jnp.asarray(rng.normal(size=shape), jnp.float32), NamedSharding(mesh, P(*spec)))
params = {"dense": {"kernel": put((64, 32), "data", "model"), "bias": put((32,), "model")},
          "embed": put((128, 64), "model"), "scale": put((64,))}
def forward(params, x):
    h = x @ params["dense"]["kernel"] + params["dense"]["bias"]
    return (h ** 2).mean() + (params["embed"] ** 2).mean() + (params["scale"] ** 2).mean()
state = TrainState.create(apply_fn=forward, params=params, tx=optax.adam(1e-1))
@jax.jit
def plain_step(state, x):
    return state.apply_gradients(grads=jax.grad(forward)(state.params, x))
step = jax.jit(plain_step, donate_argnums=0)
x = jnp.ones((8, 64))
handles, truths = [], []
for number in range(4):
    state = jax.block_until_ready(step(state, x))  # two steps in flight starve XLA's collectives on few cores
    if number in (1, 2):
        snapshot = "host" if number == 1 else "disk"
        truths.append(jax.tree.map(lambda a: np.array(a, copy=True), state.params))
        handles.append(wherry.export(state, f"{out}/{snapshot}", to="orbax", snapshot=snapshot))
for handle, truth in zip(handles, truths):
    receipt = handle.result(120)
    assert receipt.verification["ok"] and receipt.lineage == "recorded", receipt
    with wherry.open(handle.uri) as checkpoint:
        for path, value in jax.tree_util.tree_leaves_with_path(truth):
            key = ("params", *(str(part.key) for part in path))
            assert np.array_equal(checkpoint.read(key), value), key
        mu = checkpoint.read(("opt_state", "0", "mu", "dense", "kernel"))
        assert mu.any() and receipt.target.step == handle.step
print(json.dumps([[one.step, one.receipt.target.tensors, one.receipt.source.format_version] for one in handles]))
sys.stdout.flush()
os._exit(0)  # a thread of XLA that is still awake when the interpreter ends aborts the process, once in many runs
"""

TORCH_RANKS = """
import json, os, sys
import torch, torch.distributed as dist, torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
import wherry
import wherry.live.run as run

out = sys.argv[1]
dist.init_process_group("gloo")
rank = dist.get_rank()
mesh = init_device_mesh("cpu", (2,))
for snapshot in ("host", "disk"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 7), nn.ReLU(), nn.Linear(7, 3)).to(torch.bfloat16)
    whole = {name: value.clone() for name, value in model.state_dict().items()}
    fully_shard(model, mesh=mesh)
    handle = wherry.export(model, f"{out}/{snapshot}", to="dcp", snapshot=snapshot, step=5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().zero_()   # training goes on in place
    receipt = handle.result(120)
    assert receipt.target.step == 5 and receipt.verification["ok"]
    refused = wherry.export(model, f"{out}/{snapshot}", to="dcp")
    assert refused.wait(60) and "exists" in str(refused.error), refused.error
    dist.barrier()
    if rank == 0:
        with wherry.open(f"{out}/{snapshot}") as checkpoint:
            for name, value in whole.items():
                found = checkpoint.read((name,))
                assert (found.view("u2") == value.view(torch.uint16).numpy()).all(), name

first = wherry.export(whole, f"{out}/replicated.safetensors", to="safetensors").result(60)
assert (first is None) if rank else (first.target.tensors == 4)   # all have it whole: the first one writes

stage = {f"stage{rank}": torch.full((2,), float(rank))}            # each has its own: each one writes
assert wherry.export(stage, f"{out}/stage{rank}.safetensors", to="safetensors", alone=True).result(60)
dist.barrier()
for one in (0, 1):
    with wherry.open(f"{out}/stage{one}.safetensors") as checkpoint:
        assert (checkpoint.read((f"stage{one}",)) == one).all() and len(checkpoint.manifest.tensors) == 1
def why_not(state, **how):   # its own wrong request is raised; that of another rank is in the handle
    try:
        handle = wherry.export(state, f"{out}/never", to="dcp", **how)
    except wherry.WherryError as error:
        return f"raised: {error}"
    assert handle.wait(60)
    return f"kept: {handle.error}"

parts = why_not(model, alone=True)
assert parts.startswith("raised: alone=True needs a complete state"), parts

for without in (0, 1):   # one rank's state cannot be exported: no other one waits for it in a broadcast
    device = "meta" if rank == without else "cpu"
    reason = why_not(model.state_dict() | {"more": torch.empty(3, device=device)}, patience=60)
    assert reason.startswith("raised: " if rank == without else "kept: "), reason
    assert "a tensor on the meta device has no data" in reason, reason

class Full(run.Snapshot):
    def take(self, tensors):
        if rank == full:
            raise OSError(28, "No space left on device")
        super().take(tensors)
run.Snapshot = Full
for full in (1, 0):
    broken = wherry.export(model, f"{out}/never", to="dcp", patience=60)
    assert broken.wait(60) and "No space left" in str(broken.error), broken.error
dist.barrier()
if rank == 0:
    print(json.dumps(sorted(os.listdir(out))), flush=True)
os._exit(0)   # gloo is not taken down: see ranks_support
"""

JAX_RANKS = """
import json, os, sys
import jax, numpy as np
rank, port, out = int(sys.argv[1]), sys.argv[2], sys.argv[3]
jax.distributed.initialize(f"127.0.0.1:{port}", 2, rank)
from jax.sharding import NamedSharding, PartitionSpec as P
import wherry

mesh = jax.make_mesh((2, 2), ("data", "model"))
truth = {"w": np.arange(48, dtype=np.float32).reshape(8, 6), "b": np.arange(6, dtype=np.int32)}
def put(value, *spec):
    sharding = NamedSharding(mesh, P(*spec))
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])
state = {"w": put(truth["w"], "data", "model"), "b": put(truth["b"]), "host": np.float32(2.5)}
handle = wherry.export(state, f"{out}/jax", to="orbax", step=3)
receipt = handle.result(120)
assert receipt.target.tensors == 3
if rank == 0:
    with wherry.open(f"{out}/jax") as checkpoint:
        for name, value in truth.items():
            assert np.array_equal(checkpoint.read((name,)), value), name
        assert checkpoint.read(("host",)) == np.float32(2.5)
    print(json.dumps(sorted(os.listdir(out))))
"""

EXIT = """
import logging, sys
import numpy as np
logging.basicConfig(level=logging.INFO)
import wherry
state = {"w": np.arange(4 << 20, dtype=np.float32)}
handle = wherry.export(state, sys.argv[1], to="safetensors", exit_wait=float(sys.argv[2]))
assert not handle.done()
"""
