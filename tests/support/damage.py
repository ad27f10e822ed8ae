"""Damage that is planted in converted checkpoints, and which level of `verify` finds it.

    python -m tests.support.damage [--only DAMAGE ...]

writes tests/golden/damage.json, of which `infra/docs.py` makes the table in docs/proof.md. A model of the corpus is
converted to seven targets. Each case has a sound target in the place where the ledger has it, changes it, and asks
every level. `tests/prove/test_damage.py` compares each case with the file.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import wherry
from tests.support.skips import CORPUS
from wherry.errors import WherryError
from wherry.prove import verify

if TYPE_CHECKING:
    import numpy as np

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "damage.json"
MODEL = CORPUS / "hf-llama-from-lingua-fp32" / "checkpoint" / "llama_from_lingua_fp32"
LEVELS = tuple(level for level in verify.LEVELS if level != "serve")  # which is only for Hugging Face folders
OTHER_LIBRARIES = ("native", "logits")  # levels that start a process with the library of a system
PAGE = 4096


@dataclass(frozen=True)
class Target:
    """How a target is made, and where its parts are.

    Attributes:
        options: of the conversion.
        index: the file that says where tensors are; empty if there is none.
        config: the file that states the model's config; empty if there is none.
        names: attribute of the model → its name in the config.
        mark: the file that marks a save as complete; empty if there is none.
    """

    options: dict[str, str] = field(default_factory=dict[str, str])
    index: str = ""
    config: str = ""
    names: dict[str, str] = field(default_factory=dict[str, str])
    mark: str = ""


_TRANSFORMERS = {
    "heads": "num_attention_heads", "groups": "num_key_value_heads", "width": "head_dim", "theta": "rope_theta",
    "layers": "num_hidden_layers",
}  # fmt: skip
TARGETS = {
    "huggingface": Target(
        {"max_shard_size": "200KB"}, "model.safetensors.index.json", "config.json", _TRANSFORMERS
    ),
    "maxtext": Target(
        index="items/_METADATA",
        config="items/assets/maxtext_config.yml",
        names={
            "heads": "base_num_query_heads", "groups": "base_num_kv_heads", "width": "head_dim",
            "theta": "rope_max_timescale", "layers": "base_num_decoder_layers",
        },
        mark="items/commit_success.txt",
    ),
    "lingua": Target(
        index=".metadata",
        config="params.json",
        names={
            "heads": "n_heads", "groups": "n_kv_heads", "width": "head_dim", "theta": "rope_theta",
            "layers": "n_layers",
        },
    ),
    "megatron": Target(
        index=".metadata",
        config="common.pt",
        names={
            "heads": "num_attention_heads", "groups": "num_query_groups", "width": "kv_channels",
            "theta": "rotary_base", "layers": "num_layers",
        },
        mark="metadata.json",
    ),
    "torch-zip": Target(),
    "dcp": Target(index=".metadata", config="config.json", names=_TRANSFORMERS),
    "orbax": Target(
        index="_METADATA", config="assets/config.json", names=_TRANSFORMERS, mark="commit_success.txt"
    ),
}  # fmt: skip


class Bench:
    """The sound targets, their sources, and the one place in which they are damaged; each is made when it is needed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def source(self, kind: str = "sound") -> Path:
        """A Hugging Face folder: the model, or a changed one."""
        place = self._folder / "sources" / kind
        if not place.exists():
            shutil.copytree(MODEL, place)
            if kind != "sound":
                _change_source(place, kind)
        return place

    def place(self, name: str) -> Path:
        """Where the ledger has a target."""
        return self._folder / "places" / name

    def made(self, name: str, kind: str = "sound") -> Path:
        """A folder that holds a target, with its sidecar, made of a source."""
        kept = self._folder / "made" / kind / name
        if not kept.exists():
            place = self.place(name) if kind == "sound" else self._folder / "others" / kind / name
            place.parent.mkdir(parents=True, exist_ok=True)
            wherry.convert(
                self.source(kind), place, to=name, options=TARGETS[name].options, lineage=kind == "sound"
            )
            kept.mkdir(parents=True)
            for file in place.parent.glob(f"{name}*"):
                shutil.move(file, kept / file.name)
        return kept

    def put(self, name: str, kind: str = "sound") -> Path:
        """Put a target where the ledger has the sound one, with its sidecar; returns its path."""
        place = self.place(name)
        place.parent.mkdir(parents=True, exist_ok=True)
        for file in place.parent.glob(f"{name}*"):
            shutil.rmtree(file) if file.is_dir() else file.unlink()
        for file in self.made(name, kind).iterdir():
            new = place.parent / file.name
            shutil.copytree(file, new) if file.is_dir() else shutil.copy2(file, new)
        return place


@dataclass(frozen=True)
class Case:
    """One target that is damaged.

    Attributes:
        name: of the target.
        path: where it is; files and sidecar are changed here.
        bench: has other targets.
    """

    name: str
    path: Path
    bench: Bench

    @property
    def target(self) -> Target:
        """Where its parts are."""
        return TARGETS[self.name]

    @property
    def sidecar(self) -> Path:
        """Its sidecar."""
        inside = self.path / "wherry.json"
        return inside if self.path.is_dir() else self.path.with_name(f"{self.path.name}.wherry.json")

    @property
    def data(self) -> Path:
        """The file with most of the tensors."""
        if self.path.is_file():
            return self.path
        files = [file for file in self.path.rglob("*") if file.is_file() and file != self.sidecar]
        return max(files, key=lambda file: (file.stat().st_size, file.name))

    def part(self, name: str) -> Path:
        """A file that a target of this kind may lack.

        Raises:
            NotApplicableError: it does.
        """
        if not name or self.path.is_file():
            raise NotApplicableError
        return self.path / name


class NotApplicableError(Exception):
    """A target has nothing that a damage changes."""


def _change_source(folder: Path, kind: str) -> None:
    """Change the model of a source; the config follows if the number of layers changes."""
    from safetensors.numpy import load_file, save_file

    file = folder / "model.safetensors"
    tensors = load_file(file)
    SOURCES[kind](tensors, folder)
    save_file(tensors, file, metadata={"format": "pt"})


def _swap_layers(tensors: dict[str, np.ndarray], _folder: Path) -> None:
    for name in [one for one in tensors if ".layers.0." in one]:
        other = name.replace(".layers.0.", ".layers.1.")
        tensors[name], tensors[other] = tensors[other], tensors[name]


def _drop_layer(tensors: dict[str, np.ndarray], folder: Path) -> None:
    for name in [one for one in tensors if ".layers.1." in one]:
        del tensors[name]
    _edit_json(folder / "config.json", {"num_hidden_layers": 1})


def _round(tensors: dict[str, np.ndarray], _folder: Path) -> None:
    import numpy as np

    for name, value in tensors.items():
        tensors[name] = (value.view("<u4") & np.uint32(0xFFFF0000)).view("<f4")


def _store_short(tensors: dict[str, np.ndarray], folder: Path) -> None:
    import ml_dtypes

    for name, value in tensors.items():
        tensors[name] = value.astype(ml_dtypes.bfloat16)
    _edit_json(folder / "config.json", {"dtype": "bfloat16", "torch_dtype": "bfloat16"})


def _one_layer(change: Callable[[np.ndarray], np.ndarray]) -> Callable[[dict[str, np.ndarray], Path], None]:
    """Change the output matrix of one layer, which is square."""

    def change_it(tensors: dict[str, np.ndarray], _folder: Path) -> None:
        import numpy as np

        name = "model.layers.1.self_attn.o_proj.weight"
        tensors[name] = np.ascontiguousarray(change(tensors[name].copy()))

    return change_it


def _set_first(value: Callable[[Any], Any]) -> Callable[[np.ndarray], np.ndarray]:
    def set_it(array: np.ndarray) -> np.ndarray:
        array[0, 0] = value(array[0, 0])
        return array

    return set_it


def _next_float(value: Any) -> Any:
    import numpy as np

    return np.nextafter(value, np.float32(1e9))


# What a source is changed to: its name → how its tensors are changed.
SOURCES: dict[str, Callable[[dict[str, np.ndarray], Path], None]] = {
    "swapped layers": _swap_layers,
    "zeros": _one_layer(lambda array: array * 0),
    "nan": _one_layer(_set_first(lambda _value: float("nan"))),
    "next": _one_layer(_set_first(_next_float)),
    "transposed": _one_layer(lambda array: array.T),
    "rounded": _round,
    "short": _store_short,
    "fewer layers": _drop_layer,
    "other": lambda tensors, _folder: tensors.update(
        {name: value[::-1].copy() for name, value in tensors.items()}
    ),
}


def _edit_json(file: Path, values: dict[str, Any]) -> None:
    """Set attributes of a JSON file, wherever they are in it; one that it does not have is added."""
    data = json.loads(file.read_text())
    for name, value in values.items():
        if not _set(data, name, value):
            data[name] = value
    file.write_text(json.dumps(data, indent=2))


def _set(node: Any, name: str, value: Any) -> bool:
    if not isinstance(node, dict):
        return False
    if name in node:
        node[name] = value
        return True
    return any(_set(child, name, value) for child in node.values())


def _edit_config(case: Case, values: dict[str, Any]) -> None:
    """State other attributes in the config of a target."""
    file = case.part(case.target.config)
    named = {case.target.names[name]: value for name, value in values.items()}
    if file.suffix in (".json", ".yml"):  # the file keeps its size
        text = file.read_text()
        for name, value in named.items():
            text, count = re.subn(rf'(?m)^( *"?{name}"?: )\d+', rf"\g<1>{value}", text)
            assert count == 1, name
        file.write_text(text)
    else:
        import torch

        common = torch.load(file, weights_only=False)
        vars(common["args"]).update(named)
        torch.save(common, file)


def _bytes(change: Callable[[bytearray], Any], part: str = "data") -> Callable[[Case], None]:
    """Change the bytes of a file: of the data, or of a part."""

    def change_it(case: Case) -> None:
        file = case.data if part == "data" else case.part(getattr(case.target, part))
        data = bytearray(file.read_bytes())
        done = change(data)
        file.write_bytes(data if done is None else done)

    return change_it


def _flip(share: float) -> Callable[[bytearray], None]:
    def flip(data: bytearray) -> None:
        data[min(int(len(data) * share), len(data) - 1)] ^= 1

    return flip


def _zero(first: int, last: int) -> Callable[[bytearray], None]:
    """Zeros from one eighth of a file to another; one page if they are equal."""

    def zero(data: bytearray) -> None:
        start = len(data) * first // 8
        stop = len(data) * last // 8 if last > first else start + PAGE
        data[start:stop] = bytes(stop - start)

    return zero


def _swap_pages(data: bytearray) -> None:
    one, other = len(data) // 4, len(data) // 2
    data[one : one + PAGE], data[other : other + PAGE] = data[other : other + PAGE], data[one : one + PAGE]


def _insert(data: bytearray) -> None:
    data.insert(len(data) // 2, 7)


def _remove_byte(data: bytearray) -> None:
    del data[len(data) // 2]


def _remove(part: str) -> Callable[[Case], None]:
    def remove(case: Case) -> None:
        (case.data if part == "data" else case.part(getattr(case.target, part))).unlink()

    return remove


def _rename_data(case: Case) -> None:
    case.data.rename(case.data.with_name(f"{case.data.name}.old"))


def _add(name: str, data: bytes) -> Callable[[Case], None]:
    def add(case: Case) -> None:
        file = case.part(name)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)

    return add


def _add_and_list(case: Case) -> None:
    _add("modeling_llama.py", b"import os\n")(case)
    record = json.loads(case.sidecar.read_text())
    record["files"]["modeling_llama.py"] = len(b"import os\n")
    case.sidecar.write_text(json.dumps(record))


def _replace(part: str) -> Callable[[Case], None]:
    """A file is that of another model, whose tensors have the same shapes."""

    def replace(case: Case) -> None:
        other = Case(case.name, case.bench.made(case.name, "other") / case.name, case.bench)
        if part == "data":
            shutil.copy(other.data, case.data)
        elif part == "sidecar":
            shutil.copy(other.sidecar, case.sidecar)
        else:
            shutil.copy(other.part(getattr(case.target, part)), case.part(getattr(case.target, part)))

    return replace


def _become(kind: str, *, whole: bool = False) -> Callable[[Case], None]:
    """The files are those of a conversion of a changed model; the sidecar stays, unless it is replaced too."""

    def become(case: Case) -> None:
        record = case.sidecar.read_bytes()
        case.bench.put(case.name, kind)
        if not whole:
            case.sidecar.write_bytes(record)

    return become


def _record(change: Callable[[dict[str, Any]], Any]) -> Callable[[Case], None]:
    """Change the sidecar."""

    def change_it(case: Case) -> None:
        record = json.loads(case.sidecar.read_text())
        change(record)
        case.sidecar.write_text(json.dumps(record))

    return change_it


def _other_digest(record: dict[str, Any]) -> None:
    row = record["manifest"]["tensors"][0]
    row["digest"] = row["digest"][:-1] + ("0" if row["digest"][-1] != "0" else "1")


def _other_dtype(record: dict[str, Any]) -> None:
    record["manifest"]["tensors"][0]["dtype"] = "int32"


def _other_source(record: dict[str, Any]) -> None:
    record["receipt"]["source"]["uri"] += "-of-another-team"


def _cut_sidecar(case: Case) -> None:
    data = case.sidecar.read_bytes()
    case.sidecar.write_bytes(data[: len(data) // 2])


def _record_anew(case: Case) -> None:
    """A damaged checkpoint gets a sidecar of its own, which agrees with it."""
    _become("next")(case)
    case.sidecar.unlink()
    wherry.inspect(case.path, write=True)


def _empty(_data: bytearray) -> bytes:
    return b""


def _half(data: bytearray) -> bytes:
    return bytes(data[: len(data) // 2])


def _touch(case: Case) -> None:
    os.utime(case.data, (1e9, 1e9))


OTHER_HEADS = {"heads": 2, "groups": 1, "width": 32}  # the matrices have the same shapes
DAMAGE: dict[str, Callable[[Case], Any]] = {
    "nothing": lambda _case: None,
    "another time of change": _touch,
    "MLflow's note `registered_model_meta` added": _add("registered_model_meta", b"model_name: llama\n"),
    "code `modeling_llama.py` added": _add("modeling_llama.py", b"import os\n"),
    "second weights `pytorch_model.bin` added": _add("pytorch_model.bin", pickle.dumps({})),
    "hidden file added": _add(".profile", b"export X=1\n"),
    "folder with a file added": _add("extra/notes.txt", b"later\n"),
    "code added, and listed in the sidecar": _add_and_list,
    "data: a bit flipped in the middle": _bytes(_flip(0.5)),
    "data: a bit flipped in the first byte": _bytes(_flip(0)),
    "data: a bit flipped in the last byte": _bytes(_flip(1)),
    "data: last byte cut off": _bytes(lambda data: data[:-1]),
    "data: second half cut off": _bytes(_half),
    "data: empty": _bytes(_empty),
    "data: file removed": _remove("data"),
    "data: file renamed": _rename_data,
    "data: a page of zeros": _bytes(_zero(4, 4)),
    "data: second half zeros": _bytes(_zero(4, 8)),
    "data: two pages swapped": _bytes(_swap_pages),
    "data: a byte inserted": _bytes(_insert),
    "data: a byte removed": _bytes(_remove_byte),
    "data: 64 bytes appended": _bytes(lambda data: data + bytes(64)),
    "data: file of another model": _replace("data"),
    "index: a bit flipped in the middle": _bytes(_flip(0.5), "index"),
    "index: second half cut off": _bytes(_half, "index"),
    "index: empty": _bytes(_empty, "index"),
    "index: file removed": _remove("index"),
    "mark of a complete save removed": _remove("mark"),
    "config: file removed": _remove("config"),
    "config: empty": _bytes(_empty, "config"),
    "config: second half cut off": _bytes(_half, "config"),
    "config: other heads, same shapes": lambda case: _edit_config(case, OTHER_HEADS),
    "config: other base of rotary positions": lambda case: _edit_config(case, {"theta": 400000}),
    "config: one layer more": lambda case: _edit_config(case, {"layers": 3}),
    "tensors: two layers swapped": _become("swapped layers"),
    "tensors: one is zeros": _become("zeros"),
    "tensors: one value is NaN": _become("nan"),
    "tensors: one value is the next float": _become("next"),
    "tensors: a square matrix transposed": _become("transposed"),
    "tensors: values rounded to bfloat16": _become("rounded"),
    "tensors: stored as bfloat16": _become("short"),
    "tensors: one layer fewer": _become("fewer layers"),
    "sidecar: removed": lambda case: case.sidecar.unlink(),
    "sidecar: cut off": _cut_sidecar,
    "sidecar: a digest changed": _record(_other_digest),
    "sidecar: a dtype changed": _record(_other_dtype),
    "sidecar: another source in the receipt": _record(_other_source),
    "sidecar: of another model": _replace("sidecar"),
    "one value changed, sidecar written anew": _record_anew,
    "another model with its own sidecar": _become("other", whole=True),
}


SOUND = [  # what is no damage
    "nothing", "another time of change", "MLflow's note `registered_model_meta` added",
]  # fmt: skip


def damaged_target(bench: Bench, name: str, damage: str) -> Path | None:
    """A target in its place, damaged; None if it has nothing that could be.

    Args:
        bench: of the targets.
        name: the target.
        damage: a key of DAMAGE.
    """
    case = Case(name, bench.put(name), bench)
    try:
        DAMAGE[damage](case)
    except NotApplicableError:
        return None
    return case.path


def outcome(bench: Bench, path: Path, level: str) -> str:
    """The verdict of a level, or the name of its error."""
    against = bench.source() if level in ("roundtrip", "logits") else None
    try:
        return wherry.verify(path, level=level, against=against).verdict
    except WherryError as error:
        return type(error).__name__


def golden() -> dict[str, dict[str, dict[str, str]]]:
    """Damage → target → level → outcome."""
    return json.loads(GOLDEN.read_text())


def _measure(bench: Bench, damages: list[str]) -> Iterator[tuple[str, str, dict[str, str]]]:
    for name in TARGETS:
        for damage in damages:
            path = damaged_target(bench, name, damage)
            if path is not None:
                found = {}
                for level in LEVELS:
                    found[level] = outcome(bench, path, level)
                yield damage, name, found


def main() -> None:
    """Measure every case, and write the golden file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=DAMAGE, nargs="+", help="measure these, and keep the other rows")
    damages = parser.parse_args().only or list(DAMAGE)
    from tests.support.warm_native import WarmLoaders
    from wherry.core import child

    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="wherry-damage-"))
        (Path(folder) / "warm").mkdir()
        loaders = WarmLoaders(f"{folder}/warm")
        stack.callback(lambda: [one.close() for one in loaders.values()])
        stack.enter_context(mock.patch.object(child, "run", loaders.run))
        variables = {"WHERRY_HOME": f"{folder}/home", "WHERRY_SETTLE_SECONDS": "0", "JAX_PLATFORMS": "cpu"}
        stack.enter_context(mock.patch.dict(os.environ, variables))
        kept = golden() if GOLDEN.exists() else {}
        table: dict[str, Any] = {name: {} if name in damages else kept.get(name, {}) for name in DAMAGE}
        for damage, name, found in _measure(Bench(Path(folder)), damages):
            table[damage][name] = found
            print(damage, name, *found.values(), sep=" | ", flush=True)
    GOLDEN.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
