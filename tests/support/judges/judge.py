"""Judges: what a target's own library computes from a folder that wherry wrote, one warm process for each library.

    with judge_for("megatron") as judge:
        found = judge.logits(folder, tokens, label)

A library that cannot be installed together with ours runs in an environment of its own (`tests.support.generations`); a
test is skipped where that cannot be made. Systems without a library for a processor have a forward pass written from
their definition (`tests.support.oracles`), and their judge says so in its name.
"""

from __future__ import annotations

import json
import os
import re
import select
import subprocess
from ast import literal_eval
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import IO, Any, Protocol, Self

import numpy as np
import yaml

from tests.support.generations import BARE, STACKS, old_python
from tests.support.memory_files import temporary_folder
from tests.support.oracles import files, lingua, maxtext, penzai, t5x
from tests.support.oracles.cases import MODEL_NAMES, leaves_of
from tests.support.oracles.leaves import Leaves
from tests.support.oracles.maxtext_itself import round_embedding, round_factor, stated
from tests.support.oracles.parts import TieError
from tests.support.walk.models import logits as huggingface_logits
from tests.support.walk.models import meta_params

Array = np.ndarray[Any, np.dtype[Any]]

SECONDS = 600  # for one model
_PLACE = Path(__file__).parent
# Labels of the walk whose block MaxText knows by the name of a model.
_NAMES = {"gemma3_text": "gemma3", "deepseek_v3": "deepseek-v3", "deepseek_v32": "deepseek-v3.2"}


class JudgeError(Exception):
    """The library did not load a folder, or compute from it; the text is its traceback."""


class Judge(Protocol):
    """What computes from the folders of a system.

    Attributes:
        name: the library and its release.
        allowed: what its roundings may change, as a share of the largest logit.
        options: label → those of the conversion, where the library loads one form alone.
        rounds: what the library is known to compute otherwise, done to the model of the source before it computes what
            is expected.
    """

    name: str
    allowed: float
    options: Callable[[str], Mapping[str, str]]
    rounds: Callable[[Any], None] | None

    def logits(self, folder: Path, tokens: Array, label: str, source: Path | None = None) -> Array:
        """Logits [batch, position, vocabulary] of tokens [batch, position].

        Args:
            folder: what wherry wrote.
            tokens: the tokens; a decoder behind an encoder gets them in reverse.
            label: the class, of `tests.support.walk.models.BASES`.
            source: the model that was converted, where no file of the target has a config.

        Raises:
            JudgeError: the library did not compute.
            TieError: what the model computes is not determined.
        """
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_error: object) -> None: ...


@dataclass
class Process:
    """A library in an environment of its own; it is started with the first model, and anew after it was killed.

    Attributes:
        name, allowed, options, rounds: of the judge.
        stack: its environment.
        program: what runs there.
        stated: what the program is given besides, of a folder and a label.
    """

    name: str
    allowed: float
    stack: str
    program: str
    options: Callable[[str], Mapping[str, str]] = lambda _label: {}
    rounds: Callable[[Any], None] | None = None
    stated: Callable[[Path, str], list[str]] = lambda _folder, _label: []
    _running: subprocess.Popen[str] | None = None
    _heard: IO[str] | None = None
    _compiled: TemporaryDirectory[str] | None = None

    def logits(self, folder: Path, tokens: Array, label: str, source: Path | None = None) -> Array:
        """See `Judge.logits`."""
        del source
        with temporary_folder("judge") as place:
            out = Path(place, "logits.npy")
            job = {"folder": str(folder), "tokens": np.asarray(tokens).tolist(), "label": label}
            answer = self._answer({**job, "stated": self.stated(folder, label), "out": str(out)})
            if answer["error"]:
                raise JudgeError(answer["error"])
            return np.load(out)

    def _answer(self, job: dict[str, Any]) -> dict[str, Any]:
        running = self._running or self._start()
        assert running.stdin is not None
        assert running.stdout is not None
        line = ""
        try:
            running.stdin.write(json.dumps(job) + "\n")
            running.stdin.flush()
            if select.select([running.stdout], [], [], SECONDS)[0]:
                line = running.stdout.readline()
        except BrokenPipeError:
            pass
        if line:
            return json.loads(line)
        assert self._heard is not None
        self._heard.seek(0)
        said = self._heard.read()[-2000:]
        self.__exit__()
        raise JudgeError(f"{self.name} ended, or computed for more than {SECONDS} s: {said}")

    def _start(self) -> subprocess.Popen[str]:
        self._compiled = temporary_folder("judge")  # what XLA compiled, for the models of equal shapes
        self._heard = TemporaryFile("w+")  # noqa: SIM115  open as long as the process runs
        # XLA compiles each model in half the time.
        flags = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
        own = {
            "XLA_FLAGS": flags,
            "JAX_COMPILATION_CACHE_DIR": self._compiled.name,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "PATH": "/usr/bin:/bin",
            "JAX_PLATFORMS": "cpu",
            "CUDA_VISIBLE_DEVICES": "",
            "HF_HUB_OFFLINE": "1",
        }
        self._running = subprocess.Popen(
            [str(old_python(self.stack)), "-W", "ignore", str(_PLACE / self.program)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._heard, text=True, cwd="/",
            env={**own, **{name: os.environ[name] for name in ("HOME", "TMPDIR") if name in os.environ}},
        )  # fmt: skip
        return self._running

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        if self._running is not None:
            self._running.kill()
            self._running.wait()
            for stream in (self._running.stdin, self._running.stdout, self._heard):
                assert stream is not None
                stream.close()
            self._running = None
            assert self._compiled is not None
            self._compiled.cleanup()


@dataclass
class Here:
    """What is installed together with wherry, or written from a definition.

    Attributes:
        name, allowed, options, rounds: of the judge.
        compute: logits of a folder, tokens, a label and the source.
    """

    name: str
    allowed: float
    compute: Callable[[Path, Array, str, Path | None], Array]
    options: Callable[[str], Mapping[str, str]] = lambda _label: {}
    rounds: Callable[[Any], None] | None = None

    def logits(self, folder: Path, tokens: Array, label: str, source: Path | None = None) -> Array:
        """See `Judge.logits`."""
        try:
            return self.compute(folder, np.asarray(tokens), label, source)
        except TieError:
            raise
        except Exception as error:
            raise JudgeError(f"{type(error).__name__}: {error}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        pass


def _huggingface(folder: Path, tokens: Array, label: str, _source: Path | None) -> Array:
    return huggingface_logits(folder, label, own=False, given=tokens)[0]


def _lingua(folder: Path, tokens: Array, _label: str, _source: Path | None) -> Array:
    arguments = json.loads((folder / "params.json").read_text())["model"]
    consolidated = (folder / "consolidated").is_dir() or any(folder.glob("consolidated*"))
    found = files.arrays("lingua-consolidated" if consolidated else "lingua", folder)
    return _llama(files.below(found, "model/" if consolidated else "model."), arguments, tokens)


def _meta(folder: Path, tokens: Array, _label: str, source: Path | None) -> Array:
    assert source is not None
    return _llama(files.arrays("torch-zip", folder), meta_params(source), tokens)


def _llama(arrays: dict[str, Array], arguments: dict[str, Any], tokens: Array) -> Array:
    leaves = Leaves(arrays)
    found = lingua.logits(leaves, arguments, tokens)
    leaves.require_all_taken()
    return found


def _maxtext(folder: Path, tokens: Array, label: str, _source: Path | None) -> Array:
    config = yaml.safe_load((folder / "items" / "assets" / "maxtext_config.yml").read_text())
    leaves = leaves_of(files.arrays("maxtext", folder), config)
    name = MODEL_NAMES.get(_NAMES.get(label, ""), {})
    found = maxtext.logits(leaves, {"max_target_length": tokens.shape[1], **name, **config}, tokens)
    leaves.require_all_taken()
    return found


def _penzai(folder: Path, tokens: Array, label: str, _source: Path | None) -> Array:
    import orbax.checkpoint as ocp

    from wherry.integrations.penzai.rebuild import gpt_neox_model, llamalike_model, named_arrays

    arrays = named_arrays(ocp.StandardCheckpointer().restore(folder), folder)
    model = (gpt_neox_model if label == "gpt_neox" else llamalike_model)(folder, arrays)
    return penzai.logits(model, tokens)


def _t5x(folder: Path, tokens: Array, label: str, _source: Path | None) -> Array:
    rows = re.findall(
        r"^[\w./]*T5Config\.(\w+) *= *(.+)$", (folder / "architecture.gin").read_text(), re.MULTILINE
    )
    config = {**t5x.DEFAULTS, **{name: literal_eval(value) for name, value in rows}}
    kind = "t5x-legacy" if (folder / "checkpoint").is_file() else "t5x-orbax"
    leaves = Leaves(files.below(files.arrays(kind, folder), "target/"))
    query = next(array for name, array in leaves.arrays.items() if name.endswith("query/kernel"))
    network = t5x.Network(
        config,
        apart=query.ndim - bool(config["scan_layers"]) == 3,
        own_bias="encoder/relpos_bias/rel_embedding" not in leaves,
    )
    ways = (tokens,) if label == "t5_encoder" else (tokens, tokens[:, ::-1])
    found = (t5x.encode if label == "t5_encoder" else t5x.logits)(leaves, network, *ways)
    leaves.require_all_taken()
    return found


def _scale_head(model: Any) -> None:
    """transformers scales the output of UMT5's decoder, T5X only if logits go through the embedding."""
    import torch

    if model.config.model_type == "umt5" and model.lm_head.weight is not model.shared.weight:
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight * model.config.d_model**0.5)


def _words(folder: Path, label: str) -> list[str]:
    """The command line of MaxText."""
    config = yaml.safe_load((folder / "items" / "assets" / "maxtext_config.yml").read_text())
    return stated(_NAMES.get(label, label), config)


def _norms(label: str) -> Mapping[str, str]:
    """Where the norms lie that Transformer Engine makes a part of the next layer: Megatron's own layers have them."""
    return {"norms": "apart" if label.startswith("deepseek") else "local"}


def _pinned(stack: str) -> str:
    """A library and its release, as tests install it."""
    return " ".join(next(iter(BARE.get(stack, STACKS[stack]))).split("=="))


# The end of the name of a second judge of a system: a forward pass written from the source of its library.
WRITTEN = "-written"
JUDGES = (
    "huggingface", "huggingface-flax", "lingua", "maxtext", f"maxtext{WRITTEN}", "megatron", "meta", "penzai", "t5x",
    "torchtitan",
)  # fmt: skip


def judge_for(system: str) -> Judge:
    """The judge of a system.

    Args:
        system: one of `JUDGES`.

    Raises:
        KeyError: nothing computes what the system computes.
    """
    makers: dict[str, Callable[[], Judge]] = {
        "huggingface": lambda: Here(f"transformers {version('transformers')}", 1e-6, _huggingface),
        "huggingface-flax": lambda: Process(
            f"{_pinned('transformers')}, Flax", 3e-5, "transformers", "of_flax.py"
        ),
        "lingua": lambda: Here("a forward pass written from Lingua's source", 3e-5, _lingua),
        "maxtext": lambda: Process(
            _pinned("maxtext"), 3e-5, "maxtext", "of_maxtext.py", rounds=round_embedding, stated=_words
        ),
        f"maxtext{WRITTEN}": lambda: Here(
            "a forward pass written from MaxText's source", 3e-5, _maxtext, rounds=round_factor
        ),
        "megatron": lambda: Process(_pinned("megatron"), 3e-5, "megatron", "of_megatron.py", options=_norms),
        "meta": lambda: Here("a forward pass written from Meta's source", 3e-5, _meta),
        "penzai": lambda: Here(f"penzai {version('penzai')}", 2e-4, _penzai),
        "t5x": lambda: Here("a forward pass written from T5X's source", 3e-5, _t5x, rounds=_scale_head),
        "torchtitan": lambda: Process(_pinned("torchtitan"), 3e-5, "torchtitan", "of_torchtitan.py"),
    }
    return makers[system]()
