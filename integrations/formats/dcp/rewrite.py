"""Rewrites of a DCP checkpoint: a new `.metadata` for older releases of torch, with every `.distcp` unchanged.

torch 2.15 stores the properties of a tensor in six fields; every release up to 2.14 fails on them with "too many values
to unpack", even when it only reads the metadata. Torch 2.3 and older do not have `StorageMeta` (2.4). Ranks that saved
without collectives (2.9) leave one metadata file each, which older releases do not look for. The items themselves have
the same archive format from 2.0 to 2.15, so only `.metadata` must be pickled again: five fields, no `StorageMeta`, one
file, and with the profile `2.3` the old module names; `layout.py` lists the releases that were tested. All other
metadata (nested paths, chunks in their order, requires_grad, memory format) is kept. Transformed items (zstd, torch
2.7) are refused, since only releases with that transform can read them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from wherry.core.detection import Detection
from wherry.cures import Argument, Blank, Command, Cure
from wherry.errors import CorruptError, UnsupportedError, UsageError, describe_exception
from wherry.formats.format import Change, Rewrite
from wherry.formats.registry import find_format
from wherry.integrations.containers.pickle.values import CallRecord, Global
from wherry.integrations.containers.pickle.writer import PickleWriter
from wherry.integrations.formats.dcp.folder import METADATA, SUFFIX, metadata_names
from wherry.integrations.formats.dcp.layout import FORMAT, WIDEST, chunk_record, properties, size
from wherry.integrations.formats.dcp.metadata import (
    FILESYSTEM_MODULE,
    METADATA_MODULE,
    Chunk,
    load_state,
    state_of,
)
from wherry.store.copy import list_files
from wherry.store.location import Location
from wherry.store.sidecar import OWN_NAMES

PROFILES = (WIDEST, "default")
_INFO = "_StorageInfo"
_MADE_ANEW = Cure(
    "convert the checkpoint: {}",
    Command(
        "convert", Blank("SOURCE"), Blank("TARGET"), Argument("to", "dcp"), Argument("set", "for_torch=2.3")
    ),
)


def _for_torch(location: Location, detection: Detection, value: str | None) -> Change:
    """Rewrite the metadata so that every torch from 2.0 (profile 2.3) or 2.3 (default) on can read it."""
    profile = value or WIDEST
    if profile not in PROFILES:
        raise UsageError(
            f"invalid value for for-torch: {profile!r}; expected {' or '.join(PROFILES)}",
            cure=f"choose {' or '.join(PROFILES)}",
        )
    files = list_files(location)
    marks = metadata_names({entry.name: entry for entry in location.entries()})
    opened = find_format(detection.format).open(location, detection)
    try:
        states = [load_state(location.join(mark)) for mark in marks]
        text = rewritten(states, profile, location.uri)
        _require_other(location, marks, text)
    except BaseException:
        opened.reader.close()
        raise
    stored = {
        state_of(info, _INFO)["relative_path"] for state in states for info in state["storage_data"].values()
    }
    stale = tuple(name for name in files if name.endswith(SUFFIX) and name not in stored)
    gone = {*marks, *stale, *OWN_NAMES, METADATA}
    return Change(
        opened=opened,
        carried={name: name for name in files if name not in gone},
        files={METADATA: text},
        left=(*(mark for mark in marks if mark != METADATA), *stale),
    )


def _require_other(location: Location, marks: list[str], text: bytes) -> None:
    if marks == [METADATA] and location.join(METADATA).read(0, len(text) + 1) == text:
        raise UsageError(
            "the metadata already has this form",
            uri=location.uri,
            cure="load the checkpoint without a rewrite",
        )


def rewritten(states: list[dict[str, Any]], profile: str, uri: str) -> bytes:
    """Build the bytes of one `.metadata`.

    Args:
        states: the metadata of each rank, or the one of all ranks; read by `load_state`.
        profile: `2.3` or `default`.
        uri: for errors.

    Raises:
        UnsupportedError: a transformed item.
        CorruptError: the states are inconsistent, or have an unknown form.
    """
    out = PickleWriter()
    tensors = _merged_tensors(states)
    storage = [pair for state in states for pair in state["storage_data"].items()]
    planned = [state["planner_data"] for state in states if state.get("planner_data") is not None]
    # None if no rank states nested paths, as for names that are flat already.
    paths = {name: path for one in planned for name, path in one.items()} if planned else None
    fields: dict[str, Callable[[], None]] = {
        "planner_data": lambda: out.value(paths),
        "state_dict_metadata": lambda: out.mapping(
            (name, partial(_describe, out, record, chunks, profile))
            for name, (record, chunks) in tensors.items()
        ),
        "storage_data": lambda: out.mapping(
            (partial(_key, out, state_of(key, "MetadataIndex")), partial(_info, out, state_of(info, _INFO)))
            for key, info in storage
        ),
        "storage_meta": lambda: out.value(None),
        "version": lambda: out.value(FORMAT),
    }
    try:
        out.state(METADATA_MODULE, "Metadata", fields.items())
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptError(
            f"invalid {METADATA}: {describe_exception(error)}",
            uri=uri,
            cure="restore .metadata from a backup",
        ) from error
    except UnsupportedError as error:
        error.uri = error.uri or uri
        raise
    return out.done()


def _merged_tensors(states: list[dict[str, Any]]) -> dict[str, tuple[CallRecord, list[CallRecord]]]:
    """Name → its record, and the chunks of all ranks, each once; opening has compared the rest."""
    merged: dict[str, tuple[CallRecord, dict[Any, CallRecord]]] = {}
    for state in states:
        for name, record in state["state_dict_metadata"].items():
            _, chunks = merged.setdefault(name, (record, {}))
            for chunk in record.state["chunks"] if record.kind.name == "TensorStorageMetadata" else ():
                chunks.setdefault((chunk.state["offsets"], chunk.state["sizes"]), chunk)
    return {name: (record, list(chunks.values())) for name, (record, chunks) in merged.items()}


def _describe(out: PickleWriter, record: CallRecord, chunks: list[CallRecord], profile: str) -> None:
    if record.kind.name != "TensorStorageMetadata":
        out.state(METADATA_MODULE, record.kind.name, ())
        return
    state = state_of(record, "TensorStorageMetadata")
    fields: dict[str, Callable[[], None]] = {
        "chunks": lambda: out.sequence([partial(_chunk, out, record) for record in chunks]),
        "properties": lambda: _properties(out, state["properties"], profile),
        "size": lambda: size(out, state["size"]),
    }
    out.state(METADATA_MODULE, "TensorStorageMetadata", fields.items())


def _chunk(out: PickleWriter, record: CallRecord) -> None:
    state = state_of(record, "ChunkStorageMetadata")
    chunk_record(out, Chunk(state["offsets"], state["sizes"]))


def _properties(out: PickleWriter, record: CallRecord, profile: str) -> None:
    """The first five fields: dtype, layout, requires_grad, memory format, pin_memory."""
    dtype, _layout, requires_grad, memory_format, pinned = record.state[:5]
    if not isinstance(dtype, Global) or not isinstance(memory_format, CallRecord):
        raise TypeError("properties")
    (code,) = memory_format.args
    if not type(requires_grad) is type(pinned) is bool or type(code) is not int:
        raise TypeError("properties")
    properties(
        out,
        dtype.name,
        old_names=profile == WIDEST,
        requires_grad=requires_grad,
        memory_format=code,
        pinned=pinned,
    )


def _key(out: PickleWriter, state: dict[str, Any]) -> None:
    fields: dict[str, Callable[[], None]] = {"fqn": lambda: out.value(state["fqn"])}
    index = state.get("index")
    if type(index) is int:  # only a hint, and missing for objects
        fields["index"] = lambda: out.value(index)
    if state.get("offset") is not None:
        fields["offset"] = lambda: size(out, state["offset"])
    out.state(METADATA_MODULE, "MetadataIndex", fields.items())


def _info(out: PickleWriter, state: dict[str, Any]) -> None:
    if state.get("transform_descriptors"):
        said = ", ".join(map(str, state["transform_descriptors"]))
        raise UnsupportedError(
            f"unsupported item transform {said}: torch before 2.7 cannot read it", cure=_MADE_ANEW
        )
    fields: dict[str, Callable[[], None]] = {
        "length": lambda: out.value(state["length"]),
        "offset": lambda: out.value(state["offset"]),
        "relative_path": lambda: out.word(state["relative_path"]),
    }
    out.state(FILESYSTEM_MODULE, _INFO, fields.items())


REWRITES: dict[str, Rewrite] = {
    "for-torch": Rewrite(
        "write `.metadata` again so that older torch can read it (saves of torch 2.15 in torch 2.3 to 2.14)",
        _for_torch,
        "2.3 (the default; read by torch 2.0 to 2.15) or default (read by torch 2.3 to 2.15)",
    ),
}
