"""The command line in forks of a process that has imported wherry and MLflow: what a verb does, not how it starts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.warm import Warm

_ROOT = Path(__file__).parents[2]
_AT_START = ("LC_", "LANG", "PYTHON")  # what an interpreter reads when it starts
_SECONDS = 120  # as `command`
_OURS = (
    *("wherry.cli", "wherry.converter.convert", "wherry.ledger.record", "wherry.prove.verify"),
    *("tensorstore", "zstandard", "tests.support.warm_formats"),
)  # fmt: skip


class WarmCommands(dict[tuple[tuple[str, str], ...], Warm]):
    """Runs `wherry`; a waiting process for each set of the variables that the interpreter reads at its start.

    Args:
        modules: what these import besides wherry.
    """

    def __init__(self, *modules: str) -> None:
        super().__init__()
        self._modules = (*_OURS, *modules)

    def __call__(
        self, *words: str | bytes | Path, env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """As `tests.support.command.command`."""
        whole = {**os.environ, **(env or {})}
        key = tuple(sorted((name, value) for name, value in whole.items() if name.startswith(_AT_START)))
        if key not in self:
            line = [sys.executable, "-m", "tests.support.warm"]
            self[key] = Warm(line, whole, self._modules, os.fspath(_ROOT))
        plain = [word if isinstance(word, bytes) else str(word) for word in words]
        code, output, errors = self[key].run(
            "wherry.cli", plain, cwd=str(Path.cwd()), env=whole, seconds=_SECONDS
        )
        said = (data.decode("utf-8", "surrogateescape") for data in (output, errors))
        return subprocess.CompletedProcess(plain, code, *said)

    def close(self) -> None:
        for one in self.values():
            one.close()
        self.clear()


@pytest.fixture(scope="session")
def warm_command() -> Iterator[WarmCommands]:
    commands = WarmCommands("wherry.integrations.mlflow")
    yield commands
    commands.close()


@pytest.fixture(scope="session")
def registry_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty database of MLflow to copy: its tables take seconds to make."""
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed")
    file = tmp_path_factory.mktemp("registry") / "mlflow.db"
    mlflow.MlflowClient(f"sqlite:///{file}", f"sqlite:///{file}").search_registered_models()
    return file
