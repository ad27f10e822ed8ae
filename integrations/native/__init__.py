"""Native: checkpoints loaded by the systems' own libraries, in a child process, and what they gave compared.

`LOADERS` says for each format which library loads it; `wherry.runtime.child` runs the module CHILD.

No loader may execute anything that a checkpoint holds, also not where a file is replaced between wherry's own look and
the load: whatever a loader reads is read as data. A library that would unpickle, import or follow a name from the
checkpoint gets what wherry read inertly in its place. tests/verifier/test_native_attacks.py attacks each row of the
table.
"""

from __future__ import annotations

from typing import NamedTuple

from wherry.errors import UnsupportedError


class UnsafeLibraryError(UnsupportedError):
    """The installed release of a library can be made to run code by what it loads, so that nothing is tried."""


class Loader(NamedTuple):
    """How a format's own library loads it.

    Attributes:
        function: dotted name of a function (uri, specs) → state, of which arrays are on the devices.
        package: what it needs.
        extra: of wherry, that installs it.
        evidence: which library reads what; printed with the result.
    """

    function: str
    package: str
    extra: str
    evidence: str


CHILD = "wherry.integrations.native.child"
LOGITS_EVIDENCE = "transformers computes both, from tensors without pickles and configs without code"
_JAX, _TORCH = "wherry.integrations.native.with_jax", "wherry.integrations.native.with_torch"
_DCP = "wherry.integrations.native.with_dcp"
LOADERS: dict[str, Loader] = {
    **{
        name: Loader(f"{_JAX}:orbax", "orbax.checkpoint", "jax", "orbax.checkpoint restores the tree")
        for name in ("orbax", "maxtext", "penzai", "t5x-orbax", "paxml-flax")
    },
    "flax-msgpack": Loader(f"{_JAX}:msgpack", "flax", "jax", "flax.serialization restores the tree"),
    "npz": Loader(f"{_JAX}:npz", "jax", "jax", "numpy.load reads the arrays without pickles"),
    "safetensors": Loader(f"{_TORCH}:safetensors", "safetensors", "torch", "safetensors reads the tensors"),
    "huggingface": Loader(
        f"{_TORCH}:huggingface", "safetensors", "torch",
        "safetensors or torch (weights only) reads the tensors; transformers takes them into its model, where it has "
        "the class that the config names",
    ),
    **{
        name: Loader(f"{_TORCH}:archive", "torch", "torch", "torch.load reads the tensors, weights only")
        for name in ("torch-zip", "torch-legacy", "lingua-consolidated", "meta-consolidated")
    },
    **{
        name: Loader(
            f"{_DCP}:distributed", "torch", "torch",
            "torch.distributed.checkpoint reads the tensors; their metadata comes from wherry's own index of .metadata",
        )
        for name in ("dcp", "lingua")
    },
}  # fmt: skip
