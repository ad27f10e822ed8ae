"""List the checkpoints below a folder or bucket as CSV: place, format, step, parameters, bytes, verdict.

python examples/list_checkpoints.py ROOT > checkpoints.csv
"""

from __future__ import annotations

import csv
import sys

import wherry


def main(root: str) -> None:
    """One row for each checkpoint, as it is found; only metadata is read."""
    out = csv.writer(sys.stdout)
    out.writerow(["uri", "format", "step", "parameters", "bytes", "verdict"])
    for found in wherry.discover(root):
        verdict = wherry.verify(found.uri, level="present").verdict
        with wherry.open(found.uri) as checkpoint:
            manifest = checkpoint.manifest
            out.writerow([found.uri, found.format, found.step, manifest.parameters, manifest.nbytes, verdict])


if __name__ == "__main__":
    main(*sys.argv[1:])
