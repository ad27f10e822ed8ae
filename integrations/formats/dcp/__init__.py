"""PyTorch's distributed checkpoints: a folder with `.metadata` and `.distcp` files.

Detected by `.metadata` with torch's class names in its first bytes, by the metadata of single ranks (torch 2.9 without
collectives), or by `.distcp` files alone, which are then a save that was never committed. A step of accelerate's FSDP
has several such folders (`folder.py`). A tensor's key path is one part, its flat name; the planner's nested path is
kept in the manifest's `custom`. Nothing is unpickled: the inert machine interprets `.metadata` and every item.
`metadata.py` has the facts of the layout.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from wherry.core.detection import Detection, Evidence
from wherry.core.manifest import Manifest
from wherry.core.steps import step_number
from wherry.core.units import parse_size
from wherry.formats.format import Format, Glimpse, Holds, Opened, Option, Options, Signs
from wherry.integrations.containers.torch.layout import WRITABLE
from wherry.integrations.formats.dcp.folder import (
    METADATA,
    OWN,
    SUFFIX,
    UNCOMMITTED,
    OwnRules,
    ignored_of_step,
    item_evidence,
    metadata_names,
    model_of_step,
    read_contents,
    step_around,
)
from wherry.integrations.formats.dcp.layout import NESTED, VERSION, WIDEST, lay_out
from wherry.integrations.formats.dcp.reader import DcpReader
from wherry.integrations.formats.dcp.rewrite import REWRITES
from wherry.store.location import Location
from wherry.target.file_map import FileMap, Scene

_WORDS = b"torch.distributed.checkpoint"
_HEAD = 1 << 10
# Nested paths, joined, at which train states store the step number.
_STEPS = ("step", "global_step", "train.step", "train_state.step", "trainer.step")


def _detect(glimpse: Glimpse) -> Detection | None:
    """A folder of DCP files, or the model in a step of accelerate's FSDP.

    Raises:
        AmbiguousError: a step has several models.
        IncompleteError: it has only optimizers.
    """
    evidence = find_evidence(glimpse)
    if evidence is not None:
        found = _detection(glimpse.location, evidence)
        committed = metadata_names(glimpse.entries)
        return found if committed else replace(found, verdict="incomplete", reason=UNCOMMITTED)
    model = model_of_step(glimpse)
    found = find_evidence(Glimpse(glimpse.location.join(model))) if model else None
    if model is None or found is None:
        return None
    return _detection(glimpse.location.join(model), item_evidence(model), found)


def _detection(location: Location, *evidence: Evidence) -> Detection:
    step = step_number(location.name)
    return Detection(
        uri=location.uri,
        format="dcp",
        format_version=VERSION,
        writer="torch",
        step=step_around(location) if step is None else step,
        evidence=evidence,
    )


def find_evidence(glimpse: Glimpse) -> Evidence | None:
    """Evidence for a folder of DCP files; None without evidence."""
    data = [name for name in glimpse.entries if name.endswith(SUFFIX)]
    marks = metadata_names(glimpse.entries)
    if marks and (data or _WORDS in glimpse.location.join(marks[0]).read(0, _HEAD)):
        return Evidence(marks[0], f"metadata of torch.distributed.checkpoint, {len(data)} data files")
    if data:
        return Evidence(data[0], f"{len(data)} data files of torch.distributed.checkpoint, no {METADATA}")
    return None


def open_folder(location: Location, detection: Detection, own: OwnRules = OWN) -> Opened:
    """Open a folder of `.metadata` and `.distcp` files, by the rules of the system that saved it."""
    contents = read_contents(location, own)
    index = contents.index
    step = detection.step
    if step is None:
        stored = (contents.tree.values.get((name,)) for name in _STEPS)
        step = next((one for one in stored if type(one) is int), None)
    # Nested paths that differ from the flat names, and facts about objects that key paths do not state.
    nested = {name: list(path) for name, path in index.nested.items() if path != (name,)}
    manifest = contents.tree.manifest(contents.tensors, step)
    custom = {**({NESTED: nested} if nested else {}), **manifest.custom}
    manifest = replace(manifest, companions=contents.around.listed, custom=custom)
    kind = detection.kind
    if not kind:
        from wherry.layout.tree_reading import read_tree

        kind = read_tree(manifest).whole
    manifest = replace(manifest, kind=kind)
    files = (*contents.files, *contents.around.companions)
    reader = DcpReader(location, index, contents.items, files, contents.inner, contents.around.names)
    chunks = sum(len(one.chunks) for one in index.tensors.values())
    counted = Evidence(
        METADATA, f"{len(index.tensors)} tensors in {chunks} chunks, {len(index.objects)} objects"
    )
    precise = replace(detection, writer=index.writer, kind=kind, step=step)
    return Opened(
        precise.seen(counted), manifest, reader, (*contents.around.ignored, *ignored_of_step(location))
    )


def layout_of(manifest: Manifest, options: Options, _scene: Scene) -> FileMap:
    """See Format."""
    layout = lay_out(manifest, parse_size(options["shard_size"]))
    nested = manifest.custom.get(NESTED)
    return layout.file_map(nested if isinstance(nested, dict) else {}, options["for_torch"])


def _pickle_globals() -> Collection[tuple[str, str]]:
    from wherry.integrations.formats.dcp.metadata import METADATA_RULES

    return METADATA_RULES.allowed


OPTIONS = {
    "shard_size": Option(
        "2GB", "maximum size of a .distcp file, for example 500MB; a larger tensor is cut into chunks"
    ),
    "for_torch": Option(
        "default",
        f"for torch 2.3 to 2.15, or with `{WIDEST}` for torch 2.0 to 2.15",
        ("default", WIDEST),
    ),
}
# What a folder of DCP holds, of torch or of a system that stores its checkpoints so.
HOLDS = Holds(dtypes=WRITABLE, depth=1, values=True, empties=True, companions=True, types=True)

SIGNS = Signs(ends=(SUFFIX, METADATA))  # `.metadata`, or one of each rank
FORMATS = (
    Format(
        name="dcp",
        title="PyTorch DCP",
        detect=_detect,
        signs=replace(SIGNS, folders=True),
        open=open_folder,
        layout=layout_of,
        holds=HOLDS,
        aliases=("distcp", "torch-dcp"),
        commit_members=(METADATA,),
        options=OPTIONS,
        loaded_by="torch 2.13",
        version=lambda _manifest, _options: VERSION,
        rewrites=REWRITES,
        pickle_globals=_pickle_globals,
    ),
)
