"""Odd names of tensors: each target holds them, so that they come back, or refuses them (7) and leaves nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import wherry
from tests.support.forms import names_for, options_for
from tests.support.libraries import loaded
from tests.support.torch import as_bytes
from tests.support.variants import WRITTEN
from wherry.errors import HostileError, UnrepresentableError

LONG = "k" * 300
# What folders of other systems are recognised by.
WEIGHTS = (
    "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "flax_model.msgpack", "checkpoint",
    "consolidated.pth", "consolidated.00.pth", "__0_0.distcp", "adapter_model.safetensors",
)  # fmt: skip
OTHERS = (".metadata", "state", "items", "metadata", "params.json", "checkpoint_5")
ONE_FOLDER_EACH = ("t5x-legacy", "paxml")  # as they are written by default
PER_ARRAY = [("orbax", {"ocdbt": "false"}), ("penzai", {"ocdbt": "false"}), ("paxml", {})]


def saved(tmp_path, state):
    torch.save(state, tmp_path / "in.pt")
    return tmp_path / "in.pt"


def held_or_refused(source, out, to, options):
    """Whether the target holds the tensors; if not, nothing of it is left."""
    try:
        wherry.convert(source, out, to=to, family="none", options={**options, **options_for(to)})
    except UnrepresentableError:
        assert [path.name for path in out.parent.iterdir()] == [source.name]
        return False
    found = wherry.detect(out)
    assert (found.format, found.verdict) == (to, "ok"), f"{to} is not recognised afterwards"
    kept = sorted(as_bytes(tensor) for tensor in torch.load(source, weights_only=True).values())
    assert sorted(row[2] for row in loaded(to, out).values()) == kept
    return True


@pytest.mark.parametrize(
    "to", [name for name in WRITTEN if not name.startswith(("lingua", "gguf"))]
)  # which need a config
def test_a_key_of_300_characters(tmp_path, to):
    others = {name: torch.zeros(2) for name in names_for(to) or ["w"]}
    source = saved(tmp_path, {LONG: torch.ones(3), **others})
    assert held_or_refused(source, tmp_path / "out", to, {}) == (to not in ONE_FOLDER_EACH)


@pytest.mark.parametrize(("to", "options"), PER_ARRAY)
def test_a_key_that_no_file_system_takes_is_refused(tmp_path, to, options):
    source = saved(tmp_path, {LONG: torch.ones(3)})
    assert not held_or_refused(source, tmp_path / "out", to, options)
    short = saved(tmp_path, {"k" * 200: torch.ones(3)})
    assert held_or_refused(short, tmp_path / "out", to, options)


def test_the_cure_for_paxml_holds_it(tmp_path):
    assert held_or_refused(
        saved(tmp_path, {LONG: torch.ones(3)}), tmp_path / "out", "paxml", {"version": "1.2"}
    )


@pytest.mark.parametrize("name", [*WEIGHTS, *OTHERS])
def test_a_folder_of_an_array_is_not_taken_for_another_system(tmp_path, name):
    source = saved(tmp_path, {name: torch.ones(3), "w": torch.zeros(2)})
    assert held_or_refused(source, tmp_path / "out", "orbax", {"ocdbt": "false"}) == (name in OTHERS)


def test_a_tensor_that_is_called_like_a_file_of_weights_is_refused(tmp_path):
    source = saved(tmp_path, {"model.safetensors": torch.ones(3)})
    with pytest.raises(UnrepresentableError, match=r"'model\.safetensors' cannot be the folder of an array"):
        wherry.convert(source, tmp_path / "out", to="orbax", options={"ocdbt": "false"})
    assert held_or_refused(source, tmp_path / "out", "orbax", {})


def test_an_empty_key_of_a_tree_comes_back(tmp_path):
    import orbax.checkpoint as ocp

    tree = {"": np.ones(3, "f4"), "a": {"": np.zeros(2, "f4"), "b": np.ones(1, "f4")}}
    ocp.PyTreeCheckpointer().save(tmp_path / "original", tree)
    with wherry.open(tmp_path / "original") as found:
        assert set(found.manifest.tensors) == {("",), ("a", ""), ("a", "b")}
    wherry.convert(tmp_path / "original", tmp_path / "m.pt", to="torch-zip")
    wherry.convert(tmp_path / "m.pt", tmp_path / "ours", to="orbax")
    again = ocp.PyTreeCheckpointer().restore(tmp_path / "ours")
    np.testing.assert_array_equal(again["a"][""], tree["a"][""])
    assert wherry.verify(tmp_path / "ours", against=tmp_path / "original").ok


@pytest.mark.parametrize("to", ["npz", "safetensors", "huggingface"])
def test_a_file_that_is_one_tensor_has_no_name_for_it(tmp_path, to):
    source = saved(tmp_path, torch.ones(2))
    with pytest.raises(UnrepresentableError, match="cannot hold a tensor without a name") as error:
        wherry.convert(source, tmp_path / "out", to=to, family="none")
    assert "in a dict" in error.value.cure
    assert [path.name for path in tmp_path.iterdir()] == ["in.pt"]


@pytest.mark.parametrize("name", ["../up", "/abs", "a/../../b", "\\abs", "a\\..\\b"])
def test_a_member_of_an_archive_stays_in_its_folder(tmp_path, name):
    source = saved(tmp_path, {name: torch.ones(2)})
    with pytest.raises(UnrepresentableError, match="would leave the folder"):
        wherry.convert(source, tmp_path / "out.npz", to="npz")
    assert [path.name for path in tmp_path.iterdir()] == ["in.pt"]
    np.savez(tmp_path / "foreign.npz", **{name: np.ones(2)})
    with pytest.raises(HostileError, match="would leave the folder"):
        wherry.open(tmp_path / "foreign.npz")


def test_dots_in_a_name_are_harmless(tmp_path):
    assert held_or_refused(saved(tmp_path, {"a..b/c": torch.ones(2)}), tmp_path / "out", "npz", {})
