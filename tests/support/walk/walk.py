"""The walk: one attribute changed, there and back by the target's own config alone, and what the model computes then.

An end is one of these:

    carried      the model that comes back computes the same
    refused      one of the two conversions ended with 7
    required     one of the two ended with 2 or 4, since no file states a value; if the way back ends
                 so, it is tried with the source's config, and the model that comes back computes the same or is refused
    anything else is a failure, and says what happened
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import wherry
from tests.support.memory_files import temporary_folder
from tests.support.walk.change import ABSENT, Change, in_file
from tests.support.walk.models import BASES, DTYPE, logits, meta_params, save
from tests.support.walk.values import SIZES, values_of
from wherry.core.request import LayoutRequest
from wherry.errors import AmbiguousError, UnrepresentableError, UsageError, WherryError
from wherry.families import load_family
from wherry.families.schema import Form

# Relative to the largest logit. Scale words round twice by 2^-53, and transformers computes norms, rotations and
# softmax in float32, where that may flip a last bit (6e-8); what a change changes must be more.
SAME = 1e-6
_SIDECAR = "wherry.json"
LITTLE = "less than rounding"
PASSED = ("carried", "refused", "required")


class Route(NamedTuple):
    """One way into a system.

    Attributes:
        to: the format.
        options, layout: what is stated for.
        answer: the config of the source's system that the user of such a checkpoint has; None is that of the source.
    """

    to: str
    options: Mapping[str, Any] = {}
    layout: LayoutRequest = LayoutRequest()
    answer: Callable[[Path], Mapping[str, Any]] | None = None

    @property
    def label(self) -> str:
        """Format and options as text."""
        return " ".join([self.to, *(f"{name}={value}" for name, value in self.options.items())])


ROUTES: dict[str, tuple[Route, ...]] = {
    "huggingface": (Route("huggingface", layout=LayoutRequest(dtype=DTYPE)), Route("huggingface")),
    "huggingface-flax": (Route("huggingface-flax"),),
    "lingua": (Route("lingua"), Route("lingua-consolidated")),
    "maxtext": (Route("maxtext", {"scan_layers": "true"}), Route("maxtext", {"scan_layers": "false"})),
    "megatron": (Route("megatron"),),
    "meta": (Route("torch-zip", answer=meta_params),),
    "penzai": (Route("penzai"), Route("penzai", {"layer_stack": "false", "order": "native"})),
    "t5x": (
        Route("t5x-legacy"),
        Route("t5x-orbax", {"heads": "apart"}),
        Route("t5x-legacy", {"scan_layers": "true"}),
    ),
    "torchtitan": (Route("torchtitan"),),
}


# Classes that a system does not have: all of their models are refused. torchtitan's attention has no biases, and
# neither it nor Megatron has the indexer of DeepSeek V3.2. Of GPT-NeoX, Penzai computes layers side by side, Megatron
# one after the other.
WITHOUT = {
    ("umt5", "huggingface-flax"),
    ("qwen2", "torchtitan"),
    ("deepseek_v32", "torchtitan"),
    ("deepseek_v32", "megatron"),
    ("gpt_neox", "megatron"),
    ("gpt_neox_serial", "penzai"),
}


@dataclass(frozen=True, slots=True)
class Case:
    """One alternative value of one attribute of a class; without a change the base model."""

    label: str
    attribute: str = ""
    change: Change | None = None

    @property
    def named_change(self) -> tuple[str, Change] | None:
        """The name of the attribute, and its change."""
        return (self.attribute, self.change) if self.change else None

    @property
    def text(self) -> str:
        """The value as text."""
        return self.change.label if self.change else "base"


@dataclass(frozen=True, slots=True)
class End:
    """How a case ended in a system.

    Attributes:
        word: carried, refused, required, or what went wrong.
        detail: the refusal, and by which of the two conversions.
    """

    word: str
    detail: str = ""

    @property
    def passed(self) -> bool:
        """Whether it is no failure."""
        return self.word in PASSED


@dataclass(frozen=True, slots=True)
class Walked:
    """What became of a case.

    Attributes:
        changes: `yes` if the model computes something else than the reference with the same weights, `no` if not one
            bit changes, `shape` if it has other weights.
        ends: route → end, by system.
    """

    case: Case
    changes: str
    ends: Mapping[str, Mapping[str, End]]

    @property
    def is_model(self) -> bool:
        """Whether transformers itself loads the changed model."""
        return bool(self.ends)

    @property
    def details(self) -> dict[str, Any]:
        """Everything, as JSON."""
        case = {"label": self.case.label, "attribute": self.case.attribute, "value": self.case.text}
        ends = {
            system: {route: [end.word, end.detail] for route, end in by.items()}
            for system, by in self.ends.items()
        }
        return {**case, "changes": self.changes, "ends": ends}


def all_cases(label: str) -> list[Case]:
    """The base model of a class, then each case."""
    with temporary_folder("walk") as folder:
        base = save(Path(folder) / "base", label)
        stated = json.loads((base / "config.json").read_text())
    return [Case(label), *cases(label, stated)]


def cases(label: str, stated: Mapping[str, Any]) -> Iterator[Case]:
    """Every alternative of every attribute of a class, in a stable order.

    Args:
        label: the class.
        stated: the config that the base model is saved with.
    """
    values = values_of(label)
    for name, value in stated.items():
        if name not in SIZES:
            empty = [in_file(ABSENT), *([] if value is None else [in_file(None)])]
            values[name] = (*values.get(name, ()), *empty)
    for attribute, found in sorted(values.items()):
        for change in found:
            yield Case(label, attribute, change)


_READ_ALONE = {
    ("orbax",),
    ("gguf",),
}  # DeepMind's releases, which no format of its own writes, and llama.cpp's files


def systems_of(label: str) -> tuple[str, ...]:
    """The systems that the family has layouts for, that are written, and that have the class."""
    known = load_family(BASES[label].family).systems
    read = (system for system, row in known.items() if row.formats not in _READ_ALONE)
    return tuple(system for system in read if (label, system) not in WITHOUT)


def routes_of(label: str, system: str) -> tuple[Route, ...]:
    """The ways into a system. T5X stores scanned layers with a relative bias each, which only UMT5 has."""
    found = ROUTES[system]
    if system == "meta":  # a container, into which a tree goes by the name of its family alone
        return tuple(one._replace(layout=LayoutRequest(family=BASES[label].family)) for one in found)
    forms = load_family(BASES[label].family).system(system).forms
    found = tuple(one for one in found if all(_has_form(forms, *form) for form in one.options.items()))
    return found if system != "t5x" or label == "umt5" else found[:-1]


def _has_form(forms: Mapping[str, Form], name: str, choice: object) -> bool:
    """Whether a family has a form of its system: some are never scanned."""
    return name not in forms or choice in forms[name].choices


def walk(case: Case, number: int = 0) -> Walked:
    """Walk a case through all systems.

    Args:
        case: the case.
        number: which of the ways into each system is taken; a base model takes them all.
    """
    with temporary_folder("walk") as folder:
        source = Path(folder) / "source"
        try:
            save(source, case.label, case.named_change)
            wanted = logits(source, case.label)
        except Exception as error:
            return Walked(case, f"no model: {type(error).__name__}: {error}"[:300], {})
        ends: dict[str, dict[str, End]] = {}
        for system in systems_of(case.label):
            routes = routes_of(case.label, system)
            taken = routes if case.change is None else [routes[number % len(routes)]]
            ends[system] = {route.label: _end(case, source, wanted, route) for route in taken}
        return Walked(case, effect(case, source, wanted), ends)


def _signature(folder: Path) -> dict[str, Any]:
    """Name → element type and shape of each weight."""
    found: dict[str, Any] = {}
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        found |= {
            name: (one["dtype"], one["shape"]) for name, one in header.items() if name != "__metadata__"
        }
    return found


_references: dict[str, tuple[np.ndarray, dict[str, Any]] | None] = {}


def effect(case: Case, source: Path, wanted: np.ndarray) -> str:
    """Whether the change changes what the model computes: yes, no, shape (other weights), or less than rounding does.

    Where the reference is no model, as without an attribute that others need, the answer is yes.
    """
    if case.named_change is None:
        return "no"
    key = f"{case.label} {sorted(case.named_change[1].also.items())!r}"
    if key not in _references:
        _references[key] = _reference(case, source.parent / "reference")
    reference = _references[key]
    if reference is not None and _signature(source) != reference[1]:
        return "shape"
    far = distance(wanted, reference[0]) if reference is not None else 1.0
    return "no" if not far else "yes" if far > SAME else LITTLE


def _reference(case: Case, folder: Path) -> tuple[np.ndarray, dict[str, Any]] | None:
    """What the model computes without the change, and its weights; None where transformers does not load it."""
    try:
        save(folder, case.label, case.named_change, reference=True)
        return logits(folder, case.label), _signature(folder)
    except Exception:
        return None


def _end(case: Case, source: Path, wanted: np.ndarray, route: Route) -> End:
    """There, and back by what the target itself states; what it asks for is answered by the source's config."""
    family = BASES[case.label].family
    with temporary_folder("walk") as folder:
        there, back = Path(folder) / "there", Path(folder) / "back"
        if (stopped := converted("there", source, there, route)) is not None:
            return stopped
        strip(there, source, keep=route.to.startswith("huggingface"))
        stopped = converted("back", there, back, Route("huggingface", layout=LayoutRequest(family=family)))
        if stopped is None:
            return _compared(case, back, wanted)
        return (
            _answered(case, route, there, source, wanted, stopped) if stopped.word == "required" else stopped
        )


def _answered(case: Case, route: Route, there: Path, source: Path, wanted: np.ndarray, stopped: End) -> End:
    """The way back again, with the config that the first try lacked.

    The end is that of the first try if the model is now the same or refused, or if something is required that no config
    states. If a config is required again, the cure did not help.
    """
    answer = source / "config.json"
    if route.answer is not None:
        answer = there.parent / "params.json"
        answer.write_text(json.dumps(route.answer(source)))
    layout = LayoutRequest(family=BASES[case.label].family, config=str(answer))
    back = there.parent / "answered"
    again = converted("answered", there, back, Route("huggingface", layout=layout)) or _compared(
        case, back, wanted
    )
    if again.word in ("carried", "refused") or (again.word == "required" and "--config" not in again.detail):
        return stopped
    return End(f"{again.word} after the answer", again.detail)


def converted(leg: str, source: Path, target: Path, route: Route) -> End | None:
    """Convert; the end if that is not possible.

    Args:
        leg: the word that the end begins with.
        source: a checkpoint.
        target: where to.
        route: format and options.
    """
    try:
        wherry.convert(
            source,
            target,
            to=route.to,
            options=dict(route.options),
            layout=route.layout,
            lineage=False,
            verify="none",
        )
    except UnrepresentableError as error:
        return End("refused", f"{leg}: {error}")
    except (UsageError, AmbiguousError) as error:
        return End("required", f"{leg}: {error}")
    except WherryError as error:
        return End(f"error {error.exit_code}", f"{leg}: {error}")
    except Exception as error:
        return End("error", f"{leg}: {type(error).__name__}: {error}")
    return None


def strip(target: Path, source: Path, *, keep: bool) -> None:
    """Delete what lies next to a target's tensors and is not its own: the sidecar, and files named as in the source.

    Args:
        target: what a conversion made.
        source: the folder that it was made of.
        keep: whether both systems have the same files, so that they are the target's own.
    """
    copied = set() if keep else {file.name for file in source.iterdir() if file.suffix != ".safetensors"}
    foreign = [file for file in target.rglob("*") if file.name in {_SIDECAR, *copied}]
    for file in [*foreign, target.with_name(f"{target.name}.{_SIDECAR}")]:
        file.unlink(missing_ok=True)


def _compared(case: Case, back: Path, wanted: np.ndarray) -> End:
    try:
        found = logits(back, case.label, own=False)
    except Exception as error:
        return End("does not load", f"{type(error).__name__}: {error}"[:300])
    if found.shape != wanted.shape:
        return End("differs", f"shape {found.shape}, not {wanted.shape}")
    far = distance(found, wanted)
    return End("carried") if far <= SAME else End("differs", f"by {far:.1e}")


def distance(found: np.ndarray, wanted: np.ndarray) -> float:
    """The largest difference, as a share of the largest wanted value."""
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())
