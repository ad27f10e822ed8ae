"""The signatures of an audit: where a checkpoint has one, is it by the configured key, and of this checkpoint?

From metadata: the signature fits the key, and the identity that was signed is the one that the ledger has. Where the
audit read the bytes, every file that the signature names is read, too, and compared. A checkpoint without a signature
is none of the audit's business: whether there must be one is a matter of the policy of a promotion.
"""

from __future__ import annotations

import shlex
import time
from functools import partial
from typing import TYPE_CHECKING

from wherry.auditor.places import Looked, about, troubled
from wherry.config.settings import configured
from wherry.core.digest import short
from wherry.core.services import service
from wherry.errors import CorruptError, MismatchError, WherryError
from wherry.runtime import threads
from wherry.storage.sidecar import signature_location
from wherry.storage.stores import is_live, locate

if TYPE_CHECKING:
    from collections.abc import Iterator

    from wherry.auditor.report import Audited, Finding

_WORKERS = 16  # signatures wait for storage more than they compute
_READ = ("digest", "native")


def required_key(key: str | None) -> str | None:
    """The public key that signatures are checked with: the given one, or `audit.key` of the configuration.

    Raises:
        NotFoundError, UsageError, StorageError: it is not there, or no key.
        MissingExtraError: the package cryptography is not installed.
    """
    chosen = key or configured("audit.key")
    if chosen is not None:
        service("signing").load_public_key(chosen)  # a key that does not fit is said before anything is read
    return chosen


def check_signatures(looked: dict[str, Looked], key: str) -> None:
    """Check the signature of every place that has one; what comes of it takes the look's place.

    Args:
        looked: URI → what came of the look at it.
        key: file with the public key, PEM.
    """
    with threads.executor(_WORKERS, "wherry-audit") as executor:
        shallow = [one for one in looked.values() if one.row.level not in _READ]
        deep = [one for one in looked.values() if one.row.level in _READ]
        done = [*executor.map(partial(_checked, key=key), shallow), *(_checked(one, key) for one in deep)]
    looked.update({one.row.uri: one for one in done})


def _checked(one: Looked, key: str) -> Looked:
    clock, row = time.monotonic(), one.row
    try:
        if is_live(row.uri) or not signature_location(locate(row.uri)).exists():
            return one
        found = list(_findings(one, key))
    except (MismatchError, CorruptError) as error:
        found = [_broken(row, error.what)]
    except WherryError as error:
        found = [troubled(row, error)]
    return one.with_findings(found, row.level, time.monotonic() - clock)


def _findings(one: Looked, key: str) -> Iterator[Finding]:
    row, signing = one.row, service("signing")
    if row.level in _READ:
        signed = signing.verify(row.uri, key)
        for name, reason in signed.failed:
            yield _broken(row, f"since it was signed: {name} {reason}", path=name)
        identity = signed.identity
    else:
        identity = signing.identity(row.uri, key)
    digest = identity.get("checkpoint_digest")
    if digest is not None and digest != row.checkpoint_digest:
        what = (
            f"checkpoint {short(digest)} was signed, and the ledger has {short(row.checkpoint_digest)} here"
        )
        yield _broken(row, what)


def _broken(row: Audited, what: str, **more: str) -> Finding:
    again = f"wherry sign {shlex.quote(row.uri)} --key KEY"
    cure = f"find out who changed or signed it; if it is sound, sign it again: {again}"
    return about(row, "signature", what, cure=cure, **more)
