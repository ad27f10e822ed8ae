"""The data of the sandbox: the rules of files, and the filter of calls, which a small machine carries out here.

What the kernel makes of them is tested by a hostile loader: tests/prove/test_native_sandbox.py.
"""

from __future__ import annotations

import errno
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from wherry.core import sandbox

MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
ALLOW, KILL = 0x7FFF0000, 0x80000000
REFUSE = 0x00050000 | errno.EPERM
SOCKETPAIR, READ, CLONE, FUTEX = (53, 199), (0, 63), (56, 220), (202, 98)


def verdict(program, number, audit):
    """What a filter says of a call: its four instructions, carried out."""
    data, value, at = struct.pack("=II", number, audit), 0, 0
    lines = list(struct.iter_unpack("=HBBI", program))
    while True:
        kind, yes, no, operand = lines[at]
        at += 1
        if kind == 0x20:
            (value,) = struct.unpack_from("=I", data, operand)
        elif kind == 0x15:
            at += yes if value == operand else no
        elif kind == 0x35:
            at += yes if value >= operand else no
        else:
            assert kind == 0x06
            return operand


@pytest.mark.parametrize("network", [False, True])
@pytest.mark.parametrize("machine", MACHINES)
def test_the_filter_refuses_the_calls_of_its_tables_and_no_others(machine, network):
    audit, column = MACHINES[machine]
    program = sandbox.filter_program(machine, network=network)
    closed = sandbox.EXECUTION | sandbox.OTHERS
    for name, row in (closed | sandbox.NETWORK).items():
        if row[column] is not None:
            expected = ALLOW if network and name in sandbox.NETWORK else REFUSE
            assert verdict(program, row[column], audit) == expected, name
    for row in (SOCKETPAIR, READ, CLONE, FUTEX):
        assert verdict(program, row[column], audit) == ALLOW


@pytest.mark.parametrize("machine", MACHINES)
def test_calls_of_another_architecture_end_the_process(machine):
    program = sandbox.filter_program(machine, network=True)
    for audit in (0x40000003, *(other for name, (other, _) in MACHINES.items() if name != machine)):
        assert verdict(program, 0, audit) == KILL


def test_calls_with_short_pointers_are_refused():
    program = sandbox.filter_program("x86_64", network=True)
    for number in (0x40000000, 0x40000000 + 520, 0xFFFFFFFF):
        assert verdict(program, number, MACHINES["x86_64"][0]) == REFUSE


def test_no_instruction_jumps_beyond_the_filter():
    """A jump has eight bits: more than 255 calls would need another form."""
    lines = list(struct.iter_unpack("=HBBI", sandbox.filter_program("x86_64", network=False)))
    assert all(at + 1 + max(yes, no) < len(lines) for at, (_, yes, no, _) in enumerate(lines[:-2]))


def test_only_the_own_folder_may_be_written(tmp_path):
    rules = list(sandbox.file_rules([str(tmp_path / "checkpoint")], [str(tmp_path / "own")], network=False))
    writing = [path for path, rights in rules if rights & sandbox.WRITE & ~sandbox.READ & ~sandbox.RUN]
    devices = [
        path
        for path in writing
        if Path(path).is_relative_to("/dev") and not Path(path).is_relative_to(tmp_path)
    ]
    assert [path for path in writing if path not in devices] == [str(tmp_path / "own")]
    assert dict(rules)[str(tmp_path / "checkpoint")] == sandbox.READ
    assert not dict(rules)[str(tmp_path / "own")] & sandbox.RUN & ~sandbox.READ, (
        "nothing there may be executed"
    )


@pytest.mark.parametrize("network", [False, True])
def test_secrets_of_this_machine_are_not_among_what_the_interpreter_needs(network, tmp_path):
    rules = sandbox.file_rules([], [str(tmp_path)], network=network)
    roots = [Path(path) for path, _ in rules]
    secrets = (
        *(
            "/etc/shadow",
            "/etc/sudoers",
            "/run/docker.sock",
            "/var/run/secrets",
            "/tmp/x",
            "/mnt/x",
            "/dev/sda",
        ),
        *(Path.home() / name for name in (".ssh/id", ".aws/credentials", ".netrc", ".config/gcloud/x")),
    )
    for secret in map(Path, secrets):
        assert not [root for root in roots if secret.is_relative_to(root)]


@pytest.mark.parametrize(
    ("value", "wanted"), [("", True), ("on", True), ("off", False), ("false", False), ("0", False)]
)
def test_the_user_can_switch_it_off(monkeypatch, value, wanted):
    monkeypatch.setenv("WHERRY_CHILD_SANDBOX", value)
    assert sandbox.is_wanted() is wanted


def test_a_process_with_threads_is_not_called_confined():
    """Landlock before version 8 leaves other threads as they are: entering then is an error, not a half measure."""
    if not 0 < sandbox.landlock_version() < 8:
        pytest.skip("this kernel has no Landlock, or one that limits all threads at once")
    program = (
        "import threading, time; threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
        "from wherry.core import sandbox\nfrom wherry.errors import UnsupportedError\n"
        "try:\n    sandbox.confine_files([], [])\nexcept UnsupportedError as error:\n    print(error.cure)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "export WHERRY_CHILD_SANDBOX=off\n"


@pytest.mark.parametrize("missing", ["landlock", "seccomp"])
def test_a_kernel_without_it_is_named_and_no_error(monkeypatch, missing):
    monkeypatch.setattr(sandbox, "_syscall", lambda *_: -1)
    if missing == "landlock":
        assert sandbox.landlock_version() == 0
        assert sandbox.confine_files([], []) is False
    else:
        assert sandbox.has_seccomp() is False
        assert sandbox.confine_calls() is False
