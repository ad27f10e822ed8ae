"""call: a child process that runs one function of a worker: its name and arguments come as JSON, so does the answer."""

from __future__ import annotations

import json
import sys
from importlib import import_module

from wherry.text.json_values import json_value

_MODULES = ("wherry.carriers.hash_on", "wherry.carriers.on_worker")


def main() -> None:
    """Run the function that standard input names.

    Raises:
        ValueError: it is no function of a worker.
    """
    name, arguments = json_value(sys.stdin.read())
    module, _, function = name.partition(":")
    if module not in _MODULES or function.startswith("_"):
        raise ValueError(name)
    json.dump(getattr(import_module(module), function)(*arguments), sys.stdout)


if __name__ == "__main__":
    main()
