"""Pickles that call something, in every way in which pickle can name a global and call it, in every container.

Nothing is pickled here: each is put together opcode by opcode. Payloads leave a marker in the working folder, and reach
no other machine.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from infra.attacks.case import MARKER, OPEN, TOUCH, Case, write_files
from infra.attacks.lies import DIGITS
from tests.support import hostile
from tests.support.hostile import by_line, text

# Module, name and the one argument; each leaves the marker where it is called.
CALLS = (
    ("os", "system", TOUCH), ("posix", "system", TOUCH), ("builtins", "eval", OPEN),
    ("builtins", "exec", OPEN), ("__builtin__", "eval", OPEN), ("subprocess", "getoutput", TOUCH),
    ("runpy", "run_path", MARKER), ("importlib", "import_module", "evil_module"),
    ("timeit", "timeit", OPEN), ("code", "compile_command", OPEN), ("cProfile", "run", OPEN),
    ("pdb", "run", OPEN), ("trace", "main", MARKER), ("os", "popen", TOUCH), ("io", "open", MARKER),
    ("builtins", "__import__", "evil_module"), ("pathlib", "Path.touch", MARKER), ("torch", "load", MARKER),
    ("torch.hub", "load", MARKER), ("numpy", "load", MARKER), ("ctypes", "CDLL", MARKER),
    ("webbrowser", "open", MARKER), ("pickle", "loads", "x"), ("sys", "exit", "x"),
    ("functools", "partial", "x"), ("operator", "attrgetter", "system"), ("types", "CodeType", "x"),
    ("marshal", "loads", "x"), ("shutil", "rmtree", MARKER), ("socket", "gethostbyname", "127.0.0.1"),
    ("wherry", "convert", MARKER), ("wherry.core.child", "run", MARKER),
    ("torch._utils", "_rebuild_tensor_v3", "x"), ("collections", "OrderedDict.__init__", "x"),
    ("numpy._core.multiarray", "_reconstruct.__globals__", "x"), ("torch", "FloatStorage.__reduce__", "x"),
)  # fmt: skip


def _word(word: str) -> bytes:
    """BINUNICODE."""
    data = word.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def forms(module: str, name: str, word: str) -> dict[str, bytes]:
    """A pickle for each way to name and call a global.

    Plain ones, then those that end early, twice or in the middle, or hide the call in another object.
    """
    old, arg, m, n = by_line(module, name), _word(word), module.encode(), name.encode()
    new = text(module) + text(name) + b"\x93"
    reduced, framed = old + arg + b"\x85R", new + arg + b"\x85R"
    escaped = "".join(f"\\u{ord(sign):04x}" for sign in module).encode()
    memo = text(module) + b"\x94" + text(name) + b"\x940h\x00h\x01\x93"
    two, four, end = b"\x80\x02", b"\x80\x04", arg + b"\x85R."
    numpy = by_line("numpy.core.multiarray", "_reconstruct")
    attribute = by_line("builtins", "getattr") + by_line("builtins", "__import__")
    return {
        "p0": old + f"(V{word}\ntR.".encode(),
        "p1": old + b"(" + arg + b"tR.",
        "p2": two + reduced + b".",
        "p3": b"\x80\x03" + reduced + b".",
        "p4": hostile.framed(framed),
        "p5": b"\x80\x05" + framed + b".",
        "p9": b"\x80\x09" + reduced + b".",
        "inst": f"(V{word}\ni{module}\n{name}\n.".encode(),
        "obj": two + b"(" + old + arg + b"o.",
        "newobj": two + old + arg + b"\x85\x81.",
        "newobj-ex": four + old + arg + b"\x85}\x92.",
        "build": two + old + b")\x81}" + _word("run") + arg + b"sb.",
        "state": two
        + by_line("collections", "OrderedDict")
        + b")R}"
        + _word("__reduce__")
        + reduced
        + b"sb.",
        "escaped": b"V" + escaped + b"\n" + text(name) + b"\x93" + end,
        "memo": four + memo + end,
        "put": four + b"V" + m + b"\np7\n0V" + n + b"\np9\n0g7\ng9\n\x93" + end,
        "bytes-names": four + b"C" + bytes([len(module)]) + m + text(name) + b"\x93" + end,
        "string-names": f"S'{module}'\nS'{name}'\n".encode() + b"\x93" + end,
        "as-key": two + b"}" + reduced + b"K\x01s.",
        "in-set": four + b"\x8f(" + reduced + b"\x90.",
        "popped": two + reduced + b"0}.",
        "pop-mark": two + b"(" + reduced + b"1}.",
        "second": two + b"}." + two + reduced + b".",
        "no-end": two + reduced,
        "behind-end": b"}." + reduced + b".",
        "protocol-twice": two + four + reduced + b".",
        "frame-short": four + b"\x95" + struct.pack("<Q", 3) + framed + b".",
        "frame-long": four + b"\x95" + struct.pack("<Q", 1 << 62) + framed + b".",
        "persistent": two + _word("storage") + reduced + arg + arg + b"K\x01t0(" + reduced + b"tQ.",
        "persistent-line": f"P{word}\n0".encode() + reduced + b".",
        "extension": two + b"\x82\x01" + end,
        "list-item": two + b"](" + reduced + b"e.",
        "rebuild": two + by_line("torch._utils", "_rebuild_tensor_v2") + b"(" + reduced + b"K\x00))\x89}tR.",
        "reconstruct": two + numpy + old + b"K\x00\x85C\x01b\x87R.",
        "buffer": b"\x80\x05\x97\x98" + reduced + b".",
        "cycle": two + b"]q\x00h\x00a" + reduced + b"0.",
        "twice": two + old + b"2" + arg + b"\x85R0" + end,
        "line-end": f"c{module}\r\n{name}\r\n".encode() + end,
        "spaces": f"c {module} \n {name} \n".encode() + end,
        "wide": four + b"\x8d" + struct.pack("<Q", len(m)) + m + text(name) + b"\x93" + end,
        "junk": (two + b"N0K\x010") * 400 + reduced + b".",
        "dotted": four + text(module.partition(".")[0]) + text(f"{name}.__call__") + b"\x93" + end,
        "getattr": two
        + attribute
        + _word(module)
        + b"\x85R"
        + _word(name.partition(".")[0])
        + b"\x86R"
        + end,
    }


STATE = b"\x80\x02" + by_line("collections", "OrderedDict") + b")R."  # a sound one


def archive(members: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    """A zip archive of members."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as file:
        for name, data in members.items():
            file.writestr(name, data)
    return buffer.getvalue()


def _torch(data: bytes, method: int = zipfile.ZIP_STORED) -> bytes:
    names = {"archive/data.pkl": data, "archive/byteorder": b"little", "archive/data/0": bytes(64)}
    return archive({**names, "archive/version": b"3\n"}, method)


def _legacy(data: bytes) -> bytes:
    magic = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03.\x80\x02}."
    return magic + data + b"\x80\x02]."


def tar_of(data: bytes) -> bytes:
    """An archive of torch before 0.1.10, each of its files a pickle."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as file:
        for name in ("sys_info", "pickle", "storages", "tensors"):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            file.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def npy(data: bytes, descr: str = "'|O'") -> bytes:
    """An array of objects: a head of numpy's, and a pickle."""
    head = f"{{'descr': {descr}, 'fortran_order': False, 'shape': (1,), }}"
    head += " " * (-(len(head) + 11) % 64) + "\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head.encode("latin-1") + data


def _npz(data: bytes, method: int = zipfile.ZIP_STORED) -> bytes:
    return archive({"w.npy": npy(data)}, method)


def _blob(data: bytes) -> bytes:
    """An array of bytes in a flax message, as its extension of arrays has it."""
    inner = b"\x93\x91\x01\xa6object\xc4" + bytes([min(len(data), 255)]) + data[:255]
    return b"\x81\xa1w\xc7" + bytes([min(len(inner), 255)]) + b"\x01" + inner[:255]


# Container → name of the file in its folder, its bytes, and the files next to it.
WRAPPERS: dict[str, tuple[str, Callable[[bytes], bytes], dict[str, bytes]]] = {
    "pickle": ("model.pkl", bytes, {}),
    "pickle-bin": ("pytorch_model.bin", bytes, {"config.json": b'{"model_type": "llama"}'}),
    "pickle-bare-name": ("weights", bytes, {}),
    "torch-zip": ("model.pt", _torch, {}),
    "torch-zip-deflated": ("model.pt", lambda data: _torch(data, zipfile.ZIP_DEFLATED), {}),
    "torch-zip-behind-text": ("model.pt", lambda data: b"#!/bin/sh\n" + _torch(data), {}),
    "torch-hub": ("pytorch_model.bin", _torch, {"config.json": b'{"model_type": "llama"}'}),
    "torch-legacy": ("model.pt", _legacy, {}),
    "torch-tar": ("model.tar", tar_of, {}),
    "zip": ("model.zip", lambda data: archive({"data.pkl": data}), {}),
    "zip-other-name": (
        "model.pt",
        lambda data: archive({"a/data.pkl": b"\x80\x02}.", "a/evil.pkl": data}),
        {},
    ),
    "seven-zip": ("model.7z", lambda data: hostile.seven_zip(data[:120], "data.pkl"), {}),
    "numpy": ("model.npy", npy, {}),
    "npz": ("model.npz", _npz, {}),
    "npz-deflated": ("model.npz", lambda data: _npz(data, zipfile.ZIP_DEFLATED), {}),
    "gzip": ("model.pkl.gz", gzip.compress, {}),
    "bzip2": ("model.pkl.bz2", bz2.compress, {}),
    "xz": ("model.pkl.xz", lzma.compress, {}),
    "zlib": ("model.pkl.z", zlib.compress, {}),
    "dcp": (".metadata", bytes, {"__0_0.distcp": bytes(64)}),
    "lingua": ("consolidated.pth", _torch, {"params.json": b"{}"}),
    "meta": ("consolidated.00.pth", _torch, {"params.json": b'{"dim": 8}'}),
    "flax": ("checkpoint_1", _blob, {}),
    "orbax-aggregate": ("checkpoint", bytes, {"_METADATA": b"{}"}),
    "orbax-metadata": ("_METADATA", bytes, {}),
    "keras": ("model.h5", lambda data: b"\x89HDF\r\n\x1a\n" + data, {}),
    "equinox": ("model.eqx", lambda data: npy(b"", "'<f4'") + bytes(4) + npy(data), {}),
    "safetensors-name": ("model.safetensors", bytes, {}),
    "sidecar": ("wherry.json", bytes, {"model.safetensors": b"\x02\0\0\0\0\0\0\0{}"}),
    "signature": ("wherry.sig", bytes, {"model.safetensors": b"\x02\0\0\0\0\0\0\0{}"}),
}
_FILE_ALONE = (
    "torch", "pickle", "zip", "numpy", "npz", "gzip", "bzip2", "xz", "zlib", "seven", "flax", "keras",
    "equinox", "safetensors",
)  # fmt: skip


# Containers from which a usual loader takes the pickle that was put there.
LOADED = frozenset((
    "pickle", "pickle-bin", "pickle-bare-name", "torch-zip", "torch-hub", "torch-legacy", "torch-tar", "numpy", "npz",
    "npz-deflated", "dcp", "lingua", "meta",
))  # fmt: skip


def wrap_pickle(wrapper: str, data: bytes) -> Callable[[Path], Path]:
    """Writes a pickle in a container; the path is the file or the folder, whichever a user would name."""
    name, pack, neighbours = WRAPPERS[wrapper]
    alone = wrapper.startswith(_FILE_ALONE) and not neighbours
    return write_files({**neighbours, name: pack(data)}, name if alone else "")


def cases() -> Iterator[Case]:
    """Every call in three forms, every form with two calls in every container, and the fixed ones of the tests."""
    kinds = list(forms("os", "system", TOUCH))
    for number, call in enumerate(CALLS):
        others = (kinds[(number * 5 + step) % len(kinds)] for step in range(4))
        for kind in dict.fromkeys(("p0", "p4", *others)):
            data = forms(*call)[kind]
            yield Case(f"pickle-call/{call[0]}.{call[1]}-{kind}", wrap_pickle("pickle", data), evil=True)
    for wrapper in WRAPPERS:
        for number, kind in enumerate(kinds):
            data = forms(*CALLS[number % 6])[kind]
            yield Case(f"{wrapper}/{kind}", wrap_pickle(wrapper, data), evil=wrapper in LOADED)
    for name, (file, write) in hostile.FILES.items():
        yield Case(f"corpus/{name}", _write_fixed(file, write), evil=True)
    yield from _digits()


# ---- Digits


def _long(size: int, form: str = "<i") -> bytes:
    """A whole number of so many bytes, as LONG1 or LONG4."""
    code = b"\x8a" if form == "<B" else b"\x8b"
    return code + struct.pack(form, size) + b"\x7f" * size


def opcodes() -> dict[str, bytes]:
    """Values of pickles: numbers in digits and in bytes, and places of the memo in digits."""
    found = {"long1": _long(255, "<B"), "long4": _long(2000), "long4-large": _long(1 << 20)}
    found |= {"long4-lies": b"\x8b" + struct.pack("<i", 2**31 - 1), "long4-negative": b"\x8b\xff\xff\xff\xff"}
    kinds = {
        "int": b"I%s\n", "long": b"L%sL\n", "put": b"Np%s\n", "get": b"g%s\n", "float": b"F%s\n",
        "frame": b"P%s\n",
    }  # fmt: skip
    for form, digits in DIGITS.items():
        found |= {f"{kind}-{form}": text % digits.encode() for kind, text in kinds.items()}
    odd = {"arabic": "\u0663", "square": "\u00b2", "under": "1_0", "space": " 1 ", "hex": "0x9"}
    for name, word in odd.items():
        found |= {f"{kind}-{name}": kinds[kind] % word.encode() for kind in ("int", "put")}
    return found


def _digits() -> Iterator[Case]:
    storage = b"(X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\x000X\x03\0\0\0cpu"
    for name, value in opcodes().items():
        yield Case(f"digits-pickle/{name}", wrap_pickle("pickle", b"(dS'w'\n" + value + b"s."))
        tensor = b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + value + b"tQK\0" + value + b"\x85"
        tensor += value + b"\x85\x89ccollections\nOrderedDict\n)RtR"
        for wrapper in ("torch-zip", "torch-legacy", "dcp") if name.startswith(("int-", "long")) else ():
            data = b"\x80\x02}X\x01\0\0\0w" + tensor + b"s."
            yield Case(f"digits-{wrapper}/{name}", wrap_pickle(wrapper, data))


def _write_fixed(file: str, write: Callable[[Path], object]) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        write(folder / file)
        return folder / file

    return make
