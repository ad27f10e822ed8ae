"""Files of torch.save in the zip form (torch 1.6 and later), and TorchScript archives, which are only recognised.

The pickle inside is interpreted by our own inert machine; nothing in it is imported or called. Key paths are the
keys and indices of the nested containers. `containers/torch_zip.py` has the facts of the archive.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from wherry.detection import Detection, Evidence
from wherry.errors import UnsupportedError, WherryError
from wherry.format import Format, Holds, Opened
from wherry.integrations.containers.stored_zip import LOCAL_MAGIC, first_name, read_directory
from wherry.integrations.containers.torch_object import build, pickled
from wherry.integrations.containers.torch_reader import TorchReader
from wherry.integrations.containers.torch_zip import CONSTANTS, PICKLE, read_archive, roots
from wherry.integrations.containers.torch_zip_writer import WRITABLE, ArchivesWriter, place_archives
from wherry.location import Entry
from wherry.manifest import Manifest

if TYPE_CHECKING:
    from typing import NoReturn

    from wherry.format import Glimpse, Options
    from wherry.location import Location

VERSION = "zip, version 3"


def _detect(glimpse: Glimpse) -> Detection | None:
    if not glimpse.head.startswith(LOCAL_MAGIC):
        return None
    seen = _pickle_seen(glimpse)
    if seen is None:
        return None
    return Detection(
        uri=glimpse.location.uri,
        format="torch-zip",
        format_version="zip",
        writer="torch",
        evidence=(Evidence(glimpse.location.name, seen),),
    )


def _pickle_seen(glimpse: Glimpse) -> str | None:
    """What speaks for a torch archive; a file that was cut has no directory, but torch writes its pickle first."""
    try:
        found = roots(read_directory(glimpse.location))
    except WherryError as error:
        cut = first_name(glimpse.head).endswith(PICKLE)
        return f"a zip archive that begins with a pickle; {error.what}" if cut else None
    return f"a zip archive with {found[0]}{PICKLE}" if found else None


def _open(location: Location, detection: Detection) -> Opened:
    archive = read_archive(location)
    entry = location.stat()
    assert entry is not None
    tree = archive.tree
    manifest = Manifest(
        tensors=archive.specs,
        values=tree.values,
        empties=tree.empties,
        lists=frozenset(tree.lists),
        step=detection.step,
        kind=tree.kind,
    )
    version = f"zip, version {archive.version}" if archive.version else "zip"
    member = Entry(location.name, entry.size, is_dir=False, mark=entry.mark)
    seen = Evidence(location.name, f"{len(archive.placed)} tensors, {len(tree.values)} other values")
    precise = replace(detection, format_version=version, kind=tree.kind).seen(seen)
    return Opened(precise, manifest, TorchReader(location, archive.placed, (member,)))


def _create(staging: Location, manifest: Manifest, _options: Options) -> ArchivesWriter:
    archive = pickled(build(manifest, staging.uri))
    return ArchivesWriter(staging.parent, {staging.name: place_archives([archive])})


def _detect_script(glimpse: Glimpse) -> Detection | None:
    if not glimpse.head.startswith(LOCAL_MAGIC):
        return None
    try:
        scripts = roots(read_directory(glimpse.location), CONSTANTS)
    except WherryError:
        return None  # without a directory nothing tells it from any other archive, which `_detect` judges
    if not scripts:
        return None
    return Detection(
        uri=glimpse.location.uri,
        format="torchscript",
        format_version="TorchScript zip",
        writer="torch",
        evidence=(Evidence(glimpse.location.name, f"a zip archive with {scripts[0]}{CONSTANTS}"),),
    )


def _refuse_script(location: Location, _detection: Detection) -> NoReturn:
    raise UnsupportedError(
        "TorchScript archives are not read: their tensors are reached through their code",
        uri=location.uri,
        cure="load it with torch.jit.load and save its state_dict()",
    )


FORMATS = (
    Format(
        name="torch-zip",
        title="torch.save, zip archive",
        detect=_detect,
        open=_open,
        create=_create,
        holds=Holds(dtypes=WRITABLE, values=True, empties=True),
        aliases=("pt", "bin"),
        single_file=True,
        loaded_by="torch 2.13",
        version=lambda _manifest, _options: VERSION,
    ),
    Format(
        name="torchscript",
        title="TorchScript archive",
        detect=_detect_script,
        open=_refuse_script,
        create=None,
        readable=False,
        holds=Holds(dtypes=frozenset()),
        refines=("torch-zip",),
        single_file=True,
    ),
)
