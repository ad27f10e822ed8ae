"""Conversions between systems through the front door, and what a config counts and the files lack."""

from __future__ import annotations

import itertools
import json
import shutil
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import wherry
from tests.support.families import wanted_hashes
from tests.support.formats import CORPUS, expected, place
from tests.support.libraries import held, loaded
from tests.support.model_files import MAKERS
from tests.support.model_systems import CONTENTS
from tests.support.stated import FACTS
from tests.support.systems import carry, hashes
from tests.support.tiny_models import CLASSES, MODELS, save_tiny, tiny_model
from wherry.core.digest import BLAKE3
from wherry.core.digest import weights_digest as weights_of
from wherry.core.keypath import render
from wherry.core.request import LayoutRequest
from wherry.errors import IncompleteError, UnrepresentableError
from wherry.mover.hashing import hash_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

needs_corpus = pytest.mark.skipif(
    not CORPUS.is_dir(), reason="the corpus is not here; set WHERRY_CORPUS to its folder"
)
LLAMA = "hf-llama-from-lingua-fp32"
GPT3 = "maxtext-gpt3-l3-converted-by-maxtext"
RANDOM = "nnx_aux"  # keys and counters of MaxText's random streams, which no other system has


# ---- What real software wrote


@needs_corpus
@pytest.mark.parametrize("case", ["lingua-fsdp2-w2", "lingua-fsdp2-w2-consolidated"])
def test_lingua_to_hugging_face_and_back(case, tmp_path):
    receipt = carry(place(case), tmp_path / "hf", "huggingface")
    assert receipt.lossless
    assert "from_pretrained" in receipt.snippet
    assert hashes(tmp_path / "hf") == wanted_hashes(LLAMA)
    carry(tmp_path / "hf", tmp_path / "back", expected(case)["format"])
    again, wanted = hashes(tmp_path / "back"), wanted_hashes(case)
    assert again.items() <= wanted.items()
    assert all(path[0].startswith("optim") for path in wanted.keys() - again.keys())


@needs_corpus
@pytest.mark.parametrize(
    ("case", "form"),
    [
        ("paxml-gpt3-l3-v11-gda-zarr", {"version": "1.1", "tree": "flat"}),
        ("paxml-gpt3-l3-v12-gda-ocdbt", {"version": "1.2", "tree": "nested"}),
    ],
)
def test_paxml_to_maxtext_is_what_maxtext_s_converter_made(case, form, tmp_path):
    """Parameters, both moments, step and count."""
    carry(place(case), tmp_path / "maxtext", "maxtext")
    assert hashes(tmp_path / "maxtext") == wanted_hashes(GPT3)
    carry(tmp_path / "maxtext", tmp_path / "back", "paxml", options=form)
    assert hashes(tmp_path / "back") == wanted_hashes(case)
    carry(place(GPT3), tmp_path / "from-converter", "paxml", options=form)
    assert hashes(tmp_path / "from-converter") == wanted_hashes(case)


@needs_corpus
def test_paxml_to_maxtext_in_the_form_that_a_run_asks_for(tmp_path):
    """maxtext#879: the converter knew scanned layers only, the run wanted each by itself."""
    carry(
        place("paxml-gpt3-l3-v11-gda-zarr"), tmp_path / "apart", "maxtext", options={"scan_layers": "false"}
    )
    with wherry.open(tmp_path / "apart") as made, wherry.open(place(GPT3)) as converted:
        for moment in ((), ("opt_state", "mu"), ("opt_state", "nu")):
            root = (*moment, "params") if moment else ("params", "params")
            stack = converted.read((*root, "decoder", "layers", "mlp", "wi", "kernel"))
            for layer in range(3):
                one = made.read((*root, "decoder", f"layers_{layer}", "mlp", "wi", "kernel"))
                np.testing.assert_array_equal(one, stack[:, layer])


SCANNED = [
    "maxtext-gpt3-l3-scan",
    "maxtext-gpt3-l3-unscan",
    "maxtext-llama31-l3-scan",
    "maxtext-llama31-l3-unscan",
    "maxtext-llama31-l3-scan-zarr2-noocdbt",
    "maxtext-mixtral-l2-scan",
    "maxtext-gemma2-l4-scan",
    "maxtext-deepseek3-l4-scan",
]


@needs_corpus
@pytest.mark.parametrize("case", SCANNED)
def test_maxtext_scanned_and_not(case, tmp_path):
    """Without a family being named: within one system it does not matter which of several alike it is."""
    scanned = "unscan" not in case
    carry(place(case), tmp_path / "other", "maxtext", options={"scan_layers": str(not scanned).lower()})
    assert f"layers are {'un' * scanned}scanned" in str(wherry.detect(tmp_path / "other").evidence)
    carry(tmp_path / "other", tmp_path / "back", "maxtext", options={"scan_layers": str(scanned).lower()})
    assert hashes(tmp_path / "back", leave=(RANDOM,)) == wanted_hashes(case, leave=(RANDOM,))


T5 = [
    "t5x-orbax-ocdbt-head",
    "t5x-orbax-zarr-metadata-2024",
    "t5x-legacy-v3-f32-head",
    "t5x-legacy-v3-bf16-2024",
    "t5x-legacy-v3-scanned-2024",
]


def forms(case, *, other=False):
    """The form of a T5X case, or the opposite one."""
    scanned = ("scanned" in case) != other
    return {"scan_layers": str(scanned).lower(), "heads": "apart" if scanned else "joined"}


@needs_corpus
@pytest.mark.parametrize("case", T5)
def test_t5x_to_hugging_face_and_back(case, tmp_path):
    receipt = carry(place(case), tmp_path / "hf", "huggingface")
    assert "T5ForConditionalGeneration" in receipt.snippet
    carry(tmp_path / "hf", tmp_path / "back", expected(case)["format"], options=forms(case))
    again = hashes(tmp_path / "back")
    assert again == {path: one for path, one in wanted_hashes(case).items() if path[0] == "target"}


@needs_corpus
@pytest.mark.parametrize("case", T5[2:3] + T5[4:])
def test_adafactor_goes_with_the_layers(case, tmp_path):
    """Factored moments lose an axis each; they are stacked, taken apart and fused as their parameters are."""
    carry(place(case), tmp_path / "other", "t5x-legacy", options=forms(case, other=True))
    carry(tmp_path / "other", tmp_path / "back", expected(case)["format"], options=forms(case))
    assert hashes(tmp_path / "back") == wanted_hashes(case)


@needs_corpus
@pytest.mark.parametrize("name", ["plain", "label-dict"])
def test_penzai_to_hugging_face_and_back(name, tmp_path):
    case, layout = f"penzai-llama-unroll-{name}", LayoutRequest(family="llama")
    carry(place(case), tmp_path / "hf", "huggingface", layout=layout, options=FACTS["llama", "penzai"])
    with wherry.open(place(case)) as there, wherry.open(tmp_path / "hf") as here:
        path = next(path for path in there.manifest.tensors if "block_1/attention/query" in path[0])
        made = here.read("model.layers.1.self_attn.q_proj.weight")
        np.testing.assert_array_equal(made, there.read(path).reshape(16, 16).T)
    carry(tmp_path / "hf", tmp_path / "back", "penzai", layout=layout)
    carry(tmp_path / "back", tmp_path / "again", "huggingface", layout=layout)
    assert hashes(tmp_path / "again") == hashes(tmp_path / "hf")


# ---- Hugging Face to every system and back

ROUTES = [
    *((LLAMA, to, {}) for to in ("lingua", "lingua-consolidated", "maxtext", "penzai")),
    (LLAMA, "maxtext", {"scan_layers": "false"}),
    (LLAMA, "maxtext", {"param_scan_axis": "0"}),
    (LLAMA, "maxtext", {"rope": "interleaved"}),
    ("hf-llama-tied-sharded-bf16", "maxtext", {}),
    ("hf-llama-tied-sharded-bf16", "lingua", {}),
    ("hf-qwen3-moe-bf16", "maxtext", {"norm_topk": True}),
    ("hf-qwen3-moe-bf16", "maxtext", {"scan_layers": "false", "norm_topk": True}),
]


@cache
def weights_digest(case):
    """Of everything in a case."""
    with wherry.open(place(case)) as source:
        return weights_of(hash_checkpoint(source, BLAKE3, memory=1 << 24).digests, BLAKE3)


@needs_corpus
@pytest.mark.parametrize(("case", "to", "options"), ROUTES)
def test_hugging_face_there_and_back(case, to, options, tmp_path):
    carry(place(case), tmp_path / "there", to, options=options)
    back = carry(tmp_path / "there", tmp_path / "back", "huggingface")
    assert back.target.weights_digest == weights_digest(case)


THROUGH = [
    ("maxtext-mixtral-l2-scan", FACTS["mixtral", "maxtext"]),
    ("maxtext-deepseek3-l4-scan", FACTS["deepseek", "maxtext"]),
    ("maxtext-gemma2-l4-scan", FACTS["gemma2", "maxtext"]),
]


@needs_corpus
@pytest.mark.parametrize(("case", "stated"), THROUGH)
def test_maxtext_to_hugging_face_and_back(case, stated, tmp_path):
    """MaxText's queries are scaled by the root of 8 here, which rounds; every other bit comes back."""
    lossless = carry(place(case), tmp_path / "hf", "huggingface", options=stated).lossless
    state = {"router_bias": "aux"} if "deepseek" in case else {}  # as in the train state of the source
    carry(tmp_path / "hf", tmp_path / "back", "maxtext", options=state)
    again, wanted = hashes(tmp_path / "back"), wanted_hashes(case)
    assert again.keys() <= wanted.keys()
    changed = {path[-2] for path, one in again.items() if wanted[path] != one}
    assert changed == (set() if lossless else {"query"})
    assert all(path[0] in (RANDOM, "opt_state") for path in wanted.keys() - again.keys())


# ---- Lossy on request, and damage


@needs_corpus
@pytest.mark.parametrize(("case", "to"), [(LLAMA, "maxtext"), (GPT3, "paxml")])
def test_another_dtype_is_measured_and_stays_within_its_bound(case, to, tmp_path):
    layout = LayoutRequest(dtype="bfloat16")
    plan = wherry.plan(place(case), tmp_path / "out", to=to, layout=layout).to_json()
    assert not plan["lossless"]
    receipt = carry(place(case), tmp_path / "out", to, layout=layout)
    assert not receipt.lossless
    measured = wherry.verify(tmp_path / "out", level="roundtrip", against=place(case)).measured
    assert 0 < measured.share <= 1
    assert 0 < measured.error < 1
    assert 0 < measured.tensors <= receipt.source.tensors
    with wherry.open(tmp_path / "out") as made:
        assert {spec.dtype for spec in made.manifest.tensors.values()} >= {"bfloat16"}


@needs_corpus
@pytest.mark.parametrize("layout", [LayoutRequest(), LayoutRequest(dtype="bfloat16")], ids=["exact", "lossy"])
def test_a_flipped_byte_of_the_target_is_found_through_the_inverse(layout, tmp_path):
    source, target = tmp_path / "lingua", tmp_path / "hf"
    wherry.convert(place(LLAMA), source, to="lingua", lineage=False)
    carry(source, target, "huggingface", layout=layout)
    with wherry.open(target) as made:
        spec = made.spec("model.layers.1.self_attn.k_proj.weight")
        (extent,) = made.reader.access(spec).extents
    flip(extent.file, extent.offset + extent.length - 1)
    proof = wherry.verify(target, level="roundtrip", against=source)
    assert not proof.ok
    assert "model.layers.1.attention.wk.weight" in {row.path for row in proof.failed}
    forget(target, spec.path)
    failed = {row.path for row in wherry.verify(target, level="roundtrip", against=source).failed}
    names = {
        "model.layers.1.attention.wk.weight",
        "model.layers.1.self_attn.k_proj.weight",
    }  # here and in the source
    assert failed == {"", *names}, "the sidecar contradicts itself, too"


@needs_corpus
def test_the_source_has_its_own_config_in_the_ledger_and_not_the_one_that_was_written(tmp_path):
    """Both are called config.json; with the other's digest, a source would be altered as soon as it is verified."""
    source = tmp_path / "maxtext"
    wherry.convert(place(LLAMA), tmp_path / "hf", to="huggingface", lineage=False)
    wherry.convert(tmp_path / "hf", source, to="maxtext", lineage=False)
    (source / "wherry.json").unlink()  # as the system itself would have left it
    wherry.convert(source, tmp_path / "back", to="huggingface")
    assert wherry.verify(source, level="digest").verdict == "ok"


def flip(file, offset):
    with Path(file).open("r+b") as stream:
        stream.seek(offset)
        (byte,) = stream.read(1)
        stream.seek(offset)
        stream.write(bytes([byte ^ 0x41]))


def forget(target, path):
    """Let the recorded digest be that of the changed tensor, so that only the source can tell."""
    with wherry.open(target) as made:
        digest = hash_checkpoint(made, BLAKE3, memory=1 << 24).digests[path]
    data = json.loads((target / "wherry.json").read_text())
    (row,) = (row for row in data["manifest"]["tensors"] if row["path"] == render(path))
    row["digest"] = digest
    (target / "wherry.json").write_text(json.dumps(data))


# ---- Boxes: chunks that are no runs of a tensor's bytes


# Every system of a family to every other, without the corpus: what the target's own library finds is the
# model in the target's layout, bit by bit, as our own index arithmetic lays it out.


# What differs from another source by its files alone goes to one system.
ALIKE = {
    "huggingface-bin": "maxtext-scan",
    "meta-legacy": "huggingface",
    "paxml-1.0": "maxtext-scan",
    "paxml-0.0": "maxtext-unscan",
}
PAIRS = [
    (family, source, target)
    for family in MAKERS
    for source, target in itertools.product(MAKERS[family], CONTENTS[family])
    if ALIKE.get(source, target) == target
]


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """A model as a system saves it, made once."""
    made = {}

    def saved(family, source):
        if (family, source) not in made:
            folder = tmp_path_factory.mktemp(f"{family}-{source}")
            made[family, source] = MAKERS[family][source](folder / "made")
        return made[family, source]

    return saved


def layout(family, source):
    """A bare file of torch does not say how its heads are divided: its params.json is named."""
    return LayoutRequest(
        family=family,
        config=str(source.parent / "params.json") if source.name == "consolidated.pth" else None,
    )


@pytest.mark.parametrize(("family", "source", "target"), PAIRS)
def test_every_system_to_every_other(family, source, target, model, tmp_path):
    name, form, contents = CONTENTS[family][target]
    system = source.partition("-")[0]
    stated = {"rope": "half"} if family == "llama" and "maxtext" in (name, system) else {}
    stated |= FACTS.get((family, system), {}) if name != system else {}
    begun = model(family, source)
    receipt = carry(begun, tmp_path / "out", name, options={**form, **stated}, layout=layout(family, begun))
    assert receipt.lossless
    found, wanted = loaded(name, tmp_path / "out"), held(contents())
    if source.startswith("t5x") and name.startswith("t5x"):
        wanted |= held({("state", "step"): np.asarray(7, np.int32)})
    assert found.keys() == wanted.keys()
    assert [path for path in wanted if found[path] != wanted[path]] == []


# What a config implies and the files lack ends with 5, what they have beyond it with 7, and each is
# named. A missing tensor is not taken for one that is tied.


pytest.importorskip("transformers")
pytest.importorskip("torch")
UNTIED = (
    "llama",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen3",
    "qwen3-moe",
    "gemma",
    "gemma2",
    "gemma3",
    "deepseek-v3",
)
WEIGHTS = "model.safetensors"


@pytest.fixture
def made(tmp_path):
    """A tiny model of a label, with attributes that replace those of its config, as transformers saves it."""

    def save(label, **more):
        return save_tiny(tmp_path / "hf", label, **more)

    return save


def change(folder, *, drop=(), add=None, **said):
    """Change the tensors and the config of a folder."""
    tensors = {
        name: array
        for name, array in load_file(folder / WEIGHTS).items()
        if not name.endswith(tuple(drop) or "/")
    }
    save_file({**tensors, **(add or {})}, folder / WEIGHTS, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **said}))


def planned(folder, label="llama"):
    to = "t5x-legacy" if "t5" in label else "maxtext"
    return wherry.plan(folder, folder.parent / "out", to=to)


def refused(folder, kind, *words, label="llama"):
    with pytest.raises(kind) as caught:
        planned(folder, label)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert caught.value.cure
    assert caught.value.exit_code == {IncompleteError: 5, UnrepresentableError: 7}[kind]


@pytest.mark.parametrize("label", UNTIED)
def test_a_head_that_is_not_tied_and_not_there(label, made):
    more = {"final_logit_softcapping": None} if label == "gemma2" else {}  # MaxText caps tied logits only
    folder = made(label, tie_word_embeddings=False, **more)
    assert planned(folder, label).tensors
    change(folder, drop=["lm_head.weight"])
    refused(
        folder, IncompleteError, "lm_head.weight", "config.json implies", "tie_word_embeddings", label=label
    )
    change(folder, tie_word_embeddings=True)
    assert planned(folder, label).tensors


def test_biases_of_qwen2(made):
    folder = made("qwen2")
    assert planned(folder).tensors
    change(folder, drop=[".bias"])
    refused(folder, IncompleteError, "self_attn.k_proj.bias", "config.json implies")


def test_norms_of_qwen3(made):
    folder = made("qwen3")
    change(folder, drop=["q_norm.weight", "k_norm.weight"])
    refused(folder, IncompleteError, "self_attn.k_norm.weight", "config.json implies")


def test_biases_that_no_qwen3_has(made):
    folder = made("qwen3")
    shapes = {"q": 64, "k": 32, "v": 32}
    add = {
        f"model.layers.{layer}.self_attn.{one}_proj.bias": np.ones(size, "f4")
        for layer in range(2)
        for one, size in shapes.items()
    }
    change(folder, add=add)
    refused(folder, UnrepresentableError, "without biases", "model.layers.0.self_attn.", "_proj.bias")


def test_dense_layers_among_experts_are_no_lack(made):
    folder = made("qwen3-moe", mlp_only_layers=[0])
    refused(folder, UnrepresentableError, "mlp_only_layers")


@pytest.mark.parametrize(("label", "wrong"), [("t5", "gated-gelu"), ("t5-1.1", "relu")])
def test_the_projections_of_t5(label, wrong, made):
    folder = made(label, tie_word_embeddings=label == "t5")
    assert planned(folder, label).tensors
    change(folder, feed_forward_proj=wrong, is_gated_act=wrong.startswith("gated"))
    with pytest.raises((IncompleteError, UnrepresentableError), match="feed_forward_proj"):
        planned(folder, label)


def test_the_router_s_bias_of_deepseek_v3(made):
    folder = made("deepseek-v3")
    change(folder, drop=["e_score_correction_bias"])
    refused(folder, IncompleteError, "mlp.gate.e_score_correction_bias", "config.json implies")


def test_a_shard_that_the_index_does_not_name(tmp_path):
    folder = tmp_path / "hf"
    tiny_model("llama").save_pretrained(folder, max_shard_size="20KB")
    index = folder / "model.safetensors.index.json"
    said = json.loads(index.read_text())
    lost = said["weight_map"]["lm_head.weight"]
    said["weight_map"] = {name: file for name, file in said["weight_map"].items() if file != lost}
    index.write_text(json.dumps(said))
    found = wherry.detect(folder)
    assert (found.verdict, lost in (found.reason or "")) == ("incomplete", True)
    for to in ("maxtext", "orbax"):
        with pytest.raises(IncompleteError, match=f"does not name {lost}"):
            wherry.plan(folder, tmp_path / "out", to=to)
    (folder / lost).rename(folder / lost.replace("-of-00", "-of-10"))  # of another save
    assert wherry.detect(folder).verdict == "ok"


# What a config counts (layers, experts, entries of the vocabulary) and the files lack ends with 5, what
# they have beyond it with 7. Tied copies, buffers, layers of multi-token prediction and padding are no
# error, and are named.


transformers = pytest.importorskip("transformers")
pytest.importorskip("torch")
CHOICES = {"rope": "half", "query_scale": "folded"}  # which MaxText's checkpoints do not state


@pytest.fixture
def made_of_counts(tmp_path):
    """A tiny model of a label as transformers saves it: the folder and its tensors."""

    def save(label, **more):
        name, settings = MODELS[label]
        config = getattr(transformers, f"{name}Config")(**{**settings, **more})
        getattr(transformers, CLASSES.get(name, f"{name}ForCausalLM"))(config).save_pretrained(
            tmp_path / "hf"
        )
        return tmp_path / "hf", load_file(tmp_path / "hf" / WEIGHTS)

    return save


def put(folder, tensors, **said):
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **said}))


def carried(folder, target, to):
    """Convert with proof; the tensors that are left out."""
    plan = wherry.plan(folder, target, to=to)
    carry(folder, target, to)
    return [row for row in plan.ignored if row.rule != "companions"]


def refused_of_counts(folder, kind, *words, to="maxtext"):
    with pytest.raises(kind) as caught:
        wherry.plan(folder, folder.parent / "out", to=to)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert caught.value.cure
    assert caught.value.exit_code == {IncompleteError: 5, UnrepresentableError: 7}[kind]


@pytest.mark.parametrize(
    ("label", "attribute", "word", "to"),
    [
        ("llama", "num_hidden_layers", "model.layers.", "maxtext"),
        ("llama", "num_hidden_layers", "model.layers.", "lingua"),
        ("mixtral", "num_local_experts", "experts.", "maxtext"),
        ("qwen3-moe", "num_local_experts", "mlp.experts.", "maxtext"),
        ("t5", "num_layers", "encoder.block.", "t5x-legacy"),
    ],
)
def test_layers_and_experts_are_as_many_as_the_config_says(label, attribute, word, to, made_of_counts):
    folder, tensors = made_of_counts(label)
    count = json.loads((folder / "config.json").read_text())[attribute]
    attributes = "num_experts or num_local_experts" if label == "qwen3-moe" else attribute
    assert wherry.plan(folder, folder.parent / "out", to=to).tensors
    put(folder, tensors, **{attribute: count + 1})
    refused_of_counts(
        folder, IncompleteError, f"missing index {count}", word, f"config.json ({attributes}) implies", to=to
    )
    put(folder, tensors, **{attribute: count - 1})
    refused_of_counts(
        folder, UnrepresentableError, word, f"states {count - 1}", f"have index {count - 1}", to=to
    )


@pytest.mark.parametrize(
    ("label", "to"), [("llama", "maxtext"), ("llama", "huggingface-flax"), ("t5", "t5x-legacy")]
)
def test_the_rows_of_the_embedding_are_those_of_the_vocabulary(label, to, made_of_counts):
    folder, tensors = made_of_counts(label)
    name = "shared.weight" if label == "t5" else "lm_head.weight"
    put(folder, tensors, vocab_size=58)
    refused_of_counts(
        folder, UnrepresentableError, name, "2 entries beyond the vocabulary", "states 58", to=to
    )
    put(folder, tensors, vocab_size=64)
    refused_of_counts(folder, IncompleteError, name, "missing entries", "states 64", "have 60", to=to)


def test_rows_that_maxtext_pads_are_named_and_left_out(made_of_counts, tmp_path):
    folder, tensors = made_of_counts("llama")
    wherry.convert(folder, tmp_path / "maxtext", to="maxtext", lineage=False)
    with wherry.open(tmp_path / "maxtext") as checkpoint:
        tree = {path: checkpoint.read(path) for path in checkpoint.manifest.tensors}
    padded = {}
    for path, array in tree.items():
        node = padded
        for part in path[:-1]:
            node = node.setdefault(part, {})
        rows = next((axis for axis, extent in enumerate(array.shape) if extent == 60), None)
        widths = [(0, 4 if axis == rows else 0) for axis in range(array.ndim)]
        node[path[-1]] = np.pad(array, widths, constant_values=7) if rows is not None else array
    wherry.export(padded, tmp_path / "padded", to="maxtext", step=1).result(60)
    shutil.copytree(tmp_path / "maxtext" / "items" / "assets", tmp_path / "padded" / "items" / "assets")
    plan = wherry.plan(tmp_path / "padded", tmp_path / "back", to="huggingface", options=CHOICES)
    said = [note for note in plan.notes if "padding" in note]
    assert len(said) == 2
    assert (
        "token_embedder/embedding has 64 entries, of which the last 4 are padding beyond the vocab of 60"
        in str(said)
    )
    receipt = wherry.convert(
        tmp_path / "padded", tmp_path / "back", to="huggingface", options=CHOICES, lineage=False
    )
    assert receipt.target.tensors == len(tensors)
    for name, array in load_file(tmp_path / "back" / WEIGHTS).items():
        np.testing.assert_allclose(array, tensors[name], rtol=1e-6, err_msg=name)


def further_layer(tensors, number):
    """A layer of multi-token prediction, as DeepSeek publishes it: a layer with experts, and modules around it."""
    last = f"model.layers.{number - 1}."
    start = f"model.layers.{number}."
    rng = np.random.default_rng(3)
    embedding = tensors["model.embed_tokens.weight"]
    width = embedding.shape[1]
    return {
        **{name.replace(last, start): array + 1 for name, array in tensors.items() if name.startswith(last)},
        f"{start}eh_proj.weight": rng.normal(size=(width, 2 * width)).astype("f4"),
        f"{start}enorm.weight": np.ones(width, "f4"),
        f"{start}hnorm.weight": np.ones(width, "f4"),
        f"{start}shared_head.norm.weight": np.ones(width, "f4"),
        f"{start}shared_head.head.weight": embedding + 1,
        f"{start}embed_tokens.weight": embedding,
    }


def test_layers_that_predict_further_tokens(made_of_counts, tmp_path):
    folder, tensors = made_of_counts("deepseek-v3")
    more = further_layer(tensors, 2)
    put(folder, {**tensors, **more}, num_nextn_predict_layers=1)
    left = {row.path[0]: row for row in carried(folder, tmp_path / "maxtext", "maxtext")}
    assert left.keys() == more.keys()
    assert {row.rule for row in left.values()} == {"huggingface: model.layers.2.*"}
    assert all("predicts further tokens" in row.reason for row in left.values())
    again = wherry.convert(folder, tmp_path / "again", to="huggingface", lineage=False)
    assert again.target.weights_digest == again.source.weights_digest
    layout = LayoutRequest(dtype="bfloat16")
    wherry.convert(folder, tmp_path / "half", to="huggingface", layout=layout, lineage=False)
    with wherry.open(tmp_path / "half") as checkpoint:
        specs = {path[0]: spec.dtype for path, spec in checkpoint.manifest.tensors.items()}
        assert specs.keys() == tensors.keys() | more.keys()
        assert {specs[name] for name in tensors} == {"bfloat16"}
        for name, array in more.items():  # a module that no layout knows is carried as it is
            assert checkpoint.read((name,)).tobytes() == array.tobytes()
    put(folder, {**tensors, **{name: one for name, one in more.items() if "eh_proj" not in name}})
    refused_of_counts(folder, UnrepresentableError, "model.layers.2.embed_tokens.weight")


def test_second_copies_and_buffers_are_named(made_of_counts, tmp_path):
    folder, tensors = made_of_counts("t5")
    copies = {f"{one}.embed_tokens.weight": tensors["shared.weight"] for one in ("encoder", "decoder")}
    copies["lm_head.weight"] = tensors["shared.weight"]
    put(folder, {**tensors, **copies}, transformers_version="4.46.3")
    left = carried(folder, tmp_path / "t5x", "t5x-legacy")
    assert {row.path[0] for row in left} == copies.keys()
    assert all("second copy" in row.reason for row in left)
    with wherry.open(tmp_path / "t5x") as checkpoint:
        assert not any("logits_dense" in path for path in checkpoint.manifest.tensors)


def test_a_head_that_transformers_5_saved_is_no_copy(made_of_counts, tmp_path):
    """transformers 4 loads the embedding in its place, transformers 5 the head, and scales its input too."""
    folder, tensors = made_of_counts("t5")
    put(folder, {**tensors, "lm_head.weight": tensors["shared.weight"] + 1})
    refused_of_counts(folder, UnrepresentableError, "scaled_output is True", to="t5x-legacy")
    again = wherry.convert(folder, tmp_path / "again", to="huggingface", lineage=False)
    assert again.target.weights_digest == again.source.weights_digest


def test_frequencies_of_old_files_are_named(made_of_counts, tmp_path):
    folder, tensors = made_of_counts("llama")
    names = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": np.ones(4, "f4") for layer in range(2)}
    put(folder, {**tensors, **names})
    assert {row.path[0] for row in carried(folder, tmp_path / "maxtext", "maxtext")} == names.keys()


@pytest.mark.parametrize("label", ["t5-1.1", "mt5"])
def test_a_head_of_its_own_is_not_scaled_and_the_config_says_so(label, made_of_counts, tmp_path):
    """transformers 5 writes `tie_word_embeddings` true into the config of a T5 whose head is its own."""
    folder, tensors = made_of_counts(label)
    head = np.random.default_rng(1).normal(size=(60, 32)).astype("f4")
    put(folder, {**tensors, "lm_head.weight": head})
    carry(folder, tmp_path / "t5x", "t5x-legacy")
    with wherry.open(tmp_path / "t5x") as checkpoint:
        path = ("target", "decoder", "logits_dense", "kernel")
        assert checkpoint.read(path).tobytes() == head.T.tobytes()
    (tmp_path / "t5x" / "config.json").unlink()
    wherry.convert(
        tmp_path / "t5x",
        tmp_path / "back",
        to="huggingface",
        lineage=False,
        layout=LayoutRequest(family="t5"),
    )
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert (config["tie_word_embeddings"], config["scale_decoder_outputs"]) == (False, False)


def test_a_config_of_transformers_4_gains_what_5_0_reads(made_of_counts, tmp_path):
    folder, tensors = made_of_counts("t5-1.1")
    head = np.random.default_rng(1).normal(size=(60, 32)).astype("f4")
    put(folder, {**tensors, "lm_head.weight": head}, tie_word_embeddings=False)
    config = json.loads((folder / "config.json").read_text())
    config.pop("scale_decoder_outputs")
    (folder / "config.json").write_text(json.dumps(config))
    carry(folder, tmp_path / "t5x", "t5x-legacy")
    carry(tmp_path / "t5x", tmp_path / "back", "huggingface")
    back = json.loads((tmp_path / "back" / "config.json").read_text())
    config.pop("dtype")
    assert back == {**config, "scale_decoder_outputs": False, "torch_dtype": "float32"}


@pytest.mark.parametrize("scaled", [True, False])
def test_a_new_type_does_not_change_whether_the_output_is_scaled(scaled, made_of_counts, tmp_path):
    """transformers 5 has models that are tied and not scaled."""
    folder, _tensors = made_of_counts("t5", tie_word_embeddings=scaled)
    layout = LayoutRequest(dtype="bfloat16")
    wherry.convert(folder, tmp_path / "half", to="huggingface", layout=layout, lineage=False)
    config = json.loads((tmp_path / "half" / "config.json").read_text())
    assert (config["tie_word_embeddings"], config["scale_decoder_outputs"]) == (True, scaled)


def test_a_tied_head_is_scaled_and_the_config_says_so(made_of_counts, tmp_path):
    folder, _tensors = made_of_counts("t5")
    carry(folder, tmp_path / "t5x", "t5x-legacy")
    (tmp_path / "t5x" / "config.json").unlink()
    wherry.convert(
        tmp_path / "t5x",
        tmp_path / "back",
        to="huggingface",
        lineage=False,
        layout=LayoutRequest(family="t5"),
    )
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert (config["tie_word_embeddings"], config["scale_decoder_outputs"]) == (True, True)


def test_a_tied_head_that_is_not_scaled_becomes_a_head_of_its_own(made_of_counts, tmp_path):
    """T5X divides where the logits come from the embedding, so they come from a copy of it."""
    folder, tensors = made_of_counts("t5", tie_word_embeddings=False)
    assert "lm_head.weight" not in tensors
    carry(folder, tmp_path / "t5x", "t5x-legacy")
    carry(tmp_path / "t5x", tmp_path / "back", "huggingface")
    back = load_file(tmp_path / "back" / WEIGHTS)
    assert back["lm_head.weight"].tobytes() == tensors["shared.weight"].tobytes()
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert (config["tie_word_embeddings"], config["scale_decoder_outputs"]) == (False, False)
