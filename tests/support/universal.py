"""DeepSpeed's universal checkpoints by the layout of its `ds_to_universal.py`, imitated with torch.

`tests/oracles/test_deepspeed.py` has those that DeepSpeed itself makes.
"""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import numpy as np

from tests.support import zero

STEP, STEPS = "global_step10_universal", 3.0
MOMENTS = ("exp_avg", "exp_avg_sq")


def states(whole=None):
    """Parameter → state → array."""
    whole = zero.parameters() if whole is None else whole
    return {
        name: {"fp32": tensor, "exp_avg": tensor / 2, "exp_avg_sq": tensor * tensor}
        for name, tensor in whole.items()
    }


def save(
    folder: Path, stage: int = 2, ranks: int = 1, whole=None, trained=True, number=False, said=None,
    shapes=None, module=None, **more,
) -> Path:  # fmt: skip
    """The folder above a step, as the script leaves it.

    Args:
        folder: it is made.
        stage: of ZeRO, before.
        ranks: of which it was made.
        whole: parameters by name.
        trained: whether there are moments.
        number: whether the count of updates is a number, not a tensor.
        said: what files state in addition to the tensor, by parameter.
        shapes: for each tensor-parallel rank, those of its parameters; those of the whole if there is one rank.
        module: buffers, of which the script makes copies.
        more: further entries of the model states.
    """
    import torch

    step = folder / STEP
    (step / "zero").mkdir(parents=True)
    (folder / "latest_universal").write_text(STEP)
    found = states(whole)
    for name, rows in found.items():
        (step / "zero" / name).mkdir()
        for state, array in rows.items():
            if state == "fp32" or trained:
                tensor = torch.tensor(array)
                table = {"param": tensor, "cat_dim": 0, **(said or {}).get(name, {})}
                torch.save(tensor.flatten() if stage == 3 else table, step / "zero" / name / f"{state}.pt")
        if trained and stage != 3:
            torch.save(int(STEPS) if number else torch.tensor(STEPS), step / "zero" / name / "step.pt")
    torch.save({"param_groups": [{"lr": 0.1}], "zero_stage": stage}, step / "zero" / "optimizer_state.pt")
    for name, array in (module or {}).items():
        if stage != 3:
            (step / "zero" / name).mkdir()
            torch.save({"param": torch.tensor(array).float()}, step / "zero" / name / "fp32.pt")
    for at, row in enumerate(shapes or [{name: rows["fp32"].shape for name, rows in found.items()}]):
        for rank in range(ranks if stage == 3 else 1):
            start = f"zero_pp_rank_{rank}_" if stage == 3 else ""
            one = OrderedDict((name, torch.Size(shape)) for name, shape in row.items())
            torch.save({
                "module": OrderedDict((key, torch.tensor(array)) for key, array in (module or {}).items()),
                "buffer_names": list(module or {}), "param_shapes": [one], "global_steps": 10,
                "shared_params": {}, "frozen_param_shapes": None, "frozen_param_fragments": None,
                "ds_version": "0.19.8", **more,
            }, step / f"{start}mp_rank_{at:02d}_model_states.pt")  # fmt: skip
    return folder


def tensors(whole=None, trained=True, counted=True):
    """What a reader shows: name → array."""
    shown = {}
    for name, rows in states(whole).items():
        shown[name] = rows["fp32"]
        if trained:
            shown |= {f"optimizer.state.{name}.{state}": rows[state] for state in MOMENTS}
        if trained and counted:
            shown[f"optimizer.state.{name}.step"] = np.array(STEPS, "f4")
    return shown
