"""What the tests with MaxText's own library share: how near its float32 comes, what it rounds, and its command line."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.support.generations import old_python
from tests.support.oracles.cases import MODEL_NAMES

if TYPE_CHECKING:
    import pytest

SINGLE = 2e-5  # MaxText computes in float32


def round_factor(model: Any) -> None:
    """Round a factor as wherry writes it for MaxText: Gemma 3's embedding is multiplied by sqrt(width) in bfloat16.

    A tied head keeps the embedding, which MaxText divides by sqrt(width) again: it is multiplied by the rounding.
    """
    import torch

    if not model.config.model_type.startswith("gemma3"):
        return
    embedding = model.get_input_embeddings()
    rounded = float(torch.tensor(embedding.embed_scale.item()).bfloat16())
    config = model.config.get_text_config()
    if config.tie_word_embeddings:
        model.lm_head.weight = torch.nn.Parameter(embedding.weight * (rounded / config.hidden_size**0.5))
    embedding.embed_scale.fill_(rounded)


def round_embedding(model: Any) -> None:
    """Round what MaxText itself rounds too, whatever its dtype: the stored embedding where it gives the logits.

    Source: layers/embeddings.py of 0.2.5, `attend_on_embedding`.
    """
    import torch

    round_factor(model)
    config = model.config.get_text_config()
    if config.tie_word_embeddings:
        gemma = config.model_type.startswith("gemma")
        scale = config.hidden_size**0.5 if gemma else getattr(config, "embedding_multiplier", 1.0)
        stored = (model.lm_head.weight * scale).float().bfloat16()
        model.lm_head.weight = torch.nn.Parameter(stored.double() / scale)


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
        job: makes the job of a folder, a label and a form.
    """
    python = old_python("maxtext")
    parameters = [item.callspec.params for item in request.session.items if item.module is request.module]
    places = {(one["label"], one["form"]): factory.mktemp(one["label"]) for one in parameters}
    jobs = [job(place, *pair) for pair, place in places.items()]
    run = subprocess.run(
        [str(python), "-c", script], input=json.dumps(jobs), capture_output=True, text=True, check=False,
        env={"JAX_PLATFORMS": "cpu", "PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1"},
        cwd=factory.mktemp("run"),
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    return places
