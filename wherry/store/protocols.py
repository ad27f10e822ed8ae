"""protocols: what wherry knows of each storage protocol: what the store can do, and what provides it.

The capabilities are declared, not guessed, as restic's `Properties` are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from wherry.remote.failures import AZURE as AZURE_NAMES
from wherry.store.store import Capabilities

READ_ONLY = Capabilities()
LOCAL = Capabilities(local=True, create_only_put=True, version="time", fills=True)
# A store of objects of which nothing more is known.
OBJECTS = Capabilities(create_only_put=True)
_PARTS = replace(OBJECTS, parts=True, object_copy=True, fills=True)
MEMORY = replace(_PARTS, checksums=("crc32c",), version="time")
# Parts are objects that `compose` joins with ifGenerationMatch=0; a multipart upload of the XML API has no conditions.
GCS = replace(_PARTS, checksums=("crc32c",), version="generation", pages=True)
# If-None-Match on PutObject and on CompleteMultipartUpload.
S3 = replace(_PARTS, checksums=("crc32c",), version="etag", pages=True)
# If-None-Match on Put Blob and on Put Block List. Only what is sent at once has a checksum: small objects, and
# the parts of others.
AZURE = replace(_PARTS, checksums=("md5",), version="etag")
HUB = replace(READ_ONLY, one_commit=True, version="blob")


@dataclass(frozen=True, slots=True)
class StorageProtocol:
    """One protocol.

    Attributes:
        capabilities: what its stores can do.
        package: the package that provides it.
        extra: the extra of wherry that installs the package; empty if there is none.
        in_process: whether its calls never leave this process, so that they need neither deadlines nor retries.
        whole_uris: whether its library takes and lists URIs instead of paths.
    """

    capabilities: Capabilities
    package: str = "fsspec"
    extra: str = ""
    in_process: bool = False
    whole_uris: bool = False


PROTOCOLS: dict[str, StorageProtocol] = {
    "file": StorageProtocol(LOCAL, package="", in_process=True),
    "memory": StorageProtocol(MEMORY, in_process=True),
    "gs": StorageProtocol(GCS, "gcsfs", "gcs"),
    "gcs": StorageProtocol(GCS, "gcsfs", "gcs"),
    "s3": StorageProtocol(S3, "s3fs", "s3"),
    **dict.fromkeys(AZURE_NAMES, StorageProtocol(AZURE, "adlfs", "azure")),
    "hf": StorageProtocol(HUB, "huggingface_hub", "hub"),
    "http": StorageProtocol(READ_ONLY, "aiohttp", whole_uris=True),
    "https": StorageProtocol(READ_ONLY, "aiohttp", whole_uris=True),
}
OTHER = StorageProtocol(READ_ONLY)  # everything else that fsspec supports
# Their libraries take the name of the server and a login as arguments, not from the URI.
OF_SERVERS = frozenset({"ftp", "sftp", "smb", "ssh", "webdav", "webhdfs"})
# Their libraries open URIs of every other store by themselves, without the checks that wherry makes of its addresses.
OF_OTHER_STORES = frozenset({"generic"})


def protocol_of(name: str) -> StorageProtocol:
    """What is known of a protocol."""
    return PROTOCOLS.get(name, OTHER)
