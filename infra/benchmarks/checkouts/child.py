"""A warm process with the wherry of one checkout: answers each line of input with the processor times of its calls.

`python child.py DIR` imports nothing of this checkout, so that it runs with an older wherry, too.
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


def answer(asked: dict[str, Any]) -> dict[str, Any]:
    """The times of some calls in seconds; or the error, since an older wherry may not know a container."""
    gc.collect()
    try:
        return {"seconds": [timed_call(asked) for _ in range(asked["repeats"])]}
    except Exception as error:  # noqa: BLE001  whatever it is, the row says so
        return {"error": f"{type(error).__name__}: {error}"}


def timed_call(asked: dict[str, Any]) -> float:
    """Do one call, and delete what it made; the processor time of all threads, in user and kernel mode."""
    target = Path(asked["target"])
    started = time.process_time()
    call(asked)
    spent = time.process_time() - started
    if target.exists():
        shutil.rmtree(target.parent)
    return spent


def call(asked: dict[str, Any]) -> None:
    """Do what is asked."""
    import wherry

    source, target = asked["source"], asked["target"]
    if asked["operation"] == "detect":
        found = wherry.detect(source)
        if found.verdict != "ok":
            raise ValueError(f"{found.verdict}: {found.reason}")
    elif asked["operation"] == "plan":
        wherry.plan(source, target, to=asked["to"], options=asked["options"])
    else:
        Path(target).parent.mkdir(parents=True)
        wherry.convert(source, target, to=asked["to"], options=asked["options"], family=asked["family"])


if __name__ == "__main__":
    main()
