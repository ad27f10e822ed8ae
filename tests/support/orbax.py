"""What the Orbax tests share: a tree with everything in it, our writer driven by hand, and the installed Orbax."""

from __future__ import annotations

import hashlib
import random
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from tests.support import corpus
from tests.support.corpus import CORPUS, needs_corpus  # noqa: F401  tests take the mark from here
from tests.support.corpus import expected as expectation
from wherry.core.keypath import KeyPath
from wherry.core.manifest import Manifest
from wherry.core.tensorspec import TensorSpec
from wherry.errors import WherryError
from wherry.formats.format import Glimpse, Opened
from wherry.formats.registry import checked_options
from wherry.integrations.containers.orbax.write import chunks_of
from wherry.integrations.formats.orbax import FORMATS
from wherry.mover.map_writer import MapWriter, writer_of
from wherry.store.local_store import locate

ORBAX = FORMATS[0]


def cases(*formats: str) -> list[str]:
    """Corpus cases of these formats, whatever their verdict."""
    return corpus.cases(*formats, verdicts=None)


def opened(folder: Path | str) -> Opened:
    """Detect and open as Orbax."""
    detection = ORBAX.detect(Glimpse(locate(folder)))
    assert detection is not None, f"{folder} is not recognised"
    return ORBAX.open(locate(detection.uri), detection)


def copied(case, tmp_path):
    """A copy of a case that may be damaged."""
    whole = tmp_path / case
    shutil.copytree(CORPUS / case / "checkpoint", whole)
    for path in [whole, *whole.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)
    return whole / expectation(case)["uri"]


def verdict_of(folder):
    """Verdict and reason as `detect` finds them: claim, open, presence check."""
    detection = ORBAX.detect(Glimpse(locate(folder)))
    if detection is None or detection.verdict != "ok":
        return (detection.verdict, detection.reason) if detection else ("none", "")
    try:
        reader = ORBAX.open(locate(detection.uri), detection).reader
    except WherryError as error:
        return error.verdict, error.what
    absent = list(reader.absent())
    return ("incomplete", str(absent[0])) if absent else ("ok", "")


def digest(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


def sample() -> dict[KeyPath, np.ndarray]:
    """Arrays of every kind of dtype, shape and name."""
    rng = np.random.default_rng(7)
    floats = rng.standard_normal((70, 33)).astype(np.float32)
    return {
        ("params", "wide"): floats,
        ("params", "bf16"): floats.astype(ml_dtypes.bfloat16),
        ("params", "f8"): floats.astype(ml_dtypes.float8_e4m3fn),
        ("params", "f8_e5m2"): floats.astype(ml_dtypes.float8_e5m2),
        ("params", "half"): floats.astype(np.float16),
        ("params", "int4"): rng.integers(-8, 8, (5, 6)).astype(ml_dtypes.int4),
        ("params", "mask"): floats > 0,
        ("params", "complex"): floats[:3].astype(np.complex64),
        ("params", "zeros"): np.zeros((40, 40), np.float32),
        ("params", "cube"): rng.integers(0, 1 << 40, (9, 10, 11)),
        ("params", "layers", "0", "w"): floats[:8, :8].copy(),
        ("params", "layers", "1", "w"): floats[8:16, :8].copy(),
        ("model.layers.0.weight",): floats[:16, :16].copy(),
        ("deep/slash", "kernel"): floats[:4].copy(),
        ("step",): np.asarray(1234, np.int32),
    }


def manifest_of(arrays: dict[KeyPath, np.ndarray], **more: Any) -> Manifest:
    """A manifest of arrays; `layers` below `params` is a list."""
    tensors = {path: TensorSpec(path, array.shape, array.dtype.name) for path, array in arrays.items()}
    lists = {("params", "layers")} if ("params", "layers", "0", "w") in arrays else set()
    return Manifest(tensors=tensors, lists=frozenset(lists), **more)


def full_manifest() -> Manifest:
    """The sample, with empties, strings and numbers added."""
    return manifest_of(
        sample(),
        empties={("nothing",): "none", ("no_keys",): "dict", ("no_items",): "list"},
        values={("note",): "trained on Tuesdays"},
        step=1234,
        kind="other",
    )


def small_chunks(manifest: Manifest) -> Manifest:
    """Chunks that do not divide the shapes, so that edges and many chunks are written."""
    specs = {
        path: replace(spec, chunks=tuple(max(extent // 3, 1) for extent in spec.shape))
        for path, spec in manifest.tensors.items()
    }
    return replace(manifest, tensors=specs)


def writer_at(folder: Path, manifest: Manifest, **options: Any) -> MapWriter:
    """A writer for a manifest, whose tensors without a grid get that of the options."""
    checked = checked_options(ORBAX, options)
    specs = {
        path: spec if spec.chunks is not None else replace(spec, chunks=chunks_of(spec, checked["chunks"]))
        for path, spec in manifest.tensors.items()
    }
    return writer_of(ORBAX, locate(folder), replace(manifest, tensors=specs), checked)


def write(
    folder: Path,
    arrays: dict[KeyPath, np.ndarray],
    manifest: Manifest | None = None,
    *,
    seed: int | None = None,
    times: int = 1,
    threads: int = 1,
    **options: Any,
) -> Manifest:
    """Write arrays through our writer, chunk by chunk; shuffled, repeated and from several threads on request."""
    manifest = manifest or manifest_of(arrays)
    writer = writer_at(folder, manifest, **options)
    jobs = [
        (path, region)
        for path, array in arrays.items()
        for region in regions(array.shape, writer.grid(path))
        for _ in range(times)
    ]
    if seed is not None:
        random.Random(seed).shuffle(jobs)

    def one(job: tuple[KeyPath, tuple[slice, ...]]) -> None:
        path, region = job
        data = np.ascontiguousarray(arrays[path][region])
        writer.write(path, region, memoryview(data.reshape(-1).view("u1")))

    with ThreadPoolExecutor(threads) as executor:
        list(executor.map(one, jobs))
    writer.sync()
    writer.finish()
    writer.finish()
    writer.close()
    return manifest


def regions(shape: tuple[int, ...], chunks: tuple[int, ...]) -> list[tuple[slice, ...]]:
    """The chunks of a shape, short at the edges."""
    axes = [
        [slice(start, min(start + chunk, extent)) for start in range(0, extent, chunk)]
        for extent, chunk in zip(shape, chunks, strict=True)
    ]
    return list(product(*axes))


def nested(manifest: Manifest, arrays: dict[KeyPath, np.ndarray]) -> Any:
    """The tree that Orbax restores for a manifest: dicts, lists, empties and strings."""
    leaves: dict[KeyPath, Any] = {**arrays, **manifest.values}
    leaves |= {
        path: {"none": None, "dict": {}, "list": [], "tuple": ()}[kind]
        for path, kind in manifest.empties.items()
    }
    root: dict[str, Any] = {}
    for path, leaf in leaves.items():
        node = root
        for part in path[:-1]:
            node = node.setdefault(part, {})
        node[path[-1]] = leaf
    return _with_lists(root, (), manifest.lists)


def _with_lists(node: Any, path: KeyPath, lists: frozenset[KeyPath]) -> Any:
    if not isinstance(node, dict):
        return node
    children = {key: _with_lists(child, (*path, key), lists) for key, child in node.items()}
    return [children[str(index)] for index in range(len(children))] if path in lists else children


def assert_same_tree(found: Any, wanted: Any, where: str = "") -> None:
    """Trees of arrays are equal: structure, dtypes and bits."""
    if isinstance(wanted, (dict, list, tuple)):
        assert isinstance(found, dict) == isinstance(wanted, dict), where
        assert len(found) == len(wanted), f"{where}: {list(found)} is not {list(wanted)}"
        keys = wanted if isinstance(wanted, dict) else range(len(wanted))
        for key in keys:
            assert_same_tree(found[key], wanted[key], f"{where}/{key}")
    elif isinstance(wanted, np.ndarray):
        array = np.asarray(found)
        assert (array.shape, array.dtype.name) == (wanted.shape, wanted.dtype.name), where
        assert array.tobytes() == wanted.tobytes(), f"{where} differs"
    else:
        assert found == wanted, where
