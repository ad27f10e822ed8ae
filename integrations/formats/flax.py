"""Flax msgpack: files of `flax.training.checkpoints` and `flax.serialization`, and their multi-process variant.

Detected by content: the first 4 KiB start a msgpack map with text keys, and either contain an array or the file has a
name that flax uses. The arrays of a multi-process save are in the folder `<file>_gda` next to the file. Key paths are
the keys of the msgpack tree; Python numbers count as zero-dimensional tensors, texts are values.
`containers/msgpack/index.py` describes the encoding.

Facts (flax `training/checkpoints.py`, 0.3 to 0.12): a checkpoint is the file `<prefix><step>`, prefix `checkpoint_`
by default, step an int or a float, possibly negative; it is written as `<prefix>tmp` and renamed. Arrays that no single
process held are in the folder `<file>_gda`, one zarr array below `a/b/c/` for the leaf with the text
`//GDAPlaceholder:a/b/c`. The folder is renamed first, then the file; on Google's store the folder has its final name
from the start and is committed when it has `commit_success.txt`. Transformers writes `flax_model.msgpack`.

linen boxes (`Partitioned`, `LogicallyPartitioned`) are one more key `value` around a leaf, and so are NNX variables
(`raw_value` in flax 0.8); logical axis names are not stored.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from wherry.core import dtypes
from wherry.core.detection import Detection, Evidence
from wherry.core.keypath import KeyPath, render
from wherry.core.manifest import Manifest, without_chunks
from wherry.errors import IncompleteError
from wherry.formats.format import Contents, Format, Glimpse, Holds, Opened, Options, Signs
from wherry.integrations.containers.flat.reader import FlatReader
from wherry.integrations.containers.msgpack.contents import MsgpackContents, gather
from wherry.integrations.containers.msgpack.index import Glance, glance, index_file
from wherry.integrations.containers.msgpack.layout import WRITABLE, lay_out
from wherry.integrations.containers.orbax.layout import PLACEHOLDERS, RENAMELESS
from wherry.layout.forms import BOX, OLD_VARIABLE, wrapped_leaves
from wherry.layout.tree_reading import read_leaves
from wherry.mover.read import read_array
from wherry.store.location import Location
from wherry.target.file_map import FileMap, Scene

if TYPE_CHECKING:
    from wherry.integrations.containers.zarr.reader import ArrayReader

_PREFIX = "checkpoint_"
_ARRAYS_SUFFIX = "_gda"
_PLACEHOLDER = "//GDAPlaceholder:"
_COMMITTED = "commit_success.txt"
_SUFFIX = ".msgpack"
_NUMBERED = re.compile(r"(?:.*_)?(-?\d{1,15}(?:\.\d+)?)(?:\.msgpack)?")
_TEMPORARY = re.compile(r"(?:.*_)?tmp")
_BOXES = {BOX: "a linen box or an NNX variable", OLD_VARIABLE: "an NNX variable of flax 0.8"}


def _step_of(name: str) -> int | None:
    """The step in a file name; None if there is none, or a fraction."""
    found = _NUMBERED.fullmatch(name)
    step = float(found.group(1)) if found else None
    return int(step) if step is not None and step.is_integer() else None


def _is_numbered(name: str) -> bool:
    """Whether a file has flax's name for a step, fractions included."""
    return _NUMBERED.fullmatch(name) is not None and "_" in name


def _plausible(name: str, state: str) -> bool:
    """Whether the name makes a msgpack map without a visible array a flax file.

    Args:
        name: name of the file.
        state: how far its first bytes could be parsed (`Glance`); the less, the stricter the check of the name.
    """
    if state == "wrong":
        return name.startswith(_PREFIX) or name.endswith(_SUFFIX)
    return _is_numbered(name) or (name.endswith(_SUFFIX) and state != "whole")


def _temporary(name: str) -> bool:
    """Whether a file has flax's name for an unfinished save."""
    return _TEMPORARY.fullmatch(name) is not None


def _boxes(paths: Iterable[KeyPath], file: str) -> tuple[Evidence, ...]:
    """Evidence of the wrappers around the leaves of a tree."""
    known = list(paths)
    counted = {box: len(wrapped_leaves(known, box)) for box in _BOXES}
    return tuple(
        Evidence(file, f"`{box}` alone around {count} of {len(known)} leaves: {_BOXES[box]}")
        for box, count in counted.items()
        if count
    )


_STEPS = (("step",), ("state", "step"))


def _open_file(location: Location, detection: Detection) -> Opened:
    """Open one msgpack file.

    Raises:
        IncompleteError: the name is that of an unfinished save.
        CorruptError, UnsupportedError, HostileError: see `index_file`.
    """
    _require_finished(detection)
    contents = gather(index_file(location), location)
    reader = FlatReader(location, contents.places, (location.present(),), packs=False)
    return _open_contents(location, detection, contents, reader)


def _open_with_arrays(location: Location, detection: Detection) -> Opened:
    """Open a msgpack file together with its folder of arrays.

    Raises:
        IncompleteError: the save is unfinished, or the folder of the arrays or the metadata of an array is missing.
        CorruptError, UnsupportedError, HostileError: as above, or a placeholder points outside the folder.
    """
    from wherry.integrations.containers.zarr.reader import (
        WithinReader,  # most files have no arrays next to them
    )

    _require_finished(detection)
    contents = gather(index_file(location), location)
    names = {
        path: value.removeprefix(_PLACEHOLDER)
        for path, value in contents.values.items()
        if isinstance(value, str) and value.startswith(_PLACEHOLDER)
    }
    folder = location.parent.join(location.name + _ARRAYS_SUFFIX)
    arrays = _arrays(folder, names)
    arrays.inline = FlatReader(location, contents.places, (), packs=False)
    for path in names:
        del contents.values[path]
    contents.specs |= {path: array.spec(path) for path, array in arrays.arrays.items()}
    seen = Evidence(location.name, f"{len(names)} placeholders of arrays in {folder.name}")
    reader = WithinReader(arrays, {location.name: location, folder.name: folder})
    return _open_contents(location, detection.seen(seen), contents, reader)


def _require_finished(detection: Detection) -> None:
    if detection.verdict == "incomplete":
        raise IncompleteError(
            detection.reason or "the save was never finished", uri=detection.uri, cure="use another step"
        )


def _open_contents(
    location: Location, detection: Detection, contents: MsgpackContents, reader: Contents
) -> Opened:
    specs, name = contents.specs, location.name
    stored = _stored_step(contents, reader)
    step = stored if detection.step is None else detection.step
    kind = read_leaves(specs, contents.values, contents.empties, specs=specs).whole_of_arrays
    manifest = contents.manifest(step, kind)
    evidence = [Evidence(name, f"{len(specs)} tensors, {len(contents.values)} other values")]
    if contents.marked:
        evidence.append(Evidence(name, "array headers in a form that only wherry writes"))
    if stored is not None and stored != step:
        evidence.append(
            Evidence(name, f"step {step} in the name, step {stored} in the tree; flax uses the name")
        )
    precise = replace(
        detection, step=step, kind=kind, writer="wherry (as flax)" if contents.marked else "flax"
    )
    return Opened(precise.seen(*evidence, *_boxes(specs, name)), manifest, reader)


def _stored_step(contents: MsgpackContents, reader: Contents) -> int | None:
    """The step stored in the tree."""
    for path in _STEPS:
        value = contents.values.get(path)
        if type(value) is int:
            return value
        spec = contents.specs.get(path)
        if spec is not None and spec.shape == () and "int" in spec.dtype and dtypes.bits(spec.dtype) >= 8:  # noqa: PLR2004
            return int(read_array(reader, spec, ()))
    return None


def _arrays(folder: Location, names: dict[KeyPath, str]) -> ArrayReader:
    """The reader of the arrays that the placeholders name."""
    from wherry.integrations.containers.zarr import kvstore, metadata
    from wherry.integrations.containers.zarr.listing import list_files
    from wherry.integrations.containers.zarr.reader import ArrayReader, StoredArray

    if folder.entry is None:
        raise _lost_error(f"folder not found: {folder.name} with {len(names)} arrays", folder)
    if folder.store.protocol in RENAMELESS and not folder.join(_COMMITTED).exists():
        raise _lost_error(
            f"missing {_COMMITTED} in {folder.name}, which flax requires on {folder.store.protocol}://",
            folder,
        )
    kvstore.base_spec(folder)
    listing = list_files(folder)
    arrays: dict[KeyPath, StoredArray] = {}
    for path, name in names.items():
        place = folder.member(name) if name else folder
        data = listing.read(f"{name}/.zarray" if name else ".zarray")
        if data is None:
            raise _lost_error(f"missing .zarray in {folder.name}/{name}", folder, path)
        arrays[path] = StoredArray(name, metadata.parse(data, 2, place.uri))
    # jax's serializer stores every chunk, zeros included.
    return ArrayReader(folder, arrays, listing, kvstore.context(), ocdbt=False, zeros_stored=True)


def _lost_error(what: str, folder: Location, path: KeyPath | None = None) -> IncompleteError:
    shown = None if path is None else render(path)
    cure = "copy it from the original location, or use another step"
    return IncompleteError(what, uri=folder.uri, path=shown, cure=cure)


_VERSION = "one msgpack file"
_VERSION_WITH_ARRAYS = "msgpack with GDA placeholders and zarr2 folders"
_FAULTS = {"cut": "; the file is truncated inside an object", "wrong": "; the file is inconsistent"}
_SHOWN_KEYS = 6
_BARE_ARRAYS = (0xC7, 0xC8, 0xC9, 0xD7, 0xD8)
_HEAD_OF_TEXT = 8


def _detect(glimpse: Glimpse) -> Detection | None:
    if not glimpse.is_file:
        return None
    seen = _find_evidence(glimpse)
    return None if seen is None else _detection(glimpse, "flax-msgpack", _VERSION, seen)


def _find_evidence(glimpse: Glimpse) -> str | None:
    """Evidence for a flax file, or None."""
    name = glimpse.location.name
    look = glance(glimpse.head, glimpse.size)
    if look is None:
        bare = _is_numbered(name) and glimpse.head[:1] and glimpse.head[0] in _BARE_ARRAYS
        return "a msgpack extension object, the form of a single array in flax" if bare else None
    if any(text.startswith(PLACEHOLDERS) for text in look.texts):
        return None
    named = _plausible(name, look.state)
    if not look.arrays and not named and not (_temporary(name) and _placeholders(look)):
        return None
    roots = [render(path) for path in look.paths if len(path) == 1]
    more = "" if look.state == "whole" else " …"
    arrays = f", {look.arrays} arrays in flax's encoding" if look.arrays else ""
    return f"a msgpack map with the keys {', '.join(roots[:_SHOWN_KEYS])}{more}{arrays}{_FAULTS.get(look.state, '')}"


def _placeholders(look: Glance) -> bool:
    return any(text.startswith(_PLACEHOLDER) for text in look.texts)


def _detection(glimpse: Glimpse, format_name: str, version: str, seen: str) -> Detection:
    name = glimpse.location.name
    reason = f"{name} is the name of an unfinished save" if _temporary(name) else None
    return glimpse.detected(format_name, version, "flax", seen, step=_step_of(name), reason=reason)


def _detect_with_arrays(glimpse: Glimpse) -> Detection | None:
    if glimpse.is_dir:
        return _remains(glimpse)
    if not glimpse.is_file:
        return None
    look = glance(glimpse.head, glimpse.size)
    if look is None:
        found = _PLACEHOLDER.encode() in glimpse.head[: len(_PLACEHOLDER) + _HEAD_OF_TEXT]
    else:
        found = _placeholders(look)
        if not found and look.state != "whole":
            # A file without a placeholder in its first bytes may have a folder of arrays nevertheless.
            entry = glimpse.location.parent.join(glimpse.location.name + _ARRAYS_SUFFIX).entry
            found = entry is not None and entry.is_dir
    if not found:
        return None
    seen = "placeholders of arrays that are stored in a folder next to the file"
    return _detection(glimpse, "flax-gda", _VERSION_WITH_ARRAYS, seen)


def _remains(glimpse: Glimpse) -> Detection | None:
    """A folder that is one half of a checkpoint, or that holds only an unfinished save."""
    location = glimpse.location
    owner = location.name.removesuffix(_ARRAYS_SUFFIX)
    if owner != location.name and location.parent.join(owner).exists():
        return _half(glimpse, f"the folder has only the arrays of ../{owner}; open that file")
    if owner != location.name and _is_numbered(owner):
        return _half(
            glimpse, f"file not found: ../{owner}, which these arrays belong to; flax renames it last"
        )
    unfinished = {name for name in glimpse.entries if _temporary(name.removesuffix(_ARRAYS_SUFFIX))}
    pairs = {name for name in unfinished if name + _ARRAYS_SUFFIX in unfinished}
    if not pairs or unfinished != set(glimpse.entries):
        return None
    listed = " and ".join(sorted(unfinished))
    return _half(glimpse, f"temporary names {listed}: the save was killed while it wrote arrays")


def _half(glimpse: Glimpse, reason: str) -> Detection:
    seen = Evidence(".", f"holds {', '.join(sorted(glimpse.entries)) or 'nothing'}")
    return glimpse.detected("flax-gda", _VERSION_WITH_ARRAYS, "flax", seen, reason=reason)


def _prepare(manifest: Manifest, _options: Options) -> Manifest:
    """The manifest in the form of the file; refuses unrepresentable contents before any bytes move."""
    flat = without_chunks(manifest)
    lay_out({".": flat})
    nothing = dict.fromkeys((path for path, value in flat.values.items() if value is None), "none")
    values = {path: value for path, value in flat.values.items() if value is not None}
    return replace(flat, values=values, empties={**flat.empties, **nothing})


def _layout(manifest: Manifest, _options: Options, _scene: Scene) -> FileMap:
    return lay_out({".": manifest})


FORMATS = (
    Format(
        name="flax-msgpack",
        title="Flax msgpack file",
        detect=_detect,
        signs=Signs(head=rb"[\x80-\x9f\xc7-\xc9\xd4-\xd8\xdc-\xdf]"),
        open=_open_file,
        layout=_layout,
        holds=Holds(dtypes=WRITABLE, values=True, empties=True),
        aliases=("flax", "msgpack"),
        single_file=True,
        loaded_by="flax 0.8.3 and 0.12.8: serialization.msgpack_restore, training.checkpoints.restore_checkpoint",
        version=lambda _manifest, _options: _VERSION,
        step_folder=lambda step: f"checkpoint_{step}",
        prepare=_prepare,
    ),
    Format(
        name="flax-gda",
        title="Flax msgpack with separate array files",
        detect=_detect_with_arrays,
        signs=Signs(
            head=rb"[\x80-\x9f\xdc-\xdf]|.{0,8}//GDAPlaceholder:",
            ends=("tmp", "tmp_gda"),
            named=r".*_gda",
        ),
        open=_open_with_arrays,
        holds=Holds(dtypes=frozenset()),
        refines=("flax-msgpack",),
        single_file=True,
    ),
)
