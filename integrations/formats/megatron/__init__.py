"""Megatron-Core's checkpoints of the format `torch_dist`: a DCP folder with `common.pt` and `metadata.json`.

    latest_checkpointed_iteration.txt      in the run's folder: the number of the newest step, or `release`
    iter_0000010/metadata.json             the backend and its version; written last
    iter_0000010/common.pt                 what all ranks share: the arguments of the run, the iteration, schedules
    iter_0000010/.metadata, *.distcp       whole tensors, whatever parallelism saved them

Layers are one tensor, or one each. Key paths are those of GPTModel; `ranks.py` lists what a step holds apart from
parameters, and reads the config. A step is written as a save of one rank, so that any number of ranks loads
it.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from typing import Any

from wherry.core.account import TRAINING_STATE, ignored_file
from wherry.core.detection import Detection, Evidence, verdict_of_damage
from wherry.core.json_document import parse_json
from wherry.core.limits import SMALL
from wherry.core.manifest import Manifest
from wherry.core.numbers import decimal_number
from wherry.core.units import parse_size
from wherry.errors import (
    CorruptError,
    HostileError,
    IncompleteError,
    NotFoundError,
    UnsupportedError,
    WherryError,
)
from wherry.formats.format import Format, Glimpse, Holds, Opened, Options, Signs
from wherry.formats.systems import TreeForm
from wherry.integrations.containers.torch.layout import WRITABLE, Archives, archives_map, whole_archive
from wherry.integrations.formats import dcp
from wherry.integrations.formats.dcp.folder import METADATA, SUFFIX, OwnRules
from wherry.integrations.formats.dcp.layout import lay_out
from wherry.integrations.formats.megatron import ranks
from wherry.integrations.formats.megatron.ranks import (
    ARGUMENTS,
    BACKEND,
    COMMON,
    EMBEDDING,
    LATEST,
    SHARDED,
    STEP,
    VERSION,
    common_pickle,
    left_entry,
    parse_arguments,
    read_record,
    step_name,
)
from wherry.store.location import Location
from wherry.target.file_map import File, FileMap, Scene

_VERSION = f"{SHARDED} {VERSION}"
_LONGEST, _LONGEST_NUMBER = 1 << 12, 32
_UNCOMMITTED = f"file not found: {BACKEND}; the save was never completed"
_RULES = OwnRules(frozenset({COMMON, BACKEND}), left_entry)
_STATE = "schedules and options of the run; its arguments are read as the model's config"


def detect(glimpse: Glimpse) -> Detection | None:
    """Detect a step, or the folder of a run whose file names its newest step."""
    found_step = newest_step(glimpse)
    if found_step is None:
        return None
    folder, names, prefix = found_step[0].location, found_step[0].entries, found_step[1]
    if COMMON not in names or not any(name == METADATA or name.endswith(SUFFIX) for name in names):
        return None
    damage: WherryError | None = None
    try:
        if BACKEND in names and _backend(folder).get("sharded_backend") != SHARDED:
            return None
    except (CorruptError, HostileError) as error:
        damage = error
    evidence = [Evidence(LATEST, folder.name)] if prefix else []
    evidence.append(Evidence(f"{prefix}{COMMON}", "what all ranks of Megatron share"))
    step = STEP.fullmatch(folder.name)
    number = int(step[1]) if step and step[1] else None
    found = glimpse.detected("megatron", _VERSION, "megatron-core", *evidence, step=number)
    if damage is not None:
        return replace(found, verdict=verdict_of_damage(damage.verdict), reason=damage.what, cure=damage.cure)
    if BACKEND in names and METADATA in names:
        return found
    return replace(found, verdict="incomplete", reason=_UNCOMMITTED)


def newest_step(glimpse: Glimpse) -> tuple[Glimpse, str] | None:
    """The folder of the newest step, and its prefix in names of the checkpoint's files; None if the run names no step.

    Args:
        glimpse: the folder of a step, or of a run, whose file names its newest step.
    """
    if LATEST not in glimpse.entries:
        return glimpse, ""
    try:
        text = glimpse.location.join(LATEST).read(0, _LONGEST_NUMBER).decode(errors="replace").strip()
    except NotFoundError:
        return None
    step = decimal_number(text)
    name = text if step is None else step_name(step)
    known = name in glimpse.entries and (step is not None or name == "release")
    return (Glimpse(glimpse.location.join(name)), f"{name}/") if known else None


def _backend(folder: Location) -> dict[str, Any]:
    """What `metadata.json` says.

    Raises:
        CorruptError: it is not JSON, or not a table.
        HostileError: it exceeds a limit.
    """
    found = parse_json(folder.join(BACKEND).read_whole(_LONGEST), BACKEND, uri=folder.uri, limits=SMALL)
    if not isinstance(found, dict):
        raise CorruptError(
            f"{BACKEND}: expected an object", uri=folder.uri, cure="restore the file, or use an earlier step"
        )
    return found


def _open(location: Location, detection: Detection) -> Opened:
    step_folder, prefix = newest_step(Glimpse(location)) or (Glimpse(location), "")
    folder = step_folder.location
    if folder.join(BACKEND).stat() is None:
        raise IncompleteError(_UNCOMMITTED, uri=location.uri, cure="use an earlier step")
    version = _backend(folder).get("sharded_backend_version")
    if version != VERSION:
        raise UnsupportedError(
            f"unsupported version of {SHARDED}: {version}", uri=location.uri,
            cure="read it with Megatron-Core, and save it again in the format torch_dist",
        )  # fmt: skip
    opened = dcp.open_folder(folder, detection, _RULES)
    record = read_record(folder.join(COMMON))
    step = record.step if detection.step is None else detection.step
    reader, companions = opened.reader, opened.manifest.companions
    assert isinstance(reader, dcp.DcpReader)
    if record.arguments:
        shown = ARGUMENTS in {one.name for one in companions}  # in a file that earlier conversions wrote
        if shown and parse_arguments(folder.join(ARGUMENTS)) != record.arguments:
            raise CorruptError(
                f"{ARGUMENTS} and {COMMON} state different arguments", uri=folder.uri,
                cure=f"remove {ARGUMENTS}: Megatron reads {COMMON}",
            )  # fmt: skip
    companions = record.show(reader, companions)
    reader.files = tuple(replace(one, name=f"{prefix}{one.name}") for one in reader.files)
    manifest = replace(opened.manifest, step=step, companions=companions)
    common = ignored_file(f"{COMMON}:state", TRAINING_STATE, "state of the run", _STATE)
    found = replace(opened.detection, step=step, writer="megatron-core", format="megatron")
    return Opened(found, manifest, reader, (*opened.ignored, common))


_BACKEND = {
    "sharded_backend": SHARDED,
    "sharded_backend_version": VERSION,
    "common_backend": "torch",
    "common_backend_version": 1,
}


def _layout(manifest: Manifest, options: Options, scene: Scene) -> FileMap:
    """The files of DCP, then `common.pt`, and `metadata.json` last, the mark of a complete save."""
    layout = lay_out(manifest, parse_size(options["shard_size"]))
    common = common_pickle(_arguments(scene), manifest.step)[0]
    late = (File(COMMON, partial(whole_archive, common)), File(BACKEND, json.dumps(_BACKEND).encode))
    return layout.file_map({}, options["for_torch"], late)


def _arguments(scene: Scene) -> dict[str, Any]:
    """The arguments among the companions; empty if there are none."""
    found = scene.companion(ARGUMENTS)
    return {} if found is None else parse_arguments(found)


def _layout_ranks(manifest: Manifest, _options: Options, scene: Scene) -> FileMap:
    model = {path[0]: one for path, one in manifest.tensors.items()}
    return archives_map({ranks.ONE: Archives([common_pickle(_arguments(scene), manifest.step, model)])})


def is_own(manifest: Manifest) -> bool:
    """Whether a tree has GPTModel's names."""
    return (EMBEDDING,) in manifest.tensors


FORMATS = (
    Format(
        name="megatron",
        title="Megatron-Core, torch_dist",
        detect=detect,
        signs=Signs(entries=frozenset({LATEST, COMMON})),
        open=_open,
        layout=_layout,
        holds=replace(dcp.HOLDS, names=((EMBEDDING,),)),
        refines=("dcp",),
        system="megatron",
        form=TreeForm(is_own, "GPTModel's names, with embedding.word_embeddings.weight", flax=False),
        commit_members=(BACKEND,),
        options=dcp.OPTIONS,
        loaded_by="Megatron-Core 0.16",
        version=lambda _manifest, _options: _VERSION,
        step_folder=step_name,
    ),
    Format(
        name="megatron-ranks",
        title="Megatron, a folder for each rank",
        detect=ranks.detect,
        signs=Signs(folders=True),
        open=ranks.open_ranks,
        layout=_layout_ranks,
        holds=Holds(dtypes=WRITABLE, depth=1, companions=True, names=((EMBEDDING,),)),
        system="megatron",
        form=TreeForm(is_own, "GPTModel's names, with embedding.word_embeddings.weight", flax=False),
        commit_members=(ranks.ONE,),
        loaded_by="torch 2.13, in the layout of Megatron-Core 0.16",
        version=lambda _manifest, _options: "mp_rank",
        step_folder=step_name,
    ),
)
