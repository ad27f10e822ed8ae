"""Native: checkpoints loaded by the systems' own libraries, in a child process, and what they gave compared.

`LOADERS` says for each format which library loads it; the child is `python -m CHILD`.
"""

from __future__ import annotations

from typing import NamedTuple


class Loader(NamedTuple):
    """How a format's own library loads it.

    Attributes:
        function: dotted name of a function (uri, specs) → state, of which arrays are on the devices.
        package: what it needs.
        extra: of wherry, that installs it.
    """

    function: str
    package: str
    extra: str


CHILD = "wherry.integrations.native.child"
_JAX, _TORCH = "wherry.integrations.native.with_jax", "wherry.integrations.native.with_torch"
LOADERS: dict[str, Loader] = {
    **{
        name: Loader(f"{_JAX}:orbax", "orbax.checkpoint", "jax")
        for name in ("orbax", "maxtext", "penzai", "t5x-orbax", "paxml-flax")
    },
    "flax-msgpack": Loader(f"{_JAX}:msgpack", "flax", "jax"),
    "npz": Loader(f"{_JAX}:npz", "jax", "jax"),
    "safetensors": Loader(f"{_TORCH}:safetensors", "safetensors", "torch"),
    "huggingface": Loader(f"{_TORCH}:huggingface", "safetensors", "torch"),
    **{
        name: Loader(f"{_TORCH}:archive", "torch", "torch")
        for name in ("torch-zip", "torch-legacy", "lingua-consolidated", "meta-consolidated")
    },
    **{name: Loader(f"{_TORCH}:distributed", "torch", "torch") for name in ("dcp", "lingua")},
}
