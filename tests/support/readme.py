"""What the tests of README and `docs/` share: the pages, their blocks of code and the words of their commands."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
PAGES = {
    path.relative_to(ROOT / "docs").with_suffix("").as_posix(): path.read_text()
    for path in sorted((ROOT / "docs").rglob("*.md"))
}
TEXTS = {
    "README.md": README,
    "CONTRIBUTING.md": CONTRIBUTING,
    **{f"docs/{name}.md": text for name, text in PAGES.items()},
}
EVERYTHING = "\n".join(TEXTS.values())


def section(title: str, text: str = README) -> str:
    """The text below a heading of the second level."""
    return text.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def code(text: str, language: str) -> list[str]:
    """The code of a language in a text."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def blocks(page: str, language: str) -> list[str]:
    """The code of a language in a page of `docs/`."""
    return code(PAGES[page], language)


def commands(block: str) -> list[list[str]]:
    """The command lines of a block, each as words, without comments."""
    found = [shlex.split(line, comments=True) for line in block.replace("\\\n", "").splitlines()]
    return [words for words in found if words]


TRAINER, AUDITOR = blocks("trainers", "sh"), blocks("audit", "sh")
INSTALL, TRIAL, SERVERS, DEPLOY, FURTHER = blocks("platform", "sh")
SEVERAL, CONTAINERS = blocks("containers", "sh")
