"""What the tests of live states share: JAX with eight simulated devices, in a child process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import wherry


def on_eight_devices(module: str, case: str, *arguments: object, timeout: int = 240) -> str:
    """Run a function of a test module where JAX has eight CPU devices; what it printed."""
    environment = {
        **os.environ,
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "JAX_PLATFORMS": "cpu",
    }
    code = f"import sys; from {module} import {case}; {case}(*sys.argv[1:])"
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def nested(uri):
    """A checkpoint as the live tree that it was saved from."""
    tree = {}
    with wherry.open(uri) as checkpoint:
        for path in checkpoint.manifest.tensors:
            node = tree
            for part in path[:-1]:
                node = node.setdefault(part, {})
            node[path[-1]] = checkpoint.read(path)
    return tree
