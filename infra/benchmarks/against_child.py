"""A warm process with the wherry of one checkout: answers each line of input with the processor times of its calls.

`python against_child.py DIR` imports nothing of this checkout, so that it runs with an older wherry, too.
"""

from __future__ import annotations

import gc
import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any


def main() -> None:
    """Answer requests until the input ends; whatever wherry prints goes to standard error."""
    sys.path[0] = sys.argv[1]
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=answers, flush=True)


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """The times of some calls in seconds; or the error, since an older wherry may not know a container."""
    gc.collect()
    try:
        return {"seconds": [timed_call(request) for _ in range(request["repeats"])]}
    except Exception as error:  # noqa: BLE001  whatever it is, the row says so
        return {"error": f"{type(error).__name__}: {error}"}


def timed_call(request: dict[str, Any]) -> float:
    """Do one call, and delete what it made; the processor time of all threads, in user and kernel mode."""
    target = Path(request["target"])
    started = time.process_time()
    call(request)
    spent = time.process_time() - started
    if target.exists():
        shutil.rmtree(target.parent)
    return spent


def call(request: dict[str, Any]) -> None:
    """Detect, plan or convert, as the request states."""
    import wherry

    source, target = request["source"], request["target"]
    if request["operation"] == "detect":
        found = wherry.detect(source)
        if found.verdict != "ok":
            raise ValueError(f"{found.verdict}: {found.reason}")
    elif request["operation"] == "plan":
        wherry.plan(source, target, to=request["to"], options=request["options"])
    else:
        Path(target).parent.mkdir(parents=True)
        wherry.convert(source, target, to=request["to"], options=request["options"], family=request["family"])


if __name__ == "__main__":
    main()
