"""FSDP's rank files by real torch: DTensors of a process group that only says how many ranks there are."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

# What is saved comes as JSON; every rank cuts the same tensors as torch's own `distribute_tensor` would.
PROGRAM = """
import json, sys
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

KINDS = {"R": Replicate(), "P": Partial(), **{f"S{dim}": Shard(dim) for dim in range(3)}}

def part(local, placements, mesh):
    for at, one in enumerate(placements):
        if isinstance(one, Shard):
            pieces = list(torch.chunk(local, mesh.size(at), one.dim)) if local.shape[one.dim] else []
            pieces += [local.narrow(one.dim, 0, 0)] * (mesh.size(at) - len(pieces))
            local = pieces[mesh.get_coordinate()[at]]
    return local.contiguous().clone()

def save(job, rank):
    names = tuple(f"m{at}" for at in range(len(job["mesh"])))
    mesh = init_device_mesh("cpu", tuple(job["mesh"]), mesh_dim_names=names)
    full, state = torch.load(job["full"]), {}
    for name, (shape, dtype, kinds) in job["tensors"].items():
        whole, placements = full[name], [KINDS[kind] for kind in kinds]
        local = part(whole, placements, mesh)
        state[name] = DTensor.from_local(
            local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
        )
    state.update({name: full[name] for name in job["plain"]})
    end = f"world_size_{job['ranks']}_rank_{rank}.pt"
    torch.save(state, f"{job['folder']}/model_{end}")
    torch.save({"step": 7}, f"{job['folder']}/extra_state_{end}")

for job in json.loads(sys.argv[1]):
    torch.manual_seed(5)
    made = {name: torch.randn(shape).to(getattr(torch, dtype)) for name, (shape, dtype, _) in job["tensors"].items()}
    torch.save(made, job["full"])
    for rank in range(job["ranks"]):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=job["ranks"])
        save(job, rank)
        dist.destroy_process_group()
"""


class Save(NamedTuple):
    """What is saved.

    Attributes:
        mesh: the extents of the mesh.
        tensors: name → shape, dtype, placements (`S0`, `R`, …).
        plain: names of those that are saved as plain tensors.
    """

    mesh: list[int]
    tensors: dict[str, Any]
    plain: tuple[str, ...] = ()


def save_all(folder: Path, saves: dict[str, Save]) -> dict[str, tuple[Path, dict[str, Any]]]:
    """Write the files of all ranks of several saves, in one process.

    Args:
        folder: the folder above them.
        saves: name → what is saved.

    Returns:
        Name → the folder of its files, and the whole tensors.
    """
    import torch

    jobs = []
    for name, (mesh, tensors, plain) in saves.items():
        place = folder / name / "global_step_7" / "actor"
        place.mkdir(parents=True)
        jobs.append(
            {"ranks": math.prod(mesh), "mesh": mesh, "tensors": tensors, "plain": plain, "folder": str(place),
             "full": str(folder / name / "full.pt")}
        )  # fmt: skip
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(jobs)], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return {
        name: (folder / name / "global_step_7" / "actor", torch.load(folder / name / "full.pt"))
        for name in saves
    }
