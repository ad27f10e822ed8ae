"""Native loading: load checkpoints with the systems' own libraries in a child process, and compare the tensors.

`LOADERS` maps each format to the library that loads it; `wherry.runtime.child` runs the module CHILD.

No loader may execute anything from a checkpoint, even if a file is replaced between wherry's own check and the load:
loaders read everything as data. A library that would unpickle, import or follow a name from the checkpoint instead gets
what wherry has read without executing it. tests/verifier/test_native_attacks.py attacks each row of the table.
"""

from __future__ import annotations

from typing import NamedTuple

from wherry.errors import UnsupportedError


class UnsafeLibraryError(UnsupportedError):
    """The installed release of a library can execute code from a file that it loads, so nothing is loaded."""


class Loader(NamedTuple):
    """How to load a format with its own library.

    Attributes:
        function: dotted name of a function (place, specs) → state, with its arrays on the devices.
        package: the package that the function needs.
        extra: wherry's extra that installs the package.
        evidence: which library reads what; printed with the result.
        stores: protocols of the stores from which the library itself reads.
    """

    function: str
    package: str
    extra: str
    evidence: str
    stores: tuple[str, ...] = ()


CHILD = "wherry.integrations.native.child"
LOGITS_EVIDENCE = "transformers computes both logits, from tensors without pickles and configs without code"
_JAX, _TORCH = "wherry.integrations.native.with_jax", "wherry.integrations.native.with_torch"
_DCP = "wherry.integrations.native.with_dcp"
LOADERS: dict[str, Loader] = {
    **{
        name: Loader(
            f"{_JAX}:orbax", "orbax.checkpoint", "jax", "orbax.checkpoint restores the tree", stores=("gs",)
        )
        for name in ("orbax", "maxtext", "penzai", "t5x-orbax", "paxml-flax")
    },
    "flax-msgpack": Loader(f"{_JAX}:msgpack", "flax", "jax", "flax.serialization restores the tree"),
    "npz": Loader(f"{_JAX}:npz", "jax", "jax", "numpy.load reads the arrays without pickles"),
    "safetensors": Loader(f"{_TORCH}:safetensors", "safetensors", "torch", "safetensors reads the tensors"),
    "huggingface": Loader(
        f"{_TORCH}:huggingface", "safetensors", "torch",
        "safetensors or torch (weights only) reads the tensors; transformers loads them into its model if it has the "
        "class that the config names",
    ),
    **{
        name: Loader(f"{_TORCH}:archive", "torch", "torch", "torch.load reads the tensors, weights only")
        for name in ("torch-zip", "torch-legacy", "lingua-consolidated", "meta-consolidated")
    },
    **{
        name: Loader(
            f"{_DCP}:load_distributed", "torch", "torch",
            "torch.distributed.checkpoint reads the tensors; wherry's reader supplies their metadata from .metadata",
            stores=("gs", "s3"),
        )
        for name in ("dcp", "lingua", "torchtitan")
    },
}  # fmt: skip
