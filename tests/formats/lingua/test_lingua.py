"""Reading Meta Lingua: step and run folders, consolidated files, saves that were cut short; Meta's own files."""

from __future__ import annotations

import json
import shlex
import shutil

import pytest

import wherry
from tests.support.formats import assert_as_expected, canonical, cases, expected, opened, place
from tests.support.lingua import meta_files, model, step_folder
from tests.support.torch import as_bytes, torch
from wherry.errors import IncompleteError, NotACheckpointError, WherryError

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.mark.parametrize("case", cases("lingua", verdicts=("incomplete", "corrupt")))
def test_corpus_verdicts(case):
    row = expected(case)
    found = wherry.detect(place(case))
    assert (found.format, found.verdict) == ("lingua", row["verdict"])
    assert "params.json" in (found.reason or "")
    with pytest.raises(WherryError, match="params"):
        wherry.convert(place(case), place(case).parent / "never", to="dcp", lineage=False)
    assert_as_expected(opened(place(case), "dcp"), row)  # the cure: --format dcp


def test_tied_weights_are_recognised(tmp_path):
    path = step_folder(tmp_path / "0000000007", tied=True)
    found = opened(path, "lingua")
    spec = found.manifest.tensors["model.output.tied_module.weight",]
    assert spec.tags == {"tied": "model.tok_embeddings.weight"}
    assert canonical(found, spec.path) == canonical(found, ("model.tok_embeddings.weight",))
    assert (found.manifest.step, found.manifest.kind) == (7, "train-state")


def test_weights_to_initialise_from_need_no_train_state(tmp_path):
    found = wherry.detect(step_folder(tmp_path / "init", ranks=0, optim=False))
    assert (found.format, found.verdict, found.kind, found.step) == ("lingua", "ok", "params", None)


def _no_params(path):
    (path / "params.json").unlink()


def _only_arrays(path):
    for name in ("params.json", "train_state_00000.json", "train_state_00001.json"):
        (path / name).unlink()


def _second_rank(path):
    (path / "train_state_00001.json").unlink()


def _no_train_state(path):
    for rank in range(2):
        (path / f"train_state_{rank:05d}.json").unlink()


def _cut_state(path):
    (path / "train_state_00001.json").write_text('{"step": 7, "acc')


def _no_metadata(path):
    (path / ".metadata").unlink()


@pytest.mark.parametrize(
    "damage", [_no_params, _only_arrays, _second_rank, _no_train_state, _cut_state, _no_metadata]
)
def test_a_save_that_was_cut_short_is_passed_over(tmp_path, damage):
    run = tmp_path / "run"
    step_folder(run / "checkpoints" / "0000000004")
    newest = step_folder(run / "checkpoints" / "0000000007")
    assert wherry.detect(run).step == 7
    damage(newest)
    found = wherry.detect(newest)
    assert (found.format, found.verdict, found.step) == ("lingua", "incomplete", 7), found.reason
    with pytest.raises(IncompleteError):
        opened(newest, "lingua")
    assert wherry.detect(run).step == 4


def test_params_that_are_not_linguas_do_not_make_a_step_folder(tmp_path):
    path = step_folder(tmp_path / "a", ranks=0, optim=False, params={"dim": 8})
    assert wherry.detect(path).format == "dcp"


def test_train_states_of_two_steps(tmp_path):
    path = step_folder(tmp_path / "0000000007")
    (path / "train_state_00001.json").write_text('{"step": 6}')
    assert wherry.detect(path).verdict == "corrupt"


@pytest.mark.parametrize("said", ["[1]", "{}"])
def test_a_step_that_is_no_number(tmp_path, said):
    step = step_folder(tmp_path / "0000000007")
    (step / "train_state_00001.json").write_text('{"step": ' + said + "}")
    found = wherry.detect(step)
    assert found.verdict == "corrupt"
    assert "not a number" in found.reason


def test_consolidated_without_params(tmp_path):
    folder = tmp_path / "consolidated"
    folder.mkdir()
    torch.save({"model": model()}, folder / "consolidated.pth")
    found = wherry.detect(folder)
    assert (found.format, found.verdict) == ("lingua-consolidated", "incomplete")
    assert "params.json" in (found.reason or "")


@pytest.mark.parametrize("parts", [1, 2])
def test_metas_files(tmp_path, parts):
    rows = meta_files(tmp_path / "a", parts)
    detection = wherry.detect(tmp_path / "a")
    assert (detection.format, detection.verdict, detection.kind) == ("meta-consolidated", "ok", "params")
    found = opened(tmp_path / "a", "meta-consolidated")
    wanted = {
        (*((f"{part:02d}",) if parts > 1 else ()), name): as_bytes(tensor)
        for part, row in enumerate(rows)
        for name, tensor in row.items()
    }
    assert {path: canonical(found, path) for path in found.manifest.tensors} == wanted
    assert {one.name for one in found.manifest.companions} == {"params.json", "tokenizer.model"}


@pytest.mark.parametrize("gone", [0, 1])
def test_metas_files_are_counted(tmp_path, gone):
    meta_files(tmp_path / "a", 2)
    (tmp_path / "a" / f"consolidated.{gone:02d}.pth").unlink()
    found = wherry.detect(tmp_path / "a")
    assert found.verdict == "incomplete"
    assert f"consolidated.{gone:02d}.pth" in (found.reason or "")


def test_the_corpus_run_resumes_nowhere_else(corpus, tmp_path):
    """A copy with another dump folder is the same checkpoint: nothing depends on the paths in params.json."""
    shutil.copytree(place("lingua-fsdp2-w2"), tmp_path / "0000000004")
    assert wherry.detect(tmp_path / "0000000004").verdict == "ok"


# A folder with only `consolidated.pth`: Lingua's, a whole model in Meta's form, or any other file of
# torch.


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
