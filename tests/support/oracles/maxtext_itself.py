"""What the tests with MaxText's own library share: how near its float32 comes, and what its command line states."""

from __future__ import annotations

import json
import subprocess
from typing import TYPE_CHECKING, Any

from tests.support.generations import old_python
from tests.support.oracles.cases import MODEL_NAMES

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import pytest

# MaxText computes in float32; where logits go through the embedding, it rounds the embedding to bfloat16.
SINGLE, ROUNDED = 2e-5, 5e-3


def stated(label: str, config: dict[str, Any]) -> list[str]:
    """The command line: where a model's name is needed, all attributes, which else that name's own file replaces."""
    name = {**MODEL_NAMES.get(label, {}), **config}.get("model_name")
    if name is None:
        return []
    whole = {**config, "model_name": name, "override_model_config": True}
    return [
        f"{key}={json.dumps(value)}".replace('"', "") for key, value in whole.items() if key != "base_config"
    ]


def run_pairs(
    request: pytest.FixtureRequest,
    factory: pytest.TempPathFactory,
    script: str,
    job: Callable[[Path, str, str], dict[str, Any]],
) -> dict[tuple[str, str], Path]:
    """Label and form of each test of a module → a folder with what the script left: one process for all of them.

    Args:
        request: of a fixture of the module.
        factory: of the folders.
        script: of the environment of MaxText; it gets the jobs as JSON.
        job: makes what the script is told of a folder, a label and a form.
    """
    python = old_python("maxtext")
    asked = [item.callspec.params for item in request.session.items if item.module is request.module]
    places = {(one["label"], one["form"]): factory.mktemp(one["label"]) for one in asked}
    jobs = [job(place, *pair) for pair, place in places.items()]
    run = subprocess.run(
        [str(python), "-c", script], input=json.dumps(jobs), capture_output=True, text=True, check=False,
        env={"JAX_PLATFORMS": "cpu", "PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1"},
        cwd=factory.mktemp("run"),
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    return places
