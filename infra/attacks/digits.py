"""Numbers of thousands of digits wherever a container, a record or a name states a number in digits.

Python refuses to read or to print more than 4,300 digits, with a ValueError that is none of wherry's errors. A number
that can be read may have a product, a sum or a text that cannot be printed.
"""

from __future__ import annotations

import json
import random
import re
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from attacks import arrays, heads, lies, pickles, prepare
from attacks.archives import write_file
from attacks.case import Case
from attacks.folders import copy_and_change, document, files_of
from attacks.pickles import wrap_pickle

LONG = "9" * 5000  # int() refuses it
FORMS = {
    "long": LONG,
    "negative": f"-{LONG}",
    "product": "9" * 4000,  # two of them have a product that cannot be printed
    "point": f"{LONG}.0",
    "fraction": f"0.{LONG}",
    "exponent": f"1e{LONG}",
    "wide": "9" * 20,  # no number of 64 bits
}
_EACH = 6  # numbers that are replaced in each document of a sound checkpoint
_MARK = "\ue000"
_CONFIG_NUMBER = re.compile(rb"(?<=[=:\s])\d+(?=\s)")  # in YAML and gin


def with_digits(sound: Any, where: tuple[Any, ...], digits: str) -> bytes:
    """JSON with these digits at a place: json.dumps could not print the number."""
    text = json.dumps(lies.replace_at(sound, where, _MARK))
    return text.replace(json.dumps(_MARK), digits).encode("utf-8", "surrogatepass")


def everywhere(sound: Any, digits: str) -> bytes:
    """JSON with these digits in the place of each number."""
    found = sound
    for where in numbers(sound):
        found = lies.replace_at(found, where, _MARK)
    return json.dumps(found).replace(json.dumps(_MARK), digits).encode()


def numbers(sound: Any) -> list[tuple[Any, ...]]:
    """The place of each whole number of a document."""
    return [where for where in lies.places(sound) if type(lies.value_at(sound, where)) is int]


def texts(sound: Any, forms: tuple[str, ...] = tuple(FORMS)) -> Iterator[tuple[str, bytes]]:
    """Name and JSON: each number in the digits of one form, and all of them."""
    for form in forms:
        yield f"all-{form}", everywhere(sound, FORMS[form])
    for number, where in enumerate(numbers(sound)):
        form = forms[number % len(forms)]
        yield f"{'.'.join(map(str, where))}-{form}", with_digits(sound, where, FORMS[form])


# ---- Containers


def _heads() -> Iterator[Case]:
    for name, text in texts(heads.HEADER):
        yield Case(f"digits-safetensors/{name}", write_file("model.safetensors", heads.safetensors(text)))
    for form, digits in FORMS.items():
        for kind, shape in enumerate((f"({digits},)", f"({digits}, {digits})", f"(0, {digits})")):
            head = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
            data = b"\x93NUMPY\x02\x00" + struct.pack("<I", len(head)) + head + bytes(64)
            yield Case(f"digits-numpy/{form}-{kind}", write_file("model.npy", data))
            yield Case(f"digits-npz/{form}-{kind}", write_file("model.npz", pickles.archive({"a.npy": data})))


def _arrays() -> Iterator[Case]:
    for version, sound in ((2, arrays.ZARRAY), (3, arrays.ZARR3)):
        for name, text in texts(sound):
            yield Case(f"digits-zarr/{version}-{name}", _array(text, version))
    for form, digits in FORMS.items():
        quoted = {"fill_value": digits, "dtype": f"<f{digits}"}
        for field, value in quoted.items():
            text = json.dumps({**arrays.ZARRAY, field: value}).encode()
            yield Case(f"digits-zarr/2-{field}-{form}", _array(text, 2))


def _array(text: bytes, version: int) -> Callable[[Path], Path]:
    make = arrays.orbax_array({}, bytes(16), version)

    def write(folder: Path) -> Path:
        found = make(folder)
        (folder / "w" / ("zarr.json" if version == 3 else ".zarray")).write_bytes(text)
        return found

    return write


def _orbax() -> Iterator[Case]:
    metadata = {
        "tree_metadata": {
            "('w', '0')": {
                "key_metadata": [{"key": "w", "key_type": 2}, {"key": "0", "key_type": 1}],
                "value_metadata": {"value_type": "jax.Array", "skip_deserialize": False, "write_shape": [4]},
            }
        },
        "use_ocdbt": False,
        "store_array_data_equal_to_fill_value": True,
    }
    sharding = {"shape": [1], "axis_names": ["x"], "partition_spec": [["x"]], "device_mesh": {"mesh": [[0]]}}
    steps = {
        "item_handlers": None,
        "init_timestamp_nsecs": 1,
        "commit_timestamp_nsecs": 2,
        "custom_metadata": {},
    }
    for name, text in texts(metadata):
        yield Case(f"digits-orbax/metadata-{name}", _item({"_METADATA": text}))
    for form, digits in FORMS.items():
        keys = json.dumps(metadata).replace('"0"', f'"{digits}"').encode()
        yield Case(f"digits-orbax/key-{form}", _item({"_METADATA": keys}))
    for name, text in texts(steps):
        yield Case(f"digits-orbax/steps-{name}", _item({"_CHECKPOINT_METADATA": text}))
    for name, text in texts(sharding, ("long", "product", "wide")):
        shards = json.dumps({"dw==": text.decode()}).encode()
        yield Case(f"digits-orbax/sharding-{name}", _item({"_sharding": shards}))


def _item(files: dict[str, bytes]) -> Callable[[Path], Path]:
    """An Orbax item of one array with other files."""
    make = arrays.orbax_array(arrays.ZARRAY, bytes(16))

    def write(folder: Path) -> Path:
        found = make(folder)
        for name, data in files.items():
            (folder / name).write_bytes(data)
        return found

    return write


def _long(size: int, form: str = "<i") -> bytes:
    """A whole number of so many bytes, as LONG1 or LONG4."""
    code = b"\x8a" if form == "<B" else b"\x8b"
    return code + struct.pack(form, size) + b"\x7f" * size


def opcodes() -> dict[str, bytes]:
    """Values of pickles: numbers in digits and in bytes, and places of the memo in digits."""
    found = {"long1": _long(255, "<B"), "long4": _long(2000), "long4-large": _long(1 << 20)}
    found |= {"long4-lies": b"\x8b" + struct.pack("<i", 2**31 - 1), "long4-negative": b"\x8b\xff\xff\xff\xff"}
    for form, digits in FORMS.items():
        text = digits.encode()
        found |= {f"int-{form}": b"I" + text + b"\n", f"long-{form}": b"L" + text + b"L\n"}
        found |= {f"put-{form}": b"Np" + text + b"\n", f"get-{form}": b"g" + text + b"\n"}
        found |= {f"float-{form}": b"F" + text + b"\n", f"frame-{form}": b"P" + text + b"\n"}
    for name, word in (
        ("arabic", "\u0663"),
        ("square", "\u00b2"),
        ("under", "1_0"),
        ("space", " 1 "),
        ("hex", "0x9"),
    ):
        found |= {f"int-{name}": b"I" + word.encode() + b"\n", f"put-{name}": b"Np" + word.encode() + b"\n"}
    return found


def _pickles() -> Iterator[Case]:
    storage = b"(X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\x000X\x03\0\0\0cpu"
    for name, value in opcodes().items():
        yield Case(f"digits-pickle/{name}", wrap_pickle("pickle", b"(dS'w'\n" + value + b"s."))
        tensor = b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + value + b"tQK\0" + value + b"\x85"
        tensor += value + b"\x85\x89ccollections\nOrderedDict\n)RtR"
        data = b"\x80\x02}X\x01\0\0\0w" + tensor + b"s."
        for wrapper in ("torch-zip", "torch-legacy", "dcp"):
            if name.startswith(("int-", "long")):
                yield Case(f"digits-{wrapper}/{name}", wrap_pickle(wrapper, data))


# ---- Names

_DIGITS = "9" * 200  # of a name of at most 255 bytes
_STEPS = (
    "checkpoint_{}", "checkpoint-{}", "step_{}", "step-{}", "global_step{}", "iter_{}", "{}", "{}.params", "epoch_{}",
    "save_{}", "model_{}", "{}.orbax-checkpoint-tmp-{}", "checkpoint_{}.tmp-{}",
)  # fmt: skip
_FILES = (
    "model-{}-of-{}.safetensors", "model_{}.safetensors", "pytorch_model-{}-of-{}.bin", "consolidated.{}.pth",
    "mp_rank_{}_model_states.pt", "__{}_{}.distcp", "zero_pp_rank_{}_mp_rank_{}_optim_states.pt", "layer_{}-model.pt",
    "model.{}.npy", "distrib_optim.pt.{}", "part-{}.safetensors", "model.data-{}-of-{}",
)  # fmt: skip
_NOTES = (
    "latest",
    "latest_checkpointed_iteration.txt",
    "step.txt",
    "checkpoint",
    "latest_universal",
    "_CURRENT",
)


def _names() -> Iterator[Case]:
    for number, words in enumerate((_DIGITS[:100], "9" * 19, "9" * 20, "\u0663\u0664", "0" * 99)):
        for name in _STEPS:
            yield Case(f"digits-step/{name}-{number}", _run(name.replace("{}", words)))
        for name in _FILES:
            yield Case(f"digits-file/{name}-{number}", _run_with_file(name.replace("{}", words)))
    for note in _NOTES:
        for number, text in enumerate(
            (LONG, "9" * 20, f"global_step{LONG}", "\u0663", "\u00b2", "-1", "1e9")
        ):
            yield Case(f"digits-note/{note}-{number}", _run_with_file(note, text.encode()))


def _run(step: str) -> Callable[[Path], Path]:
    """A run with one step; the path is the step."""

    def make(folder: Path) -> Path:
        place = folder / "run" / step
        place.mkdir(parents=True)
        (place / "model.safetensors").write_bytes(heads.safetensors(json.dumps(heads.HEADER).encode()))
        return place

    return make


def _run_with_file(name: str, text: bytes | None = None) -> Callable[[Path], Path]:
    """A run with a step, and a file next to the step and in it."""
    data = heads.safetensors(json.dumps(heads.HEADER).encode()) if text is None else text

    def make(folder: Path) -> Path:
        found = _run("global_step1")(folder)
        for place in (folder / "run", found):
            (place / name).write_bytes(data)
        return folder / "run"

    return make


# ---- Records, and documents of sound checkpoints


def _records(place: Path) -> Iterator[Case]:
    written = place / prepare.WRITTEN
    for name, forms in (
        ("wherry.json", ("long", "product", "wide", "point")),
        ("wherry.sig", ("long", "wide")),
    ):
        for what, text in texts(json.loads((written / name).read_bytes()), forms):
            yield Case(f"digits-{name}/{what}", copy_and_change(written, written, _written(name, text)))
    for form, digits in FORMS.items():
        anchor = f'{{"hash": "{"a" * 64}", "seq": %s}}'
        for kind, value in (("number", digits), ("text", f'"{digits}"')):
            yield Case(f"digits-anchor/{kind}-{form}", write_file("anchor.json", (anchor % value).encode()))
        lease = f'{{"host": "h", "pid": {digits}, "namespace": "n", "start": {digits}, "token": "01234567"}}'
        yield Case(f"digits-lease/{form}", write_file(".wherry-target.lease", lease.encode()))


def _written(name: str, text: bytes) -> Callable[[Path], object]:
    return lambda found: (found / name).write_bytes(text)


def _sound(place: Path) -> Iterator[Case]:
    """The documents of sound checkpoints."""
    for name, home, path in prepare.sound(place):
        for file in files_of(path):
            for number, text in enumerate(_changed(file)):
                inner = file.relative_to(path) if path != file else file.name
                change = _written(str(inner), text) if path != file else _whole(text)
                yield Case(f"digits-{name}/{inner}-{number}", copy_and_change(home, path, change))


def _whole(text: bytes) -> Callable[[Path], object]:
    return lambda found: found.write_bytes(text)


def _changed(file: Path) -> Iterator[bytes]:
    """A document with other digits in one place; nothing if it has no numbers, or is none."""
    generator = random.Random(file.name)
    forms = [FORMS[form] for form in ("long", "product", "wide")]
    if file.suffix in (".yml", ".yaml", ".gin"):
        text = file.read_bytes()
        spans = [found.span() for found in _CONFIG_NUMBER.finditer(text)]
        for begin, end in generator.sample(spans, min(_EACH, len(spans))):
            yield text[:begin] + generator.choice(forms).encode() + text[end:]
        return
    sound = document(file)
    where = numbers(sound)
    for one in generator.sample(where, min(_EACH, len(where))):
        yield with_digits(sound, one, generator.choice(forms))


def _configs() -> Iterator[Case]:
    """Configs that a person passes, and what verbs take for one; int() reads any number of digits of base 16."""
    for form, digits in {**FORMS, "hex": "0x" + "f" * 5000}.items():
        for file, text in (
            ("config.yml", f"base_emb_dim: {digits}\nlogical_axis_rules: [[{digits}, data]]\n"),
            ("base.yml", f"base_emb_dim: 0x{digits}\nbase_num_decoder_layers: 1:{digits}\n"),
            (
                "model.gin",
                f"L = {digits}\nnetwork.T5Config.num_layers = %L\nnetwork.T5Config.emb_dim = {digits}\n",
            ),
            (
                "config.json",
                f'{{"model_type": "llama", "num_hidden_layers": {digits}, "vocab_size": {digits}}}',
            ),
            ("params.json", f'{{"dim": {digits}, "n_layers": {digits}, "model": {{"dim": {digits}}}}}'),
            ("wherry.toml", f'[routes.a]\nroot = "/x"\nmin_age = {digits}\nmax_bytes = {digits}\n'),
            ("family.toml", f'name = "x"\nmodel_types = ["x"]\n[constants]\na = {digits}\n'),
            ("price.toml", f'[[price]]\nprovider = "x"\nper_gb = {digits}\n'),
        ):
            yield Case(f"digits-config/{file}-{form}", write_file(file, text.encode()))


def cases(place: Path) -> Iterator[Case]:
    """Every one; `place` has what `prepare` made."""
    for make in (_heads, _arrays, _orbax, _pickles, _names, _configs):
        yield from make()
    yield from _records(place)
    yield from _sound(place)
