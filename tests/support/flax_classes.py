"""Tiny models that have a Flax class in transformers 4, and what these classes compute in their own environment."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.generations import old_python
from tests.support.tiny_models import COMMON, GATED, T5

GPT2 = {"vocab_size": 60, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 4}
BERT = {**COMMON, "intermediate_size": 48, "type_vocab_size": 2}
# A label: the class, and the settings of its config.
MODELS = {
    "llama": ("LlamaForCausalLM", GATED),
    "llama-tied": ("LlamaForCausalLM", {**GATED, "tie_word_embeddings": True}),
    "mistral": ("MistralForCausalLM", {**GATED, "sliding_window": 64}),
    "mistral-no-window": ("MistralForCausalLM", {**GATED, "sliding_window": None}),
    "gemma": ("GemmaForCausalLM", {**GATED, "head_dim": 16}),
    "gemma-untied": ("GemmaForCausalLM", {**GATED, "head_dim": 16, "tie_word_embeddings": False}),
    "gpt2": ("GPT2LMHeadModel", GPT2),
    "gpt2-untied": ("GPT2LMHeadModel", {**GPT2, "tie_word_embeddings": False, "n_inner": 40}),
    "gpt2-bare": ("GPT2Model", GPT2),
    "t5": ("T5ForConditionalGeneration", {**T5, "feed_forward_proj": "relu", "tie_word_embeddings": True}),
    "t5-1.1": (
        "T5ForConditionalGeneration", {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    ),
    "t5-tied-unscaled": (
        "T5ForConditionalGeneration", {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    ),
    "t5-encoder": ("T5EncoderModel", {**T5, "feed_forward_proj": "gated-gelu"}),
    "mt5": ("MT5ForConditionalGeneration", {**T5, "feed_forward_proj": "gated-gelu"}),
    "bert": ("BertModel", BERT),
    "bert-pretraining": ("BertForPreTraining", BERT),
    "bert-masked": ("BertForMaskedLM", BERT),
    "bert-next": ("BertForNextSentencePrediction", BERT),
    "bert-sequence": ("BertForSequenceClassification", {**BERT, "num_labels": 3}),
    "bert-token": ("BertForTokenClassification", {**BERT, "num_labels": 5}),
    "bert-choice": ("BertForMultipleChoice", BERT),
    "bert-answers": ("BertForQuestionAnswering", BERT),
}  # fmt: skip
# transformers 4 has no model that is tied and not scaled, and FlaxMistral fails without a window.
OUT_OF = [label for label in MODELS if label not in ("t5-tied-unscaled", "mistral-no-window")]
# Transformers 5 forces a tie on new models of these, which the published ones do not have.
OWN_HEAD = frozenset({"t5-1.1", "mt5"})
IDS = np.arange(20).reshape(2, 10) * 7 % 59 + 1
# Fields of the outputs that both libraries name alike.
OUTPUTS = (
    "logits",
    "prediction_logits",
    "seq_relationship_logits",
    "start_logits",
    "end_logits",
    "last_hidden_state",
    "pooler_output",
)

_SCRIPT = """
import json, logging, sys
import numpy as np
import transformers
from transformers.utils import logging as said

names, ids, jobs = json.loads(sys.argv[1])
heard = []

class Ear(logging.Handler):
    def emit(self, record):
        heard.append(record.getMessage())

said.disable_default_handler()
said.add_handler(Ear())

def computed(model, name):
    given = {"input_ids": np.array(ids)}
    if "MultipleChoice" in name:
        given = {"input_ids": np.array(ids)[:, None].repeat(2, 1)}
    if "T5For" in name:
        given["decoder_input_ids"] = np.array(ids)[:, :6]
    found = model(**given)
    return {one: np.asarray(found[one], "f8").tolist() for one in names if found.get(one) is not None}

results = []
for source, target in jobs:
    heard.clear()
    config = transformers.AutoConfig.from_pretrained(source)
    name = config.architectures[0]
    kind = getattr(transformers, "Flax" + name)
    if target is None:
        model = kind.from_pretrained(source)
    else:
        model = kind(config, seed=3)
        model.save_pretrained(target["uri"], max_shard_size=target["shard"])
    results.append([computed(model, name), [one for one in heard if "weights" in one]])
json.dump(results, sys.stdout)
"""


def families_of(labels: Iterable[str]) -> set[str]:
    """wherry's families of models."""
    return {"t5" if label == "mt5" else label.split("-")[0] for label in labels}


def flax_outputs(
    *jobs: tuple[Path, Path | None], shard: str = "10GB"
) -> list[tuple[dict[str, Any], list[str]]]:
    """What the Flax classes compute, and what they said about weights that were missing or not used.

    Args:
        jobs: a folder that the class named by its config loads; or a folder whose config a new model takes, and the
            folder that the class saves it to.
        shard: `max_shard_size` of saved folders.
    """
    job_rows = [
        [str(source), None if target is None else {"uri": str(target), "shard": shard}]
        for source, target in jobs
    ]
    run = subprocess.run(
        [str(old_python("transformers")), "-c", _SCRIPT, json.dumps([OUTPUTS, IDS.tolist(), job_rows])],
        capture_output=True, text=True, check=False, env={"JAX_PLATFORMS": "cpu", "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    return [
        ({name: np.array(rows) for name, rows in found.items()}, heard)
        for found, heard in json.loads(run.stdout)
    ]


def torch_outputs(folder: Path) -> dict[str, Any]:
    """What the PyTorch class that a folder's config names computes; every weight must be loaded."""
    import torch
    import transformers

    name = json.loads((folder / "config.json").read_text())["architectures"][0]
    model, info = getattr(transformers, name).from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    ids = torch.tensor(IDS)
    given = {"input_ids": ids[:, None].repeat(1, 2, 1) if "MultipleChoice" in name else ids}
    if "T5For" in name:
        given["decoder_input_ids"] = ids[:, :6]
    with torch.no_grad():
        found = model.eval()(**given)
    return {one: found[one].double().numpy() for one in OUTPUTS if found.get(one) is not None}


def saved(label: str, folder: Path, **more: object) -> Path:
    """A tiny random model as transformers saves it; heads, norms and biases are random too."""
    import torch
    import transformers

    name, settings = MODELS[label]
    kind = getattr(transformers, name)
    torch.manual_seed(0)
    model = kind(kind.config_class(**{**settings, **more}))
    with torch.no_grad():
        for values in model.parameters():
            values.add_(torch.randn_like(values) * 0.1)
    model.save_pretrained(folder)
    if label in OWN_HEAD:
        _give_head(folder)
    return folder


def _give_head(folder: Path) -> None:
    """A head of its own, and a config as transformers 4 wrote it."""
    from safetensors.numpy import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    head = np.random.default_rng(1).normal(size=tensors["shared.weight"].shape).astype("f4")
    save_file({**tensors, "lm_head.weight": head}, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config.pop("scale_decoder_outputs", None)
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
