"""Files that come with wherry: the deployments, work pools and automations of Prefect, and the commented wherry.toml.

They lie in `infra` of a clone, and in `wherry/packaged` of an installed wheel (see `pyproject.toml`).
"""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]


def package_path(name: str) -> Path:
    """The path of a file or folder that comes with wherry.

    Args:
        name: such as `wherry.toml`, `prefect.yaml` or `pools`.
    """
    installed = _PACKAGE / "packaged" / name
    return installed if installed.exists() else _PACKAGE.parent / "infra" / name
