"""Sound checkpoints of every system with one thing wrong: a lying document, a link, a device, a name, extra code.

Also folders of one file whose names or configs state numbers that nobody can read, or a model of two thousand million
layers in ten digits.
"""

from __future__ import annotations

import json
import os
import random
import re
import socket
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from infra.attacks import heads, lies, pickles, prepare
from infra.attacks.case import (
    MARKER,
    TOUCH,
    Case,
    Change,
    Make,
    Sound,
    as_json,
    document,
    write_file,
    write_files,
)
from infra.attacks.lies import DIGITS, LONG

_DOCUMENTS = 12  # lying documents for each file of JSON
_FILES = 4  # files of each checkpoint that are replaced
_CODE = f"import os\nos.system('touch {MARKER}')\nopen({MARKER!r}, 'w')\n"
_MODULES = (
    "torch", "jax", "numpy", "json", "sitecustomize", "safetensors", "tensorstore", "wherry", "modeling_evil",
    "ml_dtypes", "orbax", "msgpack", "zstandard", "blake3",
)  # fmt: skip
_PICKLES = (
    "pytorch_model.bin", "optimizer.pt", "training_args.bin", "scheduler.pt", "rng_state.pth", "evil.pkl",
)  # fmt: skip


# ---- Documents

HUGE = (2_000_000_000, 250_001, 2**63, 10**400, -(2**31), 1e300)
_UNREADABLE = [DIGITS[form] for form in ("long", "product", "wide")]


def _documents(one: Sound) -> Iterator[Case]:
    """Each document with a lie, a name twice, or a number of another kind."""
    for file in one.files:
        label, stored = one.label(file), document(file)
        seed = f"{one.name}{label}"
        texts = {
            one.name: map(as_json, lies.documents(stored, _DOCUMENTS if stored else 0, seed)),
            f"twice-{one.name}": lies.texts_with_a_name_twice(stored, seed),
            f"digits-{one.name}": lies.texts_of_numbers(file, _UNREADABLE, 6),
        }
        for kind, found in texts.items():
            for number, text in enumerate(found):
                yield Case(f"{kind}/{label}-{number}", one.replaced(file, text))
    for file in [*one.files, *one.path.parent.glob("*.yml"), *one.path.parent.glob("*.gin")]:
        for number, text in enumerate(lies.texts_of_numbers(file, [*map(str, HUGE)], 8)):
            yield Case(f"count-{one.name}/{file.relative_to(one.home)}-{number}", one.replaced(file, text))


# ---- Things that are no regular files


def _socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # names of sockets are short
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name[:90])
    os.chdir(here)


def _link(target: str) -> Change:
    return lambda path: path.symlink_to(target)


def _device(path: Path) -> None:
    try:
        os.mknod(path, 0o600 | 0x2000, os.makedev(1, 5))  # /dev/zero
    except OSError:  # not root
        path.symlink_to("/dev/zero")


def _sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 30)  # one of 40 GiB is among the bombs


def _unreadable(path: Path) -> None:
    path.write_bytes(b"x")
    path.chmod(0)


SPECIAL: dict[str, Change] = {
    "fifo": os.mkfifo, "socket": _socket, "device": _device, "zero": _link("/dev/zero"), "passwd": _link("/etc/passwd"),
    "memory": _link("/proc/self/mem"), "loop": _link("loop/../"), "itself": lambda path: path.symlink_to(path.name),
    "folder": Path.mkdir, "sparse": _sparse, "unreadable": _unreadable, "empty": Path.touch, "parent": _link(".."),
    "root": _link("/"), "descriptor": _link("/proc/self/fd/0"), "gone": _link("nowhere"),
}  # fmt: skip


def _special(one: Sound) -> Iterator[Case]:
    for file in random.Random(one.name).sample(one.files, min(_FILES, len(one.files))):
        for kind, put in SPECIAL.items():

            def change(at: Path, put: Change = put) -> None:
                at.unlink()
                put(at)

            yield Case(f"{one.name}/{one.label(file)}-{kind}", one.changed(change, file))


# ---- Names, and extra files


def _modules(at: Path) -> None:
    for module in _MODULES:
        (at / f"{module}.py").write_text(_CODE)
    for package in ("custom_generate", ".git/hooks", "wherry.sig"):
        (at / package).mkdir(parents=True)
        (at / package / "__init__.py").write_text(_CODE)


def _odd_names(at: Path) -> None:
    for number, word in enumerate(lies.NAMES):
        text = os.fsencode(word.replace("/", "∕").replace("\0", "")[:200].encode("utf-8", "replace"))
        if text not in (b"", b".", b".."):
            Path(os.fsdecode(os.fsencode(at) + b"/" + text[:240])).write_text(str(number))


def _pickled(at: Path) -> None:
    for file in _PICKLES:
        (at / file).write_bytes(pickles.forms("os", "system", TOUCH)["p2"])


def _crowd(at: Path) -> None:
    for number in range(3000):
        (at / f"file-{number}").touch()


_EXTRA = {"modules": _modules, "pickles": _pickled, "names": _odd_names, "many": _crowd}


# ---- What is specific to a system


def _dcp(place: Path, one: Sound) -> Iterator[tuple[str, Make]]:
    """The metadata of DCP: with fields that lie, and cut."""
    file = one.path / ".metadata"
    sound = file.read_bytes()
    for lying in sorted((place / prepare.DCP).iterdir()):
        yield f"dcp/{lying.name}", one.replaced(file, lying.read_bytes())
    for step in range(0, len(sound), max(1, len(sound) // 40)):
        yield f"dcp/cut-{step}", one.replaced(file, sound[:step])


def _huggingface(one: Sound) -> Iterator[tuple[str, Make]]:
    index = one.path / "model.safetensors.index.json"
    if not index.exists():
        return
    sound = json.loads(index.read_bytes())
    files = sound["weight_map"]
    for number, name in enumerate(lies.NAMES):
        maps = {"shard": dict.fromkeys(files, name), "tensor": {**files, name: next(iter(files.values()))}}
        for kind, found in maps.items():
            text = as_json({**sound, "weight_map": found})
            yield f"huggingface/index-{kind}-{number}", one.replaced(index, text)


# ---- Configs of a model that is huge

_FAMILIES = Path(__file__).resolve().parents[2] / "wherry" / "families"
_NAME = re.compile(r"\b[a-z][a-z0-9_]{2,}\b(?!\s*\()")  # of an attribute in an expression; not of a function
_WORDS = frozenset(("and", "or", "not", "none", "true", "false", "else", "for", "there"))
_TENSORS = {
    name: {"dtype": "F32", "shape": [2, 2], "data_offsets": [at, at + 16]}
    for name, at in (("model.embed_tokens.weight", 0), ("model.layers.0.mlp.up_proj.weight", 16))
}


def attributes(family: dict[str, Any]) -> list[str]:
    """The attributes of a Hugging Face config that a family's declaration uses for sizes and facts."""
    rules = family.get("systems", {}).get("huggingface", {}).get("config", {})
    texts = [str(text) for part in ("sizes", "facts") for text in rules.get(part, {}).values()]
    return sorted({name for text in texts for name in _NAME.findall(re.sub(r"'[^']*'", "", text))} - _WORDS)


def _families() -> Iterator[Case]:
    weights = heads.safetensors(as_json(_TENSORS))
    for file in sorted(_FAMILIES.glob("*.toml")):
        family = tomllib.loads(file.read_text("utf-8"))
        generator = random.Random(file.stem)
        small = dict.fromkeys(attributes(family), 2)
        for model_type in family.get("model_types", []):
            sound = {"model_type": model_type, "torch_dtype": "float32", **small}
            configs: dict[str, dict[str, Any]] = {"all": {**sound, **dict.fromkeys(small, HUGE[0])}}
            for name in generator.sample(sorted(small), min(8, len(small))):
                configs[name] = {**sound, name: generator.choice(HUGE)}
            for name, config in configs.items():
                files = {"model/config.json": json.dumps(config).encode(), "model/model.safetensors": weights}
                yield Case(f"count-family/{file.stem}-{model_type}-{name}", write_files(files, "model"))


# ---- Digits in names, and in configs that a person passes

_STEPS = (
    "checkpoint_{}", "checkpoint-{}", "step_{}", "step-{}", "global_step{}", "iter_{}", "{}", "{}.params", "epoch_{}",
    "save_{}", "model_{}", "{}.orbax-checkpoint-tmp-{}", "checkpoint_{}.tmp-{}",
)  # fmt: skip
_SHARDS = (
    "model-{}-of-{}.safetensors", "model_{}.safetensors", "pytorch_model-{}-of-{}.bin", "consolidated.{}.pth",
    "mp_rank_{}_model_states.pt", "__{}_{}.distcp", "zero_pp_rank_{}_mp_rank_{}_optim_states.pt", "layer_{}-model.pt",
    "model.{}.npy", "distrib_optim.pt.{}", "part-{}.safetensors", "model.data-{}-of-{}",
)  # fmt: skip
_NOTES = (
    "latest", "latest_checkpointed_iteration.txt", "step.txt", "checkpoint", "latest_universal", "_CURRENT",
)  # fmt: skip
_IN_NAMES = ("9" * 100, "9" * 19, "9" * 20, "\u0663\u0664", "0" * 99)  # a name has at most 255 bytes
_IN_NOTES = (LONG, "9" * 20, f"global_step{LONG}", "\u0663", "\u00b2", "-1", "1e9")
_CONFIGS = {  # § stands for the digits; int() reads any number of them of base 16
    "config.yml": "base_emb_dim: §\nlogical_axis_rules: [[§, data]]\n",
    "base.yml": "base_emb_dim: 0x§\nbase_num_decoder_layers: 1:§\n",
    "model.gin": "L = §\nnetwork.T5Config.num_layers = %L\nnetwork.T5Config.emb_dim = §\n",
    "config.json": '{"model_type": "llama", "num_hidden_layers": §, "vocab_size": §}',
    "params.json": '{"dim": §, "n_layers": §, "model": {"dim": §}}',
    "wherry.toml": '[routes.a]\nroot = "/x"\nmin_age = §\nmax_bytes = §\n',
    "family.toml": 'name = "x"\nmodel_types = ["x"]\n[constants]\na = §\n',
    "price.toml": '[[price]]\nprovider = "x"\nper_gb = §\n',
}


def _digits() -> Iterator[tuple[str, Make]]:
    for number, words in enumerate(_IN_NAMES):
        for name in _STEPS:
            step = f"run/{name.replace('{}', words)}"
            yield (
                f"digits-step/{name}-{number}",
                write_files({f"{step}/model.safetensors": heads.SOUND}, step),
            )
        for name in _SHARDS:
            yield f"digits-file/{name}-{number}", _run_with(name.replace("{}", words), heads.SOUND)
    for note in _NOTES:
        for number, text in enumerate(_IN_NOTES):
            yield f"digits-note/{note}-{number}", _run_with(note, text.encode())
    for form, digits in {**DIGITS, "hex": "0x" + "f" * 5000}.items():
        for file, text in _CONFIGS.items():
            yield f"digits-config/{file}-{form}", write_file(file, text.replace("§", digits).encode())


def _run_with(name: str, data: bytes) -> Make:
    """A run with a step, and a file next to the step and in it."""
    step = "run/global_step1"
    files = {f"{step}/model.safetensors": heads.SOUND, f"run/{name}": data, f"{step}/{name}": data}
    return write_files(files, "run")


def cases(place: Path) -> Iterator[Case]:
    """Every one; `place` has what `prepare` made."""
    for one in prepare.sound(place):
        yield from _documents(one)
        yield from _special(one)
        for kind, change in _EXTRA.items() if one.path.is_dir() else ():
            yield Case(f"{one.name}/next-to-{kind}", one.changed(change), evil=kind in ("modules", "pickles"))
        specific = {"dcp": lambda one: _dcp(place, one), "huggingface": _huggingface}.get(one.name)
        for name, make in specific(one) if specific else ():
            yield Case(name, make)
    yield from _families()
    for name, make in _digits():
        yield Case(name, make)
