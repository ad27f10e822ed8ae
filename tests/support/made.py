"""Checkpoints that the installed libraries write here, and what each holds: they stand for the corpus in a plain clone.

Each maker takes a folder that is not there yet and returns where the checkpoint lies and its tensors by key path.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import ml_dtypes
import numpy as np

from tests.support import lingua as lingua_files
from tests.support import paxml, t5x
from tests.support.tiny_models import tiny_model
from tests.support.torch import as_bytes, every_dtype, save, torch

Made = tuple[Path, Mapping[tuple[str, ...], bytes]]


def arrays() -> dict[str, np.ndarray]:
    """Flat names, several dtypes, a scalar and an array without elements."""
    rng = np.random.default_rng(3)
    wide = rng.standard_normal((33, 17)).astype(np.float32)
    return {
        "wide": wide,
        "half": wide[:5].astype(ml_dtypes.bfloat16),
        "counts": np.arange(24, dtype=np.int64).reshape(2, 3, 4),
        "step": np.asarray(7, np.int32),
    }


def nested() -> dict[str, object]:
    """The same arrays as a tree."""
    found = arrays()
    return {"params": {"layer": {"kernel": found["wide"], "bias": found["half"]}}, "counts": found["counts"]}


def bytes_of(tree: Mapping[str, object], at: tuple[str, ...] = ()) -> dict[tuple[str, ...], bytes]:
    """Canonical bytes of the leaves of a tree by key path."""
    found = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            found |= bytes_of(value, (*at, name))
        else:
            found[*at, name] = as_bytes(value) if torch.is_tensor(value) else np.asarray(value).tobytes()
    return found


def safetensors(folder: Path) -> Made:
    """One file of safetensors' own `save_file`."""
    from safetensors.numpy import save_file

    folder.mkdir()
    found = {name: array for name, array in arrays().items() if name != "half"}
    save_file(found, folder / "m.safetensors")
    return folder / "m.safetensors", bytes_of(found)


def npz(folder: Path) -> Made:
    """What numpy's `savez` writes."""
    folder.mkdir()
    found = {name: array for name, array in arrays().items() if name != "half"}
    np.savez(folder / "m.npz", **found)
    return folder / "m.npz", bytes_of(found)


def huggingface(folder: Path) -> Made:
    """A tiny Llama in several files, as transformers saves it."""
    model = tiny_model("llama")
    model.save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return folder, bytes_of(model.state_dict())


def torch_zip(folder: Path) -> Made:
    """torch.save, as it is by default."""
    folder.mkdir()
    torch.save(every_dtype(), folder / "m.pt")
    return folder / "m.pt", bytes_of(every_dtype())


def torch_legacy(folder: Path) -> Made:
    """torch.save, as it was before 1.6."""
    folder.mkdir()
    state = {name: tensor for name, tensor in every_dtype().items() if not name.startswith("float8")}
    torch.save(state, folder / "m.pt", _use_new_zipfile_serialization=False)
    return folder / "m.pt", bytes_of(state)


def dcp(folder: Path) -> Made:
    """torch.distributed.checkpoint of one rank."""
    state = {"model": lingua_files.model(), "step": torch.tensor(3)}
    return save(state, folder), {(".".join(path),): data for path, data in bytes_of(state).items()}


def lingua(folder: Path) -> Made:
    """A step folder of Meta Lingua with weights and optimizer."""
    step = lingua_files.step_folder(folder / "checkpoints" / "0000000007")
    return step, {}


def meta(folder: Path) -> Made:
    """Consolidated files of Meta."""
    folder.mkdir()
    rows = lingua_files.meta_files(folder / "m")
    return folder / "m", {
        (f"{part:02d}", name): as_bytes(tensor)
        for part, row in enumerate(rows)
        for name, tensor in row.items()
    }


def orbax(folder: Path) -> Made:
    """Orbax's standard checkpointer: one OCDBT database."""
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder, nested())
    return folder, bytes_of(nested())


def orbax_files(folder: Path) -> Made:
    """Orbax with a folder for each array."""
    import orbax.checkpoint as ocp

    checkpointer = ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False))
    checkpointer.save(folder, nested())
    return folder, bytes_of(nested())


def flax(folder: Path) -> Made:
    """One msgpack file of flax.training."""
    from flax import serialization

    folder.mkdir()
    (folder / "checkpoint_7").write_bytes(serialization.to_bytes(nested()))
    return folder / "checkpoint_7", bytes_of(nested())


def t5x_legacy(folder: Path) -> Made:
    """T5X's msgpack with arrays next to it, by its contract."""
    return t5x.save(folder / "checkpoint_7", t5x.arrays()), {}


def t5x_orbax(folder: Path) -> Made:
    """A train state of T5X as it saves it through Orbax."""
    import orbax.checkpoint as ocp
    from flax import traverse_util

    tree = traverse_util.unflatten_dict(t5x.arrays(), sep="/")
    ocp.PyTreeCheckpointer().save(folder / "checkpoint_7", tree)
    return folder / "checkpoint_7", bytes_of(tree)


def maxtext(folder: Path) -> Made:
    """A step of MaxText: Orbax's manager, one item, layers in one array each."""
    import orbax.checkpoint as ocp

    wide = np.random.default_rng(4).standard_normal
    attention = {name: {"kernel": wide((12, 2, 2, 6)).astype("f4")} for name in ("query", "key", "value")}
    mlp = {name: {"kernel": wide((12, 2, 10)).astype("f4")} for name in ("wi_0", "wi_1")}
    decoder = {
        "decoder_norm": {"scale": wide(12).astype("f4")},
        "layers": {
            "self_attention": {**attention, "out": {"kernel": wide((2, 2, 6, 12)).astype("f4")}},
            "mlp": {**mlp, "wo": {"kernel": wide((10, 2, 12)).astype("f4")}},
            "pre_self_attention_layer_norm": {"scale": wide((12, 2)).astype("f4")},
        },
    }
    embedder = {"embedding": wide((20, 12)).astype("f4")}
    tree = {
        "step": np.asarray(7, np.int32),
        "params": {"params": {"token_embedder": embedder, "decoder": decoder}},
    }
    with ocp.CheckpointManager(folder, item_names=("items",)) as manager:
        manager.save(7, args=ocp.args.Composite(items=ocp.args.PyTreeSave(tree)))
        manager.wait_until_finished()
    return folder / "7", bytes_of(tree)


def penzai(folder: Path) -> Made:
    """Named arrays of Penzai by label, saved by Orbax."""
    import jax.numpy as jnp
    import orbax.checkpoint as ocp
    from penzai import pz

    found = {
        "kernel.weights": (("in", "out"), arrays()["wide"]),
        "bias.bias": (("out",), arrays()["wide"][0]),
    }
    tree = {name: pz.nx.wrap(jnp.asarray(array)).tag(*axes) for name, (axes, array) in found.items()}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder, tree)
    return folder, {(name, "data_array"): array.tobytes() for name, (_axes, array) in found.items()}


def huggingface_bin(folder: Path) -> Made:
    """A tiny Llama as transformers saved it before safetensors."""
    import json

    model = tiny_model("llama")
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(model.config.to_dict()))
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    return folder, bytes_of(model.state_dict())


def numpy_pickle(folder: Path) -> Made:
    """Arrays in a pickle of Python's own."""
    import pickle

    folder.mkdir()
    (folder / "m.pkl").write_bytes(pickle.dumps(nested(), protocol=4))
    return folder / "m.pkl", bytes_of(nested())


def lingua_consolidated(folder: Path) -> Made:
    """What Lingua's `consolidate_checkpoints` leaves of a step."""
    import json

    folder.mkdir()
    torch.save({"model": lingua_files.model()}, folder / "consolidated.pth")
    (folder / "params.json").write_text(json.dumps(lingua_files.PARAMS))
    return folder, bytes_of({"model": lingua_files.model()})


def orbax_zarr3(folder: Path) -> Made:
    """One OCDBT database of zarr 3, as newer systems configure it."""
    import orbax.checkpoint as ocp

    ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True)).save(folder, nested())
    return folder, bytes_of(nested())


def orbax_managed(folder: Path) -> Made:
    """A step of Orbax's manager, with the tree in its default item."""
    import orbax.checkpoint as ocp

    with ocp.CheckpointManager(folder) as manager:
        manager.save(7, args=ocp.args.StandardSave(nested()))
        manager.wait_until_finished()
    return folder / "7" / "default", bytes_of(nested())


def orbax_v1(folder: Path) -> Made:
    """The newest interface of Orbax."""
    import orbax.checkpoint.experimental.v1 as ocp

    ocp.save_pytree(folder, nested())
    return folder / "state", bytes_of(nested())


def orbax_aggregate(folder: Path) -> Made:
    """The tree in one msgpack file and nothing else, as before OCDBT without tensorstore."""
    from flax import serialization

    folder.mkdir()
    (folder / "checkpoint").write_bytes(serialization.msgpack_serialize(nested()))
    return folder, bytes_of(nested())


def linen(folder: Path) -> Made:
    """Parameters of a module of Flax Linen, in the boxes of their partitioning, saved by Orbax."""
    import jax
    import orbax.checkpoint as ocp
    from flax import linen as nn

    init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
    params = nn.Dense(5, kernel_init=init).init(jax.random.key(0), jax.numpy.ones((1, 3)))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder, params)
    return folder, {}


def nnx(folder: Path) -> Made:
    """The state of a module of Flax NNX, saved by Orbax."""
    import orbax.checkpoint as ocp
    from flax import nnx as flax_nnx

    _graph, state = flax_nnx.split(flax_nnx.Linear(3, 5, rngs=flax_nnx.Rngs(0)))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder, state)
    return folder, {}


def paxml_arrays(folder: Path) -> Made:
    """PaxML 1.1: a folder for each array."""
    step, found = folder / f"checkpoint_{paxml.STEP:08d}", paxml.leaves(optimizer=False)
    paxml.gda(step / "state", found)
    paxml.write_metadata(step, 1.1, found)
    return step, {path: array.tobytes() for path, array in found.items()}


def paxml_ocdbt(folder: Path) -> Made:
    """PaxML 1.2: Orbax's database."""
    step, found = folder / f"checkpoint_{paxml.STEP:08d}", paxml.leaves()
    paxml.ocdbt(step / "state", found)
    paxml.write_metadata(step, 1.2, found)
    return step, {path: array.tobytes() for path, array in found.items()}


def paxml_flax(folder: Path) -> Made:
    """PaxML's Flax type: leaves by number."""
    step, found = folder / f"checkpoint_{paxml.STEP}", paxml.leaves()
    names = paxml.flax(step / "state" / "checkpoint", found)
    paxml.write_metadata(step, 1.1, found)
    return step, {("flattened_state", str(at)): found[name].tobytes() for at, name in enumerate(names)}


# By what `detect` calls them.
MAKERS: dict[str, tuple[Callable[[Path], Made], ...]] = {
    "safetensors": (safetensors,),
    "npz": (npz,),
    "huggingface": (huggingface, huggingface_bin),
    "numpy-pickle": (numpy_pickle,),
    "torch-zip": (torch_zip,),
    "torch-legacy": (torch_legacy,),
    "dcp": (dcp,),
    "lingua": (lingua,),
    "lingua-consolidated": (lingua_consolidated,),
    "meta-consolidated": (meta,),
    "orbax": (orbax, orbax_files, orbax_zarr3, orbax_managed, orbax_v1, orbax_aggregate, linen, nnx),
    "paxml": (paxml_arrays, paxml_ocdbt),
    "paxml-flax": (paxml_flax,),
    "flax-msgpack": (flax,),
    "t5x-legacy": (t5x_legacy,),
    "t5x-orbax": (t5x_orbax,),
    "maxtext": (maxtext,),
    "penzai": (penzai,),
}
