"""digests: the algorithm of new digests.

The setting `digest` decides. Without it a host in FIPS mode uses SHA-256, which its rules require; and a ledger keeps
the algorithm of its last conversion, so that a checkpoint that is converted again has the digest under which the ledger
has it. A new ledger uses BLAKE3, which a processor computes 2 to 14 times as fast. Whatever is chosen, records are
verified with the algorithm that they state.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from wherry.config.settings import configured_value
from wherry.core.algorithms import ALGORITHMS, BLAKE3, SHA256, algorithm_of
from wherry.core.services import service
from wherry.errors import UsageError, WherryError

DIGEST_ENV = "WHERRY_DIGEST"
_FIPS = Path("/proc/sys/crypto/fips_enabled")


@dataclass(frozen=True, slots=True)
class DigestChoice:
    """The algorithm of new digests.

    Attributes:
        algorithm: one of `wherry.core.algorithms.ALGORITHMS`.
        reason: why, for people.
        note: what a receipt states about it; empty if there is nothing to explain.
    """

    algorithm: str
    reason: str
    note: str = ""


def digest_choice(*, ledger: bool = True) -> DigestChoice:
    """The algorithm of the digests that are about to be computed for a new record.

    Args:
        ledger: whether the result is recorded in the ledger.

    Raises:
        UsageError: the setting is invalid.
        NotFoundError: the file that `WHERRY_CONFIG` names does not exist.
    """
    stated = os.environ.get(DIGEST_ENV) or configured_value("digest")
    if stated:
        if stated not in ALGORITHMS:
            raise UsageError(
                f"unknown digest algorithm {stated!r}", cure=f"set digest to {' or '.join(ALGORITHMS)}"
            )
        return DigestChoice(stated, "setting `digest`")
    if _fips():
        note = "digests are SHA-256, because this host is in FIPS mode"
        return DigestChoice(SHA256, "this host is in FIPS mode", note)
    last = None
    if ledger:
        # The conversion reports a ledger that cannot be used when it records its result.
        with suppress(WherryError):
            last = service("ledger").last_target()
    if last is not None:
        return DigestChoice(algorithm_of(last), "algorithm of the ledger's last conversion")
    return DigestChoice(BLAKE3, "default")


def _fips() -> bool:
    try:
        return _FIPS.read_text().strip() == "1"
    except OSError:
        return False
