"""Orbax: the checkpoints of JAX, Flax, MaxText and their kin, read and written through tensorstore and JSON alone.

Read: every generation that has `_METADATA` (0.4.4 to 0.12), OCDBT or one folder per array, zarr 2 or 3. Older ones
and aggregates are recognised and refused by name. Orbax's own API breaks often; its files do not.

Facts used here: a step folder holds items; which of several is meant is asked for unless one name is the usual one.
A folder with the suffix `.orbax-checkpoint-tmp` was never committed. On stores without rename Orbax counts a
checkpoint as committed only if `commit_success.txt` is there. What the files are is told in `layout` and `tree`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from wherry.detection import Detection, Evidence, Verdict
from wherry.errors import AmbiguousError, WherryError
from wherry.format import Format, Glimpse, Holds, Opened, Option
from wherry.integrations.containers.zarr import STORABLE
from wherry.integrations.orbax import layout, opening, tree
from wherry.steps import step_number

if TYPE_CHECKING:
    from wherry.format import Options, Writer
    from wherry.location import Location
    from wherry.manifest import Manifest

_STEP_ITEM = "default"
_RENAMELESS = ("gs", "gcs", "s3")


def detect(glimpse: Glimpse) -> Detection | None:
    """An item folder, a step folder with an item in it, or the remains of a save; None where it is none of these.

    Raises:
        AmbiguousError: a step has several items with arrays and none has a usual name.
    """
    if not glimpse.is_dir:
        return None
    item = layout.look_at_item(glimpse)
    if item is not None:
        return _item_detection(glimpse, item)
    if layout.uncommitted(glimpse.location.name):
        return _remains(glimpse, "the folder has the suffix of a save that was never committed")
    return _step_detection(glimpse)


def open_orbax(location: Location, detection: Detection) -> Opened:
    """See Format; the reading is in `opening`."""
    return opening.open_item(location, detection)


def create(staging: Location, manifest: Manifest, options: Options) -> Writer:
    """See Format; the writing is in `writer`."""
    from wherry.integrations.orbax.writer import OrbaxWriter  # tensorstore

    return OrbaxWriter(staging, manifest, options)


def prepare(manifest: Manifest, options: Options) -> Manifest:
    """The manifest with the chunk grid that the writer will use.

    Raises:
        UnrepresentableError: something in it cannot be held by Orbax.
    """
    from wherry.integrations.orbax.representable import chunks_of, refuse_unrepresentable

    refuse_unrepresentable(manifest, options)
    specs = {
        path: replace(spec, chunks=chunks_of(spec, options["chunks"]), sharding=None)
        for path, spec in manifest.tensors.items()
    }
    return replace(manifest, tensors=specs)


def version(_manifest: Manifest, options: Options) -> str:
    """The format version that these options give."""
    return f"{'ocdbt' if options['ocdbt'] else 'per-array directories'} zarr{options['zarr']}"


def finish_step(folder: Location, manifest: Manifest) -> None:
    """Complete the step folder that a CheckpointManager reads."""
    from wherry.integrations.orbax.writer import finish_step as finish

    finish(folder, manifest, _STEP_ITEM)


def _item_detection(glimpse: Glimpse, item: layout.Item) -> Detection:
    location, names = glimpse.location, set(glimpse.entries)
    marks_of_step = (layout.COMMITTED, layout.V1_MARKER, layout.CHECKPOINT)
    around = {name for name in marks_of_step if location.parent.join(name).exists()}
    verdict, reason, metadata = _verdict(location, item, names, around)
    writer, marks = layout.generation(item, names | around, metadata)
    own = opening.own_notes(metadata)
    evidence = [Evidence(".", f"{mark} marks {writer}") for mark in sorted(marks)]
    if layout.V1_MARKER in around:
        evidence.append(Evidence(f"../{layout.V1_MARKER}", "saved through the v1 API"))
    if own:
        evidence.append(Evidence(layout.TREE, "written by wherry"))
        writer = f"wherry {own.get('version')} (as {writer})"
    leaves = _leaves(metadata, location) if verdict == "ok" and item.tree else None
    return Detection(
        uri=location.uri,
        format="orbax",
        format_version=layout.layout_words(
            item,
            zarr3=bool(metadata.get("use_zarr3")),
            arrays=leaves is None or set(leaves.arrays) != leaves.aggregated,
        ),
        writer=writer,
        step=_step_of(location, inside_step=bool(around) or location.name in layout.PREFERRED_ITEMS),
        kind=tree.kind_of(leaves.arrays, leaves.strings) if leaves else None,
        verdict=verdict,
        reason=reason,
        evidence=(*_presence(item), *evidence),
    )


def _presence(item: layout.Item) -> list[Evidence]:
    seen = (
        (layout.TREE, item.tree, "the tree"),
        (layout.MSGPACK, item.msgpack, "a msgpack tree"),
        (layout.MANIFEST, item.merged, "an OCDBT database"),
    )
    rows = [Evidence(file, words) for file, there, words in seen if there]
    return rows + [Evidence(name, "the arrays of one process") for name in item.processes]


def _verdict(
    location: Location, item: layout.Item, names: set[str], around: set[str]
) -> tuple[Verdict, str | None, layout.JsonObject]:
    """What names and `_METADATA` already tell of its health; a msgpack tree is whole, opening says what is read."""
    metadata: layout.JsonObject = {}
    try:
        if item.tree:
            metadata = layout.read_json(location.join(layout.TREE))
        if item.tree or not item.msgpack:
            opening.require_whole(location, item)
        if layout.CHECKPOINT in names:
            layout.read_json(location.join(layout.CHECKPOINT))
    except OSError:
        raise
    except WherryError as error:
        return "incomplete" if error.verdict == "incomplete" else "corrupt", error.what, metadata
    if location.store.protocol in _RENAMELESS and layout.COMMITTED not in names | around:
        return (
            "incomplete",
            f"no {layout.COMMITTED}, which Orbax requires on {location.store.protocol}://",
            metadata,
        )
    return "ok", None, metadata


def _leaves(metadata: layout.JsonObject, location: Location) -> tree.Tree | None:
    """The leaves, where the tree can be read; opening says why where it cannot."""
    try:
        return tree.parse_tree(metadata, location.uri)
    except WherryError:
        return None


def _step_detection(glimpse: Glimpse) -> Detection | None:
    """The item that a step folder stands for."""
    marked = layout.CHECKPOINT in glimpse.entries or layout.V1_MARKER in glimpse.entries
    step = step_number(
        glimpse.location.name
    )  # `exp_2024` may be a folder of runs: only known step names count
    usual = any(name in glimpse.entries for name in layout.PREFERRED_ITEMS)
    if not (marked or step is not None or usual):
        return None
    items = layout.items_of_step(glimpse)
    if not marked:
        items = {
            name: item for name, item in items.items() if step is not None or name in layout.PREFERRED_ITEMS
        }
        items = {name: item for name, item in items.items() if step_number(name) is None}
    if not items:
        remains = marked or any(layout.uncommitted(name) for name in glimpse.entries)
        return _remains(glimpse, "no item with arrays is here") if remains else None
    name = _choose(glimpse, sorted(items))
    found = _item_detection(Glimpse(glimpse.location.join(name)), items[name])
    others = [other for other in sorted(items) if other != name]
    chosen = f"the item with arrays{', chosen before ' + ', '.join(others) if others else ''}"
    return replace(found, evidence=(Evidence(f"../{name}", chosen), *found.evidence))


def _choose(glimpse: Glimpse, names: list[str]) -> str:
    if len(names) == 1:
        return names[0]
    preferred = next((name for name in layout.PREFERRED_ITEMS if name in names), None)
    if preferred is None:
        raise AmbiguousError(
            f"the step has the items {', '.join(names)}",
            uri=glimpse.location.uri,
            cure=f"say --item {names[0]}",
        )
    return preferred


def _remains(glimpse: Glimpse, reason: str) -> Detection:
    """A folder that is Orbax's by its marks or name but has no array item."""
    seen = ", ".join(sorted(glimpse.entries)) or "nothing"
    return Detection(
        uri=glimpse.location.uri,
        format="orbax",
        step=step_number(layout.final_name(glimpse.location.name)),
        verdict="incomplete",
        reason=reason,
        evidence=(Evidence(".", f"named {glimpse.location.name}, holds {seen}"),),
    )


def _step_of(location: Location, *, inside_step: bool) -> int | None:
    """The step that the item's name states, or that of the step folder around it."""
    own = step_number(layout.final_name(location.name))
    around = layout.final_name(location.parent.name)
    return step_number(around, any_prefix=inside_step) if own is None else own


FORMATS = (
    Format(
        name="orbax",
        title="Orbax (JAX, Flax)",
        detect=detect,
        open=open_orbax,
        create=create,
        holds=Holds(dtypes=STORABLE, zero_size=False, values=True, empties=True, companions=True),
        aliases=("ocp",),
        companion_folder=f"{layout.ASSETS}/",
        commit_members=(layout.COMMITTED,),
        options={
            "zarr": Option("2", "version of zarr", ("2", "3")),
            "ocdbt": Option(default=True, help="one OCDBT database rather than one folder per array"),
            "compression": Option("none", "how chunks are compressed", ("none", "zstd")),
            "chunks": Option("auto", "extent of a chunk: auto (8 to 32 MiB), whole, or a number of MiB"),
        },
        loaded_by="orbax-checkpoint 0.12.8: StandardCheckpointer, PyTreeCheckpointer, CheckpointManager, v1",
        version=version,
        step_folder=lambda step: f"{step}/{_STEP_ITEM}",
        finish_step=finish_step,
        prepare=prepare,
    ),
)
