"""compile: builds the library of the kernels from its C files, next to them.

    python wherry/kernels/compile.py

When wherry is installed or packed as a wheel, `infra/build_hook.py` does the same. Only the standard library is
imported, since no other package is there yet; and what compiling needs only then, as every command loads the library.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Container
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
_FLAGS = (
    "-O3",
    "-fno-tree-slp-vectorize",
    "-std=gnu11",
    "-shared",
    "-fPIC",
    "-fvisibility=hidden",
    "-pthread",
)
_COMPILERS = ("cc", "gcc", "clang")
_OLDEST_GLIBC = (2, 17)  # of manylinux2014, as the packages that wherry needs


@cache
def sources() -> tuple[Path, ...]:
    """The C files."""
    return tuple(sorted(FOLDER.glob("*.c")))


@cache
def library_file() -> Path:
    """Where the library of these C files is, compiled or not; its name has their hash."""
    found = hashlib.sha256()
    for file in sources():
        found.update(file.read_bytes())
    return FOLDER / f"kernels-{found.hexdigest()[:16]}.so"


def compiler() -> str | None:
    """The C compiler: what CC names, or the first that is there; None without any."""
    import shutil

    stated = os.environ.get("CC")
    return next((path for name in ([stated] if stated else _COMPILERS) if (path := shutil.which(name))), None)


def compile_library(*flags: str, target: Path | None = None) -> Path | None:
    """Compile the C files, unless that was done.

    Args:
        flags: more flags for the compiler.
        target: the library; next to the C files by default.

    Returns:
        The library; None if there is no compiler, or it failed: that is printed, and wherry works without.
    """
    import subprocess

    target = target or library_file()
    if target.exists():
        return target
    command = compiler()
    if command is None:
        sys.stderr.write("wherry: no C compiler; numpy is used instead of the kernels\n")
        return None
    unfinished = target.with_name(f"{target.name}.{os.getpid()}")
    words = [command, *_FLAGS, *flags, "-o", str(unfinished), *map(str, sources())]
    done = subprocess.run(  # noqa: S603  a compiler, and paths of this folder
        words, check=False, capture_output=True, text=True
    )
    if done.returncode:
        sys.stderr.write(
            f"wherry: the kernels were not compiled; numpy is used instead\n{done.stderr[:2000]}\n"
        )
        unfinished.unlink(missing_ok=True)
        return None
    unfinished.replace(target)
    for former in target.parent.glob("kernels-*.so"):
        if former != target:
            former.unlink(missing_ok=True)
    return target


def wheel_tag(library: Path, accepted: Container[str] = ()) -> str:
    """The tag of a wheel with the library, which needs no certain Python: it is loaded with ctypes.

    Args:
        library: the library; it needs no other than the C library.
        accepted: the platforms whose wheels the running Python installs.

    Returns:
        `manylinux` with the version of glibc that the library needs (PEP 600), if that is accepted; else this platform.
    """
    import re
    import sysconfig

    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    versions = re.findall(rb"\0GLIBC_(\d+)\.(\d+)(?:\.\d+)?(?=\0)", library.read_bytes())
    if versions:
        major, minor = max(_OLDEST_GLIBC, *((int(major), int(minor)) for major, minor in versions))
        many = platform.replace("linux_", f"manylinux_{major}_{minor}_", 1)
        platform = many if many in accepted else platform
    return f"py3-none-{platform}"


if __name__ == "__main__":
    raise SystemExit(0 if compile_library() else 1)
