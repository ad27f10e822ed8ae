"""The children of the native level, forked from processes that have imported the libraries already.

They stand in for `wherry.core.child.run` where a test asks what a library does with a checkpoint. What a child
imports, finds in its folder, inherits and may use is tested with real ones: tests/core/test_child.py, and one of
each loader in tests/prove/test_native_attacks.py.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping

import pytest

from tests.support.warm import Warm
from wherry.core import child
from wherry.prove.native import _VARIABLES

LIBRARIES = {
    "jax": ("wherry.integrations.native.with_jax", "jax.numpy", "flax.serialization", "orbax.checkpoint"),
    "torch": (
        *("wherry.integrations.native.with_torch", "wherry.integrations.native.with_dcp", "safetensors.torch"),
        *("wherry.integrations.native.logits", "transformers.models.llama.modeling_llama"),
        *("wherry.integrations.native.serve", "transformers.models.qwen2.modeling_qwen2", "jinja2.sandbox"),
    ),
}  # fmt: skip


class WarmLoaders(dict[str, Warm]):
    """A waiting process for each kind of library, started when it is first needed."""

    libraries: Mapping[str, tuple[str, ...]] = LIBRARIES

    def __init__(self, folder: str) -> None:
        super().__init__()
        self._folder = folder

    def __missing__(self, kind: str) -> Warm:
        env = child.environment({**_VARIABLES, "HF_HOME": self._folder})
        self[kind] = Warm(child.command("tests.support.warm"), env, self.libraries[kind], self._folder)
        return self[kind]

    def run(self, module, words=(), *, purpose, limits, text="", variables=None):
        """As `child.run`, without a limit of memory; one that exceeds its time fails the test."""
        kind = "jax" if ".with_jax:" in json.loads(text).get("function", "") else "torch"
        with tempfile.TemporaryDirectory(dir=self._folder) as folder:
            env = child.environment(variables or {})
            code, output, errors = self[kind].run(
                module, words, cwd=folder, env=env, text=text, seconds=limits.seconds
            )
        return child.ChildResult(code, output.decode(), errors.decode(errors="replace"))


@pytest.fixture(scope="session")
def warm_loaders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmLoaders]:
    """One waiting process for each kind of library, for all tests of a worker."""
    loaders = WarmLoaders(os.fspath(tmp_path_factory.mktemp("warm")))
    yield loaders
    for one in loaders.values():
        one.close()


@pytest.fixture
def forked_loaders(monkeypatch: pytest.MonkeyPatch, warm_loaders: WarmLoaders) -> None:
    """The children of a test are forked from processes that have imported the library."""
    monkeypatch.setattr(child, "run", warm_loaders.run)
