"""Two processes of torch.distributed that write one checkpoint together."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

START = """
import os, sys, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{folder}/init", rank=rank, world_size=2)
mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
"""

# gloo's threads now and then outlive what they wait for when it is taken down ("terminate called without an active
# exception", seen in two of two runs of all tests on two busy cores), so it is left standing: all is written by then.
END = """
dist.barrier()
sys.stdout.flush()
os._exit(0)
"""


def two_ranks(script: str, folder: Path) -> None:
    """Run a script in two processes; it finds `rank`, `folder`, `mesh`, `dcp`, `torch` and the placements."""
    program = START + textwrap.dedent(script) + END
    ranks = [subprocess.Popen([sys.executable, "-c", program, str(rank), str(folder)]) for rank in range(2)]
    assert [rank.wait(timeout=120) for rank in ranks] == [0, 0]
