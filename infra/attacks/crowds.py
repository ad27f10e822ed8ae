"""Bombs of many small records, pieces or names, and of one name with a large number."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

_NPY = b"{'descr': '<f4', 'fortran_order': False, 'shape': (0,), }"
_STEP = "global_step1"


def npy_records(folder: Path, count: int) -> Path:
    """An Equinox file of empty arrays."""
    folder.mkdir(parents=True)
    record = b"\x93NUMPY\x01\x00" + struct.pack("<H", 118) + _NPY.ljust(117) + b"\n"
    (folder / "model.eqx").write_bytes(record * count)
    return folder / "model.eqx"


def pieces(folder: Path, count: int) -> Path:
    """A file of a rank for each element of one tensor, as torch's HuggingFaceStorageWriter names them."""
    folder.mkdir(parents=True)
    for number in range(count):
        stated = json.dumps({"a": {"saved_offsets": [number]}})
        header = {
            "__metadata__": {"DCP_SHARDING_INFO": stated},
            "a": {"dtype": "U8", "shape": [2 if number == count - 1 else 1], "data_offsets": [0, 1]},
        }
        text = json.dumps(header).encode()
        name = f"shard-{number + 1:05d}-model-00001-of-00001.safetensors"
        (folder / name).write_bytes(struct.pack("<Q", len(text)) + text + b"\1")
    return folder


def model_states(folder: Path, count: int) -> Path:
    """A universal checkpoint of DeepSpeed with an empty file for each rank."""
    step = folder / _STEP
    (step / "zero" / "a").mkdir(parents=True)
    (folder / "latest_universal").write_text(_STEP)
    (step / "zero" / "optimizer_state.pt").touch()
    for number in range(count):
        (step / f"mp_rank_{number:02d}_model_states.pt").touch()
    return folder


def rank_number(folder: Path, count: int) -> Path:
    """A ZeRO checkpoint whose only file of a rank has a large number in its name."""
    step = folder / _STEP
    step.mkdir(parents=True)
    (folder / "latest").write_text(_STEP)
    for name in ("mp_rank_00_model_states.pt", f"bf16_zero_pp_rank_{count}_mp_rank_00_optim_states.pt"):
        (step / name).touch()
    return folder


# Entries of each at its full size.
FULL: dict[Callable[[Path, int], Path], int] = {
    npy_records: 130_000, pieces: 20_000, model_states: 100_000, rank_number: 999_999_999,
}  # fmt: skip
