"""json_values: JSON that wherry, a child process, a server or a user has written, in one piece and within limits.

Documents of checkpoints are read by `wherry.text.json_document`, whose errors name the file. Here everything that is
not JSON, nested too deeply or too much is a ValueError with a short text, and the caller knows what it means.
"""

from __future__ import annotations

import json
from typing import Any

from wherry.text.json_document import count_values
from wherry.text.limits import JsonLimits, exceeds, scale_limit

_OWN = JsonLimits(nbytes=1 << 30, nodes=1 << 22)  # the receipt of 250,000 tensors


def json_value(text: str | bytes) -> Any:
    """Parse a value.

    Args:
        text: the text, or its UTF-8 bytes.

    Raises:
        ValueError: it is not JSON, or becomes too much.
    """
    if len(text) > _OWN.nodes:
        data = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
        if exceeds(count_values(data), _OWN.nodes):
            raise ValueError(f"exceeds the limit of {scale_limit(_OWN.nodes):,} JSON values")
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
