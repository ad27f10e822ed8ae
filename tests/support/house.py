"""The files of the house, and how tests of its rules read them."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


# A room may import from itself and from the rooms before it.
ROOMS = ("wherry", "integrations", "tasks", "flows")


SOURCES = sorted(
    path for folder in (*ROOMS, "infra", "tests") for path in (ROOT / folder).rglob("*.py")
    if not path.is_relative_to(ROOT / "wherry") or path.parts[len(ROOT.parts) + 1] not in ROOMS
)  # fmt: skip


SCRIPTS = [ROOT / "infra" / name for name in ("test", "demo", "bench", "screenshots", "faults", "house")]


MODULES = [path for path in SOURCES if path.relative_to(ROOT).parts[0] in ROOMS]


def label(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()
