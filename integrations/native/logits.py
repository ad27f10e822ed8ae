"""Compare the logits of two Hugging Face folders, computed by transformers on one input; see `wherry.prove.native`.

Both models run in float32 on one device. Equal weights give the same logits up to the order of summation; a cast in the
conversion shows as a relative error. Errors up to `BOUND` are explained by float32 itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from wherry.integrations.native import NoModelError, UnsafeLibraryError, with_torch

BOUND = 1e-4  # largest difference, relative to the largest logit
_LENGTH = 16


def prepare() -> None:
    """Make the devices ready, before the process gives up the network and the execution of programs."""
    with_torch.prepare()


def compare_logits(source: Path, target: Path) -> dict[str, Any]:
    """Run both models on one input.

    Returns:
        `failed`, `checked` (number of logits), `error` (largest relative difference) and `devices`; or `refused`.
    """
    import numpy as np
    import torch

    found: list[Any] = []
    for folder in (source, target):
        try:
            model = with_torch.model(folder, with_torch.weights(folder))
            found.append(_run(torch, model.float()))
        except (UnsafeLibraryError, NoModelError):
            raise
        except Exception as error:  # noqa: BLE001  any error of the library is the finding
            return {"refused": f"{type(error).__name__}: {error}"[:2000], "devices": "none"}
    expected, actual = found
    devices = f"torch {torch.__version__}, {with_torch.device()}"
    if expected.shape != actual.shape:
        reason = f"expected shape {expected.shape}, got {actual.shape}"
        return {
            "failed": [["logits", reason]],
            "checked": int(actual.size),
            "error": None,
            "devices": devices,
        }
    error = float(np.abs(actual - expected).max() / max(np.abs(expected).max(), 1e-30))
    wrong = not error <= BOUND
    failed = [["logits", f"relative error {error:.2e} exceeds the limit of {BOUND}"]] if wrong else []
    return {"failed": failed, "checked": int(actual.size), "error": error, "devices": devices}


def _run(torch: Any, model: Any) -> Any:
    """The logits on an input that reaches every part of a small vocabulary, the same for both."""
    generator = torch.Generator().manual_seed(0)
    size = model.config.get_text_config().vocab_size
    inputs = {"input_ids": torch.randint(0, size, (2, _LENGTH), generator=generator).to(model.device)}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = inputs["input_ids"][:, : _LENGTH // 2]
    with torch.no_grad():
        made = model(**inputs)
    return (made.logits if "logits" in made else made.last_hidden_state).float().cpu().numpy()
