"""Files that are small to store or to write, and large or slow for a program that reads them without limits.

Each bomb is a function of a folder and of a number of entries, and returns the path to examine. Nothing here holds a
payload: bombs attack memory and time only.
"""

from __future__ import annotations

import json
import os
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

from attacks import crowds
from attacks.case import Case

Bomb = "Callable[[Path, int], Path]"
_BLOCK = 1 << 16  # entries that are written at a time


def repeat_entry(path: Path, head: bytes, entry: bytes, count: int, tail: bytes) -> Path:
    """A file of one entry many times, without its last byte (the separator) at the end."""
    with path.open("wb") as file:
        file.write(head)
        for start in range(0, count, _BLOCK):
            file.write(entry * min(_BLOCK, count - start))
        if count:
            file.seek(-1, os.SEEK_CUR)
        file.write(tail)
    return path


def number_entries(path: Path, head: bytes, entry: Callable[[int], bytes], count: int, tail: bytes) -> Path:
    """A file of numbered entries that are joined by commas."""
    with path.open("wb") as file:
        file.write(head)
        for start in range(0, count, _BLOCK):
            rows = b",".join(map(entry, range(start, min(start + _BLOCK, count))))
            file.write((b"," if start else b"") + rows)
        file.write(tail)
    return path


def orbax_metadata(folder: Path, count: int) -> Path:
    """`_METADATA` whose tree is a list of empty objects."""
    folder.mkdir(parents=True)
    repeat_entry(folder / "_METADATA", b'{"tree_metadata":[', b"{},", count, b"]}")
    return folder


def orbax_rows(folder: Path, count: int) -> Path:
    """`_METADATA` with a row for each of many parameters that do not exist."""

    def row(number: int) -> bytes:
        keys = b'[{"key":"params","key_type":2},{"key":"%d","key_type":2}]' % number
        return b'"(%d)":{"key_metadata":%s,"value_metadata":{"value_type":"jax.Array"}}' % (number, keys)

    folder.mkdir(parents=True)
    number_entries(folder / "_METADATA", b'{"tree_metadata":{', row, count, b"}}")
    return folder


def sidecar(folder: Path, count: int) -> Path:
    """`wherry.json` of empty objects next to a model."""
    small_model(folder)
    repeat_entry(folder / "wherry.json", b'{"schema":2,"checkpoint":[', b"{},", count, b"]}")
    return folder


def index(folder: Path, count: int) -> Path:
    """The index of a Hugging Face folder with as many tensors as one likes, all in one file."""
    small_model(folder)
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    entry = b'"%d":"model-00001-of-00002.safetensors"'
    number_entries(
        folder / "model.safetensors.index.json", b'{"weight_map":{', lambda n: entry % n, count, b"}}"
    )
    return folder


def safetensors_header(folder: Path, count: int) -> Path:
    """A safetensors file of empty tensors."""
    folder.mkdir(parents=True)
    entry = b'"%d":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
    file = folder / "model.safetensors"
    number_entries(file, bytes(8), lambda n: entry % n, count, b"}")
    data = bytearray(file.read_bytes())
    data[7:8] = b"{"
    head = struct.pack("<Q", len(data) - 7) + bytes(data[7:])
    file.write_bytes(head)
    return file


def safetensors_lists(folder: Path, count: int) -> Path:
    """A safetensors file whose header is a list of empty objects."""
    folder.mkdir(parents=True)
    file = repeat_entry(folder / "model.safetensors", bytes(8) + b'{"a":[', b"{},", count, b"]}")
    with file.open("r+b") as opened:
        opened.write(struct.pack("<Q", file.stat().st_size - 8))
    return file


def pickle_dicts(folder: Path, count: int) -> Path:
    """A pickle of empty dicts."""
    folder.mkdir(parents=True)
    return repeat_entry(folder / "model.pkl", b"\x80\x04](", b"}", count + 1, b"e.")


def pickle_sets(folder: Path, count: int) -> Path:
    """A pickle of empty lists within tuples."""
    folder.mkdir(parents=True)
    return repeat_entry(folder / "model.pkl", b"\x80\x04](", b"]\x85", count + 1, b"e.")


def torch_zip(folder: Path, count: int) -> Path:
    """A torch.save archive whose pickle is a list of empty dicts."""
    folder.mkdir(parents=True)
    path = folder / "model.pt"
    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive,
        archive.open("archive/data.pkl", "w") as file,
    ):
        file.write(b"\x80\x02](")
        for start in range(0, count, _BLOCK):
            file.write(b"}" * min(_BLOCK, count - start))
        file.write(b"e.")
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("archive/version", "3\n")
    return path


def dcp_metadata(folder: Path, count: int) -> Path:
    """The `.metadata` of a DCP checkpoint that is a list of empty dicts."""
    folder.mkdir(parents=True)
    repeat_entry(folder / ".metadata", b"\x80\x04](", b"}", count + 1, b"e.")
    (folder / "__0_0.distcp").write_bytes(bytes(64))
    return folder


def gguf_keys(folder: Path, count: int) -> Path:
    """A GGUF file of many metadata pairs."""
    folder.mkdir(parents=True)
    path = folder / "model.gguf"
    with path.open("wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, 0, count))
        for start in range(0, count, _BLOCK):
            rows = [b"%08d" % number for number in range(start, min(start + _BLOCK, count))]
            file.write(b"".join(struct.pack("<Q8sI?", 8, row, 7, True) for row in rows))
    return path


def gguf_tensors(folder: Path, count: int) -> Path:
    """A GGUF file of many empty tensors."""
    folder.mkdir(parents=True)
    path = folder / "model.gguf"
    with path.open("wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, count, 0))
        for start in range(0, count, _BLOCK):
            rows = [b"%08d" % number for number in range(start, min(start + _BLOCK, count))]
            file.write(b"".join(struct.pack("<Q8sIQIQ", 8, row, 1, 0, 0, 0) for row in rows))
        file.write(bytes(64))
    return path


def gguf_strings(folder: Path, count: int) -> Path:
    """A GGUF file with an array of many empty strings, and of nested arrays."""
    folder.mkdir(parents=True)
    path = folder / "model.gguf"
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q1sIIQ", 1, b"a", 9, 8, count)
    with path.open("wb") as file:
        file.write(head)
        for start in range(0, count, _BLOCK):
            file.write(bytes(8) * min(_BLOCK, count - start))
        file.write(bytes(64))
    return path


def msgpack_maps(folder: Path, count: int) -> Path:
    """A flax message of empty maps."""
    folder.mkdir(parents=True)
    head = b"\x82\xa6params\x80\xa1a\xdd" + struct.pack(">I", count)
    return repeat_entry(folder / "checkpoint_1", head, b"\x80", count + 1, b"")


def msgpack_keys(folder: Path, count: int) -> Path:
    """A flax message of one map with many keys."""
    folder.mkdir(parents=True)
    path = folder / "checkpoint_1"
    with path.open("wb") as file:
        file.write(b"\x81\xa6params\xdf" + struct.pack(">I", count))
        for start in range(0, count, _BLOCK):
            rows = range(start, min(start + _BLOCK, count))
            file.write(b"".join(b"\xa8%08d\x80" % number for number in rows))
    return path


def zarr_metadata(folder: Path, count: int) -> Path:
    """An Orbax item of one array whose `.zarray` is a list of empty objects."""
    row = '{"key_metadata":[{"key":"w","key_type":2}],"value_metadata":{"value_type":"jax.Array"}}'
    (folder / "w").mkdir(parents=True)
    (folder / "_METADATA").write_text(f'{{"tree_metadata":{{"(w)":{row}}},"use_ocdbt":false}}')
    repeat_entry(folder / "w" / ".zarray", b'{"shape":[', b"{},", count, b"]}")
    return folder


def ocdbt_keys(folder: Path, count: int) -> Path:
    """An Orbax item whose OCDBT database has one compressed node of many keys."""
    return ocdbt_node(folder, ocdbt_leaf(count))


def ocdbt_zeros(folder: Path, count: int) -> Path:
    """An Orbax item whose OCDBT database has one node that is small when it is compressed."""
    return ocdbt_node(folder, bytes(16 * count))


def ocdbt_leaf(count: int) -> bytes:
    """The body of a leaf node: no data files, keys of four bytes in ascending order with empty inline values."""
    files = b"\x00"
    keys = b"".join(struct.pack(">I", number) for number in range(count))
    shared = bytes(count - 1)
    return b"".join((
        b"\x00", files, varint(count), shared, b"\x04" * count, keys, bytes(count), bytes(count),
    ))  # fmt: skip


def ocdbt_node(folder: Path, body: bytes) -> Path:
    """An Orbax item with a database of one node."""
    row = '{"key_metadata":[{"key":"w","key_type":2}],"value_metadata":{"value_type":"jax.Array"}}'
    (folder / "d").mkdir(parents=True)
    (folder / "_METADATA").write_text(f'{{"tree_metadata":{{"(w)":{row}}},"use_ocdbt":true}}')
    node = seal_node(0x0CDB20DE, body)
    (folder / "d" / "0").write_bytes(node)
    config = bytes(17) + varint(1024) + varint(1 << 20) + b"\x04\x01" + bytes(4)
    files = b"\x01\x03\x00d/0"  # one path of three bytes, no base path
    versions = b"\x01\x01\x00\x00\x00" + varint(len(node)) + bytes(3) + bytes(8) + b"\x00"
    (folder / "manifest.ocdbt").write_bytes(seal_node(0x0CDB3A2A, config + files + versions))
    return folder


def seal_node(magic: int, body: bytes) -> bytes:
    """A node or manifest with its head and checksum, compressed by zstd."""
    import zstandard
    from google_crc32c import value as crc32c

    packed = zstandard.compress(body, 3)
    head = struct.pack(">I", magic) + struct.pack("<Q", len(packed) + 18) + b"\x00\x01"
    return head + packed + struct.pack("<I", crc32c(head + packed))


def varint(number: int) -> bytes:
    """A number in seven bits a byte."""
    found = bytearray()
    while number >= 128:
        found.append(number & 127 | 128)
        number >>= 7
    return bytes([*found, number])


def zip_members(folder: Path, count: int) -> Path:
    """A zip archive of many empty members, as .npz."""
    folder.mkdir(parents=True)
    path = folder / "model.npz"
    with path.open("wb") as file:
        for start in range(0, count, _BLOCK):
            rows = range(start, min(start + _BLOCK, count))
            file.write(b"".join(struct.pack("<4s5H3I2H8s", b"PK\3\4", 20, 0, 0, 0, 0, 0, 0, 0, 8, 0, b"%08d" % n)
                                for n in rows))  # fmt: skip
        begin = file.tell()
        for start in range(0, count, _BLOCK):
            rows = range(start, min(start + _BLOCK, count))
            file.write(b"".join(struct.pack("<4s6H3I5H2I8s", b"PK\1\2", 20, 20, 0, 0, 0, 0, 0, 0, 0, 8, 0, 0, 0, 0, 0,
                                            n * 38, b"%08d" % n) for n in rows))  # fmt: skip
        size = file.tell() - begin
        end = file.tell()
        file.write(struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44, 45, 45, 0, 0, count, count, size, begin))
        file.write(struct.pack("<4sIQI", b"PK\6\7", 0, end, 1))
        file.write(struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 65535, 65535, 0xFFFFFFFF, 0xFFFFFFFF, 0))
    return path


def npz_deflated(folder: Path, count: int) -> Path:
    """An .npz whose header is a gigabyte of spaces, deflated."""
    folder.mkdir(parents=True)
    path = folder / "model.npz"
    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open("a.npy", "w", force_zip64=True) as file,
    ):
        file.write(b"\x93NUMPY\x02\x00" + struct.pack("<I", 16 * count))
        for start in range(0, count, _BLOCK):
            file.write(b" " * (16 * min(_BLOCK, count - start)))
    return path


def config(folder: Path, count: int) -> Path:
    """`config.json` of empty objects next to a model."""
    small_model(folder)
    repeat_entry(folder / "config.json", b'{"a":[', b"{},", count, b"]}")
    return folder


def yaml_flow(folder: Path, count: int) -> Path:
    """A YAML config of empty tables."""
    folder.mkdir(parents=True)
    return repeat_entry(folder / "config.yml", b"a: [", b"{},", count, b"]")


def toml_tables(folder: Path, count: int) -> Path:
    """A TOML file of empty tables."""
    folder.mkdir(parents=True)
    return repeat_entry(folder / "wherry.toml", b"a = [", b"{},", count, b"]\n")


def deep_folders(folder: Path, count: int) -> Path:
    """A tree of folders, each in the one before, next to a checkpoint."""
    small_model(folder / "model")
    here = os.open(folder, os.O_RDONLY)
    for _ in range(count):
        os.mkdir("d", dir_fd=here)
        below = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    return folder


def crowded_folder(folder: Path, count: int) -> Path:
    """A folder of empty files, next to a checkpoint."""
    small_model(folder / "model")
    _touch(folder / "crowd", "file-%09d.bin", count)
    return folder


def crowded_model(folder: Path, count: int) -> Path:
    """Empty files with the names of shards."""
    _touch(folder, f"model-%06d-of-{count:06d}.safetensors", count)
    return folder


def _touch(folder: Path, name: str, count: int) -> None:
    folder.mkdir(parents=True)
    here = os.open(folder, os.O_RDONLY)
    for number in range(count):
        os.close(os.open(name % number, os.O_CREAT | os.O_WRONLY, dir_fd=here))
    os.close(here)


def deep_json(folder: Path, count: int) -> Path:
    """A config of lists, each in the one before."""
    small_model(folder)
    (folder / "config.json").write_bytes(b'{"a":' + b"[" * count + b"]" * count + b"}")
    return folder


def small_model(folder: Path) -> None:
    """A Hugging Face folder of one tensor."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    text = json.dumps({"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(4))


SPARSE_NAMES = (
    "model.safetensors", "model.pkl", "model.pt", "model.npz", "model.npy", "model.gguf", "checkpoint_1",
    "model.bin", "model.index", "model.h5", "model.eqx",
)  # fmt: skip


def sparse(name: str, head: bytes = b"") -> Callable[[Path, int], Path]:
    """A sparse file of 4 kB for each entry, with the first bytes of its container."""

    def make(folder: Path, count: int) -> Path:
        folder.mkdir(parents=True)
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            file.write(head)
            file.truncate(count << 12)
        return path

    return make


# Entries of each bomb at its full size: those of the attack that found them, or as many as fit in 300 MB.
FULL: dict[str, int] = {
    "orbax_metadata": 80_000_000, "orbax_rows": 1_500_000, "sidecar": 60_000_000, "index": 9_000_000,
    "safetensors_header": 1_600_000, "safetensors_lists": 30_000_000, "pickle_dicts": 19_000_000,
    "pickle_sets": 19_000_000, "torch_zip": 19_000_000, "dcp_metadata": 19_000_000, "gguf_keys": 4_000_000,
    "gguf_tensors": 4_000_000, "gguf_strings": 30_000_000, "msgpack_maps": 60_000_000, "msgpack_keys": 3_900_000,
    "zarr_metadata": 40_000_000, "ocdbt_keys": 20_000_000, "ocdbt_zeros": 60_000_000, "zip_members": 4_000_000,
    "npz_deflated": 60_000_000, "config": 60_000_000, "yaml_flow": 10_000_000, "toml_tables": 10_000_000,
    "deep_folders": 3000, "deep_json": 1_000_000, "crowded_folder": 1_000_000, "crowded_model": 240_000,
}  # fmt: skip
_SPARSE_ENTRIES = 10 << 20  # 40 GiB
_HEADS = {
    "model.pkl": b"\x80\x04(", "model.gguf": b"GGUF", "model.npy": b"\x93NUMPY\x02\x00\xff\xff\xff\x7f",
    "model.pt": b"PK\x03\x04",
}  # fmt: skip


def cases() -> list[Case]:
    """Every bomb at its full size, and sparse files of 40 GiB."""
    found = [Case(f"bomb/{name}", _bomb(globals()[name], count)) for name, count in FULL.items()]
    found += [Case(f"bomb/{make.__name__}", _bomb(make, count)) for make, count in crowds.FULL.items()]
    return found + [
        Case(f"sparse/{name}-{len(head)}", _bomb(sparse(name, head), _SPARSE_ENTRIES))
        for name in SPARSE_NAMES
        for head in {b"", _HEADS.get(name, b"")}
    ]


def _bomb(make: Callable[[Path, int], Path], count: int) -> Callable[[Path], Path]:
    return lambda folder: make(folder / "bomb", count)
