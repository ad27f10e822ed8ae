"""worker_needs: what a worker needs before it takes a unit: the codecs, and memory for one unit."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from wherry.core.units import show_size
from wherry.errors import MissingExtraError, StorageError
from wherry.installation import package_command
from wherry.runtime.memory import available_memory
from wherry.units.estimate import CLIENT_BYTES

if TYPE_CHECKING:
    from wherry.units.split_job import SplitJob

_CODECS = ("blake3", "deflate", "isal", "ml_dtypes", "numpy", "tensorstore", "zstandard")


def require_able(split: SplitJob) -> None:
    """Refuse to work on a job that this process cannot make a unit of.

    Args:
        split: the job, opened.

    Raises:
        MissingExtraError: a codec is not installed.
        StorageError: there is too little memory.
    """
    for name in _CODECS:
        try:
            import_module(name)
        except ImportError as error:
            raise MissingExtraError(
                f"this worker lacks the package {name}: {error}", cure=f"run `{package_command(name)}` there"
            ) from error
    needed, free = split.job.plan.peak_memory + CLIENT_BYTES, available_memory()
    if free is not None and free < needed:
        raise StorageError(
            f"this worker has {show_size(free)} of free memory; a unit needs {show_size(needed)}",
            uri=split.uri,
            cure="give the worker more memory, or lower --memory of the conversion",
            retryable=True,
        )
