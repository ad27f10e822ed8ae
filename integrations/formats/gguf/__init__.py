"""GGUF, the files of llama.cpp.

Detected by its magic. Tensors have the names of llama.cpp and wherry's order of axes (the reverse of the file's);
quantised tensors are opaque blocks that no other container supports, so converting them is refused by dtype unless they
are dequantised. `header.py` has the facts of the header. The metadata state the model: they are shown as the companion
`config.json` (`write.py`), so that families read them as they read a Hugging Face config. The tokenizer that
they state is made when a target needs it (`tokenizer.py`).

Written is one file, of version 3: the header, then each tensor on a multiple of 32 bytes (`write.py`). A model's config
and tokenizer become its metadata, so it has no companion files; `write.py` decides the types of tensors.

`<name>-00001-of-0000N.gguf` is the first of N files of a model: it has the metadata, each file some of the tensors, and
`split.no`, `split.count` and `split.tensors.count` say which. All files are read if the first one is named.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import replace

from wherry.core.account import IgnoredEntry
from wherry.core.detection import Detection, Evidence
from wherry.core.keypath import KeyPath
from wherry.core.manifest import Companion, Manifest, without_chunks
from wherry.core.tensorspec import TensorSpec
from wherry.errors import CorruptError, IncompleteError, UnsupportedError
from wherry.formats.companions import CompanionsReader
from wherry.formats.format import (
    Contents,
    Extent,
    Format,
    Glimpse,
    Holds,
    ModelFiles,
    Opened,
    Option,
    Options,
    Signs,
)
from wherry.formats.systems import TreeForm
from wherry.integrations.containers.flat.reader import FlatReader
from wherry.integrations.formats.gguf.header import MAGIC, TYPES, VERSIONS, GgufHeader, read_header, type_name
from wherry.integrations.formats.gguf.tokenizer import FILES as TOKENIZER_FILES
from wherry.integrations.formats.gguf.tokenizer import TOKENIZER, tokenizer_files
from wherry.integrations.formats.gguf.write import (
    ALIGNMENT,
    ELEMENT_TYPES,
    EMBEDDING,
    FACTORS,
    SOURCE,
    as_stored,
    header_of,
    model_config,
    require_files,
)
from wherry.integrations.formats.gguf.write import FILE as CONFIG
from wherry.store.location import Location
from wherry.target.file_map import FileMap, Scene, map_of_one

_TOO_LONG = "manifests hold numbers and short texts"
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_MOST_FACTORS = 4096
_HEAD = struct.Struct("<4sI")


def _detect(glimpse: Glimpse) -> Detection | None:
    if not glimpse.head.startswith(MAGIC) or len(glimpse.head) < _HEAD.size:
        return None
    version = _HEAD.unpack_from(glimpse.head)[1]
    known = version in VERSIONS
    seen = f"starts with GGUF, {'' if known else 'unsupported '}version {version}"
    return glimpse.detected("gguf", f"GGUF v{version}" if known else None, "gguf", seen, kind="params")


def _open(location: Location, detection: Detection) -> Opened:
    headers = _read_parts(location)
    first = headers[0]
    specs = {path: spec for header in headers for path, spec in header.specs.items()}
    places = {path: place for header in headers for path, place in header.places.items()}
    config = model_config(first.metadata, first.left, specs, _factors(specs, places))
    manifest = Manifest(
        tensors=specs, step=detection.step, kind="params", custom=first.metadata,
        companions=(Companion(CONFIG, len(config)),),
    )  # fmt: skip
    family = first.metadata.get("general.architecture")
    types = [name for name in TYPES.values() if any(name in header.types for header in headers)]
    precise = replace(
        detection,
        format_version=f"GGUF v{first.version}, {_list_types(types)}",
        family=family if isinstance(family, str) else None,
    )
    embedding = specs.get((EMBEDDING,))
    rows = embedding.shape[0] if embedding is not None and embedding.shape else None
    members = tuple(header.location.present() for header in headers)
    reader = _GgufReader(FlatReader(location, places, members), {CONFIG: config}, first, rows)
    seen = Evidence(location.name, f"{len(specs)} tensors, {len(first.metadata)} metadata values")
    ignored = tuple(IgnoredEntry((key,), "values", _TOO_LONG, "list or long text") for key in first.left)
    return Opened(precise.seen(seen), manifest, reader, ignored)


class _GgufReader(CompanionsReader):
    """Reads tensors, the config that the metadata state, and the tokenizer that they state."""

    def __init__(
        self, reader: Contents, files: Mapping[str, bytes], header: GgufHeader, rows: int | None
    ) -> None:
        """Nothing is read yet.

        Args:
            reader: of the tensors.
            files: companion files, by name.
            header: with the metadata.
            rows: of the embedding; None if it is unknown.
        """
        super().__init__(reader, files)
        self._header, self._rows = header, rows

    def model_files(self) -> ModelFiles:
        """The tokenizer; see `tokenizer_files`."""
        return tokenizer_files(self._header, self._rows)


def _read_parts(location: Location) -> list[GgufHeader]:
    """The headers of all files of a model, of which the first is named.

    Raises:
        UnsupportedError: another file than the first is named, or the names do not say which they are.
        IncompleteError: a file is missing.
        CorruptError: a file is of another model, or the files do not hold as many tensors as they state.
    """
    first = read_header(location)
    count = first.metadata.get("split.count", 1)
    if count in (0, 1):
        return [first]
    name = _PART.fullmatch(location.name)
    if name is None or int(name["count"]) != count:
        raise UnsupportedError(
            f"{location.name} is one of {count} files of a model, but has another name", uri=location.uri,
            cure=f"rename the files to NAME-00001-of-{count:05}.gguf and so on",
        )  # fmt: skip
    parts = [
        location.parent.join(f"{name['stem']}-{number:05}-of-{name['count']}.gguf")
        for number in range(1, count + 1)
    ]
    if int(name["number"]) != 1:
        raise UnsupportedError(
            f"{location.name} is not the first of {count} files of a model", uri=location.uri,
            cure=f"pass the first file: {parts[0].uri}",
        )  # fmt: skip
    for part in parts[1:]:
        if part.stat() is None:
            raise IncompleteError(
                f"file not found: {part.name} (the model is in {count} files)", uri=location.uri,
                cure="download the missing files again",
            )  # fmt: skip
    headers = [first, *(read_header(part) for part in parts[1:])]
    _require_parts(headers, location)
    return headers


def _require_parts(headers: list[GgufHeader], location: Location) -> None:
    """The files are those of one model, in their order, and hold all its tensors once."""
    for number, header in enumerate(headers):
        stated = header.metadata.get("split.no"), header.metadata.get("split.count")
        if stated != (number, len(headers)):
            raise CorruptError(
                f"{header.location.name} states that it is file {stated[0]} of {stated[1]}, counted from 0; expected "
                f"{number} of {len(headers)}",
                uri=location.uri, cure="restore the files of the model",
            )  # fmt: skip
    names = [path for header in headers for path in header.specs]
    total = headers[0].metadata.get("split.tensors.count", len(names))
    if len(set(names)) != len(names) or len(names) != total:
        raise CorruptError(
            f"expected {total} tensors in {len(headers)} files, got {len(set(names))}", uri=location.uri,
            cure="restore the files of the model",
        )  # fmt: skip


def _factors(
    specs: Mapping[KeyPath, TensorSpec], places: Mapping[KeyPath, tuple[Extent, ...]]
) -> Sequence[float] | None:
    """The divisors of the frequencies of rotary positions; empty if they are not a short list of float32."""
    spec = specs.get((FACTORS,))
    if spec is None:
        return None
    if spec.dtype != "float32" or len(spec.shape) != 1 or not 0 < spec.size <= _MOST_FACTORS:
        return ()
    (extent,) = places[spec.path]
    data = extent.location.read(extent.offset, extent.offset + extent.length)
    return struct.unpack(f"<{spec.size}f", data)


def _list_types(types: list[str]) -> str:
    return " and ".join([", ".join(types[:-1]), types[-1]] if len(types) > 1 else types) or "no tensors"


def _layout(manifest: Manifest, options: Options, scene: Scene) -> FileMap:
    return map_of_one(
        header_of(manifest, options, scene.companion).data, manifest.tensors.values(), ALIGNMENT
    )


def _prepare(manifest: Manifest, options: Options) -> Manifest:
    require_files(manifest, options)
    return without_chunks(manifest)


def _version(manifest: Manifest, _options: Options) -> str:
    held = {type_name(spec.dtype) for spec in manifest.tensors.values()}
    return f"GGUF v{VERSIONS[-1]}, {_list_types([name for name in TYPES.values() if name in held])}"


def _is_own(manifest: Manifest) -> bool:
    return (EMBEDDING,) in manifest.tensors


# The least that states a model, and a tokenizer of two letters.
_LEAST = {
    "model_type": "llama", "vocab_size": 2, "num_hidden_layers": 1, "hidden_size": 4, "num_attention_heads": 2,
    "intermediate_size": 4, "max_position_embeddings": 8,
}  # fmt: skip
_LEAST_TOKENIZER = {
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []},
}

FORMATS = (
    Format(
        name="gguf",
        title="GGUF (llama.cpp), plain and quantised",
        detect=_detect,
        signs=Signs(head=MAGIC),
        open=_open,
        layout=_layout,
        prepare=_prepare,
        values=as_stored,
        holds=Holds(
            dtypes=frozenset(ELEMENT_TYPES.values()),
            depth=1,
            rank=4,
            zero_size=False,
            stated=frozenset({CONFIG, *TOKENIZER_FILES}),
            needs={CONFIG: json.dumps(_LEAST).encode(), TOKENIZER: json.dumps(_LEAST_TOKENIZER).encode()},
            names=((EMBEDDING,),),
        ),
        single_file=True,
        system="gguf",
        form=TreeForm(_is_own, f"llama.cpp's names, with {EMBEDDING}", flax=False),
        options={
            "type": Option(
                SOURCE,
                "element type of matrices, `mxfp4` of experts if there are any; `source` keeps that of the source",
                (SOURCE, *ELEMENT_TYPES),
            ),
            "tokenizer": Option(SOURCE, "`none` leaves the tokenizer out", (SOURCE, "none")),
        },
        version=_version,
        loaded_by="gguf 0.19, transformers 5.23",
    ),
)
