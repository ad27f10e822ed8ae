"""Scenarios: what the processes of one seed do, which faults strike, and what must be true in the end.

Everything is drawn from the seed: the store, the conversions, when each process starts and on which machine, the
faults and the schedule. In the end all processes have ended; then one more run of the first conversion must make the
target, or find it made, and one more `clean` must leave nothing.
"""

from __future__ import annotations

import hashlib
import random
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from tests.support.simulation.buckets import simulated_buckets
from tests.support.simulation.schedule import BrokenError, Fault, Simulation
from tests.support.simulation.surroundings import forget, simulated
from tests.support.simulation.targets import (
    clean,
    conversion,
    is_made,
    open_target,
    with_simulated_locks,
    write_target,
)
from tests.support.simulation.world import FilesWorld, ObjectsWorld
from wherry.errors import StorageError, TargetExistsError, TargetInUseError, WherryError
from wherry.target.clean import tidy

STORES = ("files", "s3", "gs", "az")
_FOLDER_SIZES = {"data-0": (6, 6, 6), "data-1": (5, 7, 5)}
_OTHER_SIZES = {"data-0": (6, 6), "data-2": (5, 7, 5, 4)}
_ONE_SIZES = {"": (6, 6, 6, 6, 6)}
_FORGED = 0.15  # share of the seeds in which somebody writes into a log
# Of a writer that nothing disturbs: its calls before it writes, and all.
_CALLS = {"files": (45, 130), "s3": (17, 80), "gs": (20, 100), "az": (18, 90)}
# How long a process is stopped, or a call late: many are a little longer than a lease lasts.
_SECONDS = {
    "files": (0.5, 29.0, 33.0, 36.0, 45.0, 130.0),
    "objects": (0.5, 29.0, 93.0, 97.0, 105.0, 130.0, 400.0),
}
# Seconds at most: a lease must not expire while a call is slow, or while a request is on its way.
_SHORT = {"slow": 29.0, "late": 45.0}
# Two slow calls take longer than a lease lasts; and a process that is stopped keeps its lock, which a commit needs.
_LOSES_LEASE = {"slow again", "locked out"}
# What a file system does not have.
_LACKS = (
    (), (), (), ("renameat2",), ("links",), ("flock",), ("flock", "renameat2"), ("links", "renameat2"),
)  # fmt: skip
_ATTEMPTS = 3  # of a writer that is killed


@dataclass
class Outcome:
    """What one seed has shown.

    Attributes:
        seed: the seed.
        store: the kind of store.
        broken: what does not hold; empty if everything does.
        processes: name → how it ended.
        resumed: name → the pieces that it found durable.
        trace: every call.
        visible: whether the target was made.
    """

    seed: int
    store: str
    broken: str = ""
    processes: dict[str, str] = field(default_factory=dict)
    resumed: dict[str, frozenset[int]] = field(default_factory=dict)
    trace: list[tuple[str, ...]] = field(default_factory=list)
    visible: bool = False

    @property
    def digest(self):
        """Of the trace: two runs with the same digest have made the same calls in the same order."""
        return hashlib.sha256(repr((self.trace, self.processes, self.broken)).encode()).hexdigest()


@contextmanager
def simulations():
    """Let seeds run while the block runs."""
    with ExitStack() as stack:
        stack.enter_context(simulated())
        stack.enter_context(simulated_buckets())
        with_simulated_locks(stack)
        yield


class Scenario:
    """One seed."""

    def __init__(self, seed, store=None):
        self.seed = seed
        draw = self.draw = random.Random(f"scenario {seed}")
        self.store = store or draw.choice(STORES)
        self.simulation = Simulation(f"schedule {seed}")
        self.single = draw.random() < 0.4
        same = draw.random() < 0.3
        unread = self.store != "files" and draw.random() < 0.3
        sizes = (
            (_ONE_SIZES, _ONE_SIZES)
            if self.single
            else (_FOLDER_SIZES, draw.choice((_FOLDER_SIZES, _OTHER_SIZES)))
        )
        first = conversion("a", "aaaaaaaa", sizes[0], single=self.single, unread=unread)
        second = conversion(
            "b", "aaaaaaaa" if same else "bbbbbbbb", sizes[1], single=self.single, unread=unread
        )
        self.conversions = (first, second)
        if self.store == "files":
            lacks = draw.choice(_LACKS)
            self.world = FilesWorld(self.simulation, self.conversions, lacks)
        else:
            self.world = ObjectsWorld(self.simulation, self.conversions, self.store)
        self.broken, self.group = "", draw.choice((1, 2))

    def run(self):
        """Run everything, and check."""
        try:
            self._start()
            self.simulation.run()
            self._finish()
        except BrokenError as error:
            self.broken = str(error)
        finally:
            self.simulation.end()
        processes = self.simulation.processes
        return Outcome(
            self.seed, self.store, self.broken, {one.name: one.outcome for one in processes},
            {one.name: one.resumed or frozenset() for one in processes}, self.simulation.trace,
            self.world.made is not None,
        )  # fmt: skip

    # Processes.

    def _start(self):
        draw = self.draw
        writers, length = draw.choice((1, 2, 2, 2, 3)), self.simulation.step * _CALLS[self.store][1]
        machines = draw.choice((("m1",), ("m1", "m2"), ("m1", "m2", "m3")))
        for number in range(writers):
            chosen = self.conversions[0 if number == 0 or draw.random() < 0.6 else 1]
            after = draw.choice((0.0, draw.uniform(0, length), draw.uniform(0, length), draw.uniform(0, 60)))
            self._start_writer(f"w{number}", chosen, machines, after, _ATTEMPTS)
        for number in range(draw.choice((0, 0, 1, 1, 2))):
            after = draw.choice((draw.uniform(0, length), draw.uniform(0, 60), draw.uniform(0, 200)))
            self._process(f"c{number}", draw.choice(machines), self._clean, after)

        if draw.random() < _FORGED:
            self.simulation.at(draw.choice((draw.uniform(0, length), draw.uniform(0, 60))), self.world.forge)

    def _start_writer(self, name, chosen, machines, after, attempts):
        """Start a writer; if it does not get to its end, another one follows it after a time."""
        machine = self.draw.choice(machines)
        process = self._process(
            f"{name}.{_ATTEMPTS - attempts}", machine, lambda own: self._write(own, chosen), after
        )
        process.writes = chosen

        def follow():
            again = process.outcome in ("killed", "KeyboardInterrupt", "StorageError", "TargetInUseError")
            if again and attempts > 1 and self.draw.random() < 0.9:
                delay = self.draw.choice((0.1, self.draw.uniform(0, 40), self.draw.uniform(0, 150)))
                self._start_writer(name, chosen, machines, delay, attempts - 1)

        process.on_end = follow

    def _process(self, name, machine, program, after):
        most = (1, 1, 1, 2) if name == "w0.0" else (0, 0, 1, 1, 2)
        return self.simulation.process(name, machine, program, self._faults(self.draw.choice(most)), after)

    def _faults(self, count):
        draw, found = self.draw, []
        for _number in range(count):
            before, most = _CALLS[self.store]
            call = draw.randrange(1, before) if draw.random() < 0.25 else draw.randrange(before, most)
            kinds = [
                "kill",
                "kill",
                "kill",
                "stop",
                "stop",
                "stop",
                "stop",
                "fail",
                "lose",
                "slow",
                "interrupt",
            ]
            kinds += ["power", "power"] if self.store == "files" else ["late", "late", "lose", "lose"]
            kind = draw.choice(kinds)
            seconds = draw.choice(_SECONDS["files" if self.store == "files" else "objects"])
            seconds = min(seconds, _SHORT.get(kind, seconds))
            after = draw.random() < 0.5 or (kind == "stop" and self.store != "files")
            found.append(Fault(kind, call, after, seconds))
        return found

    def _write(self, process, chosen):
        world = self.world
        if is_made(world.place, chosen):
            tidy(world.place)
            return "made before"
        target = open_target(world.place, chosen, process.name)
        opening = target.open

        def opened():
            done = opening()
            process.resumed = done
            world.opened(process, target, done)
            return done

        target.open = opened
        write_target(target, chosen, self.group, self.simulation.step * 5)
        world.report(process)
        return "done"

    def _clean(self, _process):
        self.reports = clean(self.world.place)
        return "done"

    # What must hold in the end.

    def _finish(self):
        for process in self.simulation.processes:
            self._judge(process)
        last = [self._heal, self._sweep]
        if self.draw.random() < 0.5:
            last.reverse()
        for act in last:
            act()
        if self.draw.random() < 0.3 and self.world.made is not None:
            self._heal()
        self._sweep()

    def _judge(self, process):
        """The end of a process that nothing has disturbed, or that has made the target."""
        error = process.error
        if error is not None and not isinstance(error, (WherryError, KeyboardInterrupt)):
            raise self.simulation.breaks(
                f"{process.name} ended with {type(error).__name__}: {error}"
            ) from error
        made = self.world.maker is process
        if made and process.outcome not in ("done", "killed", "KeyboardInterrupt"):
            raise self.simulation.breaks(
                f"{process.name} has made the target, and ended with {error}"
            ) from error
        if process.struck - {"lose", "slow"} - _LOSES_LEASE or error is None:
            return
        if isinstance(error, StorageError) and self.world.excuses(process, error):
            return
        allowed = (TargetExistsError, TargetInUseError, *self.world.refusals)
        if process.writes is None or not isinstance(error, allowed):
            raise self.simulation.breaks(
                f"{process.name}, which nothing disturbed, ended with {error}"
            ) from error
        lost = isinstance(error, TargetInUseError) and process.resumed is not None
        if lost and not process.struck & _LOSES_LEASE:
            raise self.simulation.breaks(
                f"{process.name}, which nothing disturbed, has lost its lease"
            ) from error

    def _heal(self):
        """One more run makes the target, or finds it made."""
        before, first = self.world.made is not None, self.conversions[0]
        logged = set() if before else set(self.world.logged(first))
        name = f"last{len(self.simulation.processes)}"
        process = self.simulation.process(name, "final", lambda own: self._write(own, first))
        process.writes = first
        self.simulation.run()
        allowed = [one.__name__ for one in self.world.refusals] or ["done"]
        exists = before or self.world.is_obstructed()
        allowed = ["made before", "TargetExistsError"] if exists else allowed
        if process.outcome not in allowed:
            raise self.simulation.breaks(
                f"the last run ended with {process.outcome}: {process.error}"
            ) from process.error
        if process.resumed is not None and not before and not logged <= process.resumed:
            raise self.simulation.breaks(
                f"the last run resumes {process.resumed}, and the log names {logged}"
            )

    def _sweep(self):
        """One more `clean` leaves nothing."""
        name = f"sweep{len(self.simulation.processes)}"
        process = self.simulation.process(name, "final", self._clean)
        self.simulation.run()
        if process.outcome != "done":
            raise self.simulation.breaks(f"the last clean ended with {process.error}") from process.error
        if left := self.world.left():
            said = [(row.uri, row.reason) for row in self.reports]
            raise self.simulation.breaks(f"clean has left {left}, and says {said}")


def run_seed(seed, store=None):
    """Run one seed, in `simulations()`."""
    forget()
    return Scenario(seed, store).run()


def first_broken(seeds, store=None):
    """The first outcome of which something does not hold; None if everything does."""
    return next((one for one in (run_seed(seed, store) for seed in seeds) if one.broken), None)
