"""The sandbox of native children, attacked by a loader that a checkpoint has taken over.

The loader tries to read, write, connect and execute (`tests.support.hostile_loaders`): once in the sandbox, where each
attempt is refused, and once without it, where each succeeds, so that what is refused was worth refusing.
"""

from __future__ import annotations

import errno
import json
import socket

import numpy as np
import pytest

import wherry
from tests.support.hostile_loaders import ALLOWED, ATTEMPTS, REFUSED
from wherry.core import sandbox
from wherry.integrations import native

THREADS = ("thread", "earlier thread", "process")
# What Landlock refuses; the rest is refused by seccomp, some by both.
OF_FILES = (
    *("read another file", "list another folder", "write to another file", "truncate another file", "make a file"),
    *("make a folder", "make a link", "move a file", "write to the checkpoint", "write next to the checkpoint"),
    *("read the environment of the caller", "signal the caller"),
)  # fmt: skip
VERSIONS = {"signal the caller": 6, "truncate another file": 3}  # of Landlock; others are of the first


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Whether there is a sandbox → who attempts → attempt → the number of its error."""
    safetensors = pytest.importorskip("safetensors.numpy", reason="safetensors is not installed")
    found = {}
    with (
        pytest.MonkeyPatch.context() as patch,
        socket.socket() as server,
        socket.socket(socket.AF_UNIX) as local,
    ):
        base = tmp_path_factory.mktemp("sandbox")
        server.bind(("127.0.0.1", 0))
        server.listen(50)
        (base / "outside").mkdir()
        (base / "outside" / "secret").write_text("secret")
        local.bind(str(base / "outside" / "socket"))
        local.listen(50)
        folder = base / str(server.getsockname()[1])
        folder.mkdir()
        safetensors.save_file({"w": np.arange(6, dtype="f4")}, folder / "a.safetensors")
        loader = native.LOADERS["safetensors"]._replace(
            function="tests.support.hostile_loaders:load", package="numpy"
        )
        patch.setitem(native.LOADERS, "safetensors", loader)
        for wanted in ("", "off"):
            patch.setenv(sandbox.SWITCH, wanted)
            report = wherry.verify(folder / "a.safetensors", level="native")
            assert report.verdict == "refused", report
            text = report.failed[0].reason.partition("RuntimeError: ")[2]
            by_thread = {
                who: dict(zip(ATTEMPTS, numbers, strict=True)) for who, numbers in json.loads(text).items()
            }
            found[wanted == ""] = by_thread, report.native.sandbox
    return found


def require(attempt):
    """Skip where the kernel lacks what refuses an attempt."""
    if attempt in OF_FILES:
        version = sandbox.landlock_version()
        if version < VERSIONS.get(attempt, 1):
            pytest.skip(f"the kernel's Landlock has version {version}")
    elif not sandbox.has_seccomp():
        pytest.skip("the kernel has no seccomp")


def test_the_report_says_what_is_limited(outcomes):
    expected = (("files",) if sandbox.landlock_version() else ()) + (
        ("calls", "network") if sandbox.has_seccomp() else ()
    )
    assert outcomes[True][1] == expected
    assert outcomes[False][1] == ()


@pytest.mark.parametrize("attempt", REFUSED)
def test_an_attempt_of_a_loader_is_refused(outcomes, attempt):
    require(attempt)
    found = {who: outcomes[True][0][who][attempt] for who in THREADS}
    assert set(found.values()) <= {errno.EACCES, errno.EPERM}, found


@pytest.mark.parametrize("attempt", REFUSED)
def test_without_a_sandbox_the_attempt_succeeds(outcomes, attempt):
    assert {outcomes[False][0][who][attempt] for who in THREADS} == {0}


@pytest.mark.parametrize("attempt", ALLOWED)
def test_what_a_loader_needs_is_allowed(outcomes, attempt):
    assert {outcomes[True][0][who][attempt] for who in THREADS} == {0}
