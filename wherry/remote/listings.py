"""listings: one page of all objects below a folder, in the order of their keys, whatever folders they are in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

_PAGE = 1000  # objects of one answer


async def _page_google(fs: Any, path: str, start: str) -> tuple[list[dict[str, Any]], bool]:
    bucket, prefix, _generation = fs.split_path(path)
    how = {
        "prefix": f"{prefix}/" if prefix else None,
        "startOffset": start.partition("/")[2],
        "maxResults": _PAGE,
    }
    answer = await fs._call("GET", "b/{}/o", bucket, json_out=True, **how)  # noqa: SLF001  fsspec's own way
    rows = [
        {"name": f"{bucket}/{one['name']}", "size": one.get("size", 0), "generation": one.get("generation")}
        for one in answer.get("items", [])
    ]
    return rows, "nextPageToken" in answer


async def _page_amazon(fs: Any, path: str, start: str) -> tuple[list[dict[str, Any]], bool]:
    bucket, prefix, _version = fs.split_path(path)
    how = {"Prefix": f"{prefix}/" if prefix else "", "StartAfter": start.partition("/")[2], "MaxKeys": _PAGE}
    answer = await fs._call_s3("list_objects_v2", Bucket=bucket, **how)  # noqa: SLF001  the same
    rows = [
        {"name": f"{bucket}/{one['Key']}", "size": one["Size"], "ETag": one["ETag"]}
        for one in answer.get("Contents", [])
    ]
    return rows, bool(answer.get("IsTruncated"))


# protocol → the objects below a folder from a path on, and whether there are more.
PAGES: dict[str, Callable[..., Any]] = {"gs": _page_google, "gcs": _page_google, "s3": _page_amazon}
