"""The loop of a judge's program: it runs where a library is installed, and computes one model after the other.

A job is a line of JSON on standard input, {"folder", "tokens", "label", "stated", "out"}; its logits become the file
`out`, and the answer is a line of JSON on standard output, {"error": null or a traceback}. What a library prints goes
to standard error.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np


def module_of(file: Path) -> Any:
    """The module in a file, by its path: folders here have modules with the names of libraries."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def serve(compute: Callable[[dict[str, Any], np.ndarray], np.ndarray]) -> None:
    """Answer jobs until standard input ends.

    Args:
        compute: logits of a job and its tokens [batch, position].
    """
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        for line in sys.stdin:
            job, error = json.loads(line), None
            try:
                np.save(job["out"], compute(job, np.array(job["tokens"])))
            except BaseException:  # torch's own errors of a rank are none of Exception
                error = traceback.format_exc()
            print(json.dumps({"error": error}), file=answers, flush=True)
