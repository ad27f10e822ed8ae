"""Members of enumerations as CPython 3.11.0 to 3.11.3 pickles them (Debian 12 has 3.11.2): `getattr(class, name)`."""

from __future__ import annotations

import enum
import pickle

import pytest

import wherry
from tests.support.torch import torch
from wherry.errors import HostileError

dcp = pytest.importorskip("torch.distributed.checkpoint")
metadata = pytest.importorskip("torch.distributed.checkpoint.metadata")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture
def by_name(monkeypatch):
    """This Python pickles members as those versions do."""
    monkeypatch.setattr(
        enum.Enum, "__reduce_ex__", lambda self, _protocol: (getattr, (type(self), self.name))
    )


def test_a_save_of_python_3_11_2_is_read_and_converted(by_name, tmp_path):
    state = {"w": torch.arange(12.0).reshape(3, 4), "step": 3}
    dcp.save(state, checkpoint_id=tmp_path / "a")
    assert b"getattr" in (tmp_path / "a" / ".metadata").read_bytes()
    with wherry.open(tmp_path / "a") as checkpoint:
        assert (checkpoint.read(("w",)) == state["w"].numpy()).all()
    wherry.convert(tmp_path / "a", tmp_path / "b", to="dcp", lineage=False)
    loaded = {"w": torch.zeros(3, 4)}
    dcp.load(loaded, checkpoint_id=tmp_path / "b")
    assert torch.equal(loaded["w"], state["w"])


class Call:
    """Pickled as a call of `getattr`."""

    def __init__(self, *args):
        self.args = args

    def __reduce__(self):
        return getattr, self.args


@pytest.mark.parametrize("args", [
    (metadata.Metadata, "__init__"), (metadata._MEM_FORMAT_ENCODING, "__class__"),
    (metadata._MEM_FORMAT_ENCODING, "TORCH_CONTIGUOUS_FORMAT", None), ("text", "join"),
    (metadata._MEM_FORMAT_ENCODING,),
])  # fmt: skip
def test_nothing_else_is_named(args, tmp_path):
    dcp.save({"w": torch.zeros(3)}, checkpoint_id=tmp_path / "a")
    file = tmp_path / "a" / ".metadata"
    root = pickle.loads(file.read_bytes())
    root.planner_data = Call(*args)
    file.write_bytes(pickle.dumps(root))
    with pytest.raises(HostileError, match=r"builtins\.getattr"):
        wherry.convert(tmp_path / "a", tmp_path / "b", to="dcp", lineage=False)
    assert not (tmp_path / "b").exists()
