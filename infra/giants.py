"""Plans of giants: checkpoints of hundreds of gigabytes that are only metadata, and what planning them takes.

    python infra/giants.py FOLDER            make the checkpoints (sparse files: a few MB on disk) and print the table
    python infra/giants.py FOLDER --docs     the same, and put the table into docs/speed.md

Each plan is one `wherry plan --workers 16` from a bucket to a bucket, in a process of its own; its processor seconds
and peak memory are measured. The bucket is the folder, behind the double of `benchmarks.scale`. The files have true
names, sizes, headers and shapes, and holes instead of weights. Prices are those of docs/prices.example.toml.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import wherry
from wherry.core.tensorspec import TensorSpec
from wherry.core.units import show_size
from wherry.formats.registry import find_format
from wherry.integrations.containers.safetensors import header
from wherry.integrations.formats.huggingface.weights import spread_tensors
from wherry.mover.map_writer import writer_of
from wherry.store.local_store import locate

Shapes = dict[str, tuple[int, ...]]
HERE = Path(__file__).resolve().parent
DOCS = HERE.parent / "docs" / "speed.md"
WORKERS = 16
TARGET = "memory://giants/out"  # a store, so that no disk is too small
BUCKETS = ("s3://source", "s3://target/out")
PRICES = HERE.parent / "docs" / "prices.example.toml"

LLAMA_405B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 16384, "intermediate_size": 53248,
    "num_hidden_layers": 126, "num_attention_heads": 128, "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 128256, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": False,
    "max_position_embeddings": 131072, "hidden_act": "silu", "torch_dtype": "bfloat16", "attention_bias": False,
    "mlp_bias": False, "rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}  # fmt: skip
DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": 7168,
    "num_hidden_layers": 61, "n_routed_experts": 256, "moe_intermediate_size": 2048, "intermediate_size": 18432,
    "first_k_dense_replace": 3, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128, "v_head_dim": 128, "num_attention_heads": 128, "vocab_size": 129280,
    "torch_dtype": "bfloat16", "n_shared_experts": 1,
}  # fmt: skip
MOE_1T: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 7168,
    "num_hidden_layers": 60, "num_experts": 384, "moe_intermediate_size": 2048, "intermediate_size": 18432,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 163840,
    "torch_dtype": "bfloat16", "num_experts_per_tok": 8, "norm_topk_prob": True, "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6, "rope_theta": 1e6, "hidden_act": "silu", "decoder_sparse_step": 1, "mlp_only_layers": [],
    "max_position_embeddings": 131072, "attention_bias": False,
}  # fmt: skip


def attention(config: Mapping[str, Any], at: str) -> Shapes:
    """Grouped-query attention and the norms of a layer."""
    embed, head = config["hidden_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    return {
        f"{at}.self_attn.q_proj.weight": (queries, embed), f"{at}.self_attn.k_proj.weight": (keys, embed),
        f"{at}.self_attn.v_proj.weight": (keys, embed), f"{at}.self_attn.o_proj.weight": (embed, queries),
        f"{at}.input_layernorm.weight": (embed,), f"{at}.post_attention_layernorm.weight": (embed,),
    }  # fmt: skip


def gated_shapes(at: str, embed: int, ffn: int) -> Shapes:
    """A gated feed-forward layer."""
    return {
        f"{at}.gate_proj.weight": (ffn, embed),
        f"{at}.up_proj.weight": (ffn, embed),
        f"{at}.down_proj.weight": (embed, ffn),
    }


def ends(config: Mapping[str, Any]) -> Shapes:
    """Embedding, last norm and head."""
    embed, vocab = config["hidden_size"], config["vocab_size"]
    return {
        "model.embed_tokens.weight": (vocab, embed),
        "model.norm.weight": (embed,),
        "lm_head.weight": (vocab, embed),
    }


def llama(config: Mapping[str, Any]) -> Shapes:
    """A dense Llama."""
    shapes = ends(config)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        shapes |= attention(config, at)
        shapes |= gated_shapes(f"{at}.mlp", config["hidden_size"], config["intermediate_size"])
    return shapes


def qwen_moe(config: Mapping[str, Any]) -> Shapes:
    """A mixture of experts in every layer."""
    shapes, embed, head = ends(config), config["hidden_size"], config["head_dim"]
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        shapes |= attention(config, at)
        shapes |= {f"{at}.self_attn.{name}_norm.weight": (head,) for name in "qk"}
        shapes[f"{at}.mlp.gate.weight"] = (config["num_experts"], embed)
        for expert in range(config["num_experts"]):
            shapes |= gated_shapes(f"{at}.mlp.experts.{expert}", embed, config["moe_intermediate_size"])
    return shapes


def deepseek(config: Mapping[str, Any]) -> Shapes:
    """Latent attention; dense layers first, then experts. Weights only, without the scales of blocks."""
    shapes, embed, heads = ends(config), config["hidden_size"], config["num_attention_heads"]
    rope, nope = config["qk_rope_head_dim"], config["qk_nope_head_dim"]
    rank, value = config["kv_lora_rank"], config["v_head_dim"]
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        shapes |= {
            f"{at}.self_attn.q_a_proj.weight": (config["q_lora_rank"], embed),
            f"{at}.self_attn.q_a_layernorm.weight": (config["q_lora_rank"],),
            f"{at}.self_attn.q_b_proj.weight": (heads * (rope + nope), config["q_lora_rank"]),
            f"{at}.self_attn.kv_a_proj_with_mqa.weight": (rank + rope, embed),
            f"{at}.self_attn.kv_a_layernorm.weight": (rank,),
            f"{at}.self_attn.kv_b_proj.weight": (heads * (nope + value), rank),
            f"{at}.self_attn.o_proj.weight": (embed, heads * value),
            f"{at}.input_layernorm.weight": (embed,),
            f"{at}.post_attention_layernorm.weight": (embed,),
        }
        if layer < config["first_k_dense_replace"]:
            shapes |= gated_shapes(f"{at}.mlp", embed, config["intermediate_size"])
            continue
        shapes[f"{at}.mlp.gate.weight"] = (config["n_routed_experts"], embed)
        shapes[f"{at}.mlp.gate.e_score_correction_bias"] = (config["n_routed_experts"],)
        shapes |= gated_shapes(f"{at}.mlp.shared_experts", embed, config["moe_intermediate_size"])
        for expert in range(config["n_routed_experts"]):
            shapes |= gated_shapes(f"{at}.mlp.experts.{expert}", embed, config["moe_intermediate_size"])
    return shapes


def hugging_face(folder: Path, config: Mapping[str, Any], shapes: Shapes, dtype: str = "bfloat16") -> Path:
    """A Hugging Face folder whose shards have headers, and holes for weights.

    Args:
        folder: to make.
        config: contents of config.json.
        shapes: name → extents.
        dtype: of matrices; vectors are bfloat16.
    """
    if folder.exists():
        return folder
    folder.mkdir(parents=True)
    specs = [
        TensorSpec((name,), shape, dtype if len(shape) > 1 else "bfloat16") for name, shape in shapes.items()
    ]
    plan = spread_tensors(specs, 5_000_000_000, "model")
    for name, group in plan.files.items():
        head = header.build(header.in_order(group), {"format": "pt"})
        hollow(folder / name, head, len(head) + sum(map(header.stored_bytes, group)))
    assert plan.index is not None
    (folder / plan.index[0]).write_bytes(plan.index[1]())
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def hollow(path: Path, head: bytes, size: int) -> None:
    """A file of a size that has only its first bytes on disk."""
    with path.open("xb") as file:
        file.write(head)
        file.truncate(size)


def maxtext(step: Path, origin: Path) -> Path:
    """The MaxText step that a conversion would make, with holes for chunks of 1 GiB.

    Args:
        step: to make.
        origin: a Hugging Face folder.
    """
    if step.exists():
        return step
    step.parent.mkdir(parents=True)
    plan = wherry.plan(origin, step, to="maxtext", options={"ocdbt": False, "chunks": "1024"})
    writer = writer_of(find_format("maxtext"), locate(step), plan.manifest, plan.options)
    writer.finish()
    writer.close()
    for found in step.rglob("zarr.json"):
        array = json.loads(found.read_text())
        hollow_chunks(found.parent, array["shape"], array["chunk_grid"]["configuration"]["chunk_shape"], 2)
    return step


def hollow_chunks(folder: Path, shape: list[int], chunks: list[int], width: int) -> None:
    """The chunk files of a zarr 3 array, of elements of some bytes; scalars are there already."""
    counts = [-(-extent // chunk) for extent, chunk in zip(shape, chunks, strict=True)]
    for index in itertools.product(*map(range, counts)):
        path = folder.joinpath("c", *map(str, index))
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            hollow(path, b"", width * math.prod(chunks))


def paxml_gpt3(folder: Path) -> Path:
    """GPT-3 175B of PaxML 1.1 with Adam: a zarr folder for each array, uncompressed, a chunk for each layer."""
    step = folder / "checkpoints" / "checkpoint_00004000"
    if step.exists():
        return step
    layers, embed, ffn, heads, dim, vocab, positions = 96, 12288, 49152, 96, 128, 51200, 2048
    single = {
        "final_ln.bias": (embed,), "final_ln.scale": (embed,), "position_emb.emb_var": (positions, embed),
        "softmax.logits_ffn.linear.w": (embed, vocab),
    }  # fmt: skip
    rows = {
        "ff_layer.ffn_layer1.bias.b": (ffn,), "ff_layer.ffn_layer1.linear.w": (embed, ffn),
        "ff_layer.ffn_layer2.bias.b": (embed,), "ff_layer.ffn_layer2.linear.w": (ffn, embed),
        "ff_layer.layer_norm.bias": (embed,), "ff_layer.layer_norm.scale": (embed,),
        "layer_norm.bias": (embed,), "layer_norm.scale": (embed,),
        "self_attention.combined_qkv.b": (3, heads, dim), "self_attention.combined_qkv.w": (3, embed, heads, dim),
        "self_attention.post.b": (embed,), "self_attention.post.w": (embed, heads, dim),
    }  # fmt: skip
    stacked = {f"transformer.repeat.sub.x_layers_0.{name}": (layers, *shape) for name, shape in rows.items()}
    state = step / "state"
    state.mkdir(parents=True)
    zarr_array(state / "step", (), "<u4")
    for name, shape in {**single, **stacked}.items():
        zarr_array(state / f"mdl_vars.params.lm.{name}", shape, "<f4")
    for group, variables in {"no_prefix": single, f"p#{layers}#i-1": stacked}.items():
        for at in range(4):
            zarr_array(
                state / f"opt_states_0.{group}_{at}.count", () if group == "no_prefix" else (layers,), "<i4"
            )
        for moment in "mv":
            for name, shape in variables.items():
                zarr_array(state / f"opt_states_0.{group}_2.{moment}.params.lm.{name}", shape, "<f4")
    (step / "metadata").mkdir()
    (step / "metadata" / "metadata").write_text(json.dumps({"version": 1.0}))
    (step / "commit_success.txt").touch()  # as in a bucket, where the plan finds it
    return step


def zarr_array(folder: Path, shape: tuple[int, ...], dtype: str) -> None:
    """A zarr 2 array of 4-byte elements with a chunk for each element of its first axis, if it has several axes."""
    chunks = (1, *shape[1:]) if len(shape) > 1 else shape
    folder.mkdir()
    rows = {
        "zarr_format": 2, "shape": shape, "chunks": chunks, "dtype": dtype, "compressor": None, "fill_value": None,
        "filters": None, "order": "C", "dimension_separator": ".",
    }  # fmt: skip
    (folder / ".zarray").write_text(json.dumps(rows))
    count = shape[0] if len(shape) > 1 else 1
    for index in range(count):
        name = ".".join([str(index), *("0" for _ in shape[1:])]) if shape else "0"
        hollow(folder / name, b"", 4 * math.prod(chunks))


@dataclass(frozen=True)
class Giant:
    """One row of the table.

    Attributes:
        title: what is converted.
        source: the checkpoint.
        words: of the command line, after source and target.
    """

    title: str
    source: Path
    words: tuple[str, ...]


def giants(folder: Path) -> Iterator[Giant]:
    """Make the checkpoints and name the conversions."""
    small = ("--set", "max_shard_size=1GB")
    dense = hugging_face(folder / "llama-405b", LLAMA_405B, llama(LLAMA_405B))
    yield Giant("Llama 405B, Hugging Face → DCP", dense, ("--to", "dcp"))
    yield Giant("Llama 405B, Hugging Face → Hugging Face of 1 GB", dense, ("--to", "hf", *small))
    yield Giant("Llama 405B, Hugging Face → MaxText, scanned", dense, ("--to", "maxtext"))
    scanned = maxtext(folder / "llama-405b-maxtext" / "0", dense)
    config = ("--family", "llama", "--config", str(dense / "config.json"))
    yield Giant(
        "Llama 405B, MaxText, scanned → Hugging Face of 1 GB", scanned, ("--to", "hf", *small, *config)
    )
    latent = hugging_face(folder / "deepseek-v3", DEEPSEEK_V3, deepseek(DEEPSEEK_V3), "float8_e4m3fn")
    yield Giant("DeepSeek-V3 (8 bits), Hugging Face → DCP", latent, ("--to", "dcp", "--family", "none"))
    experts = hugging_face(folder / "moe-1t", MOE_1T, qwen_moe(MOE_1T))
    yield Giant("1 T parameters, 384 experts, Hugging Face → DCP", experts, ("--to", "dcp"))
    pax = paxml_gpt3(folder / "gpt3-175b")
    yield Giant("GPT-3 175B with Adam, PaxML → MaxText", pax, ("--to", "maxtext"))
    yield Giant("GPT-3 175B with Adam, PaxML → DCP", pax, ("--to", "dcp", "--set", "join=."))


# Started from a small process, because the peak memory of a process counts that of the one which started it.
MEASURE = """
import resource, subprocess, sys
code = subprocess.call(sys.argv[1:])
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(used.ru_utime + used.ru_stime, used.ru_maxrss << 10, file=sys.stderr)
sys.exit(code)
"""


@dataclass(frozen=True)
class Planned:
    """A plan and what it took.

    Attributes:
        giant: what was planned.
        plan: the JSON of `wherry plan`.
        seconds: processor seconds of the process, which other load does not change.
        memory: peak resident bytes of the process.
    """

    giant: Giant
    plan: dict[str, Any]
    seconds: float
    memory: int


@contextmanager
def bucket_of(folder: Path) -> Generator[dict[str, str]]:
    """The variables that lead to a bucket of which the objects are the files of a folder."""
    words = ["-m", "benchmarks.scale.server", "--folder", str(folder)]
    process = subprocess.Popen([sys.executable, *words], cwd=HERE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        url = f"http://127.0.0.1:{int(process.stdout.readline())}"
        keys = {"AWS_ACCESS_KEY_ID": "giants", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}
        yield {**os.environ, **keys, "AWS_ENDPOINT_URL": url}
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def plan_giant(giant: Giant, folder: Path | None = None) -> Planned:
    """Plan one conversion in a process of its own.

    Args:
        giant: the conversion.
        folder: in which all checkpoints lie, to plan from a bucket; by default the plan reads the files.

    Raises:
        SystemExit: the plan was refused.
    """
    places, variables = (str(giant.source), TARGET), {**os.environ}
    with ExitStack() as stack:
        if folder is not None:
            variables = stack.enter_context(bucket_of(folder))
            places = (f"{BUCKETS[0]}/{giant.source.relative_to(folder).as_posix()}", BUCKETS[1])
        line = [sys.executable, "-m", "wherry.cli", "plan", *places, *giant.words,
                "--workers", str(WORKERS), "--price", str(PRICES), "--json"]  # fmt: skip
        command = [sys.executable, "-c", MEASURE, *line]
        done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    found = json.loads(done.stdout)
    if "error" in found:
        raise SystemExit(f"{giant.title}: {found['what']}\ncure: {found['cure']}")
    seconds, memory = done.stderr.split()[-2:]
    return Planned(giant, found, float(seconds), int(memory))


def row(one: Planned) -> str:
    """A row of the table."""
    workers, plan = one.plan["workers"], one.plan
    units, egress = len(workers["units"]), sum(store["egress"] for store in plan["stores"])
    cells = (
        one.giant.title, f"{plan['tensors']:,}", show_size(plan["bytes_out"]), f"{units:,}" if units else "none",
        f"{workers['requests']:,}", str(workers["workers"]), f"{workers['seconds'] / 60:.0f} min",
        show_size(workers["peak_memory"]), show_size(egress), f"{plan['cost']['total']:.0f}",
        f"{one.seconds:.1f}", show_size(one.memory),
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


COLUMNS = (
    "conversion", "tensors", "bytes", "units", "requests", "workers", "time", "memory each", "egress", "price",
    "plan, CPU s", "memory",
)  # fmt: skip
HEAD = "\n".join(f"| {' | '.join(cells)} |" for cells in (COLUMNS, ["---", *["---:"] * (len(COLUMNS) - 1)]))


def put_into_docs(lines: Iterable[str]) -> None:
    """Replace the table between the marks of the page."""
    table = "\n".join(["<!-- giants:start -->", "", *lines, "", "<!-- giants:end -->"])
    pattern = r"<!-- giants:start -->.*<!-- giants:end -->"
    DOCS.write_text(re.sub(pattern, lambda _: table, DOCS.read_text(), flags=re.DOTALL))


def main() -> None:
    """Make the checkpoints, plan the conversions and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--docs", action="store_true", help="put the table into docs/speed.md")
    given = parser.parse_args()
    folder = given.folder.resolve()
    rows: list[str] = []
    for giant in giants(folder):
        rows.append(row(plan_giant(giant, folder)))
        print(rows[-1], flush=True)
    if given.docs:
        put_into_docs([*HEAD.splitlines(), *rows])


if __name__ == "__main__":
    main()
