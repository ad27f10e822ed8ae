"""Hostile things for checkpoints: pickles that run a command, modules with names of libraries, files that name code.

Whatever runs leaves a marker file. `ATTACKS` has, for each loader of the native level, what it is attacked with: a
function (checkpoint, marker) that changes a sound checkpoint in place.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil

import numpy as np

from infra.attacks.pickles import tar_of

MODULES = (
    *("torch", "jax", "numpy", "transformers", "orbax", "flax", "safetensors", "tensorstore", "msgpack"),
    *("sitecustomize", "usercustomize", "encodings", "json", "ctypes", "runpy", "typing_extensions"),
)


class Payload:
    """Unpickled for real, it runs a command that makes the marker."""

    def __init__(self, marker) -> None:
        self.command = f"touch '{marker}'"

    def __reduce__(self):
        return os.system, (self.command,)


def hostile_modules(folder, marker) -> None:
    """Modules and packages by the names of those that a child imports, wherry's own too; importing makes the marker."""
    code = f"import os\nos.system({Payload(marker).command!r})\n"
    for name in MODULES:
        (folder / f"{name}.py").write_text(code)
    for name in ("wherry", "wherry/integrations", "wherry/integrations/native", "transformers_modules"):
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(code)
    (folder / "wherry" / "integrations" / "native" / "child.py").write_text(code)


def _bare(marker) -> bytes:
    return pickle.dumps(Payload(marker), protocol=2)


def _zip(marker) -> bytes:
    import torch

    buffer = io.BytesIO()
    torch.save({"w": torch.zeros(2), "payload": Payload(marker)}, buffer)
    return buffer.getvalue()


def _stream(marker) -> bytes:
    import torch

    buffer = io.BytesIO()
    torch.save(Payload(marker), buffer, _use_new_zipfile_serialization=False)
    return buffer.getvalue()


def _tar(marker) -> bytes:
    """torch's format before 0.1.10, through which `weights_only` once ran code."""
    return tar_of(_bare(marker))


def _script(marker) -> bytes:
    """An archive of TorchScript, whose code is text of the archive."""
    import torch

    buffer = io.BytesIO()
    torch.jit.save(torch.jit.script(torch.nn.ReLU()), buffer, {"payload": Payload(marker).command})
    return buffer.getvalue()


PICKLES = {"bare": _bare, "zip": _zip, "stream": _stream, "tar": _tar, "script": _script}


def swapped(kind, pattern=None):
    """An attack that puts a pickle in the place of the checkpoint's file, or of the one file that fits a pattern."""

    def attack(checkpoint, marker) -> None:
        file = checkpoint if pattern is None else next(iter(sorted(checkpoint.glob(pattern))))
        file.write_bytes(PICKLES[kind](marker))

    return attack


def _object_arrays(checkpoint, marker) -> None:
    np.savez(checkpoint.with_suffix(".new.npz"), w=np.array([Payload(marker)], object))
    checkpoint.with_suffix(".new.npz").rename(checkpoint)


def _object_msgpack(checkpoint, marker) -> None:
    """An array of pointers, if Flax took it for one, and an extension that it does not know."""
    import msgpack

    array = msgpack.packb(((1,), "object", b"\0" * 8))
    checkpoint.write_bytes(
        msgpack.packb({"w": msgpack.ExtType(1, array), "x": msgpack.ExtType(9, _bare(marker))})
    )


def _items(checkpoint):
    """The folders of an Orbax checkpoint that hold a tree or its metadata."""
    return sorted({file.parent for name in ("_METADATA", "checkpoint") for file in checkpoint.rglob(name)})


def _orbax_pickles(checkpoint, marker) -> None:
    """Every file that Orbax reads by itself, metadata and the aggregate of old releases, as a pickle."""
    for folder in _items(checkpoint):
        for name in ("_METADATA", "checkpoint", "_sharding", "_strings.json"):
            (folder / name).write_bytes(_bare(marker))
    (checkpoint / "_CHECKPOINT_METADATA").write_bytes(_bare(marker))


def _orbax_aggregate(checkpoint, marker) -> None:
    """No metadata, so that Orbax takes the aggregate, which has an array of pointers."""
    for folder in _items(checkpoint):
        (folder / "_METADATA").unlink(missing_ok=True)
        _object_msgpack(folder / "checkpoint", marker)


def _orbax_names(checkpoint, marker) -> None:
    """Metadata that names functions where classes, handlers and modules are expected."""
    command = Payload(marker).command
    evil = {
        "category": "namedtuple", "module": "os", "clazz": "system", "entries": [{"key": "command", "value": command}],
    }  # fmt: skip
    leaf = {"value_type": "os.system", "skip_deserialize": False, "write_shape": [1]}
    tree = {"('w',)": {"key_metadata": [{"key": "w", "key_type": 2}], "value_metadata": leaf}}
    for folder in _items(checkpoint):
        metadata = {"tree_metadata": tree, "value_metadata_tree": json.dumps(evil), "use_zarr3": False,
                    "custom_metadata": {"__reduce__": ["os.system", command]}}  # fmt: skip
        (folder / "_METADATA").write_text(json.dumps(metadata))
    handlers = {"item_handlers": "os.system", "metrics": {"command": command}, "custom_metadata": evil}
    (checkpoint / "_CHECKPOINT_METADATA").write_text(json.dumps(handlers))


def _orbax_arrays(checkpoint, marker) -> None:
    """Arrays of zarr whose filter is a pickle, in place of OCDBT."""
    array = {
        "zarr_format": 2, "shape": [1], "chunks": [1], "dtype": "|O", "order": "C", "fill_value": None,
        "compressor": None, "filters": [{"id": "pickle", "protocol": 2}],
    }  # fmt: skip
    for folder in _items(checkpoint):
        names = (
            list(json.loads((folder / "_METADATA").read_text())["tree_metadata"])
            if (folder / "_METADATA").exists()
            else ["('w',)"]
        )
        for file in folder.rglob("manifest.ocdbt"):
            file.unlink()
        for name in names:
            place = folder / ".".join(eval(name))  # our own sample's key paths
            place.mkdir(exist_ok=True)
            (place / ".zarray").write_text(json.dumps(array))
            (place / "0").write_bytes(_bare(marker))


def _dcp_metadata(checkpoint, marker) -> None:
    """The metadata as it is, with an object more."""
    metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    metadata.planner_data = {"w": Payload(marker)}
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))


def _dcp_items(checkpoint, marker) -> None:
    """Metadata whose every tensor is an item that runs a command, and an object that does."""
    metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    data = _zip(marker)
    (checkpoint / "hostile.distcp").write_bytes(data)
    for info in metadata.storage_data.values():
        info.relative_path, info.offset, info.length = "hostile.distcp", 0, len(data)
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))


def _dcp_data(checkpoint, marker) -> None:
    """Sound metadata, and a pickle in the place of each item that has room for one."""
    metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        item = _bare(marker).ljust(info.length, b"\0")[: info.length]
        with (checkpoint / info.relative_path).open("r+b") as file:
            file.seek(info.offset)
            file.write(item)


def _dcp_objects(checkpoint, marker) -> None:
    """A tensor that the metadata now calls an object: torch's planner unpickles these without restriction."""
    import torch.distributed.checkpoint.metadata as classes

    metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    for name in metadata.state_dict_metadata:
        metadata.state_dict_metadata[name] = classes.BytesStorageMetadata()
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    _dcp_data(checkpoint, marker)


def _hf_pickled_weights(checkpoint, marker) -> None:
    (checkpoint / "model.safetensors").unlink()
    (checkpoint / "pytorch_model.bin").write_bytes(_zip(marker))


def _hf_code(checkpoint, marker) -> None:
    """A config that names code next to it in every way that transformers knows, and an adapter of another model."""
    code = f"import os\nos.system({Payload(marker).command!r})\n"
    for name in (
        "modeling_evil.py",
        "configuration_evil.py",
        "custom_generate/generate.py",
        "build/__init__.py",
    ):
        (checkpoint / name).parent.mkdir(exist_ok=True)
        (checkpoint / name).write_text(code)
    config = json.loads((checkpoint / "config.json").read_text())
    names = {"AutoConfig": "configuration_evil.Config", "AutoModel": "modeling_evil.Model",
             "AutoModelForCausalLM": "modeling_evil.Model", "AutoTokenizer": "modeling_evil.Tokenizer"}  # fmt: skip
    config |= {
        "auto_map": names, "trust_remote_code": True, "_name_or_path": str(checkpoint), "_attn_implementation": None,
        "attn_implementation": str(checkpoint), "custom_pipelines": {"text-generation": {"impl": "modeling_evil.P"}},
        "configuration_files": ["config.json"], "transformers_weights": "../evil.bin",
    }  # fmt: skip
    (checkpoint / "config.json").write_text(json.dumps(config))
    (checkpoint / "generation_config.json").write_text(
        json.dumps({"trust_remote_code": True, "auto_map": names})
    )
    (checkpoint / "tokenizer_config.json").write_text(json.dumps({"auto_map": names}))
    adapter = {"base_model_name_or_path": str(checkpoint), "peft_type": "LORA", "auto_mapping": names}
    (checkpoint / "adapter_config.json").write_text(json.dumps(adapter))
    (checkpoint / "adapter_model.bin").write_bytes(_zip(marker))


def _hf_distributed(checkpoint, marker) -> None:
    """A DCP checkpoint in the same folder, which transformers would rather load, with a pickle for its metadata."""
    import torch
    import torch.distributed.checkpoint as dcp

    saved = checkpoint.parent / "saved"
    dcp.save({"model.norm.weight": torch.zeros(16)}, checkpoint_id=str(saved), no_dist=True)
    for file in saved.iterdir():
        shutil.copy(file, checkpoint / file.name)
    _dcp_metadata(checkpoint, marker)
    (checkpoint / "shard-00001-model-00001-of-00001.safetensors").write_bytes(_bare(marker))


def _hf_code_as_architecture(checkpoint, marker) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    config["architectures"] = ["modeling_evil.Model", "os.system"]
    (checkpoint / "config.json").write_text(json.dumps(config))
    (checkpoint / "modeling_evil.py").write_text(f"import os\nos.system({Payload(marker).command!r})\n")


_ORBAX = {
    "pickles": _orbax_pickles, "aggregate": _orbax_aggregate, "names": _orbax_names, "arrays": _orbax_arrays,
}  # fmt: skip
_ARCHIVE = {kind: swapped(kind) for kind in PICKLES}
_DCP = {
    "metadata": _dcp_metadata, "items": _dcp_items, "data": _dcp_data, "objects": _dcp_objects,
    "bare": swapped("bare", ".metadata"),
}  # fmt: skip
ATTACKS = {
    **dict.fromkeys(("orbax", "maxtext", "penzai", "t5x-orbax", "paxml-flax"), _ORBAX),
    "flax-msgpack": {"bare": swapped("bare"), "objects": _object_msgpack},
    "npz": {"bare": swapped("bare"), "objects": _object_arrays},
    "safetensors": {"bare": swapped("bare"), "zip": swapped("zip")},
    "huggingface": {
        "weights": _hf_pickled_weights, "bare": swapped("bare", "*.safetensors"), "code": _hf_code,
        "distributed": _hf_distributed, "architecture": _hf_code_as_architecture,
    },
    "torch-zip": _ARCHIVE,
    "torch-legacy": _ARCHIVE,
    "lingua-consolidated": {kind: swapped(kind, "*.pth") for kind in PICKLES},
    "meta-consolidated": {kind: swapped(kind, "*.pth") for kind in PICKLES},
    "dcp": _DCP,
    "lingua": _DCP,
    "torchtitan": _DCP,
    "megatron": _DCP,
}  # fmt: skip
