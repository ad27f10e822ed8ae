"""Conversions between systems whose chunks are no runs of a tensor's bytes: carried in boxes, proved from storage."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import wherry
from tests.support.families import LLAMA as CONFIG
from tests.support.families import SIZES, made
from tests.support.systems import carry, hashes
from wherry.converter import job
from wherry.core.digest import weights_digest
from wherry.errors import MismatchError
from wherry.families import load_family
from wherry.kernels import load
from wherry.mover import decode, move, source
from wherry.mover.output import Output
from wherry.transform import groups


@pytest.fixture
def boxes(monkeypatch):
    """Tensors that went in boxes, where those above 16 KiB do."""
    monkeypatch.setattr("wherry.mover.move.LARGEST_BAND", 1 << 14)
    monkeypatch.setattr("wherry.transform.view._BAND", 1 << 13)
    found, cut = [], move._boxes

    def spied(source, grids):
        found.append(source.path)
        return cut(source, grids)

    monkeypatch.setattr(move, "_boxes", spied)
    return found


@pytest.fixture
def wide(tmp_path):
    """A Hugging Face Llama whose matrices are above 16 KiB."""
    return saved(tmp_path / "hf", embed=64)


def saved(folder, embed):
    family = load_family("llama")
    sizes = {**SIZES, "embed": embed, "ffn": 96, "layer": 4, "pair": 8}  # heads of 16: MaxText scales by 4
    tensors = made(family, "huggingface", {}, sizes=sizes).tensors
    folder.mkdir()
    named = {path[0]: array for path, array in tensors.items()}
    save_file(named, folder / "model.safetensors", metadata={"format": "pt"})
    config = {**CONFIG, "hidden_size": embed, "intermediate_size": 96, "num_hidden_layers": 4, "head_dim": 16}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_large_stacks_go_in_boxes_both_ways(wide, boxes, tmp_path):
    """A stack with its layers on axis 1, transposed, in chunks of one layer: a band of it would hold all layers."""
    first = carry(wide, tmp_path / "scanned", "maxtext")
    up = ("params", "params", "decoder", "layers", "mlp", "wi_1", "kernel")
    assert up in boxes
    with wherry.open(tmp_path / "scanned") as stacked, wherry.open(wide) as source:
        for layer in range(4):
            one = source.read(f"model.layers.{layer}.mlp.up_proj.weight")
            np.testing.assert_array_equal(stacked.read(up)[:, layer], one.T)
    carry(tmp_path / "scanned", tmp_path / "apart", "maxtext", options={"scan_layers": "false"})
    boxes.clear()
    again = carry(tmp_path / "apart", tmp_path / "again", "maxtext", options={"scan_layers": "true"})
    assert up in boxes
    assert again.target.weights_digest == first.target.weights_digest
    carry(tmp_path / "again", tmp_path / "back", "huggingface")
    assert hashes(tmp_path / "back") == hashes(wide)


@pytest.mark.parametrize(("more", "infinite"), [({}, 0), ({"dtype": "float16", "allow_overflow": True}, 4)])
def test_what_boxes_lose_is_counted_and_is_no_damage(boxes, tmp_path, more, infinite):
    """The scale of the queries takes bits of values that underflow; what overflows by request does not come back."""
    wide = saved(tmp_path / "hf", embed=160)  # kernels of queries above 64 KiB, also in float16
    file = wide / "model.safetensors"
    tensors = load_file(file)
    for name in tensors:
        if "q_proj" in name:
            tensors[name].reshape(-1)[:3] = 3e-45, 1.3e-38, 1e6
    save_file(tensors, file, metadata={"format": "pt"})
    receipt = carry(wide, tmp_path / "out", "maxtext", **more)
    query = ("params", "params", "decoder", "layers", "self_attention", "query", "kernel")
    assert query in boxes
    assert not receipt.lossless
    [row] = [row for row in receipt.losses if row["path"] == "/".join(query)]
    assert (row["zero"], row["infinite"]) == (8 if infinite else 4, infinite)
    assert row["error"] > 0


def test_a_box_that_is_written_wrongly_is_not_committed(wide, boxes, tmp_path, monkeypatch):
    read = source.fill

    def spoil(access, spec, region, out):
        read(access, spec, region, out)
        if spec.path[-2:-1] == ("wi_1",):
            out[-1] ^= 0x40

    monkeypatch.setattr(source, "fill", spoil)
    with pytest.raises(MismatchError, match="differs from the source") as caught:
        wherry.convert(wide, tmp_path / "out", to="maxtext", lineage=False)
    assert "up_proj.weight" in caught.value.path
    assert not (tmp_path / "out").exists()


@pytest.fixture
def at_once(boxes, monkeypatch):
    """As `boxes`, but short runs are hashed in the pass too, as long ones are; what is read again is noted."""
    if load() is None:
        pytest.skip("no C compiler")
    monkeypatch.setattr("wherry.core.digest.SHORTEST_RUN", 1)
    monkeypatch.setattr("wherry.core.digest._LEAST_TOGETHER", 1)
    again: list[str] = []
    monkeypatch.setattr("wherry.converter.proof.prove_boxes", lambda *_words, **_more: again.append("target"))
    digest = groups.digest_moves

    def noted(specs, source):
        specs = list(specs)
        again.extend("/".join(spec.path) for spec in specs)
        return digest(specs, source)

    monkeypatch.setattr(groups, "digest_moves", noted)
    return again


def weights_of(folder):
    """The weights digest of a checkpoint that is read for it."""
    return weights_digest(wherry.inspect(folder, digest=True).manifest.digests, "blake3")


def test_boxes_and_their_sources_are_hashed_in_the_pass_that_moves_them(wide, at_once, boxes, tmp_path):
    receipt = carry(wide, tmp_path / "out", "maxtext")
    assert boxes
    assert at_once == []
    assert receipt.target.weights_digest == weights_of(tmp_path / "out")
    assert receipt.source.weights_digest == weights_of(wide)
    assert carry(tmp_path / "out", tmp_path / "back", "huggingface").target.weights_digest
    assert hashes(tmp_path / "back") == hashes(wide)


def test_leaves_that_are_put_aside_give_the_same_digests(wide, at_once, tmp_path, monkeypatch):
    """Open leaves of the source take little memory: what has come of them is kept as values in between."""
    monkeypatch.setattr("wherry.mover.decode._MOST_OPEN", -1)
    asides, real = [], decode.DecodedReader.take_gathered

    def looked_at(self, specs):
        asides.extend(values for path, values in self._aside.items() if path not in self._gathered)
        return real(self, specs)

    monkeypatch.setattr(decode.DecodedReader, "take_gathered", looked_at)
    receipt = carry(wide, tmp_path / "out", "maxtext")
    assert at_once == []
    assert receipt.source.weights_digest == weights_of(wide)
    assert asides
    assert not any(values.parts for values in asides), "of a tensor that has come as a whole only hashes stay"


def test_boxes_are_read_back_as_they_are_stored(wide, at_once, boxes, tmp_path, monkeypatch):
    """While others are written, and not through the reader of the finished target."""
    read, real = [], job.hash_checkpoint

    def noted(checkpoint, *words, paths, **more):
        read.extend(checkpoint.manifest.tensors[path] for path in paths)
        return real(checkpoint, *words, paths=paths, **more)

    monkeypatch.setattr(job, "hash_checkpoint", noted)
    receipt = carry(wide, tmp_path / "out", "maxtext")
    assert receipt.verification["ok"]
    assert boxes
    assert all(spec.nbytes <= move.SMALL for spec in read), "small tensors are read together"


def test_a_box_that_storage_alters_is_not_committed(wide, at_once, tmp_path, monkeypatch):
    deliver = Output.deliver

    def spoil(self, move, data, losses):
        if move.box and move.source[-2] == "wi_1":
            data[-1] ^= 0x40
        deliver(self, move, data, losses)

    monkeypatch.setattr(Output, "deliver", spoil)
    with pytest.raises(MismatchError, match="read-back differs") as caught:
        wherry.convert(wide, tmp_path / "out", to="maxtext", lineage=False)
    assert "wi_1" in caught.value.path
    assert not (tmp_path / "out").exists()


def test_a_resumed_run_reads_only_what_an_earlier_one_has_hashed(wide, at_once, boxes, tmp_path, monkeypatch):
    deliver, left = Output.deliver, [9]

    def stop(self, move, data, losses):
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        deliver(self, move, data, losses)

    monkeypatch.setattr(Output, "deliver", stop)
    with pytest.raises(KeyboardInterrupt):
        wherry.convert(wide, tmp_path / "out", to="maxtext", lineage=False)
    monkeypatch.undo()
    receipt = carry(wide, tmp_path / "out", "maxtext")
    assert receipt.target.weights_digest == carry(wide, tmp_path / "whole", "maxtext").target.weights_digest
    assert receipt.source.weights_digest == weights_of(wide)
