"""google_calls: single requests to the JSON interface of Google Cloud Storage, through the session of gcsfs.

Each raises FileNotFoundError for a missing object and FileExistsError for a condition that does not hold, as gcsfs
does. Paths begin with the bucket.
Source: the reference of the JSON interface, `storage/v1`: objects.get, insert, compose, delete, list.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode
from uuid import uuid4

from wherry.remote.failures import is_plain_failure
from wherry.remote.transfers import BodyRequest, exchange, is_plain
from wherry.store.body import Body
from wherry.store.checksums import by_algorithm, from_base64, to_base64
from wherry.store.google_session import AnswerError
from wherry.store.store import StoredObject
from wherry.text.json_values import json_value

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from wherry.remote.transfers import HttpAnswer

RUN = "wherry-run"  # key of the metadata
ABSENT = "0"  # the generation of an object that does not exist
_KIND = "application/octet-stream"
_UPLOAD = "upload/storage/v1/b/{}/o"
_NOT_FOUND = 404
_FIELDS = "bucket,name,size,generation,crc32c,metadata"


def describe_row(row: Mapping[str, Any]) -> StoredObject:
    """An object as a row of an answer describes it."""
    run = row.get("metadata", {}).get(RUN, "")
    checksums = by_algorithm(from_base64(row.get("crc32c")))
    return StoredObject(int(row.get("size", 0)), row["generation"], run, checksums)


async def read_row(fs: Any, path: str) -> dict[str, Any]:
    """The row of an object."""
    return await _call(fs, "GET", "b/{}/o/{}", *_split(path), json_out=True, fields=_FIELDS)


@dataclass(frozen=True, slots=True)
class Insertion:
    """The request that puts an object that is in a generation, `0` for none.

    Attributes:
        bucket: of the object.
        headers: of the request.
        params: of the URL.
        body: a row that describes the object, and its bytes.
    """

    bucket: str
    headers: Mapping[str, str]
    params: Mapping[str, str]
    body: Sequence[memoryview]


def insertion(path: str, data: Sequence[memoryview], run: str, checksum: str, generation: str) -> Insertion:
    """The request that puts these bytes."""
    bucket, name = _split(path)
    row = {"name": name, "contentType": _KIND, "crc32c": to_base64(checksum), "metadata": {RUN: run}}
    boundary = uuid4().hex
    head = f"--{boundary}\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n{json.dumps(row)}\r\n"
    head += f"--{boundary}\r\nContent-Type: {_KIND}\r\n\r\n"
    tail = f"\r\n--{boundary}--"
    return Insertion(
        bucket,
        {"Content-Type": f'multipart/related; boundary="{boundary}"'},
        {"uploadType": "multipart", "ifGenerationMatch": generation, "fields": _FIELDS},
        [memoryview(head.encode()), *data, memoryview(tail.encode())],
    )


async def insert(fs: Any, what: Insertion) -> dict[str, Any]:
    """Put an object through gcsfs; returns its row."""
    body = Body(what.body)
    headers = {**what.headers, "Content-Length": str(body.nbytes)}
    url = f"{fs._location}/{_UPLOAD}"  # noqa: SLF001  gcsfs has no public name for it
    return await _call(fs, "POST", url, what.bucket, json_out=True, headers=headers, data=body, **what.params)


def insert_object(fs: Any, what: Insertion, seconds: float) -> dict[str, Any] | None:
    """Put an object in this thread; returns its row, or None if only gcsfs can send it."""
    if not sends_plainly(fs):
        return None
    url = f"{fs._location}/{_UPLOAD.format(quote(what.bucket, safe=''))}"  # noqa: SLF001
    answer = exchange(body_request(fs, "POST", url, what.headers, what.params), seconds, views=what.body)
    if answer.is_success:
        return json_value(answer.body)
    if (error := refused_by_google(answer)) is not None:
        raise error
    return None


async def compose(fs: Any, path: str, sources: Sequence[tuple[str, str]], run: str) -> dict[str, Any]:
    """Make an object of others, with the path and generation of each, where none is; returns its row.

    Args:
        fs: the file system.
        path: of the object.
        sources: at most 32 of the same bucket.
        run: id of the run.
    """
    bucket, name = _split(path)
    rows = [
        {"name": _split(one)[1], "generation": mark, "objectPreconditions": {"ifGenerationMatch": mark}}
        for one, mark in sources
    ]
    return await _call(
        fs, "POST", "b/{}/o/{}/compose", bucket, name, json_out=True,
        json={"sourceObjects": rows, "destination": {"contentType": _KIND, "metadata": {RUN: run}}},
        fields=_FIELDS, ifGenerationMatch=ABSENT,
    )  # fmt: skip


async def delete_object(fs: Any, path: str, generation: str | None = None) -> None:
    """Remove an object that is in a generation; without one, in any."""
    condition = {} if generation is None else {"ifGenerationMatch": generation}
    await _call(fs, "DELETE", "b/{}/o/{}", *_split(path), **condition)


async def list_page(fs: Any, prefix: str, page: str) -> tuple[list[dict[str, Any]], str]:
    """Rows of the objects with a prefix, and the token of the next page; empty if there is none."""
    bucket, name = _split(prefix)
    token = {"pageToken": page} if page else {}
    fields = f"items({_FIELDS}),nextPageToken"
    found = await _call(fs, "GET", "b/{}/o", bucket, json_out=True, prefix=name, fields=fields, **token)
    return found.get("items", []), found.get("nextPageToken", "")


def sends_plainly(fs: Any) -> bool:
    """Whether requests of a file system are ordinary HTTP: zonal buckets use gRPC, and some logins a certificate."""
    from gcsfs.core import GCSFileSystem

    if type(fs) is not GCSFileSystem:
        return False
    gcs: Any = fs
    own = getattr(gcs, "_use_client_cert", False) or "connector" in gcs.session_kwargs
    return not own and is_plain(gcs._location)  # noqa: SLF001  gcsfs has no public name for it


def body_request(
    fs: Any, method: str, url: str, headers: Mapping[str, str], params: Mapping[str, str]
) -> BodyRequest:
    """A request with the login and the parameters that gcsfs adds to each.

    Args:
        fs: the file system of gcsfs.
        method: of HTTP.
        url: quoted; it may have parameters.
        headers: of the request.
        params: further parameters.
    """
    query = urlencode(fs._get_params(dict(params)))  # noqa: SLF001
    joint = "" if not query else "&" if "?" in url else "?"
    return BodyRequest(method, f"{url}{joint}{query}", fs._get_headers(dict(headers)))  # noqa: SLF001


def refused_by_google(answer: HttpAnswer) -> Exception | None:
    """The exception for an answer; None if gcsfs must try it itself, which knows the reasons."""
    if answer.status == _NOT_FOUND:
        return FileNotFoundError(answer.status)
    error = AnswerError(answer.status, answer.headers, answer.body.decode(errors="replace"))
    return error if is_plain_failure(error) else None


async def _call(fs: Any, method: str, path: str, *names: str, **what: Any) -> Any:
    return await fs._call(method, path, *names, **what)  # noqa: SLF001  of which `fs.call` is the synchronous form


def _split(path: str) -> tuple[str, str]:
    bucket, _, name = path.partition("/")
    return bucket, name
