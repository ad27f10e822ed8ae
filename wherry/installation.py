"""How wherry was installed, and the commands that add to it: by pip, by uv, as a tool of uv or pipx, or run by uvx.

A command that fits another way of installing would fail, or change another environment: a tool of uv or pipx has no
`pip` on the PATH, a wherry that was installed from a folder is not the one of a package index, and uvx runs it in an
environment of uv's cache, which nothing else may change.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
import tomllib
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

_NAME = "wherry"


def extra_command(extra: str) -> str:
    """The command that adds an extra of wherry to the installation that runs."""
    receipt = _table_of_tool()
    if _is_run_by_uvx():
        return " ".join(["uvx --from", _requirement(sorted({*_installed_extras(), extra})), _NAME])
    if receipt is None:
        return f"{_installer()} {_requirement([extra])}"
    own, others = _requirements(receipt)
    extras = sorted({*own.get("extras", ()), extra})
    return " ".join(["uv tool install", _requirement(extras), *(f"--with {name}" for name in others)])


def package_command(*requirements: str, upgrade: bool = False) -> str:
    """The command that adds packages to the installation that runs.

    Args:
        requirements: the packages, each with its range of versions if there is one.
        upgrade: whether those that are installed are to be replaced by newer ones.
    """
    newest = ["--upgrade"] if upgrade else []
    receipt = _table_of_tool()
    if _is_run_by_uvx():
        extra = [f"--with {shlex.quote(name)}" for name in requirements]
        return " ".join(["uvx", *newest, "--from", _requirement(_installed_extras()), *extra, _NAME])
    if receipt is None:
        return f"{_installer()} {shlex.join([*newest, *requirements])}"
    own, others = _requirements(receipt)
    added = [f"--with {name}" for name in (*others, *map(shlex.quote, requirements))]
    return " ".join(["uv tool install", *newest, _requirement(sorted(own.get("extras", ()))), *added])


def _requirement(extras: list[str]) -> str:
    """The requirement on wherry with extras, from where it was installed, quoted for a shell."""
    names = f"[{','.join(extras)}]" if extras else ""
    origin = _origin()
    url = str(origin.get("url", ""))
    place = unquote(urlsplit(url).path) if url.startswith("file:") else ""
    commit = origin.get("vcs_info", {})
    if place:
        editable = "-e " if origin.get("dir_info", {}).get("editable") else ""
        return f"{editable}{shlex.quote(f'{place}{names}')}"
    if commit:
        return shlex.quote(f"{_NAME}{names} @ {commit['vcs']}+{url}@{commit['commit_id']}")
    return shlex.quote(f"{_NAME}{names} @ {url}" if url else f"{_NAME}{names}")


def _origin() -> dict[str, Any]:
    """Where wherry was installed from, in the form of `direct_url.json`; empty for a package index."""
    try:
        text = distribution(_NAME).read_text("direct_url.json")
    except PackageNotFoundError:  # run from its sources
        text = None
    with suppress(ValueError):
        found = json.loads(text or "{}")
        if isinstance(found, dict):
            return found
    return {}


def _is_run_by_uvx() -> bool:
    """Whether the environment is one of uv's cache."""
    return Path(sys.prefix).parent.name.startswith("archive-v")


def _installed_extras() -> list[str]:
    """The extras whose packages are there, which is all that an environment of uvx says of them."""
    needs: dict[str, set[str]] = {}
    for line in distribution(_NAME).requires or ():
        found = re.match(r"([\w.-]+).*;.*\bextra == ['\"]([\w.-]+)['\"]", line)
        if found and found[1] != _NAME:
            needs.setdefault(found[2], set()).add(found[1])
    return sorted(extra for extra, names in needs.items() if all(map(_is_installed, names)))


def _is_installed(name: str) -> bool:
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True


def _installer() -> str:
    """The command that installs into the environment that runs."""
    prefix, python = Path(sys.prefix), Path(sys.executable)
    if (prefix / "pipx_metadata.json").is_file() and prefix.parent.name == "venvs":
        return f"pipx runpip {shlex.quote(prefix.name)} install"
    if find_spec("pip") is None and shutil.which("uv"):
        return f"uv pip install --python {shlex.quote(str(python))}"
    pip = shutil.which("pip")
    if pip is not None and Path(pip).parent == python.parent:
        return "pip install"
    return f"{shlex.quote(str(python))} -m pip install"


def _table_of_tool() -> dict[str, Any] | None:
    """The table in which uv describes a tool that it installed; None if wherry is no tool of uv."""
    with suppress(OSError, ValueError):
        text = (Path(sys.prefix) / "uv-receipt.toml").read_text("utf-8")
        return tomllib.loads(text).get("tool", {})
    return None


def _requirements(receipt: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Split a tool's requirements into the one on wherry and the names of the others."""
    rows = [row for row in receipt.get("requirements", ()) if isinstance(row, dict)]
    own = next((row for row in rows if row.get("name") == _NAME), {})
    return own, [shlex.quote(str(row.get("name"))) for row in rows if row is not own]
