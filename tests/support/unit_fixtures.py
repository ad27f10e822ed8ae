"""What the tests of units and of carriers share: a small model, and parts of a few KiB."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from tests.support.object_stores import model, small_parts
from wherry.core.tensorspec import TensorSpec
from wherry.workers import work as working
from wherry.workers.unit import cut


@pytest.fixture(scope="session")
def source(tmp_path_factory):
    """A Hugging Face folder of 1.2 MB in 12 tensors."""
    return model(tmp_path_factory.mktemp("source") / "model")


@pytest.fixture(autouse=True)
def small():
    """Parts of a few KiB, and workers that look often."""
    with small_parts(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(working, "LOOK_SECONDS", 0.05)
        yield


@dataclass(frozen=True)
class PlanContents:
    """What a plan moves, as far as its units depend on it: bytes of the tensors, and of those that are stored."""

    plan: str
    pairs: Mapping
    nbytes: Mapping
    stored: Mapping
    made_of: Callable
    is_view: bool = False

    def cut(self, files, unit_bytes):
        """The units of a plan with these contents."""

        def manifest(sizes):
            specs = {path: TensorSpec(path, (nbytes,), "uint8") for path, nbytes in sizes.items()}
            return SimpleNamespace(tensors=specs)

        original = SimpleNamespace(manifest=manifest(self.stored))
        source = SimpleNamespace(original=original, made_of=self.made_of, is_view=self.is_view)
        plan = SimpleNamespace(digest=self.plan, pairs=self.pairs, manifest=manifest(self.nbytes))
        return cut(source, plan, files, unit_bytes)
