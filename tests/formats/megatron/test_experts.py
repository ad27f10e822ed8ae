"""Expert-parallel ranks of Megatron's older checkpoints are put together; they are imitated, cut from a model."""

from __future__ import annotations

import re
import shutil

import pytest

import wherry
from tests.support.tiny_models import save_tiny
from wherry.errors import CorruptError, IncompleteError, UnrepresentableError, UnsupportedError

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
FILE = "model_optim_rng.pt"
EXPERT = re.compile(r"(.+\.mlp\.experts)\.local_experts\.(\d+)\.(.+)\.(weight)")
LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The file of one rank of a model with experts, as a table."""
    folder = tmp_path_factory.mktemp("moe")
    save_tiny(folder / "hf", "qwen3-moe")
    wherry.convert(folder / "hf", folder / "one", to="megatron-ranks", lineage=False)
    return torch.load(folder / "one" / "mp_rank_00" / FILE, weights_only=False)


def save_ranks(whole, step, experts=2, pipeline=1, grouped=False, **said):
    """A folder for each expert-parallel rank and pipeline stage, named as `get_checkpoint_name` does."""
    model = whole["model"]
    sizes = {"expert_model_parallel_size": experts, "pipeline_model_parallel_size": pipeline}
    args = type(whole["args"])(**{**vars(whole["args"]), **sizes, **said})
    numbers = [int(match[1]) for name in model if (match := LAYER.fullmatch(name))]
    layers = (max(numbers) + 1) // pipeline
    each = len({match[2] for name in model if (match := EXPERT.fullmatch(name))}) // experts
    for stage in range(pipeline):
        for rank in range(experts):
            rows = {
                local(name, layers, each, grouped): tensor
                for name, tensor in model.items()
                if stage_of(name, layers, pipeline) == stage and rank_of(name, each) in (None, rank)
            }
            name = "mp_rank_00" + (f"_{stage:03d}" if pipeline > 1 else "")
            name += f"_{rank:03d}" if experts > 1 else ""
            (step / name).mkdir(parents=True)
            torch.save({**whole, "args": args, "model": rows}, step / name / FILE)
    return step


def stage_of(name, layers, pipeline):
    layer = LAYER.fullmatch(name)
    return int(layer[1]) // layers if layer else 0 if name.startswith("embedding") else pipeline - 1


def rank_of(name, each):
    """The rank that has an expert; None for what all ranks have."""
    expert = EXPERT.fullmatch(name)
    return int(expert[2]) // each if expert else None


def local(name, layers, each, grouped):
    """The name that a parameter has in the file of its rank."""
    expert, layer = EXPERT.fullmatch(name), LAYER.fullmatch(name)
    if expert:
        number = int(expert[2]) % each
        grouped_name = f"{expert[1]}.{expert[3]}.{expert[4]}{number}"
        name = grouped_name if grouped else f"{expert[1]}.local_experts.{number}.{expert[3]}.{expert[4]}"
    return re.sub(r"layers\.\d+", f"layers.{int(layer[1]) % layers}", name, count=1) if layer else name


def read(step):
    with wherry.open(step) as checkpoint:
        assert checkpoint.detection.format == "megatron-ranks"
        return {path[0]: checkpoint.read(path).tobytes() for path in checkpoint.manifest.tensors}


def raw(tensor):
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize(("experts", "pipeline"), [(1, 1), (2, 1), (2, 2)])
def test_ranks_are_put_together(whole, experts, pipeline, grouped, tmp_path):
    step = save_ranks(whole, tmp_path / "iter_0000010", experts, pipeline, grouped)
    assert read(step) == {name: raw(tensor) for name, tensor in whole["model"].items()}


def test_it_becomes_the_model_that_it_was_made_of(whole, tmp_path):
    step = save_ranks(whole, tmp_path / "iter_0000010", grouped=True)
    save_tiny(tmp_path / "hf", "qwen3-moe")
    wherry.convert(step, tmp_path / "out", to="huggingface", family="qwen", lineage=False)
    with wherry.open(tmp_path / "hf") as wanted, wherry.open(tmp_path / "out") as found:
        assert set(found.manifest.tensors) == set(wanted.manifest.tensors)
        assert all(
            found.read(path).tobytes() == wanted.read(path).tobytes() for path in wanted.manifest.tensors
        )


def test_a_missing_rank_is_named(whole, tmp_path):
    step = save_ranks(whole, tmp_path / "iter_0000010", pipeline=2)
    shutil.rmtree(step / "mp_rank_00_000_001")
    with pytest.raises(IncompleteError, match="expert-parallel rank 1 of pipeline stage 0"):
        wherry.open(step)
    step = save_ranks(whole, tmp_path / "iter_0000020")
    shutil.rmtree(step / "mp_rank_00_001")
    with pytest.raises(IncompleteError, match="expert_model_parallel_size is 2"):
        wherry.open(step)


def changed(step, name, change):
    file = step / name / FILE
    said = torch.load(file, weights_only=False)
    change(said["model"])
    torch.save(said, file)


def test_ranks_with_other_parameters_are_corrupt(whole, tmp_path):
    step = save_ranks(whole, tmp_path / "iter_0000010")
    changed(
        step, "mp_rank_00_001", lambda model: model.pop(next(name for name in model if ".experts." in name))
    )
    with pytest.raises(CorruptError, match="expert-parallel ranks have different"):
        wherry.open(step)
    step = save_ranks(whole, tmp_path / "iter_0000020")
    changed(
        step, "mp_rank_00_001", lambda model: model.update({"decoder.final_layernorm.weight": torch.ones(3)})
    )
    with pytest.raises(CorruptError, match="expert-parallel ranks have different"):
        wherry.open(step)


def test_experts_in_one_tensor_are_refused(whole, tmp_path):
    """No name tells which experts a rank has: the first rank's would be taken for all."""
    step = save_ranks(whole, tmp_path / "iter_0000010")
    for rank in range(2):
        more = {"decoder.layers.0.mlp.experts.weight1": torch.ones(3)}
        changed(step, f"mp_rank_00_00{rank}", lambda model, more=more: model.update(more))
    with pytest.raises(UnsupportedError, match=r"mlp\.experts\.weight1"):
        wherry.open(step)


def test_experts_that_are_divided_otherwise_are_refused(whole, tmp_path):
    step = save_ranks(whole, tmp_path / "iter_0000010", num_experts=4, expert_tensor_parallel_size=2)
    with pytest.raises(UnsupportedError, match="expert_tensor_parallel_size is 2"):
        wherry.open(step)


@pytest.mark.parametrize("label", ["mixtral", "qwen3-moe", "gpt-oss"])
def test_one_expert_of_weight_one_is_refused(label, tmp_path):
    """Megatron-Core raises "Please use --moe-router-pre-softmax when topk is 1", which gives the expert its score."""
    save_tiny(tmp_path / "hf", label, num_experts_per_tok=1)
    with pytest.raises(UnrepresentableError, match="does not make the weight of a single expert 1"):
        wherry.plan(tmp_path / "hf", tmp_path / "step", to="megatron")


def test_one_expert_of_its_own_score_is_written(tmp_path):
    save_tiny(tmp_path / "hf", "qwen3-moe", num_experts_per_tok=1, norm_topk_prob=False)
    wherry.convert(tmp_path / "hf", tmp_path / "step", to="megatron", lineage=False)
    args = torch.load(tmp_path / "step" / "common.pt", weights_only=False)["args"]
    assert (args.moe_router_topk, args.moe_router_pre_softmax) == (1, True)


@pytest.mark.parametrize("label", ["stablelm", "gptneoxserial"])
def test_an_odd_number_of_rotary_elements_is_refused(label, tmp_path):
    """transformers turns a quarter of 12 elements, Megatron-Core an even number of them."""
    save_tiny(tmp_path / "hf", label, hidden_size=36, num_attention_heads=3, rope_parameters={
        "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25,
    })  # fmt: skip
    with pytest.raises(UnrepresentableError, match="an even number of a head's elements"):
        wherry.plan(tmp_path / "hf", tmp_path / "step", to="megatron")
