"""zeros: which tensors hold nothing but zeros, as their digests say; no byte is read for it.

A download or a copy that was cut off leaves zeros in a file that has its full size. The digest of a tensor tells: it is
that of zeros of the same type and shape. So the answer is the same wherever the digests come from: a pass, an
interrupted run, other processes, a sidecar.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from wherry.core.account import some_names
from wherry.core.algorithms import algorithm_of, new_hash
from wherry.core.digest import LEAF, tensor_digest
from wherry.core.units import plural

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from wherry.core.keypath import KeyPath
    from wherry.core.tensorspec import TensorSpec

_COUNTS = ("int", "uint", "bool")  # counters, masks and positions are often zero


def zeros_notes(specs: Mapping[KeyPath, TensorSpec], digests: Mapping[KeyPath, str]) -> list[str]:
    """A warning if tensors hold nothing but zeros.

    Args:
        specs: the tensors.
        digests: of all of them, or of some.

    Returns:
        One sentence, or nothing. Tensors of one element and of integers do not count.
    """
    found = list(_zeros(specs, digests))
    if not found:
        return []
    which = f"{len(found):,} of {plural(len(specs), 'tensor')}"
    cure = "if a download or a copy was cut off, compare the files with the original"
    return [f"{which} hold only zeros: {some_names(found)}; {cure}"]


def _zeros(specs: Mapping[KeyPath, TensorSpec], digests: Mapping[KeyPath, str]) -> Iterator[KeyPath]:
    for path, digest in digests.items():
        spec = specs[path]
        if spec.size > 1 and not spec.dtype.startswith(_COUNTS):
            algorithm = algorithm_of(digest)
            whole, rest = divmod(spec.nbytes, LEAF)
            leaves = [_zero_leaf(algorithm, LEAF)] * whole + ([_zero_leaf(algorithm, rest)] if rest else [])
            if digest == tensor_digest(spec, leaves, algorithm):
                yield path


@lru_cache(1 << 12)
def _zero_leaf(algorithm: str, nbytes: int) -> bytes:
    return new_hash(algorithm, bytes(nbytes)).digest()
