"""The answers of the double: XML and headers, as the API reference of S3 has them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

from benchmarks.scale.objects import PAGE
from benchmarks.scale.parts import Kept

if TYPE_CHECKING:
    from benchmarks.scale.objects import Served
    from benchmarks.scale.parts import Received

_CHANGED = "2026-01-01T00:00:00.000Z"
_CHANGED_HEADER = "Thu, 01 Jan 2026 00:00:00 GMT"
_Row = tuple[str, "Served | Kept"]


def object_headers(found: Served | Kept) -> dict[str, str]:
    """The headers that tell the state of an object."""
    headers = {
        "ETag": found.etag,
        "Last-Modified": _CHANGED_HEADER,
        "Accept-Ranges": "bytes",
        "Content-Type": "application/octet-stream",
    }
    if not isinstance(found, Kept):
        return headers
    checked = {"x-amz-checksum-crc32c": found.checksum, "x-amz-checksum-type": "FULL_OBJECT"}
    return {**headers, **found.metadata, **checked}


def listing(found: Sequence[_Row], bucket: str, query: Mapping[str, str]) -> bytes:
    """One page of ListObjectsV2; the token is the last name of the page before."""
    prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
    after = query.get("continuation-token", query.get("start-after", ""))
    most = int(query.get("max-keys", PAGE))
    names: dict[str, Served | Kept | None] = {}
    for path, one in found:
        key = path.removeprefix(f"{bucket}/")
        inner = key[len(prefix) :]
        if delimiter and delimiter in inner:
            names[prefix + inner.partition(delimiter)[0] + delimiter] = None
        else:
            names[key] = one
    rest = [name for name in names if name > after]
    page = rest[:most]
    entries = [_entry(name, names[name]) for name in page]
    more = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if len(rest) > most else ""
    truncated = str(len(rest) > most).lower()
    counts = (
        f"<KeyCount>{len(page)}</KeyCount><MaxKeys>{most}</MaxKeys><IsTruncated>{truncated}</IsTruncated>"
    )
    return _xml(
        "ListBucketResult",
        f"<Name>{bucket}</Name><Prefix>{escape(prefix)}</Prefix>{counts}{more}" + "".join(entries),
    )


def _entry(name: str, found: Served | Kept | None) -> str:
    if found is None:
        return f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>"
    state = (
        f"<LastModified>{_CHANGED}</LastModified><ETag>{escape(found.etag)}</ETag><Size>{found.nbytes}</Size>"
    )
    return f"<Contents><Key>{escape(name)}</Key>{state}<StorageClass>STANDARD</StorageClass></Contents>"


def parts(found: Iterable[tuple[int, Received]]) -> bytes:
    """ListParts, whole."""
    rows = [
        f"<Part><PartNumber>{number}</PartNumber><ETag>{escape(one.etag)}</ETag><Size>{one.nbytes}</Size>"
        f"<ChecksumCRC32C>{one.checksum}</ChecksumCRC32C></Part>"
        for number, one in found
    ]
    return _xml("ListPartsResult", "<IsTruncated>false</IsTruncated>" + "".join(rows))


def uploads(found: Iterable[tuple[str, str]]) -> bytes:
    """ListMultipartUploads, whole."""
    rows = [
        f"<Upload><Key>{escape(path.partition('/')[2])}</Key><UploadId>{name}</UploadId></Upload>"
        for path, name in found
    ]
    return _xml("ListMultipartUploadsResult", "<IsTruncated>false</IsTruncated>" + "".join(rows))


def begin_answer(path: str, upload: str) -> bytes:
    """CreateMultipartUpload."""
    bucket, _, key = path.partition("/")
    inner = f"<Bucket>{bucket}</Bucket><Key>{escape(key)}</Key><UploadId>{upload}</UploadId>"
    return _xml("InitiateMultipartUploadResult", inner)


def complete_answer(path: str, made: Kept) -> bytes:
    """CompleteMultipartUpload."""
    bucket, _, key = path.partition("/")
    state = f"<ETag>{escape(made.etag)}</ETag><ChecksumCRC32C>{made.checksum}</ChecksumCRC32C>"
    whole = "<ChecksumType>FULL_OBJECT</ChecksumType>"
    return _xml(
        "CompleteMultipartUploadResult", f"<Bucket>{bucket}</Bucket><Key>{escape(key)}</Key>{state}{whole}"
    )


def copy_answer(body: Received) -> bytes:
    """UploadPartCopy."""
    checksum = f"<ChecksumCRC32C>{body.checksum}</ChecksumCRC32C>"
    return _xml(
        "CopyPartResult", f"<LastModified>{_CHANGED}</LastModified><ETag>{escape(body.etag)}</ETag>{checksum}"
    )


def error(code: str) -> bytes:
    """An error."""
    return f'<?xml version="1.0" encoding="UTF-8"?><Error><Code>{code}</Code><Message>{code}</Message></Error>'.encode()


def nothing(root: str) -> bytes:
    """An answer without contents."""
    return _xml(root, "")


def _xml(root: str, inner: str) -> bytes:
    space = 'xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'
    return f'<?xml version="1.0" encoding="UTF-8"?><{root} {space}>{inner}</{root}>'.encode()
