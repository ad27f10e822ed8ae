"""The hooks of docs/trainers.md, run: with the real library where it installs, else by the contract of its callback."""

from __future__ import annotations

import abc
import json
import sys
import types
from types import SimpleNamespace

import numpy as np
import pytest
import yaml

import wherry
from tests.support.oracles.maxtext import DEFAULTS
from tests.support.restore import nested

transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")


@pytest.fixture
def emitted(monkeypatch):
    """What was emitted."""
    found = []
    monkeypatch.setattr(wherry, "emit", lambda uri, **more: found.append((uri, more)))
    return found


def same_weights(model, folder):
    loaded = type(model).from_pretrained(folder).state_dict()
    truth = model.state_dict()
    assert loaded.keys() == truth.keys()
    assert all(torch.equal(value, truth[name]) for name, value in loaded.items())


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=False,
    ))  # fmt: skip
    model.save_pretrained(folder / "hf")
    return model, folder / "hf"


def test_orbax_checkpoint_manager(tmp_path, emitted):
    ocp = pytest.importorskip("orbax.checkpoint")
    from tests.support.hooks_orbax import wherry_manager

    state = {"w": np.arange(6, dtype=np.float32)}
    with wherry_manager(tmp_path / "run", max_to_keep=2) as manager:
        for step in (1, 2, 3):
            manager.save(step, args=ocp.args.StandardSave(state))
            manager.wait_until_finished()
    assert [uri for uri, _ in emitted] == [f"{tmp_path}/run/{step}" for step in (1, 2, 3)]
    assert wherry.detect(emitted[-1][0]).verdict == "ok"


@pytest.fixture(scope="module")
def llama31(tmp_path_factory):
    """A Llama 3.1, whose rotary positions MaxText turns in another order than those of Llama 2."""
    folder = tmp_path_factory.mktemp("llama-3.1")
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=False, rope_theta=500_000, max_position_embeddings=131_072,
        rope_scaling={
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ))  # fmt: skip
    model.save_pretrained(folder / "hf")
    return model, folder / "hf"


@pytest.mark.parametrize("name", ["llama2-7b", "llama3.1-8b"])
def test_maxtext(tmp_path, name, request):
    jax = pytest.importorskip("jax")
    from flax.training.train_state import TrainState

    from tests.support.hooks_maxtext import READ_BY_LLAMA, export_for_serving

    model, source = request.getfixturevalue("llama31" if "3.1" in name else "llama")
    uri = wherry.convert(source, tmp_path / "maxtext", to="maxtext").target.uri
    written = yaml.safe_load((tmp_path / "maxtext/items/assets/maxtext_config.yml").read_text())
    params = jax.tree.map(jax.numpy.asarray, nested(uri)["params"])
    state = TrainState(step=7, apply_fn=None, params=params, tx=None, opt_state=())
    stated = {
        one: value for one, value in written.items() if one != "rope_type"
    }  # as the model's name decides it
    config = SimpleNamespace(
        base_output_directory=str(tmp_path / "out"), run_name="r",
        **{**{one: DEFAULTS[one] for one in READ_BY_LLAMA if one in DEFAULTS}, **stated, "model_name": name},
    )  # fmt: skip
    assert export_for_serving(state, config, 7) is None
    handle = export_for_serving(state, config, 1000)
    jax.tree.map(lambda one: one.delete(), params)  # the next step donates them
    handle.result(60)
    exported = tmp_path / "out" / "r" / "huggingface" / "1000"
    same_weights(model, exported)
    tokens = torch.arange(24).reshape(1, -1)
    loaded = type(model).from_pretrained(exported)
    assert torch.allclose(loaded(tokens).logits, model(tokens).logits, atol=1e-5)


class TrainStateOfT5X:
    """`t5x.train_state.TrainState` as actions see it: `step`, and the tree that T5X itself saves."""

    def __init__(self, tree):
        self._tree = tree
        self.step = np.int32(5)

    def state_dict(self):
        return {**self._tree, "state": {"step": self.step}}


@pytest.fixture
def t5x(monkeypatch):
    """The contract of `t5x.trainer.BaseAction`: one abstract method, which says whether training shall stop."""

    class BaseAction(abc.ABC):
        @abc.abstractmethod
        def run(self, train_state, metrics_by_task) -> bool: ...

    trainer = types.ModuleType("t5x.trainer")
    trainer.BaseAction = BaseAction
    package = types.ModuleType("t5x")
    package.trainer = trainer
    monkeypatch.setitem(sys.modules, "t5x", package)
    monkeypatch.setitem(sys.modules, "t5x.trainer", trainer)


@pytest.mark.usefixtures("t5x")
def test_t5x(tmp_path):
    from tests.support.hooks_t5x import ExportAction

    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(
        vocab_size=64, d_model=16, d_kv=4, d_ff=32, num_layers=2, num_decoder_layers=2, num_heads=4,
        feed_forward_proj="gated-gelu", tie_word_embeddings=True,
    ))  # fmt: skip
    model.save_pretrained(tmp_path / "hf")
    uri = wherry.convert(tmp_path / "hf", tmp_path / "t5x", to="t5x-orbax").target.uri
    action = ExportAction(str(tmp_path / "run"))
    assert action.run(TrainStateOfT5X(nested(uri)), {"span_corruption": {}}) is False
    assert action.handle.result(60).target.step == 5
    same_weights(model, tmp_path / "run" / "huggingface" / "5")


def test_lingua(tmp_path, emitted, llama):
    from tests.support.hooks_lingua import after_save

    model, source = llama
    saved = tmp_path / "run" / "checkpoints" / "0000000008"
    wherry.convert(source, saved, to="lingua", as_step=8)
    live = torch.nn.Module()
    live.state_dict = lambda **_: {
        ".".join(path).removeprefix("model."): torch.from_numpy(value) for path, value in flat(nested(saved))
    }
    checkpoint = SimpleNamespace(path=saved.parent)
    args = SimpleNamespace(dump_dir=tmp_path / "run")
    handle = after_save(checkpoint, live, SimpleNamespace(step=8), args)
    handle.result(60)
    assert emitted == [(str(saved), {"step": 8, "strict": False})]
    same_weights(model, tmp_path / "run" / "huggingface" / "0000000008")


def flat(tree, path=()):
    for name, value in tree.items():
        yield from flat(value, (*path, name)) if isinstance(value, dict) else [((*path, name), value)]


def test_a_plain_torch_loop_goes_on_where_it_stopped(tmp_path):
    from tests.support.hooks_torch import train

    torch.manual_seed(0)
    batches = [torch.randn(4, 3) for _ in range(8)]

    def begin():
        torch.manual_seed(1)
        model = torch.nn.Linear(3, 2)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    whole = begin()
    train(*whole, batches, tmp_path / "whole")
    train(
        *begin(), batches[:5], tmp_path / "run"
    )  # it was stopped in the middle: step 4 is the last one committed
    again = begin()
    store = train(*again, batches, tmp_path / "run")
    assert store.steps() == [2, 4, 6, 8]
    assert store.best("loss") in store.steps()
    assert torch.equal(again[0].weight, whole[0].weight)
    assert json.dumps(store.metrics(8)).startswith('{"loss"')
