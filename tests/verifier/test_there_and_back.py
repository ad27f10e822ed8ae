"""A checkpoint that went through another system and back is compared with where it began, which has the same names."""

from __future__ import annotations

import json
import shutil

import pytest
from safetensors.numpy import load_file, save_file

import wherry
from tests.support.tiny_models import save_tiny


@pytest.fixture(scope="module", params=["maxtext", "lingua"])
def journey(tmp_path_factory, request, own_home):
    folder = tmp_path_factory.mktemp("journey")
    save_tiny(folder / "start", "llama")
    wherry.convert(folder / "start", folder / "there", to=request.param)
    wherry.convert(folder / "there", folder / "back", to="huggingface")
    return folder


def test_it_is_what_it_was(journey):
    found = wherry.verify(journey / "back", level="roundtrip", against=journey / "start")
    assert (found.verdict, found.exit_code, found.against) == ("ok", 0, str(journey / "start"))
    assert wherry.verify(journey / "back", level="roundtrip", against=journey / "there").ok


def test_another_model_is_not(journey, tmp_path):
    shutil.copytree(journey / "start", tmp_path / "other")
    file = tmp_path / "other/model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"] = tensors["model.norm.weight"] + 1
    save_file(tensors, file, {"format": "pt"})
    found = wherry.verify(journey / "back", level="roundtrip", against=tmp_path / "other")
    assert (found.verdict, [one.path for one in found.failed]) == ("altered", ["model.norm.weight"])


def test_both_spellings_of_the_dtype_are_one_statement(journey, tmp_path):
    shutil.copytree(journey / "start", tmp_path / "old")
    file = tmp_path / "old/config.json"
    config = json.loads(file.read_text())
    stated = config.pop("dtype", None) or config.pop("torch_dtype", None) or "float32"

    def compared(**attributes):
        file.write_text(json.dumps({**config, **attributes}))
        return {row.name for row in wherry.diff(journey / "start", tmp_path / "old").attributes}

    (journey / "start/config.json").write_text(json.dumps({**config, "dtype": stated}))
    assert compared(torch_dtype=stated) == compared(dtype=stated) == set()
    assert compared(torch_dtype="float16") == {"dtype"}
    assert compared(dtype=stated, torch_dtype="float16") == {"torch_dtype"}
