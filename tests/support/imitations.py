"""Cases like those of the corpus, made here by the installed libraries, so that a plain clone tests what they test.

A case has a name that begins with `made-`, and the corpus's helpers (`expected`, `home`, `place`) know it too: what a
test does with the corpus it does with these. Each is made once for a process, when it is first needed; nobody may
change it. Its format and verdict are known without making it, as tests are collected by them.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.support import hostile, paxml
from tests.support.odd_files import ODD

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class Imitation:
    """One case.

    Attributes:
        format: as `detect` calls it.
        verdict: of its state.
        make: writes it into an absent folder and returns the further fields of `expected.json`.
    """

    format: str
    verdict: str
    make: Callable[[Path], dict[str, Any]]


@cache
def _root() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="wherry-cases-", ignore_cleanup_errors=True)


@cache
def made(name: str) -> tuple[Path, dict[str, Any]]:
    """The folder that the URIs of a case are relative to, and what is expected of it."""
    row, root = table()[name], Path(_root().name)
    fresh = Path(tempfile.mkdtemp(dir=root))  # a maker that fails leaves nothing under the name
    (fresh / "checkpoint").mkdir()
    more = row.make(fresh / "checkpoint")
    home = fresh.rename(root / name) / "checkpoint"
    common = {
        "case": name,
        "format": row.format,
        "verdict": row.verdict,
        "alternative_uris": [],
        "reason": None,
    }
    return home, common | more


def imitations(*formats: str, verdicts: tuple[str, ...] | None = ("ok", "ok-but-altered")) -> list[str]:
    """Names of the cases of these formats with one of these verdicts, or with any; as `cases` of the corpus."""
    return [
        name
        for name, row in table().items()
        if row.format in formats and (verdicts is None or row.verdict in verdicts)
    ]


@cache
def table() -> dict[str, Imitation]:
    """Every case."""
    return _PAXML | _HOSTILE | _ODD


def tensors(found: Mapping[tuple[str, ...], np.ndarray], **more: Any) -> list[dict[str, Any]]:
    """The rows of arrays, by key path."""
    return [
        {
            "path": list(path),
            "shape": list(array.shape),
            "dtype": array.dtype.name,
            "sha256": hashlib.sha256(array.tobytes()).hexdigest(),
            **more,
        }
        for path, array in found.items()
    ]


# ---- PaxML

_RUN = "checkpoints"


def _pax_arrays(home: Path, *, version: float = 1.1, optimizer: bool = True) -> dict[str, Any]:
    step = home / _RUN / f"checkpoint_{paxml.STEP:08d}"
    found = paxml.leaves(optimizer=optimizer)
    paxml.gda(step / "state" if version else step, found)
    if version:
        paxml.write_metadata(step, version, found)
    flat = {tuple(paxml.flat_name(path).split(".")): array for path, array in found.items()}
    kind = "train-state" if optimizer else "params"
    return _pax_row(home, step, f"paxml {version}, per-array zarr2 directories", kind, tensors(flat))


def _pax_ocdbt(home: Path) -> dict[str, Any]:
    step, found = home / _RUN / f"checkpoint_{paxml.STEP:08d}", paxml.leaves()
    paxml.ocdbt(step / "state", found)
    paxml.write_metadata(step, 1.2, found)
    return _pax_row(home, step, "paxml 1.2, ocdbt", "train-state", tensors(found))


def _pax_flax(home: Path, *, version: float = 1.1) -> dict[str, Any]:
    step, found = home / _RUN / f"checkpoint_{paxml.STEP}", paxml.leaves()
    names = paxml.flax(step / "state" / "checkpoint" if version else step, found)
    if version:
        paxml.write_metadata(step, version, found)
    rows = tensors({("flattened_state", str(number)): found[name] for number, name in enumerate(names)})
    rows = [row | {"tree_path": list(name)} for row, name in zip(rows, names, strict=True)]
    return _pax_row(home, step, f"paxml {version}, one msgpack", "train-state", rows)


def _pax_row(home: Path, step: Path, version: str, kind: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    inside = [step / "state"] if (step / "state").is_dir() else []
    return {
        "uri": str(step.relative_to(home)),
        "alternative_uris": [str(one.relative_to(home)) for one in inside],
        "layout_version": version,
        "step": paxml.STEP,
        "kind": kind,
        "tensors": rows,
    }


def _pax_lost(home: Path, lost: Callable[[Path], bool]) -> dict[str, Any]:
    """A sound checkpoint of which some chunks are gone."""
    row = _pax_arrays(home)
    state = home / row["uri"] / "state"
    folders = [folder for folder in state.iterdir() if folder.is_dir()]
    files = [chunk for folder in folders for chunk in folder.iterdir() if chunk.name != ".zarray"]
    gone = [chunk for chunk in files if lost(chunk)]
    damaged = {chunk.parent.name for chunk in gone}
    for chunk in gone:
        chunk.unlink()
    rows = [one | {"damaged": ".".join(one["path"]) in damaged} for one in row["tensors"]]
    return row | {"tensors": rows, "chunks": (len(files) - len(gone), len(files)), "arrays": len(folders)}


def _one_chunk(chunk: Path) -> bool:
    return (chunk.parent.name, chunk.name) == ("mdl_vars.params.lm.softmax.logits_ffn.linear.w", "0.1")


def _other_hosts(chunk: Path) -> bool:
    return set(chunk.name) - {"0", "."} != set()


_PAXML = {
    "made-paxml-v11": Imitation("paxml", "ok", _pax_arrays),
    "made-paxml-v11-eval-only": Imitation("paxml", "ok", partial(_pax_arrays, optimizer=False)),
    "made-paxml-v12": Imitation("paxml", "ok", _pax_ocdbt),
    "made-paxml-v10": Imitation("paxml", "ok", partial(_pax_arrays, version=1.0)),
    "made-paxml-v00": Imitation("paxml", "ok", partial(_pax_arrays, version=0.0)),
    "made-paxml-flax": Imitation("paxml-flax", "ok", _pax_flax),
    "made-paxml-flax-v00": Imitation("paxml-flax", "ok", partial(_pax_flax, version=0.0)),
    "made-paxml-missing-chunk": Imitation("paxml", "incomplete", partial(_pax_lost, lost=_one_chunk)),
    "made-paxml-one-of-4-hosts": Imitation("paxml", "incomplete", partial(_pax_lost, lost=_other_hosts)),
}


# ---- What must be refused

REFUSALS = ("malicious", "corrupt", "unsupported", "not-a-checkpoint")
# What is more than one pickle, or is not refused for what it calls.
_FORMATS = {
    "os-system-pt": "torch-zip",
    "deflated-pt": "torch-zip",
    "builtins-exec-legacy-pt": "torch-legacy",
    "picklescan-object-arrays-compressed-npz": "npz",
    "picklescan-malicious-invalid-bytes-pkl": "none",
    **dict.fromkeys(("dcp-length-bomb", "dcp-path-escape", "dcp-planner-data"), "dcp"),
}
_VERDICTS = {
    "frame-bomb-pkl": "corrupt",
    "dcp-length-bomb": "corrupt",
    "picklescan-object-arrays-compressed-npz": "unsupported",
    "picklescan-object-array-npy": "not-a-checkpoint",
    "picklescan-dns-exfiltration-npy": "not-a-checkpoint",
    "picklescan-malicious-invalid-bytes-pkl": "not-a-checkpoint",
    **dict.fromkeys(
        (name for name in hostile.FILES if name.startswith("picklescan-malicious1-") and "-v" not in name),
        "not-a-checkpoint",
    ),
}


def _hostile(home: Path, *, name: str) -> dict[str, Any]:
    file, make = hostile.FILES[name]
    make(home / file)
    names = hostile.wanted(hostile.PICKLES[name][1]) if name in hostile.PICKLES else []
    reason = f"import or call {', '.join(names)}" if names else None
    common = {"uri": file, "step": None, "kind": "other", "tensors": []}
    left = [] if name in hostile.NO_MARKER else [hostile.MARKER]
    return common | {"reason": reason, "accepted_verdicts": REFUSALS, "must_not_create": left}


def _odd(home: Path, *, name: str) -> dict[str, Any]:
    ODD[name].make(home / ODD[name].name)
    return {"uri": ODD[name].name, "step": None, "kind": "other", "tensors": []}


def _hostile_row(name: str) -> Imitation:
    form = _FORMATS.get(name, "numpy-pickle" if name in hostile.PICKLES else "none")
    return Imitation(form, _VERDICTS.get(name, "malicious"), partial(_hostile, name=name))


_HOSTILE = {f"made-hostile-{name}": _hostile_row(name) for name in hostile.FILES}
_ODD = {
    f"made-{name}": Imitation(row.format, row.verdict, partial(_odd, name=name)) for name, row in ODD.items()
}
