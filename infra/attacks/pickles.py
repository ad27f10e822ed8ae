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

from attacks.case import MARKER, Case
from tests.support import hostile

_TOUCH, _OPEN = f"touch {MARKER}", f"open('{MARKER}', 'w')"
# Module, name and the one argument; each leaves the marker where it is called.
CALLS = (
    ("os", "system", _TOUCH),
    ("posix", "system", _TOUCH),
    ("builtins", "eval", _OPEN),
    ("builtins", "exec", _OPEN),
    ("__builtin__", "eval", _OPEN),
    ("subprocess", "getoutput", _TOUCH),
    ("runpy", "run_path", MARKER),
    ("importlib", "import_module", "evil_module"),
    ("timeit", "timeit", _OPEN),
    ("code", "compile_command", _OPEN),
    ("cProfile", "run", _OPEN),
    ("pdb", "run", _OPEN),
    ("trace", "main", MARKER),
    ("os", "popen", _TOUCH),
    ("io", "open", MARKER),
    ("builtins", "__import__", "evil_module"),
    ("pathlib", "Path.touch", MARKER),
    ("torch", "load", MARKER),
    ("torch.hub", "load", MARKER),
    ("numpy", "load", MARKER),
    ("ctypes", "CDLL", MARKER),
    ("webbrowser", "open", MARKER),
    ("pickle", "loads", "x"),
    ("sys", "exit", "x"),
    ("functools", "partial", "x"),
    ("operator", "attrgetter", "system"),
    ("types", "CodeType", "x"),
    ("marshal", "loads", "x"),
    ("shutil", "rmtree", MARKER),
    ("socket", "gethostbyname", "127.0.0.1"),
    ("wherry", "convert", MARKER),
    ("wherry.runtime.child", "run", MARKER),
    ("torch._utils", "_rebuild_tensor_v3", "x"),
    ("collections", "OrderedDict.__init__", "x"),
    ("numpy._core.multiarray", "_reconstruct.__globals__", "x"),
    ("torch", "FloatStorage.__reduce__", "x"),
)


def _text(word: str) -> bytes:
    data = word.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def _line(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def forms(module: str, name: str, word: str) -> dict[str, bytes]:
    """A pickle for each way to name and call a global."""
    old, arg = _line(module, name), _text(word)
    names = hostile.text(module) + hostile.text(name)
    escaped = "".join(f"\\u{ord(sign):04x}" for sign in module)
    memo = hostile.text(module) + b"\x94" + hostile.text(name) + b"\x940h\x00h\x01\x93"
    reduced = old + arg + b"\x85R"
    framed = names + b"\x93" + arg + b"\x85R"
    return {
        "p0": old + f"(V{word}\ntR.".encode(),
        "p1": old + b"(" + arg + b"tR.",
        "p2": b"\x80\x02" + reduced + b".",
        "p3": b"\x80\x03" + reduced + b".",
        "p4": hostile.framed(framed),
        "p5": b"\x80\x05" + framed + b".",
        "p9": b"\x80\x09" + reduced + b".",
        "inst": f"(V{word}\ni{module}\n{name}\n.".encode(),
        "obj": b"\x80\x02(" + old + arg + b"o.",
        "newobj": b"\x80\x02" + old + arg + b"\x85\x81.",
        "newobj-ex": b"\x80\x04" + old + arg + b"\x85}\x92.",
        "build": b"\x80\x02" + old + b")\x81}" + _text("run") + arg + b"sb.",
        "state": b"\x80\x02"
        + _line("collections", "OrderedDict")
        + b")R}"
        + _text("__reduce__")
        + reduced
        + b"sb.",
        "escaped": b"V" + escaped.encode() + b"\n" + hostile.text(name) + b"\x93" + arg + b"\x85R.",
        "memo": b"\x80\x04" + memo + arg + b"\x85R.",
        "put": b"\x80\x04V"
        + module.encode()
        + b"\np7\n0V"
        + name.encode()
        + b"\np9\n0g7\ng9\n\x93"
        + arg
        + b"\x85R.",
        "bytes-names": b"\x80\x04C"
        + bytes([len(module)])
        + module.encode()
        + hostile.text(name)
        + b"\x93"
        + arg
        + b"\x85R.",
        "string-names": f"S'{module}'\nS'{name}'\n".encode() + b"\x93" + arg + b"\x85R.",
        "as-key": b"\x80\x02}" + reduced + b"K\x01s.",
        "in-set": b"\x80\x04\x8f(" + reduced + b"\x90.",
        **_odd_forms(module, name, word),
    }


def _odd_forms(module: str, name: str, word: str) -> dict[str, bytes]:
    """Those that end early, twice or in the middle, or hide the call in another object."""
    old, arg = _line(module, name), _text(word)
    reduced = old + arg + b"\x85R"
    framed = hostile.text(module) + hostile.text(name) + b"\x93" + arg + b"\x85R"
    return {
        "popped": b"\x80\x02" + reduced + b"0}.",
        "pop-mark": b"\x80\x02(" + reduced + b"1}.",
        "second": b"\x80\x02}." + b"\x80\x02" + reduced + b".",
        "no-end": b"\x80\x02" + reduced,
        "behind-end": b"}." + reduced + b".",
        "protocol-twice": b"\x80\x02\x80\x04" + reduced + b".",
        "frame-short": b"\x80\x04\x95" + struct.pack("<Q", 3) + framed + b".",
        "frame-long": b"\x80\x04\x95" + struct.pack("<Q", 1 << 62) + framed + b".",
        "persistent": b"\x80\x02" + _text("storage") + reduced + arg + arg + b"K\x01t0(" + reduced + b"tQ.",
        "persistent-line": f"P{word}\n0".encode() + reduced + b".",
        "extension": b"\x80\x02\x82\x01" + arg + b"\x85R.",
        "list-item": b"\x80\x02](" + reduced + b"e.",
        "rebuild": b"\x80\x02"
        + _line("torch._utils", "_rebuild_tensor_v2")
        + b"("
        + reduced
        + b"K\x00))\x89}tR.",
        "reconstruct": b"\x80\x02"
        + _line("numpy.core.multiarray", "_reconstruct")
        + old
        + b"K\x00\x85C\x01b\x87R.",
        "buffer": b"\x80\x05\x97\x98" + reduced + b".",
        "cycle": b"\x80\x02]q\x00h\x00a" + reduced + b"0.",
        "twice": b"\x80\x02" + old + b"2" + arg + b"\x85R0" + arg + b"\x85R.",
        "line-end": f"c{module}\r\n{name}\r\n".encode() + arg + b"\x85R.",
        "spaces": f"c {module} \n {name} \n".encode() + arg + b"\x85R.",
        "wide": b"\x80\x04\x8d"
        + struct.pack("<Q", len(module))
        + module.encode()
        + hostile.text(name)
        + b"\x93"
        + arg
        + b"\x85R.",
        "junk": b"\x80\x02N0K\x010" * 400 + reduced + b".",
        "dotted": b"\x80\x04"
        + hostile.text(module.partition(".")[0])
        + hostile.text(f"{name}.__call__")
        + b"\x93"
        + arg
        + b"\x85R.",
        "getattr": b"\x80\x02"
        + _line("builtins", "getattr")
        + _line("builtins", "__import__")
        + _text(module)
        + b"\x85R"
        + _text(name.partition(".")[0])
        + b"\x86R"
        + arg
        + b"\x85R.",
    }


def archive(members: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    """A zip archive of members."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as file:
        for name, data in members.items():
            file.writestr(name, data)
    return buffer.getvalue()


def _torch(data: bytes, method: int = zipfile.ZIP_STORED) -> bytes:
    return archive(
        {
            "archive/data.pkl": data,
            "archive/byteorder": b"little",
            "archive/data/0": bytes(64),
            "archive/version": b"3\n",
        },
        method,
    )


def _legacy(data: bytes) -> bytes:
    magic = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03.\x80\x02}."
    return magic + data + b"\x80\x02]."


def _tar(data: bytes) -> bytes:
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
    "torch-tar": ("model.tar", _tar, {}),
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
    "torch",
    "pickle",
    "zip",
    "numpy",
    "npz",
    "gzip",
    "bzip2",
    "xz",
    "zlib",
    "seven",
    "flax",
    "keras",
    "equinox",
    "safetensors",
)


def wrap_pickle(wrapper: str, data: bytes) -> Callable[[Path], Path]:
    """Writes a pickle in a container; the path is the file or the folder, whichever a user would name."""
    name, pack, neighbours = WRAPPERS[wrapper]

    def make(folder: Path) -> Path:
        for other, text in neighbours.items():
            (folder / other).write_bytes(text)
        (folder / name).write_bytes(pack(data))
        return folder / name if wrapper.startswith(_FILE_ALONE) and not neighbours else folder

    return make


def cases() -> Iterator[Case]:
    """Every call in three forms, every form with two calls in every container, and the fixed ones of the tests."""
    kinds = list(forms("os", "system", _TOUCH))
    for number, call in enumerate(CALLS):
        for kind in dict.fromkeys(
            ("p0", "p4", *(kinds[(number * 5 + step) % len(kinds)] for step in range(4)))
        ):
            data = forms(*call)[kind]
            yield Case(f"pickle-call/{call[0]}.{call[1]}-{kind}", wrap_pickle("pickle", data), evil=True)
    for wrapper in WRAPPERS:
        for number, kind in enumerate(kinds):
            data = forms(*CALLS[number % 6])[kind]
            yield Case(f"{wrapper}/{kind}", wrap_pickle(wrapper, data), evil=wrapper in LOADED)
    for name, (file, write) in hostile.FILES.items():
        yield Case(f"corpus/{name}", _write_fixed(file, write), evil=True)


# Containers from which a usual loader takes the pickle that was put there.
LOADED = frozenset(
    (
        "pickle",
        "pickle-bin",
        "pickle-bare-name",
        "torch-zip",
        "torch-hub",
        "torch-legacy",
        "torch-tar",
        "numpy",
        "npz",
        "npz-deflated",
        "dcp",
        "lingua",
        "meta",
    )
)


def _write_fixed(file: str, write: Callable[[Path], object]) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        write(folder / file)
        return folder / file

    return make
