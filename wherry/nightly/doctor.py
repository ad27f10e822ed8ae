"""doctor: check the installed packages, stores and servers that wherry needs on this machine.

It changes nothing: packages are found by their metadata, without importing them; the ledger's chain is recomputed;
servers get one request with a short timeout. A finding is `ok`, `missing` (an extra that may never be needed) or
`broken` (something that is set up but does not work), each with a cure.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from typing import Literal, TypeAlias

from wherry.config.settings import digest_choice, mlflow_registry_uri, mlflow_tracking_uri
from wherry.core import sandbox
from wherry.core.digest import ALGORITHMS, new_hash
from wherry.core.lazy_dataclass import dataclass
from wherry.core.services import service
from wherry.core.units import plural, short, show_size
from wherry.cures import Blank, Command, Cure
from wherry.errors import WherryError
from wherry.installation import extra_command, package_command
from wherry.kernels import kernels
from wherry.kernels.compile import FOLDER
from wherry.store.home import ensure_home, home, sqlite_file, without_secrets
from wherry.store.probe import reason_of

State: TypeAlias = Literal["ok", "missing", "broken"]

_ANSWER_SECONDS = 3.0
_LOW_SPACE = 1 << 30
_HASHED_BYTES = 8 << 20

# extra → packages: module name, and name of the distribution.
_EXTRAS: dict[str, tuple[tuple[str, str], ...]] = {
    "prefect": (("prefect", "prefect"), ("fastapi", "fastapi")),
    "workers": (("prefect_docker", "prefect-docker"), ("prefect_kubernetes", "prefect-kubernetes")),
    "mlflow": (("mlflow", "mlflow"),),
    "postgres": (("psycopg", "psycopg"),),
    "sign": (("cryptography", "cryptography"),),
    "native": (
        ("jax", "jax"),
        ("torch", "torch"),
        ("safetensors", "safetensors"),
        ("transformers", "transformers"),
    ),
    "jax": (("jax", "jax"), ("orbax.checkpoint", "orbax-checkpoint"), ("flax", "flax")),
    "torch": (("torch", "torch"),),
    "gcs": (("gcsfs", "gcsfs"),),
    "s3": (("s3fs", "s3fs"),),
    "azure": (("adlfs", "adlfs"),),
    "hub": (("huggingface_hub", "huggingface_hub"),),
    "dask": (("distributed", "distributed"),),
    "ray": (("ray", "ray"),),
    "penzai": (("penzai", "penzai"),),
}


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """One finding: name, state, detail, and the cure where something is wrong."""

    name: str
    state: State
    detail: str
    cure: str | None = None


def diagnose() -> list[Diagnosis]:
    """Run all checks; a check that fails is itself a finding."""
    return [
        _tensorstore(),
        *(_extra(name) for name in _EXTRAS),
        *_fastapi(),
        _home(),
        _ledger(),
        _digests(),
        _kernels(),
        *_prefect(),
        *_mlflow(),
        _sandbox(),
        _disk(),
        *_left_behind(),
    ]


def _extra(name: str) -> Diagnosis:
    cure = extra_command(name)
    absent = [package for module, package in _EXTRAS[name] if not _importable(module)]
    if absent:
        return Diagnosis(f"extra {name}", "missing", f"{', '.join(absent)} not installed", cure)
    return Diagnosis(f"extra {name}", "ok", ", ".join(f"{p} {_version(p)}" for _module, p in _EXTRAS[name]))


def _importable(module: str) -> bool:
    """Whether a module can be imported; a missing top-level package does not raise."""
    if find_spec(module.partition(".")[0]) is None:
        return False
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "(version unknown)"


def _fastapi() -> Iterator[Diagnosis]:
    """Prefect 3.8 declares fastapi < 1, but its server does not start with 0.155 and later."""
    if not (_importable("prefect") and _importable("fastapi")):
        return
    major, minor = (int(part) for part in _version("fastapi").split(".")[:2])
    capped = any("fastapi" in row and "<0.151" in row for row in requires("prefect") or [])
    if (major, minor) >= (0, 151) and not capped:
        detail = (
            f"the server of Prefect {_version('prefect')} does not start with fastapi {_version('fastapi')}"
        )
        yield Diagnosis("prefect server", "broken", detail, package_command("fastapi<0.151"))


def _tensorstore() -> Diagnosis:
    try:
        import tensorstore  # pyright: ignore[reportUnusedImport]  # noqa: F401  whether it loads is the question
    except ImportError as error:
        return Diagnosis(
            "tensorstore", "broken", f"import failed: {error}", package_command("tensorstore", upgrade=True)
        )
    return Diagnosis("tensorstore", "ok", _version("tensorstore"))


def _home() -> Diagnosis:
    cure = "set WHERRY_HOME to a writable folder"
    try:
        folder = ensure_home()
    except WherryError as error:
        return Diagnosis("home", "broken", error.what, cure)
    if not os.access(folder, os.W_OK | os.X_OK):
        return Diagnosis("home", "broken", f"permission denied: {folder} is not writable", cure)
    if folder.stat().st_mode & 0o077:
        return Diagnosis("home", "broken", f"other users can access {folder}", f"chmod 700 {folder}")
    return Diagnosis("home", "ok", str(folder))


def _ledger() -> Diagnosis:
    from wherry.ledger.record import check_chain, open_ledger

    try:
        with open_ledger() as ledger:
            chain = check_chain(ledger)
            uri = ledger.uri
    except WherryError as error:
        return Diagnosis("ledger", "broken", error.what, error.cure)
    if chain.altered is not None:
        cure = Cure(
            "restore the file from a backup, or move it away and run {}",
            Command("ledger rebuild", Blank("ROOT")),
        )
        return Diagnosis("ledger", "broken", f"{uri}: {chain.altered}", cure)
    return Diagnosis(
        "ledger",
        "ok",
        f"{uri}: {plural(chain.statements, 'statement')}, chain intact, head {short(chain.head)}",
    )


def _digests() -> Diagnosis:
    """The algorithm of new digests and the reason, with the rate of each algorithm on one core of this machine."""
    try:
        choice = digest_choice()
    except WherryError as error:
        return Diagnosis("digests", "broken", error.what, error.cure)
    rates = ", ".join(f"{one} {_hash_rate(one):.1f} GB/s" for one in ALGORITHMS)
    return Diagnosis("digests", "ok", f"{choice.algorithm} ({choice.reason}); one core computes {rates}")


def _kernels() -> Diagnosis:
    """Whether the inner loops are compiled, and for which vectors."""
    found = kernels()
    if found == "none":
        command = shlex.join([sys.executable, str(FOLDER / "compile.py")])
        cure = f"{command}; it needs a C compiler (on Debian and Ubuntu: gcc and libc6-dev)"
        detail = "not compiled: numpy is used, and conversions between systems take more processor time"
        return Diagnosis("kernels", "missing", detail, cure)
    return Diagnosis("kernels", "ok", f"compiled, {found}")


def _hash_rate(algorithm: str) -> float:
    """GB of one core in a second, from hashing a few MB."""
    data = bytes(_HASHED_BYTES)
    begun = time.perf_counter()
    new_hash(algorithm, data).digest()
    return _HASHED_BYTES / 1e9 / (time.perf_counter() - begun)


def _prefect() -> Iterator[Diagnosis]:
    """The API that flows would use; without one, each flow starts a temporary server, which is slow but works."""
    if not _importable("prefect"):
        return
    url = os.environ.get("PREFECT_API_URL") or _prefect_profile_url()
    if not url:
        cure = "run `prefect server start` and set PREFECT_API_URL"
        yield Diagnosis(
            "prefect api", "missing", "not configured; every flow starts a temporary server", cure
        )
        return
    cure = "start the server, or unset PREFECT_API_URL"
    yield _answers("prefect api", url, f"{url.rstrip('/')}/health", cure)


def _prefect_profile_url() -> str | None:
    """PREFECT_API_URL of the active profile, read from its file, because importing prefect takes seconds."""
    import tomllib
    from pathlib import Path

    folder = Path(os.environ.get("PREFECT_HOME") or "~/.prefect").expanduser()
    try:
        data = tomllib.loads((folder / "profiles.toml").read_text())
    except (OSError, ValueError):
        return None
    active = os.environ.get("PREFECT_PROFILE") or data.get("active", "")
    url = data.get("profiles", {}).get(active, {}).get("PREFECT_API_URL")
    return url if isinstance(url, str) else None


def _mlflow() -> Iterator[Diagnosis]:
    if not _importable("mlflow"):
        return
    stores = {"mlflow tracking": mlflow_tracking_uri(), "mlflow registry": mlflow_registry_uri()}
    if stores["mlflow tracking"] == stores["mlflow registry"]:
        stores = {"mlflow store": stores["mlflow tracking"]}
    for name, uri in stores.items():
        yield _mlflow_store(name, uri)


def _mlflow_store(name: str, uri: str) -> Diagnosis:
    file = sqlite_file(uri)
    if file is not None:
        # The file or, before it exists, the nearest existing folder must be writable.
        place = next(path for path in (file, *file.parents) if path.exists())
        if os.access(place, os.W_OK) and (place == file or place.is_dir()):
            return Diagnosis(name, "ok", str(file) if place == file else f"{file} (created on first use)")
        cure = "check its permissions, or set MLFLOW_TRACKING_URI"
        return Diagnosis(name, "broken", f"permission denied: {file} is not writable", cure)
    if uri.startswith(("http://", "https://")):
        cure = "start the server, or check MLFLOW_TRACKING_URI and MLFLOW_REGISTRY_URI"
        return _answers(name, uri, f"{uri.rstrip('/')}/health", cure)
    return Diagnosis(name, "ok", f"{without_secrets(uri)} (not checked)")


def _answers(name: str, uri: str, health: str, cure: str) -> Diagnosis:
    """Send one request without retry. Any status below 500, even 401, shows that the server runs."""
    from urllib.error import HTTPError
    from urllib.request import urlopen

    shown = without_secrets(uri)
    try:
        with urlopen(health, timeout=_ANSWER_SECONDS) as answer:  # noqa: S310  the user's own setting
            return Diagnosis(name, "ok", f"{shown} responds ({answer.status})")
    except HTTPError as error:
        state: State = "broken" if error.code >= 500 else "ok"  # noqa: PLR2004  the server's own fault
        return Diagnosis(
            name, state, f"{shown} responds with HTTP {error.code}", cure if state == "broken" else None
        )
    except (OSError, ValueError) as error:
        return Diagnosis(
            name, "broken", f"{shown} does not respond: {reason_of(error, _ANSWER_SECONDS)}", cure
        )


def _left_behind() -> Iterator[Diagnosis]:
    """The files and runs that ended processes have left behind outside of their targets."""
    found = service("janitor").left_behind()
    if found:
        detail = f"{plural(len(found), 'leftover')} of processes that have ended, the first {found[0].path}"
        command = Command("clean", str(found[0].path.parent))
        cure = Cure("run {}; each conversion and each night removes them, too", command)
        yield Diagnosis("left behind", "ok", detail, cure)
    runs = service("janitor").left_runs()
    if runs:
        ended = plural(len(runs), "registration")
        detail = f"{ended} of processes that have ended may have left a run open in {runs[0].store}"
        cure = Cure("run {}; each registration and each night ends it, too", Command("clean", str(home())))
        yield Diagnosis("left behind", "ok", detail, cure)


def _sandbox() -> Diagnosis:
    """What the kernel has to limit native checks: Landlock for files, seccomp for calls and the network."""
    version, seccomp = sandbox.landlock_version(), sandbox.has_seccomp()
    landlock = f"files are limited (Landlock {version})" if version else "files are not limited (no Landlock)"
    calls = (
        "seccomp limits calls and the network" if seccomp else "calls and the network are not (no seccomp)"
    )
    if not sandbox.is_wanted():
        detail = f"native checks run without it: {sandbox.SWITCH} is off"
        return Diagnosis("sandbox", "missing", detail, f"unset {sandbox.SWITCH}")
    detail = f"native checks: {landlock}, {calls}"
    if version and seccomp:
        return Diagnosis("sandbox", "ok", detail)
    cure = "run native checks on Linux 5.13 or later with Landlock (lsm=landlock,...), where no container forbids it"
    return Diagnosis("sandbox", "missing", detail, cure)


def _disk() -> Diagnosis:
    place = next(path for path in (home(), *home().parents) if path.exists())
    free = shutil.disk_usage(place).free
    detail = f"{show_size(free)} free at {place}"
    if free < _LOW_SPACE:
        return Diagnosis("disk", "broken", detail, "free some space")
    return Diagnosis("disk", "ok", detail)
