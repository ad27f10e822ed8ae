"""calls: calls of the library from Python, whose arguments are checked against the signature.

Python raises TypeError for an argument that a function does not take, in the words of the function that the call
reaches. A caller of wherry gets an error of the request instead, which names the argument and those that it could be.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

from wherry import cures
from wherry.core import forks as _forks
from wherry.core.background import wait_at_exit, waited_for
from wherry.core.names import meant_names
from wherry.core.receipt import Receipt
from wherry.core.request import SourceRequest
from wherry.errors import UsageError, choose

assert _forks  # a process that calls wherry can be forked
wait_at_exit()
Function = TypeVar("Function", bound="Callable[..., Any]")

# What the parts of an annotation accept. An argument is checked if all parts of its annotation are here.
_TYPES: dict[str, type] = {
    "str": str, "os.PathLike[str]": os.PathLike, "SourceRequest": SourceRequest, "Receipt": Receipt, "None": type(None)
}  # fmt: skip
_WORDS = {"str": "text", "os.PathLike[str]": "a path"}


def usage_checked(verb: str) -> Callable[[Function], Function]:
    """Give a function errors of the request for arguments that it does not take.

    Only texts and paths are compared with their annotations; other values are left to the function. A program that ends
    while another thread is in a call waits for it (`wherry.core.background`).

    Args:
        verb: its public name, `wherry.convert`.

    Raises in a call:
        UsageError: an argument is unknown or missing, or is not a text or path.
    """

    def checking(function: Function) -> Function:
        signature = inspect.signature(function)
        names = [name for name in signature.parameters if name != "self"]
        kinds = {name: str(one.annotation).split(" | ") for name, one in signature.parameters.items()}

        @wraps(function)
        def call(*arguments: Any, **keywords: Any) -> Any:
            if unknown := next((name for name in keywords if name not in names), None):
                option = cures.KEYWORDS.get(unknown.strip("_").replace("_", "-"))
                meant = [option] if option in names else meant_names(unknown, names)
                cure = choose(unknown, names, meant)
                command = verb.partition(".")[2] in cures.CALLS
                if command and not meant and unknown.replace("_", "-") in cures.COMMANDS_ONLY:
                    help_of = cures.Command(verb.removeprefix("wherry."), cures.Argument("help"))
                    cure = cures.Cure("only the command line has it: see {}", help_of)
                raise UsageError(f"unknown argument {unknown!r} of {verb}", cure=cure)
            try:
                bound = signature.bind(*arguments, **keywords)
            except TypeError as error:
                raise UsageError(f"{verb}: {error}", cure=f"its arguments are: {', '.join(names)}") from error
            for name, value in bound.arguments.items():
                texts = set(kinds[name]) <= set(_TYPES)
                if texts and not isinstance(value, tuple(_TYPES[kind] for kind in kinds[name])):
                    wanted = " or ".join(_WORDS[kind] for kind in kinds[name] if kind in _WORDS)
                    each = isinstance(value, list | tuple)
                    raise UsageError(
                        f"invalid value for {name}: {value!r}; expected {wanted}, got {type(value).__name__}",
                        cure=f"call {verb} once for each of them" if each else f"pass {wanted}",
                    )
            with waited_for(verb):
                return function(*arguments, **keywords)

        return cast("Function", call)

    return checking
