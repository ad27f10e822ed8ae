"""Files of torch.save: the zip form (torch 1.6 and later), the stream before it, and TorchScript archives.

TorchScript, and the tar archives of torch 0.1, are detected but not read.

wherry's inert machine interprets the pickle inside; nothing in it is imported or called. Key paths are the keys and
indices of the nested containers; the manifest's `custom` records which keys were numbers and which nodes were objects
of a class. `containers/torch/archive.py` has the facts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NoReturn

from wherry.core.detection import Detection, Evidence
from wherry.core.manifest import Manifest, without_chunks
from wherry.errors import UnsupportedError, WherryError
from wherry.formats.format import Format, Glimpse, Holds, Opened, Options, Signs
from wherry.integrations.containers.flat.strides import StridedReader
from wherry.integrations.containers.torch.archive import (
    CONSTANTS,
    PICKLE,
    Archive,
    is_legacy,
    is_tar,
    read_archive,
    read_legacy,
    roots,
)
from wherry.integrations.containers.torch.layout import WRITABLE, Archives, archives_map, build, pickle_object
from wherry.integrations.containers.torch.values import RULES
from wherry.integrations.containers.zip.read import LOCAL_MAGIC, local_member, read_directory
from wherry.layout.tree_reading import read_tree
from wherry.store.location import Location
from wherry.target.file_map import FileMap, Scene

VERSION = "zip, version 3"
_OLD_SCRIPT = "/model.json"  # of torch 1.0 and 1.1
_TAR = "unsupported tar archive of torch before 0.2"


def _detect(glimpse: Glimpse) -> Detection | None:
    if not glimpse.head.startswith(LOCAL_MAGIC):
        return None
    try:
        found = roots(read_directory(glimpse.location))
        seen = f"a zip archive with {found[0]}{PICKLE}" if found else None
    except WherryError as error:  # a truncated file has no directory, but torch writes its pickle first
        cut = local_member(glimpse.head)[0].endswith(PICKLE)
        seen = f"a zip archive that starts with a pickle; {error.what}" if cut else None
    return glimpse.detected("torch-zip", "zip", "torch", seen) if seen else None


def _open(location: Location, detection: Detection) -> Opened:
    archive = read_archive(location)
    version = f"zip, version {archive.version}" if archive.version else "zip"
    return _open_archive(location, replace(detection, format_version=version), archive)


def _open_archive(location: Location, detection: Detection, archive: Archive) -> Opened:
    tree = archive.tree
    manifest = tree.manifest(archive.specs, detection.step)
    manifest = replace(manifest, kind=read_tree(manifest).whole)
    seen = Evidence(location.name, f"{len(archive.placed)} tensors, {len(tree.values)} other values")
    precise = replace(detection, kind=manifest.kind).seen(seen)
    return Opened(precise, manifest, StridedReader(location, archive.placed, (location.present(),)))


def _prepare(manifest: Manifest, _options: Options) -> Manifest:
    build(manifest)  # refuses unrepresentable contents before any bytes are written
    return without_chunks(manifest)


def _layout(manifest: Manifest, _options: Options, _scene: Scene) -> FileMap:
    return archives_map({".": Archives([pickle_object(build(manifest))])})


def _detect_script(glimpse: Glimpse) -> Detection | None:
    if not glimpse.head.startswith(LOCAL_MAGIC):
        return None
    try:
        directory = read_directory(glimpse.location)
    except WherryError:
        return None  # without a directory it looks like other archives; `_detect` handles those
    ending = next((ending for ending in (CONSTANTS, _OLD_SCRIPT) if roots(directory, ending)), None)
    if ending is None:
        return None
    seen = f"a zip archive with {roots(directory, ending)[0]}{ending}"
    return glimpse.detected("torchscript", "TorchScript zip", "torch", seen)


def _detect_legacy(glimpse: Glimpse) -> Detection | None:
    if is_legacy(glimpse.head):
        seen = "starts with torch's magic number, pickled"
        return glimpse.detected("torch-legacy", "legacy stream", "torch", seen)
    if is_tar(glimpse.head):
        seen = "a tar archive that starts with a member name of torch"
        found = glimpse.detected("torch-legacy", "tar", "torch 0.1", seen)
        return replace(found, verdict="unsupported", reason=_TAR)
    return None


def _open_legacy(location: Location, detection: Detection) -> Opened:
    if detection.format_version == "tar":
        raise UnsupportedError(_TAR, uri=location.uri, cure="load it with torch 0.4 to 2.5 and save it again")
    return _open_archive(location, detection, read_legacy(location))


def _refuse_script(location: Location, _detection: Detection) -> NoReturn:
    raise UnsupportedError(
        "unsupported TorchScript archive: its tensors are defined by code",
        uri=location.uri,
        cure="load it with torch.jit.load and save its state_dict()",
    )


FORMATS = (
    Format(
        name="torch-zip",
        title="torch.save, zip archive",
        detect=_detect,
        signs=Signs(head=LOCAL_MAGIC),
        open=_open,
        layout=_layout,
        holds=Holds(dtypes=WRITABLE, values=True, empties=True, types=True),
        aliases=("pt", "bin"),
        single_file=True,
        loaded_by="torch 2.13",
        version=lambda _manifest, _options: VERSION,
        prepare=_prepare,
        pickle_globals=lambda: RULES.allowed,
    ),
    Format(
        name="torch-legacy",
        title="torch.save, legacy (before torch 1.6)",
        detect=_detect_legacy,
        signs=Signs(head=rb"\x80|sys_info|pickle|storages|tensors|\./"),
        open=_open_legacy,
        holds=Holds(dtypes=frozenset()),
        single_file=True,
    ),
    Format(
        name="torchscript",
        title="TorchScript archive",
        detect=_detect_script,
        signs=Signs(head=LOCAL_MAGIC),
        open=_refuse_script,
        readable=False,
        holds=Holds(dtypes=frozenset()),
        refines=("torch-zip",),
        single_file=True,
    ),
)
