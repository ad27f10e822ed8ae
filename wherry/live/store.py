"""Store: the checkpoints of one training run, written from its live state and read back into it.

The small wrapper for production loops over `export` and `restore`: steps by number, the newest, the best by a metric.
What counts is what is committed; nothing is remembered beside the checkpoints themselves. One save is under way at a
time, so that no more than one snapshot is held.

    store = wherry.Store("/ckpt/llama")
    store.save(state, step, metrics={"loss": loss})        # returns after the snapshot
    state = store.restore(into=state).state                # the newest
    store.wait()
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from wherry.core.steps import step_number
from wherry.errors import NotFoundError, UsageError
from wherry.formats.registry import find_format
from wherry.live.export import export
from wherry.storage.sidecar import read_sidecar, sidecar_location
from wherry.storage.stores import locate

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from wherry.live.handle import Export
    from wherry.live.restore import Restored
    from wherry.storage.location import Location

_METRIC = "metric."
_MODES = {"min": min, "max": max}


class RunStore:
    """The checkpoints of one run.

    Attributes:
        root: the run folder.
        to: the format in which steps are saved.
        common: what every save is told, see `wherry.export`.
    """

    def __init__(self, root: str | os.PathLike[str], *, to: str = "orbax", **common: Any) -> None:
        """Take a run folder, which need not be there yet.

        Raises:
            UsageError: an unknown format.
        """
        self.root: Location = locate(root)
        self.to = find_format(to).name
        self.common = common
        self._last: Export | None = None

    def save(
        self, state: object, step: int, *, metrics: Mapping[str, float] | None = None, **more: Any
    ) -> Export:
        """Save a step in the background; the save before it is waited for first.

        Args:
            state: see `wherry.export`.
            step: its number.
            metrics: name → value, for `best`.
            more: what this save is told beside `common`.

        Returns:
            The handle; nothing is raised into training.
        """
        self.wait()
        asked = {**self.common, **more}
        kept = {f"{_METRIC}{name}": repr(float(value)) for name, value in (metrics or {}).items()}
        asked["meta"] = {**(asked.get("meta") or {}), **kept}
        self._last = export(state, self._target(step), to=self.to, step=step, into=self._into, **asked)
        return self._last

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the save that is under way; False where `timeout` seconds were not enough."""
        return self._last is None or self._last.wait(timeout)

    def steps(self) -> list[int]:
        """The committed steps, oldest first."""
        return sorted(self._committed())

    def latest(self) -> int | None:
        """The newest committed step; None where there is none."""
        return max(self.steps(), default=None)

    def metrics(self, step: int) -> dict[str, float]:
        """What was measured at a step.

        Raises:
            NotFoundError: there is no such step.
        """
        sidecar = read_sidecar(self.at(step))
        meta: dict[str, str] = sidecar.manifest.origin.get("meta", {}) if sidecar else {}
        return {
            name.removeprefix(_METRIC): float(text) for name, text in meta.items() if name.startswith(_METRIC)
        }

    def best(self, metric: str, mode: str = "min") -> int | None:
        """The step with the lowest (or highest) value of a metric; the newer of two that are equal.

        Args:
            metric: its name; steps without it, or with a NaN, do not count.
            mode: `min` or `max`.

        Raises:
            UsageError: another mode.
        """
        if mode not in _MODES:
            raise UsageError(f"mode={mode} is not possible", cure="choose min or max")
        found = {step: self.metrics(step).get(metric, math.nan) for step in reversed(self.steps())}
        counted = [step for step, value in found.items() if not math.isnan(value)]
        return _MODES[mode](counted, key=found.__getitem__) if counted else None

    def at(self, step: int) -> Location:
        """Where the checkpoint of a step lies.

        Raises:
            NotFoundError: there is no such step.
        """
        found = self._committed().get(step)
        if found is None:
            raise NotFoundError(
                f"no step {step}", uri=self.root.uri, cure=f"there are: {self.steps() or 'none yet'}"
            )
        return found

    def restore(self, into: Any, *, step: int | None = None, **common: Any) -> Restored:
        """Fill a live template from a step; what `wherry.restore` returns.

        Args:
            into: see `wherry.restore`.
            step: its number; the newest by default.
            common: what else `wherry.restore` takes.

        Raises:
            NotFoundError: there is no such step, or none at all.
        """
        from wherry.live.restore import restore

        chosen = self.latest() if step is None else step
        if chosen is None:
            raise NotFoundError("no step was saved yet", uri=self.root.uri)
        return restore(self.at(chosen).uri, into=into, **common)

    @property
    def _into(self) -> bool:
        return find_format(self.to).step_folder is not None

    def _target(self, step: int) -> str:
        return self.root.uri if self._into else self.root.join(f"step_{step:08d}").uri

    def _committed(self) -> dict[int, Location]:
        """Step → checkpoint; only what has a sidecar of ours was saved whole."""
        found: dict[int, Location] = {}
        for entry in self.root.entries():
            number = None if entry.name.startswith(".") else step_number(entry.name)
            if number is None:
                continue  # sidecars, staging areas and whatever else lies in the run
            folder = find_format(self.to).step_folder
            inner = folder(number).partition("/")[2] if folder else ""
            place = self.root.join(entry.name)
            place = place.join(inner) if inner else place
            if sidecar_location(place).exists():
                found[number] = place
        return found
