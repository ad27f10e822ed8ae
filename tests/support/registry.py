"""What the tests of the registry share: small checkpoints with companions, their damage, and an MLflow server."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import wherry


def model_folder(folder: Path, *, seed: int | None = None) -> Path:
    """A Hugging Face folder of two tensors with config and tokenizer; different ones by default."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(seed)
    save_file(
        {"a": random.normal(size=(64, 32)).astype(np.float32), "b": np.ones(5, np.int32)},
        folder / "model.safetensors",
    )
    (folder / "config.json").write_text(json.dumps({"model_type": "tiny"}))
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "vocab": {"hello": 0, "world": 1}}))
    return folder


def converted(root: Path, *, to: str = "huggingface", seed: int | None = None) -> wherry.Receipt:
    """A converted checkpoint with companions."""
    source = model_folder(root / "source", seed=seed)
    return wherry.convert(source, root / "target", to=to)


def flip_a_bit(folder: Path) -> Path:
    """Alter one bit of the first tensor and nothing else, times included."""
    [file] = sorted(folder.glob("*.safetensors"))
    before = file.stat()
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    return file


def moved(folder: Path, to: Path) -> Path:
    """The same checkpoint at another place."""
    shutil.move(folder, to)
    return to


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def mlflow_server(folder: Path, *arguments: str, environment: dict[str, str] | None = None):
    """A real MLflow server on a free port of this machine."""
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "mlflow",
        "server",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--workers",
        "1",
    ]
    store = [
        "--backend-store-uri",
        f"sqlite:///{folder / 'm.db'}",
        "--artifacts-destination",
        str(folder / "kept"),
    ]
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, *store, *arguments], stdout=log, stderr=log, env={**os.environ, **(environment or {})}
        )
    url = f"http://127.0.0.1:{port}"
    try:
        await_health(f"{url}/health", process)
        yield url
    finally:
        process.terminate()
        process.wait(timeout=60)


def await_health(url: str, process: subprocess.Popen) -> None:
    for _ in range(600):
        assert process.poll() is None, "the server ended"
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    pytest.fail("the server did not come up in five minutes")
