"""A simulation: processes on several machines, one clock, and a schedule that follow from a seed alone.

Everything runs in one thread of the operating system. A process of the simulation has one or more threads, which are
greenlets: a thread runs until it calls a store, sleeps or waits for another one; there the schedule may give the turn
to another thread, stop the process for a time, or kill it. Nothing depends on the real clock or on real processes, so
a seed gives the same calls in the same order again.

- `Simulation.call` is around every call on a store. A fault acts before or after the effect of a call.
- A killed process never calls a store again: its threads get `KilledError` at their next call, and so does whatever
  they do while they unwind.
- A stopped process sleeps as a whole, also beyond the expiry of its lease.
- Each machine has a monotonic clock and a wall clock of its own; their differences mean nothing.
"""

from __future__ import annotations

import errno
import functools
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from greenlet import getcurrent, greenlet

RIGHT = "final"  # the machine whose wall clock is right
FOREVER = float("inf")
_LONGEST_RUN = 400_000  # calls of a simulation: one with more does not end
_DAY = 86_400.0
_PATIENCE = 2.0  # seconds after which a thread that can run gets its turn


class KilledError(BaseException):
    """The process is dead: nothing that it does reaches a store."""


class BrokenError(BaseException):
    """Something that must hold does not; the simulation ends, whatever the product makes of the exception."""


@dataclass(frozen=True)
class Fault:
    """What happens to a process at one of its calls.

    Attributes:
        kind: `kill`, `stop`, `fail`, `lose` (the call takes effect, the caller gets an error), `late` (the caller gets
            an error, the call takes effect afterwards), `slow`, `interrupt` (a signal, which the main thread gets as
            KeyboardInterrupt), or `power` (every machine of the file system loses its power).
        call: number of the call, counted from 1.
        after: whether it acts after the effect.
        seconds: how long the process is stopped, the call takes, or its effect is late.
    """

    kind: str
    call: int
    after: bool = False
    seconds: float = 0.0


@dataclass(eq=False)
class Process:
    """One process.

    Attributes:
        name: in traces and messages.
        machine: its host name.
        pid: its number, which a later process can get again.
        started: clock ticks at which it started; never those of another one.
        faults: number of a call → what happens there.
        calls: so many calls it has made.
        alive: whether it runs, or is stopped.
        stopped_until: when it continues.
        struck: the kinds of faults that have acted.
        outcome: how its program has ended; empty before.
        error: with which it ended, if it was one.
        on_end: called when it has ended.
        writes: the conversion that it writes; None if it does not write.
        resumed: the pieces that it found durable when it had opened the target; None before.
    """

    name: str
    machine: str
    pid: int
    started: int
    boot: str
    faults: dict[int, Fault] = field(default_factory=dict)
    calls: int = 0
    alive: bool = True
    stopped_until: float = 0.0
    struck: set[str] = field(default_factory=set)
    outcome: str = ""
    error: BaseException | None = None
    on_end: Callable[[], None] = lambda: None
    writes: Any = None
    resumed: frozenset[int] | None = None
    threads: list[Thread] = field(default_factory=list)


class Thread(greenlet):
    """One thread of a process; `wake` is when it goes on, `ready` for what it waits until then."""

    def __init__(self, simulation, process, target, hub):
        super().__init__(self._begin, hub)
        self.simulation, self.process, self._target = simulation, process, target
        self.wake, self.ready, self.asleep, self.ended = 0.0, None, False, False
        self.requested, self.answer, self.late_stop, self.looked = None, None, 0.0, None

    def _begin(self):
        try:
            self._target()
        except (KilledError, BrokenError):
            pass
        finally:
            self.ended = True


def current():
    """The thread of the simulation that runs; None outside of one."""
    found = getcurrent()
    return found if type(found) is Thread else None


class Simulation:
    """One run; `Simulation.run` ends when all processes have ended.

    Attributes:
        now: seconds since the beginning.
        trace: every call and its process, in order.
        broken: what does not hold; empty if everything does.
        observe: called after each effect on a store.
        is_look: whether a call looks at the lease, so that the next call of the thread relies on it: no stop between.
        error_of: the error of a call that fails, as the store has it.
        on_power: what a loss of power does to the file system.
        on_death: what the kernel does when a process ends.
        switching: how often a call gives the turn away.
        step: seconds that a call takes.
    """

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.now, self.calls, self.broken = 0.0, 0, ""
        self.trace = []
        self.processes, self.threads = [], []
        self.observe: Callable[[], None] = lambda: None
        self.is_look: Callable[[str, str], bool] = lambda _name, _what: False
        self.error_of: Callable[[Fault], Exception] = lambda fault: OSError(errno.EIO, fault.kind)
        self.on_power: Callable[[], None] = lambda: None
        self.on_death: Callable[[Process], None] = lambda _process: None
        self.switching = self.random.choice((0.02, 0.1, 0.3, 0.6))
        self.step = self.random.choice((0.001, 0.02, 0.3, 0.6))
        self._due, self._numbers = FOREVER, itertools.count(1)
        self._alarms, self._hub = [], None
        self._offsets = {}
        self._boots = itertools.count(1)
        self.boot = f"boot{next(self._boots)}"

    def breaks(self, what):
        """The exception for something that does not hold."""
        self.broken = self.broken or what
        return BrokenError(what)

    # Processes.

    def process(self, name, machine, program, faults=(), after=0.0):
        """Start a process that runs a program, some seconds from now."""
        pid = 100 + self.random.randrange(4)
        while any(one.alive and one.machine == machine and one.pid == pid for one in self.processes):
            pid += 1
        made = Process(name, machine, pid, next(self._numbers), self.boot, {one.call: one for one in faults})
        self.processes.append(made)
        self.spawn(made, lambda: self._run(made, program), after)
        return made

    def spawn(self, process, target, after=0.0):
        """Start one more thread of a process."""
        thread = Thread(self, process, target, self._hub or getcurrent())
        thread.wake = self.now + after
        process.threads.append(thread)
        self.threads.append(thread)
        self._due = min(self._due, thread.wake)
        return thread

    def _run(self, process, program):
        try:
            process.outcome = program(process) or "done"
        except KilledError:
            process.outcome = "killed"
            raise
        except (Exception, KeyboardInterrupt) as error:
            process.outcome, process.error = type(error).__name__, error
        process.alive = False
        self._end(process)

    def kill(self, process):
        """End a process: the kernel closes its files and frees its locks; its requests to a store are not withdrawn."""
        if process.alive:
            process.alive, process.outcome = False, "killed"
            self._end(process)

    def _end(self, process):
        self.on_death(process)
        self._due = 0.0  # its other threads are unwound
        process.on_end()

    def end(self):
        """Unwind what still runs, after a simulation that something has broken."""
        for process in self.processes:
            process.alive = False
        self._unwind()

    def cut_power(self):
        """All processes of the file system end, and what was not synced is lost."""
        self.boot = f"boot{next(self._boots)}"
        for process in self.processes:
            self.kill(process)
        self.on_power()

    def at(self, seconds, act):
        """Do something some seconds from now."""
        self._alarms.append((self.now + seconds, len(self.trace), act))
        self._due = min(self._due, self.now + seconds)

    # What threads do.

    def call(self, name, what, effect, arguments=(), *, changes=True):
        """A call on a store.

        Args:
            name: of the operation.
            what: its object, for the trace.
            effect: does it, in one step that nobody sees in between.
            arguments: of the effect.
            changes: whether it changes the store.
        """
        thread = getcurrent()
        process = thread.process
        if not process.alive:
            raise KilledError
        process.calls += 1
        fault = process.faults.get(process.calls) if process.faults else None
        self.trace.append((process.name, name, what))
        look = self.is_look(name, what)
        if thread.late_stop and not look:
            # Between an object that was looked at and its removal there is no stop either: S3 has no other condition
            # than the bytes, and a successor that adopts an object keeps them.
            after = thread.looked is None or (name, what) == ("delete", thread.looked)
            fault, thread.late_stop = Fault("stop", process.calls, after, thread.late_stop), 0.0
        elif thread.late_stop:
            thread.looked = None  # the lease was looked at in between
        elif (look or name == "head") and fault is not None and fault.kind == "stop":
            thread.late_stop, thread.looked, fault = fault.seconds, None if look else what, None
        thread.requested = None if look else (effect, arguments, changes)
        self.pause(thread)
        answer, thread.requested, thread.answer = thread.answer, None, None
        if answer is not None:
            return answer()
        if fault is not None:
            return self._faulty(thread, fault, effect, arguments)
        result = effect(*arguments)
        if changes:
            self.observe()
        return result

    def pause(self, thread):
        """The place between two calls, where another thread may get its turn."""
        self.now += self.step
        self.calls += 1
        if self.calls > _LONGEST_RUN:
            raise self.breaks("the simulation does not end")
        if self.now >= self._due or self.random.random() < self.switching:
            thread.wake, thread.ready, thread.asleep = self.now, None, False
            self._hub.switch()
            if not thread.process.alive:
                raise KilledError

    def sleep(self, seconds):
        """Let the thread sleep."""
        self.wait(None, seconds)

    def wait(self, ready, seconds=FOREVER):
        """Wait until `ready()`; whether it was, before so many seconds had passed."""
        thread = getcurrent()
        if not thread.process.alive:
            raise KilledError
        thread.ready, thread.wake, thread.asleep = ready, self.now + seconds, True
        self._due = min(self._due, thread.wake)
        self._hub.switch()
        if not thread.process.alive:
            raise KilledError
        thread.ready = None
        return ready is not None and ready()

    def stop(self, process, seconds):
        """Stop a process as a whole; the calls that its other threads have begun take effect now."""
        process.stopped_until = self.now + seconds
        for thread in process.threads:
            if thread.requested is not None and thread is not getcurrent():
                effect, arguments, changes = thread.requested
                thread.requested, thread.answer = None, _answer(effect, arguments)
                if changes:
                    self.observe()

    def monotonic(self):
        """The monotonic clock of the machine of this thread."""
        return self.now + self._offset()[0]

    def wall(self):
        """The wall clock of the machine of this thread."""
        return self.now + self._offset()[1]

    def _offset(self):
        machine = getcurrent().process.machine
        if machine not in self._offsets:
            wrong = self.random.choice((0.0, 0.0, 40.0, -40.0, 2 * _DAY, -_DAY)) if machine != RIGHT else 0.0
            self._offsets[machine] = (self.random.uniform(0, 1e6), 1.8e9 + wrong)
        return self._offsets[machine]

    def _faulty(self, thread, fault, effect, arguments):
        process = thread.process
        if fault.kind == "slow" and fault.kind in process.struck:
            process.struck.add("slow again")
        process.struck.add(fault.kind)
        self.trace.append((process.name, f"! {fault.kind}", "after" if fault.after else "before"))
        if fault.kind == "late":
            self.at(fault.seconds, lambda: self._take_late(effect, arguments))
        if fault.kind == "lose":
            effect(*arguments)
            self.observe()
        if fault.kind in ("fail", "lose", "late"):
            raise self.error_of(fault)
        if not fault.after:
            self._strike(thread, fault)
        result = effect(*arguments)
        self.observe()
        if fault.after:
            self._strike(thread, fault)
        return result

    def _strike(self, thread, fault):
        process = thread.process
        if fault.kind == "kill":
            self.kill(process)
            raise KilledError
        if fault.kind == "power":
            self.cut_power()
            raise KilledError
        if fault.kind == "interrupt" and thread is process.threads[0]:
            raise KeyboardInterrupt
        if fault.kind == "stop":
            process.struck.add("stop")
            self.stop(process, fault.seconds)
            self.sleep(0.0)
        if fault.kind == "slow":
            self.sleep(fault.seconds)

    def _take_late(self, effect, arguments):
        try:
            effect(*arguments)
        except OSError:
            return
        self.observe()

    # The schedule.

    def run(self):
        """Run until all processes have ended."""
        self._hub = getcurrent()
        for thread in self.threads:
            thread.parent = self._hub
        while self.threads or self._alarms:
            self._unwind()
            self._ring()
            thread = self._next()
            if thread is None:
                if not self._forward():
                    break
                continue
            thread.switch()
            if self.broken:
                raise BrokenError(self.broken)
            if thread.ended:
                self.threads.remove(thread)
        if self.threads:
            raise self.breaks(f"threads wait for each other: {[one.process.name for one in self.threads]}")

    def _unwind(self):
        for thread in [one for one in self.threads if not one.process.alive]:
            if thread:  # it has begun
                thread.throw(KilledError())
            if thread in self.threads:
                self.threads.remove(thread)

    def _ring(self):
        for alarm in sorted(self._alarms, key=lambda one: one[:2]):
            if alarm[0] <= self.now:
                self._alarms.remove(alarm)
                alarm[2]()

    def _next(self):
        """The thread that gets the turn; one whose time has come first."""
        now, due, ready, self._due = self.now, [], [], FOREVER
        for thread in self.threads:
            until = thread.process.stopped_until
            if until > now:
                self._due = min(self._due, until)
            elif thread.ready is not None and thread.ready():
                ready.append(thread)
            elif thread.wake <= now:
                late = thread.asleep or thread.wake + _PATIENCE <= now
                (due if late else ready).append(thread)
                self._due = min(self._due, thread.wake + _PATIENCE)
            else:
                self._due = min(self._due, thread.wake)
        for alarm in self._alarms:
            self._due = min(self._due, alarm[0])
        found = due or ready
        if len(found) > 1:
            return found[self.random.randrange(len(found))]
        return found[0] if found else None

    def _forward(self):
        """Let the time pass until something happens; whether anything ever does."""
        if self._due == FOREVER:
            return False
        self.now = max(self.now, self._due)
        return True


def _answer(effect, arguments):
    """What gives the result of a call that takes effect now, to a thread that goes on later."""
    try:
        result = effect(*arguments)
    except Exception as error:
        return functools.partial(_fail, error)
    return lambda: result


def _fail(error):
    raise error
