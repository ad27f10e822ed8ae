"""torchtitan itself judges both ways: its classes load what wherry wrote, and wherry reads what its
CheckpointManager saved.

`into`: `dcp.load` finds every name that torchtitan's model asks for; its adapter makes of it the Hugging Face
tensors that wherry was given, bit for bit, and the same of them; its logits are transformers'. `out_of`: wherry
makes of its step what its adapter makes, its moments lie in MaxText and come back, and transformers computes its
logits. torchtitan 0.3 runs in an environment of its own, on the processor, in float32. Its adapter of gpt_oss
knows the experts by names that its model no longer has, and loses them: there the logits alone judge the experts.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
from pathlib import Path

import numpy as np
import pytest

import wherry
from tests.support.generations import old_python
from tests.support.oracles import huggingface, judge
from tests.support.oracles.cases import TORCHTITAN
from tests.support.oracles.huggingface import TOKENS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
JUDGE = str(Path(huggingface.__file__).with_name("torchtitan_judge.py"))
SINGLE = 2e-5
LOST = ".mlp.experts."  # by torchtitan's adapter of gpt_oss


def digests(uri):
    """Name → the digest of its bytes, of a checkpoint."""
    with wherry.open(uri) as checkpoint:
        paths = checkpoint.manifest.tensors
        return {path[0]: hashlib.sha256(checkpoint.read(path).tobytes()).hexdigest() for path in paths}


def bare(rows):
    return {name: row[2] for name, row in rows.items()}


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """Label → its folder, and what torchtitan reports of loading and of saving; one process runs all."""
    python, jobs, folders = old_python("torchtitan"), [], {}
    for label in TORCHTITAN:
        folder = folders[label] = tmp_path_factory.mktemp(label)
        hf = judge.source(label)
        wherry.convert(hf, folder / "into", to="torchtitan", lineage=False)
        shared = {
            "config": str(folder / "into" / "torchtitan_config.json"), "tokens": TOKENS.tolist(),
            "biased": label.startswith("deepseek-v3"),
        }  # fmt: skip
        jobs.append({
            **shared, "do": "load", "dcp": str(folder / "into"), "hf": str(next(hf.glob("*.safetensors"))),
            "out": str(folder / "into.npy"),
        })  # fmt: skip
        # The bias of the load that only torchtitan has is among what it saves of qwen3 and gpt_oss, at 0.
        jobs.append({
            **shared, "do": "save", "biased": label != "deepseek-v2-lite", "drawn": label.startswith("deepseek-v3"),
            "seed": 1, "model_only": label == "qwen3",
            "folder": str(folder / "run"), "hf": str(folder / "saved.safetensors"), "out": str(folder / "out_of.npy"),
        })  # fmt: skip
    run = subprocess.run(
        [str(python), JUDGE], input=json.dumps(jobs), capture_output=True, text=True, check=False,
        env={"PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1"}, cwd=tmp_path_factory.mktemp("run"),
    )  # fmt: skip
    assert "\nFOUND " in run.stdout, run.stderr[-2000:]
    said = json.loads(run.stdout.rpartition("\nFOUND ")[2])
    return {label: (folders[label], *said[2 * at : 2 * at + 2]) for at, label in enumerate(TORCHTITAN)}


def require(row):
    assert "error" not in row, row["error"][-2000:]
    assert row["logits"] == "computed", row["logits"][-2000:]


@pytest.mark.parametrize("label", TORCHTITAN)
def test_torchtitan_loads_what_wherry_wrote(reports, label):
    folder, row, _saved = reports[label]
    require(row)
    lost = LOST if label == "gpt-oss" else "none are lost"
    wanted = {name: one for name, one in digests(judge.source(label)).items() if lost not in name}
    assert bare(row["to_hf"]) == wanted
    known = {name: one for name, one in bare(row["from_hf"]).items() if name in row["own"]}
    assert known == {name: one for name, one in bare(row["own"]).items() if name in known}
    assert len(known) == len(row["own"]) or label == "gpt-oss"
    judge.require_equal(np.load(folder / "into.npy"), judge.wanted(label), SINGLE)


@pytest.mark.parametrize("label", TORCHTITAN)
def test_wherry_reads_what_torchtitan_saved(reports, label):
    folder, _loaded, row = reports[label]
    require(row)
    step, back = folder / "run" / "checkpoint" / "step-7", folder / "back"
    assert wherry.detect(step).format == "torchtitan"
    config = folder / "into" / "torchtitan_config.json"
    wherry.convert(step, back, to="huggingface", config=config, lineage=False)
    found, wanted = digests(back), digests(folder / "saved.safetensors")
    tied = {"lm_head.weight"} if label == "llama-tied" else set()  # their adapter leaves the copy out
    experts = {name for name in found if LOST in name} if label == "gpt-oss" else set()
    assert {name: one for name, one in found.items() if name not in tied | experts} == wanted
    judge.require_equal(np.load(folder / "out_of.npy"), huggingface.logits(back, TOKENS), SINGLE)


@pytest.mark.parametrize("label", ["deepseek-v2-lite", "deepseek-v3"])
def test_the_moments_that_torchtitan_saved_go_to_maxtext_and_back(reports, label):
    folder, _loaded, row = reports[label]
    config = folder / "into" / "torchtitan_config.json"
    step = folder / "run" / "checkpoint" / "step-7"
    wherry.convert(step, folder / "jax", to="maxtext", config=config, lineage=False)
    wherry.convert(folder / "jax", folder / "again", to="torchtitan", lineage=False)
    moments = {f"optimizer.{name}": one for name, one in bare(row["optimizer"]).items() if ".exp_avg" in name}
    found = digests(folder / "again")
    assert len(moments) > 50
    assert {name: found[name] for name in moments} == moments
