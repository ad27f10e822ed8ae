"""native_source: where a library finds the checkpoint that it loads: in its place, or in a temporary local copy.

Few libraries read from stores of objects: torch.distributed.checkpoint through fsspec, and Orbax from gs://. They read
there themselves, in the child process, which gets the variables with the login and endpoint of that one store. For any
other library the files are copied to a temporary folder, within a size limit, and the report says so.
"""

from __future__ import annotations

import os
import shlex
import shutil
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from wherry.core.services import service
from wherry.core.units import parse_size, show_size
from wherry.errors import StorageError, UnsupportedError
from wherry.formats.pin import take_pin
from wherry.storage.copy import copy_files
from wherry.storage.stores import local_location, locate
from wherry.target.janitor import temporary_folder

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence

    from wherry.formats.checkpoint import Checkpoint
    from wherry.storage.location import Location

_VARIABLE, _MOST_BYTES = "WHERRY_CHILD_DISK", 32 << 30
# What the libraries of a store take from the environment; a name that ends with _ is the beginning of names.
_VARIABLES = {
    "gs": ("GOOGLE_", "CLOUDSDK_", "TENSORSTORE_GCS_", "STORAGE_EMULATOR_HOST", "NO_GCE_CHECK", "GCE_METADATA_HOST"),
    "s3": ("AWS_",),
}  # fmt: skip
# Where they find a login that no variable states.
_LOGINS = {"gs": ("~/.config/gcloud",), "s3": ("~/.aws",)}


@dataclass(frozen=True, slots=True)
class NativeSource:
    """A checkpoint as a library gets it.

    Attributes:
        path: a path, or a URI.
        reads: the files and folders that the library may read.
        variables: environment variables of the store.
        note: how the library got it; empty for local files.
    """

    path: str
    reads: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict[str, str])
    note: str = ""


@contextmanager
def native_source(checkpoint: Checkpoint, stores: Sequence[str] = ()) -> Generator[NativeSource]:
    """A checkpoint where a library can read it, while the block runs.

    Args:
        checkpoint: the opened checkpoint.
        stores: protocols of the stores from which the library itself reads.

    Raises:
        StorageError: the copy does not fit the disk, or the storage failed.
        UnsupportedError: the checkpoint exceeds the size limit of a copy.
        MismatchError: the checkpoint was changed while it was copied.
    """
    location = locate(checkpoint.uri)
    protocol = location.store.protocol
    if location.store.capabilities.local:
        yield NativeSource(location.path, files_of(checkpoint))
    elif protocol in stores:
        names = tuple(_VARIABLES[protocol])
        begin = tuple(name for name in names if name.endswith("_"))
        variables = {
            name: value for name, value in os.environ.items() if name in names or name.startswith(begin)
        }
        # The files from which the libraries of a store take the login, by default or by their variables.
        usual = (str(Path(name).expanduser()) for name in _LOGINS[protocol])
        logins = (*usual, *(value for value in variables.values() if value.startswith("/")))
        yield NativeSource(checkpoint.uri, logins, variables, f"it reads {protocol}:// itself")
    else:
        with temporary_folder("wherry-native-") as folder:
            nbytes, path = _copy(checkpoint, local_location(folder))
            note = f"it reads no {protocol}://: {show_size(nbytes)} were copied to a temporary folder"
            yield NativeSource(path, (path,), note=note)


def files_of(checkpoint: Checkpoint) -> tuple[str, ...]:
    """The paths of a local checkpoint, and of those of its files that links lead out of its folder.

    Args:
        checkpoint: the opened checkpoint.
    """
    pin = take_pin(checkpoint)
    place = locate(checkpoint.uri).path
    folder = os.path.realpath(place)  # unlike `resolve`, it takes a link that leads to itself for a path
    real = {Path(os.path.realpath(pin.base.join(name).path)) for name in pin.members}
    return (place, *sorted(str(path) for path in real if not path.is_relative_to(folder)))


def _copy(checkpoint: Checkpoint, folder: Location) -> tuple[int, str]:
    """Copy the files of a checkpoint; returns their bytes, and the path of the copy."""
    pin = take_pin(checkpoint)
    nbytes = sum(entry.size for entry in pin.members.values())
    _require_room(nbytes, checkpoint.uri, Path(folder.path))
    place = folder.join(locate(pin.uri).name)
    home = place if pin.base.uri == pin.uri else folder  # the folder that the members' names are relative to
    copy_files([(pin.base.member(name), home.member(name), one) for name, one in pin.members.items()], None)
    pin.require_unchanged(checkpoint)
    return nbytes, place.path


def _require_room(nbytes: int, uri: str, folder: Path) -> None:
    stated = os.environ.get(_VARIABLE) or service("settings").configured_value("child.disk")
    most = parse_size(stated) if stated else _MOST_BYTES
    if nbytes > most:
        raise UnsupportedError(
            f"the library reads only local files, and the checkpoint has {show_size(nbytes)}, which exceeds the limit "
            f"of {show_size(most)} for a temporary copy",
            uri=uri,
            cure=f"raise the limit: export {_VARIABLE}={nbytes}; or fetch it first: "
            f"`wherry fetch {shlex.quote(uri)} DIR`",
        )
    free = shutil.disk_usage(folder).free
    if nbytes > free:
        raise StorageError(
            f"the disk is too small for a temporary copy: {show_size(nbytes)} are needed, {show_size(free)} are free",
            uri=uri,
            cure="set TMPDIR to a folder with more free space",
        )
