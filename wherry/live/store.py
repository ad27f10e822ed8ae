"""Store: the checkpoints of one training run, saved from its live state and restored into it.

A small wrapper of `export` and `restore` for training loops: steps by number, the newest step, the best step by a
metric. Only committed checkpoints count; the store keeps no state besides the checkpoints. One save runs at a time, so
that at most one snapshot is held.

    store = wherry.Store("/ckpt/llama")
    store.save(state, step, metrics={"loss": loss})        # returns after the snapshot
    state = store.restore(into=state).state                # the newest
    store.wait()
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Unpack

from wherry.converter.keywords import OF_FILES, ExportKeywords, RestoreKeywords, spelled_out
from wherry.core.calls import usage_checked
from wherry.core.html import html_table
from wherry.core.request import ConvertRequest, TargetRequest, options_of
from wherry.core.steps import step_number
from wherry.errors import CorruptError, NotFoundError, UsageError
from wherry.formats.registry import find_format
from wherry.live.export import export
from wherry.live.handle import Export
from wherry.store.local_store import locate
from wherry.store.location import Location
from wherry.store.sidecar import is_marked, read_sidecar, sidecar_location

if TYPE_CHECKING:
    from wherry.live.restore import Restored

_METRIC = "metric."
_MODES = {"min": min, "max": max}


class RunStore:
    """The checkpoints of one run.

    Attributes:
        root: the run folder.
        to: the format in which steps are saved.
        common: keyword arguments of every save, see `wherry.export`.
    """

    @usage_checked("wherry.Store")
    @spelled_out(ExportKeywords, options_of(TargetRequest, ConvertRequest), without=OF_FILES)
    def __init__(
        self, root: str | os.PathLike[str], *, to: str = "orbax", **common: Unpack[ExportKeywords]
    ) -> None:
        """Open a run folder, which need not exist yet.

        Raises:
            UsageError: the format is unknown.
        """
        self.root: Location = locate(root)
        self.to = find_format(to).name
        self.common = common
        self._last: Export | None = None

    def __repr__(self) -> str:
        steps = self.steps()
        shown = f"steps {', '.join(map(str, steps))}" if steps else "no steps"
        return f"<Store {self.root.uri!r}: {self.to}, {shown}>"

    def _repr_html_(self) -> str:
        rows = ((step, self.at(step).uri, self.metrics(step) or "") for step in self.steps())
        return html_table(repr(self), ("step", "checkpoint", "metrics"), rows)

    @usage_checked("wherry.Store.save")
    @spelled_out(ExportKeywords, options_of(TargetRequest, ConvertRequest), without=OF_FILES)
    def save(
        self,
        state: object,
        step: int,
        *,
        metrics: Mapping[str, float] | None = None,
        **more: Unpack[ExportKeywords],
    ) -> Export:
        """Save a step in the background, after waiting for the previous save.

        Args:
            state: see `wherry.export`.
            step: its number.
            metrics: name → value, for `best`.
            more: keyword arguments of this save in addition to `common`.

        Returns:
            The handle, which keeps the errors of the storage.

        Raises:
            WherryError: no save of this state can succeed; see `wherry.export`.
        """
        self.wait()
        arguments: dict[str, Any] = {**self.common, **more}
        kept = {f"{_METRIC}{name}": repr(float(value)) for name, value in (metrics or {}).items()}
        arguments["meta"] = {**(arguments.get("meta") or {}), **kept}
        into = find_format(self.to).step_folder is not None
        target = self.root.uri if into else self.root.join(f"step_{step:08d}").uri
        self._last = export(state, target, to=self.to, step=step, into=into, **arguments)
        return self._last

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the running save; False after `timeout` seconds."""
        return self._last is None or self._last.wait(timeout)

    def steps(self) -> list[int]:
        """The committed steps, oldest first."""
        return sorted(self._committed_steps())

    def latest(self) -> int | None:
        """The newest committed step; None if there is none."""
        return max(self.steps(), default=None)

    def metrics(self, step: int) -> dict[str, float]:
        """The metrics of a step.

        Raises:
            NotFoundError: the step was not found.
            CorruptError: a metric in its sidecar is not a number.
        """
        place = self.at(step)
        sidecar = read_sidecar(place)
        meta: dict[str, str] = sidecar.manifest.origin.get("meta", {}) if sidecar else {}
        found = {name: text for name, text in meta.items() if name.startswith(_METRIC)}
        return {name.removeprefix(_METRIC): _number(name, text, place) for name, text in found.items()}

    def best(self, metric: str, mode: str = "min") -> int | None:
        """The step with the lowest (or highest) value of a metric; the newer of two that are equal.

        Args:
            metric: its name; steps without it, or with a NaN, do not count.
            mode: `min` or `max`.

        Raises:
            UsageError: the mode is invalid.
        """
        if mode not in _MODES:
            raise UsageError(f"invalid value for mode: {mode!r}", cure="choose min or max")
        found = {step: self.metrics(step).get(metric, math.nan) for step in reversed(self.steps())}
        counted = [step for step, value in found.items() if not math.isnan(value)]
        return _MODES[mode](counted, key=found.__getitem__) if counted else None

    def at(self, step: int) -> Location:
        """The location of the checkpoint of a step.

        Raises:
            NotFoundError: the step was not found.
        """
        found = self._committed_steps().get(step)
        if found is None:
            raise NotFoundError(
                f"step {step} not found",
                uri=self.root.uri,
                cure=f"choose a saved step: {self.steps() or 'none yet'}",
            )
        return found

    @usage_checked("wherry.Store.restore")
    @spelled_out(RestoreKeywords)
    def restore(self, into: Any, *, step: int | None = None, **common: Unpack[RestoreKeywords]) -> Restored:
        """Fill a live template from a step; returns the result of `wherry.restore`.

        Args:
            into: see `wherry.restore`.
            step: its number; the newest by default.
            common: other keyword arguments of `wherry.restore`.

        Raises:
            NotFoundError: the step was not found, or no step has been saved.
        """
        from wherry.live.restore import restore

        chosen = self.latest() if step is None else step
        if chosen is None:
            raise NotFoundError("no saved step found", uri=self.root.uri, cure="save a step first")
        return restore(self.at(chosen).uri, into=into, **common)

    def _committed_steps(self) -> dict[int, Location]:
        """Step → checkpoint; only one with a sidecar, and in a store with a commit member, is complete."""
        found: dict[int, Location] = {}
        row = find_format(self.to)
        for entry in self.root.entries():
            number = None if entry.name.startswith(".") else step_number(entry.name)
            if number is None:
                continue  # sidecars, staging areas and other entries of the run folder
            inner = row.step_folder(number).partition("/")[2] if row.step_folder else ""
            step = self.root.join(entry.name)
            place = step.join(inner) if inner else step
            if sidecar_location(place).exists() and is_marked(step, row.commit_members):
                found[number] = place
        return found


def _number(name: str, text: str, place: Location) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise CorruptError(
            f"{name} in the sidecar is {text!r}, not a number", uri=sidecar_location(place).uri,
            cure="restore the sidecar from a backup, or correct it",
        ) from error  # fmt: skip
