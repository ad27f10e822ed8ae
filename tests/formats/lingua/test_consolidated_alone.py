"""A folder with only `consolidated.pth`: Lingua's, a whole model in Meta's form, or any other file of torch."""

from __future__ import annotations

import json
import shlex
import shutil

import pytest

import wherry
from tests.support.formats import place
from tests.support.torch import torch
from wherry.errors import IncompleteError, NotACheckpointError

FLAT = {
    "tok_embeddings.weight": torch.ones(8, 4),
    "layers.0.attention.wo.weight": torch.ones(4, 4),
    "output.weight": torch.ones(8, 4),
}


@pytest.fixture
def alone(tmp_path):
    def folder(content, name="run", **options):
        path = tmp_path / name
        path.mkdir()
        torch.save(content, path / "consolidated.pth", **options)
        return path

    return folder


@pytest.mark.parametrize("name", ["run", "consolidated"])
@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize(
    "tree", [{"model": FLAT}, {"optim": {"state": FLAT}, "model": FLAT}], ids=["model", "optim"]
)
def test_linguas_lacks_its_configuration(tree, protocol, name, alone, tmp_path):
    path = alone(tree, name, pickle_protocol=protocol)
    found = wherry.detect(path)
    assert (found.format, found.verdict) == ("lingua-consolidated", "incomplete")
    assert found.reason == "file not found: params.json: Lingua cannot build the model without it"
    with pytest.raises(IncompleteError) as error:
        wherry.convert(path, tmp_path / "out", to="orbax")
    file = shlex.quote(str(path / "consolidated.pth"))
    assert (
        error.value.cure
        == f"restore params.json from the run, or pass the file {file} to read only the arrays"
    )
    assert wherry.convert(path / "consolidated.pth", tmp_path / "out", to="orbax").target.tensors >= len(FLAT)


def test_linguas_of_the_corpus(corpus, tmp_path):
    source = place("lingua-fsdp2-w2-consolidated")
    shutil.copy(source / "consolidated.pth", tmp_path / "consolidated.pth")
    assert wherry.detect(tmp_path).verdict == "incomplete"
    shutil.copy(source / "params.json", tmp_path / "params.json")
    assert wherry.detect(tmp_path).verdict == "ok"


@pytest.mark.parametrize("params", [None, {"dim": 4, "n_layers": 1}])
def test_a_whole_model_in_metas_form(params, alone, tmp_path):
    path = alone(FLAT)
    if params:
        (path / "params.json").write_text(json.dumps(params))
    found = wherry.detect(path)
    assert (found.format, found.verdict, found.format_version) == (
        "meta-consolidated",
        "ok",
        "consolidated.pth",
    )
    seen = {one.file: one.seen for one in found.evidence}
    assert seen["params.json"] == ("found" if params else "missing: the model's sizes are not stated")
    with wherry.open(path) as opened:
        assert sorted(opened.manifest.tensors) == sorted((name,) for name in FLAT)
    assert wherry.convert(path, tmp_path / "out", to="orbax").target.tensors == 3


def test_metas_names_with_linguas_configuration_are_linguas(alone):
    path = alone(FLAT)
    (path / "params.json").write_text('{"model": {"dim": 4}}')
    assert wherry.detect(path).format == "lingua-consolidated"


@pytest.mark.parametrize("params", [None, "{}", "no JSON"])
def test_any_other_file_of_torch_is_passed_itself(params, alone):
    path = alone({"w": torch.ones(2)})
    if params:
        (path / "params.json").write_text(params)
    with pytest.raises(NotACheckpointError) as error:
        wherry.open(path)
    assert error.value.cure == f"pass its file: {path}/consolidated.pth"


def test_a_folder_of_that_name_is_no_file(tmp_path):
    (tmp_path / "consolidated.pth").mkdir()
    assert wherry.detect(tmp_path).verdict == "not-a-checkpoint"
