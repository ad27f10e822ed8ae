"""Logits of two Hugging Face folders, by transformers' own classes on the same input; see `wherry.verifier.native`.

Both run in float32 on one device. Weights that differ by nothing give the same numbers up to the order of sums; what a
conversion rounded (a cast) shows as a relative error, of which `BOUND` is what float32 itself explains.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from wherry.integrations.native import UnsafeLibraryError, with_torch

if TYPE_CHECKING:
    from pathlib import Path

BOUND = 1e-4  # largest difference, relative to the largest logit
_LENGTH = 16


def compared(source: Path, target: Path) -> dict[str, Any]:
    """Run both on one input.

    Returns:
        `failed`, `checked` (number of logits), `error` (largest relative difference) and `devices`; or `refused`.
    """
    import numpy as np
    import torch

    found: list[Any] = []
    for folder in (source, target):
        try:
            model = with_torch.model(folder, with_torch.weights(folder))
            if model is None:
                return {"refused": f"transformers knows no class for {folder}", "devices": "none"}
            found.append(_run(torch, model.float()))
        except UnsafeLibraryError:
            raise
        except Exception as error:  # noqa: BLE001  whatever the library says is the finding
            return {"refused": f"{type(error).__name__}: {error}"[:2000], "devices": "none"}
    theirs, ours = found
    devices = f"torch {torch.__version__}, {with_torch.device()}"
    if theirs.shape != ours.shape:
        reason = f"logits of shape {ours.shape}, those of the source have {theirs.shape}"
        return {"failed": [["logits", reason]], "checked": int(ours.size), "error": None, "devices": devices}
    error = float(np.abs(ours - theirs).max() / max(np.abs(theirs).max(), 1e-30))
    wrong = not error <= BOUND
    failed = [["logits", f"they differ by {error:.2e} of the largest, allowed is {BOUND}"]] if wrong else []
    return {"failed": failed, "checked": int(ours.size), "error": error, "devices": devices}


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
