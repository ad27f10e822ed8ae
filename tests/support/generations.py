"""Releases of real libraries that cannot be installed together with ours, each set in an environment of its own.

They are years older than the installed ones, need a newer Python (MaxText), or are what no other test needs
(sentence-transformers, accelerate).

An environment is made by pip, once, in a folder of the checkout that git ignores (`.venv-old-<name>`), and reused
as long as its requirements stay the same. Where pip cannot make it, the tests that need it are skipped with what pip
said. Nothing of wherry is installed in it: a script loads what wherry wrote, and says what it found.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 1800
_JAX = ("jax==0.4.26", "jaxlib==0.4.26", "flax==0.8.3", "numpy==1.26.4", "scipy<1.14")
# Up to 0.6.3 Orbax wants its aggregate file, which only PaxML's checkpoints still have.
STACKS = {
    "pax": ("orbax-checkpoint==0.5.9", *_JAX),
    "orbax": ("orbax-checkpoint==0.6.4", *_JAX),
    "torch": ("torch==2.3.1", "numpy==1.26.4"),
    "transformers": (
        "transformers==4.46.3", "flax==0.8.5", "jax==0.4.30", "jaxlib==0.4.30", "numpy==1.26.4", "scipy<1.14",
    ),
    "maxtext": (
        "jax==0.12.0.1", "jaxlib==0.12.0.1", "flax==0.12.12", "orbax-checkpoint==0.12.8", "absl-py", "aqtp==0.9.0",
        "chex", "drjax", "grain", "huggingface-hub", "jaxtyping", "jinja2", "ml-collections", "ml-goodput-measurement",
        "omegaconf", "optax", "pathwaysutils", "pillow", "psutil", "pydantic", "pyyaml", "qwix==0.1.8", "safetensors",
        "sentencepiece", "sympy", "tensorboardx", "tiktoken", "tokamax==0.0.17", "transformers==5.23.0",
    ),
    "quantized": ("compressed-tensors==0.20.0", "torch==2.13.0", "transformers==5.23.0"),
    "gguf": ("gguf==0.19.0", "numpy==2.3.5"),
    "llama-cpp": ("llama-cpp-python==0.3.36",),
    "merges": ("peft==0.21.2", "mergekit==0.1.5", "accelerate==1.15.0", "transformers==5.23.0", "torch==2.13.0"),
    "megatron": (
        "megatron-core==0.16.1", "torch==2.13.0", "numpy==2.4.6", "packaging", "psutil",
    ),
    "deepspeed": ("deepspeed==0.19.8", "torch==2.13.0"),
    "torchtitan": ("torchtitan==0.3.0", "torch==2.13.0", "triton==3.9.0"),
    "ray": ("ray[client]==2.60.0",),
    "hub": ("sentence-transformers==6.2.0", "accelerate==1.15.0", "torch==2.13.0"),
}  # fmt: skip
# What is installed without its dependencies: MaxText's are those of accelerators and clouds, accelerate's are installed
# where transformers runs.
BARE = {"maxtext": ("maxtext==0.2.5",), "gguf": ("accelerate==1.15.0",)}
PYTHONS = {"maxtext": "3.12"}
# What the builds of sdists read.
_OFF = ("LLAVA_BUILD", "GGML_NATIVE", "GGML_OPENMP", "GGML_LLAMAFILE", "LLAMA_OPENSSL", "LLAMA_BUILD_TOOLS",
        "LLAMA_BUILD_EXAMPLES", "LLAMA_BUILD_TESTS", "LLAMA_BUILD_SERVER")  # fmt: skip
BUILDS = {
    "llama-cpp": {
        "CMAKE_ARGS": " ".join([*(f"-D{name}=OFF" for name in _OFF), "-DCMAKE_CXX_FLAGS_RELEASE=-O1"])
    }
}

# What each script ends with: leaves of a tree as JSON, by their paths.
REPORT = """
import hashlib, json, sys
import numpy as np

def leaves(node, path=()):
    rows = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, (list, tuple)) else None
    if rows is None:
        yield path, node
    else:
        for key, child in rows:
            yield from leaves(child, (*path, str(key)))

def tell(node):
    if hasattr(node, "shape"):
        return [dtype_of(node), list(node.shape), hashlib.sha256(bytes_of(node)).hexdigest()]
    return node

json.dump([[path, tell(node)] for path, node in leaves(load(*sys.argv[1:]))], sys.stdout)
"""

ORBAX = """
import jax, ml_dtypes
jax.config.update("jax_enable_x64", True)

def load(kind, path):
    if kind == "msgpack":
        import flax.serialization
        return flax.serialization.msgpack_restore(open(path, "rb").read())
    if kind == "names":
        import os, tensorstore
        spec = lambda name: {"driver": "zarr", "kvstore": {"driver": "file", "path": f"{path}/{name}"}}
        return {name: tensorstore.open(spec(name), open=True).result().read().result() for name in os.listdir(path)}
    import orbax.checkpoint
    return orbax.checkpoint.PyTreeCheckpointer().restore(path)

def dtype_of(node):
    return str(node.dtype)

def bytes_of(node):
    return np.asarray(node).tobytes()
"""

TORCH = """
import torch

def load(kind, path):
    if kind == "file":
        return torch.load(path, weights_only=True)
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    rows = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    state = {name: torch.empty(row.size, dtype=row.properties.dtype) if isinstance(row, TensorStorageMetadata) else None
             for name, row in rows.items()}
    dcp.load(state, checkpoint_id=path)
    return state

def dtype_of(node):
    return str(node.dtype).removeprefix("torch.")

def bytes_of(node):
    return node.contiguous().flatten().view(torch.uint8).numpy().tobytes()
"""
_SCRIPTS = {"pax": ORBAX, "orbax": ORBAX, "torch": TORCH}


def old_python(name: str) -> Path:
    """The Python of an old stack; skips the test where it cannot be made."""
    bare = BARE.get(name, ())
    folder, wanted = ROOT / f".venv-old-{name}", "\n".join([*STACKS[name], *bare])
    made, python = folder / "wherry-requirements.txt", folder / "bin" / "python"
    if not made.is_file() or made.read_text() != wanted:
        shutil.rmtree(folder, ignore_errors=True)
        steps = (
            [_base(name), "-m", "venv", folder],
            [python, "-m", "pip", "install", "-q", *STACKS[name]],
            *([[python, "-m", "pip", "install", "-q", "--no-deps", *bare]] if bare else []),
        )
        for step in steps:
            _make(name, [str(word) for word in step])
        made.write_text(wanted)
    return python


def _base(name: str) -> str:
    """The Python that an environment is made with; pyenv's shims start the version that a variable names."""
    if name not in PYTHONS:
        return sys.executable
    found = shutil.which(f"python{PYTHONS[name]}")
    command = [str(found), "-c", "import sys; print(sys.executable)"]
    own = {**os.environ, "PYENV_VERSION": PYTHONS[name]}
    run = subprocess.run(command, capture_output=True, text=True, check=False, env=own) if found else None
    if run is None or run.returncode:
        pytest.skip(f"no environment with {STACKS[name][0]}: Python {PYTHONS[name]} not found")
    return run.stdout.strip()


def _make(name: str, command: list[str]) -> None:
    try:
        own = {**os.environ, **BUILDS.get(name, {})}
        run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SECONDS, env=own)
        said = run.stderr.strip().splitlines()[-1:] if run.returncode else []
    except subprocess.TimeoutExpired:
        said = [f"pip took more than {SECONDS} s"]
    if said:
        pytest.skip(f"no environment with {STACKS[name][0]}: {said[0]}")


def loaded(stack: str, kind: str, path: Path) -> dict[tuple[str, ...], object]:
    """What an old stack makes of a checkpoint: key path → (dtype, shape, SHA-256) of an array, or another value."""
    python = old_python(stack)
    run = subprocess.run(
        [str(python), "-c", _SCRIPTS[stack] + REPORT, kind, str(path)],
        capture_output=True, text=True, check=False, env={"JAX_PLATFORMS": "cpu", "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    rows = json.loads(run.stdout)
    return {tuple(path): tuple(map(_fixed, node)) if isinstance(node, list) else node for path, node in rows}


def _fixed(part: object) -> object:
    return tuple(part) if isinstance(part, list) else part
