"""Every loader of the native level under attack: nothing in a checkpoint or next to it ever runs.

For each loader: modules with the names of libraries lie where the caller stands; a payload takes the place of what is
read, before wherry looks at it, and between its look and the library's. It may be refused or read as data; the marker
that each payload makes must not be there. A loader without an attack fails here.

Children are real ones where modules are next to the checkpoint, once for each loader. Where a payload is in the
checkpoint, they are forked from processes that have imported the library, for the import takes ten times as long as
the attack. A config that names code, which asks for the library's cache too, gets a real child where it comes after
our look, and a forked one elsewhere.

All of it is tested without the sandbox, which would refuse the marker to a payload that ran: what the loaders keep out,
they keep out by themselves. tests/prove/test_native_sandbox.py attacks the sandbox.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

import wherry
from tests.support.attack import ATTACKS, Payload, hostile_modules
from tests.support.formats import CORPUS
from tests.support.tiny_models import save_tiny
from wherry.core import child
from wherry.core.request import SourceRequest
from wherry.core.sandbox import SWITCH
from wherry.errors import UsageError, WherryError
from wherry.formats.registry import find_format
from wherry.integrations.native import LOADERS
from wherry.prove.verify import verify
from wherry.store.local_store import locate
from wherry.testing import samples, writers

for package in ("torch", "transformers", "safetensors", "orbax.checkpoint", "flax"):
    pytest.importorskip(package, reason=f"{package} is not installed")

pytest_plugins = ("tests.support.warm_native",)

PAXML = CORPUS / "paxml-gpt3-l3-flax" / "checkpoint" / "checkpoints" / "checkpoint_4000"


def cases():
    """Every loader with every attack on it; what another format tries on the same loader already is slow."""
    tried = set()
    for name, attacks in ATTACKS.items():
        for number, attack in enumerate(attacks):
            again = number and (LOADERS[name].function, attack) in tried
            yield pytest.param(name, attack, marks=[pytest.mark.slow] if again else [])
            tried.add((LOADERS[name].function, attack))


CASES = list(cases())


def test_every_loader_is_attacked():
    assert set(ATTACKS) == set(LOADERS)
    assert all(ATTACKS.values())


def make(name, folder):
    """A sound checkpoint of a format, in a folder of its own."""
    import numpy as np
    import torch

    tensors = {"w": torch.arange(600.0).reshape(3, 200), "b": torch.ones(3)}
    target = folder / "checkpoint"
    if name == "paxml-flax":
        if not PAXML.exists():
            pytest.skip("the corpus is not here; set WHERRY_CORPUS to its folder")
        return Path(shutil.copytree(PAXML, target))
    if name == "huggingface":
        return save_tiny(target, "llama")
    if name == "npz":
        np.savez(folder / "checkpoint.npz", **{key: one.numpy() for key, one in tensors.items()})
        return folder / "checkpoint.npz"
    if name == "torch-legacy":
        torch.save(tensors, target, _use_new_zipfile_serialization=False)
    elif name == "meta-consolidated":
        target.mkdir()
        torch.save(tensors, target / "consolidated.00.pth")
        (target / "params.json").write_text(json.dumps({"dim": 200}))
    else:
        writers.make(samples.source(find_format(name)), locate(target))
    return target


@pytest.fixture(autouse=True)
def without_a_sandbox(monkeypatch):
    monkeypatch.setenv(SWITCH, "off")


@pytest.fixture
def marker(tmp_path):
    return tmp_path / "MARKER"


@pytest.fixture(scope="module")
def samples_by_format(tmp_path_factory):
    """A sound checkpoint of each format, made once; attacks change copies."""
    made = {}

    def get(name):
        if name not in made:
            made[name] = make(name, tmp_path_factory.mktemp(name))
        return made[name]

    return get


@pytest.fixture
def checkpoint(request, samples_by_format, tmp_path, monkeypatch, marker):
    """A sound checkpoint of the format `name` of a test; hostile modules lie where the caller now stands."""
    folder = tmp_path / "place"
    folder.mkdir()
    sample = samples_by_format(request.getfixturevalue("name"))
    made = folder / sample.name
    shutil.copytree(sample, made) if sample.is_dir() else shutil.copy(sample, made)
    standing = made if made.is_dir() else folder
    hostile_modules(standing, marker)
    monkeypatch.chdir(standing)
    return made


@pytest.fixture
def forked_unless_code(request, attack):
    """A config that names code meets a whole child: its imports, its cache and what is next to it."""
    if attack not in ("code", "architecture"):
        request.getfixturevalue("forked_loaders")


def verified(path, **more):
    """The verdict, or the class of the error."""
    try:
        return wherry.verify(path, level="native", **more).verdict
    except WherryError as error:
        return type(error).__name__


def swap_before_the_child(monkeypatch, attack, checkpoint, marker):
    """Let an attack take place when wherry has looked at everything, just before the library does; says how often."""
    count = []
    run = child.run

    def attacked(*args, **how):
        attack(checkpoint, marker)
        count.append(1)
        return run(*args, **how)

    monkeypatch.setattr(child, "run", attacked)
    return count


def test_the_payload_runs_where_it_is_unpickled(marker):
    import pickle

    pickle.loads(pickle.dumps(Payload(marker)))
    assert marker.exists()


@pytest.mark.usefixtures("forked_loaders")
def test_the_payload_runs_where_a_forked_child_unpickles_it(marker, tmp_path):
    import pickle

    (tmp_path / "payload").write_bytes(pickle.dumps(Payload(marker)))
    limits = child.Limits(60, 1 << 30)
    done = child.run("pickle", [str(tmp_path / "payload")], purpose="test", limits=limits, text="{}")
    assert done.code == 0, done.errors
    assert marker.exists()


@pytest.mark.usefixtures("forked_loaders")
@pytest.mark.parametrize("level", ["native", "logits", "serve"])
@pytest.mark.parametrize("name", ["huggingface"])
def test_a_forked_child_passes_a_sound_model(name, level, checkpoint, marker):
    report = wherry.verify(checkpoint, level=level, against=None if level == "native" else checkpoint)
    assert report.verdict == "ok"
    assert not marker.exists()


@pytest.mark.parametrize("name", ATTACKS)
def test_modules_next_to_a_checkpoint_are_not_imported(name, checkpoint, marker, monkeypatch, request):
    """With a real child for the first format of each loader: the others differ in what happens before it."""
    first = next(other for other in ATTACKS if LOADERS[other].function == LOADERS[name].function)
    if name != first:
        monkeypatch.setattr(child, "run", request.getfixturevalue("warm_loaders").run)
    assert verified(checkpoint, format=name) == "ok"
    assert not marker.exists()


@pytest.mark.usefixtures("forked_loaders")
@pytest.mark.parametrize(("name", "attack"), CASES)
def test_a_payload_that_is_there_from_the_beginning_does_not_run(name, attack, checkpoint, marker):
    ATTACKS[name][attack](checkpoint, marker)
    verified(checkpoint, format=name)
    assert not marker.exists()


@pytest.mark.usefixtures("forked_unless_code")
@pytest.mark.parametrize(("name", "attack"), CASES)
def test_a_payload_that_comes_after_our_look_does_not_run(name, attack, checkpoint, marker, monkeypatch):
    count = swap_before_the_child(monkeypatch, ATTACKS[name][attack], checkpoint, marker)
    verified(checkpoint, format=name)
    assert count == [1], "the child was not reached, so nothing was tried"
    assert not marker.exists()


@pytest.mark.usefixtures("forked_loaders")
@pytest.mark.parametrize("attack", ATTACKS["huggingface"])
@pytest.mark.parametrize("name", ["huggingface"])
@pytest.mark.parametrize("level", ["logits", "serve"])
def test_no_payload_runs_where_both_models_run(level, name, attack, checkpoint, marker, monkeypatch):
    count = swap_before_the_child(monkeypatch, ATTACKS[name][attack], checkpoint, marker)
    with suppress(WherryError):
        wherry.verify(checkpoint, level=level, against=checkpoint)
    assert count == [1]
    assert not marker.exists()


@pytest.mark.parametrize("name", ["dcp"])
def test_the_command_line_from_within_a_checkpoint(name, checkpoint, marker):
    words = ["verify", str(checkpoint), "--level", "native", "--json"]
    command = [sys.executable, "-P", "-c", "from wherry.cli import main; main()", *words]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=checkpoint)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert "wherry's reader supplies their metadata" in found["native"]["evidence"]
    assert not marker.exists()


@pytest.mark.parametrize("level", ["native", "logits", "serve"])
@pytest.mark.parametrize("name", ["dcp"])
def test_classes_that_are_let_pass_are_refused_at_levels_of_other_libraries(
    name, level, checkpoint, marker, monkeypatch
):
    ATTACKS[name]["metadata"](checkpoint, marker)
    source = SourceRequest(str(checkpoint), allow_opaque=("posix.system",))
    with pytest.raises(UsageError, match=r"cannot skip posix\.system") as caught:
        verify(source, level=level, against=None if level == "native" else checkpoint)
    assert caught.value.exit_code == 2
    assert not marker.exists()


def test_allow_opaque_of_the_command_line_ends_with_2(tmp_path):
    from click.testing import CliRunner

    from wherry.cli import cli

    words = ["verify", str(tmp_path), "--level", "native", "--allow-opaque", "posix.system"]
    done = CliRunner().invoke(cli, words)
    assert isinstance(done.exception, UsageError) or done.exit_code == 2


def test_looking_for_a_package_imports_nothing(tmp_path, monkeypatch, marker):
    from wherry.prove.native import _is_installed

    (tmp_path / "outer").mkdir()
    (tmp_path / "outer" / "__init__.py").write_text(f"open({str(marker)!r}, 'w')")
    (tmp_path / "outer" / "inner.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert _is_installed("outer.inner")
    assert not _is_installed("outer.other")
    assert not _is_installed("no_such_package.inner")
    assert not marker.exists()


def test_a_torch_whose_weights_only_runs_code_loads_nothing(tmp_path, monkeypatch):
    from wherry.integrations.native import with_torch

    monkeypatch.setattr(with_torch, "SAFE", (99, 0))
    with pytest.raises(WherryError, match="can execute code from a file") as caught:
        with_torch.archive(make("torch-legacy", tmp_path), {})
    assert caught.value.cure is not None
    assert "torch>=99.0" in caught.value.cure


def test_a_config_keeps_nothing_that_leads_elsewhere():
    from wherry.integrations.native.with_torch import inert_config

    config = {"auto_map": {"AutoModel": "x.Y"}, "vocab_size": 3, "text_config": {"auto_map": {}, "backbone": "a/b"},
              "layers": ["full", "/etc/x"]}  # fmt: skip
    found = inert_config(config)
    assert found == {"vocab_size": 3, "text_config": {"backbone": "a_b"}, "layers": ["full", "_etc_x"]}


@pytest.mark.parametrize("function", ["hang_while_loading", "allocate"])
def test_a_loader_without_end_or_measure_is_stopped(function, tmp_path, monkeypatch):
    """The command ends with 10 and says how to raise the limit; the checkpoint is not called damaged."""
    from wherry.integrations import native

    target = make("safetensors", tmp_path)
    loader = native.LOADERS["safetensors"]._replace(function=f"tests.support.child_programs:{function}")
    monkeypatch.setitem(native.LOADERS, "safetensors", loader)
    monkeypatch.setenv("WHERRY_CHILD_TIMEOUT", "5" if function.startswith("hang") else "100")
    monkeypatch.setenv("WHERRY_CHILD_MEMORY", "800MiB")
    expected = "timed out after 5 s" if function.startswith("hang") else "exceeded its memory limit of"
    with pytest.raises(child.NoAnswerError, match=f"the native check .*{expected}") as caught:
        wherry.verify(target, level="native")
    assert caught.value.exit_code == 10
    if function.startswith("hang"):
        from tests.support.processes import gone

        assert gone([int(word) for word in Path(f"{target}.pids").read_text().split()])


def test_libraries_are_set_to_fetch_nothing(monkeypatch):
    from wherry.prove import native

    given = {}

    def run(_module, **how):
        given.update(how["variables"])
        return child.ChildResult(0, "{}", "")

    monkeypatch.setattr(child, "run", run)
    assert native._ask({"task": "native"}, 0) == {}
    assert {name: given.get(name) for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")} == {
        "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1",
    }  # fmt: skip


def test_limits_follow_the_checkpoint_and_the_machine(monkeypatch):
    from wherry.prove import native

    monkeypatch.setattr(native, "available_memory", lambda: 100 << 30)
    assert native._memory(1 << 30) == 10 << 30
    assert native._memory(1 << 40) == 100 << 30
    monkeypatch.setattr(native, "available_memory", lambda: 1)
    assert native._memory(1 << 30) == 2 << 30
    monkeypatch.setattr(native, "available_memory", lambda: None)
    assert native._memory(0) == 4 << 30
