"""T5X: checkpoints of T5 and related models, in T5X's own layout and as T5X saves them through Orbax.

`t5x-legacy` is a folder with the msgpack tree `checkpoint` and zarr arrays next to it, or that file alone with every
array inside; versions 2 and 3 are read, 0 and 1 are refused with T5X's own message. `t5x-orbax` is the step folder
around the Orbax item `state`, in all its generations. The msgpack file, the item, the step folder and the run folder
resolve to the same checkpoint. `layout.py`, `legacy.py` and `item.py` have the facts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from wherry.core.detection import Detection, Evidence
from wherry.core.manifest import Manifest
from wherry.formats.format import Format, Glimpse, Holds, Option, Options, Signs
from wherry.integrations.containers.orbax import layout as orbax_layout
from wherry.integrations.containers.orbax import write as orbax
from wherry.integrations.containers.orbax.detection import SIGNS
from wherry.integrations.containers.orbax.detection import detect as detect_item
from wherry.integrations.containers.zarr.metadata import STORABLE
from wherry.integrations.formats.t5x import item, layout
from wherry.integrations.formats.t5x.item import open_train_state
from wherry.integrations.formats.t5x.legacy import format_version, open_legacy
from wherry.integrations.formats.t5x.write import lay_out_legacy, lay_out_train_state, prepare_grids
from wherry.store.local_store import locate
from wherry.store.location import Location

SYSTEM, LEGACY, ORBAX = "t5x", "t5x-legacy", "t5x-orbax"


def detect_legacy(glimpse: Glimpse) -> Detection | None:
    """Detect a checkpoint folder, its msgpack file, or a file with everything inside; None if it is none of these."""
    location = glimpse.location
    if glimpse.is_file:
        if location.name == layout.MSGPACK:
            return detect_legacy(Glimpse(location.parent))
        return _with_envelope(location, location, glimpse.size, glimpse.head)
    entry = glimpse.entries.get(layout.MSGPACK)
    if entry is not None and not entry.is_dir and entry.size:
        return _with_envelope(location, location.join(layout.MSGPACK), entry.size, None)
    # Arrays with T5X's names, without the msgpack file that T5X writes last.
    arrays = layout.array_folders(glimpse.entries)
    inside = orbax_layout.look_at_item(glimpse) is not None or location.name == item.ITEM
    if not arrays or inside:
        return None
    reason = f"missing {layout.MSGPACK}, which T5X writes last, next to {len(arrays)} arrays of parameters"
    return _remains(glimpse, LEGACY, arrays, reason)


def _remains(glimpse: Glimpse, name: str, arrays: Sequence[str], reason: str) -> Detection:
    """The arrays of a checkpoint that lacks its tree."""
    seen = Evidence(arrays[0], "an array with a name in T5X's form")
    step = layout.step_of(glimpse.location.name)
    return glimpse.detected(name, None, "t5x", seen, step=step, reason=reason)


def _with_envelope(location: Location, file: Location, size: int, head: bytes | None) -> Detection | None:
    seen = layout.look_at(file, size, head)
    if seen is None:
        return None
    keys = "the keys version and optimizer" if seen.versioned else "no version"
    leaves = [
        word
        for word, there in (("tensorstore specs", seen.specs), ("placeholders", seen.placeholders))
        if there
    ]
    found = Detection(
        uri=location.uri,
        format=LEGACY,
        format_version=format_version(seen.version, arrays=seen.specs or seen.placeholders),
        writer="t5x",
        step=layout.step_of(location.name),
        kind="train-state" if seen.optimizer_state else None,
        evidence=(
            Evidence(file.name, f"a msgpack map with {keys}"),
            *(Evidence(file.name, f"{word} among the leaves") for word in leaves),
            *([Evidence(file.name, f"version {seen.version}")] if seen.version is not None else []),
        ),
    )
    if layout.is_uncommitted(location.name):
        reason = "the folder has the suffix .tmp-<seconds> of a save that was never committed"
        return replace(found, verdict="incomplete", reason=reason)
    if seen.version is not None and seen.version < layout.OLDEST_VERSION:
        reason = f"{layout.TOO_OLD}. Got version: {seen.version}"
        return replace(found, verdict="unsupported", reason=reason)
    if seen.version is not None and seen.version > layout.NEWEST_VERSION:
        return found.seen(
            Evidence(file.name, f"newer than any version that was tested ({layout.NEWEST_VERSION})")
        )
    return found


def detect_orbax(glimpse: Glimpse) -> Detection | None:
    """Detect a step folder around a T5X train state, that item, or its msgpack file; None if it is none of these."""
    location = glimpse.location
    if glimpse.is_file:
        inside = location.name == layout.MSGPACK and item.holds_train_state(location.parent)
        return detect_orbax(Glimpse(location.parent)) if inside else None
    if not item.may_hold_train_state(glimpse):
        return _remains_of_item(glimpse)
    claim = detect_item(glimpse)
    if claim is None:
        return None
    place = replace(location, path=locate(claim.uri).path)  # permissions to read refer to that location
    home, seen = item.home_of(place), item.holds_train_state(place)
    named = item.names_handler(home)
    if (seen is None and not named) or detect_legacy(Glimpse(place)) is not None:
        return None
    evidence = [Evidence(seen, "the roots of a T5X train state: state, target")] if seen else []
    if named:
        evidence.append(Evidence(orbax_layout.CHECKPOINT, "names T5X's dataset handler"))
    prefix = "" if home == place else f"{place.name}/"
    return replace(
        claim,
        uri=home.uri,
        format=ORBAX,
        writer=claim.writer if (claim.writer or "").startswith("wherry") else f"t5x with {claim.writer}",
        evidence=(*evidence, *(replace(one, file=f"{prefix}{one.file}") for one in claim.evidence)),
    )


def _remains_of_item(glimpse: Glimpse) -> Detection | None:
    """Detect an item `state` with arrays but without its tree."""
    state = glimpse.entries.get(item.ITEM)
    inner = Glimpse(glimpse.location.join(item.ITEM)) if state is not None and state.is_dir else glimpse
    arrays = layout.array_folders(inner.entries)
    if not arrays or inner.location.name != item.ITEM:
        return None
    reason = f"missing {layout.MSGPACK} or {orbax_layout.TREE} next to {len(arrays)} arrays of parameters"
    return _remains(glimpse, ORBAX, arrays, reason)


def legacy_version(manifest: Manifest, _options: Options) -> str:
    """The format version of the checkpoint to write."""
    arrays = any(spec.chunks is not None for spec in manifest.tensors.values())
    return format_version(layout.NEWEST_VERSION, arrays=arrays)


_CHUNKS = Option("auto", orbax.CHUNK_HELP)

FORMATS = (
    Format(
        name=LEGACY,
        title="T5X (legacy)",
        detect=detect_legacy,
        signs=Signs(
            head=rb"[\x80-\x9f\xdc-\xdf]",
            files=(layout.MSGPACK,),
            entries=frozenset({layout.MSGPACK}),
            folders=True,
        ),
        open=open_legacy,
        layout=lay_out_legacy,
        holds=Holds(dtypes=STORABLE, values=True, empties=True, companions=True),
        refines=("flax-msgpack", "flax-gda", "orbax"),
        system=SYSTEM,
        form=layout.FORM,
        aliases=("t5x",),
        commit_members=(layout.MSGPACK,),
        options={
            "compression": Option(
                "none", "compression of chunks; T5X itself uses gzip", ("none", "gzip", "zstd")
            ),
            "inline": Option(
                "auto",
                "which tensors to store in the msgpack file: auto (up to 64 KiB, none of `target`), none, all",
                ("auto", "none", "all"),
            ),
            "chunks": _CHUNKS,
        },
        loaded_by="T5X from 2021-06 (version 3); tested with flax 0.12.8 and tensorstore 0.1.86",
        version=legacy_version,
        step_folder=layout.step_folder,
        in_store=orbax.in_store,
        prepare=prepare_grids,
    ),
    Format(
        name=ORBAX,
        title="T5X (Orbax)",
        detect=detect_orbax,
        signs=replace(SIGNS, files=(layout.MSGPACK,)),
        open=open_train_state,
        layout=lay_out_train_state,
        holds=Holds(dtypes=STORABLE, zero_size=False, values=True, empties=True, companions=True),
        refines=("orbax", "flax-msgpack"),
        system=SYSTEM,
        form=layout.FORM,
        commit_members=(orbax_layout.COMMITTED,),
        options={
            "ocdbt": Option(default=True, help="write one OCDBT database instead of one folder per array"),
            "compression": Option("none", "compression of chunks", ("none", "zstd")),
            "chunks": _CHUNKS,
            "data_file_size": orbax.FILE_OPTION,
        },
        loaded_by="T5X from 2024-07 with orbax-checkpoint 0.12.8: PyTreeCheckpointer, CheckpointManager",
        version=lambda manifest, options: orbax.version(manifest, {**options, "zarr": "2"}),
        step_folder=layout.step_folder,
        in_store=orbax.in_store,
        prepare=lambda manifest, options: orbax.prepare(manifest, {**options, "zarr": "2"}),
    ),
)
