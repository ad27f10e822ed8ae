"""Children of wherry: where they stand, what they see, what stops them, and that none outlives its parent."""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

import wherry
from tests.support.house import MODULES, label
from tests.support.processes import gone, is_running
from wherry.core import child
from wherry.core.child import Limits, NoAnswerError
from wherry.errors import UsageError

PROGRAMS = "tests.support.child_programs"
AMPLE = Limits(seconds=120, memory=4 << 30)
SECRETS = {
    "AWS_SECRET_ACCESS_KEY": "secret", "AWS_SESSION_TOKEN": "secret", "AZURE_STORAGE_KEY": "secret",
    "GOOGLE_APPLICATION_CREDENTIALS": "/secret.json", "HF_TOKEN": "secret", "WHERRY_KEY": "secret",
    "WHERRY_SIGNING_PASSWORD": "secret", "PREFECT_API_KEY": "secret", "MLFLOW_TRACKING_TOKEN": "secret",
    "PGPASSWORD": "secret", "GITHUB_TOKEN": "secret", "HTTPS_PROXY": "http://user:secret@proxy:1",
}  # fmt: skip
HARMFUL = ("PYTHONPATH", "PYTHONSTARTUP", "PYTHONHOME", "PYTHONINSPECT", "LD_PRELOAD", "LD_AUDIT", "BASH_ENV")


def run(*words, limits=AMPLE, **more):
    return child.run(PROGRAMS, words, purpose="the test", limits=limits, **more)


def seen(**more):
    done = run("surroundings", **more)
    assert done.code == 0, done.errors
    return json.loads(done.output)


def wait_until(happened, otherwise):
    deadline = time.monotonic() + AMPLE.seconds
    while not happened():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.01)


def pids_in(file):
    wait_until(file.exists, "the child did not start")
    return [int(word) for word in file.read_text().split()]


def test_a_child_stands_in_an_empty_private_folder_that_is_removed():
    found = seen()
    assert (found["files"], found["mode"]) == ([], 0o700)
    assert found["folder"] != str(Path.cwd())
    assert not Path(found["folder"]).exists()


def test_a_child_gets_words_and_text():
    done = run("surroundings", "--word", "ü", text="ü\n")
    found = json.loads(done.output)
    assert (found["argv"], found["text"]) == (["surroundings", "--word", "ü"], "ü\n")


def test_a_child_sees_no_secret_and_nothing_that_python_or_the_linker_obeys(monkeypatch, tmp_path):
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    for name in HARMFUL:
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    environment = seen(variables={"PREFECT_API_URL": "http://prefect"})["environment"]
    assert not {*SECRETS, *HARMFUL} & set(environment)
    assert not [value for value in environment.values() if "secret" in value]
    assert environment["XLA_FLAGS"].endswith("=2")
    assert environment["CUDA_VISIBLE_DEVICES"] == "1"
    assert environment["PREFECT_API_URL"] == "http://prefect"
    assert environment["PATH"] == os.environ["PATH"]


def test_a_child_imports_wherry_from_where_its_parent_did_and_nothing_from_the_working_folder(
    monkeypatch, tmp_path
):
    for name in ("sitecustomize", "json", "hostile_module"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'MARKER')!r}, 'w')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = seen()
    assert found["wherry"] == wherry.__file__
    runtime_folder = str(
        Path(child.__file__).parent
    )  # where `threads` or `memory` would be found by their short names
    assert not {"", ".", str(tmp_path), found["folder"], runtime_folder} & set(found["path"])
    assert json.loads(run("import_nothing", "hostile_module").output) == ["hostile_module"]
    assert not (tmp_path / "MARKER").exists()


def test_an_installed_wherry_is_found_by_the_child_itself(monkeypatch):
    monkeypatch.setattr("site.getsitepackages", lambda: [str(Path(wherry.__file__).parent.parent)])
    assert child.command("m", ["w"])[3:] == ["", str(os.getpid()), "m", "w"]


def test_a_child_that_hangs_is_stopped_with_what_it_started(tmp_path):
    file = tmp_path / "pids"
    with child.child_process(PROGRAMS, ["hang", str(file)], purpose="the test") as hanging:
        family = pids_in(file)
        with pytest.raises(NoAnswerError, match="the test timed out after 3 s") as caught:
            hanging.wait(Limits(3, 4 << 30))
    assert caught.value.exit_code == 10
    assert caught.value.cure == "raise the limit: export WHERRY_CHILD_TIMEOUT=6s"
    assert gone(family)


def test_a_descendant_that_takes_memory_is_stopped():
    with pytest.raises(NoAnswerError, match=r"exceeded its memory limit of 524\.3 MB") as caught:
        run("allocate", limits=Limits(120, 500 << 20))
    assert caught.value.cure == f"raise the limit: export WHERRY_CHILD_MEMORY={1000 << 20}"


def test_a_child_that_prints_without_end_is_stopped(monkeypatch):
    monkeypatch.setattr(child, "_MOST_OUTPUT", 8 << 20)
    with pytest.raises(NoAnswerError, match="exceeded the output limit of"):
        run("chatter")


def test_a_child_that_fails_has_a_code_and_says_why():
    done = run("no_such_verb")
    assert done.code == 1
    assert "no_such_verb" in done.errors


@contextmanager
def parent_of(file, *words):
    """A parent of a child that hangs; its process, and the numbers of its child and of what that has started."""
    line = [sys.executable, "-m", PROGRAMS, *words, "hang", str(file)]
    with subprocess.Popen(line, stderr=subprocess.DEVNULL) as parent:
        family = pids_in(file)
        try:
            yield parent, *family
        finally:
            for pid in (parent.pid, *family):
                if is_running(pid):
                    os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_child_outlives_an_interrupted_parent(number, tmp_path):
    with parent_of(tmp_path / "pids", "wait_for") as (parent, child_pid, grandchild):
        parent.send_signal(number)
        parent.wait(AMPLE.seconds)
        assert gone([child_pid])
        if number != signal.SIGKILL:
            # the kernel kills the child of a parent that could not, not the child's own
            assert gone([grandchild])


@pytest.mark.parametrize("moment", ["start", "end"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_no_child_outlives_a_parent_that_is_interrupted_while_it_starts_or_ends_one(moment, number, tmp_path):
    """The child is at work before its parent is back from starting it; and some press Ctrl-C twice."""
    with parent_of(tmp_path / "pids", "wait_for_held", moment, str(tmp_path)) as (parent, *family):
        if moment == "end":
            parent.send_signal(number)
        wait_until((tmp_path / "held").exists, "it was not held")
        parent.send_signal(number)
        (tmp_path / "go").touch()
        assert parent.wait(AMPLE.seconds) != 0
        assert gone(family)


def test_a_handler_of_sigterm_is_left_as_it_was():
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a flow of another test may have left its own
    try:
        run("surroundings")
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)


def test_what_cannot_start_says_nothing_of_the_checkpoint(monkeypatch, tmp_path):
    monkeypatch.setattr(child.tempfile, "tempdir", str(tmp_path / "nothing"))
    with pytest.raises(
        NoAnswerError, match="the test failed to start: storage failed: No such file"
    ) as caught:
        run("surroundings")
    assert "TMPDIR" in caught.value.cure


def test_a_parent_that_ignores_sigchld_sees_the_end():
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        done = run("surroundings")
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert json.loads(done.output)["argv"] == ["surroundings"]


def test_limits_are_set_by_variables_and_the_configuration(monkeypatch, tmp_path):
    assert child.limits(seconds=5, memory=7) == Limits(5, 7)
    (tmp_path / "wherry.toml").write_text('[child]\ntimeout = "2h"\nmemory = "3GiB"\n')
    monkeypatch.setenv("WHERRY_CONFIG", str(tmp_path / "wherry.toml"))
    assert child.limits(seconds=5, memory=7) == Limits(7200, 3 << 30)
    monkeypatch.setenv("WHERRY_CHILD_TIMEOUT", "15m")
    monkeypatch.setenv("WHERRY_CHILD_MEMORY", "1GiB")
    assert child.limits(seconds=5, memory=7) == Limits(900, 1 << 30)
    monkeypatch.delenv("WHERRY_CONFIG")
    monkeypatch.setenv("WHERRY_CHILD_MEMORY", "plenty")
    with pytest.raises(UsageError, match="invalid size 'plenty'"):
        child.limits(seconds=5, memory=7)


# The interpreter replaces this process by the same command line in UTF-8 mode, before anything is done; kernels are
# compiled while wherry is installed, before anything else of it can be imported.
STARTERS = {
    "wherry/core/child.py", "wherry/testing/children.py", "wherry/core/interpreter.py",
    "wherry/kernels/compile.py",
}  # fmt: skip


@pytest.mark.parametrize("path", MODULES, ids=label)
def test_only_one_module_starts_processes(path):
    """Whatever else wants a child takes `wherry.core.child`, so that none is started without its safeguards."""
    if label(path) in STARTERS:
        return
    tree = ast.parse(path.read_text())
    imported = {
        name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in (
            [node.module or ""] if isinstance(node, ast.ImportFrom) else [one.name for one in node.names]
        )
    }
    assert not imported & {"subprocess", "multiprocessing", "pty"}
    called = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    started = [
        name for name in called if name.startswith(("os.exec", "os.spawn", "os.posix_spawn", "os.fork"))
    ]
    assert not [*started, *(called & {"os.system", "os.popen"})]


def test_a_child_that_was_started_ends_with_the_block(tmp_path):
    file = tmp_path / "pids"
    with child.child_process(PROGRAMS, ["hang", str(file)], purpose="the test") as one:
        pids = pids_in(file)
        assert one.pid in pids
        assert not one.has_ended()
    assert gone(pids)
    assert one.has_ended()


def test_a_child_that_was_started_can_end_by_itself_or_is_killed(tmp_path):
    with child.child_process(PROGRAMS, ["ask", str(tmp_path / "polite")], purpose="the test") as one:
        pids_in(tmp_path / "polite")
        one.ask_to_end()
        done = one.result(grace=60)
        assert (done.code, done.output) == (7, "got SIGTERM\n")
        assert one.result() == done
    with child.child_process(PROGRAMS, ["ask", str(tmp_path / "rude"), "rude"], purpose="the test") as one:
        pids = pids_in(tmp_path / "rude")
        one.ask_to_end()
        assert one.result(grace=0.3).code == -signal.SIGKILL
    assert gone(pids)


def test_a_command_of_ours_gets_what_this_process_has(monkeypatch, tmp_path):
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    for name in HARMFUL:
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WHERRY_CONFIG", "wherry.toml")
    found = child.own_variables()
    assert SECRETS.items() <= found.items()
    assert not {name for name in found if name.startswith(("PYTHON", "LD_"))}
    assert found["WHERRY_CONFIG"] == str(tmp_path / "wherry.toml")


def test_prefect_sees_its_settings_and_what_its_file_names_and_nothing_else(monkeypatch):
    pytest.importorskip("prefect")
    from wherry.integrations.prefect import deploy

    for name, value in {
        **SECRETS,
        "IMAGE": "wherry:1",
        "OTHER": "x",
        "PREFECT_API_URL": "http://p/api",
    }.items():
        monkeypatch.setenv(name, value)
    from prefect.settings import PREFECT_API_URL, temporary_settings

    with temporary_settings({PREFECT_API_URL: "http://p/api"}):
        found = deploy._variables("image: '{{ $IMAGE }}'\nname: $OTHER")
    assert found["IMAGE"] == "wherry:1"
    assert found["PREFECT_API_URL"] == "http://p/api"
    assert found["HTTPS_PROXY"] == SECRETS["HTTPS_PROXY"]
    assert not {"OTHER", "AWS_SECRET_ACCESS_KEY", "WHERRY_KEY", "HF_TOKEN"} & set(found)


def test_prefect_deploy_runs_in_a_child_with_limits(monkeypatch, tmp_path):
    pytest.importorskip("prefect")
    from wherry.integrations.prefect import deploy

    file = tmp_path / "prefect.yaml"
    file.write_text("deployments: []")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WHERRY_CHILD_TIMEOUT", "0.2")
    with pytest.raises(NoAnswerError, match="prefect deploy timed out after"):
        deploy._prefect_deploy(Path("prefect.yaml"), None)
