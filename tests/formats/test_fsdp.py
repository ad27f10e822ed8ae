"""FSDP's rank files become whole tensors, bit for bit; the files are torch's own, with DTensors in every placement."""

from __future__ import annotations

from dataclasses import replace

import pytest

import wherry
from tests.support import rank_files
from tests.support.rank_files import Save
from wherry.errors import CorruptError, DamagedError, HostileError, IncompleteError, UnsupportedError
from wherry.integrations.containers.torch.archive import read_archive
from wherry.integrations.containers.torch.values import RANK_RULES
from wherry.integrations.formats import fsdp
from wherry.store.local_store import locate

torch = pytest.importorskip("torch")
ONE = {
    "a.weight": [[10, 3], "float32", ["S0"]], "b.weight": [[7, 2], "bfloat16", ["S0"]],
    "c.bias": [[2], "float32", ["S0"]], "d.norm": [[5], "float32", ["R"]],
    "e.weight": [[3, 4, 5], "float32", ["S1"]], "f.weight": [[6, 9], "bfloat16", ["S1"]],
    "g.scale": [[], "float32", ["R"]], "h.weight": [[2, 3, 5], "float16", ["S2"]],
}  # fmt: skip
TWO = {
    "a.weight": [[10, 3], "float32", ["R", "S0"]], "b.weight": [[12, 8], "float32", ["S0", "S1"]],
    "c.weight": [[9, 4], "bfloat16", ["S0", "S0"]], "d.norm": [[5], "float32", ["R", "R"]],
    "e.weight": [[6, 7], "float32", ["S1", "S0"]],
}  # fmt: skip


def raw(tensor):
    return (
        tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
        if tensor.dim()
        else tensor.numpy().tobytes()
    )


def require_whole(folder, whole):
    with wherry.open(folder) as checkpoint:
        assert checkpoint.detection.format == "fsdp"
        assert {path[0] for path in checkpoint.manifest.tensors} == set(whole)
        for name, tensor in whole.items():
            assert checkpoint.manifest.tensors[name,].shape == tuple(tensor.shape)
            assert checkpoint.read((name,)).tobytes() == raw(tensor), name


OTHER = {name: [[size + 3 for size in row[0]], *row[1:]] for name, row in ONE.items()}
HALF = {"a.weight": [[4, 2], "float32", ["S0"]]}
SAVES = {
    "1": Save([1], ONE), "2": Save([2], ONE), "3": Save([3], ONE), "4": Save([4], ONE), "2x2": Save([2, 2], TWO),
    "2x3": Save([2, 3], TWO), "other": Save([3], OTHER), "plain": Save([2], HALF, ("a.weight",)),
    "partial": Save([2], {"a.weight": [[4, 2], "float32", ["P"]]}),
}  # fmt: skip


@pytest.fixture(scope="module")
def saves(tmp_path_factory):
    return rank_files.save_all(tmp_path_factory.mktemp("fsdp"), SAVES)


@pytest.fixture
def saved(saves):
    return saves["3"]


@pytest.mark.parametrize("name", ["1", "2", "3", "4", "2x2", "2x3"])
def test_every_placement_gives_whole_tensors(saves, name):
    """Sizes that no number of ranks divides: parts are uneven, or empty."""
    require_whole(*saves[name])


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_torch_s_own_parts_put_together_are_the_tensors(saves, ranks):
    """As verl's merger does it: torch loads each rank's file, and joins the local parts along the dimension."""
    folder, _whole = saves[str(ranks)]
    files = [folder / f"model_world_size_{ranks}_rank_{rank}.pt" for rank in range(ranks)]
    loaded = [torch.load(file, weights_only=False) for file in files]
    with wherry.open(folder) as checkpoint:
        assert {path[0] for path in checkpoint.manifest.tensors} == set(loaded[0])
        for name, first in loaded[0].items():
            (placement,) = first.placements
            parts = [one[name].to_local() for one in loaded]
            joined = torch.cat(parts, placement.dim) if placement.is_shard() else parts[0]
            assert checkpoint.read((name,)).tobytes() == raw(joined), name


def copied(saved, tmp_path):
    target = tmp_path / "actor"
    target.mkdir()
    for file in saved[0].iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


def test_it_converts_and_verifies(saved, tmp_path):
    receipt = wherry.convert(saved[0], tmp_path / "out", to="safetensors", lineage=False)
    assert receipt.verification == receipt.verification | {"level": "digest", "ok": True}
    assert {row["rule"] for row in receipt.ignored} == {"training state"}


def test_a_missing_rank_is_named(saved, tmp_path):
    folder = copied(saved, tmp_path)
    (folder / "model_world_size_3_rank_1.pt").unlink()
    with pytest.raises(IncompleteError, match=r"model_world_size_3_rank_1\.pt") as caught:
        wherry.open(folder)
    assert caught.value.exit_code == 5


def test_a_rank_twice_is_hostile(saved, tmp_path):
    folder = copied(saved, tmp_path)
    file = folder / "model_world_size_3_rank_1.pt"
    file.write_bytes((folder / "model_world_size_3_rank_0.pt").read_bytes())
    with pytest.raises(HostileError, match="the same place") as caught:
        wherry.open(folder)
    assert caught.value.exit_code == 6


def test_parts_of_another_shape_are_hostile(saves, saved, tmp_path):
    """One rank's file of another save: its parts would overlap the others'."""
    folder, name = copied(saved, tmp_path), "model_world_size_3_rank_2.pt"
    (folder / name).write_bytes((saves["other"][0] / name).read_bytes())
    with pytest.raises(HostileError, match="different things"):
        wherry.open(folder)


def test_a_truncated_file_is_damaged(saved, tmp_path):
    folder = copied(saved, tmp_path)
    file = folder / "model_world_size_3_rank_1.pt"
    file.write_bytes(file.read_bytes()[:-500])
    with pytest.raises(DamagedError):
        wherry.open(folder)


def test_a_flipped_bit_is_found(saved, tmp_path):
    folder = copied(saved, tmp_path)
    file = folder / "model_world_size_3_rank_1.pt"
    data = bytearray(file.read_bytes())
    at = data.find(raw(saved[1]["a.weight"][4:8]))
    assert at > 0
    data[at] ^= 1
    file.write_bytes(bytes(data))
    with pytest.raises(CorruptError):
        wherry.convert(folder, tmp_path / "out", to="safetensors", lineage=False)
    assert not (tmp_path / "out").exists()


def test_what_is_no_tensor_of_torch_is_never_imported(saved, tmp_path):
    folder = copied(saved, tmp_path)
    torch.save({"a.weight": print}, folder / "model_world_size_3_rank_0.pt")
    with pytest.raises(HostileError, match="print"):
        wherry.open(folder)


@pytest.mark.parametrize(("name", "reason"), [("partial", "Partial"), ("plain", "plain")])
def test_what_nothing_says_is_refused(saves, name, reason):
    with pytest.raises(UnsupportedError, match=reason):
        wherry.open(saves[name][0])


@pytest.mark.parametrize(
    "change", [{"placements": (7,)}, {"placements": (1,)}, {"shape": (11, 3)}, {"shape": (1, 3)}], ids=str
)
def test_a_forged_placement_is_hostile(saves, change):
    """What a rank says of its part decides where it goes: it must be what torch's rule gives."""
    part = next(_parts_of(saves["2"][0]))
    assert fsdp._box(part, (2,), "a.weight", locate(saves["2"][0])) == ((0, 5), (0, 3))
    with pytest.raises(HostileError):
        fsdp._box(replace(part, **change), (2,), "a.weight", locate(saves["2"][0]))


def _parts_of(folder):
    place = locate(folder).join("model_world_size_2_rank_0.pt")
    for _name, part in fsdp._parts(0, read_archive(place, RANK_RULES, bare=True), place, 2):
        yield part
