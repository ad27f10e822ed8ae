"""What the tests with MaxText's own library share: how near its float32 comes, and what its command line states."""

from __future__ import annotations

import json
from typing import Any

from tests.support.oracles.cases import MODEL_NAMES

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
