"""What was converted is loaded by transformers' own `from_pretrained`, with the config that wherry wrote, and computes
the same: the logits that the original software recorded, and those of tiny models that went to a system and back."""

from __future__ import annotations

import json

import numpy as np
import pytest

import wherry
from tests.support.corpus import CORPUS, needs
from tests.support.tiny_models import MODELS, REFUSED, TARGETS, save_tiny
from wherry.core.request import LayoutRequest
from wherry.errors import UnrepresentableError

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
torch = pytest.importorskip("torch", reason="torch is not installed")


LINGUA = ("lingua-fsdp2-w2", "checkpoint/checkpoints/0000000004")
LLAMA_GOLDEN = "hf-llama-from-lingua-fp32"
# T5X cases whose own forward pass is recorded, with the scale that transformers' UMT5 puts on the decoder's output.
T5X = {"t5x-legacy-v3-f32-2024": 1.0, "t5x-orbax-ocdbt-head": 1.0, "t5x-legacy-v3-scanned-2024": 4.0}
T5X_INPUTS = ([[5, 6, 7, 8, 9, 1]], [[0, 11, 12, 13]])


def loaded(folder):
    """The model, by the class that its config names; nothing may be missing, left over or of another shape.

    What was recorded on another machine is compared in float64: in float32 processors differ by more than the limit.
    """
    config = json.loads((folder / "config.json").read_text())
    model, report = getattr(transformers, config["architectures"][0]).from_pretrained(
        folder, output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert not report["mismatched_keys"]
    return model.eval()


def logits(model, ids, decoder_ids=None):
    inputs = {"input_ids": torch.tensor(ids)}
    if decoder_ids is not None and model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = torch.tensor(decoder_ids)
    with torch.no_grad():
        made = model(**inputs)
    return (made.logits if "logits" in made else made.last_hidden_state).numpy()


def relative(found, wanted):
    return np.abs(found - wanted).max() / np.abs(wanted).max()


@pytest.mark.parametrize("through", [None, "maxtext", "penzai", "lingua-consolidated"])
def test_lingua_computes_what_lingua_computed(through, tmp_path):
    needs(LINGUA[0], LLAMA_GOLDEN)
    source = CORPUS / LINGUA[0] / LINGUA[1]
    if through:
        wherry.convert(source, tmp_path / "between", to=through, only="params", lineage=False)
        source = tmp_path / "between"
    wherry.convert(source, tmp_path / "out", to="huggingface", only="params", lineage=False)
    wanted = np.load(CORPUS / LLAMA_GOLDEN / "logits.npy")
    ids = json.loads((CORPUS / LLAMA_GOLDEN / "inputs.json").read_text())["input_ids"]
    assert relative(logits(loaded(tmp_path / "out").double(), ids), wanted) < 1e-5


@pytest.mark.parametrize("case", T5X)
def test_t5x_computes_what_t5x_computed(case, tmp_path):
    needs(case)
    expected = json.loads((CORPUS / case / "expected.json").read_text())
    source = CORPUS / case / "checkpoint" / expected["uri"]
    wherry.convert(source, tmp_path / "out", to="huggingface", only="params", lineage=False)
    found = logits(loaded(tmp_path / "out").double(), *T5X_INPUTS) * T5X[case]
    assert np.abs(found - np.load(CORPUS / case / "logits.npy")).max() < 1e-4


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Folder of a tiny model, made once, with every weight drawn anew: norms of one would hide a shift."""
    made = {}

    def folder(label):
        if label not in made:
            named = MODELS[label][1]
            routed = (
                {"num_experts_per_tok": 2} if "num_experts" in named and "top_k_experts" not in named else {}
            )
            made[label] = save_tiny(tmp_path_factory.mktemp(label), label, drawn=True, **routed)
        return made[label]

    return folder


FORMATS = {"t5x": "t5x-legacy"}


def routes():
    for label in MODELS:
        for system in TARGETS.get(label.split("-")[0], ("maxtext",)):
            if system != "meta" and (label, system) not in REFUSED:
                yield pytest.param(label, FORMATS.get(system, system), id=f"{label}-{system}")


# A checkpoint of these systems that names no family is taken for a Llama, whose class has no window.
FAMILY_TO_STATE = {("phi3-window", "lingua"): "phi3", ("phi3-window", "penzai"): "phi3"}


def _keep_own(folder):
    """Leave only what the target's own software would have written: not the record, not Hugging Face's config."""
    for path in folder.rglob("*.json"):
        if path.name in ("wherry.json", "config.json", "generation_config.json"):
            path.unlink()


@pytest.mark.parametrize("own", [False, True], ids=["with-record", "own-config"])
@pytest.mark.parametrize(("label", "to"), list(routes()))
def test_there_and_back_computes_the_same(saved, label, to, own, tmp_path):
    folder = saved(label)
    wherry.convert(folder, tmp_path / "there", to=to, lineage=False)
    family = None
    if own:
        _keep_own(tmp_path / "there")
        family = FAMILY_TO_STATE.get((label, to))
    layout = LayoutRequest(family=family)
    wherry.convert(tmp_path / "there", tmp_path / "back", to="huggingface", lineage=False, layout=layout)
    ids = [[3, 14, 15, 9, 26, 5], [35, 8, 9, 7, 9, 32]]
    wanted, found = (logits(loaded(one), ids, ids) for one in (folder, tmp_path / "back"))
    assert relative(found, wanted) < 1e-5


@pytest.mark.parametrize(("label", "to"), FAMILY_TO_STATE)
def test_the_family_that_holds_a_window_is_named(saved, label, to, tmp_path):
    wherry.convert(saved(label), tmp_path / "there", to=to, lineage=False)
    _keep_own(tmp_path / "there")
    with pytest.raises(UnrepresentableError, match="always uses 0") as caught:
        wherry.convert(tmp_path / "there", tmp_path / "back", to="huggingface", lineage=False)
    assert f"--family {FAMILY_TO_STATE[label, to]};" in caught.value.cure


@pytest.mark.parametrize("label", ["llama-3.1", "t5-1.1", "gemma3"])
def test_another_dtype_is_written_into_the_config(saved, label, tmp_path):
    wherry.convert(
        saved(label),
        tmp_path / "out",
        to="huggingface",
        lineage=False,
        layout=LayoutRequest(dtype="bfloat16"),
    )
    model = loaded(tmp_path / "out")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
