"""Files that are small to store or to write, and large or slow for a program that reads them without limits.

Each bomb is a function of a folder and of a number of entries, and returns the path to examine. Nothing here holds a
payload: bombs attack memory and time only. `make` makes one by its name; tests make small ones.
"""

from __future__ import annotations

import json
import os
import struct
import zipfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from infra.attacks.case import Case, as_json

Bomb = Callable[[Path, int], Path]
Rows = Callable[[range], bytes]
_BLOCK = 1 << 16  # entries that are written at a time


# ---- One entry many times


def _same(entry: bytes) -> Rows:
    return lambda numbers: entry * len(numbers)


def _listed(entry: bytes) -> Rows:
    return lambda numbers: b"," * bool(numbers.start) + b",".join([entry] * len(numbers))


def _numbered(entry: Callable[[int], bytes], separator: bytes = b",") -> Rows:
    return lambda numbers: separator * bool(numbers.start) + separator.join(map(entry, numbers))


def write_rows(path: Path, head: bytes, rows: Rows, count: int, tail: bytes) -> Path:
    """A file of so many entries, written in blocks."""
    with path.open("wb") as file:
        file.write(head)
        for start in range(0, count, _BLOCK):
            file.write(rows(range(start, min(start + _BLOCK, count))))
        file.write(tail)
    return path


def _file(
    name: str, head: bytes | Callable[[int], bytes], rows: Rows, tail: bytes = b"", *, counted: bool = False
) -> Bomb:
    """A file alone; `counted`: of safetensors, which states the length of its header first."""

    def make(folder: Path, count: int) -> Path:
        folder.mkdir(parents=True)
        begin = head(count) if callable(head) else head
        path = write_rows(folder / name, begin, rows, count, tail)
        if counted:
            with path.open("r+b") as file:
                file.write(struct.pack("<Q", path.stat().st_size - 8))
        return path

    return make


def _at_model(name: str, head: bytes, rows: Rows, tail: bytes) -> Bomb:
    """A file in the folder of a model."""

    def make(folder: Path, count: int) -> Path:
        small_model(folder)
        write_rows(folder / name, head, rows, count, tail)
        return folder

    return make


def _in_folder(
    name: str, head: bytes, rows: Rows, tail: bytes, others: Mapping[str, bytes] | None = None
) -> Bomb:
    """A folder with such a file, and other files."""

    def make(folder: Path, count: int) -> Path:
        (folder / name).parent.mkdir(parents=True)
        for other, data in (others or {}).items():
            (folder / other).write_bytes(data)
        write_rows(folder / name, head, rows, count, tail)
        return folder

    return make


def small_model(folder: Path) -> None:
    """A Hugging Face folder of one tensor."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    text = as_json({"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}})
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(4))


_ROW = {"key_metadata": [{"key": "w", "key_type": 2}], "value_metadata": {"value_type": "jax.Array"}}


def _orbax_row(number: int) -> bytes:
    keys = b'[{"key":"params","key_type":2},{"key":"%d","key_type":2}]' % number
    return b'"(%d)":{"key_metadata":%s,"value_metadata":{"value_type":"jax.Array"}}' % (number, keys)


def _gguf(tensors: int, pairs: int) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, pairs)


def _gguf_pair(number: int) -> bytes:
    return struct.pack("<Q8sI?", 8, b"%08d" % number, 7, True)


def _gguf_tensor(number: int) -> bytes:
    return struct.pack("<Q8sIQIQ", 8, b"%08d" % number, 1, 0, 0, 0)


def index(folder: Path, count: int) -> Path:
    """The index of a Hugging Face folder with as many tensors as one likes, all in one file."""
    shard = "model-00001-of-00002.safetensors"
    rows = _numbered(lambda number: b'"%d":"%s"' % (number, shard.encode()))
    _at_model("model.safetensors.index.json", b'{"weight_map":{', rows, b"}}")(folder, count)
    (folder / "model.safetensors").rename(folder / shard)
    return folder


def torch_zip(folder: Path, count: int) -> Path:
    """A torch.save archive whose pickle is a list of empty dicts."""
    folder.mkdir(parents=True)
    path = folder / "model.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        with archive.open("archive/data.pkl", "w") as file:
            file.write(b"\x80\x02](" + b"}" * count + b"e.")
        archive.writestr("archive/version", "3\n")
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


def zip_members(folder: Path, count: int) -> Path:
    """A zip archive of many empty members, as .npz."""

    def local(number: int) -> bytes:
        return struct.pack("<4s5H3I2H8s", b"PK\3\4", 20, 0, 0, 0, 0, 0, 0, 0, 8, 0, b"%08d" % number)

    def entry(number: int) -> bytes:
        ends = (0, 0, 0, 0, 0, number * 38, b"%08d" % number)
        return struct.pack("<4s6H3I5H2I8s", b"PK\1\2", 20, 20, 0, 0, 0, 0, 0, 0, 0, 8, *ends)

    path = _file("model.npz", b"", _numbered(local, b""))(folder, count)
    begin = path.stat().st_size
    listed = write_rows(folder / "listed", b"", _numbered(entry, b""), count, b"")
    size = listed.stat().st_size
    with path.open("ab") as file:
        file.write(listed.read_bytes())
        file.write(struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44, 45, 45, 0, 0, count, count, size, begin))
        file.write(struct.pack("<4sIQI", b"PK\6\7", 0, begin + size, 1))
        file.write(struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 65535, 65535, 0xFFFFFFFF, 0xFFFFFFFF, 0))
    listed.unlink()
    return path


# ---- OCDBT


def varint(number: int) -> bytes:
    """A number in seven bits a byte."""
    found = bytearray()
    while number >= 128:
        found.append(number & 127 | 128)
        number >>= 7
    return bytes([*found, number])


def seal_node(magic: int, body: bytes) -> bytes:
    """A node or manifest with its head and checksum, compressed by zstd."""
    import zstandard
    from google_crc32c import value as crc32c

    packed = zstandard.compress(body, 3)
    head = struct.pack(">I", magic) + struct.pack("<Q", len(packed) + 18) + b"\x00\x01"
    return head + packed + struct.pack("<I", crc32c(head + packed))


def names_of(names: list[bytes]) -> bytes:
    """A list of data files."""
    lengths, bases = b"".join(varint(len(name)) for name in names), bytes(len(names))
    return varint(len(names)) + bytes(max(len(names) - 1, 0)) + lengths + bases + b"".join(names)


def ocdbt_item(
    folder: Path, body: bytes, *, height: int = 0, file: bytes = b"d/0", offset: int = 0, length: int | None = None,
    versions: int = 1,
) -> Path:  # fmt: skip
    """An Orbax item whose database has one node, its root; what the manifest states of it may be a lie."""
    (folder / "d").mkdir(parents=True)
    (folder / "_METADATA").write_bytes(as_json({"tree_metadata": {"('w',)": _ROW}, "use_ocdbt": True}))
    root = seal_node(0x0CDB20DE, body)
    (folder / "d" / "0").write_bytes(root)
    config = bytes(17) + varint(1024) + varint(1 << 20) + b"\x04\x01" + bytes(4)
    place = varint(offset) + varint(len(root) if length is None else length)
    tail = varint(versions) + b"\x01" * min(versions, 9) + bytes([height & 255]) + b"\0" + place + bytes(12)
    (folder / "manifest.ocdbt").write_bytes(seal_node(0x0CDB3A2A, config + names_of([file]) + tail))
    return folder


def ocdbt_keys(folder: Path, count: int) -> Path:
    """A database with one compressed leaf of many keys, of four bytes in ascending order with empty inline values."""
    keys = b"".join(struct.pack(">I", number) for number in range(count))
    head = b"\0\0" + varint(count) + bytes(count - 1) + b"\x04" * count
    return ocdbt_item(folder, head + keys + bytes(2 * count))


# ---- Folders


def _touch(folder: Path, name: str, count: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    here = os.open(folder, os.O_RDONLY)
    for number in range(count):
        os.close(os.open(name % number, os.O_CREAT | os.O_WRONLY, dir_fd=here))
    os.close(here)
    return folder


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


def deep_json(folder: Path, count: int) -> Path:
    """A config of lists, each in the one before."""
    small_model(folder)
    (folder / "config.json").write_bytes(b'{"a":' + b"[" * count + b"]" * count + b"}")
    return folder


def pieces(folder: Path, count: int) -> Path:
    """A file of a rank for each element of one tensor, as torch's HuggingFaceStorageWriter names them."""
    folder.mkdir(parents=True)
    for number in range(count):
        stated = json.dumps({"a": {"saved_offsets": [number]}})
        shape = [2 if number == count - 1 else 1]
        tensor = {"dtype": "U8", "shape": shape, "data_offsets": [0, 1]}
        text = as_json({"__metadata__": {"DCP_SHARDING_INFO": stated}, "a": tensor})
        name = f"shard-{number + 1:05d}-model-00001-of-00001.safetensors"
        (folder / name).write_bytes(struct.pack("<Q", len(text)) + text + b"\1")
    return folder


def model_states(folder: Path, count: int) -> Path:
    """A universal checkpoint of DeepSpeed with an empty file for each rank."""
    step = folder / "global_step1"
    (step / "zero" / "a").mkdir(parents=True)
    (folder / "latest_universal").write_text(step.name)
    (step / "zero" / "optimizer_state.pt").touch()
    _touch(step, "mp_rank_%02d_model_states.pt", count)
    return folder


def rank_number(folder: Path, count: int) -> Path:
    """A ZeRO checkpoint whose only file of a rank has a large number in its name."""
    step = folder / "global_step1"
    step.mkdir(parents=True)
    (folder / "latest").write_text(step.name)
    for name in ("mp_rank_00_model_states.pt", f"bf16_zero_pp_rank_{count}_mp_rank_00_optim_states.pt"):
        (step / name).touch()
    return folder


_NPY = b"{'descr': '<f4', 'fortran_order': False, 'shape': (0,), }".ljust(117) + b"\n"
_EMPTY = b'"%d":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
_TEXTS = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q1sII", 1, b"a", 9, 8)  # and how many
_ZARRAY = as_json({"tree_metadata": {"(w)": _ROW}, "use_ocdbt": False})
# Entries of each at its full size: those of the attack that found it, or as many as fit in 300 MB.
FULL = {
    "orbax_metadata": 80_000_000, "orbax_rows": 1_500_000, "sidecar": 60_000_000, "index": 9_000_000,
    "safetensors_header": 1_600_000, "safetensors_lists": 30_000_000, "pickle_dicts": 19_000_000,
    "pickle_sets": 19_000_000, "torch_zip": 19_000_000, "dcp_metadata": 19_000_000, "gguf_keys": 4_000_000,
    "gguf_tensors": 4_000_000, "gguf_strings": 30_000_000, "msgpack_maps": 60_000_000,
    "msgpack_keys": 3_900_000, "zarr_metadata": 40_000_000, "ocdbt_keys": 20_000_000,
    "ocdbt_zeros": 60_000_000, "zip_members": 4_000_000, "npz_deflated": 60_000_000, "config": 60_000_000,
    "yaml_flow": 10_000_000, "toml_tables": 10_000_000, "deep_folders": 3000, "deep_json": 1_000_000,
    "crowded_folder": 1_000_000, "crowded_model": 240_000, "npy_records": 130_000, "pieces": 20_000,
    "model_states": 100_000, "rank_number": 999_999_999,
}  # fmt: skip
BOMBS: dict[str, Bomb] = {
    "orbax_metadata": _in_folder("_METADATA", b'{"tree_metadata":[', _listed(b"{}"), b"]}"),
    "orbax_rows": _in_folder("_METADATA", b'{"tree_metadata":{', _numbered(_orbax_row), b"}}"),
    "sidecar": _at_model("wherry.json", b'{"schema":2,"checkpoint":[', _listed(b"{}"), b"]}"),
    "index": index,
    "safetensors_header": _file(
        "model.safetensors", bytes(8) + b"{", _numbered(lambda n: _EMPTY % n), b"}", counted=True
    ),
    "safetensors_lists": _file(
        "model.safetensors", bytes(8) + b'{"a":[', _listed(b"{}"), b"]}", counted=True
    ),
    "pickle_dicts": _file("model.pkl", b"\x80\x04](", _same(b"}"), b"e."),
    "pickle_sets": _file("model.pkl", b"\x80\x04](", _same(b"]\x85"), b"e."),
    "torch_zip": torch_zip,
    "dcp_metadata": _in_folder(".metadata", b"\x80\x04](", _same(b"}"), b"e.", {"__0_0.distcp": bytes(64)}),
    "gguf_keys": _file("model.gguf", partial(_gguf, 0), _numbered(_gguf_pair, b"")),
    "gguf_tensors": _file("model.gguf", lambda n: _gguf(n, 0), _numbered(_gguf_tensor, b""), bytes(64)),
    "gguf_strings": _file("model.gguf", lambda n: _TEXTS + struct.pack("<Q", n), _same(bytes(8)), bytes(64)),
    "msgpack_maps": _file(
        "checkpoint_1", lambda n: b"\x82\xa6params\x80\xa1a\xdd" + struct.pack(">I", n), _same(b"\x80")
    ),
    "msgpack_keys": _file(
        "checkpoint_1",
        lambda n: b"\x81\xa6params\xdf" + struct.pack(">I", n),
        _numbered(lambda n: b"\xa8%08d\x80" % n, b""),
    ),
    "zarr_metadata": _in_folder("w/.zarray", b'{"shape":[', _listed(b"{}"), b"]}", {"_METADATA": _ZARRAY}),
    "ocdbt_keys": ocdbt_keys,
    "ocdbt_zeros": lambda folder, count: ocdbt_item(folder, bytes(16 * count)),
    "zip_members": zip_members,
    "npz_deflated": npz_deflated,
    "config": _at_model("config.json", b'{"a":[', _listed(b"{}"), b"]}"),
    "yaml_flow": _file("config.yml", b"a: [", _listed(b"{}"), b"]"),
    "toml_tables": _file("wherry.toml", b"a = [", _listed(b"{}"), b"]\n"),
    "deep_folders": deep_folders,
    "deep_json": deep_json,
    "crowded_folder": crowded_folder,
    "crowded_model": lambda folder, count: _touch(folder, f"model-%06d-of-{count:06d}.safetensors", count),
    "npy_records": _file("model.eqx", b"", _same(b"\x93NUMPY\x01\x00" + struct.pack("<H", 118) + _NPY)),
    "pieces": pieces,
    "model_states": model_states,
    "rank_number": rank_number,
}


SPARSE = {  # name → its first bytes, as its container has them
    "model.safetensors": b"", "model.pkl": b"\x80\x04(", "model.pt": b"PK\x03\x04", "model.npz": b"",
    "model.npy": b"\x93NUMPY\x02\x00\xff\xff\xff\x7f", "model.gguf": b"GGUF", "checkpoint_1": b"", "model.bin": b"",
    "model.index": b"", "model.h5": b"", "model.eqx": b"",
}  # fmt: skip
_SPARSE_BYTES = 40 << 30


def make(name: str, folder: Path, count: int | None = None) -> Path:
    """A bomb, of its full size or of so many entries."""
    return BOMBS[name](folder, FULL[name] if count is None else count)


def sparse(name: str, head: bytes, size: int, folder: Path) -> Path:
    """A sparse file with the first bytes of its container."""
    folder.mkdir(parents=True)
    with (folder / name).open("wb") as file:
        file.write(head)
        file.truncate(size)
    return folder / name


def cases() -> list[Case]:
    """Every bomb at its full size, and sparse files of 40 GiB."""
    found = [Case(f"bomb/{name}", lambda folder, name=name: make(name, folder / "bomb")) for name in BOMBS]
    for name, head in SPARSE.items():
        for begin in dict.fromkeys((b"", head)):
            write = partial(sparse, name, begin, _SPARSE_BYTES)
            found.append(
                Case(f"sparse/{name}-{len(begin)}", lambda folder, write=write: write(folder / "bomb"))
            )
    return found
