"""Read-back in the same breath: what is durable is compared while the rest is written, and nothing is left out."""

from __future__ import annotations

import json
import struct
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import wherry
from tests.support.forms import options_for
from wherry.core.digest import LEAF
from wherry.core.tensorspec import Span
from wherry.errors import MismatchError
from wherry.formats.format import Extent
from wherry.integrations.containers.zarr.reader import ArrayReader
from wherry.mover import chunk_writer, readback
from wherry.mover.move import Move
from wherry.mover.readback import FilesBeingWritten, ReadBack
from wherry.target.files import FlatFiles

MIB = 1 << 20


@pytest.fixture
def source(tmp_path):
    """Tensors that begin and end inside blocks: of several moves, of several leaves, and a small one."""
    generator = np.random.default_rng(0)
    held = {
        "large": generator.integers(0, 255, 17 * MIB + 13, np.uint8),
        "middle": generator.normal(size=(300, 1000)).astype(np.float32),
        "small": np.arange(7.0),
    }
    path = tmp_path / "source.safetensors"
    save_file(held, path)
    return path


@pytest.fixture
def proved(monkeypatch):
    """The key paths that the pass proved, and those that the reader read again."""
    seen = {"proved": set(), "read": []}
    prove, read = ReadBack.proved, readback.read_span

    def watched(self, written):
        seen["proved"] |= prove(self, written)
        return prove(self, written)

    def reading(*arguments, **options):
        seen["read"].append(options)
        return read(*arguments, **options)

    monkeypatch.setattr(ReadBack, "proved", watched)
    monkeypatch.setattr(readback, "read_span", reading)
    return seen


RAW = [
    ("safetensors", {}),
    ("huggingface", {}),
    ("dcp", {}),
    ("torch-zip", {}),
    ("npz", {}),
    ("flax-msgpack", {}),
    ("orbax", {"compression": "none"}),
    ("orbax", {"compression": "none", "ocdbt": False}),
]


@pytest.mark.parametrize(
    ("to", "options"), RAW, ids=lambda one: one if isinstance(one, str) else "-".join(map(str, one))
)
def test_tensors_that_lie_as_they_are_are_proved_in_the_pass(to, options, source, tmp_path, proved):
    receipt = wherry.convert(source, tmp_path / "out", to=to, family="none", options=options)
    assert {path[-1] for path in proved["proved"]} == {"large", "middle"}
    assert any(options.get("straight") for options in proved["read"])
    assert receipt.verification["ok"]
    assert wherry.verify(tmp_path / "out", level="digest").ok


ENCODED = [
    ("orbax", {"compression": "zstd"}),
    ("orbax", {"compression": "zstd", "ocdbt": False}),
    ("orbax", {"compression": "zstd", "zarr": "3"}),
    ("maxtext", {"compression": "zstd"}),
    ("paxml", {"compression": "zstd"}),
    ("t5x-orbax", {"compression": "zstd"}),
    ("t5x-legacy", {"compression": "gzip"}),
    ("t5x-legacy", {"compression": "zstd"}),
]


@pytest.mark.parametrize(
    ("to", "options"),
    ENCODED,
    ids=lambda one: one if isinstance(one, str) else "-".join(map(str, one.values())),
)
def test_chunks_in_a_codec_are_decoded_in_the_pass(to, options, source, tmp_path, proved):
    receipt = wherry.convert(
        source, tmp_path / "out", to=to, family="none", options={**options, **options_for(to)}
    )
    assert {path[-1] for path in proved["proved"]} == {"large", "middle"}
    assert receipt.verification["ok"]
    assert wherry.verify(tmp_path / "out", level="digest").ok


def test_a_part_waits_until_all_its_files_can_be_read(source):
    with wherry.open(source) as opened:
        spec = next(one for one in opened.manifest.tensors.values() if one.path[-1] == "large")
        (whole,) = opened.reader.access(spec).extents
    files = [whole.location.parent.join(name) for name in ("a", "b")]
    open_files = set()

    class Halves:
        def extents(self, path, where):
            return tuple(Extent(file, 0, where.nbytes // 2) for file in files)

    being_written = FilesBeingWritten(lambda place: place.path in open_files)
    back = ReadBack(Halves(), {spec.path: spec}, "out", being_written)
    back.add([Move(spec.path, Span(0, 2 * MIB), None)])
    seen = []
    for place in files:
        seen.append(len(list(back.parts())))
        open_files.add(place.path)
    assert seen == [0, 0]
    assert [part.move.span for part in back.parts()] == [Span(0, 2 * MIB)]
    assert not list(back.parts())


def test_without_verification_nothing_is_read_back(source, tmp_path, proved):
    wherry.convert(source, tmp_path / "out", to="dcp", verify="none")
    assert not proved["proved"]
    assert not proved["read"]


def damaging(monkeypatch, folder, pattern, values):
    """Storage that alters a byte of a staged file as soon as these values in it are durable."""
    real, done = FlatFiles.sync, []

    def sync(self):
        there = [(file, file.read_bytes().find(values)) for file in folder.glob(pattern) if not done]
        real(self)
        for file, offset in there:
            if offset >= 0:
                done.append(file)
                flip(file, offset)

    monkeypatch.setattr(FlatFiles, "sync", sync)


def flip(file, offset):
    with file.open("r+b") as opened:
        opened.seek(offset)
        byte = opened.read(1)
        opened.seek(offset)
        opened.write(bytes([byte[0] ^ 1]))


def test_what_storage_altered_is_found_at_once_and_named(source, tmp_path, monkeypatch):
    monkeypatch.setattr("wherry.mover.output._GROUP_BYTES", MIB)
    values = load_file(source)["large"][LEAF + 5000 :][:64].tobytes()
    damaging(monkeypatch, tmp_path, ".wherry-*/out", values)
    finished = []
    monkeypatch.setattr("wherry.converter.job.finish", finished.append)
    with pytest.raises(
        MismatchError, match=r"read-back differs from what was written \(first difference in leaf 1\)"
    ) as caught:
        wherry.convert(source, tmp_path / "out", to="safetensors")
    assert caught.value.path == "large"
    assert not finished, "it was found before the container was completed"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source.safetensors"]


@pytest.mark.parametrize(
    ("at", "words"), [(0, "cannot be decoded"), (0.5, "first difference in leaf 0")], ids=["frame", "values"]
)
def test_a_chunk_that_storage_altered_is_found_at_once(source, tmp_path, monkeypatch, at, words):
    monkeypatch.setattr("wherry.mover.output._GROUP_BYTES", MIB)
    real, finished, done = chunk_writer._PackedFiles.sync, [], []

    def sync(self):
        real(self)
        number = next(n for n in range(len(self._chunks.grids)) if self._chunks.name(n) == "large/0")
        if not done and number in self._places and number not in self._fresh:
            done.append(self.place(number))
            place = Path(self._folder.path) / done[0].file
            flip(place, done[0].offset + int(done[0].nbytes * at))

    monkeypatch.setattr(chunk_writer._PackedFiles, "sync", sync)
    monkeypatch.setattr("wherry.converter.job.finish", finished.append)
    with pytest.raises(MismatchError, match=rf"differs from what was written \(.*{words}") as caught:
        wherry.convert(source, tmp_path / "out", to="orbax", options={"compression": "zstd"})
    assert done
    assert not finished, "it was found before the container was completed"
    assert caught.value.path == "large"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source.safetensors"]


def test_a_chunk_that_is_decoded_otherwise_is_not_proved(source, tmp_path, monkeypatch, proved):
    """The byte ranges alone do not prove what a reader makes of them: the codec must be the same, too."""
    real = ArrayReader.access_in_chunks

    def otherwise(self, spec):
        access = real(self, spec)
        return access.decoder and replace(
            access, decoder=replace(access.decoder, key=("another", *access.decoder.key[1:]))
        )

    monkeypatch.setattr(ArrayReader, "access_in_chunks", otherwise)
    receipt = wherry.convert(source, tmp_path / "out", to="orbax", options={"compression": "zstd"})
    assert proved["proved"] == set()
    assert receipt.verification["ok"], "the reader has read it again"


def test_chunks_that_were_exchanged_after_they_were_compared_are_found(tmp_path, monkeypatch):
    """Right bytes in the pass do not prove that they are still there."""
    from wherry.converter import job

    real = job.finish

    def exchange(writer):
        real(writer)
        [staged] = tmp_path.glob(".wherry-*/out")
        one, other = staged / "one", staged / "two"
        chunk = (one / "0").read_bytes()
        (one / "0").write_bytes((other / "0").read_bytes())
        (other / "0").write_bytes(chunk)

    held = {"one": np.arange(MIB, dtype=np.uint8), "two": np.arange(MIB, dtype=np.uint8)[::-1].copy()}
    save_file(held, tmp_path / "pair.safetensors")
    monkeypatch.setattr(job, "finish", exchange)
    with pytest.raises(MismatchError, match="read-back differs"):
        wherry.convert(
            tmp_path / "pair.safetensors", tmp_path / "out", to="orbax",
            options={"compression": "zstd", "ocdbt": False},
        )  # fmt: skip
    assert not (tmp_path / "out").exists()


def test_a_block_that_was_damaged_after_it_was_compared_is_found(source, tmp_path, monkeypatch):
    """The first block of a tensor is shared with what lies before it, and written again."""
    from wherry.converter import job

    real = job.finish

    def damage(writer):
        real(writer)
        [staged] = tmp_path.glob(".wherry-*/out")
        size = int.from_bytes(staged.read_bytes()[:8], "little")
        large = json.loads(staged.read_bytes()[8 : 8 + size])["large"]["data_offsets"]
        flip(staged, 8 + size + large[1] - 1)

    monkeypatch.setattr(job, "finish", damage)
    with pytest.raises(MismatchError, match=r"read-back differs .*leaf 4") as caught:
        wherry.convert(source, tmp_path / "out", to="safetensors")
    assert caught.value.path == "large"
    assert not (tmp_path / "out").exists()


def test_metadata_that_refers_to_other_bytes_is_found(source, tmp_path, monkeypatch):
    """Right bytes in the file do not prove that the header refers to them."""
    from wherry.converter import job

    held = {"one": np.arange(MIB, dtype=np.uint8), "two": np.arange(MIB, dtype=np.uint8)[::-1].copy()}
    save_file(held, tmp_path / "pair.safetensors")
    real = job.finish

    def exchange(writer):
        real(writer)
        [staged] = tmp_path.glob(".wherry-*/out")
        data = staged.read_bytes()
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size])
        header["one"], header["two"] = header["two"], header["one"]
        text = json.dumps(header, separators=(",", ":")).encode().ljust(size)
        staged.write_bytes(data[:8] + text + data[8 + size :])

    monkeypatch.setattr(job, "finish", exchange)
    with pytest.raises(MismatchError, match="read-back differs"):
        wherry.convert(tmp_path / "pair.safetensors", tmp_path / "out", to="safetensors")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("to", ["torch-zip", "npz"])
def test_an_altered_checksum_of_the_container_is_found(tmp_path, monkeypatch, to):
    """The bytes are those that were written, but the CRC that the archive has for them is not."""
    from wherry.converter import job

    save_file({"large": np.arange(MIB, dtype=np.uint8)}, tmp_path / "one.safetensors")
    real = job.finish

    def damage(writer):
        real(writer)
        [staged] = tmp_path.glob(".wherry-*/out")
        with zipfile.ZipFile(staged) as archive:
            crc = max(archive.infolist(), key=lambda member: member.file_size).CRC
        flip(staged, staged.read_bytes().rindex(struct.pack("<I", crc)))

    monkeypatch.setattr(job, "finish", damage)
    with pytest.raises(wherry.errors.WherryError, match="checksum mismatch"):
        wherry.convert(tmp_path / "one.safetensors", tmp_path / "out", to=to)
    assert not (tmp_path / "out").exists()


def test_parts_of_an_interrupted_run_are_read_back_too(source, tmp_path, monkeypatch, proved):
    from wherry.converter import job

    def stop(_writer):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(job, "finish", stop)
        with pytest.raises(KeyboardInterrupt):
            wherry.convert(source, tmp_path / "out", to="dcp")
    [staged] = tmp_path.glob(".wherry-*/out/__0_0.distcp")
    receipt = wherry.convert(source, tmp_path / "copy", to="dcp")
    assert receipt.resumed_bytes == 0
    proved["proved"].clear()
    with monkeypatch.context() as patch:
        patch.setattr(job, "finish", stop)
        with pytest.raises(KeyboardInterrupt):
            wherry.convert(source, tmp_path / "out", to="dcp")
    flip(staged, 9 * MIB)
    with pytest.raises(MismatchError, match="read-back differs from what was written"):
        wherry.convert(source, tmp_path / "out", to="dcp")
    assert not (tmp_path / "out").exists()
