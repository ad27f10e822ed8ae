"""Manifest: everything that one checkpoint holds.

A manifest has the TensorSpecs by key path, non-tensor leaves (strings, numbers), empty nodes, which nodes are lists,
step, kind, companion files (config, tokenizer, params.json, gin) with their digests and an `origin` block. After a
pass over the bytes it also has a digest per tensor. Its JSON form has a schema version; it is stored in the sidecar
of every checkpoint that wherry wrote.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import field, replace
from types import MappingProxyType
from typing import Any, TypeAlias

from wherry.core.digest import canonical_json, header_line, new_hash, require_digest, weights_digest
from wherry.core.html import html_table
from wherry.core.json_forms import ListOf, Record, require_form
from wherry.core.keypath import KeyPath, parse, render
from wherry.core.lazy_dataclass import dataclass
from wherry.core.steps import require_step
from wherry.core.tensorspec import Sharding, TensorSpec, bytes_of, forms_of
from wherry.core.units import plural, show_size
from wherry.errors import CorruptError, describe_exception, schema_error

SCHEMA = 2
Value: TypeAlias = str | int | float | bool | None
JsonObject: TypeAlias = dict[str, Any]

_TEXT = (str,)
_NUMBER = (int,)
_TABLE = Record()
_TEXTS = Record(rest=_TEXT)
_SYSTEM = Record({"system": _TEXT}, rest=(str, int, bool))  # with its forms and conventions

# What conversions record in `origin` and wherry reads again; other names are the formats' own, and nothing reads them.
ORIGIN = Record(
    optional={
        "dequantized": Record(
            {"dtype": _TEXT}, {"quantization_config": _TABLE, "compression_config": _TABLE}
        ),
        "expected_parameters": (int, type(None)),
        "least_parameters": (int, type(None)),
        "layout": Record(
            {"family": _TEXT, "from": _SYSTEM, "to": _SYSTEM},
            {
                "facts": _TABLE,
                "sizes": Record(rest=_NUMBER),
                "dtype": _TEXT,
                "overflow": (bool,),
                "only": _TEXT,
                "rename": ListOf(_TEXT),
            },
        ),
        "merge": Record({"sources": ListOf(_TABLE)}),
        "meta": _TEXTS,
        "names": Record({"renamed": _TEXTS}, {"requested": _TABLE, "inverse": ListOf(_TEXT)}),
        "pinned": (bool,),
        "quantized": Record({"scheme": _TEXT}, {"scales": _TEXT, "group_size": (int,)}),
        "scan": Record({"requested": _TEXT}, {"inverse": _TEXT}),
        "tied": _TEXTS,
        "values": _TEXTS,
    }
)


def _empty_mapping() -> Mapping[Any, Any]:
    return MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Companion:
    """A file of the checkpoint that holds no tensors.

    Attributes:
        name: relative path with `/`.
        size: bytes.
        sha256: hex digest of its bytes; None before they are read.
    """

    name: str
    size: int
    sha256: str | None = None


@dataclass(frozen=True, slots=True)
class Manifest:
    """The contents of one checkpoint.

    Attributes:
        tensors: key path → TensorSpec.
        values: key path → non-tensor leaf (string, number, bool).
        empties: key path → `dict`, `list`, `tuple` or `none`: nodes without children.
        lists: paths of the nodes that are sequences; all other nodes are mappings.
        step: training step, where known.
        kind: `params`, `train-state` or `other`.
        companions: files next to the tensors.
        custom: the container's own free metadata (Orbax custom_metadata, safetensors `__metadata__`).
        origin: who trained it and with what, where known; `--meta` adds to it.
        digests: key path → tensor digest with its algorithm, the same for all; complete or empty.
    """

    tensors: Mapping[KeyPath, TensorSpec]
    values: Mapping[KeyPath, Value] = field(default_factory=_empty_mapping)
    empties: Mapping[KeyPath, str] = field(default_factory=_empty_mapping)
    lists: frozenset[KeyPath] = frozenset()
    step: int | None = None
    kind: str = "other"
    companions: tuple[Companion, ...] = ()
    custom: Mapping[str, Any] = field(default_factory=_empty_mapping)
    origin: Mapping[str, Any] = field(default_factory=_empty_mapping)
    digests: Mapping[KeyPath, str] = field(default_factory=_empty_mapping)

    def __post_init__(self) -> None:
        """Check that a ledger can record the step."""
        require_step(self.step)

    @property
    def parameters(self) -> int:
        """Number of elements in all tensors."""
        forms = forms_of(self.tensors.values())
        return sum(number * math.prod(shape) for (_dtype, shape), number in forms.items())

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors in canonical form."""
        return bytes_of(self.tensors.values())

    @property
    def summary(self) -> str:
        """The step, the parameters, the tensors and the bytes, as a text."""
        step = "" if self.step is None else f"step {self.step}, "
        sizes = f"{plural(self.parameters, 'parameter')}, {show_size(self.nbytes)}"
        return f"{step}{plural(len(self.tensors), 'tensor')}, {sizes}"

    def __repr__(self) -> str:
        return f"<Manifest: {self.kind}, {self.summary}>"

    def to_html(self, title: str) -> str:
        """A table of its tensors, for notebooks."""
        rows = (
            (spec.name, " x ".join(map(str, spec.shape)), spec.dtype)
            for _path, spec in sorted(self.tensors.items())
        )
        return html_table(title, ("tensor", "shape", "dtype"), rows)

    def _repr_html_(self) -> str:
        return self.to_html(repr(self))

    def with_digests(
        self, digests: Mapping[KeyPath, str], companions: tuple[Companion, ...] | None = None
    ) -> Manifest:
        """The same manifest with the digests that a pass over the bytes computed."""
        return replace(
            self, digests=digests, companions=self.companions if companions is None else companions
        )

    def to_json(self) -> JsonObject:
        """JSON form; the inverse of `from_json`."""
        return {**self.json_form(), "tensors": list(self.tensor_rows())}

    def tensor_rows(self) -> Iterator[JsonObject]:
        """The rows of `tensors` of the JSON form, one after the other."""
        for path in sorted(self.tensors):
            spec = self.tensors[path]
            row: JsonObject = {
                "path": spec.name,
                "shape": list(spec.shape),
                "dtype": spec.dtype,
                "digest": self.digests.get(path),
            }
            if spec.chunks is not None:
                row["chunks"] = list(spec.chunks)
            if spec.axes is not None:
                row["axes"] = [list(axis) if isinstance(axis, tuple) else axis for axis in spec.axes]
            if spec.sharding is not None:
                row["sharding"] = {
                    "mesh": [list(axis) for axis in spec.sharding.mesh],
                    "spec": [list(axis) if isinstance(axis, tuple) else axis for axis in spec.sharding.spec],
                    "rules": [
                        [name, list(axis) if isinstance(axis, tuple) else axis]
                        for name, axis in spec.sharding.rules
                    ],
                }
            if spec.tags:
                row["tags"] = dict(spec.tags)
            yield row

    def json_form(self) -> JsonObject:
        """The JSON form with no row in `tensors`."""
        return {
            "schema": SCHEMA,
            "step": self.step,
            "kind": self.kind,
            "tensors": [],
            "values": {render(path): value for path, value in sorted(self.values.items())},
            "empties": {render(path): kind for path, kind in sorted(self.empties.items())},
            "lists": [render(path) for path in sorted(self.lists)],
            "companions": [{"name": c.name, "size": c.size, "sha256": c.sha256} for c in self.companions],
            "custom": dict(self.custom),
            "origin": dict(self.origin),
        }


def without_chunks(manifest: Manifest) -> Manifest:
    """The manifest with no chunk grid, as a flat container holds it."""
    if all(spec.chunks is None for spec in manifest.tensors.values()):
        return manifest
    tensors = {path: replace(spec, chunks=None) for path, spec in manifest.tensors.items()}
    return replace(manifest, tensors=tensors)


def from_json(data: JsonObject, uri: str = "") -> Manifest:
    """Read the JSON form of a manifest.

    Raises:
        CorruptError: a field is missing or invalid, or this version of wherry does not support the schema.
    """
    try:
        if data["schema"] != SCHEMA:
            raise schema_error("manifest", data["schema"], SCHEMA, uri)
        rows = [row if isinstance(row, tuple) else tensor_row(row) for row in data["tensors"]]
        return Manifest(
            tensors={spec.path: spec for spec, _ in rows},
            values={parse(path): value for path, value in data["values"].items()},
            empties={parse(path): kind for path, kind in data["empties"].items()},
            lists=frozenset(parse(path) for path in data["lists"]),
            step=_require_type(data["step"], "step", int, type(None)),
            kind=_require_type(data["kind"], "kind", str),
            companions=tuple(Companion(**row) for row in data["companions"]),
            custom=_require_type(data["custom"], "custom", dict),
            origin=_origin(data["origin"]),
            digests={spec.path: require_digest(digest) for spec, digest in rows if digest},
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise CorruptError(
            f"invalid manifest: {describe_exception(error)}",
            uri=uri,
            cure="delete the sidecar, or restore it from a backup",
        ) from error


def tensor_row(row: JsonObject) -> tuple[TensorSpec, str | None]:
    """A tensor and its digest, from a row of the JSON form; `from_json` takes such pairs for rows too.

    Raises:
        KeyError, TypeError, AttributeError: it is not one.
    """
    spec = TensorSpec(
        path=parse(row["path"]),
        shape=_extents(row["shape"]),
        dtype=_require_type(row["dtype"], "dtype", str),
        chunks=_extents(row["chunks"]) if "chunks" in row else None,
        axes=_names(row["axes"]) if "axes" in row else None,
        sharding=_sharding_from_json(row["sharding"]) if "sharding" in row else None,
        tags=_require_type(row.get("tags"), "tags", dict, type(None)),
    )
    return spec, row.get("digest") or None


def _require_type(value: Any, name: str, *kinds: type) -> Any:
    if type(value) not in kinds:
        raise TypeError(f"expected {kinds[0].__name__} as {name!r}, got {type(value).__name__}")
    return value


def _origin(value: Any) -> JsonObject:
    require_form(value, ORIGIN, "origin")
    return value


def _extents(values: list[Any]) -> tuple[int, ...]:
    if set(map(type, values)) - {int} or min(values, default=0) < 0:
        raise TypeError(f"expected integers of at least 0 as extents, got {values!r}")
    return tuple(values)


def _sharding_from_json(data: JsonObject) -> Sharding:
    return Sharding(
        mesh=tuple((name, extent) for name, extent in data["mesh"]),
        spec=_names(data["spec"]),
        rules=tuple((name, *_names([axis])) for name, axis in data["rules"]),
    )


def _names(axes: list[Any]) -> tuple[Any, ...]:
    return tuple(tuple(axis) if isinstance(axis, list) else axis for axis in axes)


def checkpoint_digest(
    manifest: Manifest,
    format_name: str,
    format_version: str | None,
    algorithm: str,
    weights: str | None = None,
) -> str:
    """Digest of the identity: content, container and companions.

    Args:
        manifest: its contents, with the digests of its tensors.
        format_name: its format.
        format_version: the format's version of the layout.
        algorithm: of the tensors' digests and of this one.
        weights: the weights digest, if it is known.
    """
    content = weights or weights_digest(manifest.digests, algorithm)
    identity = {
        "weights": content.removeprefix(f"{algorithm}:"),
        "format": format_name,
        "format_version": format_version,
        "values": {render(path): value for path, value in manifest.values.items()},
        "empties": {render(path): kind for path, kind in manifest.empties.items()},
        "companions": {companion.name: companion.sha256 for companion in manifest.companions},
    }
    found = new_hash(algorithm, header_line("checkpoint") + canonical_json(identity))
    return f"{algorithm}:{found.digest().hex()}"
