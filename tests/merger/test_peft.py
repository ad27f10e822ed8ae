"""PEFT judges merges of random adapters, and of adapters of every field of LoraConfig, in an environment of its own.

The judge is PEFT's model with the adapter loaded: transformers computes its logits from the merged model. Where
`merge_and_unload` computes the same, the tensors are compared with its own too, bit by bit or nearly so.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import wherry
from tests.support.generations import ROOT, old_python
from tests.support.oracles.peft_cases import DRAWS, EQUAL, KINDS, MORE, PEFT, REASONS, REFUSED, WALK
from wherry.errors import UnrepresentableError

JUDGE = ROOT / "tests" / "support" / "oracles" / "peft_judge.py"
slow = [pytest.mark.slow, pytest.mark.timeout(3600)]


def judge_answer(what, job):
    """The judge's answer."""
    file = Path(job["folder"]) / f"{what}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(job))
    env = {"PATH": os.environ["PATH"], "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [str(old_python("merges")), str(JUDGE), what, str(file)], capture_output=True, text=True, check=False, env=env
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(file.with_suffix(".answer.json").read_text())


def judged(kind, folder, **job):
    """Name → equal, or why wherry or PEFT refuses; a result that is not equal fails."""
    answer = judge_answer("make", {"kind": kind, "folder": str(folder), **job})
    found, models = dict.fromkeys(answer["refused"], PEFT), {}
    for name, row in answer["rows"].items():
        out = folder / "out" / name
        try:
            wherry.merge([str(folder / "base"), row["adapter"]], out, to="huggingface", lineage=False)
            models[name] = str(out)
        except UnrepresentableError as error:
            found[name] = str(error)
    logits = judge_answer("logits", {"kind": kind, "folder": str(folder / "logits"), "models": models})
    for name, file in logits.items():
        row = answer["rows"][name]
        loaded, merged = (np.load(Path(row["answer"]) / f"{one}.npy") for one in ("loaded", "merged"))
        bound = 2e-5 * np.abs(loaded).max()
        assert np.abs(np.load(file) - loaded).max() <= bound, (name, row["config"])
        if np.abs(merged - loaded).max() <= bound:
            require_alike(tensors(Path(row["answer"]) / "model"), tensors(Path(models[name])), name)
        found[name] = EQUAL
    return found, answer


def tensors(folder):
    return {
        name: one for file in sorted(folder.glob("*.safetensors")) for name, one in load_file(file).items()
    }


def require_alike(wanted, found, name):
    """The same tensors: torch's matrix product and numpy's may differ in the last bits."""
    assert found.keys() == wanted.keys(), name
    for key, tensor in wanted.items():
        bound = 2**-20 * np.abs(tensor).max()
        np.testing.assert_allclose(found[key], tensor, rtol=0, atol=bound, err_msg=f"{name} {key}")


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=slow) for kind in KINDS])
def test_random_adapters_are_merged_as_peft_computes_them(kind, tmp_path):
    found, _answer = judged(kind, tmp_path, draws=DRAWS)
    refusals = [one for name, one in found.items() if one not in (EQUAL, PEFT)]
    assert all(any(reason in one for reason in REASONS) for one in refusals), refusals
    assert (len(refusals), list(found.values()).count(EQUAL)) == (KINDS[kind], DRAWS - KINDS[kind])


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_field_of_a_config_alone_is_merged_or_refused_by_name(tmp_path):
    configs = {name: config for name, (_field, config, _outcome) in WALK.items()}
    found, answer = judged("qwen2-tied", tmp_path, configs={**configs, **MORE})
    assert {field for field, _config, _outcome in WALK.values()} == set(answer["fields"])
    outcomes = {name: one if one in (EQUAL, PEFT) else REFUSED for name, one in found.items()}
    assert outcomes == {**{name: row[2] for name, row in WALK.items()}, **dict.fromkeys(MORE, EQUAL)}, found
    for name, one in found.items():
        assert outcomes[name] != REFUSED or f"{WALK[name][0]} is " in one, one


def test_the_page_states_what_is_judged():
    text = " ".join((ROOT / "docs" / "reference" / "judged.md").read_text().split())
    outcomes = [outcome for _field, _config, outcome in WALK.values()]
    fields = len({field for field, _config, _outcome in WALK.values()})
    refused = sum(KINDS.values())
    walked = ", ".join([
        f"{fields} fields of `LoraConfig`, each alone, in {len(WALK)} adapters: {outcomes.count(EQUAL)} are equal",
        f"{outcomes.count(REFUSED)} refused by name, and {outcomes.count(PEFT)} PEFT itself does not merge",
    ])  # fmt: skip
    assert f"{len(KINDS) * DRAWS} random adapters of {len(KINDS)} small models" in text
    assert f"{len(KINDS) * DRAWS - refused} are equal, and {refused} refused" in text
    assert walked in text, walked
