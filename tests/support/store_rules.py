"""What the emulated stores do not enforce, for the proxy in front of them (`Proxy.rules`).

fake-gcs-server checks generations when an object is put, but neither when it is composed nor when it is removed, and no
checksums. moto checks ETags of objects that are put, assembled and removed, but not of the source of a copy, and no
checksums; it answers 500 for a part of an upload that does not exist, completes an upload twice, and reports a wrong
checksum of an object that was assembled. Azurite refuses a wrong MD5 as if the operation were invalid, does not say
which MD5 it has computed of a block, and takes uncommitted blocks for a blob where one is to be created.
"""

from __future__ import annotations

import hashlib
import json
import re
from base64 import b64encode
from urllib.parse import parse_qs, quote, urlsplit

from google_crc32c import value as crc32c

_ERROR = "<Error><Code>{0}</Code><Message>{0}</Message></Error>"


def google(handler, body):
    """The rules of Google Cloud Storage."""
    url = urlsplit(handler.path)
    query = {name: values[0] for name, values in parse_qs(url.query).items()}
    if url.path.startswith("/upload/"):
        return _inserted(handler, body)
    if url.path.endswith("/compose"):
        folder = url.path.removesuffix("/compose").rpartition("/")[0]
        for source in json.loads(body)["sourceObjects"]:
            name = quote(source["name"], safe="")
            refusal = _unless(handler, f"{folder}/{name}", source["objectPreconditions"]["ifGenerationMatch"])
            if refusal:
                return refusal
        return _unless(handler, url.path.removesuffix("/compose"), query.get("ifGenerationMatch"))
    if handler.command == "DELETE":
        return _unless(handler, url.path, query.get("ifGenerationMatch"))
    return None


def _unless(handler, path, generation):
    """The refusal of a request that requires a generation of the object at a path."""
    if generation is None:
        return None
    code, headers, data = handler.ask("GET", path)
    if code == 404 and generation != "0":
        return code, headers, data
    found = json.loads(data)["generation"] if code == 200 else "0"
    return (
        None if found == generation else _reply(412, '{"error": {"code": 412, "message": "conditionNotMet"}}')
    )


def _inserted(handler, body):
    boundary = re.search('boundary="([^"]+)"', handler.headers["Content-Type"])
    if boundary is None or "uploadType=multipart" not in handler.path:
        return None
    _, head, rest = body.split(f"--{boundary[1]}".encode(), 2)
    stated = json.loads(head.partition(b"\r\n\r\n")[2]).get("crc32c")
    data = rest.partition(b"\r\n\r\n")[2].removesuffix(f"\r\n--{boundary[1]}--".encode())
    if stated in (None, checksum(data)):
        return None
    text = f"Provided CRC32C {stated} doesn't match calculated CRC32C {checksum(data)}."
    return _reply(400, json.dumps({"error": {"code": 400, "message": text}}))


def amazon(handler, body):
    """The rules of S3."""
    url = urlsplit(handler.path)
    upload = parse_qs(url.query).get("uploadId", [""])[0]
    stated = handler.headers.get("x-amz-checksum-crc32c")
    if handler.command == "PUT" and stated not in (None, checksum(body)):
        return _reply(400, _ERROR.format("BadDigest"))
    if upload in handler.proxy.gone:
        return _reply(404, _ERROR.format("NoSuchUpload"))
    if (mark := handler.headers.get("x-amz-copy-source-if-match")) is not None:
        _code, headers, _data = handler.ask("HEAD", "/" + handler.headers["x-amz-copy-source"].lstrip("/"))
        if mark not in dict(headers).values():
            return _reply(412, _ERROR.format("PreconditionFailed"))
    if upload and handler.command in ("POST", "DELETE"):
        return _ended(handler, body, upload)
    return _described(handler, url.path) if handler.command == "HEAD" else None


def _ended(handler, body, upload):
    """Complete or abort an upload, after which it no longer exists."""
    answer = handler.ask(handler.command, handler.path, body)
    if answer[0] < 300:
        handler.proxy.gone.add(upload)
    return answer


def _described(handler, path):
    """The answer to HEAD with the right checksum of an object that was assembled."""
    code, headers, data = handler.ask("HEAD", handler.path)
    names = {name.lower(): value for name, value in headers}
    if "x-amz-checksum-crc32c" in names and "-" in names.get("etag", ""):
        whole = checksum(handler.ask("GET", path)[2])
        headers = [
            (name, whole if name.lower() == "x-amz-checksum-crc32c" else value) for name, value in headers
        ]
    return code, headers, data


def azure(handler, body):
    """The rules of Azure."""
    url = urlsplit(handler.path)
    stated = handler.headers.get("Content-MD5")
    if handler.command != "PUT" or stated is None:
        return None
    computed = b64encode(hashlib.md5(body).digest()).decode()
    if stated != computed:
        return _reply(400, _ERROR.format("Md5Mismatch"), [("x-ms-error-code", "Md5Mismatch")])
    if parse_qs(url.query).get("comp") != ["block"]:
        return None
    code, headers, data = handler.ask("PUT", handler.path, body)
    return code, [*headers, ("Content-MD5", computed)], data


def checksum(data):
    """CRC-32C as both stores write it."""
    return b64encode(crc32c(bytes(data)).to_bytes(4, "big")).decode()


def _reply(code, text, headers=()):
    data = text.encode()
    return code, [("Content-Length", str(len(data))), *headers], data


RULES = {"s3": amazon, "gs": google, "az": azure}
