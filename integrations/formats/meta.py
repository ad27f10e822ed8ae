"""Meta's own Llama files: `consolidated.00.pth`, `consolidated.01.pth`, … next to `params.json`.

Each file is a torch.save archive of one rank of model parallelism, with the same names in all files. The axis along
which the ranks' tensors are joined depends on the parameter and the generation (wo and w2 along their second axis; the
embeddings too, but along their first from Llama 3 on), and no file states it; so tensors of several files are not
joined, and the number of the file is the first part of their key path. A single file is the whole model.

The expected number of files follows from the attention's output, [dim, dim / files], if heads fill `dim`. Chameleon and
others have one file `consolidated.pth`; Lingua's file of that name has the same names below `model`.
Facts: Meta's published checkpoints and the converter of transformers, not run here.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import replace
from typing import Literal

from wherry.core.detection import Detection, Evidence
from wherry.core.keypath import KeyPath, parse, render
from wherry.core.manifest import Manifest, Value
from wherry.core.tensorspec import TensorSpec
from wherry.errors import CorruptError, IncompleteError
from wherry.formats.format import Format, Glimpse, Holds, Opened, Signs
from wherry.integrations.containers.flat.strides import PlacedTensor, StridedReader
from wherry.integrations.containers.torch.archive import read_archive
from wherry.integrations.containers.zip.read import LOCAL_MAGIC
from wherry.integrations.formats.huggingface.folder import read_json, surroundings
from wherry.integrations.formats.huggingface.weights import find_weights
from wherry.store.location import Location

_PART = re.compile(r"consolidated\.(\d{2})\.pth")
SINGLE = "consolidated.pth"
_PARAMS = "params.json"
_EMBEDDINGS = b"tok_embeddings.weight"
_WRAPPER = re.compile(
    rb"(X\x05\0\0\0|\x8c\x05)(model|optim)"
)  # a pickled text of five letters, protocols 2 and 4
_HEAD_BYTES = 1 << 16
_OUTPUT = "layers.0.attention.wo.weight"
_MATRIX = 2


def single_form(location: Location) -> Literal["flat", "nested"] | None:
    """How the first bytes of a `consolidated.pth` hold Meta's names: at the top, or below `model`; None without them.

    torch.save writes the pickle first, and the embeddings are the first parameter of these models.
    """
    entry = location.join(SINGLE).entry
    head = location.join(SINGLE).read(0, _HEAD_BYTES) if entry and not entry.is_dir else b""
    before, found, _after = head.partition(_EMBEDDINGS)
    if not head.startswith(LOCAL_MAGIC) or not found:
        return None
    return "nested" if _WRAPPER.search(before) else "flat"


def _parts(location: Location, names: Collection[str]) -> list[str]:
    """The files of a checkpoint: one of each rank, or the single file of a whole model."""
    parts = sorted(name for name in names if _PART.fullmatch(name))
    if parts or SINGLE not in names or single_form(location) != "flat":
        return parts
    try:
        params = read_json(location.join(_PARAMS)) if _PARAMS in names else {}
    except CorruptError:
        return [SINGLE]
    return [] if isinstance(params.get("model"), dict) else [SINGLE]  # such a configuration is Lingua's


def _detect(glimpse: Glimpse) -> Detection | None:
    names = _parts(glimpse.location, glimpse.entries)
    if not names or find_weights(glimpse.entries) is not None:
        return None
    version, seen = SINGLE, "one file with Meta's names"
    if names != [SINGLE]:
        version = f"{len(names)} consolidated.NN.pth"
        seen = f"{len(names)} files with Meta's names, one for each model-parallel rank"
    return glimpse.detected("meta-consolidated", version, "Meta", Evidence(names[0], seen), kind="params")


def _open(location: Location, detection: Detection) -> Opened:
    entries = {entry.name: entry for entry in location.entries()}
    names = _parts(location, entries)
    _require_numbered(len(names), names, location)
    specs: dict[KeyPath, TensorSpec] = {}
    placed: dict[KeyPath, PlacedTensor] = {}
    values: dict[KeyPath, Value] = {}
    for name in names:
        prefix = (name.split(".")[1],) if len(names) > 1 else ()
        archive = read_archive(location.join(name))
        for path, spec in archive.specs.items():
            tags = dict(spec.tags or {})
            if "shares" in tags:
                tags["shares"] = render((*prefix, *parse(tags["shares"])))
            specs[*prefix, *path] = replace(spec, path=(*prefix, *spec.path), tags=tags or None)
        placed |= {(*prefix, *path): one for path, one in archive.placed.items()}
        values |= {(*prefix, *path): value for path, value in archive.tree.values.items()}
    _require_numbered(_expected_files(specs), names, location)
    neighbours = surroundings(location, set(names), names[0])
    manifest = Manifest(tensors=specs, values=values, kind="params", companions=neighbours.listed)
    files = (*(entries[name] for name in names), *neighbours.companions)
    reader = StridedReader(location, placed, files, neighbours.names)
    params = Evidence(_PARAMS, "found" if _PARAMS in entries else "missing: the model's sizes are not stated")
    return Opened(replace(detection, kind="params").seen(params), manifest, reader, tuple(neighbours.ignored))


def _expected_files(specs: dict[KeyPath, TensorSpec]) -> int:
    """The expected number of files; 0 if the tensors do not determine it."""
    output = next((spec for path, spec in specs.items() if path[-1:] == (_OUTPUT,)), None)
    if (
        output is None
        or len(output.shape) != _MATRIX
        or 0 in output.shape
        or output.shape[0] % output.shape[1]
    ):
        return 0
    return output.shape[0] // output.shape[1]


def _require_numbered(count: int, names: list[str], location: Location) -> None:
    wanted = [] if names == [SINGLE] else [f"consolidated.{number:02d}.pth" for number in range(count)]
    missing = [name for name in wanted if name not in names]
    if missing:
        raise IncompleteError(
            f"file not found: {missing[0]} ({len(missing)} of {len(wanted)} files missing)",
            uri=location.uri,
            cure="download the missing files again",
        )


FORMATS = (
    Format(
        name="meta-consolidated",
        title="Meta Llama, consolidated files",
        detect=_detect,
        signs=Signs(ends=(".pth",)),
        open=_open,
        holds=Holds(dtypes=frozenset()),
        refines=(),
        system="meta",
        aliases=("meta",),
    ),
)
