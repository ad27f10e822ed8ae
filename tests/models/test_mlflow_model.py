"""A registered version as an MLflow model: downloaded and proved, loaded, served, and never changed."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import yaml
from click.testing import CliRunner
from safetensors.numpy import save_file

import wherry
from tests.support.readme import PAGES, blocks, commands
from tests.support.registry import await_health, converted, flip_a_bit, free_port, mlflow_server
from wherry.cli import cli
from wherry.config.settings import mlflow_tracking_uri
from wherry.core.digest import digest_uri
from wherry.errors import MismatchError, TargetExistsError, UsageError
from wherry.ledger.nodes import nodes
from wherry.ledger.record import open_ledger
from wherry.models.register import Registration

mlflow = pytest.importorskip("mlflow")
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


@pytest.fixture(scope="module", autouse=True)
def plugin(tmp_path_factory, own_home) -> None:
    """MLflow finds the entry point of pyproject.toml and the registry, here and in processes that are started."""
    from mlflow.store.artifact.artifact_repository_registry import _artifact_repository_registry

    [group] = (points := tomllib.loads(PYPROJECT.read_text())["project"]["entry-points"])
    folder = tmp_path_factory.mktemp("plugin")
    installed = folder / "plugin_of_wherry-0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin_of_wherry\nVersion: 0\n")
    lines = [f"{name} = {value}" for name, value in points[group].items()]
    (installed / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines]))
    own_home.syspath_prepend(folder)
    own_home.setenv("PYTHONPATH", str(folder), prepend=":")
    own_home.setenv("MLFLOW_TRACKING_URI", mlflow_tracking_uri())
    _artifact_repository_registry.register_entrypoints()


def llama(folder: Path) -> Path:
    """A folder of a tiny Llama with random weights and a tokenizer of nine words, as transformers saves it."""
    words = ["<s>", "</s>", "<unk>", "the", "cat", "sat", "on", "a", "mat"]
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>")
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    tokenizer.save_pretrained(folder)
    config = transformers.LlamaConfig(
        vocab_size=len(words), hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32, bos_token_id=0, eos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def registered(folder: Path, name: str) -> Registration:
    """A tiny Llama as the champion of a model."""
    wherry.inspect(llama(folder), digest=True, write=True)
    return wherry.register(folder, name, alias="champion")


def state_of(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {
        path.relative_to(folder).as_posix(): (path.stat().st_mtime_ns, path.read_bytes())
        for path in folder.rglob("*")
        if path.is_file()
    }


def places(digest: str) -> set[str]:
    with open_ledger() as ledger:
        return {place.uri for place in nodes(ledger, {digest})[digest].places}


def test_a_download_is_the_registered_checkpoint_and_changes_nothing(name, tmp_path):
    folder = tmp_path / "llama"
    done = registered(folder, name)
    before, known = state_of(folder), places(done.checkpoint_digest)
    copy = Path(mlflow.artifacts.download_artifacts(f"models:/{name}@champion"))
    assert {path.name for path in copy.iterdir()} == {
        "MLmodel",
        "components",
        "model",
        "registered_model_meta",
    }
    assert {name: data for name, (_, data) in state_of(copy / "model").items()} == {
        name: data for name, (_, data) in before.items()
    }
    assert wherry.verify(copy / "model", level="digest").ok
    assert state_of(folder) == before
    assert (
        places(done.checkpoint_digest) == known
    )  # a copy for a loader is soon removed: no audit looks for it
    assert wherry.promote(f"models:/{name}@champion", alias="production").version == done.version


def test_a_flipped_bit_is_refused(name, tmp_path):
    registered(tmp_path / "llama", name)
    flip_a_bit(tmp_path / "llama")
    (tmp_path / "copy").mkdir()
    with pytest.raises(MismatchError, match="the copy differs from the record"):
        mlflow.artifacts.download_artifacts(f"models:/{name}@champion", dst_path=str(tmp_path / "copy"))
    with pytest.raises(MismatchError, match="the copy differs from the record"):
        mlflow.pyfunc.load_model(f"models:/{name}@champion")
    assert not (tmp_path / "copy" / "model").exists()


def test_a_part_is_proved_or_refused(name, tmp_path):
    registered(tmp_path / "llama", name)
    config = mlflow.artifacts.download_artifacts(f"models:/{name}@champion/model/config.json")
    assert json.loads(Path(config).read_text())["architectures"] == ["LlamaForCausalLM"]
    listed = {row.path for row in mlflow.artifacts.list_artifacts(f"models:/{name}/1/components/tokenizer")}
    assert "components/tokenizer/tokenizer.json" in listed
    with pytest.raises(mlflow.MlflowException, match="cannot prove"):
        mlflow.artifacts.download_artifacts(f"models:/{name}@champion/model/model.safetensors")
    text = (tmp_path / "llama" / "tokenizer.json").read_text()
    (tmp_path / "llama" / "tokenizer.json").write_text(text.replace("cat", "dog"))
    with pytest.raises(mlflow.MlflowException, match="the copy differs from the record"):
        mlflow.artifacts.download_artifacts(f"models:/{name}@champion/components/tokenizer/tokenizer.json")


def test_a_download_again_is_verified_and_another_version_is_refused(name, tmp_path):
    registered(tmp_path / "llama", name)
    (tmp_path / "copy").mkdir()
    for _ in range(2):
        mlflow.artifacts.download_artifacts(f"models:/{name}@champion", dst_path=str(tmp_path / "copy"))
    wherry.register(converted(tmp_path / "other"), name, alias="champion")
    with pytest.raises(TargetExistsError):
        mlflow.artifacts.download_artifacts(f"models:/{name}@champion", dst_path=str(tmp_path / "copy"))


def test_a_causal_language_model_generates_text(name, tmp_path):
    done = registered(tmp_path / "llama", name)
    info = mlflow.models.get_model_info(f"models:/{name}@champion")
    assert set(info.flavors) == {"transformers", "python_function"}
    assert info.signature.inputs.input_types() == info.signature.outputs.input_types()
    assert info.metadata["wherry.checkpoint_digest"] == done.checkpoint_digest
    client = mlflow.MlflowClient()
    version = client.get_model_version(name, done.version)
    assert version.source == digest_uri(done.checkpoint_digest)
    linked = client.get_logged_model(info.model_id)
    assert info.model_id == version.tags["wherry.logged_model"]
    assert [row["name"] for row in json.loads(linked.tags["mlflow.modelVersions"])] == [name]

    loaded = mlflow.transformers.load_model(f"models:/{name}@champion", return_type="components")
    expected = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "llama").state_dict()
    found = loaded["model"].state_dict()
    assert found.keys() == expected.keys()
    assert all((found[name] == expected[name]).all() for name in expected)
    pipeline = mlflow.transformers.load_model(f"models:/{name}@champion")
    said = pipeline("the cat sat", max_new_tokens=3, do_sample=False)[0]["generated_text"]
    assert info.signature.params.to_dict()[0]["default"] == 256
    [answer] = mlflow.pyfunc.load_model(f"models:/{name}@champion").predict(
        ["the cat sat"], params={"max_new_tokens": 3, "do_sample": False}
    )
    assert answer == said
    assert said.startswith("the cat sat")


def test_code_of_a_checkpoint_is_never_loaded(name, tmp_path):
    """MLflow trusts the code that an `auto_map` names where transformers does not have the class."""
    folder = llama(tmp_path / "llama")
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "architectures": ["OwnForCausalLM"],
        "auto_map": {"AutoModelForCausalLM": "own.OwnForCausalLM"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    wherry.inspect(folder, digest=True, write=True)
    wherry.register(folder, name, alias="champion")
    assert set(mlflow.models.get_model_info(f"models:/{name}@champion").flavors) == {"python_function"}
    with pytest.raises(mlflow.MlflowException, match="transformers"):
        mlflow.transformers.load_model(f"models:/{name}@champion")
    mlflow.pyfunc.load_model(f"models:/{name}@champion")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(("to", "file"), [("orbax", "run"), ("safetensors", "x.safetensors")])
def test_any_other_checkpoint_is_opened(name, tmp_path, to, file):
    tensors = {"a": np.arange(6, dtype=np.float32).reshape(2, 3)}
    save_file(tensors, tmp_path / "s.safetensors")
    receipt = wherry.convert(tmp_path / "s.safetensors", tmp_path / "made" / file, to=to)
    wherry.register(receipt, name, alias="champion")
    info = mlflow.models.get_model_info(f"models:/{name}@champion")
    assert info.flavors["python_function"]["loader_module"] == "wherry.integrations.mlflow.model"
    model = mlflow.pyfunc.load_model(f"models:/{name}@champion")
    with model.get_raw_model() as checkpoint:
        assert np.array_equal(checkpoint.read("a"), tensors["a"])
    with pytest.raises(UsageError, match="has no code that predicts"):
        model.predict(["a"])


def test_a_registered_checkpoint_is_read_only(name, tmp_path):
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    repository = get_artifact_repository(digest_uri(registered(tmp_path / "llama", name).checkpoint_digest))
    for change in (repository.log_artifact, repository.log_artifacts, repository.delete_artifacts):
        with pytest.raises(UsageError, match="cannot be changed"):
            change(str(tmp_path))
    text = Path(repository.download_artifacts("MLmodel")).read_text()
    assert yaml.safe_load(text)["flavors"]["transformers"]["model_binary"] == "model"


@pytest.mark.server
def test_the_commands_of_the_page_on_a_server(tmp_path, monkeypatch, capsys):
    """A Hugging Face folder is recorded, registered, loaded and served."""
    page = PAGES["promotion"].partition("## Load a version")[2]
    folder = llama(tmp_path / "hf")
    monkeypatch.chdir(tmp_path)
    with mlflow_server(tmp_path) as url:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", url)
        *wherry_commands, load = commands(blocks("promotion", "sh")[1])
        for words in wherry_commands:
            done = CliRunner().invoke(cli, words[1:])
            assert done.exit_code == 0, done.output
        before = state_of(folder)
        assert (load[:2], len(wherry_commands)) == (["python", "-c"], 2)
        exec(compile(load[2], "docs/promotion.md", "exec"), {})
        assert "the cat sat" in capsys.readouterr().out
        serve = re.search(r"`(mlflow models serve [^`]*)`", page)[1]
        port = free_port()
        with (tmp_path / "serve.log").open("wb") as log:
            command = [sys.executable, "-m", *shlex.split(serve), "--port", str(port)]
            environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
            process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        try:
            await_health(f"http://127.0.0.1:{port}/health", process)
            asked = {"inputs": ["the cat sat"], "params": {"max_new_tokens": 3, "do_sample": False}}
            request = urllib.request.Request(
                f"http://127.0.0.1:{port}/invocations",
                data=json.dumps(asked).encode(),
                headers={"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(request, timeout=300) as answer:
                [text] = json.load(answer)["predictions"]
            assert text.startswith("the cat sat")
        finally:
            process.terminate()
            process.wait(timeout=60)
    assert state_of(folder) == before
