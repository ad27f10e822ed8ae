"""The trainings of the end-to-end test: a JAX loop on 8 devices, a torch loop on two ranks, and T5X's checkpoints."""

from __future__ import annotations

JAX_LOOP = """
import sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
import wherry

assert len(jax.devices()) == 8
mesh = jax.make_mesh((4, 2), ("data", "model"))
rng = np.random.default_rng(0)
def put(shape, *spec):
    return jax.device_put(jnp.asarray(rng.normal(size=shape), jnp.float32), NamedSharding(mesh, P(*spec)))
decoder = {"kernel": put((64, 32), "data", "model"), "bias": put((32,), "model")}
def loss(decoder, x):
    return ((x @ decoder["kernel"] + decoder["bias"]) ** 2).mean()
@jax.jit
def step(decoder, x):
    return jax.tree.map(lambda p, g: p - 0.1 * g, decoder, jax.grad(loss)(decoder, x))
x = jnp.ones((8, 64))
for number in range(3):
    decoder = step(decoder, x)
state = {"params": {"params": {"decoder": decoder}}}
handle = wherry.export(state, sys.argv[1], to="maxtext", step=100)
decoder = step(decoder, x)
receipt = handle.result(300)
assert receipt.verification["ok"] and receipt.target.step == 100, receipt
"""

# What Meta Lingua leaves of a step: a distributed checkpoint of {model, optim}, params.json, each rank's train state.
LINGUA_LOOP = """
import json, os, sys
import torch, torch.distributed as dist, torch.nn as nn
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from wherry.core.emit import emit
import wherry

folder, exported = sys.argv[1:]
dist.init_process_group("gloo")
torch.manual_seed(0)
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok_embeddings, self.output = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
    def forward(self, tokens):
        return self.output(self.tok_embeddings(tokens))
model = Model()
fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
for number in range(2):
    model(torch.arange(8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
handle = wherry.export(model, exported, to="dcp", step=2)
weights, moments = get_state_dict(model, optimizer)
dcp.save({"model": weights, "optim": moments}, checkpoint_id=folder)
with open(os.path.join(folder, f"train_state_{dist.get_rank():05d}.json"), "w") as file:
    json.dump({"step": 2, "acc_step": 0}, file)
dist.barrier()
if dist.get_rank() == 0:
    with open(os.path.join(folder, "params.json"), "w") as file:
        json.dump({"name": "e2e", "model": {"dim": 8, "n_layers": 0, "vocab_size": 16}}, file)
    emit(folder, step=2)
assert handle.result(300).verification["ok"]
dist.barrier()
dist.destroy_process_group()
"""

T5X_RUN = """
import os, sys
import numpy as np
from safetensors.numpy import save_file
import wherry

run, scratch, tensors = sys.argv[1], sys.argv[2], int(sys.argv[3])
rng = np.random.default_rng(0)
for step in (100, 200, 300):
    state = {f"target/encoder/layers_{n}/kernel": rng.standard_normal((512, 1024), np.float32) for n in range(tensors)}
    save_file({**state, "state/step": np.array(step, np.int32)}, scratch)
    wherry.convert(scratch, f"{run}/checkpoint_{step}", to="t5x-legacy", options={"split": "/"}, lineage=False)
    os.remove(f"{run}/checkpoint_{step}/wherry.json")  # T5X leaves none, and what has one is no source of a route
"""
