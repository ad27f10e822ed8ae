"""marks: what an audit writes on a version: that its checkpoint is altered, or what proved that it is not.

`wherry.altered` and the first line of the description state what was found; both are removed when a later audit finds
the checkpoint whole. The rest of the description, which people may have edited, stays as it is.
"""

from __future__ import annotations

import re

from wherry.errors import printable
from wherry.integrations.mlflow.aliases import set_tag
from wherry.integrations.mlflow.client import Stores, absent_is_fine, open_client
from wherry.ledger.resolve import ALTERED_TAG, VERIFIED_TAG

_HEAD = "> **Altered:** "
_LINE = re.compile(rf"\A{re.escape(_HEAD)}[^\n]*\n*")
_MARKUP = re.compile(r"([\\`*_{}\[\]<>|#!])")


def mark_version(
    name: str, version: str, *, altered: str | None, verified: str, tracking_uri: str, registry_uri: str
) -> None:
    """Write the outcome of an audit on a version.

    Args:
        name: the registered model.
        version: its version.
        altered: what is wrong with its checkpoint, in one line; empty if nothing is any more; None leaves it as it is.
        verified: its verification, in one line; empty keeps the last one.
        tracking_uri, registry_uri: the stores.

    Raises:
        NotFoundError: the version does not exist.
        StorageError: the registry cannot be reached or written.
    """
    with open_client(Stores(tracking_uri, registry_uri)) as client:
        if verified:
            set_tag(client, name, version, VERIFIED_TAG, verified)
        if altered is None:
            return
        if altered:
            set_tag(client, name, version, ALTERED_TAG, printable(altered))
        else:
            absent_is_fine(lambda: client.delete_model_version_tag(name, version, ALTERED_TAG))
        before = client.get_model_version(name, version).description or ""
        rest = _LINE.sub("", before)
        line = _MARKUP.sub(r"\\\1", printable(altered))
        after = f"{_HEAD}{line}\n\n{rest}" if altered else rest
        if after != before:
            client.update_model_version(name, version, after)
