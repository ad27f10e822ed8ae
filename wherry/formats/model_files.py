"""ModelFiles: files of a model that a checkpoint states in its own form, such as the tokenizer in a GGUF file.

They are made only when a target needs them, so that opening a checkpoint stays quick.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Files for a target that uses the model.

    Attributes:
        files: name → bytes, as a Hugging Face folder has them.
        notes: what is uncertain about them.
        missing: why there are none, although the checkpoint states what they are made from; empty otherwise.
    """

    files: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    notes: tuple[str, ...] = ()
    missing: str = ""
