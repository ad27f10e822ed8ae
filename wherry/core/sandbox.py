"""sandbox: limit what this process may do, by Landlock and seccomp, where the kernel has them.

A process that is about to load a checkpoint with another library gives up what loading does not need. Nothing can be
given back: the limits hold for this process and all that it starts.

- `confine_files` (Landlock): reads only below the folders that the caller names and those that the interpreter needs,
  writes only below the folders that the caller names; from Landlock 6 on, signals only to processes in the sandbox.
  Landlock limits the calling thread and those that it starts later, so it comes before the first thread.
- `confine_calls` (seccomp): no program is executed, no socket is opened, no process is traced, no owner, mode or time
  of a file is changed. The filter is set for all threads at once, so it comes after the imports, of which some execute
  programs.

What is refused fails with EACCES or EPERM. Not limited: processor time and memory (the parent does that), reading below
/proc and /sys (memory and environment of other processes stay closed, names and command lines do not), asking whether a
file exists, and forking.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import site
import struct
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from wherry.core.lazy_dataclass import dataclass
from wherry.errors import UnsupportedError

SWITCH = "WHERRY_CHILD_SANDBOX"

# Folders and files that the interpreter and libraries read; those that do not exist are left out.
SYSTEM_READS = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/opt", "/nix/store", "/gnu/store"),
    *("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/localtime", "/etc/timezone", "/etc/mime.types"),
    *("/etc/passwd", "/etc/group", "/etc/nsswitch.conf", "/etc/alternatives", "/etc/os-release", "/etc/OpenCL"),
    *("/proc", "/sys"),
)  # fmt: skip
NETWORK_READS = (
    *("/etc/ssl", "/etc/pki", "/etc/ca-certificates", "/etc/crypto-policies"),
    *("/etc/hosts", "/etc/resolv.conf", "/etc/host.conf", "/etc/gai.conf", "/etc/services", "/run/systemd/resolve"),
)  # fmt: skip
DEVICES = (
    *("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom"),
    *("/dev/nvidia*", "/dev/dri", "/dev/kfd", "/dev/accel*", "/dev/vfio", "/dev/dxg"),
)  # fmt: skip

# Rights of Landlock, by the version that introduced them (include/uapi/linux/landlock.h).
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_FOLDER = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_REMOVE_AND_MAKE = sum(1 << bit for bit in range(4, 13))
_REFER, _TRUNCATE, _DEVICE = 1 << 13, 1 << 14, 1 << 15
_RIGHTS = (
    (1, _EXECUTE | _WRITE_FILE | _READ_FILE | _READ_FOLDER | _REMOVE_AND_MAKE),
    (2, _REFER),
    (3, _TRUNCATE),
    (5, _DEVICE),
)
_OF_FILES = (
    _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _DEVICE
)  # the rights that a rule of a file may have
READ = _READ_FILE | _READ_FOLDER
RUN = READ | _EXECUTE
USE = READ | _WRITE_FILE | _TRUNCATE | _DEVICE
WRITE = READ | _WRITE_FILE | _REMOVE_AND_MAKE | _REFER | _TRUNCATE
_SCOPES = (1 << 0) | (1 << 1)  # from version 6 on: abstract sockets, and signals
_SCOPED_VERSION, _ALL_THREADS_VERSION = 6, 8
_ALL_THREADS = 1 << 3  # of landlock_restrict_self, from version 8 on
_CREATE, _ADD, _RESTRICT = 444, 445, 446  # the same on every architecture
_ASK_VERSION, _BELOW_PATH = 1 << 0, 1

# Calls that are refused: name → its number on x86_64 and on aarch64; None where it has no such call.
EXECUTION = {"execve": (59, 221), "execveat": (322, 281)}
NETWORK = {"socket": (41, 198), "connect": (42, 203), "bind": (49, 200), "listen": (50, 201)}
OTHERS = {
    # does any of these without calling it
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    # other processes of this user
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "pidfd_getfd": (438, 438),
    # what Landlock does not limit: mode, owner, attributes and times of files
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452),
    "chown": (92, None), "lchown": (94, None), "fchown": (93, 55), "fchownat": (260, 54),
    "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7), "setxattrat": (463, 463),
    "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16), "removexattrat": (466, 466),
    "utime": (132, None), "utimes": (235, None), "futimesat": (261, None), "utimensat": (280, 88),
    # the machine, where this user may change it
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "open_tree": (428, 428),
    "move_mount": (429, 429), "fsopen": (430, 430), "fsmount": (432, 432), "mount_setattr": (442, 442),
    "unshare": (272, 97), "setns": (308, 268), "open_by_handle_at": (304, 265), "bpf": (321, 280),
    "perf_event_open": (298, 241), "userfaultfd": (323, 282), "init_module": (175, 105), "finit_module": (313, 273),
    "delete_module": (176, 106), "kexec_load": (246, 104), "kexec_file_load": (320, 294), "reboot": (169, 142),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219), "settimeofday": (164, 170),
    "clock_settime": (227, 112), "acct": (163, 89), "swapon": (167, 224), "swapoff": (168, 225),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Machine:
    """An architecture: its number in filters, the number of its call seccomp, and its column in the tables of calls."""

    audit: int
    seccomp: int
    column: int


_MACHINES = {"x86_64": _Machine(0xC000003E, 317, 0), "aarch64": _Machine(0xC00000B7, 277, 1)}
_X32 = 0x40000000  # numbers from here on are calls of x86_64 with short pointers, which have these same names
_NO_NEW_PRIVILEGES, _CAPABILITIES = (
    38,
    0x20080522,
)  # an option of prctl, and the version of the form of capset
_READ_ANY_FILE = (1 << 1) | (1 << 2)  # the capabilities CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH
_SET_FILTER, _ACTION_AVAILABLE = 1, 2
_FILTER_ALL_THREADS = 1 << 0
_ALLOW, _REFUSE, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_LOAD, _IF_EQUAL, _IF_AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06  # instructions of the filter
_AT_NUMBER, _AT_MACHINE = 0, 4  # in the data that the filter sees


def landlock_version() -> int:
    """The version of the kernel's Landlock; 0 where it has none, or a container forbids it."""
    if sys.platform != "linux":
        return 0
    return max(0, _syscall(_CREATE, None, ctypes.c_size_t(0), _ASK_VERSION))


def has_seccomp() -> bool:
    """Whether filters of calls can be set in this kernel, and wherry knows the calls of its architecture."""
    machine = _MACHINES.get(platform.machine())
    if sys.platform != "linux" or machine is None:
        return False
    action = ctypes.c_uint32(_REFUSE)
    return _syscall(machine.seccomp, _ACTION_AVAILABLE, 0, ctypes.byref(action)) == 0


def is_wanted() -> bool:
    """Whether the user has not switched the sandbox off (`WHERRY_CHILD_SANDBOX=off`)."""
    return os.environ.get(SWITCH, "").strip().lower() not in {"off", "false", "0", "no"}


def file_rules(reads: Iterable[str], writes: Iterable[str], *, network: bool) -> Iterator[tuple[str, int]]:
    """Paths with the rights of Landlock below them.

    Args:
        reads, writes: what the caller needs.
        network: whether the process uses the network, which needs certificates and names.
    """
    here = sys.modules["wherry"].__path__
    libraries = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    interpreter = (
        *(sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix, site.getusersitepackages()),
        *(*sys.path, *here, *map(os.path.realpath, here), os.path.realpath(sys.executable), *libraries),
    )
    for path in (*SYSTEM_READS, *interpreter):
        if path.startswith("/"):
            yield path, RUN
    for path in (*(NETWORK_READS if network else ()), *reads):
        yield path, READ
    for pattern in DEVICES:
        yield from ((path, USE) for path in sorted(map(str, Path("/").glob(pattern[1:]))))
    for path in writes:
        yield path, WRITE


def confine_files(reads: Iterable[str], writes: Iterable[str], *, network: bool = False) -> bool:
    """Limit this thread, and those that it starts, to some files.

    Args:
        reads: files and folders that may be read, besides those of the interpreter.
        writes: folders below which everything may be done, but nothing executed.
        network: whether the process uses the network.

    Returns:
        Whether it is so; False where the kernel has no Landlock.

    Raises:
        UnsupportedError: this process already has other threads, which would stay without limits.
    """
    version = landlock_version()
    if not version:
        return False
    if version < _ALL_THREADS_VERSION and len([*Path("/proc/self/task").iterdir()]) > 1:
        raise UnsupportedError(
            "the sandbox cannot be entered: something has started threads before it",
            cure=f"export {SWITCH}=off",
        )
    handled = sum(rights for since, rights in _RIGHTS if since <= version)
    scopes = _SCOPES if version >= _SCOPED_VERSION else 0
    attributes = struct.pack("=QQQ", handled, 0, scopes)
    # As long as a kernel of this version knows them.
    size = 8 if version < 4 else 16 if version < _SCOPED_VERSION else len(attributes)  # noqa: PLR2004  networks are of 4
    buffer = ctypes.create_string_buffer(attributes, len(attributes))
    ruleset = _call_kernel(_CREATE, buffer, ctypes.c_size_t(size), 0)
    try:
        for path, rights in file_rules(reads, writes, network=network):
            _add_rule(ruleset, path, rights & handled)
        _forgo_privileges()
        _call_kernel(_RESTRICT, ruleset, _ALL_THREADS if version >= _ALL_THREADS_VERSION else 0)
    finally:
        os.close(ruleset)
    return True


def _add_rule(ruleset: int, path: str, rights: int) -> None:
    """Add a rule; a path that does not exist, or cannot be reached, needs none."""
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        if not Path(path).is_dir():
            rights &= _OF_FILES
        rule = ctypes.create_string_buffer(struct.pack("=Qi", rights, place), 12)
        _call_kernel(_ADD, ruleset, _BELOW_PATH, rule, 0)
    finally:
        os.close(place)


def confine_calls(*, network: bool = False) -> bool:
    """Refuse all threads of this process, and what they start, the calls of the tables above.

    Args:
        network: whether the process uses the network, whose calls are then allowed.

    Returns:
        Whether it is so; False where the kernel has no seccomp, or its architecture is not known.
    """
    if not has_seccomp():
        return False
    name = platform.machine()
    program = filter_program(name, network=network)
    code = ctypes.create_string_buffer(program, len(program))
    header = ctypes.create_string_buffer(struct.pack("@HP", len(program) // 8, ctypes.addressof(code)))
    _forgo_privileges()
    _call_kernel(_MACHINES[name].seccomp, _SET_FILTER, _FILTER_ALL_THREADS, header)
    return True


def filter_program(machine: str, *, network: bool) -> bytes:
    """The instructions of the filter, eight bytes each.

    Args:
        machine: the architecture; calls of any other kill the process.
        network: whether the calls of the network are allowed.
    """
    known = _MACHINES[machine]
    refused = EXECUTION | OTHERS | ({} if network else NETWORK)
    numbers = sorted(number for row in refused.values() if (number := row[known.column]) is not None)
    if machine == "x86_64":
        numbers = [*numbers, _X32]
    lines = [(_LOAD, 0, 0, _AT_MACHINE), (_IF_EQUAL, 1, 0, known.audit), (_RETURN, 0, 0, _KILL)]
    lines.append((_LOAD, 0, 0, _AT_NUMBER))
    for at, number in enumerate(numbers):
        kind = _IF_AT_LEAST if number == _X32 else _IF_EQUAL
        lines.append((kind, len(numbers) - at, 0, number))
    lines += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _REFUSE | errno.EPERM)]
    return b"".join(struct.pack("=HBBI", *line) for line in lines)


def _forgo_privileges() -> None:
    """Drop this thread's capabilities, but for those of root to read any file, and gain none by a program.

    The kernel requires the second before either limit. With the first, root reads no environment of another process.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    header = struct.pack("=Ii", _CAPABILITIES, 0)
    held = ctypes.create_string_buffer(24)
    libc.capget(header, held)
    low, high = struct.unpack("=3I", held.raw[:12]), (0, 0, 0)
    kept = ctypes.create_string_buffer(
        struct.pack("=6I", *(word & _READ_ANY_FILE for word in low), *high), 24
    )
    if libc.capset(header, kept) or libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "dropping privileges failed")


def _syscall(number: int, *words: object) -> int:
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    return call(*(ctypes.c_long(word) if isinstance(word, int) else word for word in (number, *words)))


def _call_kernel(number: int, *words: object) -> int:
    result = _syscall(number, *words)
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{os.strerror(ctypes.get_errno())} (system call {number})")
    return result
