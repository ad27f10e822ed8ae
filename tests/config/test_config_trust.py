"""A wherry.toml that lies in or around a checkpoint, or belongs to somebody else, is named and passed over."""

from __future__ import annotations

import errno
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import save_file

import wherry
from wherry.config import settings, trust
from wherry.config.config import load_config
from wherry.config.trust import require_own_prefect_settings
from wherry.core.services import service
from wherry.errors import HostileError, NotFoundError, UsageError
from wherry.store import home


@pytest.fixture(autouse=True)
def judged_anew():
    trust._counts.cache_clear()


@pytest.fixture
def evil(tmp_path):
    return f'ledger = "sqlite:///{tmp_path / "evil.db"}"\n'


def hub(folder):
    folder.mkdir(parents=True)
    save_file({"w": np.ones((2, 3), "f4")}, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text("{}")
    return folder


def places(tmp_path):
    """Where a checkpoint may have put it: folder, and what is around it."""
    model = hub(tmp_path / "in" / "model")
    wherry.convert(model, tmp_path / "in" / "orbax", to="orbax", lineage=False)
    run = tmp_path / "in" / "run"
    hub(run / "checkpoint-100")
    return {
        "model": (model, model),
        "inside": (model / "sub" / "deeper", model),
        "orbax": (tmp_path / "in" / "orbax", tmp_path / "in" / "orbax"),
        "run": (run, run),
        "step": (run / "checkpoint-100", run / "checkpoint-100"),
    }


@pytest.mark.parametrize("which", ["model", "inside", "orbax", "run", "step"])
def test_a_checkpoint_configures_nothing(tmp_path, monkeypatch, caplog, evil, which):
    folder, around = places(tmp_path)[which]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "wherry.toml").write_text(evil)
    monkeypatch.chdir(folder)
    with caplog.at_level(logging.WARNING):
        assert settings.ledger_url() == f"sqlite:///{home.home() / 'ledger.db'}"
        assert load_config().file is None
    (warning,) = caplog.messages
    assert str(folder / "wherry.toml") in warning
    assert f"it is inside the checkpoint {around}" in warning
    assert "WHERRY_CONFIG" in warning


def test_the_ledger_is_not_redirected(tmp_path, evil, wherry_home):
    model = hub(tmp_path / "model")
    (model / "wherry.toml").write_text(evil)
    command = [
        sys.executable,
        "-m",
        "wherry.cli",
        "convert",
        ".",
        str(tmp_path / "out"),
        "--to",
        "orbax",
        "--json",
    ]
    done = subprocess.run(command, cwd=model, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)
    assert "is ignored" in done.stderr
    assert not (tmp_path / "evil.db").exists()
    assert (wherry_home / "ledger.db").exists()


def test_the_home_takes_its_place(tmp_path, monkeypatch, evil, wherry_home):
    model = hub(tmp_path / "model")
    (model / "wherry.toml").write_text(evil)
    (wherry_home / "wherry.toml").write_text('memory = "3GB"\n')
    monkeypatch.chdir(model)
    assert load_config().file == str(wherry_home / "wherry.toml")


def test_next_to_checkpoints_it_counts(tmp_path, monkeypatch, caplog):
    """A project has its checkpoints below it; only what lies around the file matters."""
    project = tmp_path / "project"
    hub(project / "models" / "llama")
    hub(project / "checkpoints" / "checkpoint-100")
    save_file({"w": np.ones(3, "f4")}, project / "export.safetensors")
    (project / "wherry.toml").write_text('memory = "3GB"\n')
    monkeypatch.chdir(project)
    assert load_config().settings.memory == "3GB"
    assert not caplog.messages


def test_a_file_that_the_user_names_is_the_users_choice(tmp_path, monkeypatch):
    model = hub(tmp_path / "model")
    (model / "wherry.toml").write_text('memory = "3GB"\n')
    (model / "wherry.toml").chmod(0o666)
    assert load_config(model / "wherry.toml").settings.memory == "3GB"
    monkeypatch.setenv("WHERRY_CONFIG", str(model / "wherry.toml"))
    monkeypatch.chdir(model)
    assert load_config().settings.memory == "3GB"


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "wherry.toml").write_text('memory = "3GB"\n')
    monkeypatch.chdir(tmp_path)
    return tmp_path / "wherry.toml"


def test_of_others_or_open_to_others(own, tmp_path, monkeypatch, caplog):
    assert load_config().file == str(own)
    own.chmod(0o646)
    assert load_config().file is None
    assert f"{own} is writable by everybody" in caplog.text
    own.chmod(0o664)
    assert load_config().file == str(own)
    tmp_path.chmod(0o777)
    trust._counts.cache_clear()
    assert load_config().file is None
    assert f"{tmp_path} is writable by everybody" in caplog.text
    tmp_path.chmod(0o1777)
    trust._counts.cache_clear()
    assert load_config().file == str(own)


def test_the_owner_is_the_user_or_root(own, monkeypatch, caplog):
    own_uid = os.geteuid()
    statuses = trust._statuses

    def owned(uid, name):
        def of(path):
            rows = statuses(path)
            changed = [
                SimpleNamespace(st_ino=1, st_mtime_ns=uid, st_uid=uid, st_mode=one.st_mode) for one in rows
            ]
            return tuple(changed) if path.name == name else rows

        return of

    for name in ("wherry.toml", own.parent.name):
        for uid, counts in ((own_uid, True), (0, True), (own_uid + 1, False)):
            trust._counts.cache_clear()
            monkeypatch.setattr(trust, "_statuses", owned(uid, name))
            assert (load_config().file is not None) is counts
    assert "another user owns" in caplog.text


@pytest.mark.parametrize("kind", ["fifo", "folder", "dangling", "zeros"])
def test_what_is_no_file(own, kind):
    own.unlink()
    if kind == "fifo":
        os.mkfifo(own)
    elif kind == "folder":
        own.mkdir()
    else:
        own.symlink_to("nothing" if kind == "dangling" else "/dev/zero")
    assert load_config().file is None
    with pytest.raises(NotFoundError):
        load_config(own)


def test_a_huge_configuration_is_not_read(own):
    with own.open("r+b") as file:
        file.truncate(64 << 30)
    with pytest.raises(HostileError, match="68,719,476,736"):
        load_config()


def test_a_link_to_the_users_own_file_counts(own, tmp_path):
    own.rename(tmp_path / "dotfiles.toml")
    own.symlink_to("dotfiles.toml")
    assert load_config().settings.memory == "3GB"


def test_a_hostile_folder_is_a_checkpoint(tmp_path, monkeypatch, caplog, evil):
    """Judging asks no configuration whether links are allowed: that is what is being judged."""
    model = hub(tmp_path / "model")
    (model / "config.json").unlink()
    (model / "config.json").symlink_to("/etc/passwd")
    (model / "wherry.toml").write_text(evil + 'links = ["/etc"]\n')
    monkeypatch.chdir(model)
    assert load_config().file is None
    assert "it is inside the checkpoint" in caplog.text


def test_allowed_folders_are_absolute(own):
    own.write_text('links = ["models"]\n')
    with pytest.raises(UsageError, match="absolute"):
        load_config()
    own.write_text('links = ["/data/models", "~/models"]\n')
    assert load_config().settings.links == ("/data/models", "~/models")


def unreadable(monkeypatch, *names):
    """Files and folders of these names cannot be opened, as their mode would have it for anybody but root."""
    original = os.open

    def refuse(path, flags, *rest, **options):
        if Path(os.fspath(path)).name in names:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return original(path, flags, *rest, **options)

    monkeypatch.setattr(os, "open", refuse)


@pytest.mark.parametrize("name", ["_METADATA", "orbax"])
def test_what_the_user_owns_and_cannot_read_is_a_checkpoint(tmp_path, monkeypatch, caplog, evil, name):
    """A tarball decides the modes of its files."""
    folder, _ = places(tmp_path)["orbax"]
    (folder / "wherry.toml").write_text(evil)
    monkeypatch.chdir(folder)
    unreadable(monkeypatch, name)
    assert load_config().file is None
    assert f"it is inside the checkpoint {folder}" in caplog.text


def test_what_others_hide_says_nothing(own, tmp_path, monkeypatch, caplog):
    """`/root`, or the folder of a service next to a folder `model`."""
    (tmp_path / "model").mkdir()
    hidden = tmp_path / "service"
    hidden.mkdir()
    unreadable(monkeypatch, hidden.name)
    assert load_config().file is None
    trust._counts.cache_clear()
    caplog.clear()
    lstat = Path.lstat
    other = SimpleNamespace(st_uid=os.geteuid() + 1)
    monkeypatch.setattr(Path, "lstat", lambda self: other if self == hidden else lstat(self))
    assert load_config().file == str(own)
    assert not caplog.messages


LINKS = {"below a file": "config.json/x", "too long": "x" * 300, "loop": "link", "nothing": "nothing"}


@pytest.mark.parametrize("target", LINKS.values(), ids=LINKS)
def test_no_link_hides_a_checkpoint(tmp_path, monkeypatch, caplog, evil, target):
    model = hub(tmp_path / "model")
    (model / "link").symlink_to(target)
    (model / "wherry.toml").write_text(evil)
    monkeypatch.chdir(model)
    assert load_config().file is None
    assert f"it is inside the checkpoint {model}" in caplog.text


@pytest.mark.parametrize("target", LINKS.values(), ids=LINKS)
def test_links_that_lead_nowhere_in_a_project(own, tmp_path, target):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "link").symlink_to(target)
    assert load_config().file == str(own)
    for name in ("wherry.toml", "prefect.toml"):
        (tmp_path / name).unlink(missing_ok=True)
        (tmp_path / name).symlink_to("link")
    assert load_config().file is None
    require_own_prefect_settings()


def test_steps_that_are_files_make_a_run(tmp_path, monkeypatch, caplog, evil):
    """Flax writes each step as one file."""
    run = tmp_path / "run"
    run.mkdir()
    wherry.convert(hub(tmp_path / "model"), run / "checkpoint_100", to="flax-msgpack", lineage=False)
    (run / "wherry.toml").write_text(evil)
    monkeypatch.chdir(run)
    assert load_config().file is None
    assert f"it is inside the checkpoint {run}" in caplog.text


def test_judging_a_t5x_train_state_asks_no_configuration(tmp_path, monkeypatch, caplog, evil):
    """T5X looks at the step folder around the item that Orbax has found."""
    state = {"target/w": np.ones((2, 3), "f4"), "state/step": np.asarray(7, "i4")}
    save_file(state, tmp_path / "state.safetensors")
    step = tmp_path / "7"
    wherry.convert(tmp_path / "state.safetensors", step, to="t5x-orbax", options={"split": "/"})
    (step / "_CHECKPOINT_METADATA").unlink()
    (step / "_CHECKPOINT_METADATA").symlink_to("/etc/passwd")
    (step / "wherry.toml").write_text(evil)
    monkeypatch.chdir(step)
    assert load_config().file is None
    assert f"it is inside the checkpoint {step}" in caplog.text


@pytest.mark.parametrize("name", ["prefect.toml", ".env", "pyproject.toml"])
def test_prefect_takes_no_settings_of_a_checkpoint(tmp_path, monkeypatch, name):
    model = hub(tmp_path / "model")
    monkeypatch.chdir(model)
    require_own_prefect_settings()
    (model / name).write_text('PREFECT_API_URL="http://elsewhere"\n')
    with pytest.raises(HostileError, match=f"untrusted Prefect settings: {name} in"):
        service("deploy")
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text("")
    require_own_prefect_settings()


def test_without_a_file_nothing_is_imported(tmp_path):
    code = (
        "import sys; from wherry.config.settings import ledger_url; ledger_url(); "
        "print([m for m in sys.modules if 'trust' in m])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("which", ["file", "folder"])
def test_the_file_of_the_home_counts_only_if_nobody_else_can_write_it(
    tmp_path, monkeypatch, caplog, evil, which
):
    own = tmp_path / "own-home"
    own.mkdir(mode=0o700)
    monkeypatch.setenv("WHERRY_HOME", str(own))
    monkeypatch.chdir(tmp_path)
    (own / "wherry.toml").write_text(evil)
    assert "evil.db" in settings.ledger_url()
    (own / "wherry.toml" if which == "file" else own).chmod(0o777)
    with caplog.at_level(logging.WARNING):
        assert "evil.db" not in settings.ledger_url()
    assert "is writable by everybody" in caplog.text
