"""What the tests of gigabytes share: a source that every written format takes, and children whose peak is measured."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from wherry.formats.registry import formats

# Rank files of vLLM take whole models alone; tests/oracles/test_vllm_ranks.py has them.
WRITTEN = {name: row for name, row in formats().items() if row.is_written and name != "vllm-sharded"}
# The names that some system cannot be without, in one part, as it takes them from a flat checkpoint.
NAMES = list(dict.fromkeys(".".join(path) for row in WRITTEN.values() for path in row.holds.names))
_DTYPES = {"bfloat16": "BF16", "float16": "F16"}
_BLOCK = 4 << 20
# The peak is that of the program itself: what its parent held when it forked counts in `ru_maxrss`.
_TELL = """
import re
status = open("/proc/self/status").read()
print(json.dumps({"result": result, "peak": int(re.search(r"VmHWM:\\s+(\\d+)", status)[1]) << 10}))
"""


def make_source(folder: Path, shapes: dict[str, tuple[int, ...]], dtype: str) -> Path:
    """A Hugging Face folder of 16-bit numbers, written block by block, with the companions that formats need.

    Its blocks all differ; they compress to about a quarter.
    """
    folder.mkdir()
    for row in WRITTEN.values():
        for name, data in row.holds.needs.items():
            (folder / name).write_bytes(data)
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": _DTYPES[dtype], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps({**header, "__metadata__": {"format": "pt"}}).encode()
    text += b" " * (-len(text) % 8)
    row = np.random.default_rng(0).bytes(_BLOCK // 4)
    block = bytearray(b"".join(row[at : at + 1024] * 4 for at in range(0, len(row), 1024)))
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for number in range(end // _BLOCK):
            block[:8] = number.to_bytes(8, "little")
            file.write(block)
    assert end % _BLOCK == 0
    return folder


def measured(code: str, *arguments: object) -> tuple[Any, int]:
    """Run code that sets `result`; its value, and the peak resident memory of the process in bytes."""
    run = subprocess.run(
        [sys.executable, "-c", "import json, sys\n" + code + _TELL, *map(str, arguments)],
        capture_output=True, text=True, check=False, env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    found = json.loads(run.stdout.splitlines()[-1])
    return found["result"], found["peak"]
