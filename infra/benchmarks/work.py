"""Starts what the rows that are not wherry's own commands do: `python -m benchmarks.work NAME ARGUMENT...`.

Each runs in a process of its own, imports what it needs, and prints `{"seconds": …}` last, counted after its imports.
What it writes is durable within that time, since wherry's output is.
"""

from __future__ import annotations

import json
import sys
import time
from importlib import import_module

# name → module and function; the function does its imports and returns what is to be timed.
WORKS = {
    "copy-and-hash": "floor:copy_and_hash", "torch-save": "peers:torch_save",
    "torch-to-dcp": "peers:torch_to_dcp", "dcp-to-torch": "peers:dcp_to_torch",
    "dcp-to-safetensors": "peers:dcp_to_safetensors",
    "safetensors-to-dcp": "peers:safetensors_to_dcp",
    "torch-to-safetensors": "peers:torch_to_safetensors",
    "safetensors-to-orbax": "peers:safetensors_to_orbax",
    "orbax-to-safetensors": "peers:orbax_to_safetensors", "transformers": "peers:transformers_reshard",
    "transformers-dequantize": "peers:transformers_dequantize", "mergekit": "peers:mergekit_reshard",
    "sign": "peers:sign", "verify-signature": "peers:verify_signature",
    "t5x-to-huggingface": "peers:t5x_to_huggingface", "paxml-to-maxtext": "peers:paxml_to_maxtext",
    "huggingface-to-maxtext": "peers:huggingface_to_maxtext",
    "maxtext-to-huggingface": "peers:maxtext_to_huggingface",
    "kernel": "probes:kernel", "resume": "probes:resume", "plan": "probes:plan", "many": "probes:many",
    "audit": "probes:audit",
}  # fmt: skip


def main() -> None:
    """Do one piece of work and print its seconds, and its value where it has one."""
    name, *arguments = sys.argv[1:]
    module, _, function = WORKS[name].partition(":")
    run = getattr(import_module(f"benchmarks.{module}"), function)(*arguments)
    started = time.monotonic()
    value = run()
    print(json.dumps({"seconds": time.monotonic() - started, "value": value}))


if __name__ == "__main__":
    main()
