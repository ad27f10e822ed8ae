"""credentials: which parameters of a flow run contain a password, a token or a signature.

Prefect stores the parameters of a run when it is submitted, before any code of wherry runs: they cannot be cut there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from wherry.credentials import redact, redact_values

_OF_THE_USER = ("meta", "tags")  # fields with names that the user chooses, such as `token`


def credentials_in(value: Any, name: str = "") -> Iterator[str]:
    """The dotted names of the parameters with a credential, without their values.

    Args:
        value: parameters of a run, as Prefect passes them to the flow.
        name: of the value.
    """
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json")
    if isinstance(value, Mapping):
        by_name = name.rpartition(".")[2] in _OF_THE_USER
        for key, inner in value.items():
            inner_name = f"{name}.{key}" if name else str(key)
            if by_name and isinstance(inner, str):
                if redact_values({str(key): inner}) != {str(key): inner}:
                    yield redact(inner_name)
            else:
                yield from credentials_in(inner, inner_name)
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            yield from credentials_in(inner, f"{name}[{number}]")
    elif isinstance(value, str) and redact(value) != value:
        yield name
