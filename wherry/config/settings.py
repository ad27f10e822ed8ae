"""settings: single settings, the URLs of ledger and registry, and the algorithm of new digests.

Environment variables that name a shared ledger or an MLflow server take precedence over `wherry.toml`, and that over
the files in the home. Looking up a path or a URL creates nothing. Without a `wherry.toml` the schema of the
configuration is not imported.

`digest_choice` is the algorithm of new digests. The setting `digest` decides. Without it a host in FIPS mode uses
SHA-256, which its rules require; and a ledger keeps the algorithm of its last conversion, so that a checkpoint that is
converted again has the digest under which the ledger has it. A new ledger uses BLAKE3, which a processor computes 2 to
14 times as fast. Whatever is chosen, records are verified with the algorithm that they state.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

from wherry.config.file import config_file
from wherry.config.values import required_origin
from wherry.core.digest import ALGORITHMS, BLAKE3, SHA256, algorithm_of
from wherry.core.lazy_dataclass import dataclass
from wherry.core.services import service
from wherry.errors import UsageError, WherryError
from wherry.store.home import home

_ORIGIN_CURE = "write it as https://HOST or https://HOST:PORT, or unset it"


def configured_value(name: str) -> Any:
    """The value of a setting in the configuration, including environment variables; None without a configuration.

    Args:
        name: dotted name, for example `mlflow.tracking_uri`.

    Raises:
        UsageError: the configuration is invalid.
        NotFoundError: the file that `WHERRY_CONFIG` names does not exist.
    """
    if config_file() is None:
        return None
    from wherry.config.config import load_config, value_at

    return value_at(load_config().settings.model_dump(), name)


def ledger_url() -> str:
    """URL of the ledger: `WHERRY_LEDGER`, the setting `ledger`, or a SQLite file in the home."""
    return (
        os.environ.get("WHERRY_LEDGER") or configured_value("ledger") or f"sqlite:///{home() / 'ledger.db'}"
    )


def audits_are_recorded() -> bool:
    """Whether audits are recorded in the ledger: `WHERRY_AUDIT_RECORD`, the setting `audit.record`, or true.

    Raises:
        UsageError: the variable is neither true nor false.
    """
    given = os.environ.get("WHERRY_AUDIT_RECORD")
    if given is None:
        return configured_value("audit.record") is not False
    if given.lower() not in ("true", "false"):
        raise UsageError(
            f"invalid value of WHERRY_AUDIT_RECORD: {given!r}; expected true or false",
            cure="correct or unset it",
        )
    return given.lower() == "true"


def pages_url() -> str | None:
    """Where others reach the pages of `wherry lineage serve`: `WHERRY_LINEAGE_URL` or the setting; None without one.

    Raises:
        UsageError: it is not the address of a server alone.
    """
    given = os.environ.get("WHERRY_LINEAGE_URL") or configured_value("lineage.url")
    try:
        return required_origin(given) if given else None
    except ValueError as error:
        raise UsageError(f"invalid value of lineage.url: {error}", cure=_ORIGIN_CURE) from None


def lineage_url(checkpoint_digest: str) -> str | None:
    """URL of the lineage page of a checkpoint; None if no setting says where others reach the pages.

    Raises:
        UsageError: the setting is no address.
    """
    base, digest = pages_url(), quote(checkpoint_digest, safe=":")
    return f"{base}/lineage/{digest}#{digest}" if base else None


def mlflow_tracking_uri() -> str:
    """`MLFLOW_TRACKING_URI`, the setting, or a SQLite file in the home (MLflow's default is the working folder)."""
    given = os.environ.get("MLFLOW_TRACKING_URI") or configured_value("mlflow.tracking_uri")
    return given or embedded_registry_uri()


def embedded_registry_uri() -> str:
    """URI of the MLflow store in the home, which is used where no server is configured."""
    return f"sqlite:///{home() / 'mlflow.db'}"


def mlflow_registry_uri() -> str:
    """`MLFLOW_REGISTRY_URI`, the setting, or the tracking store."""
    return (
        os.environ.get("MLFLOW_REGISTRY_URI")
        or configured_value("mlflow.registry_uri")
        or mlflow_tracking_uri()
    )


DIGEST_ENV = "WHERRY_DIGEST"
_FIPS = Path("/proc/sys/crypto/fips_enabled")


@dataclass(frozen=True, slots=True)
class DigestChoice:
    """The algorithm of new digests.

    Attributes:
        algorithm: one of `wherry.core.digest.ALGORITHMS`.
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
    try:
        fips = _FIPS.read_text().strip() == "1"
    except OSError:
        fips = False
    if fips:
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
