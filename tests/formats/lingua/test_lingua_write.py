"""Writing Meta Lingua: loaded by the very calls that Lingua makes, and refused where Lingua would stumble."""

from __future__ import annotations

import json

import pytest

import wherry
from tests.support.formats import expected, opened, place
from tests.support.lingua import PARAMS, meta_files, model, optimizer, step_folder
from tests.support.torch import same, torch
from wherry.errors import AmbiguousError, UnrepresentableError, UsageError

dcp = pytest.importorskip("torch.distributed.checkpoint")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def load_from_checkpoint(path, parameters, optim=None):
    """As lingua/checkpoint.py does it: `.metadata` must be there, then one dcp.load of the nested state."""
    assert (path / ".metadata").exists()
    state = {"model": {name: torch.full_like(one, 9) for name, one in parameters.items()}}
    if optim is not None:
        blank = {n: {k: torch.full_like(v, 9) for k, v in row.items()} for n, row in optim["state"].items()}
        state["optim"] = {"state": blank, "param_groups": [dict.fromkeys(optim["param_groups"][0])]}
    dcp.load(state, checkpoint_id=str(path), no_dist=True)
    return state


def load_consolidated(path):
    """As apps/main/generate.py does it."""
    config = json.loads((path / "params.json").read_text())
    assert config["distributed"]["model_dtype"] in ("fp32", "fp16", "bf16")
    assert config["model"]
    assert config["data"]["tokenizer"]["name"]
    return torch.load(path / "consolidated.pth", weights_only=True)


def bare_file(path, *, state=None, params=PARAMS):
    """A folder with a DCP of bare parameter names and the run's params.json next to it."""
    from tests.support.torch import save

    save(model() if state is None else state, path)
    if params is not None:
        (path / "params.json").write_text(json.dumps(params))
    return path


@pytest.mark.parametrize("profile", ["default", "2.3"])
def test_weights_for_init_ckpt_path(tmp_path, profile):
    source = step_folder(tmp_path / "0000000007", tied=True)
    options = {"for_torch": profile}
    wherry.convert(source, tmp_path / "out", to="lingua", only="params", options=options, lineage=False)
    weights = model(tied=True)
    assert same(load_from_checkpoint(tmp_path / "out", weights)["model"], weights)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {".metadata", "__0_0.distcp", "params.json", "wherry.json"}
    found = wherry.detect(tmp_path / "out")
    assert (found.format, found.verdict, found.kind) == ("lingua", "ok", "params")


def test_a_step_to_resume_from(tmp_path):
    source = step_folder(tmp_path / "0000000007")
    wherry.convert(source, tmp_path / "out", to="lingua", options={"resume": True}, lineage=False)
    weights = model()
    optim = optimizer(weights)
    state = load_from_checkpoint(tmp_path / "out", weights, optim)
    assert {name for name in state["model"] if name != "output.weight"} < set(weights)
    for name, row in optimizer(state["model"])["state"].items():
        assert same(state["optim"]["state"][name], row), name
    assert state["optim"]["param_groups"] == optim["param_groups"]
    assert json.loads((tmp_path / "out" / "train_state_00001.json").read_text())["step"] == 7


def test_bare_names_get_their_prefix(tmp_path):
    wherry.convert(bare_file(tmp_path / "a"), tmp_path / "out", to="lingua", lineage=False)
    found = opened(tmp_path / "out", "lingua")
    assert set(found.manifest.tensors) == {(f"model.{name}",) for name in model()}
    assert set(load_from_checkpoint(tmp_path / "out", model())["model"]) == set(model())


def test_consolidated_and_back(tmp_path):
    source = step_folder(tmp_path / "0000000007")
    options = {"resume": True}
    wherry.convert(source, tmp_path / "consolidated", to="lingua-consolidated", lineage=False)
    found = load_consolidated(tmp_path / "consolidated")
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(str(source), str(tmp_path / "by_torch.pth"))
    by_torch = torch.load(tmp_path / "by_torch.pth", weights_only=True)
    assert same(found["model"], by_torch["model"])
    assert found["optim"]["param_groups"] == by_torch["optim"]["param_groups"]
    assert found.keys() == by_torch.keys()
    assert all(same(found["optim"]["state"][name], row) for name, row in by_torch["optim"]["state"].items())
    with pytest.raises(UnrepresentableError, match="train_state"):  # consolidated files have none
        wherry.convert(tmp_path / "consolidated", tmp_path / "x", to="lingua", options=options, lineage=False)
    wherry.convert(tmp_path / "consolidated", tmp_path / "back", to="lingua", only="params", lineage=False)
    weights = by_torch["model"]
    assert same(load_from_checkpoint(tmp_path / "back", weights)["model"], weights)


def test_flat_and_nested_forms_agree(tmp_path):
    """Lists of dicts are opened, lists of numbers are one item, as DCP does it."""
    from wherry.integrations.formats.lingua import deep, flat

    source = opened(step_folder(tmp_path / "0000000007"), "lingua").manifest
    wherry.convert(tmp_path / "0000000007", tmp_path / "c", to="lingua-consolidated", lineage=False)
    nested = opened(tmp_path / "c", "lingua-consolidated").manifest
    assert set(deep(source, "").names.values()) == {*nested.tensors, *nested.values, *nested.empties}
    there = flat(nested, "")
    assert set(there.names.values()) == {*source.tensors, *source.values, *source.empties}
    assert there.lists == source.lists
    assert {n: list(p) for n, p in source.custom["planner_data"].items()} == there.custom["planner_data"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"params": None}, "params.json"),
        ({"params": {"model": {"dim": 8}}}, "distributed.model_dtype"),
        ({"state": {"a.weight": torch.ones(2)}}, "tok_embeddings.weight"),
    ],
)
@pytest.mark.parametrize("to", ["lingua", "lingua-consolidated"])
def test_what_lingua_could_not_load(tmp_path, change, words, to):
    with pytest.raises(UnrepresentableError, match=words) as caught:
        wherry.convert(
            bare_file(tmp_path / "a", **change), tmp_path / "out", to=to, format="dcp", lineage=False
        )
    assert caught.value.cure
    assert not (tmp_path / "out").exists()


def test_resume_needs_real_moments(tmp_path):
    source = step_folder(tmp_path / "0000000007", optim=False)
    with pytest.raises(UnrepresentableError, match="exp_avg") as caught:
        wherry.convert(source, tmp_path / "out", to="lingua", options={"resume": True}, lineage=False)
    assert "init_ckpt_path" in (caught.value.cure or "")
    full = step_folder(tmp_path / "0000000008")
    with pytest.raises(UnrepresentableError, match="optimizer state") as caught:
        wherry.convert(full, tmp_path / "out", to="lingua", lineage=False)
    assert "--only params" in (caught.value.cure or "")
    with pytest.raises(UsageError, match="expected true or false"):
        wherry.convert(full, tmp_path / "out", to="lingua", options={"resume": "maybe"}, lineage=False)


def test_never_among_the_steps_of_a_run_unless_requested(tmp_path):
    source = step_folder(tmp_path / "0000000007")
    run = tmp_path / "run" / "checkpoints"
    step_folder(run / "0000000004")
    for name in ("0000000009", "0000000009.partial"):
        with pytest.raises(UsageError, match="step of the run"):
            wherry.convert(source, run / name, to="lingua", only="params", lineage=False)
        assert not (run / name).exists()
    receipt = wherry.convert(source, run, to="lingua", only="params", into=True, lineage=False)
    assert receipt.target.uri == str(run / "0000000007")
    wherry.convert(source, tmp_path / "other" / "0000000009", to="lingua", only="params", lineage=False)
    assert sorted(path.name for path in run.iterdir()) == ["0000000004", "0000000007"]


def test_metas_files_without_sizes_need_their_params(tmp_path):
    meta_files(tmp_path / "a", 1)
    with pytest.raises(AmbiguousError, match=r"cannot determine the size[\s\S]*params\.json"):
        wherry.convert(tmp_path / "a", tmp_path / "out", to="lingua", lineage=False)


def test_the_corpus_there_and_back(corpus, tmp_path):
    """Step folder to consolidated equals Lingua's own consolidation, digest by digest."""
    row = {tuple(one["path"]): one["sha256"] for one in expected("lingua-fsdp2-w2-consolidated")["tensors"]}
    wherry.convert(place("lingua-fsdp2-w2"), tmp_path / "c", to="lingua-consolidated", lineage=False)
    assert dict(wherry.inspect(tmp_path / "c", sha256=True).sha256) == row
    options = {"resume": True}
    wherry.convert(place("lingua-fsdp2-w2"), tmp_path / "s", to="lingua", options=options, lineage=False)
    flat = {tuple(one["path"]): one["sha256"] for one in expected("lingua-fsdp2-w2")["tensors"]}
    assert dict(wherry.inspect(tmp_path / "s", sha256=True).sha256) == flat
