"""versions: reads of one state of an object, which fail once the object is replaced.

Google Cloud Storage takes the generation with a read; S3 and Azure take the ETag as a condition, which s3fs and
adlfs do not offer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from wherry.remote import azure
from wherry.remote.failures import status_of

if TYPE_CHECKING:
    from collections.abc import Callable

_PRECONDITION_FAILED = 412  # HTTP


async def _read_google(fs: Any, path: str, start: int, stop: int, mark: str) -> bytes:
    return await fs._cat_file(path, start=start, end=stop, generation=mark)  # noqa: SLF001  fsspec's own way


async def _read_amazon(fs: Any, path: str, start: int, stop: int, mark: str) -> bytes:
    bucket, key, _version = fs.split_path(path)
    how = {"Range": f"bytes={start}-{stop - 1}", "IfMatch": mark}
    try:
        answer = await fs._call_s3("get_object", Bucket=bucket, Key=key, **how)  # noqa: SLF001  the same
    except OSError as error:
        if error.__cause__ is not None and status_of(error.__cause__) == _PRECONDITION_FAILED:
            raise FileNotFoundError(path) from error
        raise
    async with answer["Body"] as body:
        return await body.read()


# protocol → reads bytes of an object in one state; raises FileNotFoundError if there is no object in that state.
VERSIONED_READS: dict[str, Callable[..., Any]] = {
    "gs": _read_google,
    "gcs": _read_google,
    "s3": _read_amazon,
    **dict.fromkeys(azure.PROTOCOLS, azure.read_state),
}
