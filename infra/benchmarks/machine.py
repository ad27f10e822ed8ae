"""Says what machine and which software the numbers belong to."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_SHA_FLAGS = ("sha_ni", "sha2")  # as Linux names them on x86 and on ARM
_PACKAGES = (
    "wherry", "tensorstore", "blake3", "zstandard", "isal", "deflate", "numpy", "safetensors", "torch", "transformers",
    "mergekit", "orbax-checkpoint", "jax", "flax", "model-signing",
)  # fmt: skip


def describe(scratch: Path) -> dict[str, object]:
    """The machine, the disk under `scratch`, the moment and the versions."""
    device, file_system = _mount_of(scratch)
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cores": len(os.sched_getaffinity(0)),
        "processor": _first("/proc/cpuinfo", "model name"),
        "sha_instructions": sha_instructions(Path("/proc/cpuinfo").read_text()),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "disk": f"{file_system} on {Path(device).name}",
        "load_before": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "versions": {package: package_version(package) or "absent" for package in _PACKAGES},
    }


def sha_instructions(cpuinfo: str) -> str:
    """The flag of the processor that says it has instructions for SHA-256; empty if it has none.

    Args:
        cpuinfo: text of /proc/cpuinfo.
    """
    flags = {
        flag
        for line in cpuinfo.splitlines()
        if line.startswith(("flags", "Features"))
        for flag in line.split()
    }
    return next((flag for flag in _SHA_FLAGS if flag in flags), "")


def package_version(package: str) -> str | None:
    """The version of an installed distribution; None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _first(path: str, field: str) -> str:
    lines = Path(path).read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(field)), "unknown")


def _mount_of(path: Path) -> tuple[str, str]:
    """Device and type of the file system that a path lies on: the mount with the longest matching folder."""
    rows = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    above = [row for row in rows if path.is_relative_to(row[1])]
    return max(((row[1], row[0], row[2]) for row in above), key=lambda row: len(row[0]))[1:]
