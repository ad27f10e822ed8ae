"""A program: one conversion to a bucket, which kills itself at the N-th call of the store.

`python -m tests.support.bucket_run SOURCE TARGET TO N [OPTIONS]`; with N = 0 it lives. OPTIONS are those of the format,
as JSON. It prints the number of calls and of parts that were sent, the checkpoint digest, and the peak of its memory in
bytes.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path

from tests.support.object_stores import CALLS
from wherry.converter.convert import convert
from wherry.objects.stores import object_store
from wherry.storage.stores import locate

lock = threading.Lock()
calls: list[str] = []


def deadly(name, function, fatal):
    def wrapper(*arguments, **options):
        with lock:
            calls.append(name)
            if len(calls) == fatal:
                os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **options)

    return wrapper


def peak() -> int:
    """The largest resident memory of this process; `ru_maxrss` would count that of the process which started it."""
    rows = Path("/proc/self/status").read_text().splitlines()
    return next(int(row.split()[1]) << 10 for row in rows if row.startswith("VmHWM:"))


def main(source, target, to, fatal, options="{}") -> None:
    kind = type(object_store(locate(target).store))
    for name in CALLS:
        setattr(kind, name, deadly(name, getattr(kind, name), int(fatal)))
    receipt = convert(
        source, target, to=to, options=json.loads(options), ignore=("companions",), lineage=False
    )
    found = {
        "calls": len(calls),
        "sent": calls.count("put_part"),
        "digest": receipt.target.checkpoint_digest,
        "resumed": receipt.resumed_bytes,
        "peak": peak(),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
