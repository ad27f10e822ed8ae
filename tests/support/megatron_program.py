"""Runs where Megatron-Core is installed: loads checkpoints into GPTModel, or saves new ones, and prints logits.

Megatron-Core trains on GPUs. On a processor its own code runs with gloo and one rank, in place of five things of CUDA:
waiting for a stream, the number of a device, states of random numbers that only dropout draws from, a product of
Transformer Engine that its router names without importing it, and the mask of a window, which it makes on a GPU.

Two more are no matter of a GPU: without Transformer Engine, megatron-core 0.16.1 cannot build its own layers with
latent attention at all (`transformer/multi_latent_attention.py`). Line 162 gives the product of queries and keys two
sizes, `k_channels` and `v_channels`, which Transformer Engine's product takes and Megatron's `DotProductAttention` does
not: here it takes them. Line 185 compares with a class that is None where Transformer Engine is not installed, since
the module believes that it is: here the module is corrected. All else of latent attention is Megatron's.

The program reads a list of jobs as JSON from its first argument: {"load": folder}, with "again": folder to save what
was loaded, or {"save": folder, "args": arguments}, and the token ids from its second.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch


def start() -> None:
    """One rank of gloo, and stand-ins for CUDA."""
    torch.cuda.synchronize = lambda *_args: None
    torch.cuda.current_device = lambda: torch.device("cpu")
    place = Path(tempfile.mkdtemp(), "ranks").as_uri()
    torch.distributed.init_process_group("gloo", init_method=place, rank=0, world_size=1)
    from megatron.core import parallel_state
    from megatron.core.extensions import transformer_engine
    from megatron.core.fusions import fused_softmax
    from megatron.core.models import backends
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils

    CudaRNGStatesTracker.fork = lambda *_args: contextlib.nullcontext()
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    fused_softmax.get_sliding_window_causal_mask = window_mask
    backends.DotProductAttention = latent_product()
    multi_latent_attention.HAVE_TE = transformer_engine.HAVE_TE
    parallel_state.initialize_model_parallel(1, 1)


def window_mask(rows: int, columns: int, window: tuple[int, int]) -> torch.Tensor:
    """What a query does not attend to, as `transformer.utils.get_sliding_window_causal_mask` has it."""
    whole = torch.ones(rows, columns, dtype=torch.bool)
    before = torch.triu(whole, diagonal=columns - rows - window[0])
    return ~torch.tril(before, diagonal=columns - rows + window[1])


def latent_product() -> Any:
    """Megatron's own product of attention, whose heads of keys and values may have sizes of their own."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    class LatentProduct(DotProductAttention):
        """The scores ask for no size, as latent attention gives their scale; the sum has the heads of the values."""

        def __init__(self, *args: Any, k_channels: Any = None, v_channels: Any = None, **named: Any) -> None:
            super().__init__(*args, **named)
            if v_channels is not None:
                assert k_channels is not None
                assert named["softmax_scale"] is not None
                self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition

    return LatentProduct


def model_of(args: Namespace) -> Any:
    """GPTModel as Megatron's training program builds it from these arguments, of Megatron's own layers."""
    from megatron.core.models.gpt.gpt_model import GPTModel

    def said(name: str, otherwise: Any = None) -> Any:
        return getattr(args, name, otherwise)

    config = config_of(args)
    return GPTModel(
        config, layers_of(args, config), vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        position_embedding_type=args.position_embedding_type, rotary_base=said("rotary_base", 10000),
        rotary_percent=said("rotary_percent", 1.0), rope_scaling=said("use_rope_scaling", False),
        rope_scaling_factor=said("rope_scaling_factor") or 8.0,
        seq_len_interpolation_factor=said("rotary_seq_len_interpolation_factor"),
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
    ).eval()  # fmt: skip


def layers_of(args: Namespace, config: Any) -> Any:
    """What the layers are made of: all alike, or dense ones and ones with experts."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec

    if isinstance(config.moe_layer_freq, list):
        return get_gpt_decoder_block_spec(
            config, use_transformer_engine=False, normalization=args.normalization
        )
    return get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, moe_grouped_gemm=False, qk_layernorm=config.qk_layernorm,
        multi_latent_attention=config.multi_latent_attention, normalization=args.normalization,
    )  # fmt: skip


def config_of(args: Namespace) -> Any:
    """The arguments as `core_transformer_config_from_args` reads them."""
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    def said(name: str, otherwise: Any = None) -> Any:
        return getattr(args, name, otherwise)

    heads = said("num_query_groups") if args.group_query_attention else args.num_attention_heads
    latent = said("multi_latent_attention", False)
    stated = {
        "num_layers": args.num_layers, "hidden_size": args.hidden_size,
        "num_attention_heads": args.num_attention_heads, "num_query_groups": heads,
        "kv_channels": said("kv_channels"), "ffn_hidden_size": args.ffn_hidden_size,
        "normalization": args.normalization, "gated_linear_unit": args.swiglu or said("quick_geglu", False),
        "activation_func": activation_of(args),
        "activation_func_clamp_value": said("activation_func_clamp_value"),
        "glu_linear_offset": said("glu_linear_offset", 0.0),
        "softmax_type": said("softmax_type", "vanilla"), "window_size": said("window_size"),
        "window_attn_skip_freq": said("window_attn_skip_freq"),
        "add_bias_linear": args.add_bias_linear, "add_qkv_bias": said("add_qkv_bias", False),
        "qk_layernorm": said("qk_layernorm", False), "layernorm_epsilon": args.norm_epsilon,
        "use_cpu_initialization": True,
        "bias_activation_fusion": not args.swiglu and said("bias_gelu_fusion", False), "attention_dropout": 0.0,
        "hidden_dropout": 0.0, "attention_softmax_in_fp32": True,
        "rotary_interleaved": args.rotary_interleaved, "no_rope_freq": said("no_rope_freq"),
        **(experts_of(args) if said("num_experts") else {}),
        **(latent_of(args) if latent else {}),
    }  # fmt: skip
    config = (MLATransformerConfig if latent else TransformerConfig)(**stated)
    for name in (name for name in vars(args) if name.startswith("yarn_")):
        setattr(config, name, getattr(args, name))
    for name in ("yarn_mscale", "yarn_mscale_all_dim"):
        setattr(config, name, said(name))
    return config


def latent_of(args: Namespace) -> dict[str, Any]:
    """What the config states of latent attention. Megatron's parser has no rank of queries but a stated one."""
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    own = MLATransformerConfig.__annotations__
    return {"q_lora_rank": None, **{name: value for name, value in vars(args).items() if name in own}}


def experts_of(args: Namespace) -> dict[str, Any]:
    """What the config states of experts."""

    def said(name: str, otherwise: Any = None) -> Any:
        return getattr(args, name, otherwise)

    return {
        "num_moe_experts": args.num_experts,
        "moe_ffn_hidden_size": said("moe_ffn_hidden_size", args.ffn_hidden_size),
        "moe_router_topk": said("moe_router_topk"), "moe_router_pre_softmax": said("moe_router_pre_softmax"),
        "moe_shared_expert_intermediate_size": said("moe_shared_expert_intermediate_size"),
        "moe_shared_expert_gate": said("moe_shared_expert_gate", False),
        "moe_router_score_function": said("moe_router_score_function", "softmax"),
        "moe_router_enable_expert_bias": said("moe_router_enable_expert_bias", False),
        "moe_router_topk_scaling_factor": said("moe_router_topk_scaling_factor"),
        "moe_router_num_groups": said("moe_router_num_groups"),
        "moe_router_group_topk": said("moe_router_group_topk"),
        "moe_layer_freq": said("moe_layer_freq", 1),
        "moe_token_dispatcher_type": "allgather", "moe_router_load_balancing_type": "none",
    }  # fmt: skip


def activation_of(args: Namespace) -> Any:
    """As `core_transformer_config_from_args` chooses it."""
    from megatron.core.fusions.fused_bias_geglu import quick_gelu

    if getattr(args, "quick_geglu", False):
        return quick_gelu
    return torch.nn.functional.silu if args.swiglu else torch.nn.functional.gelu


def loaded(folder: str, again: str | None = None) -> Any:
    """A model with the parameters of a checkpoint; every one must be there, and none be left."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.validation import StrictHandling

    args = torch.load(Path(folder, "common.pt"), weights_only=False)["args"]
    model = model_of(args)
    found, one, other = dist_checkpointing.load(
        {"model": model.sharded_state_dict()}, folder, strict=StrictHandling.RETURN_ALL
    )
    odd = [name for name in (*one, *other) if "_extra_state" not in name]
    if odd:
        raise ValueError(f"missing or unexpected: {odd}")
    model.load_state_dict(found["model"], strict=False)
    if again:
        write(model, args, again)
    return model


def saved(folder: str, args: dict[str, Any]) -> Any:
    """A model of random parameters, saved."""
    torch.manual_seed(7)
    model = model_of(Namespace(**args))
    with torch.no_grad():
        biases = [one for name, one in model.named_buffers() if name.endswith("expert_bias")]
        for parameter in [*model.parameters(), *biases]:
            parameter.add_(0.05 * torch.randn_like(parameter))
    write(model, Namespace(**args), folder)
    return model


def write(model: Any, args: Namespace, folder: str) -> None:
    """Save a model as Megatron's training program does."""
    from megatron.core import dist_checkpointing

    Path(folder).mkdir(parents=True)
    state = {"args": args, "checkpoint_version": 3.0, "iteration": 10}
    dist_checkpointing.save({**state, "model": model.sharded_state_dict()}, folder)


def computed(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Logits of token ids."""
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    mask = torch.triu(torch.ones(1, 1, ids.shape[1], ids.shape[1], dtype=torch.bool), 1)
    with torch.no_grad():
        return model(ids, positions, mask)


def main() -> None:
    """Print the logits of every job as JSON, in the last line."""
    start()
    jobs, ids = json.loads(sys.argv[1]), torch.tensor(json.loads(sys.argv[2]))
    logits: list[Any] = []
    for job in jobs:
        model = loaded(job["load"], job.get("again")) if "load" in job else saved(job["save"], job["args"])
        logits.append(computed(model, ids).float().tolist())
    print(json.dumps(logits))


if __name__ == "__main__":
    main()
