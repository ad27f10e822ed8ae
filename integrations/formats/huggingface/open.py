"""Opens a Hugging Face folder whose weights are chosen, and says what was seen of them; the same for all containers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from wherry.core.detection import Detection, Evidence
from wherry.core.manifest import Companion, Manifest
from wherry.errors import CorruptError, IncompleteError
from wherry.formats.format import Opened
from wherry.integrations.containers.flat.reader import FlatReader
from wherry.integrations.containers.flat.strides import StridedReader
from wherry.integrations.containers.msgpack.contents import PlacedReader
from wherry.integrations.formats.huggingface.folder import FolderFacts, read_facts
from wherry.integrations.formats.huggingface.parameters import expected_elements, least_elements
from wherry.integrations.formats.huggingface.shards import WeightContents, read_weights
from wherry.integrations.formats.huggingface.surroundings import surroundings
from wherry.integrations.formats.huggingface.weights import ADAPTER

if TYPE_CHECKING:
    from wherry.formats.format import Glimpse
    from wherry.integrations.formats.huggingface.weights import Weights
    from wherry.storage.location import Location
    from wherry.store.store import Entry

_CONSOLIDATED = "consolidated safetensors"
_CONSOLIDATOR = "torch HuggingFaceStorageWriter"


def detect_weights(glimpse: Glimpse, weights: Weights, format_name: str, what: str = "") -> Detection:
    """The detection of a folder with these weights.

    Args:
        glimpse: the folder.
        weights: its weights.
        format_name: the format.
        what: the format's name in the evidence; the model's class follows, if the config states it.
    """
    try:
        facts = read_facts(glimpse.location, glimpse.entries)
    except CorruptError as error:
        facts = FolderFacts(evidence=(Evidence(".", error.what),))
    classes = facts.origin.get("architectures")
    named = f"{what} ({classes[0]})" if what and isinstance(classes, list) and classes else what
    forms = {"single": "weights in one file", "sharded": "index of weights in several files"}
    seen = forms.get(weights.form, "one of several files of weights, without an index")
    seen += f", variant {weights.variant}" if weights.variant else ""
    return Detection(
        uri=glimpse.location.uri,
        format=format_name,
        format_version=weights.version,
        writer=facts.writer,
        step=facts.step,
        kind="params",
        family=facts.family,
        evidence=(Evidence(weights.file, f"{named}: {seen}" if named else seen), *facts.evidence),
    )


def open_weights(location: Location, detection: Detection, weights: Weights | None, why: str) -> Opened:
    """Open a folder.

    Args:
        location: the folder.
        detection: its detection.
        weights: its weights.
        why: the reason why these weights are read, and not others in the folder.

    Raises:
        IncompleteError: there are none, or see `read_weights`.
        CorruptError, HostileError, UnsupportedError: see `read_weights`.
    """
    if weights is None:
        raise IncompleteError("weights not found", uri=location.uri)
    facts = read_facts(location, {entry.name for entry in location.entries()})
    contents = read_weights(location, weights)
    neighbours = surroundings(location, {entry.name for entry in contents.files}, f"{weights.file} ({why})")
    origin = dict(facts.origin)
    # The counts were compared with what torch saves. The config next to an adapter is that of its base.
    if weights.container != "msgpack" and weights.stem != ADAPTER:
        stored = list(contents.specs.values())
        counts = {
            "expected_parameters": expected_elements(facts.config, stored),
            "least_parameters": least_elements(facts.config, stored),
        }
        origin |= {name: count for name, count in counts.items() if count is not None}
    manifest = Manifest(
        tensors=contents.specs,
        values=contents.values,
        empties=contents.empties,
        lists=frozenset(contents.lists),
        step=facts.step,
        kind="params",
        companions=tuple(Companion(entry.name, entry.size) for entry in neighbours.companions),
        custom=contents.custom,
        origin=origin,
    )
    reader = _reader(location, weights, contents, neighbours.companions)
    found = detection.seen(*contents.evidence)
    # Consolidation by torch drops all metadata, and writes an index even for one file.
    if weights.container == "safetensors" and weights.form == "sharded" and contents.bare:
        evidence = Evidence(weights.file, "an index and no metadata in any file: consolidated by torch")
        found = replace(
            found.seen(evidence), format_version=_CONSOLIDATED, writer=detection.writer or _CONSOLIDATOR
        )
    return Opened(found, manifest, reader, tuple(neighbours.ignored))


def _reader(
    location: Location, weights: Weights, contents: WeightContents, companions: list[Entry]
) -> FlatReader | StridedReader | PlacedReader:
    files = (*contents.files, *companions)
    names = frozenset(entry.name for entry in companions)
    if contents.placed:
        return StridedReader(location, contents.placed, files, names)
    if weights.container == "msgpack":
        return PlacedReader(location, contents.flax, files, names)
    return FlatReader(location, contents.places, files, names)
