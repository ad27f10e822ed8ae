"""What torchtitan itself makes of a checkpoint: a program for the environment that has torchtitan 0.3, and only that.

It reads jobs as JSON. `load` builds torchtitan's model from the config that wherry wrote, loads the DCP folder
with `dcp.load` (which requires every name), and returns the names and digests of what its own adapter makes of it,
and its logits. `save` makes a model and its optimizer by torchtitan's own classes, trains one step, and saves with
torchtitan's own CheckpointManager. Kernels of a GPU are not needed: attention is plain, and groups of experts are
multiplied one by one.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import traceback
from pathlib import Path

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torchtitan.models.common import Embedding, Linear, RMSNorm
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.models.common.rope import ComplexRoPE, CosSinRoPE

INIT = {"weight": torch.nn.init.normal_, "bias": torch.nn.init.normal_}
SCALED = ("scaling_factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings", "rope_factor",
          "beta_fast", "beta_slow", "original_seq_len", "truncate")  # fmt: skip


# What a model whose layers are all dense does not state, and the builders ask for.
NO_EXPERTS = {"num_experts": 1, "num_shared_experts": 1, "moe_hidden_dim": 1, "top_k": 1, "score_func": "softmax",
              "route_scale": 1.0, "route_norm": False}  # fmt: skip


def rope(c, kind, dim):
    said = c["rope"]
    given = {name: said[name] for name in SCALED if name in said}
    return kind.Config(dim=dim, max_seq_len=64, theta=said["theta"], scaling=said["scaling"], **given)


def common(c):
    return {
        "dim": c["dim"], "vocab_size": c["vocab_size"],
        "tok_embeddings": Embedding.Config(num_embeddings=c["vocab_size"], embedding_dim=c["dim"], param_init=INIT),
        "norm": RMSNorm.Config(normalized_shape=c["dim"], eps=c["norm_eps"], param_init=INIT),
        "lm_head": Linear.Config(in_features=c["dim"], out_features=c["vocab_size"], param_init=INIT),
        "enable_weight_tying": bool(c.get("enable_weight_tying")),
    }  # fmt: skip


def llama3(c):
    from torchtitan.models import llama3 as home
    from torchtitan.models.common.config_utils import get_attention_config, make_gqa_config
    from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter

    turned = rope(c, ComplexRoPE, c["head_dim"])
    layers = home._build_llama3_layers(
        n_layers=c["n_layers"], dim=c["dim"], n_heads=c["n_heads"], n_kv_heads=c["n_kv_heads"],
        hidden_dim=c["hidden_dim"], rope=turned, attn_backend="flex",
    )  # fmt: skip
    for layer in layers:  # its builder knows the heads of the released models only
        layer.attention = make_gqa_config(
            dim=c["dim"], n_heads=c["n_heads"], n_kv_heads=c["n_kv_heads"], head_dim=c["head_dim"], fuse_qkv=True,
            wqkv_param_init=INIT, wo_param_init=INIT, inner_attention=get_attention_config("flex"), rope=turned,
        )  # fmt: skip
    return home.Llama3Model.Config(layers=layers, **common(c)), Llama3StateDictAdapter


def qwen3(c):
    from torchtitan.models import qwen3 as home
    from torchtitan.models.qwen3.model import Qwen3Model
    from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter

    shared = {
        "n_layers": c["n_layers"], "dim": c["dim"], "n_heads": c["n_heads"], "n_kv_heads": c["n_kv_heads"],
        "head_dim": c["head_dim"], "rope": rope(c, CosSinRoPE, c["head_dim"]), "attn_backend": "flex",
    }  # fmt: skip
    if c.get("num_experts"):
        layers = home._build_qwen3_moe_layers(
            **shared, moe_hidden_dim=c["moe_hidden_dim"], num_experts=c["num_experts"], top_k=c["top_k"],
            moe_comm_backend="standard",
        )  # fmt: skip
        for layer in layers:  # its builder knows the released models only
            layer.moe.router.route_norm = c["route_norm"]
    else:
        layers = home._build_qwen3_layers(**shared, hidden_dim=c["hidden_dim"])
    return Qwen3Model.Config(layers=layers, **common(c)), Qwen3StateDictAdapter


def deepseek_v3(c):
    from torchtitan.models import deepseek_v3 as home
    from torchtitan.models.deepseek_v3.model import DeepSeekV3Model
    from torchtitan.models.deepseek_v3.state_dict_adapter import DeepSeekV3StateDictAdapter

    c = {**NO_EXPERTS, **c}
    layers = home._build_dsv3_layers(
        n_layers=c["n_layers"], n_dense_layers=c["n_dense_layers"], dim=c["dim"], n_heads=c["n_heads"],
        q_lora_rank=c.get("q_lora_rank") or 0, kv_lora_rank=c["kv_lora_rank"], qk_nope_head_dim=c["qk_nope_head_dim"],
        qk_rope_head_dim=c["qk_rope_head_dim"], v_head_dim=c["v_head_dim"], mscale=c.get("mscale", 1.0),
        dense_hidden_dim=c["hidden_dim"], moe_hidden_dim=c["moe_hidden_dim"], num_experts=c["num_experts"],
        num_shared_experts=int(c["num_shared_experts"]), router_top_k=c.get("top_k", 1),
        router_score_func=c.get("score_func", "softmax"),
        router_num_expert_groups=c.get("num_expert_groups"), router_num_limited_groups=c.get("num_limited_groups"),
        router_route_scale=c.get("route_scale", 1.0), router_route_norm=c.get("route_norm", False), attn_backend="flex",
        moe_comm_backend="standard", non_blocking_capacity_factor=None,
        rope=rope(c, ComplexRoPE, c["qk_rope_head_dim"]),
    )  # fmt: skip
    for layer in layers:
        layer.attention.q_norm.eps = layer.attention.kv_norm.eps = c["latent_norm_eps"]
    return DeepSeekV3Model.Config(layers=layers, **common(c)), DeepSeekV3StateDictAdapter


def gpt_oss(c):
    from torchtitan.models import gpt_oss as home
    from torchtitan.models.gpt_oss.model import GptOssModel
    from torchtitan.models.gpt_oss.state_dict_adapter import GptOssStateDictAdapter

    turned = rope(c, CosSinRoPE, c["head_dim"])
    layers = home._build_gptoss_layers(
        dim=c["dim"], n_layers=c["n_layers"], hidden_dim=c["moe_hidden_dim"], num_experts=c["num_experts"],
        top_k=c["top_k"], load_balance_coeff=1e-3, attn_backend="flex", moe_comm_backend="standard",
        rope=turned,
    )  # fmt: skip
    for at, layer in enumerate(layers):  # its builder knows the sizes of the released models only
        layer.attention = home._make_gptoss_attn_config(
            dim=c["dim"], layer_id=at, attn_backend="flex", n_heads=c["n_heads"], n_kv_heads=c["n_kv_heads"],
            head_dim=c["head_dim"], rope=turned, sliding_window_size=None if at % 2 else c["sliding_window_size"],
        )  # fmt: skip
        layer.moe.routed_experts.inner_experts.swiglu_limit = c["swiglu_limit"]
    return GptOssModel.Config(layers=layers, **common(c)), GptOssStateDictAdapter


MODELS = {"llama3": llama3, "qwen3": qwen3, "deepseek_v3": deepseek_v3, "gpt_oss": gpt_oss}


def build(c, *, biased):
    """torchtitan's model and adapter of a config; `biased`: whether its experts have a bias of the load."""
    config, adapter = MODELS[c["model"]](c)
    for layer in config.layers:
        layer.attention_norm.eps = layer.ffn_norm.eps = c["norm_eps"]
        if c["model"] == "qwen3":
            layer.attention.qk_norm.eps = c["norm_eps"]
        if getattr(layer, "moe", None) is not None and not biased:
            layer.moe.load_balance_coeff = None
    return config.build().float(), adapter(config, None)


def digests(state):
    return {
        name: [str(one.dtype).removeprefix("torch."), list(one.shape),
               hashlib.sha256(one.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()).hexdigest()]
        for name, one in state.items()
    }  # fmt: skip


def loaded(config, folder, *, biased):
    """A model with the parameters of a checkpoint, each of which must be there, and its adapter."""
    model, adapter = build(json.loads(Path(config).read_text()), biased=biased)
    state = model.state_dict()
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state)
    return model, adapter


def load(job):
    model, adapter = loaded(job["config"], job["dcp"], biased=job["biased"])
    hf_tensors = dict(load_file(job["hf"]))
    return {
        "own": digests(model.state_dict()), "to_hf": digests(adapter.to_hf(dict(model.state_dict()))),
        "from_hf": digests(adapter.from_hf(hf_tensors)), "logits": logits(model, job),
    }  # fmt: skip


def plain_grouped_mm(self, *, A, B_t, offs):  # noqa: N803  torchtitan's own names
    ends = offs.tolist()
    parts = [
        A[start:end] @ B_t[at] for at, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True))
    ]
    return torch.cat(parts)


@torch.no_grad()
def logits(model, job):
    """Its forward pass in float32; the reason where it does not run on this machine."""
    try:
        np.save(job["out"], computed(model, torch.tensor(job["tokens"])).float().numpy())
    except Exception:
        return traceback.format_exc()
    return "computed"


@torch.no_grad()
def computed(model, tokens):
    positions = torch.arange(tokens.shape[1]).expand(tokens.shape)
    return model.eval()(tokens, positions=positions, attention_masks=model.get_attention_masks(positions))


def save(job):
    import torch.distributed as dist
    from torchtitan.components.checkpointer.dcp import CheckpointManager
    from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw

    torch.manual_seed(job["seed"])
    c = json.loads(Path(job["config"]).read_text())
    model, adapter = build(c, biased=job["biased"])
    with torch.no_grad():
        for one in (
            *model.parameters(),
            *(one for name, one in model.named_buffers() if job["drawn"] and name.endswith("expert_bias_E")),
        ):
            one.copy_(torch.randn_like(one) * 0.3)
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    container = default_adamw(lr=1e-3)
    container.implementation = "for-loop"
    optimizers = container.build(model_parts=[model])
    for one in model.parameters():
        one.grad = torch.randn_like(one)
    optimizers.step()
    schedulers = LRSchedulersContainer.Config(warmup_steps=2).build(optimizers=optimizers, training_steps=10)
    schedulers.step()
    config = CheckpointManager.Config(
        enable=True, interval=1, folder="checkpoint", last_save_model_only=job["model_only"]
    )
    manager = CheckpointManager(
        config, dataloader=Loader(), model_parts=[model], optimizers=optimizers, lr_schedulers=schedulers,
        states={"train_state": Trained()}, sd_adapter=adapter, base_folder=job["folder"],
    )  # fmt: skip
    manager.save(7, last_step=job["model_only"])
    manager.close()
    hf_tensors = adapter.to_hf(dict(model.state_dict()))
    save_file({name: one.detach().contiguous().clone() for name, one in hf_tensors.items()}, job["hf"])
    moments = {name: one for name, one in optimizers.state_dict().items() if torch.is_tensor(one)}
    return {"own": digests(model.state_dict()), "optimizer": digests(moments), "logits": logits(model, job)}


class Trained:
    def state_dict(self):
        return {"step": 7, "ntokens_seen": 1234}

    def load_state_dict(self, state):
        raise NotImplementedError


class Loader:
    def state_dict(self):
        import pickle

        return {"dp_rank_0": pickle.dumps({"at": 3}), "world_size": 1}

    def load_state_dict(self, state):
        raise NotImplementedError


def start():
    """What takes the place of a GPU's kernels."""
    torch.set_num_threads(1)
    torch.compiler.set_stance("force_eager")
    torch.Tensor.bfloat16 = lambda self: self  # experts compute in float32, as the rest
    GroupedExperts._grouped_mm = plain_grouped_mm


def main():
    start()
    found = []
    for job in json.load(sys.stdin):
        try:
            found.append({"load": load, "save": save}[job["do"]](job))
        except BaseException:  # torch's own errors of a rank are none of Exception
            found.append({"error": traceback.format_exc()})
    os.write(sys.__stdout__.fileno(), b"\nFOUND " + json.dumps(found).encode() + b"\n")


if __name__ == "__main__":
    main()
