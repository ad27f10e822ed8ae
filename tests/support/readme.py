"""What the tests of README share: its sections, its blocks of code and the words of its commands."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def section(title: str) -> str:
    """The text below a heading of the second level."""
    return README.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def blocks(title: str, language: str) -> list[str]:
    """The code of a language in a section."""
    return re.findall(rf"^```{language}\n(.*?)^```", section(title), re.DOTALL | re.MULTILINE)


def commands(block: str) -> list[list[str]]:
    """The command lines of a block, each as words, without comments."""
    found = [shlex.split(line, comments=True) for line in block.replace("\\\n", "").splitlines()]
    return [words for words in found if words]


TRAINER, AUDITOR = blocks("For trainers", "sh"), blocks("For auditors", "sh")
TRIAL, SERVERS, DEPLOY, CONTAINERS = blocks("For platform engineers", "sh")
