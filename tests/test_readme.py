"""What README shows is run word for word, in its order, and the result is read by libraries that are not ours."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

README = (Path(__file__).parents[1] / "README.md").read_text()
USE = README.partition("## Use\n")[2]
TENSORS = {
    "model.embed_tokens.weight": np.arange(320, dtype="f4").reshape(20, 16),
    "model.norm.weight": np.ones(16, dtype="f4"),
}


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with the model that README talks of, as the working directory."""
    (tmp_path / "llama").mkdir()
    save_file(TENSORS, tmp_path / "llama" / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "llama" / "config.json").write_text("{}")
    (tmp_path / "checkpoints" / "run").mkdir(parents=True)
    save_file(TENSORS, tmp_path / "checkpoints" / "run" / "model.safetensors", metadata={"format": "pt"})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    return tmp_path


def block(language):
    return re.search(rf"```{language}\n(.*?)```", USE, re.DOTALL)[1]


def test_the_commands_and_the_library_example(place):
    for line in block("sh").splitlines():
        words = shlex.split(line.partition("#")[0].replace("/checkpoints", "checkpoints"))
        done = subprocess.run(
            [sys.executable, "-m", "wherry.cli", *words[1:]], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        assert done.stdout or words[1] == "clean", line
    done = subprocess.run(
        [sys.executable, "-c", block("python")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert sorted(os.listdir(place)) == ["a", "again", "b", "checkpoints", "llama", "mlflow.db", "out"]
    import orbax.checkpoint as ocp

    for folder in ("out", "a", "again"):
        restored = ocp.StandardCheckpointer().restore(place / folder)
        for name, array in TENSORS.items():
            assert np.asarray(restored[name]).tobytes() == array.tobytes()
    for name, array in load_file(place / "b" / "model.safetensors").items():
        assert array.tobytes() == TENSORS[name].tobytes()
