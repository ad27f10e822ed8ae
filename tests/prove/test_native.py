"""Checkpoints loaded by their systems' own libraries, in a child process, and compared on the devices.

Children are forked from processes that have imported the library, but for one of JAX and one of transformers.
"""

from __future__ import annotations

import json
import os
import shutil

import numpy as np
import pytest

import wherry
from tests.support.tiny_models import save_tiny
from wherry.errors import UnsupportedError
from wherry.formats.checkpoint import take_pin
from wherry.prove.native import NativeReport, NoAnswerError, files_of

pytest_plugins = ("tests.support.warm_native",)

EIGHT = "--xla_force_host_platform_device_count=8"


@pytest.fixture
def source(tmp_path):
    """A safetensors file by the real library, with a key path that becomes a tree."""
    numpy = pytest.importorskip("safetensors.numpy", reason="safetensors is not installed")
    tensors = {
        "params.a.kernel": np.arange(128, dtype="f4").reshape(16, 8),
        "params.b": np.arange(5, dtype="i8"),
        "params.scale": np.array(2.5, "f2"),
    }
    numpy.save_file(tensors, tmp_path / "a.safetensors")
    return tmp_path / "a.safetensors"


@pytest.fixture
def eight(monkeypatch):
    pytest.importorskip("orbax.checkpoint", reason="orbax is not installed")
    monkeypatch.setenv("XLA_FLAGS", f"{os.environ.get('XLA_FLAGS', '')} {EIGHT}".strip())
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")


def made(source, target, to, **options):
    wherry.convert(source, target, to=to, options=options, lineage=False)
    return target


@pytest.mark.parametrize("to", ["orbax", "flax-msgpack"])
def test_jax_targets_lie_sharded_over_eight_devices(source, tmp_path, eight, to, request):
    if to == "flax-msgpack":
        pytest.importorskip("flax", reason="flax is not installed")
        request.getfixturevalue("forked_loaders")
    target = made(source, tmp_path / "target", to, split=".")
    found = wherry.verify(target, level="native")
    assert found.ok, found
    assert isinstance(found.native, NativeReport)
    assert found.native.checked == 3
    assert found.native.sharded == 1
    assert "8 cpu devices" in found.native.devices
    assert json.loads(json.dumps(found.to_json()))["native"]["sharded"] == 1


@pytest.mark.usefixtures("forked_loaders")
@pytest.mark.parametrize("to", ["safetensors", "torch-zip", "dcp"])
def test_torch_targets(source, tmp_path, to):
    pytest.importorskip("torch", reason="torch is not installed")
    name = "target.pt" if to == "torch-zip" else "target.safetensors" if to == "safetensors" else "target"
    found = wherry.verify(made(source, tmp_path / name, to), level="native")
    assert found.ok, found
    assert found.native is not None
    assert found.native.checked == 3


@pytest.mark.usefixtures("forked_loaders")
def test_an_altered_byte_is_found_on_the_device(source, tmp_path):
    pytest.importorskip("torch", reason="torch is not installed")
    target = made(source, tmp_path / "b.safetensors", "safetensors")
    data = bytearray(target.read_bytes())
    data[-1] ^= 1
    target.write_bytes(data)
    found = wherry.verify(target, level="native")
    assert (found.verdict, found.exit_code) == ("altered", 9)
    assert len(found.failed) == 1


@pytest.mark.usefixtures("forked_loaders")
def test_what_the_library_refuses_is_said(source, tmp_path, monkeypatch):
    pytest.importorskip("torch", reason="torch is not installed")
    target = made(source, tmp_path / "b.pt", "torch-zip")
    from wherry.integrations import native

    monkeypatch.setitem(
        native.LOADERS, "torch-zip", native.LOADERS["safetensors"]
    )  # a library that cannot load it
    found = wherry.verify(target, level="native")
    assert (found.verdict, found.ok, found.exit_code) == ("refused", False, 9)
    assert "the library cannot load the checkpoint" in found.failed[0].reason


def test_a_format_without_a_library_is_unsupported(source, tmp_path):
    target = made(source, tmp_path / "target", "t5x-legacy", split=".")
    with pytest.raises(UnsupportedError, match="no native library is known for format t5x-legacy"):
        wherry.verify(target, level="native")


def test_a_child_that_comes_to_no_answer_says_nothing_of_the_checkpoint(source, tmp_path, monkeypatch):
    pytest.importorskip("torch", reason="torch is not installed")
    from wherry.integrations import native

    monkeypatch.setattr(native, "CHILD", "wherry.no_such_child")
    with pytest.raises(NoAnswerError, match=r"exited with code 1: .*no_such_child"):
        wherry.verify(source, level="native")


def test_absence_is_found_before_anything_is_loaded(source, tmp_path, monkeypatch):
    target = made(source, tmp_path / "target", "npz")
    monkeypatch.setattr("wherry.prove.native.native", lambda *_, **__: pytest.fail("it was loaded"))
    target.write_bytes(target.read_bytes()[:-40])
    assert not wherry.verify(target, level="native").ok


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A tiny model of transformers, and the same in MaxText's layout."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("torch", reason="torch is not installed")
    folder = tmp_path_factory.mktemp("llama")
    save_tiny(folder / "hf", "llama")
    wherry.convert(folder / "hf", folder / "maxtext", to="maxtext", lineage=False)
    return folder


def test_logits_agree_through_another_system(llama):
    found = wherry.verify(llama / "maxtext", level="logits")
    assert found.ok, found
    assert found.native is not None
    assert found.native.checked == 2 * 16 * 60
    assert found.native.error < 1e-6


@pytest.mark.usefixtures("forked_loaders")
def test_a_marker_that_is_a_link_to_itself_is_no_bug(llama, tmp_path):
    step = tmp_path / "7"
    shutil.copytree(llama / "maxtext", step)
    (step / "commit_success.txt").unlink()
    (step / "commit_success.txt").symlink_to("commit_success.txt")
    with wherry.open(step) as checkpoint:
        assert "commit_success.txt" in take_pin(checkpoint).members
        assert files_of(checkpoint) == (str(step),)


def test_logits_of_another_model_differ(llama, tmp_path):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    other = transformers.LlamaForCausalLM.from_pretrained(llama / "hf")
    with torch.no_grad():
        other.model.layers[1].self_attn.q_proj.weight.copy_(
            other.model.layers[1].self_attn.q_proj.weight.flip(0)
        )
    other.save_pretrained(tmp_path / "other")
    found = wherry.verify(llama / "maxtext", level="logits", against=tmp_path / "other")
    assert (found.verdict, found.exit_code) == ("altered", 9)
    assert found.native is not None
    assert found.native.error > 1e-4
    assert "relative error" in found.failed[0].reason


@pytest.mark.usefixtures("forked_loaders")
def test_the_class_that_a_config_names_loads_the_whole_folder(llama, tmp_path):
    numpy = pytest.importorskip("safetensors.numpy", reason="safetensors is not installed")
    tensors = numpy.load_file(llama / "hf" / "model.safetensors")
    tensors["model.layers.1.extra.weight"] = tensors.pop("model.norm.weight")
    (tmp_path / "hf").mkdir()
    numpy.save_file(tensors, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    (tmp_path / "hf" / "config.json").write_bytes((llama / "hf" / "config.json").read_bytes())
    found = wherry.verify(tmp_path / "hf", level="native")
    assert found.verdict == "refused"
    assert "model.norm.weight" in found.failed[0].reason


@pytest.fixture
def folder(llama, tmp_path):
    """A copy of the tiny model's folder, about which nothing is recorded."""
    return shutil.copytree(llama / "hf", tmp_path / "hf")


def state(folder, **attributes):
    """Change attributes of a config; None removes one."""
    file = folder / "config.json"
    config = {**json.loads(file.read_text()), **attributes}
    file.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))


@pytest.mark.usefixtures("forked_loaders")
def test_a_folder_without_a_config_is_refused(folder):
    (folder / "config.json").unlink()
    found = wherry.verify(folder, level="native")
    assert (found.verdict, found.exit_code) == ("refused", 9)
    assert "config.json, without which transformers builds no model" in found.failed[0].reason


@pytest.mark.usefixtures("forked_loaders")
@pytest.mark.parametrize(
    "attributes",
    [
        {"num_key_value_heads": 4}, {"hidden_size": 64}, {"num_hidden_layers": 3}, {"vocab_size": 61},
        {"intermediate_size": 64}, {"architectures": ["MistralForCausalLM"]}, {"architectures": ["LlamaModel"]},
        {"model_type": None}, {"tie_word_embeddings": "x"},
    ],
    ids=str,
)  # fmt: skip
def test_a_config_that_does_not_fit_the_tensors_is_no_pass(folder, attributes):
    state(folder, **attributes)
    found = wherry.verify(folder, level="native")
    assert (found.ok, found.exit_code != 0) == (False, True), found


@pytest.mark.usefixtures("forked_loaders")
def test_other_heads_of_the_same_shapes_are_found_by_the_record(folder, tmp_path):
    wherry.convert(folder, tmp_path / "made", to="huggingface")
    assert wherry.verify(tmp_path / "made", level="native").ok
    file = tmp_path / "made" / "config.json"
    text = file.read_text()
    for name, before, after in (("num_attention_heads", 4, 2), ("num_key_value_heads", 2, 1)):
        text = text.replace(f'"{name}": {before}', f'"{name}": {after}')
    file.write_text(text)
    found = wherry.verify(tmp_path / "made", level="native")
    assert (found.verdict, found.failed[0].path) == ("altered", "config.json")


@pytest.mark.usefixtures("forked_loaders")
@pytest.mark.parametrize(
    ("attributes", "words"),
    [
        ({"architectures": ["UnknownForCausalLM"]}, "has no model class UnknownForCausalLM"),
        ({"architectures": None}, "needs the architecture, which config.json does not name"),
    ],
)
def test_a_class_that_is_not_there_is_said_and_proves_nothing(folder, attributes, words):
    state(folder, **attributes)
    with pytest.raises(UnsupportedError, match=words) as caught:
        wherry.verify(folder, level="native")
    assert caught.value.exit_code == 4
    assert "--level digest" in caught.value.cure
    assert 'level="digest"' in str(caught.value)  # the child has stated it in both words


@pytest.mark.usefixtures("forked_loaders")
def test_an_adapter_is_no_model(folder):
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    with pytest.raises(UnsupportedError, match="transformers builds no adapter: PEFT loads it onto its base"):
        wherry.verify(folder, level="native")


@pytest.mark.usefixtures("forked_loaders")
def test_the_library_gets_the_files_that_it_would_choose_itself(folder):
    from safetensors.numpy import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    save_file(
        {name: value * 0 for name, value in tensors.items()}, folder / "rest-00001-of-00002.safetensors"
    )
    found = wherry.verify(folder, level="native")
    assert found.ok, found.failed


@pytest.mark.usefixtures("forked_loaders")
def test_megatron_s_step_is_read_by_torch_and_says_what_was_not_run(llama, tmp_path):
    wherry.convert(llama / "hf", tmp_path / "megatron", to="megatron")
    found = wherry.verify(tmp_path / "megatron", level="native")
    assert found.ok, found.failed
    assert found.native is not None
    assert "Megatron-Core itself is not run, so nothing builds its model" in found.native.evidence
    run = tmp_path / "run"
    run.mkdir()
    (tmp_path / "megatron").rename(run / "iter_0000007")
    (run / "latest_checkpointed_iteration.txt").write_text("7")
    assert wherry.verify(run, level="native").ok
