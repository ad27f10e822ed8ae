"""The peers: what other tools do for the same jobs, called as their documentation says, each made durable at the end.

PyTorch's own ways between its containers; Orbax, transformers, mergekit and model-signing; MaxText's way from and to
Hugging Face, which transposes whole tensors with numpy and saves with Orbax; and for T5X and PaxML the script that
people write, which loads with tensorstore and transposes with numpy: all reads are started at once and awaited in turn,
as in T5X's own loader, so tensorstore decodes with all cores.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.files import make_durable

if TYPE_CHECKING:
    import numpy as np

_NAME = "model.pt"


def torch_save(source: str, target: str) -> Callable[[], None]:
    """Make the input `torch`: the state dict of a Hugging Face folder by torch.save."""
    import torch

    load = _loader(source)

    def run() -> None:
        Path(target).mkdir(parents=True)
        torch.save(load(), Path(target) / _NAME)
        make_durable(Path(target))

    return run


def torch_to_dcp(source: str, target: str) -> Callable[[], None]:
    """torch_save_to_dcp."""
    from torch.distributed.checkpoint.format_utils import torch_save_to_dcp

    def run() -> None:
        torch_save_to_dcp(Path(source) / _NAME, target)
        make_durable(Path(target))

    return run


def dcp_to_torch(source: str, target: str) -> Callable[[], None]:
    """dcp_to_torch_save."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    def run() -> None:
        dcp_to_torch_save(source, target)
        make_durable(Path(target))

    return run


def dcp_to_safetensors(source: str, target: str) -> Callable[[], None]:
    """dcp.load into a state dict of empty tensors, then save_file."""
    import torch
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import save_file

    def run() -> None:
        held = dcp.FileSystemReader(source).read_metadata().state_dict_metadata
        state = {name: torch.empty(one.size, dtype=one.properties.dtype) for name, one in held.items()}
        dcp.load(state, checkpoint_id=source)
        save_file(state, target)
        make_durable(Path(target))

    return run


def safetensors_to_dcp(source: str, target: str) -> Callable[[], None]:
    """load_file of each shard, then dcp.save."""
    import torch.distributed.checkpoint as dcp

    load = _loader(source)

    def run() -> None:
        dcp.save(load(), checkpoint_id=target)
        make_durable(Path(target))

    return run


def torch_to_safetensors(source: str, target: str) -> Callable[[], None]:
    """torch.load(mmap=True), then save_file."""
    import torch
    from safetensors.torch import save_file

    def run() -> None:
        save_file(torch.load(Path(source) / _NAME, mmap=True, weights_only=True), target)
        make_durable(Path(target))

    return run


def _loader(source: str) -> Callable[[], dict[str, Any]]:
    from safetensors.torch import load_file

    def load() -> dict[str, Any]:
        state: dict[str, Any] = {}
        for shard in sorted(Path(source).glob("*.safetensors")):
            state |= load_file(shard)
        return state

    return load


_BIN = Path(sys.executable).parent


def safetensors_to_orbax(source: str, target: str) -> Callable[[], None]:
    """Load every shard with safetensors, save the whole with StandardCheckpointer."""
    import orbax.checkpoint as ocp
    from safetensors.flax import load_file

    def run() -> None:
        tree = {}
        for shard in sorted(Path(source).glob("*.safetensors")):
            tree |= load_file(shard)
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(Path(target).resolve(), tree)
            checkpointer.wait_until_finished()
        make_durable(Path(target))

    return run


def orbax_to_safetensors(source: str, target: str) -> Callable[[], None]:
    """Restore the whole with StandardCheckpointer, save it with safetensors."""
    import orbax.checkpoint as ocp
    from safetensors.flax import save_file

    def run() -> None:
        with ocp.StandardCheckpointer() as checkpointer:
            tree = checkpointer.restore(Path(source).resolve())
        save_file(tree, target)
        make_durable(Path(target))

    return run


def transformers_reshard(source: str, target: str, part: str) -> Callable[[], None]:
    """from_pretrained, then save_pretrained with smaller shards."""
    from transformers import AutoModelForCausalLM

    def run() -> None:
        model = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
        model.save_pretrained(target, max_shard_size=int(part))
        make_durable(Path(target))

    return run


def transformers_dequantize(source: str, target: str) -> Callable[[], None]:
    """from_pretrained of fp8 weights, dequantised to bfloat16, then save_pretrained in the names of its modules."""
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config

    def run() -> None:
        stated = json.loads((Path(source) / "config.json").read_text())["quantization_config"]
        wanted = FineGrainedFP8Config(
            dequantize=True, modules_to_not_convert=stated["modules_to_not_convert"]
        )
        model = AutoModelForCausalLM.from_pretrained(source, dtype="auto", quantization_config=wanted)
        model.save_pretrained(target, save_original_format=False)  # it cannot undo the dequantisation
        make_durable(Path(target))

    return run


def mergekit_reshard(source: str, target: str, part: str) -> Callable[[], None]:
    """mergekit-yaml with a passthrough merge of one model; its shards are counted in numbers of two bytes."""
    recipe = Path(target).with_suffix(".yaml")
    recipe.write_text(f"merge_method: passthrough\ndtype: bfloat16\nmodels:\n  - model: {source}\n")
    options = ("--no-copy-tokenizer", "--out-shard-size", str(int(part) // 2))

    def run() -> None:
        subprocess.run([_BIN / "mergekit-yaml", recipe, target, *options], check=True)
        make_durable(Path(target))

    return run


def sign(source: str, target: str) -> Callable[[], None]:
    """Make the input `signed`: a model that wherry wrote, with its sidecar, signed by model-signing with BLAKE3.

    The command `model_signing` has no option for the algorithm and always hashes with SHA-256; its library has one.
    """
    import model_signing

    folder = Path(target)

    def run() -> None:
        folder.mkdir(parents=True)
        convert = (
            sys.executable, "-m", "wherry.cli", "convert", source, folder / "model", "--to", "huggingface",
        )  # fmt: skip
        subprocess.run([*convert, "--quiet"], check=True)
        private = _write_keys(folder)
        hashing = model_signing.hashing.Config().use_file_serialization(hashing_algorithm="blake3")
        signing = model_signing.signing.Config().use_elliptic_key_signer(private_key=private)
        signing.set_hashing_config(hashing).sign(folder / "model", folder / "model.sig")

    return run


def verify_signature(source: str) -> Callable[[], None]:
    """Verify the input `signed` with model-signing, which takes the algorithm from the signature."""
    import model_signing

    folder = Path(source)

    def run() -> None:
        verifying = model_signing.verifying.Config()
        verifying.use_elliptic_key_verifier(public_key=folder / "public.pem").verify(
            folder / "model", folder / "model.sig"
        )

    return run


def _write_keys(folder: Path) -> Path:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key, pem = ec.generate_private_key(ec.SECP256R1()), serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    public = key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo)
    (folder / "private.pem").write_bytes(private)
    (folder / "public.pem").write_bytes(public)
    return folder / "private.pem"


# Names in a layer of Hugging Face → names in MaxText's stacked layer.
_KERNELS = {
    "self_attn.q_proj": ("self_attention", "query"), "self_attn.k_proj": ("self_attention", "key"),
    "self_attn.v_proj": ("self_attention", "value"), "self_attn.o_proj": ("self_attention", "out"),
    "mlp.gate_proj": ("mlp", "wi_0"), "mlp.up_proj": ("mlp", "wi_1"), "mlp.down_proj": ("mlp", "wo"),
}  # fmt: skip
_SCALES = {
    "input_layernorm": "pre_self_attention_layer_norm",
    "post_attention_layernorm": "post_self_attention_layer_norm",
}
_HEADS = ("query", "key", "value")


def huggingface_to_maxtext(source: str, target: str) -> Callable[[], None]:
    """MaxText's own way: whole tensors are transposed and stacked with numpy, then saved by Orbax's CheckpointManager.

    The target has `run`, the folder of the CheckpointManager, and `llama.yml`, the model's config for MaxText.
    """
    import jax
    import numpy as np
    import orbax.checkpoint as ocp
    from safetensors.numpy import load_file

    config = json.loads((Path(source) / "config.json").read_text())
    size = config["hidden_size"] // config["num_attention_heads"]

    def kernel(name: str, array: np.ndarray) -> np.ndarray:
        if name in _HEADS:
            array = array.T.reshape(array.shape[1], -1, size)
            return (array / np.sqrt(size)).astype(array.dtype) if name == "query" else array
        return array.T.reshape(-1, size, array.shape[0]) if name == "out" else array.T

    def run() -> None:
        state: dict[str, np.ndarray] = {}
        for shard in sorted(Path(source).glob("*.safetensors")):
            state |= load_file(shard)

        def stacked(name: str, move: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
            layers = range(config["num_hidden_layers"])
            return np.stack([move(state[f"model.layers.{layer}.{name}.weight"]) for layer in layers], axis=1)

        layers: dict[str, Any] = {name: {"scale": stacked(old, np.asarray)} for old, name in _SCALES.items()}
        for old, (block, name) in _KERNELS.items():
            array = stacked(old, lambda array, name=name: kernel(name, array))
            layers.setdefault(block, {})[name] = {"kernel": array}
        decoder = {
            "layers": layers,
            "decoder_norm": {"scale": state["model.norm.weight"]},
            "logits_dense": {"kernel": state["lm_head.weight"].T},
        }
        params = {"decoder": decoder, "token_embedder": {"embedding": state["model.embed_tokens.weight"]}}
        tree = {"params": {"params": params}, "step": np.int32(0), "opt_state": {}}
        folder = Path(target).resolve()
        folder.mkdir(parents=True)
        with ocp.CheckpointManager(folder / "run", item_names=("items",)) as manager:
            arrays = jax.tree_util.tree_map(jax.numpy.asarray, tree)
            manager.save(0, args=ocp.args.Composite(items=ocp.args.PyTreeSave(arrays)))
            manager.wait_until_finished()
        (folder / "llama.yml").write_text(json.dumps(_maxtext_config(config), indent=1))
        make_durable(folder)

    return run


def _maxtext_config(config: dict[str, Any]) -> dict[str, Any]:
    """The config of a Llama for MaxText; JSON is YAML too."""
    return {
        "base_num_decoder_layers": config["num_hidden_layers"], "base_emb_dim": config["hidden_size"],
        "base_num_query_heads": config["num_attention_heads"],
        "base_num_kv_heads": config["num_key_value_heads"], "base_mlp_dim": config["intermediate_size"],
        "head_dim": config["hidden_size"] // config["num_attention_heads"], "vocab_size": config["vocab_size"],
        "mlp_activations": ["silu", "linear"], "enable_dropout": False, "logits_via_embedding": False,
        "normalization_layer_epsilon": 1e-6, "rope_max_timescale": 10000, "decoder_block": "llama2",
        "model_name": "default", "scan_layers": True, "param_scan_axis": 1, "weight_dtype": "bfloat16",
    }  # fmt: skip


def maxtext_to_huggingface(source: str, target: str) -> Callable[[], None]:
    """MaxText's own way back: Orbax restores the whole tree, numpy transposes each layer, safetensors saves it."""
    import numpy as np
    import orbax.checkpoint as ocp
    from safetensors.numpy import save_file

    def back(name: str, array: np.ndarray) -> np.ndarray:
        if name == "query":
            array = (array * np.sqrt(array.shape[-1])).astype(array.dtype)
        rows = array.shape[0] if name != "out" else array.shape[0] * array.shape[1]
        return np.ascontiguousarray(array.reshape(rows, -1).T)

    def run() -> None:
        with ocp.CheckpointManager(Path(source).resolve() / "run") as manager:
            tree = manager.restore(0, args=ocp.args.Composite(items=ocp.args.PyTreeRestore()))["items"]
        params = tree["params"]["params"]
        decoder, layers = params["decoder"], params["decoder"]["layers"]
        state = {
            "model.embed_tokens.weight": np.asarray(params["token_embedder"]["embedding"]),
            "model.norm.weight": np.asarray(decoder["decoder_norm"]["scale"]),
            "lm_head.weight": np.ascontiguousarray(np.asarray(decoder["logits_dense"]["kernel"]).T),
        }
        for layer in range(layers["mlp"]["wo"]["kernel"].shape[1]):
            for new, old in _SCALES.items():
                scale = np.asarray(layers[old]["scale"])[:, layer]
                state[f"model.layers.{layer}.{new}.weight"] = np.ascontiguousarray(scale)
            for new, (block, old) in _KERNELS.items():
                kernel = np.asarray(layers[block][old]["kernel"])[:, layer]
                state[f"model.layers.{layer}.{new}.weight"] = back(old, kernel)
        save_file(state, target)
        make_durable(Path(target))

    return run


_STACK = ".x_layers_0."
# Name's end → order of PaxML's axes in MaxText; of everything else in the stack, the layer becomes the second axis.
_ORDERS = {"logits_ffn.linear.w": (1, 0), "combined_qkv.w": (2, 0, 1, 3, 4), "post.w": (2, 0, 3, 1)}


def t5x_to_huggingface(source: str, target: str) -> Callable[[], None]:
    """Read every array, transpose the kernels as torch has them, save the whole; names stay as they are."""
    import numpy as np
    from safetensors.numpy import save_file

    def run() -> None:
        tensors = {
            name: np.ascontiguousarray(array.T) if name.endswith((".kernel", ".rel_embedding")) else array
            for name, array in _arrays(Path(source))
        }
        save_file(tensors, target)
        make_durable(Path(target))

    return run


def paxml_to_maxtext(source: str, target: str) -> Callable[[], None]:
    """Read every array, move its axes to MaxText's places, save the whole with StandardCheckpointer."""
    import numpy as np
    import orbax.checkpoint as ocp

    def run() -> None:
        (state,) = Path(source).glob("checkpoint_*/state")
        tree = {name: np.ascontiguousarray(_move_array(name, array)) for name, array in _arrays(state)}
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(Path(target).resolve(), tree)
            checkpointer.wait_until_finished()
        make_durable(Path(target))

    return run


def _move_array(name: str, array: np.ndarray) -> np.ndarray:
    import numpy as np

    for end, order in _ORDERS.items():
        if name.endswith(end):
            return array.transpose(order)
    return np.moveaxis(array, 0, 1) if _STACK in name else array


def _arrays(folder: Path) -> Iterator[tuple[str, np.ndarray]]:
    import tensorstore as ts

    names = [path.parent.name for path in sorted(folder.glob("*/.zarray"))]
    specs = [{"driver": "zarr", "kvstore": {"driver": "file", "path": f"{folder / name}/"}} for name in names]
    opened = [ts.open(spec, open=True) for spec in specs]
    reads = [store.result().read() for store in opened]
    while reads:
        yield names.pop(0), reads.pop(0).result()
