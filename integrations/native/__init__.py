"""Native loading: load checkpoints with the systems' own libraries in a child process, and compare the tensors.

`LOADERS` maps each format to the library that loads it; `wherry.core.child` runs the module CHILD.

No loader may execute anything from a checkpoint, even if a file is replaced between wherry's own check and the load:
loaders read everything as data. A library that would unpickle, import or follow a name from the checkpoint instead gets
what wherry has read without executing it. tests/prove/test_native_attacks.py attacks each row of the table.
"""

from __future__ import annotations

from typing import NamedTuple

from wherry.errors import UnsupportedError


class UnsafeLibraryError(UnsupportedError):
    """The installed release of a library can execute code from a file that it loads, so nothing is loaded."""


class NoModelError(UnsupportedError):
    """No library that is installed here has the model class of a checkpoint, so nothing shows that it can be built."""


class Loader(NamedTuple):
    """How to load a format with its own library.

    Attributes:
        function: dotted name of a function (place, specs) → state, with its arrays on the devices.
        package: the package that the function needs.
        extra: wherry's extra that installs the package.
        evidence: which library reads what, and what is not run; printed with the result.
        stores: protocols of the stores from which the library itself reads.
    """

    function: str
    package: str
    extra: str
    evidence: str
    stores: tuple[str, ...] = ()


CHILD = "wherry.integrations.native.child"
LOGITS_EVIDENCE = "transformers computes both logits, from tensors without pickles and configs without code"
SERVE_EVIDENCE = (
    "transformers generates both answers greedily, from tensors without pickles, configs without code and tokenizers "
    "as data; Jinja's sandbox renders chat templates"
)
_JAX, _TORCH = "wherry.integrations.native.with_jax", "wherry.integrations.native.with_torch"
_DCP = "wherry.integrations.native.with_dcp"
_NO_MODEL = "; {system} itself is not run, so nothing builds its model"
# The systems whose own code is not run: their checkpoints are read by the library with which they read them.
_SYSTEMS = {
    "maxtext": "MaxText", "penzai": "Penzai", "t5x-orbax": "T5X", "paxml-flax": "PaxML", "lingua": "Lingua",
    "torchtitan": "torchtitan", "megatron": "Megatron-Core", "lingua-consolidated": "Lingua",
    "meta-consolidated": "Meta's program",
}  # fmt: skip


def _evidence(name: str, text: str) -> str:
    """The evidence of a loader: what it reads, and which system is not run."""
    return text + (_NO_MODEL.format(system=_SYSTEMS[name]) if name in _SYSTEMS else "")


LOADERS: dict[str, Loader] = {
    **{
        name: Loader(
            f"{_JAX}:orbax", "orbax.checkpoint", "jax",
            _evidence(name, "orbax.checkpoint restores the tree"), stores=("gs",),
        )
        for name in ("orbax", "maxtext", "penzai", "t5x-orbax", "paxml-flax")
    },
    "flax-msgpack": Loader(f"{_JAX}:msgpack", "flax", "jax", "flax.serialization restores the tree"),
    "npz": Loader(f"{_JAX}:npz", "jax", "jax", "numpy.load reads the arrays without pickles"),
    "safetensors": Loader(f"{_TORCH}:safetensors", "safetensors", "torch", "safetensors reads the tensors"),
    "huggingface": Loader(
        f"{_TORCH}:huggingface", "transformers", "native",
        "safetensors or torch (weights only) reads the tensors; transformers builds the model that the config names "
        "from them, with none missing, unexpected or of another shape",
    ),
    **{
        name: Loader(
            f"{_TORCH}:archive", "torch", "torch", _evidence(name, "torch.load reads the tensors, weights only")
        )
        for name in ("torch-zip", "torch-legacy", "lingua-consolidated", "meta-consolidated")
    },
    **{
        name: Loader(
            f"{_DCP}:{'load_megatron' if name == 'megatron' else 'load_distributed'}", "torch", "torch",
            _evidence(
                name,
                "torch.distributed.checkpoint reads the tensors; wherry's reader supplies their metadata from "
                ".metadata",
            ),
            stores=("gs", "s3"),
        )
        for name in ("dcp", "lingua", "torchtitan", "megatron")
    },
}  # fmt: skip
