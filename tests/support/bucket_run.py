"""A program: one conversion to a bucket, which kills itself.

`python -m tests.support.bucket_run SOURCE TARGET TO MOMENT [PART LOG OPTIONS MACHINE]`: the moment is `N`, before the
N-th call of the store; `N+`, after it; `journal:N` or `journal:N+`, the same of the calls that write the journal;
`N.Ns`, seconds after the first call; `0`, never. PART is the size of parts, LOG a file that gets a byte for each part
that the store has, OPTIONS are those of the format, as JSON, MACHINE is the name of the host, where leases expire soon;
each of them may be empty.

It prints the number of calls, of parts that were sent and of objects of the journal, the checkpoint digest, the seconds
from the first call on, and the peak of its memory in bytes.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

from tests.support.object_stores import CALLS
from wherry.converter.convert import convert
from wherry.mover import output
from wherry.store.local_store import locate
from wherry.store.store import PartLimits
from wherry.target import lease as leases
from wherry.target import parts, uploaded_file
from wherry.target.lease import LeaseObject

lock = threading.Lock()
calls: list[str] = []


def deadly(name, function, moment, log):
    kind, _, number = moment.removesuffix("+").rpartition(":")
    after = moment.endswith("+")

    def wrapper(self, *arguments, **options):
        with lock:
            if not calls and moment.endswith("s"):
                threading.Timer(float(moment[:-1]), kill).start()
            journal = name == "put_object" and "/journal-" in arguments[0]
            calls.append("journal" if journal else name)
            counted = calls.count("journal") * journal if kind else len(calls)
            fatal = not moment.endswith("s") and counted == int(number)
        if fatal and not after:
            kill()
        result = function(self, *arguments, **options)
        if name == "put_part" and log:
            os.write(log, b"+")
        if fatal:
            kill()
        return result

    return wrapper


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def peak() -> int:
    """The largest resident memory of this process; `ru_maxrss` would count that of the process which started it."""
    rows = Path("/proc/self/status").read_text().splitlines()
    return next(int(row.split()[1]) << 10 for row in rows if row.startswith("VmHWM:"))


def be(machine):
    """Run as on another machine, whose process table tells nothing of the owners of leases.

    Each move is noted, and writing waits for sending, so that a small checkpoint has finished moves.
    """
    socket.gethostname = lambda: machine
    LeaseObject.expiry, leases.LOOK_SECONDS = 1.0, 0.2
    output._GROUP_BYTES, parts.HELD_BYTES = 1, 4 << 20


def main(source, target, to, moment, part="", log="", options="{}", machine="") -> None:
    if machine:
        be(machine)
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT) if log else 0
    if part:
        uploaded_file.PART_BYTES = int(part)
    kind = type(locate(target).store)
    if part:
        kind.part_limits = PartLimits(1, 1 << 30, 1024)
    for name in CALLS:
        setattr(kind, name, deadly(name, getattr(kind, name), moment, descriptor))
    begun = time.monotonic()
    receipt = convert(
        source,
        target,
        to=to,
        family="none",
        options=json.loads(options or "{}"),
        ignore=("companions",),
        lineage=False,
    )
    found = {
        "calls": len(calls),
        "sent": calls.count("put_part"),
        "journal": calls.count("journal"),
        "seconds": time.monotonic() - begun,
        "digest": receipt.target.checkpoint_digest,
        "resumed": receipt.resumed_bytes,
        "peak": peak(),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
