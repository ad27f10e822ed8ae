"""Flax msgpack: files of `flax.training.checkpoints` and `flax.serialization`, and their multi-process variant.

Detected by content: the first 4 KiB start a msgpack map with text keys, and either contain an array or the file has a
name that flax uses. The arrays of a multi-process save are in the folder `<file>_gda` next to the file. Key paths are
the keys of the msgpack tree; Python numbers count as zero-dimensional tensors, texts are values. `files.py` describes
the names, `containers/msgpack/index.py` the encoding.
"""

from __future__ import annotations

from dataclasses import replace

from wherry.core.detection import Detection, Evidence
from wherry.core.keypath import render
from wherry.core.manifest import Manifest, without_chunks
from wherry.formats.format import Format, Glimpse, Holds, Options
from wherry.formats.glimpse import Signs
from wherry.integrations.containers.msgpack.index import Glance, glance
from wherry.integrations.containers.msgpack.layout import WRITABLE, lay_out
from wherry.integrations.formats.flax.files import (
    ARRAYS_SUFFIX,
    FOREIGN,
    PLACEHOLDER,
    is_numbered,
    open_file,
    open_with_arrays,
    plausible,
    step_of,
    temporary,
)
from wherry.target.file_map import FileMap, Scene

VERSION = "one msgpack file"
VERSION_WITH_ARRAYS = "msgpack with GDA placeholders and zarr2 folders"
_FAULTS = {"cut": "; the file is truncated inside an object", "wrong": "; the file is inconsistent"}
_SHOWN_KEYS = 6
_BARE_ARRAYS = (0xC7, 0xC8, 0xC9, 0xD7, 0xD8)
_HEAD_OF_TEXT = 8


def _detect(glimpse: Glimpse) -> Detection | None:
    if not glimpse.is_file:
        return None
    seen = _find_evidence(glimpse)
    return None if seen is None else _detection(glimpse, "flax-msgpack", VERSION, seen)


def _find_evidence(glimpse: Glimpse) -> str | None:
    """Evidence for a flax file, or None."""
    name = glimpse.location.name
    look = glance(glimpse.head, glimpse.size)
    if look is None:
        bare = is_numbered(name) and glimpse.head[:1] and glimpse.head[0] in _BARE_ARRAYS
        return "a msgpack extension object, the form of a single array in flax" if bare else None
    if any(text.startswith(FOREIGN) for text in look.texts):
        return None
    named = plausible(name, look.state)
    if not look.arrays and not named and not (temporary(name) and _placeholders(look)):
        return None
    roots = [render(path) for path in look.paths if len(path) == 1]
    more = "" if look.state == "whole" else " …"
    arrays = f", {look.arrays} arrays in flax's encoding" if look.arrays else ""
    return f"a msgpack map with the keys {', '.join(roots[:_SHOWN_KEYS])}{more}{arrays}{_FAULTS.get(look.state, '')}"


def _placeholders(look: Glance) -> bool:
    return any(text.startswith(PLACEHOLDER) for text in look.texts)


def _detection(glimpse: Glimpse, format_name: str, version: str, seen: str) -> Detection:
    location = glimpse.location
    unfinished = temporary(location.name)
    return Detection(
        uri=location.uri,
        format=format_name,
        format_version=version,
        writer="flax",
        step=step_of(location.name),
        verdict="incomplete" if unfinished else "ok",
        reason=f"{location.name} is the name of an unfinished save" if unfinished else None,
        evidence=(Evidence(location.name, seen),),
    )


def _detect_with_arrays(glimpse: Glimpse) -> Detection | None:
    if glimpse.is_dir:
        return _remains(glimpse)
    if not glimpse.is_file:
        return None
    look = glance(glimpse.head, glimpse.size)
    if look is None:
        found = PLACEHOLDER.encode() in glimpse.head[: len(PLACEHOLDER) + _HEAD_OF_TEXT]
    else:
        found = _placeholders(look)
        if not found and look.state != "whole":
            # A file without a placeholder in its first bytes may have a folder of arrays nevertheless.
            entry = glimpse.location.parent.join(glimpse.location.name + ARRAYS_SUFFIX).entry
            found = entry is not None and entry.is_dir
    if not found:
        return None
    seen = "placeholders of arrays that are stored in a folder next to the file"
    return _detection(glimpse, "flax-gda", VERSION_WITH_ARRAYS, seen)


def _remains(glimpse: Glimpse) -> Detection | None:
    """A folder that is one half of a checkpoint, or that holds only an unfinished save."""
    location = glimpse.location
    owner = location.name.removesuffix(ARRAYS_SUFFIX)
    if owner != location.name and location.parent.join(owner).exists():
        return _half(glimpse, f"the folder has only the arrays of ../{owner}; open that file")
    if owner != location.name and is_numbered(owner):
        return _half(
            glimpse, f"file not found: ../{owner}, which these arrays belong to; flax renames it last"
        )
    unfinished = {name for name in glimpse.entries if temporary(name.removesuffix(ARRAYS_SUFFIX))}
    pairs = {name for name in unfinished if name + ARRAYS_SUFFIX in unfinished}
    if not pairs or unfinished != set(glimpse.entries):
        return None
    listed = " and ".join(sorted(unfinished))
    return _half(glimpse, f"temporary names {listed}: the save was killed while it wrote arrays")


def _half(glimpse: Glimpse, reason: str) -> Detection:
    seen = ", ".join(sorted(glimpse.entries)) or "nothing"
    return Detection(
        uri=glimpse.location.uri,
        format="flax-gda",
        format_version=VERSION_WITH_ARRAYS,
        writer="flax",
        verdict="incomplete",
        reason=reason,
        evidence=(Evidence(".", f"holds {seen}"),),
    )


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
        open=open_file,
        layout=_layout,
        holds=Holds(dtypes=WRITABLE, values=True, empties=True),
        aliases=("flax", "msgpack"),
        single_file=True,
        loaded_by="flax 0.8.3 and 0.12.8: serialization.msgpack_restore, training.checkpoints.restore_checkpoint",
        version=lambda _manifest, _options: VERSION,
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
        open=open_with_arrays,
        holds=Holds(dtypes=frozenset()),
        refines=("flax-msgpack",),
        single_file=True,
    ),
)
