"""The rows of the bench as data: which conversions are measured, against which peers, and what is required.

A `Pair` compares processes that do the same job on the same input; a `Probe` measures one number of ours. A new
format is a new entry in `CASES`, with an input in `INPUTS` when it reads something new. Words of a command that
stand in braces are filled in: `python`, `bin` (its scripts), `source`, `target`, `size` (bytes of the input to make),
`shard` (bytes of the larger of its two files), `part` (bytes of a fifth) and `experts`.

Each run of ours also has a *tenth*: the same run on an input of a tenth of the size. Both give the line of the row:
what a conversion costs before its first byte, and what each GB costs.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

Command: TypeAlias = tuple[str, ...]

WORK = ("{python}", "-m", "benchmarks.work")
_CONVERT = ("{python}", "-m", "wherry.cli", "convert")
_NO_READ_BACK = ("--verify", "none")
_SCANNED = ("--set", "scan_layers=true")
_BUDGET = ("--memory", "128MiB")
_MAXTEXT = "scanned kernels of 1 GB, saved by Orbax"
_COUNTS = (1_000, 10_000, 100_000, 1_000_000)
_DEEPSEEK = "DeepSeek-V3 layers in fp8"
EXPERTS = 32  # of DeepSeek-V3's 256: its input has a size of its own
_TENTH = " (a tenth)"
START = 0.25  # seconds that a conversion may take besides the machine's time for its bytes
_SMALL = 130_000_000  # peak bytes of a row whose tensors are copied as they are
NOMINAL = (
    2_200_000_000  # bytes of the input; the sizes of the memory rows keep their proportion to it
)


class Run(NamedTuple):
    """One process that is measured.

    Attributes:
        name: unique; cases that share a run measure it once a round.
        source: name of the input; empty if it needs none.
        target: file name of the output.
        command: the process.
        speaks: whether it prints a JSON object with `seconds`; the real tools' own commands do not.
        package: distribution that it needs in the environment.
        cold: whether its source is read from storage; otherwise it is in the page cache before the run.
        scale: size of its input, as a part of `--size`.
    """

    name: str
    source: str
    target: str
    command: Command
    speaks: bool = True
    package: str = "wherry"
    cold: bool = False
    scale: float = 1.0

    @property
    def tenth(self) -> Run:
        """The same run on an input of a tenth of the size."""
        return self._replace(
            name=f"{self.name}{_TENTH}", source=f"{self.source}{_TENTH}", scale=self.scale / 10
        )


class Required(NamedTuple):
    """What a row must reach; None where nothing is required.

    Attributes:
        faster: the peer's time divided by ours, at least.
        faster_read_back: the same for ours with read-back.
        multiple: our time divided by the bound and `start`, at most.
        multiple_read_back: the same with read-back.
        memory: peak resident bytes of ours, at most.
        start: seconds that are added to the bound.
        goals: names of attributes that are goals of this project; the issue does not require them.
    """

    faster: float
    faster_read_back: float | None = None
    multiple: float | None = None
    multiple_read_back: float | None = None
    memory: int | None = None
    start: float = START
    goals: tuple[str, ...] = ()


class Pair(NamedTuple):
    """One job done by us and by others.

    Attributes:
        name: as `--rows` selects it and the table prints it.
        ours: without read-back.
        default: with it, where the job has one.
        peers: what ours is compared with, each on its own.
        required: what ours must reach.
        formats: what wherry must be able to write for it.
        codecs: operations of `rates.py` that the tensors go through; empty where they are copied as they are.
        floor: whether the copy of the source is measured too; not where ours writes nothing.
    """

    name: str
    ours: Run
    default: Run | None
    peers: tuple[Run, ...]
    required: Required
    formats: tuple[str, ...] = ()
    codecs: tuple[str, ...] = ()
    floor: bool = True


class Probe(NamedTuple):
    """A number of ours that has a bound.

    Attributes:
        name: as `--rows` selects it and the table prints it.
        runs: the processes.
        of: `value` (the largest that a run prints) or `peak` (the largest peak divided by the smallest).
        most: the bound.
        unit: printed behind the numbers.
        formats: what wherry must be able to write for it.
    """

    name: str
    runs: tuple[Run, ...]
    of: str
    most: float
    unit: str
    formats: tuple[str, ...] = ()


class Made(NamedTuple):
    """How an input is made.

    Attributes:
        command: the process.
        source: the input that it is made from, if any.
        scale: bytes, as a part of `--size`.
        sparse: whether its tensors are holes that must never be read.
    """

    command: Command
    source: str | None = None
    scale: float = 1.0
    sparse: bool = False


def make_source(what: str, source: str) -> Made:
    return Made((*WORK, what, "{source}", "{target}"), source)


def of_size(gigabytes: float, what: str = "huggingface") -> Made:
    command = ("{python}", "-m", "benchmarks.inputs", what, "{target}", "{size}")
    return Made(command, None, gigabytes * 1e9 / NOMINAL)


def sparse(files: int, tensors: int) -> Made:
    command = ("{python}", "-m", "benchmarks.inputs", "sparse", "{target}", str(files), str(tensors))
    return Made(command, sparse=True)


INPUTS: dict[str, Made] = {
    "huggingface": Made(("{python}", "-m", "benchmarks.inputs", "huggingface", "{target}", "{size}")),
    "torch": make_source("torch-save", "huggingface"),
    "dcp": make_source("safetensors-to-dcp", "huggingface"),
    "orbax": make_source("safetensors-to-orbax", "huggingface"),
    "signed": make_source("sign", "huggingface"),
    "0.5 GB": of_size(0.5),
    "2 GB": of_size(2),
    "8 GB": of_size(8),
    "one tensor of 4 GB": of_size(4, "one-tensor"),
    "kernels of 1 GB": of_size(1, "wide"),
    "scanned kernels of 1 GB": Made(
        (*_CONVERT, "{source}", "{target}", "--to", "maxtext", *_SCANNED, *_NO_READ_BACK, "--no-lineage"),
        "kernels of 1 GB",
    ),
    **{
        f"{count:,} small tensors": Made(
            ("{python}", "-m", "benchmarks.inputs", "many", "{target}", str(count))
        )
        for count in _COUNTS
    },
    "t5x": of_size(1, "t5x"),
    "paxml": of_size(1, "paxml"),
    _DEEPSEEK: Made(("{python}", "-m", "benchmarks.inputs", "deepseek", "{target}", "{experts}")),
    _MAXTEXT: make_source("huggingface-to-maxtext", "kernels of 1 GB"),
    "1000 tensors": sparse(100, 1000),
    "100,000 tensors": sparse(10, 100_000),
}


def input_named(name: str) -> Made:
    """How an input is made; of a tenth, as the input itself, from a tenth of what that is made from."""
    if not name.endswith(_TENTH):
        return INPUTS[name]
    whole = INPUTS[name.removesuffix(_TENTH)]
    return whole._replace(source=whole.source and f"{whole.source}{_TENTH}", scale=whole.scale / 10)


def floor(source: str) -> Run:
    """Copy every byte of an input durably and hash it; no conversion can be faster."""
    return Run(f"copy + BLAKE3 ({source})", source, "copy", (*WORK, "copy-and-hash", "{source}", "{target}"))


def peer(name: str, what: str, source: str, target: str, package: str) -> Run:
    return Run(name, source, target, (*WORK, what, "{source}", "{target}"), package=package)


def convert(source: str, to: str, *options: str) -> Command:
    """The documented call of wherry."""
    where = {"torch": "{source}/model.pt", _MAXTEXT: "{source}/run/0"}.get(source, "{source}")
    options += ("--config", "{source}/llama.yml") if source == _MAXTEXT else ()
    return (*_CONVERT, where, "{target}", "--to", to, *options, "--json")


def ours(name: str, source: str, target: str, to: str, *options: str) -> tuple[Run, Run]:
    """Our run without read-back, and with it."""
    command = convert(source, to, *options)
    return (
        Run(f"{name}: wherry --verify none", source, target, (*command, *_NO_READ_BACK)),
        Run(f"{name}: wherry", source, target, command),
    )


def _pair(
    source: str, to: str, peers: tuple[Run, ...], required: Required,
    *, file: str = "out", name: str = "", options: Command = (), codecs: tuple[str, ...] = (),
) -> Pair:  # fmt: skip
    """A conversion from the input `source` to the format `to`."""
    return Pair(name, *ours(name, source, file, to, *options), peers, required, (to,), codecs)


def _raw(faster: float, faster_read_back: float) -> Required:
    """What every row must reach whose tensors are copied as they are."""
    return Required(faster, faster_read_back, multiple=1.5, multiple_read_back=1.4, memory=_SMALL)


def _coded(memory: int) -> Required:
    """What every row with zstd must reach."""
    return Required(5, 3.5, multiple=1.6, multiple_read_back=1.8, memory=memory, start=0)


_FILE = "model.safetensors"
_STANDARD = peer("StandardCheckpointer", "safetensors-to-orbax", "huggingface", "out", "orbax-checkpoint")
_RESHARDERS = (
    peer("mergekit passthrough", "mergekit", "huggingface", "out", "mergekit"),
    peer("transformers save_pretrained", "transformers", "huggingface", "out", "transformers"),
)
_RESHARDING = tuple(run._replace(command=(*run.command, "{part}")) for run in _RESHARDERS)
_COPY = Run(
    "cp -r && sync", "huggingface", "out",
    ("sh", "-c", 'cp -r "$1" "$2" && sync', "sh", "{source}", "{target}"), speaks=False,
)  # fmt: skip
_SIGNING = Run(
    "model-signing BLAKE3",
    "signed",
    "out",
    (*WORK, "verify-signature", "{source}"),
    package="model-signing",
    cold=True,
)
_VERIFY = ("{python}", "-m", "wherry.cli", "verify", "{source}/model", "--level", "digest", "--json")


def _scanned(source: str, to: str, name: str, peer: Run, *options: str) -> Pair:
    """Layers into stacked kernels, or back, against MaxText's own way."""
    required = Required(6, memory=300_000_000)
    return _pair(source, to, (peer,), required, name=name, options=(*_BUDGET, *options))


def _size_runs(to: str) -> tuple[Run, ...]:
    """The same conversion of inputs of very different sizes."""
    return tuple(
        Run(f"{name} → {to}", name, "out", convert(name, to))
        for name in ("0.5 GB", "2 GB", "8 GB", "one tensor of 4 GB")
    )


def _resume_run(to: str) -> Run:
    return Run(
        f"killed and resumed: {to}", "huggingface", "out", (*WORK, "resume", "{source}", "{target}", to)
    )


def _plan_run(source: str) -> Run:
    return Run(f"plan: {source}", source, "out", (*WORK, "plan", "{source}", "{target}"))


def _many_runs() -> tuple[Run, ...]:
    return tuple(
        Run(name, name, "out", (*WORK, "many", "{source}", "{target}"))
        for name in (f"{count:,} small tensors" for count in _COUNTS)
    )


_TO_MAXTEXT = peer(
    "numpy transposes, Orbax save", "huggingface-to-maxtext", "kernels of 1 GB", "out", "orbax-checkpoint"
)
_FROM_MAXTEXT = peer(
    "Orbax restore, numpy transposes, save_file",
    "maxtext-to-huggingface",
    _MAXTEXT,
    _FILE,
    "orbax-checkpoint",
)
CASES: tuple[Pair | Probe, ...] = (
    _pair("torch", "dcp", (peer("torch_save_to_dcp", "torch-to-dcp", "torch", "out", "torch"),), _raw(5, 3.5),
          name="torch .pt → DCP"),
    _pair("dcp", "torch-zip", (peer("dcp_to_torch_save", "dcp-to-torch", "dcp", "model.pt", "torch"),), _raw(5, 3.5),
          file="model.pt", name="DCP → torch .pt"),
    _pair("dcp", "safetensors", (peer("DCP load + save_file", "dcp-to-safetensors", "dcp", _FILE, "torch"),),
          _raw(5, 3.5), file=_FILE, name="DCP → safetensors"),
    _pair("huggingface", "dcp", (peer("dcp.save", "safetensors-to-dcp", "huggingface", "out", "torch"),),
          _raw(5, 3.5), name="safetensors → DCP"),
    _pair("torch", "safetensors",
          (peer("torch.load(mmap) + save_file", "torch-to-safetensors", "torch", _FILE, "torch"),), _raw(5, 3.5),
          file=_FILE, name="torch .pt → safetensors"),
    _pair("huggingface", "huggingface", _RESHARDING, _raw(5, 3.5), name="safetensors reshard",
          options=("--set", "max_shard_size={part}")),
    _pair("huggingface", "orbax", (_STANDARD,), _coded(400_000_000),
          name="safetensors → Orbax, zstd", options=("--set", "compression=zstd"), codecs=("zstd encode bfloat16",)),
    _pair("huggingface", "orbax", (_STANDARD,), _raw(5, 3.5), name="safetensors → Orbax, uncompressed"),
    _pair("orbax", "safetensors",
          (peer("restore + save_file", "orbax-to-safetensors", "orbax", _FILE, "orbax-checkpoint"),),
          _coded(300_000_000), file=_FILE, name="Orbax → safetensors", codecs=("zstd decode bfloat16",)),
    _pair("huggingface", "huggingface", (_COPY,), _raw(0.8, 0.6), name="same-layout rewrite with digests",
          options=("--set", "max_shard_size={shard}")),
    Pair("verify (digest of all tensors)", Run("verify: wherry", "signed", "out", _VERIFY, cold=True), None,
         (_SIGNING,), Required(1.2, multiple=1.5, memory=_SMALL), floor=False),
    _scanned("kernels of 1 GB", "maxtext", "Hugging Face → MaxText, layers into scanned kernels of 1 GB",
             _TO_MAXTEXT, *_SCANNED),
    _scanned(_MAXTEXT, "huggingface", "MaxText as Orbax saved it → Hugging Face, scanned kernels of 1 GB into layers",
             _FROM_MAXTEXT),
    _scanned("scanned kernels of 1 GB", "huggingface", "MaxText as wherry wrote it → Hugging Face, the same kernels",
             _FROM_MAXTEXT),
    _pair("t5x", "huggingface",
          (peer("tensorstore read + save_file", "t5x-to-huggingface", "t5x", _FILE, "tensorstore"),),
          Required(2, memory=300_000_000), name="T5X, gzip zarr → Hugging Face", codecs=("gzip decode float32",)),
    _pair("paxml", "maxtext",
          (peer("load, transpose, StandardCheckpointer", "paxml-to-maxtext", "paxml", "out", "orbax-checkpoint"),),
          Required(4, memory=400_000_000), name="PaxML GPT-3 → MaxText", options=_SCANNED,
          codecs=("zstd decode float32",)),
    _pair(_DEEPSEEK, "maxtext",
          (peer("transformers, dequantized", "transformers-dequantize", _DEEPSEEK, "out", "transformers"),),
          Required(6, memory=300_000_000), name=f"{_DEEPSEEK} → MaxText", codecs=("zstd encode bfloat16",)),
    Probe("1 GB kernel, every axis order", (Run("kernel", "", "out", (*WORK, "kernel", "{size}")),),
          "value", 2.5, "× copy + SHA-256"),
    Probe("0.5 / 2 / 8 GB and one tensor of 4 GB → DCP", _size_runs("dcp"), "peak", 1.1, "× the smallest peak",
          ("dcp",)),
    Probe("0.5 / 2 / 8 GB and one tensor of 4 GB → Orbax", _size_runs("orbax"), "peak", 1.1, "× the smallest peak"),
    Probe("kill -9 at half, run again", (_resume_run("dcp"), _resume_run("orbax")), "value", 0.55, "of the bytes",
          ("dcp",)),
    Probe("deep audit of 8 GB", (Run("audit", "8 GB", "out", (*WORK, "audit", "{source}", "{target}")),),
          "value", 1.25, "× the time of verify", ("dcp",)),
    Probe("detect + plan, 1000 tensors in 100 files", (_plan_run("1000 tensors"),), "value", 0.6, "s"),
    Probe("detect + plan, 100,000 tensors", (_plan_run("100,000 tensors"),), "value", 10, "s"),
    *(Probe(f"{run.name} of 2 KB → DCP", (run,), "value", 60, "µs of CPU a tensor, beyond one tensor", ("dcp",))
      for run in _many_runs()),
)  # fmt: skip


def runs_of(case: Pair | Probe) -> tuple[Run, ...]:
    """Every process that a case is measured by, its floor first."""
    if isinstance(case, Probe):
        return case.runs
    own = ours_of(case)
    copy = (floor(case.ours.source),) if case.floor else ()
    return tuple(dict.fromkeys((*copy, *own, *case.peers, *(run.tenth for run in own))))


def ours_of(case: Pair) -> list[Run]:
    """Our runs of a pair."""
    return [run for run in (case.ours, case.default) if run]
