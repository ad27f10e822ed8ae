"""PEFT as the judge of merged adapters: a script that runs in an environment of its own, with PEFT and transformers.

    python peft_judge.py make JOB      makes a base and adapters on it, and says what PEFT computes with each of them
    python peft_judge.py logits JOB    says what transformers computes from merged models

JOB is a JSON file: `kind` of the base, `folder`, and what `make` reads (`configs`: names → fields of LoraConfig;
`draws`: the number of random adapters) or `logits` (`models`: names → folders). The answer is a JSON file next to the
job, and the logits are in `.npy` files.

PEFT refuses some of the random configs. Then the next one is drawn.
"""

from __future__ import annotations

import json
import random
import sys
import warnings
from pathlib import Path

import numpy as np
import torch
import transformers
from peft import LoraConfig, LoraRuntimeConfig, PeftModel, get_peft_model

warnings.simplefilter("ignore")
transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
torch.set_num_threads(1)

SIZES = {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "max_position_embeddings": 64}  # fmt: skip
KEYS = {**SIZES, "num_key_value_heads": 2}
EXPERTS = {**KEYS, "num_local_experts": 4, "num_experts_per_tok": 2, "tie_word_embeddings": False}
OSS = {**EXPERTS, "head_dim": 8, "pad_token_id": 0}
QWEN = {**KEYS, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "tie_word_embeddings": False}  # fmt: skip
MOE = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
TEXT = ("embed_tokens", ["lm_head", "embed_tokens"])  # the embedding, and what is trained whole
EXPERT_TEXT = ("embed_tokens", ["lm_head"])
GPT2 = {"vocab_size": 60, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}
PICTURE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
           "image_size": 16, "patch_size": 8, "num_labels": 5}  # fmt: skip
ENDS = ["lm_head", "wte"]
LLAMA = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ATTENTION = LLAMA[:4]
CONV = ["c_attn", "attn.c_proj", "c_fc", "mlp.c_proj"]
BERT = ["query", "key", "value", "attention.output.dense", "intermediate.dense"]

# kind → class, sizes, modules with matrices, embedding, modules that are trained whole, parameters.
BASES = {
    "llama": ("Llama", "LlamaForCausalLM", {**KEYS, "tie_word_embeddings": False}, LLAMA, "embed_tokens",
              [*TEXT[1], "norm"], []),
    "llama-tied": ("Llama", "LlamaForCausalLM", {**KEYS, "tie_word_embeddings": True}, LLAMA, *TEXT, []),
    "qwen2-tied": ("Qwen2", "Qwen2ForCausalLM", {**KEYS, "tie_word_embeddings": True}, LLAMA, *TEXT, []),
    "gemma-tied": ("Gemma", "GemmaForCausalLM", {**KEYS, "head_dim": 8, "tie_word_embeddings": True}, LLAMA, *TEXT, []),
    "gpt2": ("GPT2", "GPT2LMHeadModel", {**GPT2, "tie_word_embeddings": False}, CONV, "wte", [*ENDS, "ln_f"], []),
    "gpt2-tied": ("GPT2", "GPT2LMHeadModel", {**GPT2, "tie_word_embeddings": True}, CONV, "wte", ENDS, []),
    "mixtral": ("Mixtral", "MixtralForCausalLM", EXPERTS, ATTENTION, *EXPERT_TEXT, [*MOE, "mlp.gate.weight"]),
    "qwen3-moe": ("Qwen3Moe", "Qwen3MoeForCausalLM", QWEN, ATTENTION, *EXPERT_TEXT, [*MOE, "mlp.gate.weight"]),
    "gpt-oss": ("GptOss", "GptOssForCausalLM", OSS, ATTENTION, *EXPERT_TEXT, [*MOE, "mlp.router.weight"]),
    "bert-classifier": ("Bert", "BertForSequenceClassification", {**SIZES, "num_labels": 3}, BERT, "word_embeddings",
                        ["classifier", "pooler"], []),
    "bert-tied": ("Bert", "BertForMaskedLM", SIZES, BERT, "word_embeddings", ["LayerNorm"], []),
    "vit-classifier": ("ViT", "ViTForImageClassification", PICTURE, ["q_proj", "v_proj", "o_proj", "fc1", "fc2"], None,
                       ["classifier"], []),
}  # fmt: skip


def base_of(kind: str, folder: Path) -> None:
    """A random model, with biases that are not zero."""
    name, cls, sizes = BASES[kind][:3]
    torch.manual_seed(0)
    model = getattr(transformers, cls)(getattr(transformers, f"{name}Config")(**sizes))
    with torch.no_grad():
        for value in model.parameters():
            value.add_(torch.randn_like(value) * 0.1)
    model.save_pretrained(folder)


def loaded(kind: str, folder: Path):
    """A model of transformers, in float32."""
    return getattr(transformers, BASES[kind][1]).from_pretrained(folder, dtype=torch.float32).eval()


def logits(kind: str, model) -> np.ndarray:
    """What a model computes of fixed inputs."""
    draw = torch.Generator().manual_seed(7)
    if kind.startswith("vit"):
        inputs = {"pixel_values": torch.randn(2, 3, 16, 16, generator=draw)}
    else:
        inputs = {"input_ids": torch.randint(3, 60, (2, 24), generator=draw)}
    with torch.no_grad():
        return model(**inputs).logits.float().numpy()


def drawn(kind: str, seed: int) -> dict:
    """A random config."""
    _name, _cls, sizes, modules, embedding, whole, parameters = BASES[kind]
    draw, found = random.Random(f"{kind} {seed}"), {}
    targets = draw.sample(modules, draw.randint(1, 3))
    with_parameters = parameters and draw.random() < 0.6
    if embedding and draw.random() < 0.25:
        targets.append(embedding)
    elif "lm_head" in whole and draw.random() < 0.2:
        targets.append("lm_head")
    found["r"], found["lora_alpha"] = draw.choice([2, 4, 8]), draw.choice([1, 4, 8, 16])
    found["target_modules"] = targets
    found["use_rslora"] = draw.random() < 0.3
    found["bias"] = draw.choice(["none", "none", "all", "lora_only"])
    found["init_lora_weights"] = draw.choice([True, True, False, "gaussian", "orthogonal"])
    if with_parameters:
        found["target_parameters"] = draw.sample(parameters, draw.randint(1, len(parameters)))
    else:
        found["use_dora"] = draw.random() < 0.25
        found["fan_in_fan_out"] = draw.random() < 0.3
        found["lora_bias"] = not found["use_dora"] and draw.random() < 0.2
    if draw.random() < 0.3:
        found["rank_pattern"] = {targets[0]: draw.choice([2, 6])}
    if draw.random() < 0.3:
        found["alpha_pattern"] = {rf".*\.{targets[-1]}": draw.choice([2, 32])}
    if draw.random() < 0.3:
        found["modules_to_save"] = draw.sample(whole, 1)
    elif embedding and embedding not in targets and draw.random() < 0.4:
        found["trainable_token_indices"] = {embedding: draw.sample(range(60), 3)}
    if sizes.get("tie_word_embeddings", kind == "bert-tied") and draw.random() < 0.4:
        found["ensure_weight_tying"] = True
    return found


def made(kind: str, folder: Path, name: str, config: dict) -> dict:
    """One adapter, and what PEFT computes with it: loaded, and merged."""
    config, adapter = dict(config), folder / "adapters" / name
    saving = {}
    converts = config.pop("converts", False)
    if "runtime_config" in config:
        config["runtime_config"] = LoraRuntimeConfig(**config["runtime_config"])
    torch.manual_seed(1)
    task = (
        "SEQ_CLS"
        if kind == "bert-classifier"
        else "CAUSAL_LM"
        if "ForCausalLM" in BASES[kind][1] or kind.startswith("gpt2")
        else None
    )
    model = get_peft_model(loaded(kind, folder / "base"), LoraConfig(**{"task_type": task, **config}))
    if converts:
        model.save_pretrained(folder / "initial" / name)
        saving = {"path_initial_model_for_weight_conversion": str(folder / "initial" / name)}
    with torch.no_grad():
        for value in model.parameters():
            if value.requires_grad:
                value.add_(torch.randn_like(value) * 0.1)
    model.save_pretrained(adapter, **saving)
    again = PeftModel.from_pretrained(loaded(kind, folder / "base"), adapter).eval()
    answer = folder / "answers" / name
    answer.mkdir(parents=True)
    np.save(answer / "loaded.npy", logits(kind, again))
    merged = again.merge_and_unload().eval()
    np.save(answer / "merged.npy", logits(kind, merged))
    merged.save_pretrained(answer / "model")
    stated = json.loads((adapter / "adapter_config.json").read_text())
    return {"adapter": str(adapter), "answer": str(answer), "config": stated}


def make(job: dict) -> dict:
    """The base, and adapters: those of the configs, and random ones; the reason for each that PEFT refuses."""
    kind, folder, rows, refused = job["kind"], Path(job["folder"]), {}, {}
    base_of(kind, folder / "base")
    for name, config in job.get("configs", {}).items():
        try:
            rows[name] = made(kind, folder, name, config)
        except Exception as error:
            refused[name] = f"{type(error).__name__}: {error}"[:300]
    seed = 0
    while sum(name.startswith("drawn") for name in rows) < job.get("draws", 0):
        name = f"drawn-{seed}"
        try:
            rows[name] = made(kind, folder, name, drawn(kind, seed))
        except Exception as error:
            refused[name] = f"{type(error).__name__}: {error}"[:300]
        seed += 1
        assert seed < 20 * job["draws"], refused
    return {"rows": rows, "refused": refused, "fields": list(LoraConfig.__dataclass_fields__)}


def answer(job: dict) -> dict:
    """The logits of merged models, in files next to them."""
    found = {}
    for name, folder in job["models"].items():
        file = Path(job["folder"]) / f"{name}.npy"
        np.save(file, logits(job["kind"], loaded(job["kind"], folder)))
        found[name] = str(file)
    return found


if __name__ == "__main__":
    what, path = sys.argv[1], Path(sys.argv[2])
    result = (make if what == "make" else answer)(json.loads(path.read_text()))
    path.with_suffix(".answer.json").write_text(json.dumps(result))
