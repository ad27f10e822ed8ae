"""Loaders for the formats of PyTorch programs: every tensor is loaded onto the GPU if there is one.

Archives are loaded with `weights_only`; what `weights_only` refuses is not loaded. Of a Hugging Face folder, the model
class that the config names is built from the tensors, with none missing, unexpected or of another shape.
Facts: `weights_only` runs code of the file in torch before 2.6 (GHSA-53q9-r3pm-6pq6) and corrupts memory before 2.10
(GHSA-63cw-57p8-fm3p). `from_pretrained` of transformers 5 looks in the folder that it is given for adapters and their
base model, sharded checkpoints of DCP and code of generation.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wherry.core.json_document import json_value
from wherry.core.tensorspec import TensorSpec
from wherry.cures import Argument, Cure
from wherry.errors import MismatchError, NotFoundError
from wherry.installation import package_command
from wherry.integrations.formats.huggingface.weights import find_weights
from wherry.integrations.native import NoModelError, UnsafeLibraryError
from wherry.store.local_store import locate
from wherry.store.location import MOST_CONFIG

SAFE = (2, 10)  # the oldest torch whose `weights_only` is not known to run code
CONFIG = "config.json"
_MOST_INDEX = 64 << 20
_READ_ALL = Cure("pass {}, which reads every byte", Argument("level", "digest"))
_OTHER_LIBRARIES = {  # stem of the weights → what it is
    "adapter_model": "adapter: PEFT loads it onto its base, which is no part of the checkpoint",
    "diffusion_pytorch_model": "model of diffusers",
}
_CODE = frozenset({"auto_map", "custom_pipelines", "configuration_files"})


def device() -> str:
    """The device that tensors are loaded onto."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def prepare() -> None:
    """Make the devices ready, before the process gives up the network and the execution of programs."""
    import torch

    torch.empty(0, device=device())


def safetensors(file: Path, specs: Mapping[str, TensorSpec]) -> Any:
    """Load a file with the safetensors library."""
    del specs
    from safetensors.torch import load_file

    return load_file(file, device=device())


def huggingface(folder: Path, specs: Mapping[str, TensorSpec]) -> Any:
    """Load a folder: its files with the safetensors library or torch, then build the model that the config names."""
    del specs
    tensors = weights(folder)
    model(folder, tensors)
    return tensors


def weights(folder: Path) -> dict[str, Any]:
    """The tensors of the files that transformers would choose in a folder, read by the safetensors library or torch.

    Raises:
        NoModelError: it holds an adapter, or a model of diffusers.
        NotFoundError: it has no weights, or no index says which of several files belong together.
    """
    chosen = find_weights({path.name: path for path in folder.iterdir()})
    if chosen is None:
        raise NotFoundError(f"Hugging Face weights not found in {folder}")
    if (library := _OTHER_LIBRARIES.get(chosen.stem)) is not None:
        raise NoModelError(f"transformers builds no {library}", cure=_READ_ALL)
    if chosen.form == "no index":
        raise NotFoundError(f"no index of the weights in {folder}")
    load = safetensors if chosen.container == "safetensors" else archive
    names = [chosen.file]
    if chosen.form == "sharded":
        stated: Any = json_value(locate(str(folder / chosen.file)).read_whole(_MOST_INDEX))
        names = sorted(set(stated["weight_map"].values()))
    found: dict[str, Any] = {}
    for name in names:
        found |= load(Path(locate(str(folder)).member(name).path), {})
    return found


def archive(path: Path, specs: Mapping[str, TensorSpec]) -> Any:
    """Load a file of torch.save (in a folder: the only `.pth`) with `torch.load(weights_only=True)`."""
    del specs
    import torch

    if path.is_dir():
        files = sorted(path.glob("*.pth"))
        if len(files) != 1:
            raise NotFoundError(f"expected one .pth file in {path}, got {len(files)}")
        path = files[0]
    require_safe_torch()
    return torch.load(path, map_location=device(), weights_only=True)


def require_safe_torch() -> None:
    """Refuse a torch whose `weights_only` can execute code.

    Raises:
        UnsafeLibraryError: torch is too old.
    """
    import torch

    version = str(torch.__version__)
    if tuple(map(int, version.split(".")[:2])) < SAFE:
        oldest = ".".join(map(str, SAFE))
        raise UnsafeLibraryError(
            f"torch {version} is unsafe: weights_only=True can execute code from a file",
            cure=Cure(
                "run `{}`, or verify with {}",
                package_command(f"torch>={oldest}"),
                Argument("level", "digest"),
            ),
        )


def model(folder: Path, tensors: Mapping[str, Any]) -> Any:
    """The model with these tensors, of the class that its config names.

    transformers does not get the folder, where it would look for adapters, further weights and code: it gets the
    tensors and a config that names neither code nor other locations.

    Raises:
        NotFoundError: there is no config.
        NoModelError: transformers has no such class, or needs a package for it that is not installed.
        MismatchError: the config belongs to another class; or a tensor is missing, unexpected or of another shape.
    """
    import transformers

    file = folder / CONFIG
    if not file.exists():
        raise NotFoundError(f"file not found: {CONFIG}, without which transformers builds no model")
    stated = inert_config(json_value(locate(str(file)).read_whole(MOST_CONFIG)))
    names: list[str] = stated.get("architectures") or []
    kind: Any = getattr(transformers, names[0], None) if names else None
    # The config is data: it selects a model class, and reaches no other class of the library.
    if not _is_one_of(kind, transformers.PreTrainedModel):
        named = (
            f"has no model class {names[0]}"
            if names
            else f"needs the architecture, which {CONFIG} does not name"
        )
        raise NoModelError(f"transformers {transformers.__version__} {named}", cure=_READ_ALL)
    model_type = stated.get("model_type")
    if model_type != kind.config_class.model_type:
        raise MismatchError(
            f"{CONFIG} states model_type {model_type!r}, but {names[0]} is a {kind.config_class.model_type!r}"
        )
    Path(CONFIG).write_text(json.dumps(stated))
    try:
        return _build_model(kind, names[0], tensors)
    except ImportError as error:
        raise NoModelError(
            f"{names[0]} needs a package that is not installed: {error}", cure=_READ_ALL
        ) from error


def _build_model(kind: Any, name: str, tensors: Mapping[str, Any]) -> Any:
    """The model of a class, by the config in the current folder."""
    config = kind.config_class.from_pretrained(Path.cwd(), local_files_only=True)
    made, report = kind.from_pretrained(
        None, config=config, state_dict=dict(tensors), output_loading_info=True, dtype="auto",
        trust_remote_code=False,
    )  # fmt: skip
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if report.get(what):
            raise MismatchError(f"{name}: {what.replace('_', ' ')}: {sorted(map(str, report[what]))[:20]}")
    return made.to(device()).eval()


def inert_config(value: Any) -> Any:
    """Strip a config of the fields that name code, and of every text that could be a path, URL or repository.

    Fields such as `attn_implementation`, `backbone` or `_name_or_path` let transformers load from elsewhere. Their
    values need a slash to reach anything, since the child runs in an empty folder with an empty cache.
    """
    if isinstance(value, dict):
        return {name: inert_config(one) for name, one in value.items() if name not in _CODE}
    if isinstance(value, list):
        return [inert_config(one) for one in value]
    return value.replace("/", "_") if isinstance(value, str) else value


def _is_one_of(kind: Any, base: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, base)
