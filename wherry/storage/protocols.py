"""protocols: what wherry knows of each storage protocol: what the store can do, and what provides it.

The capabilities are declared, not guessed, as restic's `Properties` are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from wherry.remote import azure
from wherry.storage.location import Capabilities

LOCAL = Capabilities(
    atomic_rename=True,
    create_only_put=True,
    ranged_writes=True,
    local=True,
    create_only_large=True,
    range_copy=True,
    consistent_listing=True,
    version="time",
    fills=True,
)
READ_ONLY = Capabilities(atomic_rename=False, create_only_put=False, ranged_writes=False, local=False)
# A store of objects of which nothing more is known.
OBJECTS = Capabilities(atomic_rename=False, create_only_put=True, ranged_writes=False, local=False)
MEMORY = replace(
    OBJECTS,
    create_only_large=True,
    range_copy=True,
    object_copy=True,
    checksums=("crc32c",),
    consistent_listing=True,
    version="time",
    fills=True,
)
# Parts are objects that `compose` joins with ifGenerationMatch=0; a multipart upload of the XML API has no conditions.
# `rewrite` copies whole objects only.
GCS = replace(
    OBJECTS,
    create_only_large=True,
    object_copy=True,
    checksums=("crc32c",),
    consistent_listing=True,
    version="generation",
    fills=True,
)
# If-None-Match on PutObject and on CompleteMultipartUpload; UploadPartCopy copies ranges.
S3 = replace(
    OBJECTS,
    create_only_large=True,
    range_copy=True,
    object_copy=True,
    checksums=("crc32c",),
    consistent_listing=True,
    version="etag",
    fills=True,
)
# If-None-Match on Put Blob and on Put Block List. A copy of a range would need a signed URL of the
# source. Only what is sent at once has a checksum: small objects, and the parts of others.
AZURE = replace(
    OBJECTS,
    create_only_large=True,
    object_copy=True,
    checksums=("md5",),
    consistent_listing=True,
    version="etag",
    fills=True,
)
HUB = replace(READ_ONLY, one_commit=True, consistent_listing=True, version="blob")


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
    **dict.fromkeys(azure.PROTOCOLS, StorageProtocol(AZURE, "adlfs", "azure")),
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
