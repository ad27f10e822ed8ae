"""The children of the native level, forked from processes that have imported the libraries, and watched.

What a child imports, inherits and may use is tested with real ones in tests/runtime and tests/verifier; here the
question is what the libraries do with thousands of files.
"""

from __future__ import annotations

import subprocess
from typing import Any

from tests.support.warm import Warm
from tests.support.warm_native import LIBRARIES, WarmLoaders
from wherry.runtime import child
from wherry.verifier.native import _VARIABLES


class WatchedLoaders(WarmLoaders):
    """A waiting process for each kind of library, whose forks tell what they run."""

    def run(self, *values: Any, **named: Any) -> child.ChildResult:
        """As `child.run`, which says of a child that takes too long that it gave no answer."""
        try:
            return super().run(*values, **named)
        except subprocess.TimeoutExpired as error:
            raise child.NoAnswerError("the child took too long") from error

    def __missing__(self, kind: str) -> Warm:
        env = child.environment({**_VARIABLES, "HF_HOME": self._folder})
        self[kind] = Warm(
            child.command("tests.support.warm"),
            env,
            (*LIBRARIES[kind], "infra.attacks.watched"),
            self._folder,
        )
        # A fork cannot wait for the process of its parent, and would take it for ended.
        self[kind]._process.poll = lambda: None  # type: ignore[method-assign]
        return self[kind]
