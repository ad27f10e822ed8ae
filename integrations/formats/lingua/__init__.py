"""Meta Lingua's checkpoints: step folders (DCP with `params.json` and train states) and `consolidated/`.

`folder.py` describes the files of these folders, when a step is complete, and the key paths. A step folder is
written so that `init_ckpt_path` accepts it; one that Lingua resumes from (`--set resume=true`) needs the real moments
and train states of the source. Lingua itself calls `dcp.load({"model": …})` and, for `consolidated.pth`,
`torch.load(…, weights_only=True)["model"]`; the tests do the same.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from wherry.core.account import FILES, ignored_file
from wherry.core.detection import Detection, Evidence
from wherry.core.manifest import Companion, Manifest, without_chunks
from wherry.core.steps import step_number
from wherry.errors import UnrepresentableError, UsageError
from wherry.formats.format import Format, Glimpse, Holds, Opened, Option, Options
from wherry.formats.glimpse import Signs
from wherry.integrations.containers.flat.strides import StridedReader
from wherry.integrations.containers.torch.archive import read_archive
from wherry.integrations.containers.torch.layout import WRITABLE, Archives, archives_map, build, pickle_object
from wherry.integrations.formats import dcp
from wherry.integrations.formats.dcp.folder import METADATA
from wherry.integrations.formats.huggingface.folder import surroundings
from wherry.integrations.formats.lingua import folder
from wherry.integrations.formats.lingua.folder import (
    CONSOLIDATED,
    CONSOLIDATED_FOLDER,
    EMBEDDINGS,
    LEAST_PARAMS,
    MODEL,
    OPTIM,
    PARAMS,
    deep,
    flat,
)
from wherry.integrations.formats.meta import single_form
from wherry.mover.read import read_array
from wherry.storage.location import Location
from wherry.store.store import Entry
from wherry.target.file_map import FileMap, Scene
from wherry.text.numbers import decimal_number
from wherry.tree.tree_reading import read_tree

_HEAD = 1 << 16
_WRITER = "lingua"
_CONSOLIDATED_VERSION = f"{CONSOLIDATED} + {PARAMS}"
_RESUME = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def _version(names: Collection[str]) -> str:
    states = " + train_state_<rank>.json" if folder.train_states(names) else ""
    return f"DCP + {PARAMS}{states}"


def _detect(glimpse: Glimpse) -> Detection | None:
    first = dcp.find_evidence(glimpse)
    found = None if first is None else _find_evidence(glimpse)
    if first is None or found is None:
        return None
    return Detection(
        uri=glimpse.location.uri,
        format="lingua",
        format_version=_version(glimpse.entries),
        writer=_WRITER,
        step=step_number(glimpse.location.name),
        evidence=(first, found),
    )


def _find_evidence(glimpse: Glimpse) -> Evidence | None:
    """Evidence that DCP files are Lingua's: its train states, its configuration, or its names in a step folder."""
    names = glimpse.entries
    states = folder.train_states(names)
    if states:
        return Evidence(states[0], f"train states of {len(states)} ranks in Lingua's form")
    if PARAMS in names and folder.peek_params(glimpse.location):
        return Evidence(PARAMS, "a configuration with `model` in Lingua's form")
    if folder.is_step(glimpse.location.name) and METADATA in names:
        head = glimpse.location.join(METADATA).read(0, _HEAD)
        if EMBEDDINGS.encode() in head:
            return Evidence(METADATA, f"contains {EMBEDDINGS}, in a folder with a name of ten digits")
    return None


def _open(location: Location, detection: Detection) -> Opened:
    opened = dcp.open_folder(location, detection)
    manifest = opened.manifest
    names = [companion.name for companion in manifest.companions]
    params = folder.read_params(location, names)
    said = folder.read_step(location, names)
    if folder.has_optimizer(manifest):
        folder.require_train_states(location, names, params)
    step = detection.step if detection.step is not None else said
    manifest = replace(
        manifest, tensors=folder.with_ties(manifest.tensors), step=step, origin=_origin(manifest, params)
    )
    found = replace(opened.detection, step=step, writer=f"{_WRITER} ({opened.detection.writer})")
    if said is not None and said != step:
        found = found.seen(Evidence(folder.train_states(names)[0], f"states step {said}"))
    reason = "the tensors are read from the files that Lingua made it of"
    whole = ignored_file(CONSOLIDATED_FOLDER, FILES, "the same weights in one file", reason)
    ignored = tuple(whole if entry.path == whole.path else entry for entry in opened.ignored)
    return Opened(found, manifest, opened.reader, ignored)


def _origin(manifest: Manifest, params: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: params[name] for name in ("name", "model") if name in params}
    return {**manifest.origin, **kept}


def _prepare(manifest: Manifest, options: Options) -> Manifest:
    """The manifest without the train states that Lingua must not resume from."""
    _require_companion(manifest)
    word = str(options["resume"]).lower()
    if word not in _RESUME:
        raise UsageError(
            f"invalid value for resume: {options['resume']!r}; expected true or false",
            cure="pass resume=true or resume=false",
        )
    manifest = without_chunks(manifest)
    if _RESUME[word]:
        folder.require_moments(manifest)
        return manifest
    folder.require_no_optimizer(manifest)
    states = set(folder.train_states([companion.name for companion in manifest.companions]))
    left = tuple(companion for companion in manifest.companions if companion.name not in states)
    return replace(manifest, companions=left)


def _require_companion(manifest: Manifest) -> None:
    if PARAMS not in [companion.name for companion in manifest.companions]:
        raise UnrepresentableError(
            f"missing {PARAMS}: Lingua requires it next to the source's tensors",
            cure=f"put Lingua's {PARAMS} (from the run, or written for this model) next to them; to convert only the "
            "tensors, choose the target format dcp or torch-zip",
        )


def _layout(manifest: Manifest, options: Options, scene: Scene) -> FileMap:
    _require_params(scene)
    return dcp.layout_of(manifest, options, scene)


def _require_params(scene: Scene) -> None:
    params = scene.companion(PARAMS)
    if params is not None:
        folder.require_params(params)


def _detect_consolidated(glimpse: Glimpse) -> Detection | None:
    if CONSOLIDATED not in glimpse.entries:
        return None
    # It is Lingua's by its configuration, its tree, or the folder's name.
    if PARAMS in glimpse.entries:
        known = bool(folder.peek_params(glimpse.location))
    else:
        form = single_form(glimpse.location)
        known = form == "nested" or (form is None and glimpse.location.name == CONSOLIDATED_FOLDER)
    if not known:
        return None
    parent = glimpse.location.parent.name
    return Detection(
        uri=glimpse.location.uri,
        format="lingua-consolidated",
        format_version=_CONSOLIDATED_VERSION,
        writer=_WRITER,
        step=decimal_number(parent) if folder.is_step(parent) else None,
        evidence=(Evidence(CONSOLIDATED, "the name of Lingua's consolidated checkpoints"),),
    )


def _open_consolidated(location: Location, detection: Detection) -> Opened:
    archive = read_archive(location.join(CONSOLIDATED))
    entry = location.join(CONSOLIDATED).present()
    own = Entry(CONSOLIDATED, entry.size, is_dir=False, mark=entry.mark)
    neighbours = surroundings(location, {CONSOLIDATED}, CONSOLIDATED)
    names = [one.name for one in neighbours.companions]
    params = folder.read_params(
        location, names, f"pass the file {shlex.quote(location.join(CONSOLIDATED).uri)}"
    )
    reader = StridedReader(location, archive.placed, (own, *neighbours.companions), frozenset(names))
    manifest = Manifest(
        tensors=folder.with_ties(archive.specs),
        values=archive.tree.values,
        empties=archive.tree.empties,
        lists=frozenset(archive.tree.lists),
        companions=tuple(Companion(one.name, one.size) for one in neighbours.companions),
        custom=archive.tree.custom,
    )
    manifest = replace(manifest, kind=read_tree(manifest).whole)
    step = detection.step if detection.step is not None else _optimizer_step(manifest, reader)
    manifest = replace(manifest, step=step, origin=_origin(manifest, params))
    seen = Evidence(CONSOLIDATED, f"{len(archive.placed)} tensors, step {step} by folder or optimizer")
    precise = replace(detection, step=step, kind=manifest.kind).seen(seen)
    return Opened(precise, manifest, reader, tuple(neighbours.ignored))


def _optimizer_step(manifest: Manifest, reader: StridedReader) -> int | None:
    """The step of the optimizer, which has one scalar for each parameter."""
    for path, spec in manifest.tensors.items():
        if path[:2] == (OPTIM, "state") and path[-1] == "step" and spec.shape == ():
            value = read_array(reader, spec, ())
            return int(value) if math.isfinite(value) and value == int(value) else None
    return None


def _prepare_consolidated(manifest: Manifest, _options: Options) -> Manifest:
    _require_companion(manifest)
    states = set(folder.train_states([companion.name for companion in manifest.companions]))
    left = tuple(companion for companion in manifest.companions if companion.name not in states)
    return without_chunks(replace(manifest, companions=left))


def _layout_consolidated(manifest: Manifest, _options: Options, scene: Scene) -> FileMap:
    _require_params(scene)
    return archives_map({CONSOLIDATED: Archives([pickle_object(build(manifest))])})


FORMATS = (
    Format(
        name="lingua",
        title="Meta Lingua, step folder",
        detect=_detect,
        signs=dcp.SIGNS,
        open=_open,
        layout=_layout,
        holds=replace(dcp.HOLDS, needs={PARAMS: LEAST_PARAMS}, names=((f"{MODEL}.{EMBEDDINGS}",),)),
        refines=("dcp",),
        system="lingua",
        commit_members=(METADATA,),
        options={
            **dcp.OPTIONS,
            "resume": Option(
                "false", "`true` writes a step that Lingua can resume from, with moments and train states"
            ),
        },
        loaded_by="Lingua 437d680; tested with its calls to torch 2.13",
        version=lambda manifest, _options: _version([one.name for one in manifest.companions]),
        step_folder=folder.step_name,
        prepare=_prepare,
        adapt=flat,
        guard=lambda target, into: folder.refuse_live(target, into=into),
    ),
    Format(
        name="lingua-consolidated",
        title="Meta Lingua, consolidated",
        detect=_detect_consolidated,
        signs=Signs(entries=frozenset({CONSOLIDATED})),
        open=_open_consolidated,
        layout=_layout_consolidated,
        holds=Holds(
            types=True,
            dtypes=WRITABLE,
            values=True,
            empties=True,
            companions=True,
            needs={PARAMS: LEAST_PARAMS},
            names=((MODEL, EMBEDDINGS),),
        ),
        refines=("torch-zip",),
        system="lingua",
        commit_members=(CONSOLIDATED,),
        loaded_by="Lingua 437d680; tested with its calls to torch 2.13",
        version=lambda _manifest, _options: _CONSOLIDATED_VERSION,
        prepare=_prepare_consolidated,
        adapt=deep,
    ),
)
